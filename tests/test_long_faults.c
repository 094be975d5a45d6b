/*
 * Allreduces and optimizer steps with faults between them: wrong calls, input that is not finite,
 * calls while busy, late ranks, plans and optimizers that are made again, memory that is out. Every
 * result, and what is left at the end, has the bits of the run without faults, and memory does not
 * grow. ONEBIT_TEST_CALLS says how many allreduces; steps are a tenth. `make check-long` makes more
 * than `make check`.
 */

#define TEST_SECONDS 7200
#include "base/hash.h"
#include "tests/support_long.h"
#include "tests/support_optimizers.h"

static uint64_t calls_wanted(void) {
  const char *text = getenv("ONEBIT_TEST_CALLS");
  return text ? strtoull(text, NULL, 10) : 8000;
}

/* About so many faults in a run, however long it is; from 10^5 calls on one in a thousand. */
static uint64_t every(uint64_t calls) { return calls < 100000 ? calls / 200 + 1 : 1000; }

/* ---- Allreduces ---- */

#define COUNT_MAX 320
static const onebit_plan_options_t plans[] = {
    {.size = sizeof(onebit_plan_options_t), .schedule = ONEBIT_SCHEDULE_EXCHANGE},
    {.size = sizeof(onebit_plan_options_t), .schedule = ONEBIT_SCHEDULE_ALLGATHER},
    {.size = sizeof(onebit_plan_options_t), .schedule = ONEBIT_SCHEDULE_HIERARCHICAL},
    {.size = sizeof(onebit_plan_options_t), .block_size = ONEBIT_BLOCK_BUFFER},
    {.size = sizeof(onebit_plan_options_t), .block_size = 32, .chunk_size = 64}};
static const size_t counts[] = {96, 33, 200, 65, COUNT_MAX};
enum { PLANS = sizeof plans / sizeof plans[0] };

struct reducer {
  struct long_rank self;
  onebit_plan_t plan[PLANS];
  float receive[COUNT_MAX];
};

static bool create_plan(onebit_comm_t comm) {
  onebit_plan_t plan = NULL;
  onebit_status_t status = onebit_plan_create(comm, 77, NULL, &plan);
  CHECK(status == ONEBIT_OK || status == ONEBIT_ERROR_MEMORY, "a plan: %s", onebit_last_error());
  onebit_plan_destroy(plan);
  return status == ONEBIT_OK;
}

/* The call is refused, or skipped, and leaves the result of the one before. */
static void check_refused(struct reducer *reducer, size_t k, const float *send,
                          onebit_status_t wanted) {
  float before[COUNT_MAX];
  memcpy(before, reducer->receive, sizeof before);
  CHECK_STATUS(onebit_allreduce(send, reducer->receive, reducer->plan[k]), wanted);
  CHECK(memcmp(before, reducer->receive, sizeof before) == 0, "a call that failed has a result");
}

static void not_finite(struct reducer *reducer, size_t k, const float *send, bool mine) {
  float bad[COUNT_MAX];
  memcpy(bad, send, counts[k] * sizeof *bad);
  bad[long_draw(&reducer->self, counts[k])] = mine ? NAN : 0;
  check_refused(reducer, k, bad, ONEBIT_SKIPPED);
}

static void wrong_handles(struct reducer *reducer, const float *send, bool mine) {
  void *comm = reducer->self.comm;
  if (!mine)
    return;
  CHECK_STATUS(onebit_allreduce(send, reducer->receive, NULL), ONEBIT_ERROR_ARGUMENT);
  CHECK_STATUS(onebit_allreduce(send, reducer->receive, comm), ONEBIT_ERROR_ARGUMENT);
}

/* The call itself, with others while it is under way. */
static void busy(struct reducer *reducer, size_t k, const float *send) {
  onebit_plan_t plan = reducer->plan[k];
  onebit_request_t request, copy, other;
  float values[COUNT_MAX];
  CHECK_STATUS(onebit_iallreduce(send, reducer->receive, plan, &request), ONEBIT_OK);
  copy = request;
  CHECK_STATUS(onebit_allreduce(send, values, plan), ONEBIT_ERROR_BUSY);
  CHECK_STATUS(onebit_iallreduce(send, values, plan, &other), ONEBIT_ERROR_BUSY);
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_ERROR_BUSY);
  CHECK_STATUS(onebit_plan_export_residual(plan, values, NULL), ONEBIT_ERROR_BUSY);
  CHECK_STATUS(onebit_plan_reset_residual(plan), ONEBIT_ERROR_BUSY);
  CHECK_STATUS(onebit_wait(&request), ONEBIT_OK);
  CHECK_STATUS(onebit_wait(&copy), ONEBIT_ERROR_ARGUMENT);
}

