/* Cases of plans, and ranks that run them. */
#define _DEFAULT_SOURCE
#include "tests/gpu/plans.h"

#include <stdio.h>
#include <stdlib.h>

#include "collectives/communicator.h"

#ifdef ONEBIT_HAVE_NCCL
#include "onebit/nccl.h"
#endif

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

/* --- Cases */

/* The valid combinations of operation, schedule, profile and wire. */
static const struct kind {
  const char *name;
  onebit_operation_t operation;
  onebit_schedule_t schedule;
  onebit_profile_t profile;
  onebit_wire_t wire;
  int bits;
} kinds[] = {
    {"allreduce", ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_PROFILE_DEFAULT,
     ONEBIT_WIRE_BITS, 1},
    {"allreduce, each to all", ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_ALLGATHER, ONEBIT_PROFILE_DEFAULT,
     ONEBIT_WIRE_BITS, 1},
    {"allreduce, deepspeed", ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_AUTOMATIC, ONEBIT_PROFILE_DEEPSPEED,
     ONEBIT_WIRE_BITS, 1},
    {"allreduce, dense", ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_PROFILE_DEFAULT,
     ONEBIT_WIRE_DENSE, 1},
    {"allreduce, dense, each to all", ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_ALLGATHER,
     ONEBIT_PROFILE_DEFAULT, ONEBIT_WIRE_DENSE, 1},
    {"allgather", ONEBIT_ALLGATHER, ONEBIT_SCHEDULE_AUTOMATIC, ONEBIT_PROFILE_DEFAULT,
     ONEBIT_WIRE_BITS, 1},
    {"reduce-scatter", ONEBIT_REDUCE_SCATTER, ONEBIT_SCHEDULE_AUTOMATIC, ONEBIT_PROFILE_DEFAULT,
     ONEBIT_WIRE_BITS, 1},
    {"allreduce, 2 bits", ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_PROFILE_DEFAULT,
     ONEBIT_WIRE_BITS, 2},
    {"allreduce, 4 bits", ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_PROFILE_DEFAULT,
     ONEBIT_WIRE_BITS, 4},
    {"allreduce, 8 bits", ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_PROFILE_DEFAULT,
     ONEBIT_WIRE_BITS, 8},
    {"allreduce, each to all, 8 bits", ONEBIT_ALLREDUCE, ONEBIT_SCHEDULE_ALLGATHER,
     ONEBIT_PROFILE_DEFAULT, ONEBIT_WIRE_BITS, 8},
    {"allgather, 4 bits", ONEBIT_ALLGATHER, ONEBIT_SCHEDULE_AUTOMATIC, ONEBIT_PROFILE_DEFAULT,
     ONEBIT_WIRE_BITS, 4},
    {"reduce-scatter, 2 bits", ONEBIT_REDUCE_SCATTER, ONEBIT_SCHEDULE_AUTOMATIC,
     ONEBIT_PROFILE_DEFAULT, ONEBIT_WIRE_BITS, 2},
};
static const onebit_scale_t scales[] = {ONEBIT_SCALE_RMS, ONEBIT_SCALE_MEAN_ABSOLUTE};
/* A block longer than the number of levels that a warp keeps in shared memory. */
#define LONG_BLOCK 4640
static const size_t blocks[] = {32, 2048, ONEBIT_BLOCK_BUFFER};
static const onebit_dtype_t dtypes[] = {ONEBIT_FLOAT32, ONEBIT_BFLOAT16, ONEBIT_FLOAT16};
static const size_t chunks[] = {0, 64, 4096};
static const size_t counts[] = {0, 1, 31, 33, 1000, 100003};
static const int forgets[] = {0, 1};

#define PLACEMENTS 3 /* apart, misaligned, in place */

static size_t take_digit(size_t *index, size_t radix) {
  size_t value = *index % radix;
  *index /= radix;
  return value;
}

struct sample sample_plan_cases(const char *name, size_t thinner) {
  const size_t sizes[] = {COUNT(kinds),  COUNT(counts), COUNT(blocks),  COUNT(scales),
                          COUNT(dtypes), COUNT(chunks), COUNT(forgets), PLACEMENTS};
  return sample_product(name, thinner, sizes, COUNT(sizes));
}

/* Makes large cases cheaper: messages of 64 elements each would be thousands of launches; and where
 * the emulator runs threads one by one, seven of eight large cases get fewer elements. */
