/*
 * An NCCL program that knows nothing of onebit, for tests/scripts/check-preload-nccl:
 *
 *     nccl_program RANKS CASE...
 *
 * Each case checks its sums, which must be right whether something is preloaded or not. "Exact"
 * values are of one magnitude and the same on all ranks, so that one bit and a scale lose nothing
 * of them. On the emulated device ranks are threads; else processes, each a host to NCCL, so that
 * they can share a GPU.
 */
#define _DEFAULT_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/preload/nccl_program.h"

static const struct {
  const char *name;
  void (*run)(void);
} cases[] = {{"steady", steady},
             {"queued", queued},
             {"feedback", feedback},
             {"types", types},
             {"groups", groups},
             {"crowd", crowd},
             {"moves", moves},
             {"another", another},
             {"reuse", reuse},
             {"not-a-number", not_a_number},
             {"foreign", foreign},
             {"gather-and-scatter", gather_and_scatter},
             {"order", order},
             {"streams", streams},
             {"graph", graph},
             {"early-graph", early_graph},
             {"graph-of-several", graph_of_several},
             {"graph-feedback", graph_feedback},
             {"communicators", communicators},
             {"shrunk", shrunk},
             {"nonblocking", nonblocking}};

static void run(const char *name) {
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
  int gave_up; /* ranks */
} * shared;

static char **names;

#ifdef ONEBIT_EMULATED_CUDA

/* Breaks the link while a sum is compressed. The program asks NCCL until it reports the error,
 * makes another sum, asks once more, and aborts. */
static void break_link(void) {
  float *mine = device_memory(COUNT * sizeof *mine), *all = device_memory(COUNT * sizeof *all);
  ncclResult_t error = ncclSuccess;
  for (int step = 0; step < STEPS; step++)
    sum(mine, all, COUNT);
  CUDA(cudaStreamSynchronize(stream));
  if (rank == 0)
    emulation_nccl_break(comm);
  for (int call = 0; call < 2; call++) {
    ncclAllReduce(mine, all, COUNT, ncclFloat, ncclSum, comm, stream);
    do {
      cudaStreamQuery(stream); /* moves it */
      NCCL(ncclCommGetAsyncError(comm, &error));
    } while (error == ncclSuccess);
  }
  NCCL(ncclCommAbort(comm));
  CUDA(cudaFree(mine)), CUDA(cudaFree(all));
}

#else
static void break_link(void) {}
#endif

/* Leaves the last rank out: the others get an error when they have to agree with it. */
static void miss_the_last(void) {
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

/* Runs the cases on one rank. `leave` exits without freeing anything; `abort`, `break` and `absent`
 * abort; after `revoke` the communicator is destroyed. */
static void be_rank(int which) {
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
      miss_the_last();
      leave = 1;
    } else if (!strcmp(*name, "revoke")) {
      NCCL(ncclCommRevoke(comm, 0));
    } else if (!strcmp(*name, "abort")) {
      NCCL(ncclCommAbort(comm));
      leave = 1;
    } else {
      run(*name);
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

static void *thread(void *which) {
  be_rank((int)(size_t)which);
  return NULL;
}

static int be_all(void) {
  pthread_t threads[RANKS_MOST];
  for (int r = 0; r < size; r++)
    pthread_create(&threads[r], NULL, thread, (void *)(size_t)r);
  for (int r = 0; r < size; r++)
    pthread_join(threads[r], NULL);
  return 0;
}

#else

static int be_all(void) {
  int worst = 0, status;
  for (int r = 0; r < size; r++) {
    char host_name[16];
    snprintf(host_name, sizeof host_name, "rank%d", r);
    if (fork() == 0) {
      setenv("NCCL_HOSTID", host_name, 1);
      setenv("NCCL_SOCKET_IFNAME", "lo", 1);
      setenv("NCCL_IB_DISABLE", "1", 1);
      setenv("NCCL_NET", "Socket", 1);
      be_rank(r);
      exit(0);
    }
  }
  while (wait(&status) > 0)
    if (!WIFEXITED(status) || WEXITSTATUS(status))
      worst = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
  return worst;
}

#endif

/* Runs all ranks on this thread. */
static int be_one_thread(void) {
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
      fill(mine[r], COUNT, step, 1);
    }
    NCCL(ncclGroupStart());
    for (int r = 0; r < 2; r++)
      NCCL(ncclAllReduce(mine[r], mine[r], COUNT, ncclFloat, ncclSum, all[r], two[r]));
    NCCL(ncclGroupEnd());
    for (int r = 0; r < 2; r++) {
      CUDA(cudaSetDevice(r));
      stream = two[r];
      check("one thread", mine[r], COUNT, step, 2);
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
    return be_one_thread();
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED || size < 1 || size > RANKS_MOST)
    return 2;
  return be_all();
}
