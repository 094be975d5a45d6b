/*
 * Tests running out of memory at any allocation. For every n, the n-th allocation of a creation
 * fails, or the n-th call that creates, sizes or maps shared memory, or starts a thread. All ranks
 * must get ONEBIT_ERROR_MEMORY, none may hang, nothing may leak (under the address sanitizer and
 * valgrind), and the communicator must work as before. Calls on existing plans and optimizers
 * allocate nothing, so they cannot run out of memory. Afterwards no shared memory of a host's ranks
 * may have a name.
 */
#include <dirent.h>

#include "base/memory.h"
#include "optimizers/optimizer.h"
#include "tests/support_collectives.h"
#include "tests/support_optimizers.h"

static void create_comms(int size, long fewest) {
  onebit_status_t status = ONEBIT_ERROR_MEMORY;
  long n = 0;
  while (status == ONEBIT_ERROR_MEMORY) {
    onebit_comm_t comms[3] = {NULL, NULL, NULL};
    ob_memory_fail_at(++n);
    status = size == 1 ? onebit_comm_create_self(comms) : onebit_comm_create_loopback(size, comms);
    ob_memory_fail_at(0);
    for (int r = 0; r < size; r++) {
      CHECK((comms[r] == NULL) == (status != ONEBIT_OK), "status and handle do not agree");
      onebit_comm_destroy(comms[r]);
    }
  }
  CHECK_STATUS(status, ONEBIT_OK);
  CHECK(n > fewest, "only %ld allocations failed", n - 1);
  checks_must_hold();
}

Test(memory, comm_create_self) { create_comms(1, 1); }
Test(memory, comm_create_loopback) { create_comms(3, 4); }

/* Also tests that allocating the memory of the progress thread, or starting it, fails. */
Test(memory, comm_create_with_a_thread) {
  setenv("ONEBIT_PROGRESS", "thread", 1);
  create_comms(1, 2);
  create_comms(3, 5);
}

/* Counts the blocks of shared memory whose name begins with this process's number
 * (collectives/hosts.c). */
static int count_shared_blocks(void) {
  char mine[32];
  int count = 0;
  snprintf(mine, sizeof mine, "onebit-%06lx", (unsigned long)getpid() & 0xffffff);
  DIR *directory = opendir("/dev/shm");
  for (const struct dirent *entry; directory && (entry = readdir(directory)) != NULL;)
    count += strncmp(entry->d_name, mine, strlen(mine)) == 0;
  if (directory)
    closedir(directory);
  return count;
}

/* An object whose creation is repeated until no allocation fails. */
struct creation {
  onebit_status_t (*create)(onebit_comm_t comm, const struct creation *creation);
  onebit_plan_options_t plan;
  struct any_case optimizer;
  pthread_barrier_t everyone;
  long failures; /* written by rank 0 */
};

static onebit_status_t create_plan(onebit_comm_t comm, const struct creation *creation) {
  onebit_plan_t plan = NULL;
  onebit_status_t status = onebit_plan_create(comm, 5000, &creation->plan, &plan);
  CHECK((plan == NULL) == (status != ONEBIT_OK), "status and handle do not agree");
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
  return status;
}

static float parameters[5000], gradients[5000]; /* no step is made, so threads can share them */

/* Creates an optimizer of two compressed tensors, an uncompressed one and an empty one. */
static onebit_status_t create_optimizer(onebit_comm_t comm, const struct creation *creation) {
  onebit_tensor_t tensors[] = {{parameters, gradients, 1000, 0, 0, 0},
                               {NULL, NULL, 0, 0, 0, 0},
                               {parameters + 1000, gradients + 1000, 500, 0, 0, 1},
                               {parameters + 1500, gradients + 1500, 3500, 0, 0, 0}};
  onebit_optimizer_t optimizer = NULL;
  onebit_status_t status = ob_optimizer_create(comm, creation->optimizer.method,
                                               creation->optimizer.options, tensors, 4, &optimizer);
  CHECK((optimizer == NULL) == (status != ONEBIT_OK), "status and handle do not agree");
  onebit_optimizer_destroy(optimizer);
  return status;
}

