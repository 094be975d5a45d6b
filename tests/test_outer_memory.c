/*
 * Out of memory while an outer step is saved, loaded or moved: every allocation fails once, on
 * either rank, and then all ranks hear of it, nothing has changed, and the call can be made again.
 */
#include "base/memory.h"
#include "tests/support_disk.h"
#include "tests/support_outer.h"

enum { RANKS = 2, MAX_CALLS = 600 };
enum call { SAVE, LOAD, SAVE_FILES, LOAD_FILES, MOVE, SAVE_SITE, LOAD_SITE, MOVE_SITE, CALLS };

struct run {
  enum call call;
  onebit_comm_t next[RANKS];
  struct directories directories;
  struct saved_parts parts;
  pthread_barrier_t everyone;
  onebit_status_t status[RANKS];
  int failures;
};

static onebit_status_t make_call(struct run *run, struct outer_trained *it) {
  size_t bytes;
  switch (run->call) {
  case SAVE:
  case SAVE_SITE:
    return onebit_outer_save(it->outer, run->parts.memory[it->rank], run->parts.bytes[it->rank],
                             &bytes);
  case LOAD:
    return outer_load(it, &run->parts);
  case LOAD_SITE:
    return onebit_outer_load(it->outer, (const void *const *)&run->parts.memory[it->rank],
                             &run->parts.bytes[it->rank], 1);
  case SAVE_FILES:
    return onebit_outer_save_files(it->outer, run->directories.saved);
  case LOAD_FILES:
    return onebit_outer_load_files(it->outer, run->directories.saved);
  default:
    return onebit_outer_move(it->outer, run->next[it->rank]);
  }
}

static void fail_each(onebit_comm_t comm, void *context) {
  struct run *run = context;
  struct outer_trained *it = allocate(1, sizeof *it);
  onebit_outer_options_t options = outer_options(1, ONEBIT_OUTER_MOMENTUM);
  float p[OUTER_ELEMENTS];
  bool again = true;
  options.fragments = run->call < SAVE_SITE ? 2 : 1;
  options.delay = run->call < MOVE ? 3 : 0;
  if (run->call < SAVE_SITE)
    outer_create(it, comm, &options);
  else
    outer_create_site(it, comm, &options);
  outer_train_to(it, 1, 5);
  outer_save(it, comm, &run->parts);
  if (run->call < SAVE_SITE)
    CHECK_STATUS(onebit_outer_save_files(it->outer, run->directories.saved), ONEBIT_OK);
  memcpy(p, it->p, sizeof p);
  for (int n = 1; again && n <= MAX_CALLS; n++) {
    pthread_barrier_wait(&run->everyone);
    if (it->rank == 0)
      ob_memory_fail_at(n);
    pthread_barrier_wait(&run->everyone);
    check_case("call %d, allocation %d fails", (int)run->call, n);
    const onebit_status_t status = run->status[it->rank] = make_call(run, it);
    CHECK(status == ONEBIT_OK || status == ONEBIT_ERROR_MEMORY, "status %d: %s", (int)status,
          onebit_last_error());
    CHECK_BITS("the parameters", it->p, p, OUTER_ELEMENTS, ONEBIT_FLOAT32);
    pthread_barrier_wait(&run->everyone);
    again = run->status[0] != ONEBIT_OK || run->status[1] != ONEBIT_OK;
    run->failures = n - 1;
    if (it->rank == 0)
      ob_memory_fail_at(0);
    pthread_barrier_wait(&run->everyone);
  }
  CHECK(!again, "it fails still");
  struct saved_parts after = {0};
  const size_t own = run->parts.bytes[it->rank];
  after.memory[0] = allocate(1, own);
  CHECK_STATUS(onebit_outer_save(it->outer, after.memory[0], own, &after.bytes[0]), ONEBIT_OK);
  CHECK(memcmp(after.memory[0], run->parts.memory[it->rank], own) == 0, "the state has changed");
  free(after.memory[0]);
  outer_train_to(it, 6, 9);
  meet(comm);
  outer_end(it);
}

Test(outer_memory, every_allocation_fails_once) {
  for (int call = 0; call < CALLS; call++) {
    struct run run = {.call = (enum call)call, .directories = directories_create()};
    pthread_barrier_init(&run.everyone, NULL, RANKS);
    CHECK_STATUS(onebit_comm_create_loopback(RANKS, run.next), ONEBIT_OK);
    on_ranks(RANKS, fail_each, &run);
    cr_log_info("call %d: %d allocations", call, run.failures);
    cr_expect(run.failures >= 4 && run.failures < MAX_CALLS, "%d failures", run.failures);
    for (int rank = 0; rank < RANKS; rank++)
      onebit_comm_destroy(run.next[rank]);
    pthread_barrier_destroy(&run.everyone);
    directories_remove(&run.directories);
    free_parts(&run.parts);
  }
}