static void make_again(struct reducer *reducer, size_t k) {
  float worker[COUNT_MAX], server[COUNT_MAX];
  onebit_plan_t old = reducer->plan[k];
  CHECK_STATUS(onebit_plan_export_residual(old, worker, server), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_destroy(old), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_create(reducer->self.comm, counts[k], &plans[k], &reducer->plan[k]),
               ONEBIT_OK);
  CHECK_STATUS(onebit_plan_import_residual(reducer->plan[k], worker, server), ONEBIT_OK);
}

static void mismatch(struct reducer *reducer, bool mine) {
  onebit_plan_t plan;
  CHECK_STATUS(onebit_plan_create(reducer->self.comm, mine ? 8 : 9, NULL, &plan),
               ONEBIT_ERROR_MISMATCH);
}

/* Meets the fault; true if the call has been made with it. */
static bool meet_fault(struct reducer *reducer, size_t k, const float *send, enum long_fault fault,
                       bool mine) {
  switch (fault) {
  case LONG_WRONG_ARGUMENT:
    check_refused(reducer, k, mine ? NULL : send, mine ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER);
    break;
  case LONG_NOT_FINITE:
    not_finite(reducer, k, send, mine);
    break;
  case LONG_LATE:
    long_be_late(&reducer->self, mine);
    break;
  case LONG_BUSY:
    busy(reducer, k, send);
    return true;
  case LONG_MADE_AGAIN:
    make_again(reducer, k);
    break;
  case LONG_NO_MEMORY:
    long_without_memory(&reducer->self, mine, create_plan);
    break;
  case LONG_MISMATCH:
    mismatch(reducer, mine);
    break;
  default:
    wrong_handles(reducer, send, mine);
  }
  return false;
}

static void reduce_once(struct reducer *reducer, uint64_t call) {
  struct long_rank *self = &reducer->self;
  size_t k = call % PLANS;
  const float *send = long_input(self, call, counts[k]);
  enum long_fault fault;
  bool mine;
  if (!long_is_due(self, call, &fault, &mine) || !meet_fault(reducer, k, send, fault, mine))
    CHECK_STATUS(onebit_allreduce(send, reducer->receive, reducer->plan[k]), ONEBIT_OK);
  uint64_t *hash = &self->run->hash[self->rank][k];
  *hash = ob_hash(*hash, reducer->receive, counts[k] * sizeof(float));
  long_note_memory(self, call);
}

static void reduce_all(onebit_comm_t comm, void *context) {
  struct reducer reducer = {.self = long_begin(context, comm)};
  struct long_run *run = context;
  float worker[COUNT_MAX] = {0}, server[COUNT_MAX] = {0};
  for (size_t k = 0; k < PLANS; k++)
    CHECK_STATUS(onebit_plan_create(comm, counts[k], &plans[k], &reducer.plan[k]), ONEBIT_OK);
  for (uint64_t call = 0; call < run->calls; call++)
    reduce_once(&reducer, call);
  for (size_t k = 0; k < PLANS; k++) {
    CHECK_STATUS(onebit_plan_export_residual(reducer.plan[k], worker, server), ONEBIT_OK);
    uint64_t hash = ob_hash(OB_HASH_START, worker, sizeof worker);
    run->state[reducer.self.rank][k] = ob_hash(hash, server, sizeof server);
    CHECK_STATUS(onebit_plan_destroy(reducer.plan[k]), ONEBIT_OK);
  }
}

Test(long_faults, allreduces_end_as_without) {
  uint64_t calls = calls_wanted();
  struct long_run *plain = long_create(calls, 0), *faulty = long_create(calls, every(calls));
  on_hosts(LONG_RANKS, 2, reduce_all, plain);
  on_hosts(LONG_RANKS, 2, reduce_all, faulty);
  long_compare("allreduces", plain, faulty);
  long_destroy(plain);
  long_destroy(faulty);
}

/* ---- Steps ---- */

/* Each optimizer has two or three stages: warm-ups end early. */
static const struct any_case trained[] = {
    {ANY(efficient_adam, .gain = 1)},
    {ANY(adam, .freeze_step = 20)},
    {ANY(lamb, .freeze_step = 30)},
    {ANY(zero_one_adam, .variance_update_scaler = 2, .variance_freeze_step = 60,
         .local_step_scaler = 20, .local_step_clipper = 4)},
    {ANY(lion, .beta1 = 0.9)},
    {ANY(momentum, .warmup_steps = 10)}};
enum { TRAINED = sizeof trained / sizeof trained[0], TENSORS = 3, ELEMENTS = 296 };
static const size_t elements[TENSORS] = {65, 200, 31};

