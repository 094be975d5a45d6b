/*
 * onebit-bench -d cuda: what its files share. They are in builds with CUDA only.
 *
 * Whatever is measured is an entry that puts work on a stream; entries take turns, round by round,
 * and each is timed by events (bench_device_cuda.c). bench_work_cuda.c has the kernels and what
 * they work on, bench_rows_cuda.c the tables.
 */
#ifndef BENCH_CUDA_H
#define BENCH_CUDA_H

#include <cuda_runtime_api.h>

#include "bench/bench.h"
#include "collectives/plan.h"
#include "cuda/kernels.h"

#define BENCH_TRY(call)                                                                            \
  do {                                                                                             \
    int bench_try_status = (call);                                                                 \
    if (bench_try_status != BENCH_OK)                                                              \
      return bench_try_status;                                                                     \
  } while (0)
#define BENCH_TRY_CUDA(call)                                                                       \
  do {                                                                                             \
    cudaError_t bench_try_error = (call);                                                          \
    if (bench_try_error != cudaSuccess)                                                            \
      return bench_cuda_failed(bench_try_error, #call);                                            \
  } while (0)

/* Prints CUDA's words; BENCH_FAILED. */
int bench_cuda_failed(cudaError_t error, const char *what);

/* --- The device */

#ifdef ONEBIT_EMULATED_CUDA
#define BENCH_EMULATED 1
#else
#define BENCH_EMULATED 0
#endif

struct bench_device {
  int number;
  struct cudaDeviceProp properties;
  cudaStream_t stream;
  cudaEvent_t start, stop;
};

/* Which of the ranks on this machine a rank is, and how many they are. */
struct bench_seat {
  int rank, ranks;
};

/* Collective. False: there is no memory to find out. */
bool bench_seat_find(struct bench_team *team, struct bench_seat *seat);

/* Makes the device of a machine's rank current: its devices are dealt out in turn. An exit status;
 * rank 0 says why it is not BENCH_OK. */
int bench_device_open(int rank, struct bench_device *device);
void bench_device_close(struct bench_device *device);
/* The table's first lines: the device, and that an emulated one's times mean nothing. */
void bench_device_print(const struct bench_device *device, const char *benchmark);

/* Memory of the device; NULL when there is none. */
void *bench_device_memory(size_t count, size_t size);
/* bench_fill's numbers, in a dtype. An exit status. */
int bench_device_fill(void *to, size_t count, onebit_dtype_t dtype, uint64_t seed);

/* --- What a call puts on a stream */

struct bench_counts {
  bool known;
  size_t kernels, copies, synchronisations;
};

/* Something to be timed. `run` puts it on a stream and returns an exit status. */
struct bench_put {
  char name[48];
  int (*run)(const struct bench_put *put, cudaStream_t stream);
  void *context;
  size_t members; /* whose messages it takes; 0: it takes none */
  double bytes;   /* that it must move; 0: not said */
  bool baseline;  /* a plain copy: what the others are measured against */
  bool waits;     /* `run` waits for the result: the host's clock times it */
  cudaGraphExec_t graph;
  struct bench_counts counts;
  double *times; /* one a round, seconds */
  struct bench_statistics time;
};

/* --- Rounds */

#define BENCH_PUTS (BENCH_STREAMS * 3 + 20)

struct bench_turns {
  struct bench_device *device;
  struct bench_team *team; /* NULL: no ranks */
  struct bench_put puts[BENCH_PUTS];
  size_t count, rounds, warmups;
  size_t repeats; /* in one time */
  double *memory, *scratch;
};

/* No entries; how many rounds and launches, the options say or are the default. */
void bench_turns_begin(struct bench_turns *turns, const struct bench_options *options,
                       struct bench_device *device, struct bench_team *team);
/* A new entry, with this name. */
struct bench_put *bench_turns_add(struct bench_turns *turns, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* Captures what `of` puts on a stream; replaying that is `put`, and its nodes are the counts of
 * both: what could be captured has no host waiting in it. An exit status. */
int bench_put_capture(struct bench_turns *turns, struct bench_put *of, struct bench_put *put);
/* Counts what cannot be captured, where the device is emulated and counts itself. */
int bench_put_count(struct bench_turns *turns, struct bench_put *put);
/* Allocates the times and takes them; of several ranks, the slowest one's. An exit status. */
int bench_turns_run(struct bench_turns *turns);
void bench_turns_destroy(struct bench_turns *turns);

/* --- The kernels, and arrays for all of them, in memory of the device. */

struct bench_work {
  const struct bench_options *options;
  size_t count, most_members;
  onebit_comm_t comm;              /* of this rank alone */
  onebit_plan_t bits, half, dense; /* half: of bfloat16 */
  float *input, *parameters, *output, *variance, *reciprocals;
  void *half_input;
  unsigned char *incoming, *dense_incoming; /* the other members' messages */
  /* Of the one piece. */
  float **table;
  float *factors; /* its rate's factor, and its weight decay */
  double *block_sums;
};

/* An exit status; `work` is safe to destroy in any case. */
int bench_work_create(const struct bench_options *options, size_t count, size_t members,
                      struct bench_work *work);
void bench_work_destroy(struct bench_work *work);

/* Entries. bench_add_copies: the two baselines. */
void bench_add_copies(struct bench_turns *turns, struct bench_work *work);
struct bench_put *bench_add_compress(struct bench_turns *turns, struct bench_work *work, bool half,
                                     bool momentum);
void bench_add_reduce(struct bench_turns *turns, struct bench_work *work, size_t members);
void bench_add_sum(struct bench_turns *turns, struct bench_work *work, size_t members);
void bench_add_store(struct bench_turns *turns, struct bench_work *work);
struct bench_put *bench_add_apply(struct bench_turns *turns, struct bench_work *work);
struct bench_put *bench_add_adam(struct bench_turns *turns, struct bench_work *work);
/* load, mean, convert */
void bench_add_dense(struct bench_turns *turns, struct bench_work *work);

double bench_reduce_bytes(const struct bench_work *work, size_t members); /* in all */

/* Bytes an element that the kernels have to move on a rank among so many: of an allreduce by
 * exchange, or by everyone's message to everyone; of an optimizer's step. */
enum bench_local { BENCH_LOCAL_EXCHANGE, BENCH_LOCAL_GATHER, BENCH_LOCAL_ADAM };
double bench_local_bytes(size_t block, size_t ranks, onebit_dtype_t dtype, enum bench_local kind);

/* --- Tables */

struct bench_sheet {
  const char *benchmark;
  const struct bench_options *options;
  const struct bench_turns *turns;
  size_t elements;
};

/* Of kernels and steps: elements a second, bytes, the share of the better copy. `dense`: the entry
 * whose times the others are divided by; NULL: there is none. What was timed elsewhere has no times
 * by round. */
void bench_sheet_head(const struct bench_sheet *sheet, bool dense);
void bench_sheet_row(const struct bench_sheet *sheet, const struct bench_put *put,
                     const struct bench_put *dense);

/* Parts of a row's JSON. */
void bench_json_device(const struct bench_device *device);
void bench_json_put(const struct bench_turns *turns, const struct bench_put *put);

/* What calls put on streams, beside DeepSpeed's compressed allreduce. Text only. */
void bench_counts_head(void);
void bench_counts_row(const struct bench_put *put, double bytes, size_t collectives);
void bench_counts_deepspeed(void);

/* --- What a subcommand runs */

int bench_cuda_codec(const struct bench_benchmark *benchmark, const struct bench_options *options,
                     struct bench_team *team);
int bench_cuda_adam(const struct bench_benchmark *benchmark, const struct bench_options *options,
                    struct bench_team *team);
int bench_cuda_collective(const struct bench_benchmark *benchmark,
                          const struct bench_options *options, struct bench_team *team);

/* --- A collective on buffers of one size (bench_collective_cuda.c). */

struct bench_exchange {
  struct bench_team *team;
  const struct bench_options *options;
  const struct bench_collective *collective;
  struct bench_device *device;
  struct bench_seat seat;
  onebit_comm_t comm;
  struct ncclComm *nccl; /* NULL: another transport */
  size_t count, send_count, receive_count;
  onebit_plan_t plan;
  onebit_plan_t dense; /* an allreduce of float32 by the library; NULL: nothing to compare with */
  void *send, *receive;
  void *dense_send, *dense_receive; /* float32 */
  void *half_send;                  /* bfloat16 */
};

/* The plan's options, for another device. */
onebit_plan_options_t bench_exchange_options(const struct bench_exchange *exchange,
                                             onebit_device_t device);

/* *right: the calls of these entries, one after the other, leave what so many calls on the host
 * leave, in every bit. Collective; an exit status. */
int bench_exchange_check(struct bench_exchange *exchange, const struct bench_put *puts,
                         size_t count, bool *right);

/* A communicator over NCCL of a team's ranks (bench_nccl.c). Collective; an exit status. */
int bench_nccl_create(struct bench_exchange *exchange, onebit_comm_t *comm);
void bench_nccl_destroy(struct ncclComm *nccl, onebit_comm_t comm);
/* NCCL's own collective: entries of float32, which is returned, and of bfloat16. */
struct bench_put *bench_nccl_add(struct bench_turns *turns, struct bench_exchange *exchange);

#endif
