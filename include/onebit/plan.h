/*
 * Plans: the exchanges of a tensor, their options, and their memory.
 *
 * A compressed collective keeps, on every rank, the rounding error of its last call (the residual)
 * and adds it to the input of the next call. The residual belongs to one tensor of one rank, so a
 * plan stores it: create one plan per tensor (or per bucket of tensors), use it for every exchange
 * of that tensor, and destroy it at the end. Creating a plan allocates all memory; calls allocate
 * none.
 *
 * A message has one bit for each element, its IEEE sign, and a scale for each block of elements.
 * With more bits it has a level of 2, 4 or 8 bits in place of the sign (docs/wire-format.md).
 *
 * Threads: only one thread at a time may use a plan. Several threads may use different plans at
 * once under the rules of onebit/communicator.h.
 */
#ifndef ONEBIT_PLAN_H
#define ONEBIT_PLAN_H

#include <stddef.h>
#include <stdint.h>

#include "onebit/communicator.h"
#include "onebit/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct onebit_plan *onebit_plan_t;

/* The collective of a plan, and the meaning of its count. */
typedef enum onebit_operation {
  ONEBIT_ALLREDUCE = 0, /* count elements in every buffer; the result is the mean over the ranks */
  ONEBIT_ALLGATHER = 1, /* count elements from each rank, size * count in recvbuf, in rank order */
  /* size * count elements in sendbuf, count in recvbuf: this rank's share of the mean */
  ONEBIT_REDUCE_SCATTER = 2
} onebit_operation_t;

/* The element type of the buffers. The residual and all sums are float32 whatever the buffers
 * hold. */
typedef enum onebit_dtype {
  ONEBIT_FLOAT32 = 0,
  ONEBIT_BFLOAT16 = 1,
  ONEBIT_FLOAT16 = 2
} onebit_dtype_t;

/* The rule for a block's scale. With one bit the scale is the magnitude of all decoded elements:
 * RMS keeps the block's Euclidean norm; the mean of absolute values has the least squared error.
 * With more bits the largest level represents the block's largest magnitude; with RMS it represents
 * at most a multiple of the root mean square, the multiple that is best for the number of bits.
 * docs/scales.md has the measurements. */
typedef enum onebit_scale {
  ONEBIT_SCALE_RMS = 0,           /* sqrt(sum c^2 / count) */
  ONEBIT_SCALE_MEAN_ABSOLUTE = 1, /* sum |c| / count; only with one bit */
  ONEBIT_SCALE_LARGEST = 2        /* max |c|; only with more than one bit */
} onebit_scale_t;

/* The contents of messages. */
typedef enum onebit_wire {
  ONEBIT_WIRE_BITS = 0, /* one bit per element, or `bits`, with error feedback */
  /* Uncompressed values, without a residual: for warm-up steps and comparisons. Sums are float32
   * and in rank order, so all ranks and all transports give the same bits. Messages have float32
   * values; messages of an allgather or a reduce-scatter have the buffers' type, and these two
   * collectives need host memory. */
  ONEBIT_WIRE_DENSE = 1
} onebit_wire_t;

/* DEEPSPEED reproduces the arithmetic of DeepSpeed's compressed backends: the buffer is padded to a
 * multiple of size * lcm(size, 8) and the padding takes part, with one RMS scale for a worker
 * buffer and one for a server chunk. The profile fixes scale and block_size, and supports only the
 * allreduce. */
typedef enum onebit_profile {
  ONEBIT_PROFILE_DEFAULT = 0,
  ONEBIT_PROFILE_DEEPSPEED = 1
} onebit_profile_t;

/* The algorithm of an allreduce. Each schedule rounds at other points, so results of two schedules
 * differ in their bits (docs/schedules.md); the invariant of onebit_plan_export_residual holds with
 * all schedules. */
typedef enum onebit_schedule {
  ONEBIT_SCHEDULE_AUTOMATIC = 0, /* the plan decides, and says why: onebit_plan_explain */
  /* Every rank is the server of a segment: it receives the others' messages about the segment and
   * sends them the result. */
  ONEBIT_SCHEDULE_EXCHANGE = 1,
  /* Every rank sends its message to all others and computes the mean: one exchange instead of two,
   * and no second rounding, but more bytes with three ranks or more. (In an optimizer the second
   * rounding stays, onebit/optimizer.h.) */
  ONEBIT_SCHEDULE_ALLGATHER = 2,
  /* The ranks of a host add up their values, and each rank exchanges a part of the sum with the
   * ranks of the same local number on the other hosts. The bytes that a host sends do not grow with
   * its number of ranks. The schedule needs the same number of ranks on every host. */
  ONEBIT_SCHEDULE_HIERARCHICAL = 3
} onebit_schedule_t;

