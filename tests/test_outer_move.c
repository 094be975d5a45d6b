/*
 * Tests moving outer steps to other communicators. With the same ranks and nothing in flight a move
 * is exact. After a rank is lost or joins, all ranks must have the same consensus, even if some had
 * made more steps, and the mean of their residuals must be unchanged.
 */
#include "optimizers/outer/outer.h"
#include "tests/support_outer.h"
#include <sched.h>
#include <stdatomic.h>

enum { RANKS = 4, STEPS = 11 };

/* --- With the same ranks -----------------------------------------------------------------------*/

struct same {
  onebit_outer_options_t options;
  onebit_comm_t comms[STEPS + 1][RANKS];
};

static void move_after_every_step(onebit_comm_t comm, void *context) {
  struct same *run = context;
  struct outer_trained *moved = outer_begin(comm, &run->options);
  struct outer_trained *other = outer_begin(comm, &run->options);
  for (int number = 1; number <= STEPS; number++) {
    CHECK_STATUS(outer_train(moved, number, false), ONEBIT_OK);
    CHECK_STATUS(outer_train(other, number, false), ONEBIT_OK);
    CHECK_BITS("the parameters", moved->p, other->p, OUTER_ELEMENTS, ONEBIT_FLOAT32);
    CHECK_STATUS(onebit_outer_move(moved->outer, run->comms[number][moved->rank]), ONEBIT_OK);
  }
  onebit_outer_destroy(moved->outer);
  onebit_outer_destroy(other->outer);
  free(moved);
  free(other);
}

Test(outer_move, the_same_ranks_go_on_exactly) {
  static const int widths[] = {1, 4, ONEBIT_OUTER_DENSE, ONEBIT_OUTER_SPARSE};
  for (size_t k = 0; k < 4; k++) {
    struct same run = {.options = outer_options(widths[k], (onebit_outer_rule_t)(k % 3))};
    run.options.fragments = 1 + k % 2;
    run.options.weighted = k >= 2;
    for (int number = 1; number <= STEPS; number++)
      CHECK_STATUS(onebit_comm_create_loopback(3, run.comms[number]), ONEBIT_OK);
    on_ranks(3, move_after_every_step, &run);
    for (int number = 1; number <= STEPS; number++)
      for (int rank = 0; rank < 3; rank++)
        onebit_comm_destroy(run.comms[number][rank]);
  }
}

/* --- Ranks that leave and ranks that join
 * ------------------------------------------------------- */

/* The last rank leaves after `steps` steps, and the others continue. After two more steps it joins
 * again, as a rank that has made no step. */
struct change {
  onebit_outer_options_t options;
  int size, steps;
  onebit_comm_t left[RANKS], back[RANKS];
  struct saved_parts parts[4]; /* before and after each move */
  float x[RANKS][OUTER_ELEMENTS];
};

/* Continues the training, and checks that all ranks end with equal parameters. */
static void train_to_end(struct change *change, struct outer_trained *it, onebit_comm_t comm) {
  for (int number = 0; number < 9; number++)
    CHECK_STATUS(outer_train(it, change->steps + 3 + number, false), ONEBIT_OK);
  CHECK_STATUS(onebit_outer_synchronize(it->outer), ONEBIT_OK);
  const onebit_outer_info_t info = outer_info(it->outer);
  CHECK(info.in_flight == 0 && isfinite(info.drift_norm), "in flight: %d", info.in_flight);
  memcpy(change->x[onebit_comm_rank(comm)], it->p, sizeof it->p);
  synchronize_ranks(comm);
  CHECK_BITS("the parameters", it->p, change->x[0], OUTER_ELEMENTS, ONEBIT_FLOAT32);
  synchronize_ranks(comm);
}

static void move_and_train(struct change *change, struct outer_trained *it) {
  onebit_comm_t left = change->left[it->rank], back = change->back[it->rank];
  const bool idle = change->options.delay == 0;
  if (idle)
    outer_save(it, left, &change->parts[0]);
  CHECK_STATUS(onebit_outer_move(it->outer, left), ONEBIT_OK);
  if (idle)
    outer_save(it, left, &change->parts[1]);
  for (int number = 1; number <= 2; number++)
    CHECK_STATUS(outer_train(it, change->steps + number, false), ONEBIT_OK);
  if (idle)
    outer_save(it, left, &change->parts[2]);
  CHECK_STATUS(onebit_outer_move(it->outer, back), ONEBIT_OK);
  if (idle)
    outer_save(it, back, &change->parts[3]);
  train_to_end(change, it, back);
}

