/* Tests the optimizers on devices, and the features that all of them have. Over each transport,
 * parameters and the optimizer's info must have the same bits as on the host. */
#include <stdlib.h>

#include "tests/gpu/training.h"

#define BIT(k)        (1u << (k))
#define ATTEMPTS      26
#define DEEPSPEED     .common.profile = ONEBIT_PROFILE_DEEPSPEED
#define ONE_SCALE     .common.block_size = ONEBIT_BLOCK_BUFFER
#define BUCKETS       .common.bucket_size = 40
#define LARGE_BUCKETS .common.bucket_size = 100
#define SIXTEEN(type) .common.gradient_dtype = type, .common.parameter_dtype = type
#define HALVES        SIXTEEN(ONEBIT_FLOAT16)
#define BRAINS        SIXTEEN(ONEBIT_BFLOAT16)
#define SCALED        .common.initial_loss_scale = 1024, .common.loss_scale_interval = 4

#define CASE(kind, is_named, in_form, is_poisoned, with, ...)                                      \
  TRAINING_CASE(kind, is_named, in_form, is_poisoned, with, ATTEMPTS, __VA_ARGS__)

#define NO_WARMUP .warmup_steps = ONEBIT_WARMUP_NONE

/* Options with the shortest possible stages, and with intervals that grow. */
#define SOON                                                                                       \
  .variance_freeze_step = 9, .variance_update_scaler = 2, .local_step_scaler = 5,                  \
  .local_step_clipper = 4

#define AUTOMATIC .freeze_step = ONEBIT_FREEZE_AUTOMATIC, .beta2 = 0.8

static const struct training_case adams[] = {
    ADAM("freeze at 1", ONE_STREAM, 0, .freeze_step = 1),
    ADAM("freeze at 2, buckets", ONE_STREAM, 0, .freeze_step = 2, BUCKETS),
    ADAM("freeze at 5", NO_STREAM, 0, .freeze_step = 5),
    ADAM("freeze at 5, two streams", TWO_STREAMS, 0, .freeze_step = 5),
    ADAM("freeze at 5, buckets, two streams", TWO_STREAMS, 0, .freeze_step = 5, LARGE_BUCKETS),
    ADAM("freeze at 5, buckets, some without", SOME_WITHOUT, 0, .freeze_step = 5, LARGE_BUCKETS),
    ADAM("automatic", ONE_STREAM, 0, AUTOMATIC),
    ADAM("automatic, two streams", TWO_STREAMS, 0, AUTOMATIC),
    ADAM("automatic, buckets", DEFAULT_STREAM, 0, AUTOMATIC, LARGE_BUCKETS),
    ADAM("automatic, no bias correction", SOME_WITHOUT, 0, AUTOMATIC, .no_bias_correction = 1),
    ADAM("never", ONE_STREAM, 0, .freeze_step = ONEBIT_FREEZE_NEVER),
    ADAM("never, two streams", TWO_STREAMS, 0, .freeze_step = ONEBIT_FREEZE_NEVER, BUCKETS,
         .beta1 = 0.5),
    ADAM("deepspeed", ONE_STREAM, 0, .freeze_step = 4, DEEPSPEED),
    ADAM("deepspeed, two streams", TWO_STREAMS, 0, .freeze_step = 4, DEEPSPEED),
    ADAM("deepspeed, skips", SOME_WITHOUT, BIT(1) | BIT(3) | BIT(6) | BIT(9), .freeze_step = 4,
         DEEPSPEED),
    ADAM("mean of magnitudes", DEFAULT_STREAM, 0, .freeze_step = 3,
         .common.scale = ONEBIT_SCALE_MEAN_ABSOLUTE),
    ADAM("one scale", ONE_STREAM, 0, .freeze_step = 3, ONE_SCALE),
    ADAM("one scale a bucket, skips", SOME_WITHOUT, BIT(2) | BIT(5), .freeze_step = 3, ONE_SCALE,
         LARGE_BUCKETS),
    ADAM("small blocks", ONE_STREAM, 0, .freeze_step = 3, .common.block_size = 64),
    ADAM("large blocks, small chunks", TWO_STREAMS, 0, .freeze_step = 3, .common.block_size = 4096,
         .common.chunk_size = 4096),
    ADAM("no error feedback", ONE_STREAM, BIT(6), .freeze_step = 3, .common.no_error_feedback = 1),
    ADAM("no bias correction", ONE_STREAM, 0, .freeze_step = 3, .no_bias_correction = 1),
    ADAM("other betas", DEFAULT_STREAM, BIT(0), .freeze_step = 3, .beta1 = 0.5, .beta2 = 0.9,
         .epsilon = 1e-4),
    ADAM("a skip before the freeze", ONE_STREAM, BIT(2), .freeze_step = 5),
    ADAM("a skip at the freeze", ONE_STREAM, BIT(4), .freeze_step = 5),
    ADAM("a skip after the freeze", ONE_STREAM, BIT(5), .freeze_step = 5),
    ADAM("many skips, buckets", ONE_STREAM, BIT(0) | BIT(1) | BIT(6) | BIT(7) | BIT(8) | BIT(13),
         .freeze_step = 5, BUCKETS),
    ADAM("automatic, a skip before the freeze", ONE_STREAM, BIT(2), AUTOMATIC),
    ADAM("automatic, skips about the freeze", ONE_STREAM, BIT(5) | BIT(6) | BIT(8), AUTOMATIC,
         LARGE_BUCKETS),
    ADAM("automatic, skips, some without", SOME_WITHOUT, BIT(5) | BIT(7) | BIT(9), AUTOMATIC),
};

