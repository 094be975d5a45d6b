/* A bucket that is ordinary, hard, and ordinary again. */
#include "tests/support_ladder.h"

#include "base/hash.h"
#include "tests/support_collectives.h"

static float ordinary(size_t i, int rank, int call) {
  const uint64_t place = ((uint64_t)call * 16 + (uint64_t)rank) * 65536 + i;
  return uniform_value(place) + uniform_value(place + ((uint64_t)1 << 40));
}

/* One element of a block, on one rank, is a thousand times as large as the others. */
static float input(size_t i, int rank, int call, bool hard) {
  return hard && rank == 0 && i % 2048 == 7 ? 1000 : ordinary(i, rank, call);
}

void ladder_fill(float *values, size_t count, int rank, int call) {
  for (size_t i = 0; i < count; i++)
    values[i] = input(i, rank, call, call >= LADDER_ORDINARY && call < LADDER_HARD);
}

onebit_plan_t ladder_plan(onebit_comm_t comm, const struct climb *climb, int bits) {
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  options.operation = climb->operation;
  options.schedule = climb->schedule;
  options.bits = bits;
  options.max_bits = 8;
  onebit_plan_t plan;
  return CHECK_STATUS(onebit_plan_create(comm, LADDER_COUNT, &options, &plan), ONEBIT_OK) ? plan
                                                                                          : NULL;
}

/* Every rank has the same width after every call, and of an allreduce the same result. */
struct same {
  onebit_plan_t plan; /* dense: gathers values as they are */
  float *all;
};

static struct same make_same(onebit_comm_t comm) {
  struct same same = {.all = allocate(2 * (size_t)onebit_comm_size(comm), sizeof(float))};
  onebit_plan_options_t options = {
      .size = sizeof options, .operation = ONEBIT_ALLGATHER, .wire = ONEBIT_WIRE_DENSE};
  CHECK_STATUS(onebit_plan_create(comm, 2, &options, &same.plan), ONEBIT_OK);
  return same;
}

static void check_same(const struct same *same, int size, int bits, uint64_t hash, int call) {
  const float mine[2] = {(float)bits, (float)(hash % (1 << 24))};
  CHECK_STATUS(onebit_allgather(mine, same->all, same->plan), ONEBIT_OK);
  for (int k = 0; k < size; k++)
    CHECK(!memcmp(mine, same->all + 2 * k, sizeof mine), "call %d: %d bits, rank %d: %g, hash %g",
          call, bits, k, (double)same->all[2 * k], (double)same->all[2 * k + 1]);
}

/* The bits at the end of each third, and what a call says that it sends. */
static void check_climb(onebit_plan_t plan, int call, bool alone) {
  const onebit_plan_info_t info = plan_info(plan);
  if (call + 1 == LADDER_ORDINARY)
    CHECK(info.bits == 1 && info.moves == 0, "ordinary: %d bits, %d moves", info.bits,
          (int)info.moves);
  if (call + 1 == LADDER_HARD)
    CHECK(info.bits == 8 && info.moves == 3 && info.residual_ratio > 0,
          "hard: %d bits, %d moves, ratio %g", info.bits, (int)info.moves, info.residual_ratio);
  if (call + 1 == LADDER_HARD)
    CHECK(strstr(onebit_plan_explain(plan), "bits an element: 8 now, 1 to 8, changes: 3\n"), "%s",
          onebit_plan_explain(plan));
  if (call + 1 == LADDER_CALLS)
    CHECK(info.bits == 1 && info.moves == 6, "ordinary again: %d bits, %d moves", info.bits,
          (int)info.moves);
  CHECK(info.min_bits == 1 && info.max_bits == 8, "%d to %d bits", info.min_bits, info.max_bits);
  CHECK(alone || info.wire_bytes > 0, "no bytes");
}

void climb_on_rank(onebit_comm_t comm, void *context) {
  const struct climb *climb = context;
  const struct same same = make_same(comm);
  const int rank = onebit_comm_rank(comm), size = onebit_comm_size(comm);
  const size_t sent = send_count(climb->operation, LADDER_COUNT, size);
  const size_t received = receive_count(climb->operation, LADDER_COUNT, size);
  float *values = allocate(sent, sizeof *values), *result = allocate(received, sizeof *result);
  onebit_plan_t plan = ladder_plan(comm, climb, 1);
  for (int call = 0; plan && call < LADDER_CALLS; call++) {
    const uint64_t announced = plan_info(plan).wire_bytes, before = onebit_comm_bytes_sent(comm);
    ladder_fill(values, sent, rank, call);
    CHECK_STATUS(call_collective(climb->operation, values, result, plan), ONEBIT_OK);
    CHECK(onebit_comm_bytes_sent(comm) - before == announced, "call %d: %d bytes, announced %d",
          call, (int)(onebit_comm_bytes_sent(comm) - before), (int)announced);
    const bool alike = climb->operation == ONEBIT_ALLREDUCE;
    check_same(&same, size, plan_info(plan).bits,
               alike ? ob_hash(OB_HASH_START, result, LADDER_COUNT * sizeof *result) : 0, call);
    check_climb(plan, call, size == 1);
  }
  onebit_plan_destroy(plan);
  onebit_plan_destroy(same.plan);
  free(same.all);
  free(values);
  free(result);
}
