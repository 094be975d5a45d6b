/*
 * Plans on a CUDA device over MPI: the bits of the host's, also when only the odd ranks have a
 * device; optimizers make their exchanges by plans (tests/gpu/test_optimizers.c). Without CUDA in
 * the library, or a device on this machine, nothing is tested.
 */
#include "tests/support_mpi.h"

#ifndef ONEBIT_HAVE_CUDA

Test(mpi_device, equals_the_host) { cr_skip_test("the library was built without CUDA"); }

#else

#include <cuda_runtime_api.h>

#include "collectives/communicator.h"
#include "onebit/cuda.h"

enum { COUNT = 70001, STEPS = 3 };

#define CHECK_CUDA(call)                                                                           \
  do {                                                                                             \
    cudaError_t error = (call);                                                                    \
    CHECK(error == cudaSuccess, #call ": %s", cudaGetErrorString(error));                          \
  } while (0)

static void skip_without_device(void) {
  int devices = 0;
  cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess || devices == 0)
    cr_skip_test("no CUDA device: %s", cudaGetErrorString(error));
}

/* The ranks that are on the device. */
enum job { ALL_HOST, ALL_DEVICE, ODD_DEVICE };

static onebit_device_t device_of(enum job job, int rank) {
  bool device = job == ALL_DEVICE || (job == ODD_DEVICE && rank % 2);
  return device ? ONEBIT_DEVICE_CUDA : ONEBIT_DEVICE_HOST;
}

/* Allocates memory where the plan needs its buffers. */
static void *allocate_on(onebit_device_t device, size_t bytes) {
  void *memory = NULL;
  if (device == ONEBIT_DEVICE_HOST)
    return allocate(bytes, 1);
  CHECK_CUDA(cudaMalloc(&memory, bytes));
  return memory;
}

static void release(onebit_device_t device, void *memory) {
  if (device == ONEBIT_DEVICE_HOST)
    free(memory);
  else
    CHECK_CUDA(cudaFree(memory));
}

static void copy(void *to, const void *from, size_t bytes) {
  CHECK_CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
  CHECK_CUDA(cudaDeviceSynchronize());
}

/* --- Plans */

struct plan_case {
  onebit_plan_options_t options;
  const char *name;
};

#define PLAN(...)                                                                                  \
  { .size = sizeof(onebit_plan_options_t), __VA_ARGS__ }

#define EXCHANGE .schedule = ONEBIT_SCHEDULE_EXCHANGE

static const struct plan_case plan_cases[] = {
    {PLAN(EXCHANGE, .dtype = ONEBIT_FLOAT32), "bits"},
    {PLAN(EXCHANGE, .dtype = ONEBIT_BFLOAT16, .chunk_size = 8192), "bfloat16 in chunks"},
    {PLAN(EXCHANGE, .block_size = ONEBIT_BLOCK_BUFFER), "one scale"},
    {PLAN(EXCHANGE, .wire = ONEBIT_WIRE_DENSE), "dense"},
    {PLAN(EXCHANGE, .profile = ONEBIT_PROFILE_DEEPSPEED), "deepspeed"},
};

/* Gets the results of all steps: calls without a stream and calls on a stream, in turn. */
static void run_plan(onebit_comm_t comm, const struct plan_case *what, enum job job,
                     unsigned char *results) {
  onebit_plan_options_t options = what->options;
  int rank = onebit_comm_rank(comm);
  size_t bytes = COUNT * dtype_size(options.dtype);
  onebit_device_t device = device_of(job, rank);
  void *host = allocate(bytes, 1), *input = allocate_on(device, bytes),
       *output = allocate_on(device, bytes);
  onebit_plan_t plan = NULL;
  options.device = device;
  check_case("%s, job %d", what->name, (int)job);
  if (CHECK_STATUS(onebit_plan_create(comm, COUNT, &options, &plan), ONEBIT_OK))
    for (int step = 0; step < STEPS; step++) {
      fill_input(host, options.dtype, COUNT, rank, step);
      copy(input, host, bytes);
      CHECK_STATUS(device == ONEBIT_DEVICE_CUDA && step % 2
                       ? onebit_allreduce_stream(input, output, plan, NULL)
                       : onebit_allreduce(input, output, plan),
                   ONEBIT_OK);
      copy(results + (size_t)step * bytes, output, bytes);
    }
  onebit_plan_destroy(plan);
  release(device, output);
  release(device, input);
  free(host);
}

static void compare_plans(onebit_comm_t comm, void *context) {
  const struct plan_case *what = context;
  size_t bytes = STEPS * COUNT * dtype_size(what->options.dtype);
  unsigned char *wanted = allocate(bytes, 1), *got = allocate(bytes, 1);
  run_plan(comm, what, ALL_HOST, wanted);
  for (int job = ALL_DEVICE; job <= ODD_DEVICE; job++) {
    run_plan(comm, what, (enum job)job, got);
    CHECK_BITS("results", got, wanted, STEPS * COUNT, what->options.dtype);
  }
  free(got);
  free(wanted);
}

