/*
 * Steps in buckets and in parts, beside what test_optimizers.c has: a bucket leaves when it is
 * ready; and of several outcomes of a step one counts, on all ranks alike.
 */
#include "base/error.h"
#include "optimizers/optimizer.h"
#include "tests/support.h"

/* A bucket leaves when its last gradient is ready; the last bucket with the step. */
static void check_departures(onebit_comm_t comm, void *context) {
  enum { EACH = 500, TENSORS = 6 }; /* two tensors a bucket */
  static const bool leaves[TENSORS] = {false, true, false, true, false, false};
  float parameters[TENSORS * EACH] = {0}, gradients[TENSORS * EACH];
  onebit_tensor_t tensors[TENSORS];
  onebit_optimizer_t optimizer = NULL;
  (void)context;
  onebit_adam_options_t options = {
      .size = sizeof options, .freeze_step = 2, .common.bucket_size = 2 * EACH};
  for (int t = 0; t < TENSORS; t++)
    tensors[t] = (onebit_tensor_t){parameters + t * EACH, gradients + t * EACH, EACH, 0, 0, 0};
  fill_input(gradients, ONEBIT_FLOAT32, TENSORS * EACH, onebit_comm_rank(comm), 0);
  CHECK_STATUS(onebit_adam_create(comm, tensors, TENSORS, &options, &optimizer), ONEBIT_OK);
  for (int step = 0; step < 4; step++) {
    CHECK_STATUS(onebit_optimizer_begin(optimizer, 0.1f), ONEBIT_OK);
    for (size_t k = 0; k < TENSORS; k++) {
      uint64_t before = onebit_comm_bytes_sent(comm);
      CHECK_STATUS(onebit_optimizer_ready(optimizer, TENSORS - 1 - k), ONEBIT_OK);
      CHECK(!leaves[k] || onebit_comm_bytes_sent(comm) > before, "step %d: nothing left with %zu",
            step, k);
    }
    uint64_t before = onebit_comm_bytes_sent(comm);
    CHECK_STATUS(onebit_optimizer_step(optimizer, 0.1f), ONEBIT_OK);
    CHECK(onebit_comm_bytes_sent(comm) > before, "step %d: nothing left with the step", step);
  }
  onebit_optimizer_destroy(optimizer);
}

Test(buckets, leave_when_they_are_ready) {
  for (int size = 2; size <= 4; size++)
    on_ranks(size, check_departures, NULL);
}

/* An error of some bucket, or step, counts more than skips, and the first error counts, on all
 * ranks alike. */
Test(buckets, an_error_counts_more_than_a_skip) {
  static const onebit_status_t came[][2] = {
      {ONEBIT_SKIPPED, ONEBIT_ERROR_TRANSPORT},
      {ONEBIT_ERROR_TRANSPORT, ONEBIT_SKIPPED},
      {ONEBIT_ERROR_TRANSPORT, ONEBIT_ERROR_PEER},
  };
  float parameter = 0, gradient = 0;
  const onebit_tensor_t tensor = {.parameter = &parameter, .gradient = &gradient, .count = 1};
  onebit_optimizer_t optimizer = NULL;
  onebit_comm_t comm = self_comm();
  CHECK_STATUS(onebit_adam_create(comm, &tensor, 1, NULL, &optimizer), ONEBIT_OK);
  for (size_t k = 0; k < 3; k++) {
    for (size_t i = 0; i < 2; i++)
      ob_optimizer_note(optimizer, ob_error(came[k][i], "number %zu", i));
    CHECK_STATUS(ob_optimizer_end_outcome(optimizer), ONEBIT_ERROR_TRANSPORT);
    CHECK_WORDS(k ? "number 0" : "number 1");
    CHECK_STATUS(ob_optimizer_end_outcome(optimizer), ONEBIT_OK);
  }
  onebit_optimizer_destroy(optimizer);
  onebit_comm_destroy(comm);
}
