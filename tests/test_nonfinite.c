/*
 * Tests input that is not finite. Every rank must get ONEBIT_SKIPPED from the same call, and no
 * receive buffer or residual may change. Later calls must give the same results as without this
 * call.
 */
#include "tests/support_collectives.h"

/* The wrong value in one element of one rank's input. POISON_HUGE is finite, but its square is not,
 * and neither is the square of the mean over its host's ranks. */
enum poison { POISON_NAN, POISON_INFINITY, POISON_MINUS_INFINITY, POISON_HUGE, POISONS };

static float poison_value(enum poison poison, onebit_dtype_t dtype) {
  static const float values[POISONS] = {NAN, INFINITY, -INFINITY, -1e20f};
  /* the largest float16 is 65504, whose square is finite */
  bool fits = poison != POISON_HUGE || dtype != ONEBIT_FLOAT16;
  return fits ? values[poison] : INFINITY;
}

struct poisoned {
  struct collective_run run; /* the run without bad calls */
  enum poison poison;
  int rank;
  size_t place;
};

/* Makes the bad call, with a good call before and after it, and checks that the bad call is
 * skipped. */
static void check_skipped(const struct poisoned *what, const struct rank_plan *rank_plan) {
  const onebit_plan_options_t *options = &what->run.what.options;
  const size_t received = rank_plan->received * dtype_size(options->dtype);
  struct kept_errors before = export_errors(rank_plan->plan);
  fill_pattern(rank_plan->receive, received);
  rank_plan_fill(rank_plan, 1000);
  if (rank_plan->rank == what->rank)
    oracle_store(rank_plan->send, what->place, options->dtype,
                 poison_value(what->poison, options->dtype));
  CHECK_STATUS(
      call_collective(options->operation, rank_plan->send, rank_plan->receive, rank_plan->plan),
      ONEBIT_SKIPPED);
  CHECK(pattern_holds(rank_plan->receive, received), "a skipped call changed recvbuf");
  check_unchanged_errors(rank_plan->plan, &before);
  free_errors(&before);
}

static void poisoned_on_rank(onebit_comm_t comm, void *context) {
  const struct poisoned *what = context;
  const struct collective_case *given = &what->run.what;
  struct rank_plan rank_plan;
  check_case("%s%s of %zu %s on %d ranks, schedule %d, block %zd, scale %d, poison %d on rank %d "
             "at %zu",
             given->options.wire == ONEBIT_WIRE_DENSE ? "dense " : "",
             operation_name(given->options.operation), given->count,
             dtype_name(given->options.dtype), given->size, (int)given->options.schedule,
             (ptrdiff_t)given->options.block_size, (int)given->options.scale, (int)what->poison,
             what->rank, what->place);
  if (!rank_plan_create(&rank_plan, comm, &what->run))
    return;
  for (int step = 0; step < given->steps; step++) {
    rank_plan_call(&rank_plan, step);
    check_skipped(what, &rank_plan);
  }
  rank_plan_finish(&rank_plan);
}

/* Tests each wrong value on the first, a middle and the last rank, at the first, a middle and the
 * last element. */
static void check_everywhere(struct collective_case what) {
  size_t sent = send_count(what.options.operation, what.count, what.size);
  struct poisoned poisoned = {.run = collective_prepare(&what)};
  for (int k = 0; k < POISONS * 3; k++) {
    size_t places[] = {0, sent / 2, sent - 1};
    /* sums of |c| are finite where squares overflow; dense messages hold any finite number, except
     * in a reduce-scatter, which adds the numbers unchecked */
    bool squares = what.options.wire == ONEBIT_WIRE_BITS
                       ? what.options.scale == ONEBIT_SCALE_RMS
                       : what.options.operation == ONEBIT_REDUCE_SCATTER;
    poisoned.poison = (enum poison)(k % POISONS);
    poisoned.place = places[k % 3];
    poisoned.rank = k / POISONS * (what.size - 1) / 2;
    if (poisoned.poison != POISON_HUGE || squares)
      on_ranks(what.size, poisoned_on_rank, &poisoned);
  }
  collective_release(&poisoned.run);
}

static void check_operation(onebit_operation_t operation, onebit_wire_t wire,
                            onebit_profile_t profile) {
  static const int sizes[] = {1, 2, 3, 4};
  static const size_t counts[] = {1, 33, 4500};
  for (size_t p = 0; p < 4; p++)
    for (size_t c = 0; c < 3 && test_wanted(p); c++)
      for (int k = 0; k < 3; k++) {
        static const size_t blocks[] = {0, 32, ONEBIT_BLOCK_BUFFER};
        struct collective_case what = {
            .size = sizes[p], .steps = 2, .count = counts[c], .options = ONEBIT_PLAN_OPTIONS_INIT};
        what.options.operation = operation;
        what.options.wire = wire;
        what.options.profile = profile;
        what.options.dtype = (onebit_dtype_t)((k + (int)c) % 3);
        if (profile == ONEBIT_PROFILE_DEFAULT && wire == ONEBIT_WIRE_BITS)
          what.options.block_size = blocks[k];
        what.options.scale = k == 1 && profile == ONEBIT_PROFILE_DEFAULT
                                 ? ONEBIT_SCALE_MEAN_ABSOLUTE
                                 : ONEBIT_SCALE_RMS;
        check_everywhere(what);
      }
}

