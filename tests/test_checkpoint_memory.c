/*
 * Tests allocations that fail while an optimizer or an outer step is saved, loaded or moved. Every
 * allocation fails once, on either rank. All ranks must then get an error, the state must be
 * unchanged, and nothing may leak (under the address sanitizer and valgrind). The previous
 * checkpoint must still exist, and the call must succeed when it is repeated.
 */
#include "base/memory.h"
#include "tests/support_disk.h"
#include "tests/support_outer.h"

enum { RANKS = 2, MOST_FAILURES = 1000 };
enum call { SAVE, LOAD, SAVE_FILES, LOAD_FILES, MOVE, CALLS };
/* The calls that only outer steps have, in addition to those of optimizers. */
enum { SAVE_SITE = CALLS, LOAD_SITE, MOVE_SITE, OUTER_CALLS };

struct memory_run {
  const struct checkpoint_case *what; /* the optimizer's case; NULL for an outer step */
  int outer_call;                     /* the outer step's call that is tested */
  struct directories directories;
  onebit_comm_t next[RANKS]; /* the communicators to which objects are moved */
  struct saved_parts parts;
  pthread_barrier_t everyone;
  onebit_status_t status[RANKS];
  long failures[OUTER_CALLS]; /* written by rank 0 */
};

/* Makes a call on a rank's optimizer or outer step. */
typedef onebit_status_t call_maker(struct memory_run *run, int call, void *object);

/* Repeats a call until no allocation fails. Rank 0 sets the failure between two barriers, so that
 * only the call's allocations count. */
static void repeat_until_success(struct memory_run *run, int rank, int call, call_maker *make_call,
                                 void *object, const float *parameters, size_t count) {
  onebit_status_t status = ONEBIT_ERROR_MEMORY;
  bool again = true;
  long n = 0;
  float *before = allocate(count, sizeof *before);
  memcpy(before, parameters, count * sizeof *before);
  while (again && n < MOST_FAILURES) {
    pthread_barrier_wait(&run->everyone);
    if (rank == 0)
      ob_memory_fail_at(n + 1);
    pthread_barrier_wait(&run->everyone);
    check_case("%s, call %d, allocation %ld fails", run->what ? run->what->name : "outer step",
               call, ++n);
    status = make_call(run, call, object);
    CHECK(status == ONEBIT_OK || status == ONEBIT_ERROR_MEMORY, "status %d: %s", (int)status,
          onebit_last_error());
    run->status[rank] = status;
    pthread_barrier_wait(&run->everyone);
    again = run->status[0] != ONEBIT_OK || run->status[1] != ONEBIT_OK;
    CHECK_BITS("parameters", parameters, before, count, ONEBIT_FLOAT32);
    pthread_barrier_wait(&run->everyone);
    if (rank == 0)
      ob_memory_fail_at(0);
    pthread_barrier_wait(&run->everyone);
  }
  CHECK_STATUS(status, ONEBIT_OK);
  if (rank == 0)
    run->failures[call] = n - 1;
  free(before);
}

/* Runs the body on both ranks, with communicators to which they can move. */
static void run_on_ranks(struct memory_run *run, rank_body *body) {
  run->directories = directories_create();
  pthread_barrier_init(&run->everyone, NULL, RANKS);
  CHECK_STATUS(onebit_comm_create_loopback(RANKS, run->next), ONEBIT_OK);
  on_ranks(RANKS, body, run);
  for (int rank = 0; rank < RANKS; rank++)
    onebit_comm_destroy(run->next[rank]);
  pthread_barrier_destroy(&run->everyone);
  directories_remove(&run->directories);
  free_parts(&run->parts);
}

/* ---- Optimizers ---- */

static const struct checkpoint_case cases[] = {
    {.name = "adam", .method = &ob_method_adam, .size = RANKS, .steps = 5, .freeze_step = 3},
    {.name = "lamb, deepspeed",
     .method = &ob_method_lamb,
     .size = RANKS,
     .steps = 5,
     .freeze_step = 3,
     .common = {.profile = ONEBIT_PROFILE_DEEPSPEED}}};

