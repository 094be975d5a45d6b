/* 0/1 Adam of the oracle: the schedule of its exchanges, and its state. */
#include "tests/oracle_zero_one.h"

#include "tests/support.h"

enum { DENSE = ORACLE_DENSE, BITS = ORACLE_BITS, NOTHING = ORACLE_NOTHING };

/* --- The schedule of exchanges */

struct oracle_zero_one_clock oracle_zero_one_clock_of(const onebit_zero_one_adam_options_t *options,
                                                      bool deepspeed) {
  return (struct oracle_zero_one_clock){
      .left = options->variance_freeze_step ? options->variance_freeze_step : 100000,
      .update_scaler = options->variance_update_scaler ? options->variance_update_scaler : 16,
      .step_scaler = options->local_step_scaler ? options->local_step_scaler : 32678,
      .clipper = options->local_step_clipper ? options->local_step_clipper : 16,
      .number = deepspeed ? 1 : 0,
      .variance_interval = 1,
      .local_interval = 1};
}

int oracle_zero_one_clock_next(const struct oracle_zero_one_clock *clock) {
  size_t number = clock->number + 1;
  if (clock->local)
    return number % clock->local_interval == 0 ? BITS : NOTHING;
  return number % clock->variance_interval == 0 ? DENSE : BITS;
}

void oracle_zero_one_clock_advance(struct oracle_zero_one_clock *clock) {
  bool updated = oracle_zero_one_clock_next(clock) == DENSE;
  clock->number++;
  if (clock->local) {
    if (++clock->local_count == clock->step_scaler) {
      clock->local_count = 0;
      clock->local_interval *= 2;
      if (clock->local_interval > clock->clipper)
        clock->local_interval = clock->clipper;
    }
    return;
  }
  if (updated && ++clock->variance_count == clock->update_scaler) {
    clock->variance_count = 0;
    clock->variance_interval *= 2;
  }
  clock->local = --clock->left == 0;
}

/* --- Creation */

static bool is_deepspeed(const struct oracle_zero_one *oracle) {
  return oracle->options.common.profile == ONEBIT_PROFILE_DEEPSPEED;
}

static onebit_zero_one_adam_options_t fill_defaults(const onebit_zero_one_adam_options_t *given) {
  onebit_zero_one_adam_options_t options = *given;
  options.beta1 = options.beta1 != 0.0 ? options.beta1 : 0.9;
  options.beta2 = options.beta2 != 0.0 ? options.beta2 : 0.999;
  options.epsilon = options.epsilon != 0.0 ? options.epsilon : 1e-8;
  if (options.common.gradient_factor == 0.0)
    options.common.gradient_factor = 1.0;
  if (options.common.profile == ONEBIT_PROFILE_DEEPSPEED)
    options.no_bias_correction = 1;
  return options;
}

static void copy_tensors(struct oracle_zero_one *oracle, const onebit_tensor_t *tensors) {
  size_t count = oracle->tensors;
  oracle->first = allocate(count, sizeof(size_t));
  oracle->count = allocate(count, sizeof(size_t));
  oracle->weight_decay = allocate(count, sizeof(float));
  oracle->factor = allocate(count, sizeof(float));
  oracle->uncompressed = allocate(count, sizeof(bool));
  for (size_t k = 0; k < count; k++) {
    oracle->first[k] = oracle->total;
    oracle->count[k] = tensors[k].count;
    oracle->weight_decay[k] = tensors[k].weight_decay;
    oracle->factor[k] =
        tensors[k].learning_rate_factor == 0.0f ? 1.0f : tensors[k].learning_rate_factor;
    oracle->uncompressed[k] =
        tensors[k].uncompressed || tensors[k].count < oracle->options.common.dense_below;
    oracle->total += tensors[k].count;
  }
}

static void make_arrays(struct oracle_zero_one *oracle, const onebit_tensor_t *tensors) {
  size_t all = (size_t)oracle->ranks * oracle->total;
  float **separate[] = {&oracle->parameter, &oracle->momentum, &oracle->moved, &oracle->sent};
  float **common[] = {&oracle->variance, &oracle->denominator, &oracle->anchor, &oracle->mean};
  for (size_t k = 0; k < 4; k++) {
    *separate[k] = allocate(all, sizeof(float));
    *common[k] = allocate(oracle->total, sizeof(float));
  }
  oracle->means = allocate(all, sizeof(float));
  for (size_t i = 0, k = 0; k < oracle->tensors; k++)
    for (size_t j = 0; j < tensors[k].count; j++, i++)
      for (size_t r = 0; r < (size_t)oracle->ranks; r++)
        oracle->parameter[r * oracle->total + i] =
            oracle_load(tensors[k].parameter, j, oracle->options.common.parameter_dtype);
}