/* Repeats a creation until no allocation fails. Rank 0 sets the failure between two barriers, so
 * that only the creation's allocations count. */
static void create_until_it_works(onebit_comm_t comm, void *context) {
  struct creation *creation = context;
  onebit_status_t status = ONEBIT_ERROR_MEMORY;
  bool first = onebit_comm_rank(comm) == 0;
  long n = 0;
  while (status == ONEBIT_ERROR_MEMORY && n < 2000) {
    pthread_barrier_wait(&creation->everyone);
    if (first)
      ob_memory_fail_at(n + 1);
    pthread_barrier_wait(&creation->everyone);
    check_case("allocation %ld fails", ++n);
    status = creation->create(comm, creation);
    CHECK(status == ONEBIT_OK || status == ONEBIT_ERROR_MEMORY, "status %d: %s", (int)status,
          onebit_last_error());
    pthread_barrier_wait(&creation->everyone);
    if (first) {
      ob_memory_fail_at(0);
      CHECK(count_shared_blocks() == 0, "%d blocks of shared memory are left",
            count_shared_blocks());
    }
    pthread_barrier_wait(&creation->everyone);
    synchronize_ranks(comm);
  }
  CHECK_STATUS(status, ONEBIT_OK);
  if (first)
    creation->failures = n - 1;
}

static void check_creation_on(struct creation *creation, int size, int hosts) {
  pthread_barrier_init(&creation->everyone, NULL, (unsigned)size);
  on_hosts(size, hosts, create_until_it_works, creation);
  pthread_barrier_destroy(&creation->everyone);
  cr_assert_gt(creation->failures, 5 * size, "only %ld allocations failed", creation->failures);
}

static void check_creation(struct creation *creation) {
  for (int size = 1; size <= 3; size++)
    check_creation_on(creation, size, 1);
}

static void check_plan(onebit_operation_t operation, onebit_wire_t wire, onebit_profile_t profile,
                       size_t block_size) {
  struct creation creation = {.create = create_plan, .plan = ONEBIT_PLAN_OPTIONS_INIT};
  creation.plan.operation = operation;
  creation.plan.wire = wire;
  creation.plan.profile = profile;
  creation.plan.block_size = block_size;
  creation.plan.chunk_size = 1024; /* several messages */
  check_creation(&creation);
}

Test(memory, plan_create) {
  check_plan(ONEBIT_ALLREDUCE, ONEBIT_WIRE_BITS, ONEBIT_PROFILE_DEFAULT, 0);
  check_plan(ONEBIT_ALLREDUCE, ONEBIT_WIRE_BITS, ONEBIT_PROFILE_DEFAULT, ONEBIT_BLOCK_BUFFER);
  check_plan(ONEBIT_ALLREDUCE, ONEBIT_WIRE_BITS, ONEBIT_PROFILE_DEEPSPEED, 0);
  check_plan(ONEBIT_ALLREDUCE, ONEBIT_WIRE_DENSE, ONEBIT_PROFILE_DEFAULT, 0);
  check_plan(ONEBIT_ALLGATHER, ONEBIT_WIRE_BITS, ONEBIT_PROFILE_DEFAULT, 0);
  check_plan(ONEBIT_REDUCE_SCATTER, ONEBIT_WIRE_BITS, ONEBIT_PROFILE_DEFAULT, 0);
  check_plan(ONEBIT_ALLGATHER, ONEBIT_WIRE_DENSE, ONEBIT_PROFILE_DEFAULT, 0);
  check_plan(ONEBIT_REDUCE_SCATTER, ONEBIT_WIRE_DENSE, ONEBIT_PROFILE_DEFAULT, 0);
}

