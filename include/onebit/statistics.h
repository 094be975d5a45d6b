/*
 * Statistics for tuning an optimizer, for all tensors together and for each: how long the parts of
 * its steps take, how many bytes they send, and whether the residual of one-bit messages stays
 * bounded. A training run that goes well needs none of these functions. Otherwise begin with
 *
 *   size_t tensor;
 *   if (onebit_optimizer_check(optimizer, &tensor) == ONEBIT_WARNING)
 *     fprintf(stderr, "%s\n", onebit_last_error());
 *
 * every hundred steps or so. The message names the tensor for which one bit is not enough.
 *
 * residual_ratio is the Euclidean norm of this rank's residual, divided by the norm of the signal:
 * the result of the latest compressed exchange, for the same elements. The signal is the momentum
 * with 1-bit Adam, LAMB and momentum SGD (the step with ONEBIT_ADAM_EXCHANGE_STEP), and the mean
 * gradient or movement with 0/1 Adam. A ratio of about one is healthy: a change of the signal
 * arrives one step late. With a ratio of ten the change arrives some ten steps late. docs/scales.md
 * has measured ratios.
 *
 * All numbers are this rank's own. Residuals differ between ranks, and in the hierarchical schedule
 * a rank has residuals of only a part of the elements. With 1-bit Adam's shards, norms of momentum
 * and master values are those of the rank's shard, and the signal is what the rank has sent, so the
 * ratio is never large and onebit_optimizer_check does not warn. All calls are local, and must not
 * be made while a step is open. On a device they wait for steps on streams, and copy the state to
 * the host.
 */
#ifndef ONEBIT_STATISTICS_H
#define ONEBIT_STATISTICS_H

#include "onebit/optimizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Set `size` to sizeof(onebit_optimizer_statistics_t), the call fills in the rest. */
typedef struct onebit_optimizer_statistics {
  size_t size;
  onebit_optimizer_info_t info; /* the same as from onebit_optimizer_get_info */
  double residual_ratio;        /* see above; 0 before any exchange, infinite without a signal */
  uint64_t dense_bytes;         /* bytes sent by the warm-up so far, skipped steps included */
  uint64_t bits_bytes;          /* bytes sent in compressed steps so far */
  /* `seconds`: the time in onebit_optimizer_begin, _ready and _step so far, by the host's clock.
   * The other three are parts of it: work on messages (compressing, adding up, converting dense
   * messages); sending, receiving and waiting for other ranks; updating parameters and state. The
   * rest is other work, clipping for example. Work on messages in onebit_progress or in the thread
   * of ONEBIT_PROGRESS=thread is added to the parts only, whose sum may then exceed `seconds`. In a
   * step on a device only the host's work counts, which is little. */
  double seconds, compress_seconds, network_seconds, update_seconds;
} onebit_optimizer_statistics_t;

/* Reports statistics. Reads the state once. To measure times, the library reads a clock twice for
 * each pass over a message's elements, which takes less than 0.5 % of that pass.
 *   optimizer    the optimizer
 *   statistics   out: all of it; `size` is set by the caller
 * Bytes, times and exchanges count steps that calls of this host made. They do not count steps of
 * replayed graphs, or steps before a checkpoint was loaded.
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL, or a size the library does not know), ONEBIT_ERROR_BUSY (a
 * step is open), ONEBIT_ERROR_MEMORY, ONEBIT_ERROR_DEVICE. */
onebit_status_t onebit_optimizer_get_statistics(onebit_optimizer_t optimizer,
                                                onebit_optimizer_statistics_t *statistics);

/* Set `size` to sizeof(onebit_tensor_statistics_t), the call fills in the rest. Norms are
 * Euclidean. */
typedef struct onebit_tensor_statistics {
  size_t size;
  size_t count;          /* elements */
  int uncompressed;      /* nonzero: exchanged in full precision in all stages */
  double parameter_norm; /* of the master values, if there are any */
  double momentum_norm;  /* of the momentum, or of the values exchanged in its place */
  double residual_norm;  /* of this rank's residual */
  double residual_ratio; /* see above; 0 before any exchange, infinite without a signal */
  double coefficient;    /* 1-bit LAMB: c; else 0 */
  double factor;         /* 1-bit LAMB: f of the latest step (1 in the warm-up); others: 0 */
  int bits;              /* bits per element of its bucket in the next step; 0: uncompressed */
  uint64_t moves;        /* number of changes of `bits` so far */
} onebit_tensor_statistics_t;