struct learner {
  onebit_optimizer_t optimizer;
  onebit_tensor_t tensors[TENSORS];
  float parameters[ELEMENTS];
  uint64_t local; /* steps that sent nothing, so far */
};

struct trainer {
  struct long_rank self;
  struct learner learner[TRAINED];
};

static onebit_status_t create_optimizer(onebit_comm_t comm, size_t k, struct learner *learner) {
  struct any_options options = any_options_of(trained[k].method, trained[k].options);
  return any_create(&options, comm, learner->tensors, TENSORS, &learner->optimizer);
}

static void set_tensors(struct learner *learner) {
  float *at = learner->parameters;
  for (size_t t = 0; t < TENSORS; at += elements[t++])
    learner->tensors[t] = (onebit_tensor_t){
        .parameter = at, .count = elements[t], .weight_decay = 0.01F, .uncompressed = t == 2};
}

static bool create_learner(onebit_comm_t comm) {
  struct learner learner = {0};
  set_tensors(&learner);
  onebit_status_t status = create_optimizer(comm, 1, &learner);
  CHECK(status == ONEBIT_OK || status == ONEBIT_ERROR_MEMORY, "an optimizer: %s",
        onebit_last_error());
  if (status == ONEBIT_OK)
    onebit_optimizer_destroy(learner.optimizer);
  return status == ONEBIT_OK;
}

static void set_gradients(struct trainer *trainer, struct learner *learner, uint64_t call) {
  for (size_t t = 0; t < TENSORS; t++)
    CHECK_STATUS(
        onebit_optimizer_set_gradient(learner->optimizer, t,
                                      long_input(&trainer->self, call * TENSORS + t, elements[t])),
        ONEBIT_OK);
}

static const float rate = 0.001F;

/* The step fails on all ranks, and changes nothing. */
static void check_step_refused(struct learner *learner, float given, onebit_status_t wanted) {
  float before[ELEMENTS];
  memcpy(before, learner->parameters, sizeof before);
  CHECK_STATUS(onebit_optimizer_step(learner->optimizer, given), wanted);
  CHECK(memcmp(before, learner->parameters, sizeof before) == 0, "a step that failed has moved");
}

static void step_not_finite(struct learner *learner, bool mine) {
  static const float bad[200] = {[77] = INFINITY};
  if (mine)
    CHECK_STATUS(onebit_optimizer_set_gradient(learner->optimizer, 1, bad), ONEBIT_OK);
  check_step_refused(learner, rate, ONEBIT_SKIPPED);
}

/* The step itself, opened before, with calls that have to wait for its end. */
static void step_busy(struct learner *learner) {
  onebit_optimizer_t optimizer = learner->optimizer;
  char part[8];
  size_t bytes;
  CHECK_STATUS(onebit_optimizer_begin(optimizer, rate), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_ready(optimizer, 1), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_check(optimizer, NULL), ONEBIT_ERROR_BUSY);
  CHECK_STATUS(onebit_optimizer_set_gradient(optimizer, 0, NULL), ONEBIT_ERROR_BUSY);
  CHECK_STATUS(onebit_optimizer_save(optimizer, part, sizeof part, &bytes), ONEBIT_ERROR_BUSY);
  CHECK_STATUS(onebit_optimizer_step(optimizer, rate), ONEBIT_OK);
}

/* Saved to memory, destroyed, made anew from other parameters, and loaded. */
static void load_again(struct trainer *trainer, size_t k) {
  struct learner *learner = &trainer->learner[k];
  struct long_run *run = trainer->self.run;
  int rank = trainer->self.rank;
  size_t bytes = 0;
  CHECK_STATUS(onebit_optimizer_save(learner->optimizer, NULL, 0, &bytes), ONEBIT_OK);
  void *part = allocate(bytes, 1);
  CHECK_STATUS(onebit_optimizer_save(learner->optimizer, part, bytes, &bytes), ONEBIT_OK);
  run->parts[rank] = part;
  run->part_bytes[rank] = bytes;
  onebit_optimizer_destroy(learner->optimizer);
  memset(learner->parameters, 0, sizeof learner->parameters);
  CHECK_STATUS(create_optimizer(trainer->self.comm, k, learner), ONEBIT_OK);
  long_wait(&trainer->self);
  CHECK_STATUS(onebit_optimizer_load(learner->optimizer, run->parts, run->part_bytes, LONG_RANKS),
               ONEBIT_OK);
  long_wait(&trainer->self);
  free(part);
}

/* A step that sends nothing is each rank's own: what one does wrong in it is not told. */
static bool is_told(enum long_fault fault) {
  return fault == LONG_WRONG_ARGUMENT || fault == LONG_MISMATCH || fault == LONG_NOT_FINITE;
}

