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
#include <cuda_runtime_api.h>
#include <math.h>
#include <nccl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { COUNT = 20000, STEPS = 40, RANKS_MOST = 8 };

/* Of a rank: a thread's, or a process's. */
static _Thread_local int rank;
static _Thread_local ncclComm_t comm;
static _Thread_local cudaStream_t stream;
static _Thread_local float *host; /* pinned, COUNT + 1 */
static int size;

static void fail(const char *what, int step, int i, double is, double wanted) {
  fprintf(stderr, "rank %d: %s: step %d, element %d is %.9g and not %.9g\n", rank, what, step, i,
          is, wanted);
  _exit(3);
}

static void check_cuda(cudaError_t error, const char *call) {
  if (error == cudaSuccess)
    return;
  fprintf(stderr, "rank %d: %s: %s\n", rank, call, cudaGetErrorString(error));
  _exit(4);
}
#define CUDA(call) check_cuda((call), #call)

static void check_nccl(ncclResult_t result, const char *call) {
  if (result == ncclSuccess)
    return;
  fprintf(stderr, "rank %d: %s: %s\n", rank, call, ncclGetErrorString(result));
  _exit(5);
}
#define NCCL(call) check_nccl((call), #call)

static void *device_memory(size_t bytes) {
  void *memory;
  CUDA(cudaMalloc(&memory, bytes));
  CUDA(cudaMemset(memory, 0, bytes));
  CUDA(cudaDeviceSynchronize());
  return memory;
}

static float exact(int step, int i) { return ((i * 7 + step * 3 + i / 5) % 3 ? 0.5F : -0.5F); }

/* Both wait: the host's memory is used again at once. */
static void load(void *to, size_t bytes) {
  CUDA(cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, stream));
  CUDA(cudaStreamSynchronize(stream));
}
static void fetch(const void *from, size_t bytes) {
  CUDA(cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, stream));
  CUDA(cudaStreamSynchronize(stream));
}

static void fill(float *to, int count, int step, float times) {
  for (int i = 0; i < count; i++)
    host[i] = exact(step, i) * times;
  load(to, (size_t)count * sizeof *to);
}

static void check(const char *what, const float *from, int count, int step, float times) {
  fetch(from, (size_t)count * sizeof *from);
  for (int i = 0; i < count; i++)
    if (host[i] != exact(step, i) * times)
      fail(what, step, i, host[i], exact(step, i) * times);
}

static void sum(const void *from, void *to, size_t count) {
  NCCL(ncclAllReduce(from, to, count, ncclFloat, ncclSum, comm, stream));
}

/* The same buffers step by step: two tensors a step, one in place, and a small sum. */
static void steady(void) {
  float *mine = device_memory((COUNT + 1) * sizeof *mine),
        *all = device_memory(COUNT * sizeof *all);
  float *other = device_memory((COUNT + 1) * sizeof *other), *one = device_memory(sizeof *one);
  for (int step = 0; step < STEPS; step++) {
    fill(mine, COUNT, step, 1);
    fill(other, COUNT + 1, step + 1, 2);
    fill(one, 1, step, 1);
    sum(mine, all, COUNT);
    sum(other, other, COUNT + 1);
    sum(one, one, 1);
    check("steady", all, COUNT, step, (float)size);
    check("in place", other, COUNT + 1, step + 1, 2 * (float)size);
    check("small", one, 1, step, (float)size);
  }
  CUDA(cudaFree(mine)), CUDA(cudaFree(all)), CUDA(cudaFree(other)), CUDA(cudaFree(one));
}

/* Without a wait between the steps: results are looked at in the end. */
static void queued(void) {
  float *mine = device_memory(COUNT * sizeof *mine), *all = device_memory(COUNT * sizeof *all);
  fill(mine, COUNT, 7, 1);
  for (int step = 0; step < STEPS; step++)
    sum(mine, all, COUNT);
  check("queued", all, COUNT, 7, (float)size);
  CUDA(cudaFree(mine)), CUDA(cudaFree(all));
}

