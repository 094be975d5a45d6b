/*
 * Tests moving optimizers to other communicators. With the same ranks a move is exact: a run that
 * is moved after every step has the bits of a run that is not moved. A rank that joins gets the
 * same replica as the others.
 */
#include <pthread.h>
#include <stdatomic.h>

#include "tests/support.h"
#include "tests/support_checkpoint.h"
#include "tests/support_optimizers.h"

enum { MAX_RANKS = 8, MAX_MOVES = 32 };

static bool is_synchronized(const struct trainee *trainee) {
  return optimizer_info(trainee->optimizer).synchronized;
}

/* --- With the same ranks -----------------------------------------------------------------------*/

struct same_run {
  struct checkpoint_case what;
  onebit_comm_t comms[MAX_MOVES][MAX_RANKS]; /* communicators to move to after each step */
};

static void move_after_every_step(onebit_comm_t comm, void *context) {
  struct same_run *run = context;
  const struct checkpoint_case *what = &run->what;
  struct trainee moved = trainee_create(comm, what, 0), other = trainee_create(comm, what, 0);
  for (int step = 0; moved.optimizer && step < what->steps; step++) {
    check_case("%s, step %d", what->name, step);
    trainee_step(&moved, step);
    trainee_step(&other, step);
    CHECK_BITS("parameters", moved.parameters, other.parameters, TRAINEE_ELEMENTS,
               what->common.parameter_dtype);
    if (is_synchronized(&moved)) /* between synchronisations a move takes means of ranks, which
                                  * the other run does not */
      CHECK_STATUS(onebit_optimizer_move(moved.optimizer, run->comms[step][moved.rank]), ONEBIT_OK);
  }
  trainee_destroy(&moved);
  trainee_destroy(&other);
}

static void check_same(const struct checkpoint_case *what) {
  struct same_run run = {.what = *what};
  int hosts = what->hosts ? what->hosts : 1;
  for (int step = 0; step < what->steps; step++)
    CHECK_STATUS(onebit_comm_create_loopback_hosts(what->size, hosts, run.comms[step]), ONEBIT_OK);
  on_hosts(what->size, hosts, move_after_every_step, &run);
  for (int step = 0; step < what->steps; step++)
    for (int rank = 0; rank < what->size; rank++)
      onebit_comm_destroy(run.comms[step][rank]);
}

Test(move, the_same_ranks_go_on_exactly) {
  for (size_t k = 0; k < checkpoint_cases_count; k++)
    check_same(&checkpoint_cases[k]);
}

/* --- Ranks that leave and ranks that join
 * ------------------------------------------------------- */

/* The last rank leaves after `steps` steps. The other ranks continue. After `more` further steps
 * another rank joins them, as rank `place`. */
struct change {
  struct checkpoint_case what, fewer;
  int steps, more, place;
  onebit_comm_t left[MAX_RANKS], back[MAX_RANKS];
  unsigned char *parameters; /* of all ranks, by their number on the current communicator */
  pthread_barrier_t few, many;
};

/* Compares parameters at steps where they must be the same on all ranks. */
static void compare_parameters(struct change *change, const struct trainee *trainee, int rank,
                               pthread_barrier_t *barrier) {
  size_t bytes = trainee_parameter_bytes(&change->what);
  memcpy(change->parameters + (size_t)rank * bytes, trainee->parameters, bytes);
  pthread_barrier_wait(barrier);
  if (is_synchronized(trainee))
    CHECK_BITS("parameters", trainee->parameters, change->parameters, TRAINEE_ELEMENTS,
               change->what.common.parameter_dtype);
  pthread_barrier_wait(barrier);
}

static void move_back_and_train(struct change *change, struct trainee *trainee, int rank) {
  CHECK_STATUS(onebit_optimizer_move(trainee->optimizer, change->back[rank]), ONEBIT_OK);
  trainee->rank = rank;
  trainee->what = &change->what;
  compare_parameters(change, trainee, rank, &change->many);
  for (int step = change->steps + change->more; step < change->what.steps; step++) {
    trainee_step(trainee, step);
    compare_parameters(change, trainee, rank, &change->many);
  }
}

static void train_without_lost_rank(struct change *change, struct trainee *trainee) {
  int rank = trainee->rank;
  CHECK_STATUS(onebit_optimizer_move(trainee->optimizer, change->left[rank]), ONEBIT_OK);
  trainee->what = &change->fewer;
  compare_parameters(change, trainee, rank, &change->few);
  for (int step = change->steps; step < change->steps + change->more; step++) {
    trainee_step(trainee, step);
    compare_parameters(change, trainee, rank, &change->few);
  }
  move_back_and_train(change, trainee, rank + (rank >= change->place));
}

/* The last rank is lost, and later a new rank replaces it. */
static void leave_and_come(onebit_comm_t comm, void *context) {
  struct change *change = context;
  check_case("%s, lost after %d steps", change->what.name, change->steps);
  struct trainee trainee = trainee_create(comm, &change->what, 0);
  for (int step = 0; step < change->steps; step++)
    trainee_step(&trainee, step);
  if (onebit_comm_rank(comm) < change->what.size - 1) {
    train_without_lost_rank(change, &trainee);
  } else {
    trainee_destroy(&trainee);
    onebit_comm_t self = self_comm();
    trainee = trainee_create(self, &change->what, 1);
    move_back_and_train(change, &trainee, change->place);
    onebit_comm_destroy(self);
  }
  trainee_destroy(&trainee);
}

static void check_change(const struct checkpoint_case *what, int steps, int more) {
  struct change change = {.what = *what, .fewer = *what, .steps = steps, .more = more};
  int hosts = what->hosts ? what->hosts : 1;
  change.fewer.size--;
  change.place = steps % what->size;
  change.parameters = allocate((size_t)what->size, trainee_parameter_bytes(what));
  pthread_barrier_init(&change.few, NULL, (unsigned)what->size - 1);
  pthread_barrier_init(&change.many, NULL, (unsigned)what->size);
  CHECK_STATUS(onebit_comm_create_loopback(what->size - 1, change.left), ONEBIT_OK);
  CHECK_STATUS(onebit_comm_create_loopback_hosts(what->size, hosts, change.back), ONEBIT_OK);
  on_hosts(what->size, hosts, leave_and_come, &change);
  for (int rank = 0; rank < what->size; rank++) {
    onebit_comm_destroy(rank < what->size - 1 ? change.left[rank] : NULL);
    onebit_comm_destroy(change.back[rank]);
  }
  pthread_barrier_destroy(&change.few);
  pthread_barrier_destroy(&change.many);
  free(change.parameters);
}

Test(move, ranks_leave_and_come) {
  for (size_t k = 0; k < checkpoint_cases_count; k++) {
    const struct checkpoint_case *what = &checkpoint_cases[k];
    for (int steps = 0; what->size > 1 && steps + 2 <= what->steps; steps += 1 + (int)k % 3)
      check_change(what, steps, 2);
  }
}
