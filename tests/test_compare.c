/* Ranks whose parameters differ get an error that names the tensor; equal ranks go on. */
#include "tests/support.h"

enum { TENSORS = 40, COUNT = 70001, ODD = 33 };

struct learner {
  float large[COUNT], small[TENSORS - 1][ODD], gradient[COUNT];
  onebit_optimizer_t optimizer;
};

static struct learner *begin(onebit_comm_t comm, onebit_dtype_t dtype) {
  struct learner *learner = allocate(1, sizeof *learner);
  onebit_tensor_t tensors[TENSORS] = {
      {.parameter = learner->large, .gradient = learner->gradient, .count = COUNT}};
  for (int t = 1; t < TENSORS; t++)
    tensors[t] = (onebit_tensor_t){.parameter = learner->small[t - 1], .count = ODD};
  onebit_adam_options_t options = {.size = sizeof options, .common.parameter_dtype = dtype};
  CHECK_STATUS(onebit_adam_create(comm, tensors, TENSORS, &options, &learner->optimizer),
               ONEBIT_OK);
  return learner;
}

static void end(struct learner *learner) {
  onebit_optimizer_destroy(learner->optimizer);
  free(learner);
}

static void told(onebit_status_t status, const char *words) {
  CHECK_STATUS(status, ONEBIT_ERROR_MISMATCH);
  CHECK(strstr(onebit_last_error(), words), "'%s', not of %s", onebit_last_error(), words);
}

static void at_the_first_step(onebit_comm_t comm, void *context) {
  (void)context;
  struct learner *learner = begin(comm, ONEBIT_FLOAT32);
  if (onebit_comm_rank(comm) == 2)
    learner->small[37][ODD - 1] = 1e-30f;
  told(onebit_optimizer_step(learner->optimizer, 0.1f), "tensors[38]");
  CHECK(strstr(onebit_last_error(), "rank 2"), "%s", onebit_last_error());
  learner->small[37][ODD - 1] = 0;
  CHECK_STATUS(onebit_optimizer_step(learner->optimizer, 0.1f), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_compare(learner->optimizer), ONEBIT_OK);
  end(learner);
}

Test(compare, at_the_first_step) { on_ranks(3, at_the_first_step, NULL); }

/* In the middle of the large tensor; and the last of an odd number of 16-bit values. */
static void when_asked(onebit_comm_t comm, void *context) {
  (void)context;
  struct learner *learner = begin(comm, ONEBIT_BFLOAT16);
  uint16_t *large = (uint16_t *)learner->large, *small = (uint16_t *)learner->small[0];
  for (int k = 0; k < 3; k++) {
    CHECK_STATUS(onebit_optimizer_compare(learner->optimizer), ONEBIT_OK);
    uint16_t *at = k == 0 ? &large[40000] : k == 1 ? &large[COUNT - 1] : &small[ODD - 1];
    *at ^= (uint16_t)onebit_comm_rank(comm);
    told(onebit_optimizer_compare(learner->optimizer), k < 2 ? "tensors[0]" : "tensors[1]");
    *at ^= (uint16_t)onebit_comm_rank(comm);
  }
  CHECK_STATUS(onebit_optimizer_step(learner->optimizer, 0.1f), ONEBIT_OK);
  end(learner);
}

Test(compare, when_asked) { on_ranks(2, when_asked, NULL); }

static void at_an_interval(onebit_comm_t comm, void *context) {
  (void)context;
  struct learner *learner = begin(comm, ONEBIT_FLOAT32);
  CHECK_STATUS(onebit_optimizer_set_compare_interval(learner->optimizer, 3), ONEBIT_OK);
  for (int step = 1; step <= 3; step++)
    CHECK_STATUS(onebit_optimizer_step(learner->optimizer, 0.1f), ONEBIT_OK);
  learner->large[9] += (float)onebit_comm_rank(comm);
  /* the first step and every third after it compare */
  told(onebit_optimizer_step(learner->optimizer, 0.1f), "tensors[0]");
  CHECK_STATUS(onebit_optimizer_step(learner->optimizer, 0.1f), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_step(learner->optimizer, 0.1f), ONEBIT_OK);
  told(onebit_optimizer_step(learner->optimizer, 0.1f), "tensors[0]");
  CHECK_STATUS(onebit_optimizer_set_compare_interval(learner->optimizer, 0), ONEBIT_OK);
  for (int step = 0; step < 4; step++)
    CHECK_STATUS(onebit_optimizer_step(learner->optimizer, 0.1f), ONEBIT_OK);
  /* in parts, where the others make it in one go */
  CHECK_STATUS(onebit_optimizer_set_compare_interval(learner->optimizer, 1), ONEBIT_OK);
  if (onebit_comm_rank(comm) == 1) {
    CHECK_STATUS(onebit_optimizer_begin(learner->optimizer, 0.1f), ONEBIT_OK);
    CHECK_STATUS(onebit_optimizer_ready(learner->optimizer, 0), ONEBIT_OK);
  }
  told(onebit_optimizer_step(learner->optimizer, 0.1f), "tensors[0]");
  end(learner);
}

Test(compare, at_an_interval) { on_ranks(2, at_an_interval, NULL); }