/* Returns a bucket of compressed tensors from number *end - 1 downwards, in ascending order, and
 * moves *end to the first of them. */
static struct oracle_zero_one_bucket take_bucket(const struct oracle_zero_one *oracle,
                                                 size_t *end) {
  size_t wanted = is_deepspeed(oracle) ? 1 : oracle->options.common.bucket_size;
  struct oracle_zero_one_bucket bucket = {.tensor = allocate(oracle->tensors, sizeof(size_t))};
  size_t *list = bucket.tensor + oracle->tensors;
  bool one = is_deepspeed(oracle);
  for (; *end > 0; --*end) {
    size_t k = *end - 1;
    if (oracle->uncompressed[k])
      continue;
    bool full = one ? bucket.tensors == 1 : wanted && bucket.total >= wanted && oracle->count[k];
    if (full)
      break;
    *--list = k;
    bucket.tensors++;
    bucket.total += oracle->count[k];
  }
  memmove(bucket.tensor, list, bucket.tensors * sizeof *list);
  return bucket;
}

static void make_buckets(struct oracle_zero_one *oracle) {
  const onebit_optimizer_options_t *common = &oracle->options.common;
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  options.profile = common->profile;
  options.scale = common->scale;
  options.block_size = common->block_size;
  options.no_error_feedback = common->no_error_feedback;
  options.schedule = common->schedule;
  oracle->buckets = allocate(oracle->tensors, sizeof *oracle->buckets);
  for (size_t end = oracle->tensors; end > 0;) {
    struct oracle_zero_one_bucket bucket = take_bucket(oracle, &end);
    size_t *counts = allocate(bucket.tensors, sizeof *counts);
    for (size_t k = 0; k < bucket.tensors; k++)
      counts[k] = oracle->count[bucket.tensor[k]];
    if (bucket.tensors) {
      bucket.oracle = is_deepspeed(oracle)
                          ? oracle_create(oracle->ranks, *counts, &options)
                          : oracle_create_tensors(oracle->ranks, oracle->workers, counts,
                                                  bucket.tensors, &options);
      oracle->buckets[oracle->bucket_count++] = bucket;
    } else {
      free(bucket.tensor);
    }
    free(counts);
  }
}

struct oracle_zero_one *oracle_zero_one_create(int ranks, int hosts, const onebit_tensor_t *tensors,
                                               size_t count,
                                               const onebit_zero_one_adam_options_t *options) {
  struct oracle_zero_one *oracle = allocate(1, sizeof *oracle);
  bool by_hosts = options->common.schedule == ONEBIT_SCHEDULE_HIERARCHICAL;
  oracle->options = fill_defaults(options);
  oracle->clock = oracle_zero_one_clock_of(options, is_deepspeed(oracle));
  oracle->ranks = ranks;
  oracle->workers = by_hosts ? hosts : ranks;
  oracle->each = ranks / oracle->workers;
  oracle->tensors = count;
  copy_tensors(oracle, tensors);
  make_arrays(oracle, tensors);
  make_buckets(oracle);
  return oracle;
}

void oracle_zero_one_destroy(struct oracle_zero_one *oracle) {
  void *arrays[] = {oracle->first,     oracle->count,       oracle->weight_decay, oracle->factor,
                    oracle->parameter, oracle->momentum,    oracle->moved,        oracle->sent,
                    oracle->variance,  oracle->anchor,      oracle->denominator,  oracle->means,
                    oracle->mean,      oracle->uncompressed};
  for (size_t k = 0; k < oracle->bucket_count; k++) {
    oracle_destroy(oracle->buckets[k].oracle);
    free(oracle->buckets[k].tensor);
  }
  for (size_t k = 0; k < sizeof arrays / sizeof arrays[0]; k++)
    free(arrays[k]);
  free(oracle->buckets);
  free(oracle);
}

bool oracle_zero_one_is_synchronized(const struct oracle_zero_one *oracle) {
  for (size_t r = 1; r < (size_t)oracle->ranks; r++)
    if (memcmp(oracle->parameter, oracle->parameter + r * oracle->total,
               oracle->total * sizeof(float)) != 0)
      return false;
  return true;
}
