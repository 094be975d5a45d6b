/* Tests the harness: memory that ranks share, and that a rank that fails is noticed. */
#include <stdatomic.h>

#include "tests/gpu/harness.h"

struct shared {
  atomic_int visits;
  int heard[8];
};

static void count_visit(const struct gpu_rank *self, void *context) {
  struct shared *shared = context;
  int number = self->rank == 0 ? 4711 + self->size : 0;
  gpu_broadcast(self, &number, sizeof number);
  shared->heard[self->rank] = number;
  atomic_fetch_add(&shared->visits, 1);
}

static void check_visits(const struct shared *shared, int size) {
  CHECK(shared->visits == size, "%d visits of %d ranks", shared->visits, size);
  for (int r = 0; r < size; r++)
    CHECK(shared->heard[r] == 4711 + size, "rank %d of %d heard %d", r, size, shared->heard[r]);
}

/* Several groups in one test, each with an area of its own. */
static void ranks_share(void) {
  static const int sizes[] = {1, 2, 4, 8};
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    struct shared *shared = gpu_allocate_area(sizeof *shared);
    if (gpu_run_ranks(sizes[i], count_visit, shared))
      check_visits(shared, sizes[i]);
  }
}

static void threads_share(void) {
  struct shared *shared = gpu_allocate_area(sizeof *shared);
  gpu_run_loopback(4, count_visit, shared);
  check_visits(shared, 4);
}

static void compare_communicators(const struct gpu_rank *self, void *context) {
  (void)context;
  CHECK(onebit_comm_rank(self->comm) == self->rank && onebit_comm_size(self->comm) == self->size,
        "the communicator is another's");
}

static void threads_have_communicators(void) { gpu_run_loopback(3, compare_communicators, NULL); }

static const struct gpu_test tests[] = {
    {"ranks share", ranks_share, true},
    {"threads share", threads_share, true},
    {"threads have communicators", threads_have_communicators, true},
};
GPU_SUITE("harness", tests)
