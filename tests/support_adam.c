/* Runs cases of 1-bit Adam and compares them with the oracle. */
#include "tests/support_adam.h"

#include "optimizers/optimizer.h"
#include "tests/oracle_kinds.h"
#include "tests/support_optimizers.h"

const struct adam_tensors adam_tensors_odd = {9,
                                              {{0, 0, 0},
                                               {1, 0, 0},
                                               {31, 0.01f, 0},
                                               {33, 0, 0.5f},
                                               {2049, 0.1f, 2.0f},
                                               {4097, 0, 0},
                                               {0, 0.3f, 0},
                                               {100, 0.01f, 1.0f},
                                               {1003, 0, 0}}};
const struct adam_tensors adam_tensors_one = {1, {{10007, 0.01f, 0}}};
const struct adam_tensors adam_tensors_many_words = {3,
                                                     {{65536, 0, 0}, {640, 0.1f, 0}, {2048, 0, 0}}};
const struct adam_tensors adam_tensors_tiny = {3, {{1, 0, 0}, {1, 0.1f, 0}, {2, 0, 3.0f}}};
const struct adam_tensors adam_tensors_none = {0, {{0, 0, 0}}};

/* Returns a gradient times the loss scale, rounded to the gradients' dtype. */
static float round_gradient(const struct adam_case *what, float gradient, double loss_scale) {
  float multiple = what->multiple != 0.0f ? what->multiple : 1.0f;
  uint32_t element;
  oracle_store(&element, 0, what->options.common.gradient_dtype,
               gradient * multiple * (float)loss_scale);
  return oracle_load(&element, 0, what->options.common.gradient_dtype);
}

static bool is_absent(const struct adam_case *what, size_t tensor, int rank, int step) {
  return what->absent && (tensor + (size_t)rank * 3 + (size_t)step * 5) % what->absent == 0;
}

static void *element_address(char *array, size_t i, onebit_dtype_t dtype) {
  return array + i * dtype_size(dtype);
}

struct adam_learner learner_make(const struct adam_case *what) {
  const onebit_optimizer_options_t *options = &what->options.common;
  struct adam_learner learner = {0};
  for (size_t k = 0; k < what->tensors->count; k++)
    learner.total += what->tensors->list[k].count;
  learner.parameters = allocate(learner.total, dtype_size(options->parameter_dtype));
  learner.values = allocate(learner.total, sizeof(float));
  for (int k = 0; k < 2; k++)
    learner.gradients[k] = allocate(learner.total, dtype_size(options->gradient_dtype));
  for (size_t k = 0, first = 0; k < what->tensors->count; k++) {
    const struct adam_tensor *given = &what->tensors->list[k];
    void *parameter = element_address(learner.parameters, first, options->parameter_dtype);
    void *gradient = element_address(learner.gradients[0], first, options->gradient_dtype);
    learner.tensors[k] = (onebit_tensor_t){
        given->count ? parameter : NULL,
        given->count ? gradient : NULL,
        given->count,
        given->weight_decay,
        given->factor,
        what->tables >> k & 1 ? ONEBIT_TABLE : (int)(what->uncompressed >> k & 1)};
    learner.first[k] = first;
    first += given->count;
  }
  for (size_t i = 0; i < learner.total; i++)
    oracle_store(learner.parameters, i, options->parameter_dtype, input_value(i, 50, 7));
  return learner;
}

void learner_free(struct adam_learner *learner) {
  free(learner->parameters);
  free(learner->gradients[0]);
  free(learner->gradients[1]);
  free(learner->values);
}

static bool has_no_gradient(const struct adam_case *what, size_t i, size_t total, int step) {
  if (what->still && i % 13 == 5)
    return true;
  size_t last = what->late ? what->tensors->list[what->tensors->count - 1].count : 0;
  return step < what->late && (i % 7 == 3 || i >= total - last);
}

