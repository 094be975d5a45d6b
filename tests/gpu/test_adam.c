/* 1-bit Adam on devices: parameters and the optimizer's info have the bits of the host's, over each
 * transport. */
#include <stdlib.h>

#include "tests/gpu/hosts.h"
#include "tests/gpu/training.h"

#define AUTOMATIC .freeze_step = ONEBIT_FREEZE_AUTOMATIC, .beta2 = 0.8
#define BIT(k)    (1u << (k))

static const struct training_case cases[] = {
    ADAM("freeze at 1", ONE_STREAM, 0, .freeze_step = 1),
    ADAM("freeze at 2, buckets", ONE_STREAM, 0, .freeze_step = 2, .common.bucket_size = 40),
    ADAM("freeze at 5", NO_STREAM, 0, .freeze_step = 5),
    ADAM("freeze at 5, two streams", TWO_STREAMS, 0, .freeze_step = 5),
    ADAM("freeze at 5, buckets, two streams", TWO_STREAMS, 0, .freeze_step = 5,
         .common.bucket_size = 100),
    ADAM("freeze at 5, buckets, some without", SOME_WITHOUT, 0, .freeze_step = 5,
         .common.bucket_size = 100),
    ADAM("automatic", ONE_STREAM, 0, AUTOMATIC),
    ADAM("automatic, two streams", TWO_STREAMS, 0, AUTOMATIC),
    ADAM("automatic, buckets", DEFAULT_STREAM, 0, AUTOMATIC, .common.bucket_size = 100),
    ADAM("automatic, no bias correction", SOME_WITHOUT, 0, AUTOMATIC, .no_bias_correction = 1),
    ADAM("never", ONE_STREAM, 0, .freeze_step = ONEBIT_FREEZE_NEVER),
    ADAM("never, two streams", TWO_STREAMS, 0, .freeze_step = ONEBIT_FREEZE_NEVER,
         .common.bucket_size = 40, .beta1 = 0.5),
    ADAM("deepspeed", ONE_STREAM, 0, .freeze_step = 4, .common.profile = ONEBIT_PROFILE_DEEPSPEED),
    ADAM("deepspeed, two streams", TWO_STREAMS, 0, .freeze_step = 4,
         .common.profile = ONEBIT_PROFILE_DEEPSPEED),
    ADAM("deepspeed, skips", SOME_WITHOUT, BIT(1) | BIT(3) | BIT(6) | BIT(9), .freeze_step = 4,
         .common.profile = ONEBIT_PROFILE_DEEPSPEED),
    ADAM("mean of magnitudes", DEFAULT_STREAM, 0, .freeze_step = 3,
         .common.scale = ONEBIT_SCALE_MEAN_ABSOLUTE),
    ADAM("one scale", ONE_STREAM, 0, .freeze_step = 3, .common.block_size = ONEBIT_BLOCK_BUFFER),
    ADAM("one scale a bucket, skips", SOME_WITHOUT, BIT(2) | BIT(5), .freeze_step = 3,
         .common.block_size = ONEBIT_BLOCK_BUFFER, .common.bucket_size = 100),
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
         .freeze_step = 5, .common.bucket_size = 40),
    ADAM("automatic, a skip before the freeze", ONE_STREAM, BIT(2), AUTOMATIC),
    ADAM("automatic, skips about the freeze", ONE_STREAM, BIT(5) | BIT(6) | BIT(8), AUTOMATIC,
         .common.bucket_size = 100),
    ADAM("automatic, skips, some without", SOME_WITHOUT, BIT(5) | BIT(7) | BIT(9), AUTOMATIC),
};
static const struct training_table table = TRAINING_TABLE(cases);

static void over_loopback(void) { training_over_loopback(&table); }
static void over_what_knows_devices(void) { training_over_what_knows_devices(&table); }
static void in_one_job(void) { training_in_one_job(&table); }
static void over_nccl(void) { training_over_nccl(&table); }
static void alone(void) { training_alone(&table); }

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
    training_record_case(hosted->what, self->comm, self->rank, self->size, hosted->record);
  else
    training_compare_case(hosted->what, self->comm, self->rank, self->size, hosted->record);
}

static void on_several_hosts(void) {
  struct hosted hosted = {.record = gpu_area(sizeof *hosted.record)};
  const struct sample sample =
      sample_product("hierarchical_adam", 1,
                     (const size_t[]){HOSTS_SPLITS, sizeof on_hosts / sizeof on_hosts[0]}, 2);
  for (size_t k = 0; k < sample.count; k++) {
    hosted.what = &on_hosts[sample.rows[k] / HOSTS_SPLITS];
    hosts_run(&hosts_splits[sample.rows[k] % HOSTS_SPLITS], train_on_hosts, &hosted);
  }
  free(sample.rows);
}

/* Without an exchange the device reports nothing, and steps still count. */
static void without_tensors(void) {
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
    {"over loopback", over_loopback, false},
    {"over what knows device memory", over_what_knows_devices, false},
    {"host and device in one job", in_one_job, false},
    {"over NCCL", over_nccl, false},
    {"alone", alone, false},
    {"on several hosts", on_several_hosts, false},
    {"without tensors", without_tensors, false},
};
GPU_SUITE("adam", tests)
