/* Cases of 0/1 Adam against the oracle. */
#include "tests/support_zero_one.h"

onebit_zero_one_adam_options_t zero_one_options(size_t freeze_step) {
  onebit_zero_one_adam_options_t options = ONEBIT_ZERO_ONE_ADAM_OPTIONS_INIT;
  options.variance_freeze_step = freeze_step;
  options.variance_update_scaler = 2;
  options.local_step_scaler = 3;
  options.local_step_clipper = 4;
  return options;
}

static size_t count_elements(const struct adam_tensors *tensors) {
  size_t total = 0;
  for (size_t k = 0; k < tensors->count; k++)
    total += tensors->list[k].count;
  return total;
}

/* Describes tensors whose parameters and gradients lie in arrays of their types. */
static void describe_tensors(const struct zero_one_case *what, void *parameters, void *gradients,
                             onebit_tensor_t *tensors) {
  const onebit_optimizer_options_t *common = &what->options.common;
  char *parameter = parameters, *gradient = gradients;
  for (size_t k = 0; k < what->tensors->count; k++) {
    const struct adam_tensor *one = &what->tensors->list[k];
    tensors[k] = (onebit_tensor_t){one->count ? parameter : NULL,
                                   one->count ? gradient : NULL,
                                   one->count,
                                   one->weight_decay,
                                   one->factor,
                                   what->uncompressed && k % 2};
    parameter += one->count * dtype_size(common->parameter_dtype);
    gradient += one->count * dtype_size(common->gradient_dtype);
  }
}

/* True if the rank has a gradient of the tensor in this call. */
static bool has_gradient(const struct zero_one_case *what, size_t tensor, int rank, int call) {
  return !what->absent || (tensor + (size_t)rank + (size_t)call) % 5 != 0;
}

static bool is_poisoned(const struct zero_one_case *what, int rank, int call) {
  return what->poison != 0.0f && rank == what->poisoned_rank && call % 2 == 0;
}

/* Fills a gradient as float32, rounded to the type of gradients. */
static void fill_gradient(const struct zero_one_case *what, float *gradient, size_t total, int rank,
                          int call) {
  onebit_dtype_t dtype = what->options.common.gradient_dtype;
  size_t i = 0;
  for (size_t k = 0; k < what->tensors->count; k++)
    for (size_t j = 0; j < what->tensors->list[k].count; j++, i++) {
      uint32_t room;
      bool none = (what->still && i % 13 == 5) || !has_gradient(what, k, rank, call);
      oracle_store(&room, 0, dtype, none ? 0.0f : input_value(i, rank, call));
      gradient[i] = oracle_load(&room, 0, dtype);
    }
  if (is_poisoned(what, rank, call) && total)
    gradient[(size_t)call * 977 % total] = what->poison;
}

static double norm_of(const float *values, size_t count) {
  double sum = 0.0;
  for (size_t i = 0; i < count; i++)
    sum += (double)values[i] * (double)values[i];
  return sqrt(sum);
}

static void capture_norms(struct zero_one_moment *moment, const struct oracle_zero_one *oracle) {
  moment->momentum_norm = allocate((size_t)oracle->ranks, sizeof(double));
  moment->residual_norm = allocate((size_t)oracle->ranks, sizeof(double));
  for (int r = 0; r < oracle->ranks; r++) {
    moment->momentum_norm[r] = norm_of(oracle->momentum + (size_t)r * oracle->total, oracle->total);
    for (size_t k = 0; k < oracle->bucket_count; k++) {
      const struct oracle *bucket = oracle->buckets[k].oracle;
      moment->residual_norm[r] =
          hypot(moment->residual_norm[r],
                norm_of(oracle_worker_error(bucket, r), oracle_worker_count(bucket, r)));
    }
  }
}

/* True if ranks have made a local step since their last synchronisation. Without compressed tensors
 * a local step is the same on all ranks. */