static const struct training_case lambs[] = {
    CASE(lamb, "lamb", ONE_STREAM, 0, 0, .freeze_step = 8),
    CASE(lamb, "lamb, no stream", NO_STREAM, BIT(4), 0, .freeze_step = 8),
    CASE(lamb, "lamb, buckets, two streams", TWO_STREAMS, 0, 0, .freeze_step = 5, BUCKETS),
    CASE(lamb, "lamb, skips about the freeze", ONE_STREAM, BIT(7) | BIT(9) | BIT(10) | BIT(15), 0,
         .freeze_step = 8),
    CASE(lamb, "lamb, the first compressed steps are skipped", SOME_WITHOUT, BIT(8) | BIT(9), 0,
         .freeze_step = 8, BUCKETS),
    CASE(lamb, "lamb, automatic", ONE_STREAM, BIT(3), 0, .beta2 = 0.8, .freeze_threshold = 0.5),
    CASE(lamb, "lamb, one scale", ONE_STREAM, BIT(12), 0, .freeze_step = 8, ONE_SCALE),
    CASE(lamb, "lamb, deepspeed", ONE_STREAM, BIT(2) | BIT(12), 0, .freeze_step = 8, DEEPSPEED),
    CASE(lamb, "lamb, deepspeed, some without", SOME_WITHOUT, 0, 0, .freeze_step = 4, DEEPSPEED),
    CASE(lamb, "lamb, other limits", DEFAULT_STREAM, 0, 0, .freeze_step = 8, .factor_change = 0.3,
         .coefficient_beta = 0.5, .max_coefficient = 2, .no_bias_correction = 1),
    CASE(lamb, "lamb, uncompressed, no gradients", ONE_STREAM, BIT(11), PLAIN_TENSOR | NO_GRADIENT,
         .freeze_step = 8),
    CASE(lamb, "lamb, halves", ONE_STREAM, BIT(13), PLAIN_TENSOR, .freeze_step = 8, HALVES, SCALED),
    CASE(lamb, "lamb, saved", SOME_WITHOUT, BIT(10), SAVED_ANEW, .freeze_step = 8),
    CASE(lamb, "lamb, deepspeed, saved", ONE_STREAM, 0, SAVED_ANEW, .freeze_step = 8, DEEPSPEED),
    CASE(lamb, "lamb, saved in the warm-up", ONE_STREAM, BIT(2), SAVED_ANEW, .freeze_step = 20),
};

