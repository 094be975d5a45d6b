/*
 * An NCCL program that does not use onebit itself, for tests/scripts/check-preload-nccl:
 *
 *     nccl_program RANKS CASE...
 *
 * Each case checks its sums, which must be correct with and without a preloaded library. "Exact"
 * values have one magnitude and are the same on all ranks, so that one bit and a scale represent
 * them without loss. On the emulated device ranks are threads. Otherwise they are processes with a
 * host name each (NCCL_HOSTID), so that NCCL lets them share a GPU.
 */
#define _DEFAULT_SOURCE
#include "tests/preload/nccl_program.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- Values on the device, and checks that end the process ---- */

_Thread_local int rank;
_Thread_local ncclComm_t comm;
_Thread_local cudaStream_t stream;
_Thread_local float *host;
int size;

void fail(const char *what, int step, int i, double is, double wanted) {
  fprintf(stderr, "rank %d: %s: step %d, element %d is %.9g and not %.9g\n", rank, what, step, i,
          is, wanted);
  _exit(3);
}

void check_cuda(cudaError_t error, const char *call) {
  if (error == cudaSuccess)
    return;
  fprintf(stderr, "rank %d: %s: %s\n", rank, call, cudaGetErrorString(error));
  _exit(4);
}

void check_nccl(ncclResult_t result, const char *call) {
  if (result == ncclSuccess)
    return;
  fprintf(stderr, "rank %d: %s: %s\n", rank, call, ncclGetErrorString(result));
  _exit(5);
}

void *device_memory(size_t bytes) {
  void *memory;
  CUDA(cudaMalloc(&memory, bytes));
  CUDA(cudaMemset(memory, 0, bytes));
  CUDA(cudaDeviceSynchronize());
  return memory;
}

float exact_value(int step, int i) { return ((i * 7 + step * 3 + i / 5) % 3 ? 0.5F : -0.5F); }

void copy_to_device(void *to, size_t bytes) {
  CUDA(cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, stream));
  CUDA(cudaStreamSynchronize(stream));
}

void copy_from_device(const void *from, size_t bytes) {
  CUDA(cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, stream));
  CUDA(cudaStreamSynchronize(stream));
}

void fill_exact(float *to, int count, int step, float times) {
  for (int i = 0; i < count; i++)
    host[i] = exact_value(step, i) * times;
  copy_to_device(to, (size_t)count * sizeof *to);
}

void check_values(const char *what, const float *from, int count, int step, float times) {
  copy_from_device(from, (size_t)count * sizeof *from);
  for (int i = 0; i < count; i++)
    if (host[i] != exact_value(step, i) * times)
      fail(what, step, i, host[i], exact_value(step, i) * times);
}

void sum_on_stream(const void *from, void *to, size_t count) {
  NCCL(ncclAllReduce(from, to, count, ncclFloat, ncclSum, comm, stream));
}

void begin_capture(void) { CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal)); }

cudaGraphExec_t end_capture(void) {
  cudaGraph_t captured;
  cudaGraphExec_t ready;
  CUDA(cudaStreamEndCapture(stream, &captured));
  CUDA(cudaGraphInstantiate(&ready, captured, 0));
  CUDA(cudaGraphDestroy(captured));
  return ready;
}

/* ---- Ranks ---- */

static const struct {
  const char *name;
  void (*run)(void);
} cases[] = {{"steady", sum_steadily},
             {"queued", sum_without_waiting},
             {"feedback", sum_with_feedback},
             {"types", average_types},
             {"groups", sum_in_groups},
             {"crowd", sum_in_large_group},
             {"moves", sum_in_moved_buffers},
             {"another", sum_another_tensor},
             {"reuse", sum_in_reused_buffer},
             {"not-a-number", sum_not_a_number},
             {"foreign", make_other_calls},
             {"gather-and-scatter", gather_and_scatter},
             {"order", change_order},
             {"streams", alternate_streams},
             {"graph", capture_sums},
             {"early-graph", capture_early},
             {"graph-of-several", capture_several_sums},
             {"graph-feedback", sum_with_feedback_in_graph},
             {"communicators", sum_on_communicators},
             {"shrunk", sum_on_shrunk_communicator},
             {"nonblocking", sum_on_nonblocking_communicator}};

static void run_case(const char *name) {
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
    if (!strcmp(cases[i].name, name)) {
      cases[i].run();
      return;
    }
  fprintf(stderr, "nccl_program: no case %s\n", name);
  _exit(2);
}

/* --- Ranks */

/* The memory that ranks share, mapped before the processes are forked. */
static struct {
  ncclUniqueId id;
  volatile int ready;
  int gave_up; /* number of ranks that have given up */
} * shared;

static char **names;

#ifdef ONEBIT_EMULATED_CUDA

/* Breaks the link while a sum is compressed. The program queries NCCL until it reports the error,
 * makes another sum, queries once more, and aborts. */
static void break_link(void) {
  float *mine = device_memory(COUNT * sizeof *mine), *all = device_memory(COUNT * sizeof *all);
  ncclResult_t error = ncclSuccess;
  for (int step = 0; step < STEPS; step++)
    sum_on_stream(mine, all, COUNT);
  CUDA(cudaStreamSynchronize(stream));
  if (rank == 0)
    emulation_nccl_break(comm);
  for (int call = 0; call < 2; call++) {
    ncclAllReduce(mine, all, COUNT, ncclFloat, ncclSum, comm, stream);
    do {
      cudaStreamQuery(stream); /* makes the emulated device run an operation */
      NCCL(ncclCommGetAsyncError(comm, &error));
    } while (error == ncclSuccess);
  }
  NCCL(ncclCommAbort(comm));
  CUDA(cudaFree(mine)), CUDA(cudaFree(all));
}

