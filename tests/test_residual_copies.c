/*
 * Tests plans and optimizers with only one copy of the residuals. Calls that succeed must give the
 * bits of the oracle, or of an optimizer with two copies. After a call that is skipped or fails,
 * residuals must equal the former ones up to two roundings, and to the bit where the input was not
 * finite.
 */
#include <float.h>

#include "optimizers/optimizer.h"
#include "tests/support_collectives.h"
#include "tests/support_optimizers.h"

enum { STEPS = 3 };

/* The reason of a bad call: rank 0 has a value that is not finite, or has no receive buffer. */
enum bad { SKIPPED, FAILED, BAD_CALLS };

/* Checks e' = fl(c - x) with c = fl(e + x), each accurate to half a unit in the last place. Padding
 * has x = 0. */
static void check_undone(const struct kept_errors *before, const struct kept_errors *after,
                         const void *send, size_t sent, onebit_dtype_t dtype) {
  for (size_t i = 0; i < before->worker_count; i++) {
    const float x = i < sent ? oracle_load(send, i, dtype) : 0, e = before->worker[i];
    const float unit = isfinite(x) ? FLT_EPSILON * (fabsf(e) + fabsf(x)) : 0;
    if (!CHECK(fabsf(after->worker[i] - e) <= unit, "element %zu: %.9g before, %.9g after", i,
               (double)e, (double)after->worker[i]))
      break;
  }
}

/* Checks that a residual was restored up to a few roundings of its largest value. The values that
 * were added to it are unknown, except for their size. */
static void check_close(const char *name, const float *before, const float *after, size_t count) {
  float largest = 1;
  for (size_t i = 0; i < count; i++)
    largest = fmaxf(largest, fabsf(before[i]));
  for (size_t i = 0; i < count; i++)
    if (!CHECK(fabsf(after[i] - before[i]) <= 8 * FLT_EPSILON * largest,
               "%s, element %zu: %.9g before, %.9g after", name, i, (double)before[i],
               (double)after[i]))
      break;
}

static void call_badly(enum bad bad, const struct rank_plan *rank_plan) {
  const onebit_plan_options_t *options = &rank_plan->run->what.options;
  const int rank = rank_plan->rank;
  void *receive = rank == 0 && bad == FAILED ? NULL : rank_plan->receive;
  rank_plan_fill(rank_plan, STEPS);
  if (rank == 0 && bad == SKIPPED)
    oracle_store(rank_plan->send, rank_plan->sent / 2, options->dtype, NAN);
  struct kept_errors before = export_errors(rank_plan->plan);
  CHECK_STATUS(call_collective(options->operation, rank_plan->send, receive, rank_plan->plan),
               bad == SKIPPED ? ONEBIT_SKIPPED
               : rank == 0    ? ONEBIT_ERROR_ARGUMENT
                              : ONEBIT_ERROR_PEER);
  struct kept_errors after = export_errors(rank_plan->plan);
  check_undone(&before, &after, rank_plan->send, rank_plan->sent, options->dtype);
  check_close("server", before.server, after.server, before.server_count);
  free_errors(&before);
  free_errors(&after);
}

/* Bytes of the scratch memory with which calls are undone: two blocks, and the words of one
 * block. */
enum { SCRATCH = (2 * 2048 + 2048 / 32) * 4 };

/* The plan with one copy is smaller by the size of a copy, except for its scratch memory and one
 * byte per block. */
static void check_memory(const struct rank_plan *rank_plan, onebit_comm_t comm) {
  const struct collective_case *what = &rank_plan->run->what;
  onebit_plan_options_t options = what->options;
  onebit_plan_t other;
  options.residual_copies = 2;
  CHECK_STATUS(onebit_plan_create(comm, what->count, &options, &other), ONEBIT_OK);
  const onebit_plan_info_t one = plan_info(rank_plan->plan), two = plan_info(other);
  const uint64_t saved = (one.worker_residual_count + one.server_residual_count) * 4;
  CHECK(one.memory_bytes + saved <= two.memory_bytes + SCRATCH + 64, "%llu bytes, and %llu",
        (unsigned long long)one.memory_bytes, (unsigned long long)two.memory_bytes);
  CHECK_STATUS(onebit_plan_destroy(other), ONEBIT_OK);
}