Test(memory, plan_create_in_other_schedules) {
  for (int k = 0; k < 4; k++) {
    struct creation creation = {.create = create_plan, .plan = ONEBIT_PLAN_OPTIONS_INIT};
    creation.plan.schedule = k < 2 ? ONEBIT_SCHEDULE_ALLGATHER : ONEBIT_SCHEDULE_HIERARCHICAL;
    creation.plan.wire = k % 2 ? ONEBIT_WIRE_DENSE : ONEBIT_WIRE_BITS;
    creation.plan.block_size = 256;
    creation.plan.chunk_size = 256;
    check_creation_on(&creation, 4, 2);
    check_creation_on(&creation, 3, 1);
    check_creation_on(&creation, 3, 3);
  }
}

Test(memory, plan_create_with_a_thread) {
  struct creation creation = {.create = create_plan, .plan = ONEBIT_PLAN_OPTIONS_INIT};
  setenv("ONEBIT_PROGRESS", "thread", 1);
  creation.plan.schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
  check_creation_on(&creation, 4, 2);
}

#define DEEPSPEED    .common.profile = ONEBIT_PROFILE_DEEPSPEED
#define HIERARCHICAL .common.schedule = ONEBIT_SCHEDULE_HIERARCHICAL
static const struct any_case adams[] = {
    {ANY(adam, .beta1 = 0)},
    {ANY(adam, .common.bucket_size = 1)},
    {ANY(adam, DEEPSPEED)},
    {ANY(adam, .common.parameter_dtype = ONEBIT_BFLOAT16, .common.gradient_dtype = ONEBIT_FLOAT16,
         .common.dense_below = 2000, .common.clip_norm = 1)},
    {ANY(adam, .shards = ONEBIT_SHARDS_STEP)},
    {ANY(adam, .shards = ONEBIT_SHARDS_STEP, .freeze_step = 5,
         .common.gradient_dtype = ONEBIT_BFLOAT16, .common.dense_below = 2000,
         .common.block_size = ONEBIT_BLOCK_BUFFER)},
    {ANY(adam, .shards = ONEBIT_SHARDS_PARAMETERS, .common.parameter_dtype = ONEBIT_FLOAT16,
         .common.bucket_size = 1, .common.clip_norm = 1)},
};

#define SIXTEEN_BITS .common.gradient_dtype = ONEBIT_BFLOAT16
static const struct any_case others[] = {
    {ANY(lamb, .beta1 = 0)},
    {ANY(lamb, DEEPSPEED, SIXTEEN_BITS)},
    {ANY(efficient_adam, .beta1 = 0)},
    {ANY(efficient_adam, SIXTEEN_BITS, .common.bucket_size = 1)},
    {ANY(lion, .beta1 = 0)},
    {ANY(lion, SIXTEEN_BITS, .common.bucket_size = 1)},
    {ANY(momentum, .common.block_size = ONEBIT_BLOCK_BUFFER)},
    {ANY(zero_one_adam, .beta1 = 0)},
    {ANY(zero_one_adam, DEEPSPEED)},
};

static void check_optimizers(const struct any_case *cases, size_t count) {
  for (size_t k = 0; k < count; k++) {
    struct creation creation = {.create = create_optimizer, .optimizer = cases[k]};
    check_creation(&creation);
  }
}

Test(memory, adam_create) { check_optimizers(adams, sizeof adams / sizeof adams[0]); }
Test(memory, other_optimizers_create) {
  check_optimizers(others, sizeof others / sizeof others[0]);
}

Test(memory, adam_create_on_several_hosts) {
  const struct any_case cases[] = {{ANY(adam, HIERARCHICAL)},
                                   {ANY(adam, HIERARCHICAL, .common.bucket_size = 3500)}};
  for (size_t k = 0; k < 2; k++) {
    struct creation creation = {.create = create_optimizer, .optimizer = cases[k]};
    check_creation_on(&creation, 4, 2);
  }
}

/* Settings for the calls that are made while any allocation would fail. */
struct calls {
  pthread_barrier_t everyone;
  onebit_schedule_t schedule; /* of the allreduce, and of the optimizer unless it is allgather */
  onebit_shards_t shards;
};