void adam_gradient(const struct adam_case *what, float *gradient, size_t total, int rank,
                   int step) {
  float factor = what->growth != 0.0f ? powf(what->growth, (float)step) : 1.0f;
  for (size_t i = 0; i < total; i++)
    gradient[i] =
        has_no_gradient(what, i, total, step) ? 0.0f : input_value(i, rank, step) * factor;
}

float adam_learning_rate(int step) { return 1e-3f * (float)(1 + step % 3); }

bool is_close(double a, double b) { return fabs(a - b) <= 1e-5 * fabs(b) + 1e-30; }

double square_sum(const float *values, size_t count) {
  double sum = 0.0;
  for (size_t i = 0; i < count; i++)
    sum += (double)values[i] * (double)values[i];
  return sum;
}

static double float_norm(const float *values, size_t count) {
  return sqrt(square_sum(values, count));
}

/* Returns the norm of the momentum that a rank stores as a server, over all exchanges. */
static double served_momentum_norm(const struct oracle_adam *adam, int rank) {
  double sum = 0.0;
  for (size_t k = 0; k < adam->exchange_count; k++) {
    const struct oracle_exchange *exchange = &adam->exchanges[k];
    size_t first = oracle_server_first(exchange->oracle, rank);
    size_t end = first + oracle_server_count(exchange->oracle, rank);
    for (size_t j = 0, at = 0; j < exchange->tensors; j++)
      for (size_t t = exchange->tensor[j], i = 0; i < adam->count[t]; i++, at++)
        if (at >= first && at < end)
          sum += (double)adam->momentum[adam->first[t] + i] *
                 (double)adam->momentum[adam->first[t] + i];
  }
  return sqrt(sum);
}

/* Returns the norm of one exchange's worker residual on a rank, after removing the scalings of the
 * momentum. Padding has no scaling. */
static double scaled_residual_norm(const struct oracle_adam *adam,
                                   const struct oracle_exchange *exchange, int rank) {
  const float *error = oracle_worker_error(exchange->oracle, rank);
  size_t count = oracle_worker_count(exchange->oracle, rank), at = 0;
  double sum = 0.0;
  if (!adam->scaling || count < exchange->total) /* a rank's part of a hierarchical plan has no
                                                  * scalings */
    return float_norm(error, count);
  for (size_t k = 0; k < exchange->tensors; k++) {
    size_t tensor = exchange->tensor[k];
    double norm = float_norm(error + at, adam->count[tensor]) / (double)adam->scaling[tensor];
    sum += norm * norm;
    at += adam->count[tensor];
  }
  return hypot(sqrt(sum), float_norm(error + at, count - at));
}

static struct adam_moment capture_moment(const struct oracle_adam *adam) {
  struct adam_moment moment = {.compressed = adam->compressed,
                               .freeze_step = adam->freeze_step,
                               .variance_ratio = adam->variance_ratio,
                               .gradient_norm = adam->weigher.norm,
                               .after = adam->weigher.loss_scale};
  moment.parameters = allocate(adam->total, sizeof(float));
  memcpy(moment.parameters, adam->parameter, adam->total * sizeof(float));
  int ranks = adam->size * adam->each;
  moment.residual_norm = allocate((size_t)ranks, sizeof(double));
  moment.momentum_norm = allocate((size_t)ranks, sizeof(double));
  for (int r = 0; r < ranks; r++)
    moment.momentum_norm[r] =
        adam->shares ? served_momentum_norm(adam, r) : float_norm(adam->momentum, adam->total);
  for (int r = 0; r < ranks; r++)
    for (size_t k = 0; k < adam->exchange_count; k++)
      moment.residual_norm[r] =
          hypot(moment.residual_norm[r], scaled_residual_norm(adam, &adam->exchanges[k], r));
  return moment;
}

static bool is_poisoned(const struct adam_case *what, int step) {
  return what->poison != 0.0f && step >= what->poisoned_from;
}

void learner_oracle_gradient(const struct adam_case *what, const struct adam_learner *learner,
                             double loss_scale, int rank, int step, float *gradient) {
  adam_gradient(what, gradient, learner->total, rank, step);
  for (size_t i = 0; i < learner->total; i++)
    gradient[i] = round_gradient(what, gradient[i], loss_scale);
  for (size_t k = 0; k < what->tensors->count; k++)
    if (is_absent(what, k, rank, step))
      memset(gradient + learner->first[k], 0, learner->tensors[k].count * sizeof(float));
}

