/* Runs cases of 0/1 Adam and compares them with the oracle. */
#include "tests/support_zero_one.h"

onebit_zero_one_adam_options_t zero_one_options(size_t freeze_step) {
  onebit_zero_one_adam_options_t options = ONEBIT_ZERO_ONE_ADAM_OPTIONS_INIT;
  options.variance_freeze_step = freeze_step;
  options.variance_update_scaler = 2;
  options.local_step_scaler = 3;
  options.local_step_clipper = 4;
  return options;
}

static onebit_zero_one_adam_options_t options_of(const struct zero_one_case *what) {
  onebit_zero_one_adam_options_t options = what->options;
  options.common = what->adam.options.common;
  return options;
}

static bool is_poisoned(const struct zero_one_case *what, int rank, int call) {
  return what->poison != 0.0f && rank == what->poisoned_rank && call % 2 == 0;
}

/* Returns the index of the element that is not finite in a call. */
static size_t poisoned_element(size_t total, int call) { return (size_t)call * 977 % total; }

static void capture_norms(struct zero_one_moment *moment, const struct oracle_zero_one *oracle) {
  const struct oracle_adam *state = oracle->state;
  moment->momentum_norm = allocate(oracle->ranks, sizeof(double));
  moment->residual_norm = allocate(oracle->ranks, sizeof(double));
  for (size_t r = 0; r < oracle->ranks; r++) {
    moment->momentum_norm[r] = sqrt(square_sum(oracle->momentum + r * state->total, state->total));
    for (size_t k = 0; k < state->exchange_count; k++) {
      const struct oracle *bucket = state->exchanges[k].oracle;
      moment->residual_norm[r] =
          hypot(moment->residual_norm[r], sqrt(square_sum(oracle_worker_error(bucket, (int)r),
                                                          oracle_worker_count(bucket, (int)r))));
    }
  }
}

/* True if ranks have made local steps since their last synchronisation, so that their parameters
 * differ. Without compressed tensors local steps are the same on all ranks and do not count. */
static bool is_apart(const struct zero_one_run *run, const struct oracle_zero_one *oracle,
                     int call) {
  const struct oracle_adam *state = oracle->state;
  const uint64_t before = call ? run->moments[call - 1].exchanges[ORACLE_NOTHING] : 0;
  const bool made = call ? state->steps > run->moments[call - 1].steps : state->steps > 0;
  bool compressed = false;
  for (size_t k = 0; k < state->tensors; k++)
    compressed |= !state->uncompressed[k] && state->count[k] > 0;
  if (!made)
    return call && run->moments[call - 1].apart;
  return compressed && oracle->ranks > 1 && oracle->exchanges[ORACLE_NOTHING] > before;
}

static void capture_moment(struct zero_one_run *run, const struct oracle_zero_one *oracle,
                           int call) {
  struct zero_one_moment *moment = &run->moments[call];
  size_t all = oracle->ranks * run->total;
  moment->parameters = allocate(all, sizeof(float));
  memcpy(moment->parameters, oracle->parameter, all * sizeof(float));
  moment->steps = oracle->state->steps;
  moment->skipped = (uint64_t)call + 1 - oracle->state->steps;
  moment->freeze_step = oracle->state->freeze_step;
  moment->local = oracle->clock.local;
  moment->together = oracle_zero_one_is_synchronized(oracle);
  moment->apart = is_apart(run, oracle, call);
  for (int k = 0; k < 3; k++)
    moment->exchanges[k] = oracle->exchanges[k];
  capture_norms(moment, oracle);
}

static void run_oracle(struct zero_one_run *run, struct oracle_zero_one *oracle,
                       const struct adam_learner *learner) {
  const struct zero_one_case *what = run->what;
  size_t size = (size_t)what->adam.size;
  float **gradients = allocate(size, sizeof *gradients);
  for (size_t r = 0; r < size; r++)
    gradients[r] = allocate(run->total, sizeof(float));
  for (int call = 0; call < what->adam.steps; call++) {
    run->moments[call].statuses = allocate(size, sizeof(onebit_status_t));
    for (size_t r = 0; r < size; r++) {
      learner_oracle_gradient(&what->adam, learner, 1, (int)r, call, gradients[r]);
      if (is_poisoned(what, (int)r, call))
        gradients[r][poisoned_element(run->total, call)] = what->poison;
    }
    oracle_zero_one_step(oracle, (const float *const *)gradients, adam_learning_rate(call),
                         run->moments[call].statuses);
    capture_moment(run, oracle, call);
  }
  for (size_t r = 0; r < size; r++)
    free(gradients[r]);
  free(gradients);
}

struct zero_one_run zero_one_prepare(const struct zero_one_case *what) {
  const struct adam_case *adam = &what->adam;
  struct adam_learner learner = learner_make(adam);
  struct zero_one_run run = {.what = what, .total = learner.total};
  run.moments = allocate((size_t)adam->steps, sizeof *run.moments);
  onebit_zero_one_adam_options_t options = options_of(what);
  struct oracle_zero_one *oracle = oracle_zero_one_create(
      adam->size, adam->hosts ? adam->hosts : 1, learner.tensors, adam->tensors->count, &options);
  run_oracle(&run, oracle, &learner);
  oracle_zero_one_destroy(oracle);
  learner_free(&learner);
  return run;
}