/* Makes calls while any allocation would fail. Each call is made twice, because a repeated call
 * must not allocate either. */
static void call_without_memory(onebit_comm_t comm, void *context) {
  struct calls *calls = context;
  pthread_barrier_t *everyone = &calls->everyone;
  bool first = onebit_comm_rank(comm) == 0;
  float send[1200] = {1.0f}, receive[1200] = {0}; /* large enough for four ranks */
  onebit_tensor_t tensor = {receive, send, 300, 0, 0, 0};
  onebit_adam_options_t options = ONEBIT_ADAM_OPTIONS_INIT;
  onebit_plan_t plans[3];
  onebit_optimizer_t optimizer = NULL;
  options.freeze_step = 2;
  options.common.clip_norm = 1;
  options.shards = calls->shards;
  options.common.gradient_dtype = ONEBIT_BFLOAT16;
  if (calls->shards != ONEBIT_SHARDS_STEP)
    options.common.parameter_dtype = ONEBIT_BFLOAT16;
  if (calls->schedule != ONEBIT_SCHEDULE_ALLGATHER)
    options.common.schedule = calls->schedule;
  for (int k = 0; k < 3; k++) {
    onebit_plan_options_t plan = {.size = sizeof plan, .operation = (onebit_operation_t)k};
    if (k == ONEBIT_ALLREDUCE)
      plan.schedule = calls->schedule;
    CHECK_STATUS(onebit_plan_create(comm, 300, &plan, &plans[k]), ONEBIT_OK);
  }
  CHECK_STATUS(onebit_adam_create(comm, &tensor, 1, &options, &optimizer), ONEBIT_OK);
  for (int turn = 0; turn < 2; turn++)
    for (int k = 0; k < 6; k++) {
      onebit_request_t request = NULL;
      pthread_barrier_wait(everyone);
      if (first)
        ob_memory_fail_at(1);
      pthread_barrier_wait(everyone);
      if (k < 3)
        CHECK_STATUS(call_collective((onebit_operation_t)k, send, receive, plans[k]), ONEBIT_OK);
      else
        CHECK_STATUS(
            start_collective((onebit_operation_t)(k - 3), send, receive, plans[k - 3], &request),
            ONEBIT_OK);
      CHECK_STATUS(onebit_wait(&request), ONEBIT_OK);
      CHECK_STATUS(onebit_optimizer_step(optimizer, 0.1f), ONEBIT_OK);
    }
  pthread_barrier_wait(everyone);
  if (first) { /* no allocation has used up the failure, so it happens now */
    onebit_comm_t comm_that_fails;
    CHECK_STATUS(onebit_comm_create_self(&comm_that_fails), ONEBIT_ERROR_MEMORY);
    ob_memory_fail_at(0);
  }
  pthread_barrier_wait(everyone);
  for (int k = 0; k < 3; k++)
    CHECK_STATUS(onebit_plan_destroy(plans[k]), ONEBIT_OK);
  onebit_optimizer_destroy(optimizer);
}

static void check_calls(int size, int hosts, onebit_schedule_t schedule, onebit_shards_t shards) {
  struct calls calls = {.schedule = schedule, .shards = shards};
  pthread_barrier_init(&calls.everyone, NULL, (unsigned)size);
  on_hosts(size, hosts, call_without_memory, &calls);
  pthread_barrier_destroy(&calls.everyone);
}

Test(memory, calls_allocate_nothing) {
  for (int size = 1; size <= 3; size++)
    for (int shards = ONEBIT_SHARDS_NONE; shards <= ONEBIT_SHARDS_PARAMETERS; shards++)
      check_calls(size, 1, ONEBIT_SCHEDULE_AUTOMATIC, (onebit_shards_t)shards);
  check_calls(4, 2, ONEBIT_SCHEDULE_ALLGATHER, ONEBIT_SHARDS_NONE);
  check_calls(4, 2, ONEBIT_SCHEDULE_HIERARCHICAL, ONEBIT_SHARDS_NONE);
}
