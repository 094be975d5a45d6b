/* 1-bit Adam on devices: parameters and all that an optimizer tells of itself have the bits of the
 * host's, over each transport. */
#include <stdlib.h>

#include "collectives/communicator.h"
#include "tests/gpu/adam.h"
#include "tests/gpu/plans.h"

#define OPTIONS(...)                                                                               \
  { .size = sizeof(onebit_adam_options_t), __VA_ARGS__ }
#define AUTOMATIC .freeze_step = ONEBIT_FREEZE_AUTOMATIC, .beta2 = 0.8
#define BIT(k)    (1u << (k))

static const struct adam_case cases[] = {
    {"freeze at 1", OPTIONS(.freeze_step = 1), ONE_STREAM, 0},
    {"freeze at 2, buckets", OPTIONS(.freeze_step = 2, .common.bucket_size = 40), ONE_STREAM, 0},
    {"freeze at 5", OPTIONS(.freeze_step = 5), NO_STREAM, 0},
    {"freeze at 5, two streams", OPTIONS(.freeze_step = 5), TWO_STREAMS, 0},
    {"freeze at 5, buckets, two streams", OPTIONS(.freeze_step = 5, .common.bucket_size = 100),
     TWO_STREAMS, 0},
    {"freeze at 5, buckets, some without", OPTIONS(.freeze_step = 5, .common.bucket_size = 100),
     SOME_WITHOUT, 0},
    {"automatic", OPTIONS(AUTOMATIC), ONE_STREAM, 0},
    {"automatic, two streams", OPTIONS(AUTOMATIC), TWO_STREAMS, 0},
    {"automatic, buckets", OPTIONS(AUTOMATIC, .common.bucket_size = 100), DEFAULT_STREAM, 0},
    {"automatic, no bias correction", OPTIONS(AUTOMATIC, .no_bias_correction = 1), SOME_WITHOUT, 0},
    {"never", OPTIONS(.freeze_step = ONEBIT_FREEZE_NEVER), ONE_STREAM, 0},
    {"never, two streams",
     OPTIONS(.freeze_step = ONEBIT_FREEZE_NEVER, .common.bucket_size = 40, .beta1 = 0.5),
     TWO_STREAMS, 0},
    {"deepspeed", OPTIONS(.freeze_step = 4, .common.profile = ONEBIT_PROFILE_DEEPSPEED), ONE_STREAM,
     0},
    {"deepspeed, two streams",
     OPTIONS(.freeze_step = 4, .common.profile = ONEBIT_PROFILE_DEEPSPEED), TWO_STREAMS, 0},
    {"deepspeed, skips", OPTIONS(.freeze_step = 4, .common.profile = ONEBIT_PROFILE_DEEPSPEED),
     SOME_WITHOUT, BIT(1) | BIT(3) | BIT(6) | BIT(9)},
    {"mean of magnitudes", OPTIONS(.freeze_step = 3, .common.scale = ONEBIT_SCALE_MEAN_ABSOLUTE),
     DEFAULT_STREAM, 0},
    {"one scale", OPTIONS(.freeze_step = 3, .common.block_size = ONEBIT_BLOCK_BUFFER), ONE_STREAM,
     0},
    {"one scale a bucket, skips",
     OPTIONS(.freeze_step = 3, .common.block_size = ONEBIT_BLOCK_BUFFER, .common.bucket_size = 100),
     SOME_WITHOUT, BIT(2) | BIT(5)},
    {"small blocks", OPTIONS(.freeze_step = 3, .common.block_size = 64), ONE_STREAM, 0},
    {"large blocks, small chunks",
     OPTIONS(.freeze_step = 3, .common.block_size = 4096, .common.chunk_size = 4096), TWO_STREAMS,
     0},
    {"no error feedback", OPTIONS(.freeze_step = 3, .common.no_error_feedback = 1), ONE_STREAM,
     BIT(6)},
    {"no bias correction", OPTIONS(.freeze_step = 3, .no_bias_correction = 1), ONE_STREAM, 0},
    {"other betas", OPTIONS(.freeze_step = 3, .beta1 = 0.5, .beta2 = 0.9, .epsilon = 1e-4),
     DEFAULT_STREAM, BIT(0)},
    {"a skip before the freeze", OPTIONS(.freeze_step = 5), ONE_STREAM, BIT(2)},
    {"a skip at the freeze", OPTIONS(.freeze_step = 5), ONE_STREAM, BIT(4)},
    {"a skip after the freeze", OPTIONS(.freeze_step = 5), ONE_STREAM, BIT(5)},
    {"many skips, buckets", OPTIONS(.freeze_step = 5, .common.bucket_size = 40), ONE_STREAM,
     BIT(0) | BIT(1) | BIT(6) | BIT(7) | BIT(8) | BIT(13)},
    {"automatic, a skip before the freeze", OPTIONS(AUTOMATIC), ONE_STREAM, BIT(2)},
    {"automatic, skips about the freeze", OPTIONS(AUTOMATIC, .common.bucket_size = 100), ONE_STREAM,
     BIT(5) | BIT(6) | BIT(8)},
    {"automatic, skips, some without", OPTIONS(AUTOMATIC), SOME_WITHOUT, BIT(5) | BIT(7) | BIT(9)},
};
#define CASES (sizeof cases / sizeof cases[0])