static const struct training_case zero_ones[] = {
    CASE(zero_one_adam, "zero-one", ONE_STREAM, 0, 0, SOON),
    CASE(zero_one_adam, "zero-one, no stream", NO_STREAM, BIT(3), 0, SOON),
    CASE(zero_one_adam, "zero-one, two streams, buckets", TWO_STREAMS, 0, 0, SOON, BUCKETS),
    CASE(zero_one_adam, "zero-one, skips", ONE_STREAM, BIT(1) | BIT(5) | BIT(8) | BIT(13) | BIT(19),
         0, SOON),
    CASE(zero_one_adam, "zero-one, skips, buckets", SOME_WITHOUT,
         BIT(2) | BIT(6) | BIT(14) | BIT(15), 0, SOON, BUCKETS),
    CASE(zero_one_adam, "zero-one, deepspeed", ONE_STREAM, BIT(4) | BIT(16), 0, SOON, DEEPSPEED),
    CASE(zero_one_adam, "zero-one, uncompressed, no gradients", ONE_STREAM, BIT(12) | BIT(17),
         PLAIN_TENSOR | NO_GRADIENT, SOON),
    CASE(zero_one_adam, "zero-one, uncompressed, deepspeed", SOME_WITHOUT, BIT(13), PLAIN_TENSOR,
         SOON, DEEPSPEED, .common.dense_below = 8),
    CASE(zero_one_adam, "zero-one, one scale", DEFAULT_STREAM, 0, 0, SOON, ONE_SCALE),
    CASE(zero_one_adam, "zero-one, halves", ONE_STREAM, BIT(14), 0, SOON, HALVES, SCALED),
    CASE(zero_one_adam, "zero-one, clipped", ONE_STREAM, BIT(12) | BIT(15), 0, SOON,
         .common.clip_norm = 20),
    CASE(zero_one_adam, "zero-one, saved", ONE_STREAM, BIT(10), SAVED_ANEW, SOON),
    CASE(zero_one_adam, "zero-one, deepspeed, saved", SOME_WITHOUT, 0, SAVED_ANEW, SOON, DEEPSPEED),
};

