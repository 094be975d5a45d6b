/*
 * Tests plans on a CUDA device over MPI. Results must have the same bits as on the host, also if
 * only the odd ranks have a device. tests/gpu/test_optimizers.c tests optimizers on devices. The
 * tests are skipped if the library is built without CUDA or the machine has no device.
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

/* The memory space of the ranks' plans: all on the host, all on a device, or odd ranks on a
 * device. */
enum job { ALL_HOST, ALL_DEVICE, ODD_DEVICE };

static onebit_device_t find_device(enum job job, int rank) {
  bool device = job == ALL_DEVICE || (job == ODD_DEVICE && rank % 2);
  return device ? ONEBIT_DEVICE_CUDA : ONEBIT_DEVICE_HOST;
}

/* Allocates memory in the memory space where the plan needs its buffers. */
static void *allocate_on_device(onebit_device_t device, size_t bytes) {
  void *memory = NULL;
  if (device == ONEBIT_DEVICE_HOST)
    return allocate(bytes, 1);
  CHECK_CUDA(cudaMalloc(&memory, bytes));
  return memory;
}

static void release_memory(onebit_device_t device, void *memory) {
  if (device == ONEBIT_DEVICE_HOST)
    free(memory);
  else
    CHECK_CUDA(cudaFree(memory));
}

static void copy_memory(void *to, const void *from, size_t bytes) {
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

/* Stores the results of all steps. Calls without a stream and calls on a stream alternate. */
static void run_plan(onebit_comm_t comm, const struct plan_case *what, enum job job,
                     unsigned char *results) {
  onebit_plan_options_t options = what->options;
  int rank = onebit_comm_rank(comm);
  size_t bytes = COUNT * dtype_size(options.dtype);
  onebit_device_t device = find_device(job, rank);
  void *host = allocate(bytes, 1), *input = allocate_on_device(device, bytes),
       *output = allocate_on_device(device, bytes);
  onebit_plan_t plan = NULL;
  options.device = device;
  check_case("%s, job %d", what->name, (int)job);
  if (CHECK_STATUS(onebit_plan_create(comm, COUNT, &options, &plan), ONEBIT_OK))
    for (int step = 0; step < STEPS; step++) {
      fill_input(host, options.dtype, COUNT, rank, step);
      copy_memory(input, host, bytes);
      CHECK_STATUS(device == ONEBIT_DEVICE_CUDA && step % 2
                       ? onebit_allreduce_stream(input, output, plan, NULL)
                       : onebit_allreduce(input, output, plan),
                   ONEBIT_OK);
      copy_memory(results + (size_t)step * bytes, output, bytes);
    }
  onebit_plan_destroy(plan);
  release_memory(device, output);
  release_memory(device, input);
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

/* Returns the number of messages of a plan. If all ranks have devices, messages are longer than on
 * processors. If only some ranks have devices, messages have the length for processors. */
static size_t count_messages(onebit_comm_t comm, enum job job) {
  const size_t count = 500000 * (size_t)onebit_comm_size(comm);
  onebit_plan_options_t options = {.size = sizeof options, EXCHANGE};
  onebit_plan_info_t info = {.size = sizeof info};
  onebit_plan_t plan = NULL;
  options.device = find_device(job, onebit_comm_rank(comm));
  void *buffer = allocate_on_device(options.device, count * sizeof(float));
  void *zeros = allocate(count, sizeof(float));
  copy_memory(buffer, zeros, count * sizeof(float));
  free(zeros);
  check_case("long messages, job %d", (int)job);
  if (CHECK_STATUS(onebit_plan_create(comm, count, &options, &plan), ONEBIT_OK)) {
    CHECK_STATUS(onebit_plan_get_info(plan, &info), ONEBIT_OK);
    CHECK_STATUS(onebit_allreduce(buffer, buffer, plan), ONEBIT_OK);
  }
  onebit_plan_destroy(plan);
  release_memory(options.device, buffer);
  return info.chunks;
}

static void check_message_counts(onebit_comm_t comm, void *context) {
  size_t on_hosts = count_messages(comm, ALL_HOST);
  (void)context;
  CHECK(count_messages(comm, ALL_DEVICE) < on_hosts, "%zu messages on processors", on_hosts);
  if (onebit_comm_size(comm) > 1)
    CHECK(count_messages(comm, ODD_DEVICE) == on_hosts, "%zu messages on processors", on_hosts);
}

Test(mpi_device, a_mixed_job_has_messages_of_one_length) {
  skip_without_device();
  mpi_begin();
  on_mpi_ranks(MPI_COMM_WORLD, check_message_counts, NULL);
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

/* Makes the library treat each pair of ranks as one host. */
static void pretend_hosts(onebit_comm_t comm) {
  const int host_of[] = {0, 0, 1, 1};
  ob_hosts_destroy(&comm->hosts);
  CHECK_STATUS(ob_hosts_create(&comm->hosts, host_of, comm->rank, comm->size), ONEBIT_OK);
}

static void create_mixed_optimizer(onebit_comm_t comm, onebit_schedule_t schedule,
                                   onebit_status_t wanted) {
  onebit_adam_options_t options = {.size = sizeof options, .common.schedule = schedule};
  onebit_optimizer_t optimizer;
  options.common.device = find_device(ODD_DEVICE, comm->rank);
  float *arrays = allocate_on_device(options.common.device, 2000 * sizeof(float));
  onebit_tensor_t tensor = {.parameter = arrays, .gradient = arrays + 1000, .count = 1000};
  CHECK_STATUS(onebit_adam_create(comm, &tensor, 1, &options, &optimizer), wanted);
  if (wanted == ONEBIT_ERROR_MISMATCH)
    CHECK_WORDS("set schedule to ONEBIT_SCHEDULE_EXCHANGE");
  onebit_optimizer_destroy(optimizer);
  release_memory(options.common.device, arrays);
}

/* Checks a job in which only some ranks have devices. If the transport needs messages in host
 * memory, ranks of a host share memory, as without devices. If it sends device memory itself, the
 * job must be refused, unless its options name the exchange schedule. */
static void check_mixed_job(onebit_comm_t comm, void *context) {
  bool shared = !(comm->transport->device_messages && comm->transport->device_messages());
  (void)context;
  pretend_hosts(comm);
  check_case("a mixed job");
  create_mixed_optimizer(comm, ONEBIT_SCHEDULE_AUTOMATIC,
                         shared ? ONEBIT_OK : ONEBIT_ERROR_MISMATCH);
  create_mixed_optimizer(comm, ONEBIT_SCHEDULE_EXCHANGE, ONEBIT_OK);
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
    on_mpi_ranks(MPI_COMM_WORLD, check_mixed_job, NULL);
  mpi_end();
}

#endif