/* The memory of buffers and residuals, and the processor that computes. No bit of any result
 * depends on the device, and ranks may use different devices. */
typedef enum onebit_device {
  ONEBIT_DEVICE_HOST = 0, /* host memory and CPU */
  /* The memory of the CUDA device that is current when the plan is made: onebit/cuda.h. */
  ONEBIT_DEVICE_CUDA = 1
} onebit_device_t;

/* A value of block_size: one scale for a whole worker buffer and one for a whole server segment.
 * Compressing and sending then do not overlap, since no message can be sent before the last element
 * is read. */
#define ONEBIT_BLOCK_BUFFER ((size_t)-1)

/* Start from ONEBIT_PLAN_OPTIONS_INIT. In every field zero means the default. All ranks must give
 * the same options, except `threads`, `device` and `residual_copies`. */
typedef struct onebit_plan_options {
  size_t size;                  /* sizeof(onebit_plan_options_t): lets the struct grow */
  onebit_operation_t operation; /* default ONEBIT_ALLREDUCE */
  onebit_dtype_t dtype;         /* default ONEBIT_FLOAT32 */
  onebit_wire_t wire;           /* default ONEBIT_WIRE_BITS */
  onebit_profile_t profile;     /* default ONEBIT_PROFILE_DEFAULT */
  onebit_scale_t scale;         /* default ONEBIT_SCALE_RMS */
  /* Elements that share a scale: a multiple of 32 up to 65536, or ONEBIT_BLOCK_BUFFER; default
   * 2048. */
  size_t block_size;
  /* Elements in one message, a multiple of 32 up to 2^28 (a message's bytes are an MPI count),
   * rounded up to whole blocks. The default is chosen so that small messages are sent eagerly and
   * chunks overlap; on a device the default is as few long messages as overlap allows
   * (docs/cuda.md). */
  size_t chunk_size;
  /* Nonzero: no residual is kept. This is a control for experiments, not for training. */
  int no_error_feedback;
  /* OpenMP threads that compress and reduce; default: ONEBIT_THREADS, or 1. No bit of any result
   * depends on it. A rank that may use fewer CPUs than threads warns once. */
  int threads;
  onebit_schedule_t schedule; /* default ONEBIT_SCHEDULE_AUTOMATIC; only for ONEBIT_ALLREDUCE */
  onebit_device_t device;     /* default ONEBIT_DEVICE_HOST */
  /* Bits per element, 1, 2, 4 or 8; default 1. More than one bit needs ONEBIT_WIRE_BITS, a scale
   * for each block, and profile default. */
  int bits;
  /* The upper limit of the plan's bits per element; default `bits`, which is the lower limit.
   * Between these limits the plan doubles its bits whenever the residual has outgrown the input on
   * some rank, and halves them when half as many bits suffice on all ranks (docs/ladder.md). A
   * max_bits above `bits` has the same requirements as more than one bit, and excludes
   * no_error_feedback. */
  int max_bits;
  /* Copies of the residuals, 1 or 2; default 2. With two copies, a call that is skipped or fails
   * leaves residuals unchanged, to the bit. One copy is faster and takes 4 + 4 / size bytes per
   * element less, but restores residuals only to within two roundings of float32; worker residuals
   * of elements whose input was not finite are restored to the bit. After ONEBIT_ERROR_MESSAGE and
   * ONEBIT_ERROR_TRANSPORT residuals may be those of the failed call. One copy needs one bit, host
   * memory, and another schedule than ONEBIT_SCHEDULE_HIERARCHICAL. Ranks may differ: results of
   * calls that succeed do not depend on the number of copies. */
  int residual_copies;
} onebit_plan_options_t;

/* clang-format off */
#define ONEBIT_PLAN_OPTIONS_INIT \
  { sizeof(onebit_plan_options_t), ONEBIT_ALLREDUCE, ONEBIT_FLOAT32, ONEBIT_WIRE_BITS, \
    ONEBIT_PROFILE_DEFAULT, ONEBIT_SCALE_RMS, 0, 0, 0, 0, ONEBIT_SCHEDULE_AUTOMATIC, \
    ONEBIT_DEVICE_HOST, 0, 0, 0 }
