/*
 * Following a period that ranks have agreed on: here is one rank, and what the others say is made
 * up. What they say together is tried with ranks (tests/mpi_calls.c, check-preload).
 */
#include <criterion/criterion.h>
#include <string.h>

#include "base/memory.h"
#include "dropin/follow.h"
#include "tests/support.h"

TestSuite(follow, .timeout = 60);

enum { REPEATS = 3, TENSORS = 4 };

/* What this rank knows, and what the others say to its questions. */
struct world {
  struct ob_follower *follower;
  const void *buffers[TENSORS]; /* of its tensors; NULL: none */
  int64_t others_period;        /* 0: as this rank's */
  bool others_know_nothing;     /* of tensors */
  bool broken;                  /* no answer comes */
  int questions, lost;          /* lost: this tensor is; -1 */
};

static bool largest(void *context, int64_t *values, int count) {
  struct world *world = context;
  int64_t theirs[] = {world->others_period, -world->others_period, 0};
  world->questions++;
  for (int i = 0; i < count; i++) {
    int64_t other = count == 3 && world->others_period         ? theirs[i]
                    : count != 3 && world->others_know_nothing ? (i % 2 ? 1 : OB_NO_TENSOR)
                                                               : values[i];
    values[i] = other > values[i] ? other : values[i];
  }
  return !world->broken;
}

static int find(void *context, int first, uint64_t signature, const void *sendbuf,
                const void *recvbuf) {
  const struct world *world = context;
  (void)signature, (void)recvbuf;
  for (int i = first; i < TENSORS; i++)
    if (world->buffers[i] && world->buffers[i] == sendbuf)
      return i;
  return OB_NO_TENSOR;
}

static bool is_lost(void *context, int tensor) { return tensor == ((struct world *)context)->lost; }

static void begin(struct world *world) {
  const struct ob_follower_ranks ranks = {world, largest, find, is_lost};
  memset(world, 0, sizeof *world);
  world->lost = -1;
  CHECK_STATUS(ob_follower_create(REPEATS, &ranks, &world->follower), ONEBIT_OK);
}

static const char memory[TENSORS];

static uint64_t signature_of(int tensor) {
  return ob_follower_signature(ONEBIT_ALLREDUCE, ONEBIT_FLOAT32, true, (size_t)(100 + tensor));
}

/* A call on a tensor's buffer, and what a program's library does about it. */
static ptrdiff_t call(struct world *world, int tensor, bool *same) {
  bool look;
  ptrdiff_t phase = ob_follower_phase(world->follower, signature_of(tensor), &memory[tensor],
                                      &memory[tensor], &look, same);
  if (look)
    ob_follower_look(world->follower);
  return phase;
}

/* Steps of two calls each. */
static void steps(struct world *world, int count) {
  bool same;
  for (int step = 0; step < count; step++) {
    call(world, 0, &same);
    call(world, 1, &same);
  }
}

Test(follow, gives_phases_once_calls_have_repeated) {
  struct world world;
  bool same;
  begin(&world);
  cr_expect_eq(ob_follower_reason(world.follower), OB_REASON_LEARNING);
  steps(&world, 2 * REPEATS);
  cr_assert_eq(ob_follower_period(world.follower), 2);
  for (int turn = 0; turn < 3; turn++) {
    ptrdiff_t first = call(&world, 0, &same), second;
    cr_expect(same);
    second = call(&world, 1, &same);
    cr_expect(same && first >= 0 && second >= 0 && first != second);
    cr_expect_eq(ob_follower_tensor(world.follower, (size_t)first), OB_NO_TENSOR);
  }
  ob_follower_destroy(world.follower);
}

/* Steps of calls on tensors 0, 0 and 1. What is found is not noted. */
Test(follow, finds_phases_of_calls_that_are_not_noted) {
  struct world world;
  bool same;
  begin(&world);
  cr_expect_eq(ob_follower_find(world.follower, signature_of(0), OB_FOLLOWER_NEXT), -1);
  for (int k = 0; k < 30 || ob_follower_period(world.follower) == 0 || k % 3; k++) {
    cr_assert_lt(k, 100);
    call(&world, k % 3 / 2, &same);
  }
  cr_assert_eq(ob_follower_period(world.follower), 3);
  for (ptrdiff_t turn = 0, first = -1; turn < 3; turn++) {
    first = ob_follower_find(world.follower, signature_of(0), OB_FOLLOWER_NEXT);
    ptrdiff_t second = ob_follower_find(world.follower, signature_of(0), (size_t)first + 1);
    cr_expect_eq(second, (first + 1) % 3);
    cr_expect_eq(ob_follower_find(world.follower, signature_of(1), OB_FOLLOWER_NEXT),
                 (first + 2) % 3);
    cr_expect_eq(ob_follower_find(world.follower, signature_of(2), OB_FOLLOWER_NEXT), -1);
    cr_expect_eq(call(&world, 0, &same), first);
    cr_expect_eq(call(&world, 0, &same), second);
    cr_expect_geq(call(&world, 1, &same), 0);
  }
  ob_follower_destroy(world.follower);
}