static bool is_apart(const struct zero_one_run *run, const struct oracle_zero_one *oracle,
                     int call) {
  const uint64_t before = call ? run->moments[call - 1].exchanges[ORACLE_NOTHING] : 0;
  const bool made = call ? oracle->steps > run->moments[call - 1].steps : oracle->steps > 0;
  bool compressed = false;
  for (size_t k = 0; k < oracle->tensors; k++)
    compressed |= !oracle->uncompressed[k] && oracle->count[k] > 0;
  if (!made)
    return call && run->moments[call - 1].apart;
  return compressed && oracle->ranks > 1 && oracle->exchanges[ORACLE_NOTHING] > before;
}

static void capture_moment(struct zero_one_run *run, const struct oracle_zero_one *oracle,
                           int call) {
  struct zero_one_moment *moment = &run->moments[call];
  size_t all = (size_t)oracle->ranks * run->total;
  moment->parameters = allocate(all, sizeof(float));
  memcpy(moment->parameters, oracle->parameter, all * sizeof(float));
  moment->steps = oracle->steps;
  moment->skipped = (uint64_t)call + 1 - oracle->steps;
  moment->freeze_step = oracle->freeze_step;
  moment->local = oracle->clock.local;
  moment->together = oracle_zero_one_is_synchronized(oracle);
  moment->apart = is_apart(run, oracle, call);
  for (int k = 0; k < 3; k++)
    moment->exchanges[k] = oracle->exchanges[k];
  capture_norms(moment, oracle);
}

static void run_oracle(struct zero_one_run *run, struct oracle_zero_one *oracle) {
  size_t size = (size_t)run->what->size;
  float **gradients = allocate(size, sizeof *gradients);
  for (size_t r = 0; r < size; r++)
    gradients[r] = allocate(run->total, sizeof(float));
  for (int call = 0; call < run->what->steps; call++) {
    run->moments[call].statuses = allocate(size, sizeof(onebit_status_t));
    for (size_t r = 0; r < size; r++)
      fill_gradient(run->what, gradients[r], run->total, (int)r, call);
    oracle_zero_one_step(oracle, (const float *const *)gradients, adam_learning_rate(call),
                         run->moments[call].statuses);
    capture_moment(run, oracle, call);
  }
  for (size_t r = 0; r < size; r++)
    free(gradients[r]);
  free(gradients);
}

/* Fills the parameters that all ranks start with, in their type. */
static void fill_start(const struct zero_one_run *run) {
  for (size_t i = 0; i < run->total; i++)
    oracle_store(run->start, i, run->what->options.common.parameter_dtype, input_value(i, 50, 7));
}

struct zero_one_run zero_one_prepare(const struct zero_one_case *what) {
  struct zero_one_run run = {.what = what, .total = count_elements(what->tensors)};
  onebit_tensor_t tensors[10];
  run.start = allocate(run.total, sizeof(float));
  run.moments = allocate((size_t)what->steps, sizeof *run.moments);
  fill_start(&run);
  describe_tensors(what, run.start, run.start, tensors);
  struct oracle_zero_one *oracle = oracle_zero_one_create(
      what->size, what->hosts ? what->hosts : 1, tensors, what->tensors->count, &what->options);
  run_oracle(&run, oracle);
  oracle_zero_one_destroy(oracle);
  return run;
}

void zero_one_release(struct zero_one_run *run) {
  for (int call = 0; call < run->what->steps; call++) {
    free(run->moments[call].statuses);
    free(run->moments[call].parameters);
    free(run->moments[call].momentum_norm);
    free(run->moments[call].residual_norm);
  }
  free(run->moments);
  free(run->start);
}

static bool is_near(double a, double b) { return fabs(a - b) <= 1e-5 * fabs(b) + 1e-30; }

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
  CHECK(is_near(info.momentum_norm, wanted->momentum_norm[rank]),
        "call %d: momentum norm %g, not %g", call, info.momentum_norm, wanted->momentum_norm[rank]);
  CHECK(is_near(info.residual_norm, wanted->residual_norm[rank]), "call %d: error norm %g, not %g",
        call, info.residual_norm, wanted->residual_norm[rank]);
}