static void join_and_train(struct change *change, struct outer_trained *it) {
  const int place = change->size - 1;
  onebit_comm_t self, back = change->back[place];
  CHECK_STATUS(onebit_comm_create_self(&self), ONEBIT_OK);
  outer_create(it, self, &change->options);
  it->rank = place;
  CHECK_STATUS(onebit_outer_move(it->outer, back), ONEBIT_OK);
  onebit_comm_destroy(self);
  if (!change->options.delay)
    outer_save(it, back, &change->parts[3]);
  train_to_end(change, it, back);
}

static void leave_and_come(onebit_comm_t comm, void *context) {
  struct change *change = context;
  struct outer_trained *it = outer_begin(comm, &change->options);
  outer_train_to(it, 1, change->steps);
  synchronize_ranks(change->back[it->rank]); /* does not use comm, which the moved ranks have
                                              * freed */
  if (it->rank < change->size - 1) {
    move_and_train(change, it);
  } else {
    onebit_outer_destroy(it->outer);
    join_and_train(change, it);
  }
  outer_end(it);
}

/* Returns the drift that has not been exchanged, as a mean over the ranks: the consensus minus
 * their parameters, plus the servers' residuals. */
static double *outstanding_drift(const struct saved_parts *parts, const float *x) {
  double *mean = parts_mean(parts, SECTION_PARAMETERS);
  float *server = parts_values(parts, SECTION_SERVER);
  for (size_t i = 0; i < OUTER_ELEMENTS; i++)
    mean[i] = (double)x[i] - mean[i] + (isnan(server[i]) ? 0 : (double)server[i]);
  free(server);
  return mean;
}

/* Checks the drift that was not exchanged before a move. If ranks join, the drift of the steps
 * since the exchange is divided among more ranks, but the values that the residuals held back are
 * not. */
static void check_outstanding(const struct change *change, int before) {
  const struct saved_parts *parts = &change->parts[before], *after = parts + 1;
  float *x = parts_values(after, SECTION_CONSENSUS); /* a move leaves it as it is */
  double *held = outer_mean_residual(parts), *was = outstanding_drift(parts, x),
         *is = outstanding_drift(after, x);
  const double part = (double)parts->count / after->count;
  for (size_t i = 0; i < OUTER_ELEMENTS; i++) {
    const double wanted = held[i] + part * (was[i] - held[i]);
    if (!CHECK(fabs(is[i] - wanted) <= 4e-6, "move %d: outstanding[%zu]: %g, not %g", before, i,
               is[i], wanted))
      break;
  }
  free(x);
  free(held);
  free(was);
  free(is);
}

/* Checks that the mean residual and the consensus of a part are the same before and after a
 * move. */
static void check_mean(struct change *change, int before) {
  struct saved_parts *parts = &change->parts[before];
  double *held = outer_mean_residual(parts), *now = outer_mean_residual(&change->parts[before + 1]);
  float *x = parts_values(parts, SECTION_CONSENSUS);
  float *after = parts_values(&change->parts[before + 1], SECTION_CONSENSUS);
  for (size_t i = 0; i < OUTER_ELEMENTS; i++)
    if (!CHECK(fabs(held[i] - now[i]) <= 2e-6, "move %d: held_back[%zu]: %g became %g", before, i,
               held[i], now[i]))
      break;
  if (before) /* the parts before the first move include only some of the lost rank's state */
    CHECK_BITS("the consensus", after, x, OUTER_ELEMENTS, ONEBIT_FLOAT32);
  free(held);
  free(now);
  free(x);
  free(after);
}

static void change_ranks(const onebit_outer_options_t *options, int size, int steps) {
  struct change *change = allocate(1, sizeof *change);
  change->options = *options;
  change->size = size;
  change->steps = steps;
  check_case("%d ranks, %d bits, after %d steps", size, options->bits, steps);
  CHECK_STATUS(onebit_comm_create_loopback(size - 1, change->left), ONEBIT_OK);
  CHECK_STATUS(onebit_comm_create_loopback(size, change->back), ONEBIT_OK);
  on_ranks(size, leave_and_come, change);
  for (int k = 0; k < 4 && !options->delay; k += 2) {
    change->parts[k].count = size - 1;
    check_mean(change, k);
    if (options->bits != ONEBIT_OUTER_SPARSE)
      check_outstanding(change, k);
  }
  checks_must_hold();
  for (int rank = 0; rank < size; rank++) {
    onebit_comm_destroy(rank < size - 1 ? change->left[rank] : NULL);
    onebit_comm_destroy(change->back[rank]);
  }
  for (int k = 0; k < 4; k++)
    free_parts(&change->parts[k]);
  free(change);
}

