/* Plans of several widths: a bucket that one bit is too little for climbs by itself and comes down
 * again, another stays; all ranks move alike, in every schedule, and nothing of the residual is
 * lost. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <criterion/criterion.h>

#include "base/hash.h"
#include "tests/support_collectives.h"

enum { COUNT = 4160, MAX_RANKS = 8, WINDOW = 16 };

/* Calls in which the bucket is ordinary, hard, ordinary again: up in 16 calls and a move every 48,
 * down in a move every 96. */
enum { ORDINARY = 40, HARD = ORDINARY + 140, CALLS = HARD + 360 };

struct climb {
  onebit_operation_t operation;
  onebit_schedule_t schedule;
  onebit_dtype_t dtype;
  uint64_t hashes[MAX_RANKS];
  int bits[MAX_RANKS];
};

static float ordinary(size_t i, int rank, int call) {
  const uint64_t place = ((uint64_t)call * MAX_RANKS + (uint64_t)rank) * 65536 + i;
  return uniform_value(place) + uniform_value(place + ((uint64_t)1 << 40));
}

/* One element of a block, on one rank, is a thousand times as large as the others. */
static float input(size_t i, int rank, int call, bool hard) {
  return hard && rank == 0 && i % 2048 == 7 ? 1000 : ordinary(i, rank, call);
}

static void fill(float *values, size_t count, int rank, int call) {
  for (size_t i = 0; i < count; i++)
    values[i] = input(i, rank, call, call >= ORDINARY && call < HARD);
}

static onebit_plan_t make_plan(onebit_comm_t comm, const struct climb *climb, int bits) {
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  options.operation = climb->operation;
  options.schedule = climb->schedule;
  options.bits = bits;
  options.max_bits = 8;
  onebit_plan_t plan;
  return CHECK_STATUS(onebit_plan_create(comm, COUNT, &options, &plan), ONEBIT_OK) ? plan : NULL;
}

static onebit_plan_info_t info_of(onebit_plan_t plan) {
  onebit_plan_info_t info = {.size = sizeof info};
  CHECK_STATUS(onebit_plan_get_info(plan, &info), ONEBIT_OK);
  return info;
}

/* Every rank has the same width after every call, and of an allreduce the same result. */
static void compare_ranks(onebit_comm_t comm, struct climb *climb, int bits, const float *result,
                          int call) {
  const int rank = onebit_comm_rank(comm), size = onebit_comm_size(comm);
  climb->bits[rank] = bits;
  climb->hashes[rank] = ob_hash(OB_HASH_START, result, COUNT * sizeof *result);
  meet(comm);
  for (int k = 0; k < size; k++) {
    CHECK(climb->bits[k] == bits, "call %d: %d bits, rank %d has %d", call, bits, k,
          climb->bits[k]);
    CHECK(climb->operation != ONEBIT_ALLREDUCE || climb->hashes[k] == climb->hashes[rank],
          "call %d: another result than rank %d's", call, k);
  }
  meet(comm);
}

/* The bits at the end of each third, and what a call says that it sends. */
static void check_climb(onebit_plan_t plan, int call, bool alone) {
  const onebit_plan_info_t info = info_of(plan);
  if (call + 1 == ORDINARY)
    CHECK(info.bits == 1 && info.moves == 0, "ordinary: %d bits, %d moves", info.bits,
          (int)info.moves);
  if (call + 1 == HARD)
    CHECK(info.bits == 8 && info.moves == 3 && info.residual_ratio > 0,
          "hard: %d bits, %d moves, ratio %g", info.bits, (int)info.moves, info.residual_ratio);
  if (call + 1 == CALLS)
    CHECK(info.bits == 1 && info.moves == 6, "ordinary again: %d bits, %d moves", info.bits,
          (int)info.moves);
  CHECK(info.min_bits == 1 && info.max_bits == 8, "%d to %d bits", info.min_bits, info.max_bits);
  CHECK(alone || info.wire_bytes > 0, "no bytes");
}

