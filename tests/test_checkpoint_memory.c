/*
 * Out of memory at any allocation of saving, loading and moving: every rank is told, nothing has
 * changed, nothing leaks (under the address sanitizer and valgrind), and what was saved before is
 * still there.
 */
#include "base/memory.h"
#include "tests/support_disk.h"
#include "tests/support_parts.h"

enum { RANKS = 2 };

static const struct checkpoint_case cases[] = {
    {.name = "adam", .method = &ob_method_adam, .size = RANKS, .steps = 5, .freeze_step = 3},
    {.name = "lamb, deepspeed",
     .method = &ob_method_lamb,
     .size = RANKS,
     .steps = 5,
     .freeze_step = 3,
     .common = {.profile = ONEBIT_PROFILE_DEEPSPEED}}};

enum call { SAVE, LOAD, SAVE_FILES, LOAD_FILES, MOVE, CALLS };

struct memory_run {
  const struct checkpoint_case *what;
  struct directories directories;
  onebit_comm_t comms[RANKS];
  struct saved_parts parts;
  pthread_barrier_t everyone;
  onebit_status_t status[RANKS];
  long failures[CALLS]; /* written by rank 0 */
};

static onebit_status_t make_call(enum call call, struct trainee *trainee, struct memory_run *run) {
  size_t bytes = 0;
  const char *path = run->directories.saved;
  switch (call) {
  case SAVE:
    return onebit_optimizer_save(trainee->optimizer, run->parts.memory[trainee->rank],
                                 run->parts.bytes[trainee->rank], &bytes);
  case LOAD:
    return trainee_load(trainee, &run->parts);
  case SAVE_FILES:
    return onebit_optimizer_save_files(trainee->optimizer, path);
  case LOAD_FILES:
    return onebit_optimizer_load_files(trainee->optimizer, path);
  default: /* to plans that are made anew; a call that follows a failure begins where that ended */
    return onebit_optimizer_move(trainee->optimizer, run->comms[trainee->rank]);
  }
}

/* Rank 0 sets the failure between two barriers, so all allocations in between are those of the
 * call. */
static void call_until_it_works(enum call call, struct trainee *trainee, struct memory_run *run) {
  onebit_status_t status = ONEBIT_ERROR_MEMORY;
  bool first = trainee->rank == 0, again = true;
  long n = 0;
  float parameters[TRAINEE_ELEMENTS];
  memcpy(parameters, trainee->parameters, sizeof parameters);
  while (again && n < 1000) {
    pthread_barrier_wait(&run->everyone);
    if (first)
      ob_memory_fail_at(n + 1);
    pthread_barrier_wait(&run->everyone);
    check_case("%s, call %d, allocation %ld fails", run->what->name, (int)call, ++n);
    status = make_call(call, trainee, run);
    CHECK(status == ONEBIT_OK || status == ONEBIT_ERROR_MEMORY, "status %d: %s", (int)status,
          onebit_last_error());
    run->status[trainee->rank] = status;
    pthread_barrier_wait(&run->everyone);
    again = run->status[0] != ONEBIT_OK || run->status[1] != ONEBIT_OK;
    if (status != ONEBIT_OK)
      CHECK_BITS("parameters", trainee->parameters, parameters, TRAINEE_ELEMENTS, ONEBIT_FLOAT32);
    pthread_barrier_wait(&run->everyone);
    if (first)
      ob_memory_fail_at(0);
    pthread_barrier_wait(&run->everyone);
  }
  CHECK_STATUS(status, ONEBIT_OK);
  if (first)
    run->failures[call] = n - 1;
}

static void on_rank(onebit_comm_t comm, void *context) {
  struct memory_run *run = context;
  struct trainee trainee = trainee_create(comm, run->what, 0);
  struct saved_parts after = {0};
  run->comms[trainee.rank] = comm;
  for (int step = 0; step < run->what->steps; step++)
    trainee_step(&trainee, step);
  trainee_save(&trainee, comm, &run->parts);
  for (int call = 0; call < CALLS; call++)
    call_until_it_works((enum call)call, &trainee, run);
  trainee_save(&trainee, comm, &after);
  CHECK(memcmp(after.memory[trainee.rank], run->parts.memory[trainee.rank],
               after.bytes[trainee.rank]) == 0,
        "the state is another one");
  free(after.memory[trainee.rank]);
  trainee_destroy(&trainee);
}

Test(checkpoint_memory, any_allocation_fails) {
  for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
    struct memory_run run = {.what = &cases[k], .directories = directories_create()};
    pthread_barrier_init(&run.everyone, NULL, RANKS);
    on_ranks(RANKS, on_rank, &run);
    pthread_barrier_destroy(&run.everyone);
    for (int call = 0; call < CALLS; call++)
      cr_expect_gt(run.failures[call], 10, "only %ld allocations have failed", run.failures[call]);
    free_parts(&run.parts);
    directories_remove(&run.directories);
    checks_must_hold();
  }
}