static void shrink_case(struct plan_case *what) {
  const size_t many = counts[COUNT(counts) - 1];
  if (what->count == many && what->options.chunk_size == chunks[1])
    what->options.chunk_size = chunks[2];
#ifdef ONEBIT_EMULATED_CUDA
  if (what->count == many && what->salt % 8)
    what->count = 4099;
#endif
}

struct plan_case plan_case_at(size_t index) {
  struct plan_case what = {.options = ONEBIT_PLAN_OPTIONS_INIT, .salt = (uint32_t)index};
  onebit_plan_options_t *options = &what.options;
  const struct kind *kind = &kinds[take_digit(&index, COUNT(kinds))];
  what.count = counts[take_digit(&index, COUNT(counts))];
  options->block_size = blocks[take_digit(&index, COUNT(blocks))];
  options->scale = scales[take_digit(&index, COUNT(scales))];
  options->dtype = dtypes[take_digit(&index, COUNT(dtypes))];
  options->chunk_size = chunks[take_digit(&index, COUNT(chunks))];
  options->no_error_feedback = forgets[take_digit(&index, COUNT(forgets))];
  const size_t placement = take_digit(&index, PLACEMENTS);
  what.offset = placement != 0;
  what.in_place = placement == 2;
  options->operation = kind->operation;
  options->schedule = kind->schedule;
  options->profile = kind->profile;
  options->wire = kind->wire;
  options->bits = kind->bits;
  if (kind->bits > 1) { /* only one bit can have one scale for all, or the mean magnitude */
    if (options->block_size == ONEBIT_BLOCK_BUFFER)
      options->block_size = LONG_BLOCK;
    if (options->scale == ONEBIT_SCALE_MEAN_ABSOLUTE)
      options->scale = ONEBIT_SCALE_LARGEST;
  }
  if (kind->profile == ONEBIT_PROFILE_DEEPSPEED) { /* the profile fixes both options */
    options->block_size = 0;
    options->scale = ONEBIT_SCALE_RMS;
  }
  shrink_case(&what);
  return what;
}

static const char *kind_name(const onebit_plan_options_t *options) {
  for (size_t i = 0; i < COUNT(kinds); i++)
    if (kinds[i].operation == options->operation && kinds[i].schedule == options->schedule &&
        kinds[i].profile == options->profile && kinds[i].wire == options->wire &&
        kinds[i].bits == options->bits)
      return kinds[i].name;
  return "a plan";
}

const char *describe_plan_case(const struct plan_case *what, char *text, size_t capacity) {
  const onebit_plan_options_t *options = &what->options;
  snprintf(text, capacity, "%s of %zu, dtype %d, scale %d, block %zd, chunk %zu%s%s%s",
           kind_name(options), what->count, (int)options->dtype, (int)options->scale,
           (ssize_t)options->block_size, options->chunk_size,
           options->no_error_feedback ? ", no feedback" : "", what->in_place ? ", in place" : "",
           what->offset ? ", misaligned" : "");
  return text;
}

struct plan_case default_plan_case(onebit_operation_t operation, size_t count) {
  struct plan_case what = {.options = ONEBIT_PLAN_OPTIONS_INIT, .count = count};
  what.options.operation = operation;
  return what;
}

/* --- Ranks */

struct body {
  gpu_rank_body *run;
  void *context;
};

#ifdef ONEBIT_HAVE_NCCL

static _Thread_local ncclComm_t own;

ncclComm_t rank_nccl_comm(void) { return own; }

void forget_nccl_comm(void) { own = NULL; }

static bool check_nccl(ncclResult_t result, const char *call) {
  return CHECK(result == ncclSuccess, "%s: %s", call, ncclGetErrorString(result));
}

/* Ranks that are threads have a device each: on a shared device a wait for the whole device (as in
 * cudaFree) would also wait for another rank's messages. */
static void run_nccl_rank(const struct gpu_rank *self, void *context) {
  const struct body *body = context;
  struct gpu_rank here = *self;
  ncclUniqueId id;
  int devices = 1;
  CHECK_CUDA(cudaGetDeviceCount(&devices));
  CHECK_CUDA(cudaSetDevice(self->rank % devices));
  if (self->rank == 0)
    check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
  gpu_broadcast(self, &id, sizeof id);
  if (!check_nccl(ncclCommInitRank(&own, self->size, id, self->rank), "ncclCommInitRank"))
    return;
  if (CHECK_STATUS(onebit_comm_create_nccl(own, &here.comm), ONEBIT_OK))
    body->run(&here, body->context);
  onebit_comm_destroy(here.comm);
  if (own)
    check_nccl(ncclCommDestroy(own), "ncclCommDestroy");
}