/* Values that one bit does not hold: what it leaves out of one sum comes with later ones. */
static void feedback(void) {
  float *mine = device_memory(COUNT * sizeof *mine), *all = device_memory(COUNT * sizeof *all);
  float *drift = calloc(COUNT, sizeof *drift);
  double left = 0, signal = 0;
  for (int step = 0; step < STEPS; step++) {
    for (int i = 0; i < COUNT; i++)
      host[i] = (float)((i * 37 + 11) % 101 - 50) * (float)(rank + 1) +
                (float)((i + step * 13 + rank) % 17 - 8);
    load(mine, COUNT * sizeof *mine);
    sum(mine, all, COUNT);
    fetch(all, COUNT * sizeof *all);
    for (int i = 0; i < COUNT; i++) {
      float whole = (float)((i * 37 + 11) % 101 - 50) * (float)(size * (size + 1) / 2);
      for (int r = 0; r < size; r++)
        whole += (float)((i + step * 13 + r) % 17 - 8);
      drift[i] += host[i] - whole;
      signal += (double)whole * whole;
    }
  }
  for (int i = 0; i < COUNT; i++)
    left += (double)drift[i] * drift[i];
  left = sqrt(left / COUNT), signal = sqrt(signal / COUNT / STEPS);
  if (left > 4 * signal) /* without feedback it would be as much a step */
    fail("feedback", STEPS, 0, left, signal);
  free(drift);
  CUDA(cudaFree(mine)), CUDA(cudaFree(all));
}

/* Averages, and the types of 16 bits: 0.5 and -0.5 are the same in their upper bits. */
static void types(void) {
  uint16_t *half = device_memory(COUNT * sizeof *half),
           *brain = device_memory(COUNT * sizeof *brain);
  uint16_t *words = (uint16_t *)(void *)host;
  for (int step = 0; step < STEPS; step++) {
    for (int i = 0; i < COUNT; i++)
      words[i] = exact(step, i) > 0 ? 0x3800 : 0xb800;
    load(half, COUNT * sizeof *half);
    NCCL(ncclAllReduce(half, half, COUNT, ncclHalf, ncclAvg, comm, stream));
    fetch(half, COUNT * sizeof *half);
    for (int i = 0; i < COUNT; i++)
      if (words[i] != (exact(step, i) > 0 ? 0x3800 : 0xb800))
        fail("half", step, i, words[i], exact(step, i));
    for (int i = 0; i < COUNT; i++)
      words[i] = exact(step, i) > 0 ? 0x3f00 : 0xbf00;
    load(brain, COUNT * sizeof *brain);
    NCCL(ncclAllReduce(brain, brain, COUNT, ncclBfloat16, ncclAvg, comm, stream));
    fetch(brain, COUNT * sizeof *brain);
    for (int i = 0; i < COUNT; i++)
      if (words[i] != (exact(step, i) > 0 ? 0x3f00 : 0xbf00))
        fail("bfloat16", step, i, words[i], exact(step, i));
  }
  CUDA(cudaFree(half)), CUDA(cudaFree(brain));
}

/* Several calls in a group, in a group in it, and messages beside them. */
static void groups(void) {
  float *each[3], *to = device_memory(sizeof *to), *from = device_memory(sizeof *from);
  for (int k = 0; k < 3; k++)
    each[k] = device_memory((COUNT + 1) * sizeof **each);
  for (int step = 0; step < STEPS; step++) {
    for (int k = 0; k < 3; k++)
      fill(each[k], COUNT + k % 2, step + k, (float)(k + 1));
    host[0] = (float)rank;
    load(to, sizeof *to);
    NCCL(ncclGroupStart());
    sum(each[0], each[0], COUNT);
    NCCL(ncclGroupStart());
    sum(each[1], each[1], COUNT + 1);
    NCCL(ncclGroupEnd());
    NCCL(ncclSend(to, 1, ncclFloat, (rank + 1) % size, comm, stream));
    NCCL(ncclRecv(from, 1, ncclFloat, (rank + size - 1) % size, comm, stream));
    sum(each[2], each[2], COUNT);
    NCCL(ncclGroupEnd());
    for (int k = 0; k < 3; k++)
      check("group", each[k], COUNT + k % 2, step + k, (float)(k + 1) * (float)size);
    fetch(from, sizeof *from);
    if (host[0] != (float)((rank + size - 1) % size))
      fail("message", step, 0, host[0], (rank + size - 1) % size);
  }
  for (int k = 0; k < 3; k++)
    CUDA(cudaFree(each[k]));
  CUDA(cudaFree(to)), CUDA(cudaFree(from));
}