static const struct training_case others[] = {
    CASE(efficient_adam, "efficient", ONE_STREAM, BIT(0) | BIT(9), 0, .warmup_steps = 7),
    CASE(efficient_adam, "efficient, no stream", NO_STREAM, BIT(4), 0, .gain = 1.3, NO_WARMUP),
    CASE(efficient_adam, "efficient, two streams, buckets", TWO_STREAMS, 0, 0, .warmup_steps = 6,
         BUCKETS),
    CASE(efficient_adam, "efficient, some without, uncompressed, no gradients", SOME_WITHOUT,
         BIT(2) | BIT(6) | BIT(14), PLAIN_TENSOR | NO_GRADIENT, .epsilon = 1e-4, .warmup_steps = 7),
    CASE(efficient_adam, "efficient, one scale", DEFAULT_STREAM, BIT(12), 0, ONE_SCALE, NO_WARMUP),
    CASE(efficient_adam, "efficient, halves", ONE_STREAM, BIT(13), PLAIN_TENSOR, HALVES, SCALED,
         .warmup_steps = 8),
    CASE(efficient_adam, "efficient, tables, brains, clipped", ONE_STREAM, BIT(7), TABLES, BRAINS,
         .warmup_steps = 5, .common.clip_norm = 20),
    CASE(efficient_adam, "efficient, saved", ONE_STREAM, BIT(10), SAVED_ANEW, .beta1 = 0.8,
         .warmup_steps = 5),
    CASE(efficient_adam, "efficient, tables, saved, no stream", NO_STREAM, BIT(9),
         SAVED_ANEW | PLAIN_TENSOR | TABLES, BUCKETS, .warmup_steps = 20),
    CASE(efficient_adam, "efficient, trust ratios", ONE_STREAM, BIT(0) | BIT(9), PLAIN_TENSOR,
         .trust_ratio = 1, .warmup_steps = 6),
    CASE(efficient_adam, "efficient, trust ratios, saved", SOME_WITHOUT, BIT(2) | BIT(6),
         SAVED_ANEW, .trust_ratio = 1, .max_ratio = 2, BUCKETS, .warmup_steps = 8),
    CASE(efficient_adam, "efficient, trust ratios, halves", NO_STREAM, BIT(4), 0, .trust_ratio = 1,
         HALVES, SCALED, ONE_SCALE, NO_WARMUP),
    CASE(lion, "lion", ONE_STREAM, BIT(0) | BIT(9), 0, .beta1 = 0.8),
    CASE(lion, "lion, no stream", NO_STREAM, BIT(4), 0, .beta2 = 0.9),
    CASE(lion, "lion, two streams, buckets", TWO_STREAMS, 0, 0, .beta3 = 0.9, BUCKETS),
    CASE(lion, "lion, some without, uncompressed, no gradients", SOME_WITHOUT,
         BIT(2) | BIT(6) | BIT(14), PLAIN_TENSOR | NO_GRADIENT, .epsilon = 1e-4),
    CASE(lion, "lion, one scale", DEFAULT_STREAM, BIT(12), 0, ONE_SCALE),
    CASE(lion, "lion, halves", ONE_STREAM, BIT(13), PLAIN_TENSOR, HALVES, SCALED),
    CASE(lion, "lion, no error feedback", ONE_STREAM, BIT(3), 0, .common.no_error_feedback = 1),
    CASE(lion, "lion, saved", ONE_STREAM, BIT(10), SAVED_ANEW, .beta1 = 0.8),
    CASE(lion, "lion, saved, no stream", NO_STREAM, BIT(9), SAVED_ANEW | PLAIN_TENSOR, BUCKETS),
    CASE(momentum, "momentum", ONE_STREAM, BIT(0) | BIT(9), 0, NO_WARMUP),
    CASE(momentum, "momentum, a warm-up", SOME_WITHOUT, BIT(5) | BIT(6), 0, .warmup_steps = 6,
         BUCKETS),
    CASE(momentum, "momentum, two streams", TWO_STREAMS, 0, 0, .warmup_steps = 4, .momentum = 0.5),
    CASE(momentum, "momentum, brains", ONE_STREAM, BIT(7), PLAIN_TENSOR, .warmup_steps = 3, BRAINS),
    CASE(momentum, "momentum, beyond float16", ONE_STREAM, 0, 0, .warmup_steps = 3,
         .common.parameter_dtype = ONEBIT_FLOAT16, .common.gradient_factor = 1e9),
    CASE(momentum, "momentum, saved", NO_STREAM, BIT(9), SAVED_ANEW, NO_WARMUP),
    CASE(adam, "step exchanged", ONE_STREAM, BIT(10), 0, .freeze_step = 8,
         .exchange = ONEBIT_ADAM_EXCHANGE_STEP),
    CASE(adam, "step exchanged, buckets", SOME_WITHOUT, BIT(7) | BIT(8), NO_GRADIENT,
         .freeze_step = 8, .exchange = ONEBIT_ADAM_EXCHANGE_STEP, BUCKETS),
    CASE(adam, "step exchanged, deepspeed", ONE_STREAM, BIT(7) | BIT(12), 0, .freeze_step = 8,
         .exchange = ONEBIT_ADAM_EXCHANGE_STEP, DEEPSPEED),
    CASE(adam, "halves", ONE_STREAM, BIT(3) | BIT(11), 0, .freeze_step = 6, HALVES, SCALED),
    CASE(adam, "halves, buckets", SOME_WITHOUT, BIT(3) | BIT(12), PLAIN_TENSOR, .freeze_step = 6,
         HALVES, SCALED, BUCKETS),
    CASE(adam, "brains, deepspeed", ONE_STREAM, BIT(4), PLAIN_TENSOR, .freeze_step = 6, BRAINS,
         DEEPSPEED),
    CASE(adam, "half gradients", TWO_STREAMS, 0, 0, .freeze_step = 6,
         .common.gradient_dtype = ONEBIT_FLOAT16),
    CASE(adam, "brain parameters", NO_STREAM, BIT(8), 0, .freeze_step = 6,
         .common.parameter_dtype = ONEBIT_BFLOAT16),
    CASE(adam, "clipped", ONE_STREAM, BIT(2) | BIT(9), NO_GRADIENT, .freeze_step = 6,
         .common.clip_norm = 20, .common.gradient_factor = 0.5),
    CASE(adam, "clipped, two streams, buckets", TWO_STREAMS, 0, PLAIN_TENSOR, .freeze_step = 6,
         .common.clip_norm = 10, BUCKETS),
    CASE(adam, "clipped, scaled, some without", SOME_WITHOUT, BIT(6) | BIT(7) | BIT(13), 0,
         .freeze_step = 6, .common.clip_norm = 20, HALVES, SCALED),
    CASE(adam, "all uncompressed", ONE_STREAM, BIT(4), 0, .freeze_step = 6,
         .common.dense_below = 10000, BUCKETS),
    CASE(adam, "some uncompressed", SOME_WITHOUT, BIT(4) | BIT(12), 0, .freeze_step = 6,
         .common.dense_below = 40, BUCKETS),
    CASE(adam, "saved", ONE_STREAM, BIT(4) | BIT(10), SAVED_ANEW, .freeze_step = 6, BUCKETS),
    CASE(adam, "saved, deepspeed", SOME_WITHOUT, 0, SAVED_ANEW | PLAIN_TENSOR, .freeze_step = 6,
         DEEPSPEED),
    CASE(adam, "saved, halves", ONE_STREAM, BIT(20), SAVED_ANEW, .freeze_step = 6, HALVES, SCALED),
    CASE(adam, "saved in the warm-up", NO_STREAM, BIT(3), SAVED_ANEW, .freeze_step = 20),
    CASE(adam, "saved, automatic", ONE_STREAM, BIT(3), SAVED_ANEW, .beta2 = 0.8),
};