/* Defines a struct optimizer_kind, with functions that create and use the oracle. */
#define KIND(kind, of, row, state_of)                                                              \
  static void *kind##_oracle(int size, int hosts, const onebit_tensor_t *tensors, size_t count,    \
                             const void *options) {                                                \
    return oracle_##of##_create(size, hosts, tensors, count, options);                             \
  }                                                                                                \
  static struct oracle_adam *kind##_state(void *oracle) { return state_of; }                       \
  static bool kind##_step(void *oracle, const float *const *gradients, float learning_rate) {      \
    return oracle_##of##_step(oracle, gradients, learning_rate);                                   \
  }                                                                                                \
  static void kind##_destroy(void *oracle) { oracle_##of##_destroy(oracle); }                      \
  const struct optimizer_kind kind_##kind = {#kind,        &ob_method_##row, kind##_oracle,        \
                                             kind##_state, kind##_step,      kind##_destroy}

#define oracle_momentum_destroy oracle_adam_destroy
KIND(adam, adam, adam, oracle);
KIND(momentum, momentum, momentum, oracle);
KIND(lamb, lamb, lamb, ((struct oracle_lamb *)oracle)->state);
KIND(lion, lion, lion, ((struct oracle_lion *)oracle)->state);
KIND(efficient_adam, efficient_adam, efficient_adam,
     ((struct oracle_efficient_adam *)oracle)->state);
KIND(efficient_lamb, efficient_adam, efficient_adam,
     ((struct oracle_efficient_adam *)oracle)->state);

static const struct optimizer_kind *kind_of(const struct adam_case *what) {
  return what->kind ? what->kind : &kind_adam;
}

static struct any_options make_options(const struct adam_case *what) {
  const onebit_adam_options_t *given = &what->options;
  struct any_options options = any_options_of(kind_of(what)->method, what->more);
  any_set(&options, "beta1", given->beta1);
  any_set(&options, "momentum", given->beta1);
  any_set(&options, "beta2", given->beta2);
  any_set(&options, "epsilon", given->epsilon);
  any_count(&options, "freeze_step", given->freeze_step);
  const bool warms =
      options.method == &ob_method_efficient_adam || options.method == &ob_method_momentum;
  any_count(&options, "warmup_steps",
            warms && !given->freeze_step ? ONEBIT_WARMUP_NONE : given->freeze_step);
  any_set(&options, "freeze_threshold", given->freeze_threshold);
  any_set(&options, "no_bias_correction", given->no_bias_correction);
  any_set(&options, "exchange", given->exchange);
  any_set(&options, "shards", given->shards);
  any_set(&options, "trust_ratio", what->kind == &kind_efficient_lamb);
  memcpy(options.memory + options.method->common_at, &given->common, sizeof given->common);
  return options;
}

static void prepare_step(struct adam_run *run, void *oracle, const struct adam_learner *learner,
                         float **gradients, int step) {
  const struct adam_case *what = run->what;
  const struct optimizer_kind *kind = kind_of(what);
  struct oracle_adam *adam = kind->state(oracle);
  if (is_poisoned(what, step))
    oracle_rescale(&adam->weigher, true);
  double loss_scale = adam->weigher.loss_scale;
  for (size_t k = 0; what->widths && k < adam->exchange_count; k++)
    adam->exchanges[k].oracle->options.bits = what->widths[step];
  for (int r = 0; r < what->size; r++)
    learner_oracle_gradient(what, learner, loss_scale, r, step, gradients[r]);
  CHECK(kind->step(oracle, (const float *const *)gradients, adam_learning_rate(step)),
        "the oracle skips finite gradients");
  run->moments[step] = capture_moment(adam);
  run->moments[step].before = loss_scale;
}