static void climb_on_rank(onebit_comm_t comm, void *context) {
  struct climb *climb = context;
  const int rank = onebit_comm_rank(comm), size = onebit_comm_size(comm);
  const size_t sent = send_count(climb->operation, COUNT, size);
  const size_t received = receive_count(climb->operation, COUNT, size);
  float *values = allocate(sent, sizeof *values), *result = allocate(received, sizeof *result);
  onebit_plan_t plan = make_plan(comm, climb, 1);
  for (int call = 0; plan && call < CALLS; call++) {
    const uint64_t announced = info_of(plan).wire_bytes, before = onebit_comm_bytes_sent(comm);
    fill(values, sent, rank, call);
    CHECK_STATUS(call_collective(climb->operation, values, result, plan), ONEBIT_OK);
    CHECK(onebit_comm_bytes_sent(comm) - before == announced, "call %d: %d bytes, announced %d",
          call, (int)(onebit_comm_bytes_sent(comm) - before), (int)announced);
    compare_ranks(comm, climb, info_of(plan).bits, result, call);
    check_climb(plan, call, size == 1);
  }
  onebit_plan_destroy(plan);
  free(values);
  free(result);
}

Test(ladder, climbs_and_descends, .timeout = 120) {
  static const struct {
    int size, hosts;
    onebit_operation_t operation;
    onebit_schedule_t schedule;
  } rows[] = {
      {1, 1, ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_EXCHANGE},
      {2, 1, ONEBIT_ALLGATHER, ONEBIT_SCHEDULE_AUTOMATIC},
      {2, 1, ONEBIT_REDUCE_SCATTER, ONEBIT_SCHEDULE_AUTOMATIC},
      {3, 1, ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_EXCHANGE},
      {2, 1, ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_ALLGATHER},
      {4, 1, ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_ALLGATHER}, /* in pairs */
      {5, 1, ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_ALLGATHER}, /* in rounds */
      {4, 2, ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_HIERARCHICAL},
  };
  for (size_t k = 0; k < sizeof rows / sizeof rows[0]; k++) {
    struct climb climb = {.operation = rows[k].operation, .schedule = rows[k].schedule};
    if (!test_wanted(k))
      continue;
    check_case("%d ranks on %d hosts, %s, schedule %d", rows[k].size, rows[k].hosts,
               operation_name(rows[k].operation), (int)rows[k].schedule);
    on_hosts(rows[k].size, rows[k].hosts, climb_on_rank, &climb);
  }
}

/* --- Nothing is lost ---------------------------------------------------------------------------*/

static double left(const float *before, const float *after, size_t i) {
  return (double)before[i] - (double)after[i];
}

/* One rank: result = input + worker before - worker after + server before - server after. */
static void invariant_on_rank(onebit_comm_t comm, void *context) {
  struct climb climb = {.schedule = ONEBIT_SCHEDULE_EXCHANGE};
  onebit_plan_t plan = make_plan(comm, &climb, 1);
  float *values = allocate(COUNT, sizeof *values), *result = allocate(COUNT, sizeof *result);
  static const int widths[] = {1, 1, 8, 1, 2, 1, 4, 8, 2, 4, 1, 1};
  struct kept_errors before = export_errors(plan);
  (void)context;
  for (int call = 0; call < (int)(sizeof widths / sizeof widths[0]); call++) {
    CHECK_STATUS(onebit_plan_set_bits(plan, widths[call]), ONEBIT_OK);
    fill(values, COUNT, 0, call);
    CHECK_STATUS(onebit_allreduce(values, result, plan), ONEBIT_OK);
    struct kept_errors after = export_errors(plan);
    for (size_t i = 0; i < COUNT; i++) {
      const double wanted = (double)values[i] + left(before.worker, after.worker, i) +
                            left(before.server, after.server, i);
      if (!CHECK(fabs((double)result[i] - wanted) < 1e-5 * (1 + fabs(wanted)),
                 "call %d, %d bits, element %zu: %g, not %g", call, widths[call], i,
                 (double)result[i], wanted))
        break;
    }
    free_errors(&before);
    before = after;
  }
  free_errors(&before);
  onebit_plan_destroy(plan);
  free(values);
  free(result);
}