Test(outer_move, ranks_leave_and_come) {
  static const int widths[] = {1, 4, ONEBIT_OUTER_SPARSE, ONEBIT_OUTER_DENSE};
  for (size_t k = 0; k < 4; k++)
    for (int steps = 4; steps <= 7; steps++) {
      onebit_outer_options_t options = outer_options(widths[k], (onebit_outer_rule_t)(k % 3));
      options.weighted = steps % 2;
      change_ranks(&options, 2 + (int)k % 3, steps);
      options.delay = 3;
      options.fragments = 2;
      change_ranks(&options, 3, steps);
    }
}

/* --- Ranks that have made different numbers of steps
 * ------------------------------------------- */

struct apart {
  onebit_comm_t next[RANKS];
  float x[RANKS][OUTER_ELEMENTS], m[RANKS][OUTER_ELEMENTS];
};

/* Moves ranks of which rank 1 has not seen the end of the latest exchange. */
static void move_with_rank_behind(onebit_comm_t comm, void *context) {
  struct apart *apart = context;
  const onebit_outer_options_t options = outer_options(1, ONEBIT_OUTER_MOMENTUM);
  struct outer_trained *it = outer_begin(comm, &options);
  struct ob_fragment *fragment = &it->outer->fragments[0];
  const size_t bytes = OUTER_ELEMENTS * sizeof(float);
  for (int number = 1; number <= 9; number++) {
    if (number == 8 && it->rank == 1) {
      memcpy(apart->x[1], fragment->consensus, bytes);
      memcpy(apart->m[1], fragment->momentum, bytes);
    }
    CHECK_STATUS(outer_train(it, number, false), ONEBIT_OK);
  }
  if (it->rank == 1) {
    memcpy(fragment->consensus, apart->x[1], bytes);
    memcpy(fragment->momentum, apart->m[1], bytes);
    it->outer->exchanges--;
  }
  CHECK_STATUS(onebit_outer_move(it->outer, apart->next[it->rank]), ONEBIT_OK);
  memcpy(apart->x[it->rank], fragment->consensus, bytes);
  memcpy(apart->m[it->rank], fragment->momentum, bytes);
  synchronize_ranks(comm);
  CHECK_BITS("the consensus", fragment->consensus, apart->x[0], OUTER_ELEMENTS, ONEBIT_FLOAT32);
  CHECK_BITS("the momentum", fragment->momentum, apart->m[0], OUTER_ELEMENTS, ONEBIT_FLOAT32);
  if (it->rank == 1)
    CHECK_BITS("the parameters", it->p, fragment->consensus, OUTER_ELEMENTS, ONEBIT_FLOAT32);
  outer_train_to(it, 10, 13);
  outer_end(it);
}

Test(outer_move, a_rank_that_is_behind_gets_what_the_others_have) {
  struct apart *apart = allocate(1, sizeof *apart);
  CHECK_STATUS(onebit_comm_create_loopback(3, apart->next), ONEBIT_OK);
  on_ranks(3, move_with_rank_behind, apart);
  for (int rank = 0; rank < 3; rank++)
    onebit_comm_destroy(apart->next[rank]);
  free(apart);
}

/* --- A rank is lost ----------------------------------------------------------------------------*/

struct loss {
  onebit_outer_options_t options;
  int size, step;      /* step: rank size - 1 leaves before this step */
  atomic_int finished; /* ranks that have made all steps before that step */
  float x[RANKS][OUTER_ELEMENTS];
};

static uint64_t step_count(const struct outer_trained *it) { return outer_info(it->outer).steps; }

/* Makes steps until one fails, and 12 more without the lost rank. */
static void train_until_lost(struct loss *loss, struct outer_trained *it) {
  onebit_comm_t survivors = NULL;
  onebit_status_t status = ONEBIT_OK;
  for (int number = loss->step; status == ONEBIT_OK && number < loss->step + 12; number++)
    status = outer_train(it, number, false);
  CHECK(status == ONEBIT_ERROR_TRANSPORT || status == ONEBIT_ERROR_PEER, "%s", onebit_last_error());
  CHECK_STATUS(onebit_outer_shrink(it->outer, &survivors), ONEBIT_OK);
  CHECK(onebit_comm_size(survivors) == loss->size - 1, "%d are left", onebit_comm_size(survivors));
  for (const uint64_t end = step_count(it) + 12; step_count(it) < end;)
    CHECK_STATUS(outer_train(it, (int)step_count(it), false), ONEBIT_OK);
  CHECK_STATUS(onebit_outer_synchronize(it->outer), ONEBIT_OK);
  memcpy(loss->x[it->rank], it->p, sizeof it->p);
  synchronize_ranks(survivors);
  CHECK_BITS("the parameters", it->p, loss->x[0], OUTER_ELEMENTS, ONEBIT_FLOAT32);
  onebit_outer_destroy(it->outer);
  onebit_comm_destroy(survivors);
}

