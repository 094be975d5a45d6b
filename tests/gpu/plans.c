/* Defines test cases of plans, and runs the ranks of a case. */
#define _DEFAULT_SOURCE
#include "tests/gpu/plans.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "collectives/communicator.h"

#ifdef ONEBIT_HAVE_NCCL
#include "onebit/nccl.h"
#endif

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

/* --- Cases */

/* The valid combinations of operation, schedule, profile and wire. A member that an entry does not
 * set is 0. */
static const struct kind {
  const char *name;
  onebit_operation_t operation;
  onebit_schedule_t schedule;
  onebit_profile_t profile;
  onebit_wire_t wire;
  int bits;
} kinds[] = {
    {"allreduce", .schedule = ONEBIT_SCHEDULE_EXCHANGE},
    {"allreduce, each to all", .schedule = ONEBIT_SCHEDULE_ALLGATHER},
    {"allreduce, deepspeed", .profile = ONEBIT_PROFILE_DEEPSPEED},
    {"allreduce, dense", .schedule = ONEBIT_SCHEDULE_EXCHANGE, .wire = ONEBIT_WIRE_DENSE},
    {"allreduce, dense, each to all", .schedule = ONEBIT_SCHEDULE_ALLGATHER,
     .wire = ONEBIT_WIRE_DENSE},
    {"allgather", .operation = ONEBIT_ALLGATHER},
    {"reduce-scatter", .operation = ONEBIT_REDUCE_SCATTER},
    {"allreduce, 2 bits", .schedule = ONEBIT_SCHEDULE_EXCHANGE, .bits = 2},
    {"allreduce, 4 bits", .schedule = ONEBIT_SCHEDULE_EXCHANGE, .bits = 4},
    {"allreduce, 8 bits", .schedule = ONEBIT_SCHEDULE_EXCHANGE, .bits = 8},
    {"allreduce, each to all, 8 bits", .schedule = ONEBIT_SCHEDULE_ALLGATHER, .bits = 8},
    {"allgather, 4 bits", .operation = ONEBIT_ALLGATHER, .bits = 4},
    {"reduce-scatter, 2 bits", .operation = ONEBIT_REDUCE_SCATTER, .bits = 2},
};
static const onebit_scale_t scales[] = {ONEBIT_SCALE_RMS, ONEBIT_SCALE_MEAN_ABSOLUTE};
/* A block length with more levels than a warp keeps in shared memory. */
#define LONG_BLOCK 4640
static const size_t blocks[] = {32, 2048, ONEBIT_BLOCK_BUFFER};
static const onebit_dtype_t dtypes[] = {ONEBIT_FLOAT32, ONEBIT_BFLOAT16, ONEBIT_FLOAT16};
static const size_t chunks[] = {0, 64, 4096};
static const size_t counts[] = {0, 1, 31, 33, 1000, 100003};
static const int forgets[] = {0, 1};
/* Factors of the input: 1; a factor above the limit under which sums cannot overflow; and a factor
 * with which squares overflow in float32. */
static const float magnitudes[] = {1, 1e12f, 3e19f};

#define PLACEMENTS 3 /* apart, misaligned, in place */

static size_t next_digit(size_t *index, size_t radix) {
  size_t value = *index % radix;
  *index /= radix;
  return value;
}

struct sample sample_plan_cases(const char *name, size_t thinner) {
  const size_t sizes[] = {COUNT(kinds),   COUNT(counts),     COUNT(blocks),
                          COUNT(scales),  COUNT(dtypes),     COUNT(chunks),
                          COUNT(forgets), COUNT(magnitudes), PLACEMENTS};
  return sample_product(name, thinner, sizes, COUNT(sizes));
}

/* Makes large cases cheaper. Messages of 64 elements would need thousands of launches in a large
 * case. On the emulated device, which runs threads one by one, seven of eight large cases also get
 * fewer elements. */
static void shrink_case(struct plan_case *what) {
  const size_t many = counts[COUNT(counts) - 1];
  if (what->count == many && what->options.chunk_size == chunks[1])
    what->options.chunk_size = chunks[2];
  if (IS_EMULATED && what->count == many && what->salt % 8)
    what->count = 4099;
}