/* More calls in a group than it usually has. */
static void crowd(void) {
  enum { CALLS = 40 };
  float *each[CALLS];
  for (int k = 0; k < CALLS; k++)
    each[k] = device_memory(COUNT * sizeof **each);
  for (int step = 0; step < STEPS / 2; step++) {
    for (int k = 0; k < CALLS; k++)
      fill(each[k], COUNT, step + k, 1);
    NCCL(ncclGroupStart());
    for (int k = 0; k < CALLS; k++)
      sum(each[k], each[k], COUNT);
    NCCL(ncclGroupEnd());
    for (int k = 0; k < CALLS; k++)
      check("crowd", each[k], COUNT, step + k, (float)size);
  }
  for (int k = 0; k < CALLS; k++)
    CUDA(cudaFree(each[k]));
}

/* Only on one rank, and then on all, buffers are others from step to step; and what is in them. */
static void moves(void) {
  float *several[3];
  for (int k = 0; k < 3; k++)
    several[k] = device_memory(COUNT * sizeof **several);
  for (int step = 0; step < 3 * STEPS; step++) {
    int late = step > 3 * STEPS / 2, turn = step > STEPS / 2 && (rank == 0 || late) ? step % 3 : 0;
    float *mine = several[turn];
    for (int i = 0; late && i < COUNT; i++) /* leaves an error, which the next step must not get */
      host[i] = (float)((i * 37 + rank) % 101 - 50);
    if (late) {
      load(mine, COUNT * sizeof *mine);
      sum(mine, mine, COUNT);
      mine = several[(turn + 1) % 3];
    }
    fill(mine, COUNT, step, 1);
    sum(mine, mine, COUNT);
    if (!late)
      check("moves", mine, COUNT, step, (float)size);
    fetch(mine, COUNT * sizeof *mine);
    for (int i = 0; i < COUNT; i++)
      if (!isfinite(host[i]) || fabsf(host[i]) > 200.0F * (float)size)
        fail("moves", step, i, host[i], 0);
  }
  for (int k = 0; k < 3; k++)
    CUDA(cudaFree(several[k]));
}

/* One buffer serves one tensor after the other: freed, and given out again, with other counts. */
static void reuse(void) {
  for (int step = 0; step < STEPS; step++) {
    int count = step < STEPS / 2 ? COUNT : COUNT - step;
    float *mine = device_memory(COUNT * sizeof *mine);
    fill(mine, count, step, 1);
    sum(mine, mine, (size_t)count);
    check("reuse", mine, count, step, (float)size);
    CUDA(cudaFree(mine));
  }
}

/* What one rank has that is no number, no rank takes for a sum; and the steps after are well. */
static void not_a_number(void) {
  float *mine = device_memory(COUNT * sizeof *mine);
  for (int step = 0; step < STEPS; step++) {
    int spoilt = step % 9 == 8;
    for (int i = 0; i < COUNT; i++)
      host[i] = exact(step, i);
    if (spoilt && rank == step % size)
      host[step] = NAN;
    load(mine, COUNT * sizeof *mine);
    sum(mine, mine, COUNT);
    if (!spoilt) {
      check("not a number", mine, COUNT, step, (float)size);
      continue;
    }
    fetch(mine, COUNT * sizeof *mine);
    if (!isnan(host[step]))
      fail("not a number", step, step, host[step], NAN);
    for (int i = 0; i < COUNT; i++)
      if (!isnan(host[i]) && host[i] != exact(step, i) * (float)size)
        fail("not a number", step, i, host[i], exact(step, i) * (float)size);
  }
  CUDA(cudaFree(mine));
}