Test(nonfinite, allreduce) {
  check_operation(ONEBIT_ALLREDUCE, ONEBIT_WIRE_BITS, ONEBIT_PROFILE_DEFAULT);
}
Test(nonfinite, allreduce_deepspeed) {
  check_operation(ONEBIT_ALLREDUCE, ONEBIT_WIRE_BITS, ONEBIT_PROFILE_DEEPSPEED);
}
Test(nonfinite, allreduce_dense) {
  check_operation(ONEBIT_ALLREDUCE, ONEBIT_WIRE_DENSE, ONEBIT_PROFILE_DEFAULT);
}
Test(nonfinite, allgather) {
  check_operation(ONEBIT_ALLGATHER, ONEBIT_WIRE_BITS, ONEBIT_PROFILE_DEFAULT);
}
Test(nonfinite, reduce_scatter) {
  check_operation(ONEBIT_REDUCE_SCATTER, ONEBIT_WIRE_BITS, ONEBIT_PROFILE_DEFAULT);
}

Test(nonfinite, allgather_dense) {
  check_operation(ONEBIT_ALLGATHER, ONEBIT_WIRE_DENSE, ONEBIT_PROFILE_DEFAULT);
}
Test(nonfinite, reduce_scatter_dense) {
  check_operation(ONEBIT_REDUCE_SCATTER, ONEBIT_WIRE_DENSE, ONEBIT_PROFILE_DEFAULT);
}

/* Tests the schedules other than the exchange. Each rank has the wrong value once at the first and
 * once at the last element. The call has many chunks, and if a host has several ranks, one rank
 * compresses the input of another. */
static void check_schedule(int size, int hosts, onebit_schedule_t schedule, onebit_wire_t wire) {
  struct collective_case what = {
      .size = size, .hosts = hosts, .steps = 2, .count = 1501, .options = ONEBIT_PLAN_OPTIONS_INIT};
  what.options.schedule = schedule;
  what.options.wire = wire;
  what.options.block_size = 32;
  what.options.chunk_size = 64;
  struct poisoned poisoned = {.run = collective_prepare(&what)};
  for (int k = 0; k < POISONS * size; k++) {
    poisoned.rank = k / POISONS;
    poisoned.poison = (enum poison)(k % POISONS);
    if (poisoned.poison == POISON_HUGE && wire == ONEBIT_WIRE_DENSE)
      continue;
    for (int last = 0; last < 2; last++) {
      poisoned.place = last ? what.count - 1 : 0;
      on_hosts(size, hosts, poisoned_on_rank, &poisoned);
    }
  }
  collective_release(&poisoned.run);
}

static void check_schedules(onebit_schedule_t schedule) {
  static const int splits[][2] = {{4, 2}, {6, 2}, {6, 3}, {3, 3}, {4, 1}};
  for (size_t k = 0; k < sizeof splits / sizeof splits[0]; k++)
    for (int wire = ONEBIT_WIRE_BITS; wire <= ONEBIT_WIRE_DENSE && test_wanted(k); wire++)
      check_schedule(splits[k][0], splits[k][1], schedule, (onebit_wire_t)wire);
}

Test(nonfinite, allreduce_by_allgather) { check_schedules(ONEBIT_SCHEDULE_ALLGATHER); }
Test(nonfinite, allreduce_by_hosts) { check_schedules(ONEBIT_SCHEDULE_HIERARCHICAL); }

/* Every codec must notice a value that is not finite in any lane of a vector. The test puts such a
 * value at each position of a buffer whose last word is incomplete. */
Test(nonfinite, every_place_with_every_codec) {
  for (size_t c = 0; c < test_codecs_count; c++) {
    if (!use_codec(test_codecs[c]))
      continue;
    for (int dtype = ONEBIT_FLOAT32; dtype <= ONEBIT_FLOAT16; dtype++) {
      struct collective_case what = {
          .size = 1, .steps = 1, .count = 75, .options = ONEBIT_PLAN_OPTIONS_INIT};
      what.options.dtype = (onebit_dtype_t)dtype;
      struct poisoned poisoned = {.run = collective_prepare(&what)};
      for (size_t place = 0; place < 75; place++) {
        poisoned.place = place;
        poisoned.poison = (enum poison)(place % POISONS);
        on_ranks(1, poisoned_on_rank, &poisoned);
      }
      collective_release(&poisoned.run);
    }
  }
}