/* Meets the fault; true if the step has been made with it. */
static bool meet_step_fault(struct trainer *trainer, size_t k, enum long_fault fault, bool mine) {
  struct learner *learner = &trainer->learner[k];
  void *comm = trainer->self.comm;
  switch (fault) {
  case LONG_WRONG_ARGUMENT:
    check_step_refused(learner, mine ? NAN : rate,
                       mine ? ONEBIT_ERROR_ARGUMENT : ONEBIT_ERROR_PEER);
    break;
  case LONG_MISMATCH:
    check_step_refused(learner, mine ? 2 * rate : rate, ONEBIT_ERROR_MISMATCH);
    break;
  case LONG_NOT_FINITE:
    step_not_finite(learner, mine);
    break;
  case LONG_BUSY:
    step_busy(learner);
    return true;
  case LONG_LATE:
    long_be_late(&trainer->self, mine);
    break;
  case LONG_MADE_AGAIN:
    load_again(trainer, k);
    break;
  case LONG_NO_MEMORY:
    long_without_memory(&trainer->self, mine, create_learner);
    break;
  default:
    CHECK_STATUS(onebit_optimizer_step(comm, rate), ONEBIT_ERROR_ARGUMENT);
  }
  return false;
}

/* In the run without faults: whether the latest step sent nothing. */
static bool was_alone(struct learner *learner) {
  const onebit_optimizer_info_t info = optimizer_info(learner->optimizer);
  bool alone = info.exchanges[2] > learner->local;
  learner->local = info.exchanges[2];
  return alone;
}

static void step_once(struct trainer *trainer, uint64_t call) {
  struct long_rank *self = &trainer->self;
  struct long_run *run = self->run;
  size_t k = call % TRAINED;
  struct learner *learner = &trainer->learner[k];
  enum long_fault fault;
  bool mine, made = false;
  set_gradients(trainer, learner, call);
  if (long_is_due(self, call, &fault, &mine) && !(run->alone[call] && is_told(fault))) {
    made = meet_step_fault(trainer, k, fault, mine);
    if (!made)
      set_gradients(trainer, learner, call);
  }
  if (!made)
    CHECK_STATUS(onebit_optimizer_step(learner->optimizer, rate), ONEBIT_OK);
  if (!run->every && trained[k].method == &ob_method_zero_one_adam && was_alone(learner) &&
      self->rank == 0)
    run->alone[call] = 1;
  uint64_t *hash = &run->hash[self->rank][k];
  *hash = ob_hash(*hash, learner->parameters, sizeof learner->parameters);
  long_note_memory(self, call);
}

/* Norms of what is kept, which are equal where all of it is. */
static uint64_t state_of(onebit_optimizer_t optimizer) {
  uint64_t hash = OB_HASH_START;
  for (size_t t = 0; t < TENSORS; t++) {
    onebit_tensor_statistics_t told = {.size = sizeof told};
    CHECK_STATUS(onebit_optimizer_get_tensor_statistics(optimizer, t, &told), ONEBIT_OK);
    const double norms[] = {told.momentum_norm, told.residual_norm, told.parameter_norm};
    hash = ob_hash(hash, norms, sizeof norms);
  }
  return hash;
}

static void step_all(onebit_comm_t comm, void *context) {
  struct trainer *trainer = allocate(1, sizeof *trainer);
  struct long_run *run = context;
  trainer->self = long_begin(run, comm);
  for (size_t k = 0; k < TRAINED; k++) {
    set_tensors(&trainer->learner[k]);
    for (size_t i = 0; i < ELEMENTS; i++)
      trainer->learner[k].parameters[i] = input_value(i, 0, (int)k);
    CHECK_STATUS(create_optimizer(comm, k, &trainer->learner[k]), ONEBIT_OK);
  }
  for (uint64_t call = 0; call < run->calls; call++)
    step_once(trainer, call);
  for (size_t k = 0; k < TRAINED; k++) {
    run->state[trainer->self.rank][k] = state_of(trainer->learner[k].optimizer);
    onebit_optimizer_destroy(trainer->learner[k].optimizer);
  }
  free(trainer);
}

Test(long_faults, steps_end_as_without) {
  uint64_t steps = calls_wanted() / 10;
  struct long_run *plain = long_create(steps, 0),
                  *faulty = long_create(steps, every(10 * steps) / 10);
  on_hosts(LONG_RANKS, 2, step_all, plain);
  memcpy(faulty->alone, plain->alone, steps);
  on_hosts(LONG_RANKS, 2, step_all, faulty);
  long_compare("optimizer steps", plain, faulty);
  long_destroy(plain);
  long_destroy(faulty);
}