/* What is not for compression: other types and operations, and what is one rank's. */
static void foreign(void) {
  int *whole = device_memory(COUNT * sizeof *whole);
  float *mine = device_memory(COUNT * sizeof *mine);
  for (int step = 0; step < STEPS; step++) {
    fill(mine, COUNT, step, (float)(rank + 1));
    NCCL(ncclAllReduce(mine, mine, COUNT, ncclFloat, ncclMax, comm, stream));
    fetch(mine, COUNT * sizeof *mine);
    for (int i = 0; i < COUNT; i++)
      if (host[i] != (exact(step, i) > 0 ? exact(step, i) * (float)size : exact(step, i)))
        fail("largest", step, i, host[i], exact(step, i));
    for (int i = 0; i < COUNT; i++)
      ((int *)(void *)host)[i] = i + step;
    load(whole, COUNT * sizeof *whole);
    NCCL(ncclAllReduce(whole, whole, COUNT, ncclInt, ncclSum, comm, stream));
    fetch(whole, COUNT * sizeof *whole);
    for (int i = 0; i < COUNT; i++)
      if (((int *)(void *)host)[i] != (i + step) * size)
        fail("whole numbers", step, i, ((int *)(void *)host)[i], (i + step) * size);
  }
  CUDA(cudaFree(whole)), CUDA(cudaFree(mine));
}

/* Each rank's part, in place and not. Gathered values are told apart by their magnitude. */
static void gather_and_scatter(void) {
  const size_t bytes = COUNT * sizeof(float);
  float *all = device_memory((size_t)size * bytes), *part = device_memory(bytes);
  for (int step = 0; step < STEPS; step++) {
    for (int r = 0; r < size; r++)
      fill(all + (size_t)r * COUNT, COUNT, step + r, 1);
    NCCL(ncclReduceScatter(all, part, COUNT, ncclFloat, ncclSum, comm, stream));
    check("reduce-scatter", part, COUNT, step + rank, (float)size);
    float *own = all + (size_t)rank * COUNT;
    NCCL(ncclReduceScatter(all, own, COUNT, ncclFloat, ncclAvg, comm, stream));
    check("reduce-scatter in place", own, COUNT, step + rank, 1);
    fill(part, COUNT, step, (float)(rank + 1));
    NCCL(ncclAllGather(part, all, COUNT, ncclFloat, comm, stream));
    for (int r = 0; r < size; r++)
      check("allgather", all + (size_t)r * COUNT, COUNT, step, (float)(r + 1));
    fill(own, COUNT, step + 1, (float)(rank + 1));
    NCCL(ncclAllGather(own, all, COUNT, ncclFloat, comm, stream));
    for (int r = 0; r < size; r++)
      check("allgather in place", all + (size_t)r * COUNT, COUNT, step + 1, (float)(r + 1));
  }
  CUDA(cudaFree(all)), CUDA(cudaFree(part));
}

/* Another call comes between from time to time, and the order changes in the middle. */
static void order(void) {
  float *one = device_memory(COUNT * sizeof *one),
        *other = device_memory((COUNT + 1) * sizeof *other);
  for (int step = 0; step < 2 * STEPS; step++) {
    float *first = step < STEPS ? one : other, *second = step < STEPS ? other : one;
    int count = step < STEPS ? COUNT : COUNT + 1, count2 = step < STEPS ? COUNT + 1 : COUNT;
    fill(first, count, step, 1);
    fill(second, count2, step, 3);
    sum(first, first, (size_t)count);
    if (step % 17 == 16) {
      sum(first, first, (size_t)count);
      check("once more", first, count, step, (float)(size * size));
    } else {
      check("order", first, count, step, (float)size);
    }
    sum(second, second, (size_t)count2);
    check("order", second, count2, step, 3 * (float)size);
  }
  CUDA(cudaFree(one)), CUDA(cudaFree(other));
}