/* clang-format on */

/* Makes a plan. Collective over comm: all ranks give the same count and options (threads, device
 * and residual_copies may differ). If one rank cannot make the plan, creation fails on all ranks,
 * and no rank is left waiting.
 *   comm      the ranks
 *   count     elements, any number from 0 on, with the meaning that the operation gives it
 *             (onebit_operation_t)
 *   options   or NULL for the defaults; not kept
 *   plan      out: the plan; NULL when the call fails
 * Memory, in bytes per element of the send buffer: 8 for the worker residual (two copies, so that a
 * skipped call leaves it unchanged) and 8 / size for the server residual of the rank's segment;
 * half of both if residual_copies is 1. Messages take 3/8 times the number of bits.
 * Errors: ONEBIT_ERROR_ARGUMENT (no communicator, an option out of range, a count whose buffers
 * could not be addressed, an unknown ONEBIT_CODEC or ONEBIT_THREADS in the environment),
 * ONEBIT_ERROR_MISMATCH (ranks differ; the message says where), ONEBIT_ERROR_MEMORY,
 * ONEBIT_ERROR_PEER (another rank's argument was wrong), ONEBIT_ERROR_TRANSPORT,
 * ONEBIT_ERROR_UNSUPPORTED (a device or a schedule that this build, machine or communicator does
 * not have), ONEBIT_ERROR_DEVICE. */
onebit_status_t onebit_plan_create(onebit_comm_t comm, size_t count,
                                   const onebit_plan_options_t *options, onebit_plan_t *plan);

/* Destroys a plan. Local.
 *   plan   the plan; NULL is fine
 * Wait for a request in flight first: until then this function only returns an error.
 * Errors: ONEBIT_ERROR_ARGUMENT (no plan, or no longer one), ONEBIT_ERROR_BUSY (the plan has a
 * request in flight). */
onebit_status_t onebit_plan_destroy(onebit_plan_t plan);

/* The decisions of a plan; set `size` to sizeof(onebit_plan_info_t), the call fills in the rest. */
typedef struct onebit_plan_info {
  size_t size;
  /* The first element of this rank's worker residual: 0, except in a hierarchical plan with several
   * ranks on a host. */
  size_t worker_residual_start;
  size_t worker_residual_count; /* floats in the worker residual (onebit_plan_export_residual) */
  size_t server_residual_start; /* the first element of the segment that this rank serves */
  size_t server_residual_count; /* floats in the server residual */
  size_t block_size;            /* elements that share a scale, or ONEBIT_BLOCK_BUFFER */
  size_t chunks;                /* messages that one rank sends to another in a phase */
  uint64_t wire_bytes;          /* bytes that this rank sends in the next call; in a hierarchical
                                 * plan only those to other hosts */
  uint64_t memory_bytes;        /* bytes allocated for the plan on this rank */
  const char *codec;            /* "scalar", "avx2", "avx512", "neon" or "cuda" */
  const char *transport;        /* "self", "loopback", "mpi", "nccl" or "custom" */
  onebit_schedule_t schedule;   /* the one in use */
  onebit_wire_t wire;           /* the one in use: ONEBIT_WIRE_DENSE also if the plan chose that */
  size_t chunk_size;            /* elements in a message, at most */
  int hosts, ranks_per_host;    /* ranks_per_host 0: not the same on all hosts */
  int bits;                     /* bits per element in the next call with ONEBIT_WIRE_BITS */
  int min_bits, max_bits;       /* the limits between which the plan changes `bits` by itself */
  uint64_t moves;               /* the number of such changes since the plan was made */
  /* If min_bits and max_bits differ: the norm of this rank's residual over that of its input in the
   * latest 16 calls, as sender or as server, whichever is larger; 0 before. */
  double residual_ratio;
} onebit_plan_info_t;

/* Reports the decisions of a plan. Local.
 *   plan   the plan
 *   info   out: all of it; `size` is set by the caller
 * Errors: ONEBIT_ERROR_ARGUMENT (no plan, info is NULL, or a size the library does not know). */
onebit_status_t onebit_plan_get_info(onebit_plan_t plan, onebit_plan_info_t *info);