/* Runs the ranks on the emulated device, with a device for each rank. */
bool run_ranks_nccl(int size, gpu_rank_body *run, void *context) {
  struct body body = {run, context};
#ifdef ONEBIT_EMULATED_CUDA
  char devices[16];
  snprintf(devices, sizeof devices, "%d", size);
  setenv("EMULATED_DEVICES", devices, 1);
#endif
  bool well = gpu_run_ranks(size, run_nccl_rank, &body);
#ifdef ONEBIT_EMULATED_CUDA
  unsetenv("EMULATED_DEVICES");
#endif
  return well;
}

#else

bool run_ranks_nccl(int size, gpu_rank_body *run, void *context) {
  (void)size, (void)run, (void)context;
  check_skip("this build is without NCCL");
  return false;
}

#endif

static void run_self_rank(const struct gpu_rank *self, void *context) {
  const struct body *body = context;
  struct gpu_rank here = *self;
  if (CHECK_STATUS(onebit_comm_create_self(&here.comm), ONEBIT_OK))
    body->run(&here, body->context);
  onebit_comm_destroy(here.comm);
}

bool run_ranks_self(int size, gpu_rank_body *run, void *context) {
  struct body body = {run, context};
  return CHECK(size == 1, "%d ranks with themselves", size) &&
         gpu_run_ranks(1, run_self_rank, &body);
}

#ifdef ONEBIT_EMULATED_CUDA

static bool takes_device_memory(void) { return true; }

void make_transport_aware(onebit_comm_t comm) {
  static _Thread_local struct ob_transport aware;
  aware = *comm->transport;
  aware.device_messages = takes_device_memory;
  comm->transport = &aware;
}

static void run_aware_rank(const struct gpu_rank *self, void *context) {
  const struct body *body = context;
  const struct ob_transport *before = self->comm->transport;
  make_transport_aware(self->comm);
  body->run(self, body->context);
  self->comm->transport = before;
}

bool run_ranks_aware(int size, gpu_rank_body *run, void *context) {
  struct body body = {run, context};
  return gpu_run_loopback(size, run_aware_rank, &body);
}

#endif

void run_ranks_both(int size, gpu_rank_body *run, void *context) {
  gpu_run_loopback(size, run, context);
#ifdef ONEBIT_HAVE_NCCL
  run_ranks_nccl(size, run, context);
#endif
}

/* --- Ranks on given hosts */

const struct hosts_split hosts_splits[HOSTS_SPLITS] = {{2, 2, false}, {2, 3, false}, {2, 3, true},
                                                       {3, 2, false}, {4, 1, false}, {1, 3, false}};

struct run {
  const struct hosts_split *split;
  hosts_body *body;
  void *context;
};

static void set_hosts(onebit_comm_t comm, const struct hosts_split *split) {
  int host_of[HOSTS_MOST_RANKS];
  for (int r = 0; r < comm->size; r++)
    host_of[r] = split->in_turns ? r % split->hosts : r / split->each;
  ob_hosts_destroy(&comm->hosts);
  CHECK_STATUS(ob_hosts_create(&comm->hosts, host_of, comm->rank, comm->size), ONEBIT_OK);
}

static void run_body_at(const struct gpu_rank *self, const struct run *run,
                        enum hosts_place place) {
  static const char *const words[] = {"on the processor", "staged", "NCCL"};
  check_case("%d hosts of %d%s, rank %d, %s", run->split->hosts, run->split->each,
             run->split->in_turns ? " in turns" : "", self->rank, words[place]);
  set_hosts(self->comm, run->split);
  run->body(self, run->split, place, run->context);
}

static void run_on_processor(const struct gpu_rank *self, void *context) {
  run_body_at(self, context, ON_PROCESSOR);
}

static void run_staged(const struct gpu_rank *self, void *context) {
  run_body_at(self, context, STAGED);
}

#ifdef ONEBIT_HAVE_NCCL
static void run_over_nccl(const struct gpu_rank *self, void *context) {
  run_body_at(self, context, OVER_NCCL);
}
#endif

void run_on_hosts(const struct hosts_split *split, hosts_body *body, void *context) {
  struct run run = {split, body, context};
  int size = split->hosts * split->each;
  if (!gpu_run_loopback(size, run_on_processor, &run) || !gpu_run_loopback(size, run_staged, &run))
    return;
#ifdef ONEBIT_HAVE_NCCL
  run_ranks_nccl(size, run_over_nccl, &run);
#endif
}