/* On two streams by turns, which wait for each other. */
static void streams(void) {
  float *mine = device_memory(COUNT * sizeof *mine);
  cudaStream_t both[2], before = stream;
  cudaEvent_t done;
  CUDA(cudaStreamCreateWithFlags(&both[0], cudaStreamNonBlocking));
  CUDA(cudaStreamCreateWithFlags(&both[1], cudaStreamNonBlocking));
  CUDA(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
  for (int step = 0; step < STEPS; step++) {
    fill(mine, COUNT, step, 1);
    stream = both[step % 2];
    sum(mine, mine, COUNT);
    CUDA(cudaEventRecord(done, stream));
    stream = before;
    CUDA(cudaStreamWaitEvent(stream, done, 0));
    check("streams", mine, COUNT, step, (float)size);
  }
  CUDA(cudaStreamDestroy(both[0])), CUDA(cudaStreamDestroy(both[1]));
  CUDA(cudaEventDestroy(done)), CUDA(cudaFree(mine));
}

/* In a graph, between calls that are in none. */
static void graph(void) {
  float *mine = device_memory(COUNT * sizeof *mine), *all = device_memory(COUNT * sizeof *all);
  cudaGraph_t captured;
  cudaGraphExec_t ready;
  for (int step = 0; step < STEPS / 2; step++) {
    fill(mine, COUNT, step, 1);
    sum(mine, all, COUNT);
    check("before a graph", all, COUNT, step, (float)size);
  }
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  sum(mine, all, COUNT);
  CUDA(cudaStreamEndCapture(stream, &captured));
  CUDA(cudaGraphInstantiate(&ready, captured, 0));
  for (int step = 0; step < STEPS; step++) {
    fill(mine, COUNT, step, 1);
    if (step % 2)
      CUDA(cudaGraphLaunch(ready, stream));
    else
      sum(mine, all, COUNT);
    check("graph", all, COUNT, step, (float)size);
  }
  CUDA(cudaGraphExecDestroy(ready)), CUDA(cudaGraphDestroy(captured));
  CUDA(cudaFree(mine)), CUDA(cudaFree(all));
}

/* Of a part of the ranks, made and gone again with what was compressed on it. */
static void communicators(void) {
  ncclComm_t whole = comm, part;
  float *mine = device_memory(COUNT * sizeof *mine);
  for (int turn = 0; turn < 2; turn++) {
    int members = rank % 2 ? size / 2 : (size + 1) / 2;
    NCCL(ncclCommSplit(whole, rank % 2, rank, &part, NULL));
    comm = part;
    for (int step = 0; step < STEPS; step++) {
      fill(mine, COUNT, step, 1);
      sum(mine, mine, COUNT);
      check("part", mine, COUNT, step, (float)members);
    }
    if (turn)
      NCCL(ncclCommFinalize(part));
    NCCL(ncclCommDestroy(part));
  }
  comm = whole;
  CUDA(cudaFree(mine));
}

/* One that does not block, of the same ranks: its id is a sum to which only rank 0 gives. */
static void nonblocking(void) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  ncclResult_t state = ncclInProgress;
  ncclComm_t whole = comm;
  ncclUniqueId id;
  float *mine = device_memory(COUNT * sizeof *mine);
  memset(host, 0, sizeof id);
  if (rank == 0) {
    NCCL(ncclGetUniqueId(&id));
    memcpy(host, &id, sizeof id);
  }
  load(mine, sizeof id);
  NCCL(ncclAllReduce(mine, mine, sizeof id, ncclUint8, ncclSum, whole, stream));
  fetch(mine, sizeof id);
  memcpy(&id, host, sizeof id);
  config.blocking = 0;
  ncclResult_t result = ncclCommInitRankConfig(&comm, size, id, rank, &config);
  while (result == ncclInProgress || state == ncclInProgress) {
    NCCL(ncclCommGetAsyncError(comm, &state));
    result = ncclSuccess;
  }
  for (int step = 0; step < STEPS; step++) {
    fill(mine, COUNT, step, 1);
    if (ncclAllReduce(mine, mine, COUNT, ncclFloat, ncclSum, comm, stream) == ncclInProgress)
      do
        NCCL(ncclCommGetAsyncError(comm, &state));
      while (state == ncclInProgress);
    check("nonblocking", mine, COUNT, step, (float)size);
  }
  if (ncclCommFinalize(comm) == ncclInProgress)
    do
      NCCL(ncclCommGetAsyncError(comm, &state));
    while (state == ncclInProgress);
  NCCL(ncclCommDestroy(comm));
  comm = whole;
  CUDA(cudaFree(mine));
}

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
             {"reuse", reuse},
             {"not-a-number", not_a_number},
             {"foreign", foreign},
             {"gather-and-scatter", gather_and_scatter},
             {"order", order},
             {"streams", streams},
             {"graph", graph},
             {"communicators", communicators},
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

/* What they share: memory that is mapped before there are processes. */
static struct {
  ncclUniqueId id;
  volatile int ready;
} * shared;

static char **names;

/* A case may be `leave`, with everything still there; or `abort`. */
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

/* All ranks by this one thread. */
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