Test(follow, keeps_tensors_that_all_ranks_know) {
  for (int know = 0; know < 2; know++) {
    struct world world;
    bool same;
    begin(&world);
    world.buffers[3] = &memory[1];
    world.others_know_nothing = !know;
    steps(&world, 2 * REPEATS);
    ptrdiff_t phase = call(&world, 0, &same);
    cr_expect_eq(ob_follower_tensor(world.follower, (size_t)phase), OB_NO_TENSOR);
    ob_follower_set(world.follower, (size_t)phase, 2);
    cr_expect_eq(ob_follower_tensor(world.follower, (size_t)phase), 2);
    phase = call(&world, 1, &same);
    cr_expect_eq(ob_follower_tensor(world.follower, (size_t)phase), know ? 3 : OB_NO_TENSOR);
    ob_follower_drop(world.follower, 3);
    cr_expect_eq(ob_follower_tensor(world.follower, (size_t)phase), OB_NO_TENSOR);
    ob_follower_destroy(world.follower);
  }
}

Test(follow, takes_a_period_that_is_one_for_all_ranks) {
  struct world world;
  begin(&world);
  world.others_period = 4; /* two steps are one of this rank's, too */
  steps(&world, 8 * REPEATS);
  cr_expect_eq(ob_follower_period(world.follower), 4);
  ob_follower_destroy(world.follower);
  begin(&world);
  world.others_period = 3; /* but this never is */
  steps(&world, 8 * REPEATS);
  cr_expect_eq(ob_follower_period(world.follower), 0);
  cr_expect_eq(ob_follower_reason(world.follower), OB_REASON_UNSTABLE);
  ob_follower_destroy(world.follower);
}

Test(follow, learns_anew_where_order_or_tensor_is_lost) {
  struct world world;
  bool same;
  begin(&world);
  steps(&world, 2 * REPEATS);
  ptrdiff_t phase = call(&world, 0, &same);
  cr_assert_geq(phase, 0);
  cr_expect_eq(call(&world, 0, &same), -1); /* the other one was to come */
  cr_expect_eq(ob_follower_period(world.follower), 0);
  steps(&world, 8 * REPEATS);
  cr_expect_eq(ob_follower_period(world.follower), 2);
  phase = call(&world, 0, &same);
  ob_follower_set(world.follower, (size_t)phase, 1);
  call(&world, 1, &same);
  world.lost = 1;
  cr_expect_eq(call(&world, 0, &same), -1);
  world.lost = -1;
  steps(&world, 8 * REPEATS);
  ob_follower_forget(world.follower);
  cr_expect_eq(call(&world, 0, &same), -1);
  ob_follower_destroy(world.follower);
}

Test(follow, goes_on_dense_where_nobody_answers) {
  struct world world;
  begin(&world);
  world.broken = true;
  steps(&world, 4 * REPEATS);
  cr_expect(world.questions > 0);
  cr_expect_eq(ob_follower_period(world.follower), 0);
  ob_follower_destroy(world.follower);
  ob_follower_destroy(NULL);
}

Test(follow, has_wrong_arguments_and_no_memory) {
  struct ob_follower *follower;
  const struct ob_follower_ranks ranks = {NULL, largest, find, NULL};
  CHECK_STATUS(ob_follower_create(1, &ranks, &follower), ONEBIT_ERROR_ARGUMENT);
  cr_expect_null(follower);
  for (int n = 1; n <= 2; n++) {
    ob_memory_fail_at(n);
    CHECK_STATUS(ob_follower_create(2, &ranks, &follower), ONEBIT_ERROR_MEMORY);
    ob_memory_fail_at(0);
  }
}

Test(follow, signatures_tell_calls_apart) {
  uint64_t one = ob_follower_signature(ONEBIT_ALLREDUCE, ONEBIT_FLOAT32, true, 7);
  cr_expect_neq(one, ob_follower_signature(ONEBIT_ALLGATHER, ONEBIT_FLOAT32, true, 7));
  cr_expect_neq(one, ob_follower_signature(ONEBIT_ALLREDUCE, ONEBIT_FLOAT16, true, 7));
  cr_expect_neq(one, ob_follower_signature(ONEBIT_ALLREDUCE, ONEBIT_FLOAT32, false, 7));
  cr_expect_neq(one, ob_follower_signature(ONEBIT_ALLREDUCE, ONEBIT_FLOAT32, true, 8));
}