static void call_well_and_badly(onebit_comm_t comm, void *context) {
  const struct collective_run *run = context;
  struct rank_plan rank_plan;
  rank_plan_create(&rank_plan, comm, run);
  check_memory(&rank_plan, comm);
  for (int step = 0; step < STEPS; step++)
    rank_plan_call(&rank_plan, step);
  check_errors(rank_plan.plan, run->oracle, rank_plan.rank);
  for (int bad = 0; run->what.count && bad < BAD_CALLS; bad++)
    call_badly((enum bad)bad, &rank_plan);
  rank_plan_fill(&rank_plan, STEPS);
  CHECK_STATUS(call_collective(run->what.options.operation, rank_plan.send, rank_plan.receive,
                               rank_plan.plan),
               ONEBIT_OK);
  rank_plan_free(&rank_plan);
}

static void check_counts(struct collective_case what) {
  static const size_t counts[] = {0, 1, 33, 4500};
  for (size_t k = 0; k < 4; k++)
    for (what.size = 1; what.size <= 3; what.size += 2) {
      what.count = counts[k];
      what.options.dtype = (onebit_dtype_t)(k % 3);
      collective_check(&what, call_well_and_badly);
    }
}

static struct collective_case make_case(onebit_operation_t operation, onebit_schedule_t schedule) {
  struct collective_case what = {.steps = STEPS, .options = ONEBIT_PLAN_OPTIONS_INIT};
  what.options.residual_copies = 1;
  what.options.operation = operation;
  what.options.schedule = schedule;
  return what;
}

Test(residual_copies, exchange) {
  check_counts(make_case(ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_EXCHANGE));
}

Test(residual_copies, messages_to_all) {
  check_counts(make_case(ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_ALLGATHER));
  check_counts(make_case(ONEBIT_ALLGATHER, ONEBIT_SCHEDULE_AUTOMATIC));
  check_counts(make_case(ONEBIT_REDUCE_SCATTER, ONEBIT_SCHEDULE_AUTOMATIC));
}

Test(residual_copies, one_scale) {
  struct collective_case what = make_case(ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_EXCHANGE);
  what.options.block_size = ONEBIT_BLOCK_BUFFER;
  check_counts(what);
  what.options.block_size = 0;
  what.options.schedule = ONEBIT_SCHEDULE_AUTOMATIC;
  what.options.profile = ONEBIT_PROFILE_DEEPSPEED;
  check_counts(what);
}

static void create_plan_on_hosts(onebit_comm_t comm, void *context) {
  onebit_plan_t plan;
  (void)context;
  onebit_plan_options_t options = {
      .size = sizeof options, .residual_copies = 1, .schedule = ONEBIT_SCHEDULE_HIERARCHICAL};
  CHECK_STATUS(onebit_plan_create(comm, 100, &options, &plan), ONEBIT_ERROR_UNSUPPORTED);
  CHECK_WORDS("residual_copies");
}

Test(residual_copies, not_where_hosts_add_up) { on_hosts(4, 2, create_plan_on_hosts, NULL); }

/* --- Optimizers */

enum { TENSORS = 3, EACH = 2500, COUNT = TENSORS * EACH, TRAINED = 9, BAD_STEP = 6 };

static const struct any_case trained[] = {
    {ANY(efficient_adam, .beta2 = 0.99, .warmup_steps = ONEBIT_WARMUP_NONE)},
    {ANY(efficient_adam, .trust_ratio = 1, .warmup_steps = 2)},
    {ANY(efficient_adam, .warmup_steps = 3)},
    {ANY(adam, .freeze_step = 3)},
    {ANY(adam, .freeze_step = 3, .exchange = ONEBIT_ADAM_EXCHANGE_STEP)},
    {ANY(momentum, .warmup_steps = ONEBIT_WARMUP_NONE)},
    {ANY(momentum, .warmup_steps = 3)},
    {ANY(zero_one_adam, .variance_freeze_step = 5, .variance_update_scaler = 2,
         .local_step_scaler = 3, .local_step_clipper = 2)},
    {ANY(lion, .beta2 = 0.9)},
};
enum { METHODS = sizeof trained / sizeof trained[0] };

struct training {
  const struct any_case *what;
  onebit_optimizer_options_t common;
};

struct trainee {
  float *parameters, *gradients;
  onebit_optimizer_t optimizer;
};