Test(mpi_device, plans_equal_the_host) {
  skip_without_device();
  mpi_begin();
  for (size_t k = 0; k < sizeof plan_cases / sizeof plan_cases[0]; k++) {
    struct plan_case what = plan_cases[k];
    on_mpi_ranks(MPI_COMM_WORLD, compare_plans, &what);
  }
  mpi_end();
}

/* Returns the number of messages. A device alone cuts longer messages than a processor; together
 * both use the processor's. */
static size_t messages_of(onebit_comm_t comm, enum job job) {
  const size_t count = 500000 * (size_t)onebit_comm_size(comm);
  onebit_plan_options_t options = {.size = sizeof options, EXCHANGE};
  onebit_plan_info_t info = {.size = sizeof info};
  onebit_plan_t plan = NULL;
  options.device = device_of(job, onebit_comm_rank(comm));
  void *buffer = allocate_on(options.device, count * sizeof(float));
  void *zeros = allocate(count, sizeof(float));
  copy(buffer, zeros, count * sizeof(float));
  free(zeros);
  check_case("long messages, job %d", (int)job);
  if (CHECK_STATUS(onebit_plan_create(comm, count, &options, &plan), ONEBIT_OK)) {
    CHECK_STATUS(onebit_plan_get_info(plan, &info), ONEBIT_OK);
    CHECK_STATUS(onebit_allreduce(buffer, buffer, plan), ONEBIT_OK);
  }
  onebit_plan_destroy(plan);
  release(options.device, buffer);
  return info.chunks;
}

static void cut_messages(onebit_comm_t comm, void *context) {
  size_t on_hosts = messages_of(comm, ALL_HOST);
  (void)context;
  CHECK(messages_of(comm, ALL_DEVICE) < on_hosts, "%zu messages on processors", on_hosts);
  if (onebit_comm_size(comm) > 1)
    CHECK(messages_of(comm, ODD_DEVICE) == on_hosts, "%zu messages on processors", on_hosts);
}

Test(mpi_device, messages_are_cut_alike) {
  skip_without_device();
  mpi_begin();
  on_mpi_ranks(MPI_COMM_WORLD, cut_messages, NULL);
  mpi_end();
}

/* --- Ranks that share a host ---*/

static const struct plan_case hosts_cases[] = {
    {PLAN(.schedule = ONEBIT_SCHEDULE_HIERARCHICAL), "hierarchical"},
    {PLAN(.schedule = ONEBIT_SCHEDULE_HIERARCHICAL, .dtype = ONEBIT_FLOAT16, .chunk_size = 1024),
     "hierarchical, float16 in chunks"},
    {PLAN(.schedule = ONEBIT_SCHEDULE_HIERARCHICAL, .dtype = ONEBIT_BFLOAT16,
          .wire = ONEBIT_WIRE_DENSE),
     "hierarchical, dense"},
};

/* Lets the library think that two ranks each share a host. */
static void pretend_hosts(onebit_comm_t comm) {
  const int host_of[] = {0, 0, 1, 1};
  ob_hosts_destroy(&comm->hosts);
  CHECK_STATUS(ob_hosts_create(&comm->hosts, host_of, comm->rank, comm->size), ONEBIT_OK);
}

static void create_mixed(onebit_comm_t comm, onebit_schedule_t schedule, onebit_status_t wanted) {
  onebit_adam_options_t options = {.size = sizeof options, .common.schedule = schedule};
  onebit_optimizer_t optimizer;
  options.common.device = device_of(ODD_DEVICE, comm->rank);
  float *arrays = allocate_on(options.common.device, 2000 * sizeof(float));
  onebit_tensor_t tensor = {.parameter = arrays, .gradient = arrays + 1000, .count = 1000};
  CHECK_STATUS(onebit_adam_create(comm, &tensor, 1, &options, &optimizer), wanted);
  if (wanted == ONEBIT_ERROR_MISMATCH)
    CHECK_WORDS("name ONEBIT_SCHEDULE_EXCHANGE");
  onebit_optimizer_destroy(optimizer);
  release(options.common.device, arrays);
}

/* Devices that the host sends for share its memory as processors do. One whose memory the transport
 * sends has its own way inside a host. */
static void leave_it_to_the_library(onebit_comm_t comm, void *context) {
  bool shared = !(comm->transport->device_messages && comm->transport->device_messages());
  (void)context;
  pretend_hosts(comm);
  check_case("a mixed job");
  create_mixed(comm, ONEBIT_SCHEDULE_AUTOMATIC, shared ? ONEBIT_OK : ONEBIT_ERROR_MISMATCH);
  create_mixed(comm, ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_OK);
  for (size_t k = 0; shared && k < sizeof hosts_cases / sizeof hosts_cases[0]; k++) {
    struct plan_case what = hosts_cases[k];
    compare_plans(comm, &what);
  }
}

Test(mpi_device, several_ranks_share_a_host) {
  int size;
  skip_without_device();
  mpi_begin();
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size == 4)
    on_mpi_ranks(MPI_COMM_WORLD, leave_it_to_the_library, NULL);
  mpi_end();
}

#endif