static void lose_last_rank(onebit_comm_t comm, void *context) {
  struct loss *loss = context;
  struct outer_trained *it = outer_begin(comm, &loss->options);
  for (int number = 1; number < loss->step; number++)
    CHECK_STATUS(outer_train(it, number, false), ONEBIT_OK);
  atomic_fetch_add(&loss->finished, 1);
  if (it->rank == loss->size - 1) {
    while (atomic_load(&loss->finished) < loss->size)
      sched_yield();
    onebit_comm_abort(comm);
    onebit_outer_destroy(it->outer);
  } else {
    train_until_lost(loss, it);
  }
  free(it);
}

Test(outer_move, the_others_go_on_without_a_lost_rank) {
  static const int widths[] = {1, ONEBIT_OUTER_DENSE, ONEBIT_OUTER_SPARSE};
  struct loss *loss = allocate(1, sizeof *loss);
  for (int k = 0; k < 3; k++)
    for (int step = 5; step <= 8; step++) {
      *loss = (struct loss){
          .options = outer_options(widths[k], (onebit_outer_rule_t)k), .size = 2 + k, .step = step};
      loss->options.delay = step % 2 ? 3 : 0;
      loss->options.fragments = 1 + (size_t)step % 2;
      loss->options.weighted = k == 1;
      check_case("%d bits, lost before step %d", widths[k], step);
      on_ranks(loss->size, lose_last_rank, loss);
    }
  free(loss);
}

/* --- Moves that fail ---------------------------------------------------------------------------*/

/* If options differ, the move fails on all ranks, and no step can be made. A later move to the next
 * communicator restores the state. */
static void move_with_different_options(onebit_comm_t comm, void *context) {
  onebit_comm_t(*next)[RANKS] = context;
  onebit_outer_options_t options = outer_options(1, ONEBIT_OUTER_MEAN);
  struct saved_parts none = {0};
  struct outer_trained *it = outer_begin(comm, &options);
  outer_train_to(it, 1, 5);
  const double residual = outer_info(it->outer).residual_norm;
  it->outer->options.mixing = it->rank == 1 ? 0.5 : 1;
  CHECK_STATUS(onebit_outer_move(it->outer, next[0][it->rank]), ONEBIT_ERROR_MISMATCH);
  CHECK_WORDS("mixing");
  CHECK_STATUS(onebit_outer_step(it->outer, 1), ONEBIT_ERROR_TRANSPORT);
  CHECK_WORDS("call onebit_outer_move");
  CHECK_STATUS(onebit_outer_synchronize(it->outer), ONEBIT_ERROR_TRANSPORT);
  CHECK_STATUS(onebit_outer_save(it->outer, NULL, 0, none.bytes), ONEBIT_ERROR_TRANSPORT);
  CHECK_STATUS(onebit_outer_save_files(it->outer, "."), ONEBIT_ERROR_TRANSPORT);
  CHECK_STATUS(onebit_outer_load_files(it->outer, "."), ONEBIT_ERROR_TRANSPORT);
  outer_info(it->outer); /* succeeds */
  it->outer->options.mixing = 1;
  CHECK_STATUS(onebit_outer_move(it->outer, next[1][it->rank]), ONEBIT_OK);
  CHECK(outer_info(it->outer).residual_norm == residual && residual > 0, "%g became %g", residual,
        outer_info(it->outer).residual_norm);
  outer_train_to(it, 6, 9);
  outer_end(it);
}

Test(outer_move, a_move_that_fails_can_be_made_again) {
  onebit_comm_t next[2][RANKS];
  for (int k = 0; k < 2; k++)
    CHECK_STATUS(onebit_comm_create_loopback(3, next[k]), ONEBIT_OK);
  on_ranks(3, move_with_different_options, next);
  for (int rank = 0; rank < 3; rank++) {
    onebit_comm_destroy(next[0][rank]);
    onebit_comm_destroy(next[1][rank]);
  }
}