static struct trainee create_trainee(onebit_comm_t comm, const struct training *training,
                                     int copies) {
  struct trainee trainee = {allocate(COUNT, sizeof(float)), allocate(COUNT, sizeof(float)), NULL};
  struct any_options options = any_options_of(training->what->method, training->what->options);
  onebit_tensor_t tensors[TENSORS];
  for (size_t t = 0; t < TENSORS; t++)
    tensors[t] = (onebit_tensor_t){
        trainee.parameters + t * EACH, trainee.gradients + t * EACH, EACH, 0.01f, 0, t == 1};
  *any_common(&options) = training->common;
  any_common(&options)->residual_copies = copies;
  fill_input(trainee.parameters, ONEBIT_FLOAT32, COUNT, 99, 0);
  CHECK_STATUS(any_create(&options, comm, tensors, TENSORS, &trainee.optimizer), ONEBIT_OK);
  return trainee;
}

static void destroy_trainee(struct trainee *trainee) {
  onebit_optimizer_destroy(trainee->optimizer);
  free(trainee->parameters);
  free(trainee->gradients);
}

static struct kept_errors bucket_errors(const struct trainee *trainee, size_t bucket) {
  return export_errors(trainee->optimizer->buckets[bucket].bits);
}

/* Makes a step with a value that is not finite in the bucket that is sent last. The other buckets
 * have succeeded before. */
static void step_badly(struct trainee *trainee, int rank) {
  struct kept_errors before[TENSORS];
  const size_t buckets = trainee->optimizer->bucket_count;
  for (size_t u = 0; u < buckets; u++)
    before[u] = bucket_errors(trainee, u);
  fill_input(trainee->gradients, ONEBIT_FLOAT32, COUNT, rank, 77);
  if (rank == 0)
    trainee->gradients[7] = INFINITY;
  CHECK_STATUS(onebit_optimizer_step(trainee->optimizer, 0.01f), ONEBIT_SKIPPED);
  for (size_t u = 0; u < buckets; u++) {
    struct kept_errors after = bucket_errors(trainee, u);
    check_close("worker", before[u].worker, after.worker, after.worker_count);
    check_close("server", before[u].server, after.server, after.server_count);
    free_errors(&after);
    free_errors(&before[u]);
  }
}

static uint64_t optimizer_memory(const struct trainee *trainee) {
  return optimizer_info(trainee->optimizer).memory_bytes;
}

static void train_on_rank(onebit_comm_t comm, void *context) {
  const struct training *training = context;
  const int rank = onebit_comm_rank(comm);
  struct trainee one = create_trainee(comm, training, 1), two = create_trainee(comm, training, 2);
  for (int step = 0; step < TRAINED; step++) {
    if (step == BAD_STEP && ob_optimizer_exchange(one.optimizer) == OB_EXCHANGE_BITS)
      step_badly(&one, rank), step_badly(&two, rank);
    fill_input(one.gradients, ONEBIT_FLOAT32, COUNT, rank, step);
    fill_input(two.gradients, ONEBIT_FLOAT32, COUNT, rank, step);
    CHECK_STATUS(onebit_optimizer_step(one.optimizer, 0.01f), ONEBIT_OK);
    CHECK_STATUS(onebit_optimizer_step(two.optimizer, 0.01f), ONEBIT_OK);
    if (step < BAD_STEP)
      CHECK_BITS("parameters", one.parameters, two.parameters, COUNT, ONEBIT_FLOAT32);
  }
  const uint64_t compressed = 2 * EACH, buckets = one.optimizer->bucket_count;
  CHECK(optimizer_memory(&one) + 4 * compressed <=
            optimizer_memory(&two) + buckets * (SCRATCH + 64),
        "%llu bytes, and %llu", (unsigned long long)optimizer_memory(&one),
        (unsigned long long)optimizer_memory(&two));
  destroy_trainee(&one);
  destroy_trainee(&two);
}

Test(residual_copies, optimizers) {
  for (size_t k = 0; k < METHODS; k++)
    for (size_t bucket_size = 0; bucket_size < 2; bucket_size++)
      for (int size = 1; size <= 3; size += 2) {
        struct training training = {&trained[k], ONEBIT_OPTIMIZER_OPTIONS_INIT};
        training.common.bucket_size = bucket_size;
        check_case("%s, row %zu, %d ranks, bucket_size %zu", trained[k].method->name, k, size,
                   bucket_size);
        on_ranks(size, train_on_rank, &training);
      }
}