/* Reports the statistics of one tensor. Reads its state once.
 *   optimizer    the optimizer
 *   tensor       place in the list that the optimizer was made from
 *   statistics   out: all of it; `size` is set by the caller
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL, no such tensor, or a size the library does not know),
 * ONEBIT_ERROR_BUSY (a step is open), ONEBIT_ERROR_MEMORY, ONEBIT_ERROR_DEVICE. */
onebit_status_t onebit_optimizer_get_tensor_statistics(onebit_optimizer_t optimizer, size_t tensor,
                                                       onebit_tensor_statistics_t *statistics);

/* The output format of onebit_optimizer_describe. */
typedef enum onebit_format { ONEBIT_FORMAT_TEXT = 0, ONEBIT_FORMAT_JSON = 1 } onebit_format_t;

/* Writes the statistics in one line, without a newline at its end: as text for people, or as a JSON
 * object. Its fields have the names above, including those in `info`; exchanges are three fields,
 * and a number that is not finite is null.
 *   optimizer   the optimizer
 *   format      ONEBIT_FORMAT_TEXT or ONEBIT_FORMAT_JSON
 *   buffer      out: as much of the line as fits, always ended by a zero byte; may be NULL if size
 *               is 0
 *   size        bytes of the buffer
 *   length      out: bytes of the whole line, without the zero byte; may be NULL
 * A line that does not fit is no error: length is then size or more.
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL; no such format), ONEBIT_ERROR_BUSY (a step is open),
 * ONEBIT_ERROR_MEMORY, ONEBIT_ERROR_DEVICE. */
onebit_status_t onebit_optimizer_describe(onebit_optimizer_t optimizer, onebit_format_t format,
                                          char *buffer, size_t size, size_t *length);

/* onebit_optimizer_check warns if a tensor's residual ratio is at least this large. The limit is
 * higher than the ratio in any healthy run that was measured. */
#define ONEBIT_RESIDUAL_RATIO_LIMIT 10

/* onebit_optimizer_check also warns if the steps of at least this fraction of a tensor's elements
 * are limited by ONEBIT_STEP_BOUND. The fraction was up to a quarter in training runs that came
 * near the result of the dense optimizer, a third with a freeze after three steps, and more than
 * four fifths in runs that did not come near that result. */
#define ONEBIT_BOUNDED_LIMIT 0.5

/* Warns of the first of these problems that may harm the training:
 *   - the tensor with the largest residual ratio, if that is ONEBIT_RESIDUAL_RATIO_LIMIT or more.
 *     The message has the tensor's number, the ratio, and remedies: smaller blocks, leaving the
 *     tensor uncompressed, a later freeze, exchanging steps
 *   - with 1-bit Adam and LAMB, the tensor with the largest fraction of steps at the bound
 *     (optimizer.h), if that is ONEBIT_BOUNDED_LIMIT or more: its variance was frozen too small.
 *     This shows in the first compressed steps
 *   - with 1-bit Adam and LAMB, a freeze that has been due for 1 / (1 - beta2) steps and still
 *     waits for the variance (adam.h), so that steps stay dense
 *   optimizer   the optimizer
 *   tensor      out: the index of the tensor in the list, or the length of the list if the warning
 *               is about no single tensor; only set if the result is ONEBIT_WARNING; may be NULL
 *               Returns ONEBIT_OK, or ONEBIT_WARNING, which is no error. Ranks may get different
 *               results.
 * Errors: ONEBIT_ERROR_ARGUMENT (optimizer is NULL), ONEBIT_ERROR_BUSY (a step is open),
 * ONEBIT_ERROR_MEMORY, ONEBIT_ERROR_DEVICE. */
onebit_status_t onebit_optimizer_check(onebit_optimizer_t optimizer, size_t *tensor);

#ifdef __cplusplus
}
#endif
#endif