struct adam_run adam_prepare(const struct adam_case *what) {
  struct adam_learner learner = learner_make(what);
  struct adam_run run = {.what = what, .total = learner.total};
  struct any_options options = make_options(what);
  void *oracle = kind_of(what)->oracle(what->size, what->hosts ? what->hosts : 1, learner.tensors,
                                       what->tensors->count, options.memory);
  float **gradients = allocate((size_t)what->size, sizeof *gradients);
  run.start = allocate(run.total, sizeof(float));
  for (size_t i = 0; i < run.total; i++)
    run.start[i] = oracle_load(learner.parameters, i, what->options.common.parameter_dtype);
  for (int r = 0; r < what->size; r++)
    gradients[r] = allocate(run.total, sizeof(float));
  run.moments = allocate((size_t)what->steps, sizeof *run.moments);
  for (int step = 0; step < what->steps; step++)
    prepare_step(&run, oracle, &learner, gradients, step);
  for (int r = 0; r < what->size; r++)
    free(gradients[r]);
  free(gradients);
  kind_of(what)->destroy(oracle);
  learner_free(&learner);
  return run;
}

void adam_release(struct adam_run *run) {
  for (int step = 0; step < run->what->steps; step++) {
    free(run->moments[step].parameters);
    free(run->moments[step].residual_norm);
    free(run->moments[step].momentum_norm);
  }
  free(run->moments);
  free(run->start);
}

static uint64_t count_skipped(const struct adam_case *what, int step) {
  return is_poisoned(what, step) ? (uint64_t)(step - what->poisoned_from) + 1 : 0;
}

/* Compares the optimizer's info after a step with the oracle's. */
static void check_info(const struct adam_run *run, onebit_optimizer_t optimizer, int rank,
                       int step) {
  const struct adam_moment *wanted = &run->moments[step];
  const onebit_adam_options_t *options = &run->what->options;
  const onebit_optimizer_info_t info = optimizer_info(optimizer);
  const uint64_t made = (uint64_t)step + 1;
  /* In profile deepspeed, a single rank exchanges nothing, and counts its steps as dense. */
  bool alone = options->common.profile == ONEBIT_PROFILE_DEEPSPEED && run->what->size == 1;
  const uint64_t dense = wanted->compressed && !alone ? wanted->freeze_step : made;
  CHECK(strcmp(info.name, kind_of(run->what)->name) == 0, "the name is %s", info.name);
  CHECK(info.exchanges[0] == dense && info.exchanges[1] == made - dense && info.exchanges[2] == 0,
        "step %d: %llu dense, %llu of bits", step, (unsigned long long)info.exchanges[0],
        (unsigned long long)info.exchanges[1]);
  CHECK(info.synchronized, "step %d: info says that ranks differ", step);
  CHECK(info.steps == made, "%d steps, info says %llu", step + 1, (unsigned long long)info.steps);
  CHECK(info.skipped == count_skipped(run->what, step), "skipped %llu",
        (unsigned long long)info.skipped);
  CHECK((info.stage == ONEBIT_STAGE_COMPRESSED) == wanted->compressed, "step %d: stage is %d", step,
        (int)info.stage);
  onebit_stage_t stage;
  uint64_t steps;
  CHECK_STATUS(onebit_optimizer_get_stage(optimizer, &stage, &steps), ONEBIT_OK);
  CHECK(stage == info.stage && steps == made, "step %d: stage %d and %llu steps", step, (int)stage,
        (unsigned long long)steps);
  CHECK(info.freeze_step == wanted->freeze_step, "step %d: freeze step is %llu, not %zu", step,
        (unsigned long long)info.freeze_step, wanted->freeze_step);
  CHECK(info.loss_scale == wanted->after, "step %d: loss scale %g, not %g", step, info.loss_scale,
        wanted->after);
  CHECK(info.gradient_norm == wanted->gradient_norm, "step %d: gradient norm %.17g, not %.17g",
        step, info.gradient_norm, wanted->gradient_norm);
  if (run->what->uncompressed || options->common.dense_below)
    return; /* the norms below include only compressed tensors */
  CHECK(is_close(info.momentum_norm, wanted->momentum_norm[rank]),
        "step %d: momentum norm %g, not %g", step, info.momentum_norm, wanted->momentum_norm[rank]);
  CHECK(is_close(info.residual_norm, wanted->residual_norm[rank]), "step %d: error norm %g, not %g",
        step, info.residual_norm, wanted->residual_norm[rank]);
  if (options->freeze_step == ONEBIT_FREEZE_AUTOMATIC && !wanted->compressed)
    CHECK(is_close(info.variance_ratio, wanted->variance_ratio),
          "step %d: variance ratio %g, not %g", step, info.variance_ratio, wanted->variance_ratio);
}