/* Sets the bits per element of the next call, for a plan with several widths: to continue from a
 * checkpoint (with the `bits` of onebit_plan_info_t), or to choose by a rule of the caller's.
 * Local, but all ranks give the same number between the same two calls: otherwise the plan's next
 * call fails with ONEBIT_ERROR_MESSAGE. The plan continues to change its bits by itself.
 *   plan   the plan, without a request in flight
 *   bits   1, 2, 4 or 8, from min_bits to max_bits
 * Errors: ONEBIT_ERROR_ARGUMENT (no plan, bits that it does not have), ONEBIT_ERROR_BUSY (the plan
 * has a request in flight). */
onebit_status_t onebit_plan_set_bits(onebit_plan_t plan, int bits);

/* Chooses the bits of several plans by a budget of bytes, from the next calls on: it doubles the
 * bits of the plan whose residual shrinks most per added byte, until the budget is spent
 * (docs/ladder.md). It uses the residuals that the ranks have exchanged in their calls (known after
 * 17 calls), so all ranks choose the same bits without a message. A plan with only one width keeps
 * that width. Afterwards the plans do not change their bits by themselves: call this function again
 * now and then. Local, but all ranks must call it with the same arguments, between the same calls
 * of the plans.
 *   plans    plans without requests in flight
 *   count    their number, at least 1
 *   budget   bytes of all plans' messages / bytes of the same messages in float32: above 0 and up
 *            to 1
 * Errors: ONEBIT_ERROR_ARGUMENT (plans is NULL or has none, a budget out of range, or less than the
 * fewest bits need: then all plans get the fewest bits), ONEBIT_ERROR_BUSY (a plan has a request in
 * flight). */
onebit_status_t onebit_plan_fit_budget(const onebit_plan_t *plans, size_t count, double budget);

/* Explains the plan's choice of a schedule: a line for each schedule with the time that the cost
 * model predicts for it, and the source of the model's numbers (a file that onebit-tune wrote, or
 * defaults, and why). Local.
 *   plan   the plan; NULL or no plan gives ""
 * The text belongs to the plan and lives as long as it. If the plan has several widths, the last
 * line names the current one and changes with it. With ONEBIT_EXPLAIN=1 in the environment rank 0
 * prints it when a plan is made. */
const char *onebit_plan_explain(onebit_plan_t plan);

/* Export, import and reset the residual, for checkpoints and inspection: import accepts any finite
 * values, and reset sets both residuals to zero. Local.
 *   plan     the plan, without a request in flight
 *   worker   array of worker_residual_count floats (onebit_plan_get_info), owned by the caller:
 *            this rank's residual, one float for each element of its send buffer, in the buffer's
 *            order. In profile deepspeed it covers the padded buffer, and in the hierarchical
 *            schedule the part that this rank compresses for its host, from worker_residual_start
 *            on. NULL leaves the worker residual out
 *   server   array of server_residual_count floats, owned by the caller: the residual of the
 *            segment that this rank serves, from element server_residual_start on; empty unless the
 *            operation is allreduce. NULL leaves the server residual out
 * With these residuals the following invariant holds for each element:
 *   result = mean over ranks (input) + mean over ranks (worker before - worker after)
 *            + server before - server after
 * up to the rounding of float32, whatever the plan's type. Results of 16 bits are rounded after
 * that (onebit/collectives.h). In the hierarchical schedule the second mean is over the
 * hosts.
 * Errors: ONEBIT_ERROR_ARGUMENT (no plan, a value to import is not finite: nothing is
 * changed), ONEBIT_ERROR_BUSY (the plan has a request in flight). */
onebit_status_t onebit_plan_export_residual(onebit_plan_t plan, float *worker, float *server);
onebit_status_t onebit_plan_import_residual(onebit_plan_t plan, const float *worker,
                                            const float *server);
onebit_status_t onebit_plan_reset_residual(onebit_plan_t plan);

/* Makes a plan usable again after ONEBIT_ERROR_MESSAGE (onebit/collectives.h says why it is not).
 * First make the values that were computed from results equal on all ranks (broadcast or load
 * them), then call this function on every rank: it sets the residual to zero, and the plan works
 * again. Local.
 *   plan   the plan, without a request in flight
 * For an optimizer's plans onebit_optimizer_load and similar calls do this.
 * Errors: ONEBIT_ERROR_ARGUMENT (plan is NULL), ONEBIT_ERROR_BUSY (the plan has a request in
 * flight), ONEBIT_ERROR_DEVICE. */
onebit_status_t onebit_plan_reset(onebit_plan_t plan);

#ifdef __cplusplus
}
#endif
#endif
