/*
 * Wrong calls of every public function: an error with a message that names the argument and the
 * value, and no crash. A function of include/onebit that no call is made of fails the test.
 */
#include "tests/support.h"
#include "tests/support_wrong_calls.h"

static void make_all(void) {
  struct wrong_scene scene;
  cr_assert(wrong_scene_make(&scene));
  wrong_communicators(&scene);
  wrong_plans(&scene);
  wrong_collectives(&scene);
  wrong_creations(&scene);
  wrong_steps(&scene);
  wrong_looks(&scene);
  wrong_checkpoints(&scene);
  wrong_outers(&scene);
  wrong_scene_end(&scene);
}

Test(wrong_calls, are_errors_with_a_message) {
  make_all();
  cr_expect_eq(wrong_failed(), 0, "%zu of %zu", wrong_failed(), wrong_made());
  cr_expect_geq(wrong_made(), 120);
  fprintf(stderr, "%zu wrong calls\n", wrong_made());
}

/* Functions of mpi.h and mpi_calls.h are in mpi_wrong_calls.c, those of cuda.h and nccl.h in
 * tests/gpu. */
Test(wrong_calls, are_made_of_every_function) {
  static const char *const headers[] = {
      "adam",           "checkpoint", "collectives",   "communicator", "counters",  "custom",
      "efficient_adam", "lamb",       "lion",          "momentum",     "optimizer", "statistics",
      "plan",           "status",     "zero_one_adam", "outer",        "sockets"};
  size_t found = 0;
  make_all();
  for (size_t k = 0; k < sizeof headers / sizeof headers[0]; k++)
    found += wrong_check_header(headers[k]);
  cr_expect_geq(found, 49, "%zu functions were found", found);
  cr_expect_eq(wrong_failed(), 0, "%zu of %zu", wrong_failed(), wrong_made());
}

/* ---- One rank of several ---- */

/* Rank 1 makes the call with `wrong`, the others with `right`: it gets `status`, and they learn of
 * it. */
#define ONE_RANK(function, right, wrong, status, part)                                             \
  (rank == 1 ? WRONG(function, wrong, status, part)                                                \
             : WRONG(function, right, ONEBIT_ERROR_PEER, "rank 1"))
#define ARGUMENT ONEBIT_ERROR_ARGUMENT

/* Makes wrong calls that test_disagreement.c has not: a handle that is none, or of another kind.
 * The own call is refused where it stands; the others wait until it makes the right one. */
static void one_wrong_call(onebit_comm_t comm, int rank) {
  float send[WRONG_COUNT] = {1}, receive[WRONG_COUNT];
  onebit_plan_t plan = NULL;
  CHECK_STATUS(onebit_plan_create(comm, WRONG_COUNT / 2, NULL, &plan), ONEBIT_OK);
  if (rank == 1)
    WRONG(onebit_iallreduce, (send, receive, plan, NULL), ARGUMENT, "request is NULL");
  else
    WRONG(onebit_allreduce, (send, receive, plan), ONEBIT_ERROR_PEER, "rank 1");
  if (rank == 1) {
    WRONG(onebit_allreduce, (send, receive, NULL), ARGUMENT, "plan is NULL");
    WRONG(onebit_allreduce, (send, receive, (onebit_plan_t)(void *)comm), ARGUMENT,
          "which is a communicator");
  }
  CHECK_STATUS(onebit_allreduce(send, receive, plan), ONEBIT_OK);
  CHECK(receive[0] > 0, "the call after the wrong ones gave %g", (double)receive[0]);
  onebit_plan_destroy(plan);
}

static void one_wrong_optimizer(onebit_comm_t comm, int rank) {
  float p[8] = {0}, g[8] = {1};
  onebit_tensor_t tensor = {.parameter = p, .gradient = g, .count = 8}, none = {.count = 8};
  onebit_optimizer_t optimizer = NULL;
  ONE_RANK(onebit_lion_create, (comm, &tensor, 1, NULL, &optimizer),
           (comm, &none, 1, NULL, &optimizer), ARGUMENT, "tensors[0].parameter is NULL");
  ONE_RANK(onebit_adam_create, (comm, &tensor, 1, NULL, &optimizer),
           (comm, NULL, 1, NULL, &optimizer), ARGUMENT, "tensors is NULL");
}

static void one_wrong_rank(onebit_comm_t comm, void *context) {
  int rank = onebit_comm_rank(comm);
  (void)context;
  one_wrong_call(comm, rank);
  one_wrong_optimizer(comm, rank);
}

Test(wrong_calls, of_one_rank_are_told_to_the_others) {
  on_ranks(2, one_wrong_rank, NULL);
  on_hosts(4, 2, one_wrong_rank, NULL);
  cr_expect_eq(wrong_failed(), 0, "%zu of %zu", wrong_failed(), wrong_made());
  fprintf(stderr, "%zu calls of which one rank's is wrong\n", wrong_made());
}