/* Shuffles the order, differently on each rank and in each step. */
static void shuffle_order(size_t *order, size_t count, int rank, int step) {
  uint64_t state = (uint64_t)rank * 1009 + (uint64_t)step * 31 + 7;
  for (size_t i = count; i > 1; i--) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    size_t other = (size_t)(state >> 33) % i, kept = order[i - 1];
    order[i - 1] = order[other];
    order[other] = kept;
  }
}

onebit_status_t adam_make_step(const struct adam_case *what, onebit_optimizer_t optimizer, int rank,
                               int step) {
  float rate = adam_learning_rate(step);
  size_t order[10], count = what->tensors->count;
  if (what->form == IN_ONE_CALL || (what->form == PARTLY && (rank + step) % 3 == 0))
    return onebit_optimizer_step(optimizer, rate);
  for (size_t i = 0; i < count; i++)
    order[i] = what->form == FORWARD ? i : count - 1 - i;
  if (what->form >= SHUFFLED)
    shuffle_order(order, count, rank, step);
  CHECK_STATUS(onebit_optimizer_begin(optimizer, rate), ONEBIT_OK);
  for (size_t i = 0; i < (what->form == PARTLY ? count / 2 : count); i++)
    CHECK_STATUS(onebit_optimizer_ready(optimizer, order[i]), ONEBIT_OK);
  return onebit_optimizer_step(optimizer, rate);
}

void learner_set_gradients(const struct adam_case *what, struct adam_learner *learner,
                           onebit_optimizer_t optimizer, int rank, int step) {
  onebit_dtype_t dtype = what->options.common.gradient_dtype;
  char *array = learner->gradients[what->moving && step % 2];
  double loss_scale;
  CHECK_STATUS(onebit_optimizer_get_loss_scale(optimizer, &loss_scale), ONEBIT_OK);
  adam_gradient(what, learner->values, learner->total, rank, step);
  for (size_t i = 0; i < learner->total; i++)
    oracle_store(array, i, dtype, round_gradient(what, learner->values[i], loss_scale));
  for (size_t k = 0; k < what->tensors->count && (what->moving || what->absent); k++)
    if (is_absent(what, k, rank, step) || !learner->tensors[k].count)
      CHECK_STATUS(onebit_optimizer_set_gradient(optimizer, k, NULL), ONEBIT_OK);
    else
      CHECK_STATUS(onebit_optimizer_set_gradient(optimizer, k,
                                                 element_address(array, learner->first[k], dtype)),
                   ONEBIT_OK);
}

void learner_check_parameters(const struct adam_case *what, const struct adam_learner *learner,
                              const char *name, const float *wanted) {
  onebit_dtype_t dtype = what->options.common.parameter_dtype;
  char *rounded = allocate(learner->total, dtype_size(dtype));
  for (size_t i = 0; i < learner->total; i++)
    oracle_store_result(rounded, i, dtype, wanted[i]);
  CHECK_BITS(name, learner->parameters, rounded, learner->total, dtype);
  free(rounded);
}