static void set_gradients(const struct zero_one_case *what, onebit_optimizer_t optimizer,
                          const onebit_tensor_t *tensors, int rank, int call) {
  for (size_t k = 0; what->absent && k < what->tensors->count; k++) {
    const void *gradient = has_gradient(what, k, rank, call) ? tensors[k].gradient : NULL;
    CHECK_STATUS(onebit_optimizer_set_gradient(optimizer, k, gradient), ONEBIT_OK);
  }
}

/* Checks that the caller's parameters are the oracle's, rounded to their type. */
static void check_parameters(const struct zero_one_run *run, const void *parameters, int rank,
                             int call) {
  onebit_dtype_t dtype = run->what->options.common.parameter_dtype;
  const float *exact = run->moments[call].parameters + (size_t)rank * run->total;
  float *wanted = allocate(run->total, sizeof(float));
  for (size_t i = 0; i < run->total; i++)
    oracle_store_result(wanted, i, dtype, exact[i]);
  CHECK_BITS("parameters", parameters, wanted, run->total, dtype);
  free(wanted);
}

static void label_case(const struct zero_one_case *what) {
  const onebit_zero_one_adam_options_t *o = &what->options;
  check_case("0/1 Adam of %zu tensors on %d ranks, %d hosts, profile %d, freeze %zu, scalers %zu "
             "%zu %zu, block %zd, scale %d, threads %d, buckets of %zu, schedule %d, types %d %d"
             "%s%s%s%s%s",
             what->tensors->count, what->size, what->hosts, (int)o->common.profile,
             o->variance_freeze_step, o->variance_update_scaler, o->local_step_scaler,
             o->local_step_clipper, (ptrdiff_t)o->common.block_size, (int)o->common.scale,
             o->common.threads, o->common.bucket_size, (int)o->common.schedule,
             (int)o->common.gradient_dtype, (int)o->common.parameter_dtype,
             what->parts ? ", in parts" : "", what->still ? ", still" : "",
             what->absent ? ", absent" : "", what->uncompressed ? ", uncompressed" : "",
             what->poison != 0.0f ? ", poisoned" : "");
}

/* Makes all calls of a case, and checks each. */
static void make_steps(const struct zero_one_run *run, onebit_optimizer_t optimizer,
                       const onebit_tensor_t *tensors, void *parameters, void *gradients,
                       int rank) {
  const struct zero_one_case *what = run->what;
  float *exact = allocate(run->total, sizeof(float));
  for (int call = 0; call < what->steps; call++) {
    fill_gradient(what, exact, run->total, rank, call);
    for (size_t i = 0; i < run->total; i++)
      oracle_store(gradients, i, what->options.common.gradient_dtype, exact[i]);
    set_gradients(what, optimizer, tensors, rank, call);
    CHECK_STATUS(adam_step_in_parts(optimizer, what->tensors->count, what->parts, call),
                 run->moments[call].statuses[rank]);
    check_parameters(run, parameters, rank, call);
    check_info(run, optimizer, rank, call);
  }
  free(exact);
}

void zero_one_on_rank(onebit_comm_t comm, void *context) {
  const struct zero_one_run *run = context;
  const struct zero_one_case *what = run->what;
  float *parameters = allocate(run->total, sizeof(float));
  float *gradients = allocate(run->total, sizeof(float));
  onebit_tensor_t tensors[10];
  onebit_optimizer_t optimizer;
  memcpy(parameters, run->start, run->total * sizeof(float));
  describe_tensors(what, parameters, gradients, tensors);
  label_case(what);
  if (CHECK_STATUS(onebit_zero_one_adam_create(comm, tensors, what->tensors->count, &what->options,
                                               &optimizer),
                   ONEBIT_OK)) {
    make_steps(run, optimizer, tensors, parameters, gradients, onebit_comm_rank(comm));
    onebit_optimizer_destroy(optimizer);
  }
  free(parameters);
  free(gradients);
}