Test(ladder, residual_survives_every_change) { on_ranks(1, invariant_on_rank, NULL); }

/* --- Checkpoints -------------------------------------------------------------------------------*/

/* A plan that was saved after a climb, and another that goes on from there. */
static void checkpoint_on_rank(onebit_comm_t comm, void *context) {
  struct climb *climb = context;
  const int rank = onebit_comm_rank(comm);
  float *values = allocate(COUNT, sizeof *values), *result = allocate(COUNT, sizeof *result);
  float *again = allocate(COUNT, sizeof *again);
  onebit_plan_t plan = make_plan(comm, climb, 1), other = make_plan(comm, climb, 1);
  int call = ORDINARY;
  for (; call < ORDINARY + 5 * WINDOW + 3; call++) { /* so it does not move in the next three */
    fill(values, COUNT, rank, call);
    CHECK_STATUS(onebit_allreduce(values, result, plan), ONEBIT_OK);
  }
  CHECK(info_of(plan).bits > 1, "%d bits", info_of(plan).bits);
  struct kept_errors errors = export_errors(plan);
  CHECK_STATUS(onebit_plan_import_residual(other, errors.worker, errors.server), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_set_bits(other, info_of(plan).bits), ONEBIT_OK);
  for (int k = 0; k < 3; k++, call++) {
    fill(values, COUNT, rank, call);
    CHECK_STATUS(onebit_allreduce(values, result, plan), ONEBIT_OK);
    CHECK_STATUS(onebit_allreduce(values, again, other), ONEBIT_OK);
    CHECK_BITS("result", again, result, COUNT, ONEBIT_FLOAT32);
  }
  free_errors(&errors);
  onebit_plan_destroy(plan);
  onebit_plan_destroy(other);
  free(values);
  free(result);
  free(again);
}

Test(ladder, goes_on_from_a_checkpoint) {
  struct climb climb = {.schedule = ONEBIT_SCHEDULE_EXCHANGE};
  on_ranks(2, checkpoint_on_rank, &climb);
}

/* --- Calls that do not end well ----------------------------------------------------------------*/

/* Skipped calls measure nothing, move nothing and differ on no rank, also where the ranks tell each
 * other what they want. */
static void skips_on_rank(onebit_comm_t comm, void *context) {
  struct climb *climb = context;
  const int rank = onebit_comm_rank(comm);
  float *values = allocate(COUNT, sizeof *values), *result = allocate(COUNT, sizeof *result);
  onebit_plan_t plan = make_plan(comm, climb, 1);
  int well = 0;
  for (int call = 0; plan && well < 2 * WINDOW + 2; call++) {
    const bool skipped = call % 2 == 1;
    fill(values, COUNT, rank, ORDINARY + well);
    if (skipped && rank == 1)
      values[5] = NAN;
    CHECK_STATUS(onebit_allreduce(values, result, plan), skipped ? ONEBIT_SKIPPED : ONEBIT_OK);
    well += !skipped;
    CHECK(info_of(plan).bits == (well > 2 * WINDOW ? 2 : 1), "%d bits after %d calls",
          info_of(plan).bits, well);
    compare_ranks(comm, climb, info_of(plan).bits, result, call);
  }
  onebit_plan_destroy(plan);
  free(values);
  free(result);
}

Test(ladder, skipped_calls_count_for_nothing) {
  struct climb climb = {.schedule = ONEBIT_SCHEDULE_EXCHANGE};
  on_ranks(2, skips_on_rank, &climb);
}