static const struct training_case parts[] = {
    CASE(adam, "parts", ONE_STREAM, BIT(4) | BIT(12), IN_PARTS, .freeze_step = 6, BUCKETS),
    CASE(adam, "parts, uncompressed, no gradients", SOME_WITHOUT, BIT(3) | BIT(13),
         IN_PARTS | PLAIN_TENSOR | NO_GRADIENT, .freeze_step = 6, BUCKETS),
    CASE(adam, "parts, deepspeed, saved", ONE_STREAM, BIT(11), IN_PARTS | SAVED_ANEW,
         .freeze_step = 6, DEEPSPEED),
    CASE(adam, "parts, automatic, two streams", TWO_STREAMS, 0, IN_PARTS, .beta2 = 0.8, BUCKETS),
    CASE(adam, "parts, clipped, scaled", ONE_STREAM, BIT(9), IN_PARTS, .freeze_step = 6,
         .common.clip_norm = 20, HALVES, SCALED, BUCKETS),
    CASE(lamb, "parts, lamb", ONE_STREAM, BIT(8) | BIT(15), IN_PARTS, .freeze_step = 8, BUCKETS),
    CASE(zero_one_adam, "parts, zero-one", ONE_STREAM, BIT(5) | BIT(13), IN_PARTS, SOON, BUCKETS),
    CASE(zero_one_adam, "parts, zero-one, uncompressed", SOME_WITHOUT, BIT(12),
         IN_PARTS | PLAIN_TENSOR, SOON, BUCKETS),
    CASE(efficient_adam, "parts, efficient", DEFAULT_STREAM, BIT(0) | BIT(9), IN_PARTS,
         .trust_ratio = 1, BUCKETS, .warmup_steps = 6),
    CASE(lion, "parts, lion", TWO_STREAMS, 0, IN_PARTS, BUCKETS),
    CASE(momentum, "parts, momentum", NO_STREAM, BIT(7), IN_PARTS, .warmup_steps = 3, BRAINS,
         BUCKETS),
};

/* Warm-ups that send mean gradients in 4 or 8 bits. */
static const struct training_case warmups[] = {
    CASE(momentum, "momentum, a warm-up of 4 bits", SOME_WITHOUT, BIT(3) | BIT(6), PLAIN_TENSOR,
         .warmup_steps = 6, .common.warmup_bits = 4, BUCKETS),
    CASE(adam, "a warm-up of 8 bits", ONE_STREAM, BIT(3) | BIT(7), 0, .freeze_step = 8,
         .common.warmup_bits = 8),
    CASE(adam, "halves, a warm-up of 8 bits", NO_STREAM, BIT(3) | BIT(11), 0, .freeze_step = 6,
         HALVES, SCALED, .common.warmup_bits = 8),
    CASE(lamb, "lamb, saved in a warm-up of 4 bits", ONE_STREAM, BIT(2), SAVED_ANEW,
         .freeze_step = 20, .common.warmup_bits = 4),
    CASE(adam, "parts, saved in a warm-up of 4 bits", NO_STREAM, BIT(10), IN_PARTS | SAVED_ANEW,
         .freeze_step = 20, BUCKETS, .common.warmup_bits = 4),
};

/* Defines tests that run the table `name` over each transport. */
#define TESTS(name)                                                                                \
  static const struct training_table table_of_##name = TRAINING_TABLE(name);                       \
  static void name##_over_loopback(void) { training_run(&table_of_##name, gpu_run_loopback); }     \
  static void name##_over_device_memory(void) { training_run(&table_of_##name, run_ranks_aware); } \
  static void name##_in_one_job(void) { training_run_mixed(&table_of_##name); }                    \
  static void name##_over_nccl(void) { training_run(&table_of_##name, run_ranks_nccl); }           \
  static void name##_alone(void) { training_run(&table_of_##name, run_ranks_self); }

TESTS(adams)
TESTS(lambs)
TESTS(zero_ones)
TESTS(parts)
TESTS(others)
TESTS(warmups)