struct plan_case plan_case_at(size_t index) {
  struct plan_case what = {.options = ONEBIT_PLAN_OPTIONS_INIT, .salt = (uint32_t)index};
  onebit_plan_options_t *options = &what.options;
  const struct kind *kind = &kinds[next_digit(&index, COUNT(kinds))];
  what.count = counts[next_digit(&index, COUNT(counts))];
  options->block_size = blocks[next_digit(&index, COUNT(blocks))];
  options->scale = scales[next_digit(&index, COUNT(scales))];
  options->dtype = dtypes[next_digit(&index, COUNT(dtypes))];
  options->chunk_size = chunks[next_digit(&index, COUNT(chunks))];
  options->no_error_feedback = forgets[next_digit(&index, COUNT(forgets))];
  what.magnitude = magnitudes[next_digit(&index, COUNT(magnitudes))];
  if (options->dtype == ONEBIT_FLOAT16)
    what.magnitude = 1;
  const size_t placement = next_digit(&index, PLACEMENTS);
  what.offset = placement != 0;
  what.in_place = placement == 2;
  options->operation = kind->operation;
  options->schedule = kind->schedule;
  options->profile = kind->profile;
  options->wire = kind->wire;
  options->bits = kind->bits;
  if (kind->bits > 1) { /* one scale for all blocks, and mean-magnitude scales, need one bit per
                         * element */
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
  snprintf(text, capacity, "%s of %zu times %g, dtype %d, scale %d, block %zd, chunk %zu%s%s%s",
           kind_name(options), what->count, (double)what->magnitude, (int)options->dtype,
           (int)options->scale, (ssize_t)options->block_size, options->chunk_size,
           options->no_error_feedback ? ", no feedback" : "", what->in_place ? ", in place" : "",
           what->offset ? ", misaligned" : "");
  return text;
}

struct plan_case default_plan_case(onebit_operation_t operation, size_t count) {
  struct plan_case what = {.options = ONEBIT_PLAN_OPTIONS_INIT, .count = count, .magnitude = 1};
  what.options.operation = operation;
  return what;
}

int current_device(void) {
  int device = -1;
  CHECK_CUDA(cudaGetDevice(&device));
  return device;
}

int other_device(void) {
  int devices = 1;
  CHECK_CUDA(cudaGetDeviceCount(&devices));
  return (current_device() + 1) % devices;
}

/* --- Ranks */

struct body {
  gpu_rank_body *run;
  void *context;
  struct nccl_start *start;
};

#ifdef ONEBIT_HAVE_NCCL

/* NCCL's unique id, which rank 0 creates in memory that all ranks share. */
struct nccl_start {
  atomic_bool is_made;
  ncclUniqueId id;
};

static _Thread_local ncclComm_t own;

ncclComm_t rank_nccl_comm(void) { return own; }

void forget_nccl_comm(void) { own = NULL; }

static bool check_nccl(ncclResult_t result, const char *call) {
  return CHECK(result == ncclSuccess, "%s: %s", call, ncclGetErrorString(result));
}

static void share_unique_id(const struct gpu_rank *self, struct nccl_start *start) {
  if (self->rank == 0)
    start->is_made = check_nccl(ncclGetUniqueId(&start->id), "ncclGetUniqueId");
  while (!start->is_made) /* the harness ends ranks that wait too long */
    nanosleep(&(struct timespec){0, 1000000}, NULL);
}

/* Ranks that are threads have one device each. If ranks shared a device, a call that waits for the
 * whole device, such as cudaFree, would also wait for another rank's messages. */
static void run_nccl_rank(const struct gpu_rank *self, void *context) {
  const struct body *body = context;
  struct gpu_rank here = *self;
  int devices = 1;
  CHECK_CUDA(cudaGetDeviceCount(&devices));
  CHECK_CUDA(cudaSetDevice(self->rank % devices));
  share_unique_id(self, body->start);
  if (!check_nccl(ncclCommInitRank(&own, self->size, body->start->id, self->rank),
                  "ncclCommInitRank"))
    return;
  check_case("over NCCL, rank %d of %d", self->rank, self->size);
  if (CHECK_STATUS(onebit_comm_create_nccl(own, &here.comm), ONEBIT_OK))
    body->run(&here, body->context);
  onebit_comm_destroy(here.comm);
  if (own)
    check_nccl(ncclCommDestroy(own), "ncclCommDestroy");
}

/* Runs the ranks. The emulated device gets one device for each rank, and at least two. */
bool run_ranks_nccl(int size, gpu_rank_body *run, void *context) {
  struct body body = {run, context, gpu_allocate_area(sizeof *body.start)};
  char devices[16];
  snprintf(devices, sizeof devices, "%d", size > 1 ? size : 2);
  setenv("EMULATED_DEVICES", devices, 1);
  bool well = gpu_run_ranks(size, run_nccl_rank, &body);
  unsetenv("EMULATED_DEVICES");
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
  struct body body = {.run = run, .context = context};
  return CHECK(size == 1, "%d ranks with themselves", size) &&
         gpu_run_loopback(1, run_self_rank, &body);
}

static bool takes_device_memory(void) { return true; }

static void run_aware_rank(const struct gpu_rank *self, void *context) {
  const struct body *body = context;
  const struct ob_transport *before = self->comm->transport;
  struct ob_transport aware = *before;
  aware.device_messages = takes_device_memory;
  self->comm->transport = &aware;
  body->run(self, body->context);
  self->comm->transport = before;
}

bool run_ranks_aware(int size, gpu_rank_body *run, void *context) {
  struct body body = {.run = run, .context = context};
  if (!IS_EMULATED)
    check_skip("loopback cannot move messages in memory of a real device");
  return IS_EMULATED && gpu_run_loopback(size, run_aware_rank, &body);
}

void run_ranks_both(int size, gpu_rank_body *run, void *context) {
  gpu_run_loopback(size, run, context);
#ifdef ONEBIT_HAVE_NCCL
  run_ranks_nccl(size, run, context);
#endif
}

struct emulation_counters count_call(onebit_status_t (*call)(void *context), void *context) {
  if (gpu_await_ranks())
    emulation_reset_counts();
  gpu_await_ranks();
  CHECK_STATUS(call(context), ONEBIT_OK);
  gpu_await_ranks();
  const struct emulation_counters called = emulation_counts();
  gpu_await_ranks();
  CHECK_CUDA(cudaDeviceSynchronize());
  gpu_await_ranks();
  struct emulation_counters all = emulation_counts();
  all.synchronisations = called.synchronisations;
  all.allocations = called.allocations;
  gpu_await_ranks();
  return all;
}

/* --- Ranks on given hosts */

const struct hosts_split hosts_splits[HOSTS_SPLITS] = {{2, 2, false}, {2, 3, false}, {2, 3, true},
                                                       {3, 2, false}, {4, 1, false}, {1, 3, false}};

struct run {
  const struct hosts_split *split;
  hosts_body *body;
  void *context;
  enum hosts_place place;
};

static void set_hosts(onebit_comm_t comm, const struct hosts_split *split) {
  int host_of[HOSTS_MOST_RANKS];
  for (int r = 0; r < comm->size; r++)
    host_of[r] = split->in_turns ? r % split->hosts : r / split->each;
  ob_hosts_destroy(&comm->hosts);
  CHECK_STATUS(ob_hosts_create(&comm->hosts, host_of, comm->rank, comm->size), ONEBIT_OK);
}

static void run_at_place(const struct gpu_rank *self, void *context) {
  static const char *const words[] = {"on the processor", "staged", "NCCL"};
  const struct run *run = context;
  check_case("%d hosts of %d%s, rank %d, %s", run->split->hosts, run->split->each,
             run->split->in_turns ? " in turns" : "", self->rank, words[run->place]);
  set_hosts(self->comm, run->split);
  run->body(self, run->split, run->place, run->context);
}

void run_on_hosts(const struct hosts_split *split, hosts_body *body, void *context) {
  struct run run = {split, body, context, ON_PROCESSOR};
  const int size = split->hosts * split->each;
  if (!gpu_run_loopback(size, run_at_place, &run))
    return;
  run.place = STAGED;
  if (!gpu_run_loopback(size, run_at_place, &run))
    return;
#ifdef ONEBIT_HAVE_NCCL
  run.place = OVER_NCCL;
  run_ranks_nccl(size, run_at_place, &run);
#endif
}