#else
static void break_link(void) {}
#endif

/* Makes sums on all ranks except the last. The other ranks must get an error as soon as they need
 * the last rank's agreement. */
static void leave_out_last_rank(void) {
  float *mine = device_memory(COUNT * sizeof *mine);
  ncclResult_t result = ncclSuccess;
  for (int step = 0; rank < size - 1 && step < STEPS && result == ncclSuccess; step++)
    result = ncclAllReduce(mine, mine, COUNT, ncclFloat, ncclSum, comm, stream);
  if (rank < size - 1 && result != ncclRemoteError) {
    fprintf(stderr, "rank %d: no error, though rank %d has not come\n", rank, size - 1);
    exit(3);
  }
  __sync_fetch_and_add(&shared->gave_up, rank < size - 1);
  while (__sync_fetch_and_add(&shared->gave_up, 0) < size - 1)
    usleep(1000);
  NCCL(ncclCommAbort(comm));
  CUDA(cudaFree(mine));
}

/* Runs the cases on one rank. The case `leave` exits without freeing anything. The cases `abort`,
 * `break` and `absent` abort the communicator. After the case `revoke` the communicator is
 * destroyed. */
static void run_rank(int which) {
  int devices;
  rank = which;
  CUDA(cudaGetDeviceCount(&devices));
  CUDA(cudaSetDevice(rank % devices));
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  void *memory;
  CUDA(cudaMallocHost(&memory, (COUNT + 1) * sizeof(float)));
  host = memory;
  if (rank == 0) {
    NCCL(ncclGetUniqueId(&shared->id));
    __sync_synchronize();
    shared->ready = 1;
  }
  while (!shared->ready)
    usleep(1000);
  __sync_synchronize();
  NCCL(ncclCommInitRank(&comm, size, shared->id, rank));
  int done = 0, leave = 0;
  for (char **name = names; *name; name++)
    if (!strcmp(*name, "leave")) {
      leave = 1;
    } else if (!strcmp(*name, "break")) {
      break_link();
      leave = 1;
    } else if (!strcmp(*name, "absent")) {
      leave_out_last_rank();
      leave = 1;
    } else if (!strcmp(*name, "revoke")) {
      NCCL(ncclCommRevoke(comm, 0));
    } else if (!strcmp(*name, "abort")) {
      NCCL(ncclCommAbort(comm));
      leave = 1;
    } else {
      run_case(*name);
      done++;
    }
  if (rank == 0)
    printf("%d done\n", done);
  if (!leave)
    NCCL(ncclCommDestroy(comm));
  CUDA(cudaStreamDestroy(stream));
  CUDA(cudaFreeHost(host));
}

#ifdef ONEBIT_EMULATED_CUDA

static void *run_thread(void *which) {
  run_rank((int)(size_t)which);
  return NULL;
}

static int run_all_ranks(void) {
  pthread_t threads[RANKS_MOST];
  for (int r = 0; r < size; r++)
    pthread_create(&threads[r], NULL, run_thread, (void *)(size_t)r);
  for (int r = 0; r < size; r++)
    pthread_join(threads[r], NULL);
  return 0;
}

#else

static int run_all_ranks(void) {
  int worst = 0, status;
  for (int r = 0; r < size; r++) {
    char host_name[16];
    snprintf(host_name, sizeof host_name, "rank%d", r);
    if (fork() == 0) {
      setenv("NCCL_HOSTID", host_name, 1);
      setenv("NCCL_SOCKET_IFNAME", "lo", 1);
      setenv("NCCL_IB_DISABLE", "1", 1);
      setenv("NCCL_NET", "Socket", 1);
      run_rank(r);
      exit(0);
    }
  }
  while (wait(&status) > 0)
    if (!WIFEXITED(status) || WEXITSTATUS(status))
      worst = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
  return worst;
}

#endif

/* Runs all ranks on the calling thread. */
static int run_ranks_on_one_thread(void) {
  ncclComm_t all[2];
  cudaStream_t two[2];
  float *mine[2];
  NCCL(ncclCommInitAll(all, 2, NULL));
  for (int r = 0; r < 2; r++) {
    void *memory;
    CUDA(cudaSetDevice(r));
    CUDA(cudaStreamCreateWithFlags(&two[r], cudaStreamNonBlocking));
    CUDA(cudaMallocHost(&memory, (COUNT + 1) * sizeof(float)));
    host = memory;
    mine[r] = device_memory(COUNT * sizeof **mine);
  }
  for (int step = 0; step < STEPS; step++) {
    for (int r = 0; r < 2; r++) {
      CUDA(cudaSetDevice(r));
      stream = two[r];
      fill_exact(mine[r], COUNT, step, 1);
    }
    NCCL(ncclGroupStart());
    for (int r = 0; r < 2; r++)
      NCCL(ncclAllReduce(mine[r], mine[r], COUNT, ncclFloat, ncclSum, all[r], two[r]));
    NCCL(ncclGroupEnd());
    for (int r = 0; r < 2; r++) {
      CUDA(cudaSetDevice(r));
      stream = two[r];
      check_values("one thread", mine[r], COUNT, step, 2);
    }
  }
  NCCL(ncclCommDestroy(all[0]));
  NCCL(ncclCommDestroy(all[1]));
  printf("1 done\n");
  return 0;
}

int main(int count, char **words) {
  if (count < 3)
    return 2;
  size = atoi(words[1]);
  names = words + 2;
  if (!strcmp(names[0], "one-thread"))
    return run_ranks_on_one_thread();
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED || size < 1 || size > RANKS_MOST)
    return 2;
  return run_all_ranks();
}
