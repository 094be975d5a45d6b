/*
 * A rank is lost, at the beginning of a step or in the middle of one, and perhaps another one while
 * the others are about to go on. They go on: onebit_optimizer_shrink, and their replicas are equal
 * to the bit, wherever the loss has met each of them.
 */
#include <stdatomic.h>

#include "tests/support_checkpoint.h"

enum { MAX_RANKS = 8, MAX_STEPS = 32 };

enum moment { BEFORE_A_STEP, IN_A_STEP, AND_ANOTHER_ONE, MOMENTS };

struct loss {
  const struct checkpoint_case *what;
  enum moment moment;
  int step, rank; /* in which the rank is lost */
  /* The survivors' results, by their number at first: steps made when they went on, and parameters
   * after each step, or NULL. */
  unsigned char *parameters[MAX_RANKS][MAX_STEPS + 1];
  atomic_int went_on;
};

static size_t parameter_bytes(const struct checkpoint_case *what) {
  return TRAINEE_ELEMENTS * dtype_size(what->common.parameter_dtype);
}

static float rate_of(int step) { return 1e-3f * (float)(1 + step % 3); }

/* Ends as a process does that is killed: nobody hears of it but by its silence. */
static void die(struct loss *loss, struct trainee *trainee, onebit_comm_t comm, int step) {
  if (loss->moment == IN_A_STEP && onebit_optimizer_begin(trainee->optimizer, rate_of(step)) == 0)
    for (size_t t = 3; t < TRAINEE_TENSORS; t++)
      onebit_optimizer_ready(trainee->optimizer, t);
  onebit_comm_abort(comm);
  onebit_optimizer_destroy(trainee->optimizer);
  trainee->optimizer = NULL;
}

static void note(struct loss *loss, const struct trainee *trainee, int rank) {
  onebit_optimizer_info_t info = optimizer_info(trainee->optimizer);
  size_t bytes = parameter_bytes(loss->what);
  unsigned char **copy = &loss->parameters[rank][info.steps];
  if (!info.synchronized)
    return;
  if (!*copy)
    *copy = allocate(1, bytes);
  memcpy(*copy, trainee->parameters, bytes);
}

/* The first that is left goes as well, between its two calls. */
static bool is_second(const struct loss *loss, int rank) {
  return loss->moment == AND_ANOTHER_ONE && rank == (loss->rank + 1) % loss->what->size;
}

static onebit_comm_t go_on(struct loss *loss, struct trainee *trainee, onebit_comm_t comm,
                           int rank) {
  onebit_comm_t survivors = NULL;
  if (is_second(loss, rank)) {
    CHECK_STATUS(onebit_comm_shrink(comm, &survivors), ONEBIT_OK);
    onebit_comm_destroy(survivors);
    onebit_optimizer_destroy(trainee->optimizer);
    trainee->optimizer = NULL;
    return NULL;
  }
  int fewer = loss->moment == AND_ANOTHER_ONE ? 2 : 1;
  CHECK_STATUS(onebit_optimizer_shrink(trainee->optimizer, &survivors), ONEBIT_OK);
  CHECK(onebit_comm_size(survivors) == loss->what->size - fewer, "%d ranks are left",
        onebit_comm_size(survivors));
  atomic_fetch_add(&loss->went_on, 1);
  note(loss, trainee, rank);
  return survivors;
}

static void run(onebit_comm_t first, void *context) {
  struct loss *loss = context;
  const struct checkpoint_case *what = loss->what;
  int rank = onebit_comm_rank(first), step = 0;
  onebit_comm_t comm = first;
  struct trainee trainee = trainee_create(comm, what, 0);
  check_case("%s, moment %d of step %d", what->name, loss->moment, loss->step);
  while (trainee.optimizer && (step = (int)optimizer_info(trainee.optimizer).steps) < what->steps) {
    if (step == loss->step && rank == loss->rank) {
      die(loss, &trainee, comm, step);
      break;
    }
    fill_input(trainee.gradients, what->common.gradient_dtype, TRAINEE_ELEMENTS, rank, step);
    onebit_status_t status = onebit_optimizer_step(trainee.optimizer, rate_of(step));
    if (status == ONEBIT_OK) {
      note(loss, &trainee, rank);
      continue;
    }
    bool lost = comm == first && (status == ONEBIT_ERROR_TRANSPORT || status == ONEBIT_ERROR_PEER);
    if (!CHECK(lost, "step %d: %s", step, onebit_last_error()))
      break;
    onebit_comm_t next = go_on(loss, &trainee, comm, rank);
    comm = next;
  }
  trainee_destroy(&trainee);
  if (comm != first)
    onebit_comm_destroy(comm);
}

/* Compares the parameters that the survivors have after they went on. */
static void compare(struct loss *loss) {
  const struct checkpoint_case *what = loss->what;
  int rank0 = -1, compared = 0;
  for (int rank = 0; rank < what->size; rank++) {
    if (rank == loss->rank || is_second(loss, rank))
      continue;
    rank0 = rank0 < 0 ? rank : rank0;
    for (int step = loss->step + 1; step <= what->steps; step++) {
      unsigned char **copies = loss->parameters[rank], **first = loss->parameters[rank0];
      CHECK(!copies[step] == !first[step], "rank %d, step %d: there or not", rank, step);
      if (copies[step] && first[step])
        compared += CHECK_BITS("parameters", copies[step], first[step], TRAINEE_ELEMENTS,
                               what->common.parameter_dtype);
    }
  }
  CHECK(compared > 0 && loss->went_on > 0, "nobody went on");
}

static void check_loss(const struct checkpoint_case *what, enum moment moment, int step, int rank) {
  struct loss loss = {.what = what, .moment = moment, .step = step, .rank = rank};
  on_hosts(what->size, what->hosts ? what->hosts : 1, run, &loss);
  check_case("%s, moment %d of step %d", what->name, (int)moment, step);
  compare(&loss);
  checks_must_hold();
  for (int r = 0; r < MAX_RANKS; r++)
    for (int s = 0; s <= MAX_STEPS; s++)
      free(loss.parameters[r][s]);
}

static void check_moment(enum moment moment) {
  for (size_t k = 0; k < checkpoint_cases_count; k++) {
    const struct checkpoint_case *what = &checkpoint_cases[k];
    int fewer = moment == AND_ANOTHER_ONE ? 2 : 1;
    for (int step = (int)k % 2; what->size > fewer && step + 1 < what->steps; step += 3)
      check_loss(what, moment, step, (step + (int)k) % what->size);
  }
}

Test(survive, before_a_step) { check_moment(BEFORE_A_STEP); }
Test(survive, in_a_step) { check_moment(IN_A_STEP); }
Test(survive, and_another_one) { check_moment(AND_ANOTHER_ONE); }