#define ROWS(words, name)                                                                          \
  {words " over loopback", name##_over_loopback, ANY_DEVICE},                                      \
      {words " over a transport of device memory", name##_over_device_memory, EMULATED},           \
      {words ", host and device in one job", name##_in_one_job, ANY_DEVICE},                       \
      {words " over NCCL", name##_over_nccl, ANY_DEVICE}, {                                        \
    words " alone", name##_alone, ANY_DEVICE                                                       \
  }

/* --- On several hosts, staged and over NCCL */

#define ON_HOSTS(is_named, ...)                                                                    \
  ADAM(is_named, SOME_WITHOUT, BIT(1) | BIT(6), .freeze_step = 3,                                  \
       .common.schedule = ONEBIT_SCHEDULE_HIERARCHICAL, __VA_ARGS__)

static const struct training_case on_hosts[] = {
    ON_HOSTS("one bucket", .beta2 = 0.9),
    ON_HOSTS("buckets, many messages", .common.bucket_size = 100, .common.block_size = 64,
             .common.chunk_size = 128, .common.scale = ONEBIT_SCALE_MEAN_ABSOLUTE),
    ON_HOSTS("nothing kept", .common.no_error_feedback = 1),
};

struct hosted {
  const struct training_case *what;
  struct training_record *record;
};

static void train_on_hosts(const struct gpu_rank *self, const struct hosts_split *split,
                           enum hosts_place place, void *context) {
  const struct hosted *hosted = context;
  (void)split;
  if (place == ON_PROCESSOR)
    training_record_case(hosted->what, self, hosted->record);
  else
    training_compare_case(hosted->what, self, hosted->record);
}

static void adam_on_several_hosts(void) {
  struct hosted hosted = {.record = gpu_allocate_area(sizeof *hosted.record)};
  const struct sample sample =
      sample_product("hierarchical_adam", 1,
                     (const size_t[]){HOSTS_SPLITS, sizeof on_hosts / sizeof on_hosts[0]}, 2);
  for (size_t k = 0; k < sample.count; k++) {
    hosted.what = &on_hosts[sample.rows[k] / HOSTS_SPLITS];
    run_on_hosts(&hosts_splits[sample.rows[k] % HOSTS_SPLITS], train_on_hosts, &hosted);
  }
  free(sample.rows);
}

/* Steps without any tensor exchange nothing, so the device reports no result. They must still be
 * counted. */
static void adam_without_tensors(void) {
  static const onebit_profile_t profiles[] = {ONEBIT_PROFILE_DEFAULT, ONEBIT_PROFILE_DEEPSPEED};
  for (size_t k = 0; k < 2; k++) {
    onebit_adam_options_t options = {
        .size = sizeof options, .freeze_step = 3, .common.profile = profiles[k]};
    const onebit_optimizer_info_t wanted = {.stage = ONEBIT_STAGE_COMPRESSED,
                                            .steps = 6,
                                            .freeze_step = k == 0 ? 3 : 2,
                                            .loss_scale = 1,
                                            .synchronized = 1};
    onebit_comm_t comm = NULL;
    onebit_optimizer_t optimizer = NULL;
    options.common.device = ONEBIT_DEVICE_CUDA;
    check_case("no tensors, profile %d", (int)options.common.profile);
    CHECK_STATUS(onebit_comm_create_self(&comm), ONEBIT_OK);
    CHECK_STATUS(onebit_adam_create(comm, NULL, 0, &options, &optimizer), ONEBIT_OK);
    for (int step = 0; step < 6; step++)
      CHECK_STATUS(step % 2 ? onebit_optimizer_step_stream(optimizer, 0.1f, NULL)
                            : onebit_optimizer_step(optimizer, 0.1f),
                   ONEBIT_OK);
    CHECK_STATUS(onebit_optimizer_synchronize(optimizer), ONEBIT_OK);
    training_check_info(optimizer, &wanted);
    onebit_optimizer_destroy(optimizer);
    onebit_comm_destroy(comm);
  }
}

static const struct gpu_test tests[] = {
    ROWS("adam", adams),
    ROWS("lamb", lambs),
    ROWS("zero-one", zero_ones),
    ROWS("parts", parts),
    ROWS("others", others),
    ROWS("warm-ups", warmups),
    {"adam on several hosts", adam_on_several_hosts, ANY_DEVICE},
    {"adam without tensors", adam_without_tensors, ANY_DEVICE},
};
GPU_SUITE("optimizers", tests)