static onebit_status_t call_optimizer(struct memory_run *run, int call, void *object) {
  struct trainee *trainee = object;
  size_t bytes = 0;
  switch (call) {
  case SAVE:
    return onebit_optimizer_save(trainee->optimizer, run->parts.memory[trainee->rank],
                                 run->parts.bytes[trainee->rank], &bytes);
  case LOAD:
    return trainee_load(trainee, &run->parts);
  case SAVE_FILES:
    return onebit_optimizer_save_files(trainee->optimizer, run->directories.saved);
  case LOAD_FILES:
    return onebit_optimizer_load_files(trainee->optimizer, run->directories.saved);
  default: /* moves to new plans; a call after a failure continues where the failed one ended */
    return onebit_optimizer_move(trainee->optimizer, run->next[trainee->rank]);
  }
}

static void check_optimizer_calls(onebit_comm_t comm, void *context) {
  struct memory_run *run = context;
  struct trainee trainee = trainee_create(comm, run->what, 0);
  struct saved_parts after = {0};
  for (int step = 0; step < run->what->steps; step++)
    trainee_step(&trainee, step);
  trainee_save(&trainee, comm, &run->parts);
  for (int call = 0; call < CALLS; call++)
    repeat_until_success(run, trainee.rank, call, call_optimizer, &trainee, trainee.parameters,
                         TRAINEE_ELEMENTS);
  trainee_save(&trainee, comm, &after);
  CHECK(memcmp(after.memory[trainee.rank], run->parts.memory[trainee.rank],
               after.bytes[trainee.rank]) == 0,
        "the state is another one");
  free(after.memory[trainee.rank]);
  trainee_destroy(&trainee);
}

Test(checkpoint_memory, any_allocation_fails) {
  for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
    struct memory_run run = {.what = &cases[k]};
    run_on_ranks(&run, check_optimizer_calls);
    for (int call = 0; call < CALLS; call++)
      cr_expect_gt(run.failures[call], 10, "only %ld allocations have failed", run.failures[call]);
    checks_must_hold();
  }
}

/* ---- Outer steps ---- */

static onebit_status_t call_outer(struct memory_run *run, int call, void *object) {
  struct outer_trained *it = object;
  size_t bytes;
  switch (call) {
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

static void check_outer_calls(onebit_comm_t comm, void *context) {
  struct memory_run *run = context;
  const bool is_site = run->outer_call >= SAVE_SITE;
  struct outer_trained *it = allocate(1, sizeof *it);
  onebit_outer_options_t options = outer_options(1, ONEBIT_OUTER_MOMENTUM);
  options.fragments = is_site ? 1 : 2;
  options.delay = run->outer_call < MOVE ? 3 : 0;
  if (is_site)
    outer_create_site(it, comm, &options);
  else
    outer_create(it, comm, &options);
  outer_train_to(it, 1, 5);
  outer_save(it, comm, &run->parts);
  if (!is_site)
    CHECK_STATUS(onebit_outer_save_files(it->outer, run->directories.saved), ONEBIT_OK);
  repeat_until_success(run, it->rank, run->outer_call, call_outer, it, it->p, OUTER_ELEMENTS);
  struct saved_parts after = {0};
  const size_t own = run->parts.bytes[it->rank];
  after.memory[0] = allocate(1, own);
  CHECK_STATUS(onebit_outer_save(it->outer, after.memory[0], own, &after.bytes[0]), ONEBIT_OK);
  CHECK(memcmp(after.memory[0], run->parts.memory[it->rank], own) == 0, "the state has changed");
  free(after.memory[0]);
  outer_train_to(it, 6, 9);
  synchronize_ranks(comm);
  outer_end(it);
}

Test(outer_memory, every_allocation_fails_once) {
  for (int call = 0; call < OUTER_CALLS; call++) {
    struct memory_run run = {.outer_call = call};
    run_on_ranks(&run, check_outer_calls);
    cr_log_info("call %d: %ld allocations", call, run.failures[call]);
    cr_expect_geq(run.failures[call], 4, "call %d: %ld failures", call, run.failures[call]);
  }
}