void zero_one_release(struct zero_one_run *run) {
  for (int call = 0; call < run->what->adam.steps; call++) {
    free(run->moments[call].statuses);
    free(run->moments[call].parameters);
    free(run->moments[call].momentum_norm);
    free(run->moments[call].residual_norm);
  }
  free(run->moments);
}

static void check_info(const struct zero_one_run *run, onebit_optimizer_t optimizer, int rank,
                       int call) {
  const struct zero_one_moment *wanted = &run->moments[call];
  const onebit_optimizer_info_t info = optimizer_info(optimizer);
  CHECK(strcmp(info.name, "zero_one_adam") == 0, "the name is %s", info.name);
  CHECK(info.steps == wanted->steps && info.skipped == wanted->skipped,
        "call %d: %llu steps, %llu skipped", call, (unsigned long long)info.steps,
        (unsigned long long)info.skipped);
  CHECK((info.stage == ONEBIT_STAGE_COMPRESSED) == wanted->local, "call %d: stage is %d", call,
        (int)info.stage);
  CHECK(info.freeze_step == wanted->freeze_step, "call %d: freeze step is %llu", call,
        (unsigned long long)info.freeze_step);
  for (int k = 0; k < 3; k++)
    CHECK(info.exchanges[k] == wanted->exchanges[k], "call %d: %llu exchanges of kind %d, not %llu",
          call, (unsigned long long)info.exchanges[k], k, (unsigned long long)wanted->exchanges[k]);
  CHECK(!info.synchronized || wanted->together, "call %d: ranks differ, and info denies it", call);
  CHECK(info.synchronized == !wanted->apart, "call %d: info says %d", call, info.synchronized);
  CHECK(is_close(info.momentum_norm, wanted->momentum_norm[rank]),
        "call %d: momentum norm %g, not %g", call, info.momentum_norm, wanted->momentum_norm[rank]);
  CHECK(is_close(info.residual_norm, wanted->residual_norm[rank]), "call %d: error norm %g, not %g",
        call, info.residual_norm, wanted->residual_norm[rank]);
}

static void label_case(const struct zero_one_case *what) {
  const onebit_zero_one_adam_options_t o = options_of(what);
  const struct adam_case *adam = &what->adam;
  check_case("0/1 Adam of %zu tensors on %d ranks, %d hosts, profile %d, freeze %zu, scalers %zu "
             "%zu %zu, block %zd, scale %d, threads %d, buckets of %zu, schedule %d, types %d %d, "
             "form %d, uncompressed %x%s%s%s",
             adam->tensors->count, adam->size, adam->hosts, (int)o.common.profile,
             o.variance_freeze_step, o.variance_update_scaler, o.local_step_scaler,
             o.local_step_clipper, (ptrdiff_t)o.common.block_size, (int)o.common.scale,
             o.common.threads, o.common.bucket_size, (int)o.common.schedule,
             (int)o.common.gradient_dtype, (int)o.common.parameter_dtype, (int)adam->form,
             adam->uncompressed, adam->still ? ", still" : "", adam->absent ? ", absent" : "",
             what->poison != 0.0f ? ", poisoned" : "");
}

/* Makes one call, and checks it. */
static void make_call(const struct zero_one_run *run, onebit_optimizer_t optimizer,
                      struct adam_learner *learner, int rank, int call) {
  const struct adam_case *adam = &run->what->adam;
  const struct zero_one_moment *wanted = &run->moments[call];
  learner_set_gradients(adam, learner, optimizer, rank, call);
  if (is_poisoned(run->what, rank, call))
    oracle_store(learner->gradients[0], poisoned_element(run->total, call),
                 adam->options.common.gradient_dtype, run->what->poison);
  CHECK_STATUS(adam_make_step(adam, optimizer, rank, call), wanted->statuses[rank]);
  learner_check_parameters(adam, learner, "parameters",
                           wanted->parameters + (size_t)rank * run->total);
  check_info(run, optimizer, rank, call);
}

void zero_one_on_rank(onebit_comm_t comm, void *context) {
  const struct zero_one_run *run = context;
  const struct adam_case *adam = &run->what->adam;
  const onebit_zero_one_adam_options_t options = options_of(run->what);
  struct adam_learner learner = learner_make(adam);
  onebit_optimizer_t optimizer;
  label_case(run->what);
  if (CHECK_STATUS(onebit_zero_one_adam_create(comm, learner.tensors, adam->tensors->count,
                                               &options, &optimizer),
                   ONEBIT_OK)) {
    for (int call = 0; call < adam->steps; call++)
      make_call(run, optimizer, &learner, onebit_comm_rank(comm), call);
    onebit_optimizer_destroy(optimizer);
  }
  learner_free(&learner);
}