static void record_cases(const struct gpu_rank *self, void *context) {
  struct adam_record *records = context;
  for (size_t k = 0; k < CASES; k += gpu_stride())
    adam_record_case(&cases[k], self->comm, self->rank, self->size, &records[k]);
}

static void compare_cases(onebit_comm_t comm, const struct gpu_rank *self,
                          const struct adam_record *records) {
  for (size_t k = 0; k < CASES; k += gpu_stride())
    adam_compare_case(&cases[k], comm, self->rank, self->size, &records[k]);
}

static void compare_staged(const struct gpu_rank *self, void *context) {
  compare_cases(self->comm, self, context);
}

#ifdef ONEBIT_EMULATED_CUDA
static void compare_aware(const struct gpu_rank *self, void *context) {
  const struct ob_transport *before = self->comm->transport;
  ranks_make_aware(self->comm);
  compare_cases(self->comm, self, context);
  self->comm->transport = before;
}

static void over_what_knows_devices(void) {
  struct adam_record *records = gpu_allocate(CASES, sizeof *records);
  for (int size = 1; size <= ADAM_RANKS; size++)
    if (gpu_threads(size, record_cases, records))
      gpu_threads(size, compare_aware, records);
  free(records);
}
#endif

/* Host and device in one job. */
static void compare_mixed(const struct gpu_rank *self, void *context) {
  struct adam_record *records = context;
  struct adam_record *own = gpu_allocate(1, sizeof *own);
  for (size_t k = 0; k < CASES; k += gpu_stride())
    if (self->rank % 2) {
      adam_compare_case(&cases[k], self->comm, self->rank, self->size, &records[k]);
    } else {
      adam_record_case(&cases[k], self->comm, self->rank, self->size, own);
      for (int attempt = 0; self->rank == 0 && attempt < ADAM_ATTEMPTS; attempt++)
        adam_check_parameters(own->parameters[attempt], records[k].parameters[attempt], attempt);
    }
  free(own);
}

static void compare_over_nccl(const struct gpu_rank *self, void *context) {
  struct adam_nccl group;
  if (adam_nccl_open(&group, self))
    compare_cases(group.comm, self, context);
  adam_nccl_close(&group);
}

/* The default options' communicator of one rank, which is not loopback's. */
static void compare_alone(const struct gpu_rank *self, void *context) {
  onebit_comm_t comm;
  if (CHECK_STATUS(onebit_comm_create_self(&comm), ONEBIT_OK))
    compare_cases(comm, self, context);
  onebit_comm_destroy(comm);
}

static void over_loopback(void) {
  struct adam_record *records = gpu_allocate(CASES, sizeof *records);
  for (int size = 1; size <= ADAM_RANKS; size++)
    if (gpu_threads(size, record_cases, records))
      gpu_threads(size, compare_staged, records);
  free(records);
}

static void host_and_device_in_one_job(void) {
  struct adam_record *records = gpu_allocate(CASES, sizeof *records);
  for (int size = 2; size <= ADAM_RANKS; size++)
    if (gpu_threads(size, record_cases, records))
      gpu_threads(size, compare_mixed, records);
  free(records);
}

static void over_nccl(void) {
  struct adam_record *records = gpu_area(CASES * sizeof *records);
  for (int size = 1; size <= ADAM_RANKS; size++)
    if (gpu_threads(size, record_cases, records))
      gpu_ranks(size, compare_over_nccl, records);
}

static void alone(void) {
  struct adam_record *records = gpu_allocate(CASES, sizeof *records);
  if (gpu_threads(1, record_cases, records))
    gpu_threads(1, compare_alone, records);
  free(records);
}

/* Where nothing is exchanged there is nothing to learn from the device, and steps still count. */
static void without_tensors(void) {
  static const onebit_profile_t profiles[] = {ONEBIT_PROFILE_DEFAULT, ONEBIT_PROFILE_DEEPSPEED};
  for (size_t k = 0; k < 2; k++) {
    onebit_adam_options_t options = OPTIONS(.freeze_step = 3, .common.profile = profiles[k]);
    const onebit_optimizer_info_t wanted = {
        .stage = ONEBIT_STAGE_COMPRESSED, .steps = 6, .freeze_step = k == 0 ? 3 : 2};
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
    adam_check_info(optimizer, &wanted);
    onebit_optimizer_destroy(optimizer);
    onebit_comm_destroy(comm);
  }
}

static const struct gpu_test tests[] = {
    {"over loopback", over_loopback, false},
#ifdef ONEBIT_EMULATED_CUDA
    {"over what knows device memory", over_what_knows_devices, false},
#endif
    {"host and device in one job", host_and_device_in_one_job, false},
    {"over NCCL", over_nccl, false},
    {"alone", alone, false},
    {"without tensors", without_tensors, false},
};
GPU_SUITE("adam", tests)