/* A rank at another width is told, nobody hangs, and onebit_plan_reset brings them together. */
static void apart_on_rank(onebit_comm_t comm, void *context) {
  struct climb *climb = context;
  const int rank = onebit_comm_rank(comm);
  float *values = allocate(COUNT, sizeof *values), *result = allocate(COUNT, sizeof *result);
  onebit_plan_t plan = make_plan(comm, climb, 1);
  fill(values, COUNT, rank, 0);
  CHECK_STATUS(onebit_plan_set_bits(plan, rank == 0 ? 2 : 4), ONEBIT_OK);
  CHECK_STATUS(onebit_allreduce(values, result, plan), ONEBIT_ERROR_MESSAGE);
  CHECK_STATUS(onebit_allreduce(values, result, plan), ONEBIT_ERROR_MESSAGE);
  meet(comm);
  CHECK_STATUS(onebit_plan_reset(plan), ONEBIT_OK);
  CHECK(info_of(plan).bits == 1, "%d bits", info_of(plan).bits);
  CHECK_STATUS(onebit_allreduce(values, result, plan), ONEBIT_OK);
  onebit_plan_destroy(plan);
  free(values);
  free(result);
}

Test(ladder, ranks_at_different_widths_are_told) {
  static const int sizes[] = {2, 3, 4, 5};
  for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
    struct climb climb = {.schedule = k % 2 ? ONEBIT_SCHEDULE_EXCHANGE : ONEBIT_SCHEDULE_ALLGATHER};
    check_case("%d ranks", sizes[k]);
    on_ranks(sizes[k], apart_on_rank, &climb);
  }
}

/* --- Arguments ---------------------------------------------------------------------------------*/

static void refuse(onebit_comm_t comm, onebit_plan_options_t options, const char *message) {
  onebit_plan_t plan;
  CHECK_STATUS(onebit_plan_create(comm, COUNT, &options, &plan), ONEBIT_ERROR_ARGUMENT);
  CHECK_WORDS(message);
}

static void arguments_on_rank(onebit_comm_t comm, void *context) {
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  (void)context;
  options.max_bits = 3;
  refuse(comm, options, "max_bits is 3, not 1, 2, 4 or 8");
  options.max_bits = 2, options.bits = 4;
  refuse(comm, options, "max_bits is 2, and bits 4");
  options.max_bits = 8;
  options.no_error_feedback = 1;
  refuse(comm, options, "max_bits is 8, bits is 4, no_error_feedback is set");
  options.no_error_feedback = 0, options.bits = 1;
  options.block_size = ONEBIT_BLOCK_BUFFER;
  refuse(comm, options, "max_bits is 8: that takes");
  options.block_size = 0;
  options.scale = ONEBIT_SCALE_MEAN_ABSOLUTE;
  refuse(comm, options, "scale is 1, which messages of 8 bits do not have");
  options = (onebit_plan_options_t)ONEBIT_PLAN_OPTIONS_INIT;
  options.bits = 2, options.max_bits = 4;
  onebit_plan_t plan;
  CHECK_STATUS(onebit_plan_create(comm, 0, &options, &plan), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_set_bits(plan, 3), ONEBIT_ERROR_ARGUMENT);
  CHECK_STATUS(onebit_plan_set_bits(plan, 1), ONEBIT_ERROR_ARGUMENT);
  CHECK_WORDS("bits is 1, and the plan has 2 to 4");
  CHECK_STATUS(onebit_plan_set_bits(plan, 8), ONEBIT_ERROR_ARGUMENT);
  CHECK_STATUS(onebit_plan_set_bits(plan, 4), ONEBIT_OK);
  CHECK_STATUS(onebit_allreduce(NULL, NULL, plan), ONEBIT_OK);
  onebit_plan_destroy(plan);
}

Test(ladder, arguments) { on_ranks(1, arguments_on_rank, NULL); }