/* Makes a step that all ranks must skip, before step number `step`. */
static void make_skipped_step(const struct adam_run *run, struct adam_learner *learner,
                              onebit_optimizer_t optimizer, int rank, int step) {
  const struct adam_case *what = run->what;
  const float *before = step ? run->moments[step - 1].parameters : run->start;
  learner_set_gradients(what, learner, optimizer, rank, step + 500);
  if (rank == what->poisoned_rank)
    oracle_store(learner->gradients[what->moving && step % 2], (size_t)step * 977 % run->total,
                 what->options.common.gradient_dtype, what->poison);
  CHECK_STATUS(adam_make_step(what, optimizer, rank, step), ONEBIT_SKIPPED);
  learner_check_parameters(what, learner, "parameters after a skipped step", before);
}

static void make_good_step(const struct adam_run *run, struct adam_learner *learner,
                           onebit_optimizer_t optimizer, int rank, int step) {
  const struct adam_moment *wanted = &run->moments[step];
  double loss_scale = 0;
  learner_set_gradients(run->what, learner, optimizer, rank, step);
  CHECK_STATUS(onebit_optimizer_get_loss_scale(optimizer, &loss_scale), ONEBIT_OK);
  CHECK(loss_scale == wanted->before, "step %d: the loss scale is %g, not %g", step, loss_scale,
        wanted->before);
  CHECK_STATUS(adam_make_step(run->what, optimizer, rank, step), ONEBIT_OK);
  learner_check_parameters(run->what, learner, "parameters", wanted->parameters);
}

static void label_case(const struct adam_case *what) {
  const onebit_adam_options_t *o = &what->options;
  check_case("%s of %zu tensors on %d ranks, profile %d, freeze %zd, block %zd, scale %d, "
             "threads %d, chunk %zu, buckets of %zu, form %d, schedule %d, %d hosts, gradients %s, "
             "parameters %s, clip %g, shards %d%s",
             kind_of(what)->name, what->tensors->count, what->size, (int)o->common.profile,
             (ptrdiff_t)o->freeze_step, (ptrdiff_t)o->common.block_size, (int)o->common.scale,
             o->common.threads, o->common.chunk_size, o->common.bucket_size, (int)what->form,
             (int)o->common.schedule, what->hosts, dtype_name(o->common.gradient_dtype),
             dtype_name(o->common.parameter_dtype), o->common.clip_norm, (int)o->shards,
             what->poison != 0.0f ? ", poisoned" : "");
}

void adam_on_rank(onebit_comm_t comm, void *context) {
  const struct adam_run *run = context;
  const struct adam_case *what = run->what;
  int rank = onebit_comm_rank(comm);
  struct adam_learner learner = learner_make(what);
  struct any_options options = make_options(what);
  onebit_optimizer_t optimizer;
  label_case(what);
  if (CHECK_STATUS(any_create(&options, comm, learner.tensors, what->tensors->count, &optimizer),
                   ONEBIT_OK)) {
    for (int step = 0; step < what->steps; step++) {
      for (size_t u = 0; what->widths && u < optimizer->bucket_count; u++)
        if (!optimizer->buckets[u].uncompressed)
          CHECK_STATUS(onebit_plan_set_bits(optimizer->buckets[u].bits, what->widths[step]),
                       ONEBIT_OK);
      if (is_poisoned(what, step))
        make_skipped_step(run, &learner, optimizer, rank, step);
      make_good_step(run, &learner, optimizer, rank, step);
      check_info(run, optimizer, rank, step);
    }
    onebit_optimizer_destroy(optimizer);
  }
  learner_free(&learner);
}

void adam_check(const struct adam_case *what) {
  struct adam_run run = adam_prepare(what);
  on_hosts(what->size, what->hosts ? what->hosts : 1, adam_on_rank, &run);
  adam_release(&run);
}

void adam_check_on_groups(struct adam_case what) {
  static const int sizes[] = {1, 2, 3, 4, 7};
  for (size_t p = 0; p < sizeof sizes / sizeof sizes[0]; p++) {
    what.size = sizes[p];
    if (test_wanted(p))
      adam_check(&what);
  }
}

void adam_check_codecs(struct adam_case what) {
  for (size_t c = 0; c < test_codecs_count; c++)
    for (what.options.common.threads = 1;
         what.options.common.threads <= 3 && use_codec(test_codecs[c]);
         what.options.common.threads++)
      adam_check(&what);
}
