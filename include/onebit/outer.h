/*
 * The outer step: every rank trains by itself for many steps, and then the ranks exchange the
 * changes of their parameters in one bit per element. It is for networks of 10 Mbit/s to 10 Gbit/s,
 * above all between sites, since there is no traffic between two exchanges. docs/outer.md has an
 * example, and says how to choose the options and what they cost.
 *
 *   x   the consensus: float32, the same on all ranks to the bit, at first the parameters
 *   p   this rank's parameters, which any optimizer updates from this rank's gradients
 *
 *   every local_steps steps   d = mean over ranks of (x - p), compressed with error feedback
 *     MEAN                    x = x - lr d
 *     MOMENTUM                m = b m + d,  x = x - lr m
 *     NESTEROV                m = b m + d,  x = x - lr (d + b m)
 *     all                     p = x - e, and the next d is of x - e - p
 *
 * x - p is called the drift, and e is this rank's residual: the part of its drifts that it has not
 * sent yet. The residual stays in the parameters, so parameters differ between ranks; after
 * onebit_outer_synchronize they are equal. With ONEBIT_OUTER_SPARSE, without compression, and with
 * `mixing` (except among sites), e is left out of the last formula.
 *
 * The caller supplies the inner optimizer: its own, or one of this library on a communicator of one
 * rank (onebit_comm_create_self), or of one site. The optimizer's state is not exchanged.
 *
 * Streaming. With `fragments` F the elements are cut into F parts, and part f is exchanged
 * local_steps f / F steps later than part 0. With `delay` the result of an exchange is applied that
 * many local steps after the exchange began, and the training goes on meanwhile. Parameters are
 * then set to
 *   p = (1 - mixing) p + mixing x
 * Among sites, x in this formula is the consensus minus the part of this site's changes that the
 * consensus does not contain yet, so that these changes stay in the parameters.
 *
 * Ranks of unequal speed. With `weighted` each rank's drift is weighted by the sum of the weights
 * (tokens, for example) that onebit_outer_step got since the last exchange, and local_steps may
 * differ between ranks. All ranks make the same number of exchanges. Weighting costs a message of a
 * few bytes to each rank.
 *
 * Mixed precision. If parameters are float16 or bfloat16, the drift is their change since the outer
 * step last set them, so their rounding is not part of it. An inner optimizer with float32 master
 * values of its own would not notice that the outer step changes the parameters: pass the master
 * values to the outer step instead.
 *
 * Not-a-number. If the drift of some rank is not finite, every rank skips that exchange. The rank
 * with that drift goes back to the consensus; the drifts of the other ranks are part of the next
 * exchange.
 *
 * Memory of a GPU. With device ONEBIT_DEVICE_CUDA the parameters and the arrays of the outer step
 * are memory of the CUDA device that is current when the outer step is made. A step that begins or
 * applies an exchange waits for earlier work on the device's default stream, and returns when the
 * parameters are set. Work of other streams on the parameters must be complete before the step
 * (call cudaStreamSynchronize for a stream that does not wait for the default one). All other steps
 * leave the device alone. ONEBIT_OUTER_SPARSE and several sites are for the host only.
 *
 * Sources: Douillard et al., "DiLoCo", arXiv 2311.08105 (NESTEROV with rate 0.7 and momentum 0.9,
 * and the inner state); "Streaming DiLoCo with overlapping communication", arXiv 2501.18512,
 * algorithm 2 (fragments and delay; its alpha is 1 - mixing); error feedback as in plan.h.
 *
 * Threads: only one thread at a time may use an outer step.
 */
#ifndef ONEBIT_OUTER_H
#define ONEBIT_OUTER_H

#include "onebit/optimizer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct onebit_outer *onebit_outer_t;

/* The rule by which the mean drift changes the consensus: the formulas are above. */
typedef enum onebit_outer_rule {
  ONEBIT_OUTER_MEAN = 0,
  ONEBIT_OUTER_MOMENTUM = 1, /* heavy ball, without dampening */
  ONEBIT_OUTER_NESTEROV = 2
} onebit_outer_rule_t;

/* A value of bits: float32, without compression and residuals. */
#define ONEBIT_OUTER_DENSE 32

/* A value of bits: SparseLoCo's messages (arXiv 2508.15706), for comparison. Of every 4096 elements
 * of a tensor every rank sends to all others the 64 with the largest compensated drift (drift +
 * residual). Each of these is sent as two bits and its position, in all 0.164 bits per element of
 * the tensor. The next exchange adds 0.95 of the residual. The paper uses these messages with
 * ONEBIT_OUTER_MEAN. Memory: 8 bytes per element for the residual. */
#define ONEBIT_OUTER_SPARSE (-1)

/* Start from ONEBIT_OUTER_OPTIONS_INIT; in every field zero means the default. All ranks give the
 * same options, except threads, and, with `weighted`, local_steps and delay. */
typedef struct onebit_outer_options {
  size_t size;              /* sizeof(onebit_outer_options_t) */
  size_t local_steps;       /* H: steps from one exchange of an element to the next; default 30 */
  onebit_outer_rule_t rule; /* default ONEBIT_OUTER_MEAN */
  double learning_rate;     /* lr, positive; default 1, with NESTEROV 0.7 */
  double momentum;          /* b, in (0, 1); default 0.5, with NESTEROV 0.9; not with MEAN */
  /* Bits per element of messages: 1, 2, 4, 8, ONEBIT_OUTER_DENSE or ONEBIT_OUTER_SPARSE. Default 1
   * with MEAN, 2 with MOMENTUM up to 0.5; else 4. */
  int bits;
  size_t fragments; /* F, at most local_steps; default 1 */
  size_t delay;     /* local steps, fewer than local_steps; default 0: no delay */
  /* After an exchange the parameters become mixing * consensus + (1 - mixing) * parameters. In
   * (0, 1]; default 1, or 0.5 where delay is not 0. */
  double mixing;
  int weighted;                   /* nonzero: the mean has the weights given to onebit_outer_step */
  onebit_dtype_t parameter_dtype; /* default ONEBIT_FLOAT32 */
  onebit_scale_t scale;           /* as in onebit_plan_options_t, and so are the next six */
  size_t block_size;              /* a block never spans two tensors */
  size_t chunk_size;
  int no_error_feedback;
  int threads;
  onebit_schedule_t schedule;
  onebit_device_t device; /* of the parameters; it may differ between ranks */
  size_t dense_below;     /* tensors of fewer elements are `uncompressed`; default 0: none */
} onebit_outer_options_t;

/* clang-format off */
#define ONEBIT_OUTER_OPTIONS_INIT \
  { sizeof(onebit_outer_options_t), 0, ONEBIT_OUTER_MEAN, 0, 0, 0, 0, 0, 0, 0, ONEBIT_FLOAT32, \
    ONEBIT_SCALE_RMS, 0, 0, 0, 0, ONEBIT_SCHEDULE_AUTOMATIC, ONEBIT_DEVICE_HOST, 0 }
/* clang-format on */

/* Makes the outer step for a list of tensors. Collective.
 *   comm       the ranks among which drifts are exchanged; it may be destroyed before the outer
 *              step
 *   tensors    the fields parameter, count and uncompressed of each (uncompressed: exchanged in
 *              float32) are used; the list that an optimizer of this library was made from will do.
 *              Parameters must be equal on all ranks. The arrays are the caller's and must outlive
 *              the outer step; the list is not kept
 *   ntensors   the number of tensors; 0 is allowed
 *   options    or NULL for the defaults; not kept
 *   outer      out; NULL when the call fails
 * Memory, in bytes per element: 8 (the consensus and the drift), 4 more with a rule other than
 * MEAN, and the memory of the plans (onebit_plan_create), which with ONEBIT_OUTER_DENSE is for
 * messages only. With a device all of this is device memory, and during this call parameters and
 * arrays are copied to the host.
 * Errors: ONEBIT_ERROR_ARGUMENT (no communicator, an option that is out of range or excluded by
 * another option, a parameter that is NULL, misaligned, not finite, or in other memory than
 * `device` says), ONEBIT_ERROR_DEVICE (CUDA failed; all calls below have this error too),
 * ONEBIT_ERROR_MISMATCH (options or parameters differ between ranks), ONEBIT_ERROR_MEMORY,
 * ONEBIT_ERROR_PEER, ONEBIT_ERROR_TRANSPORT, ONEBIT_ERROR_MESSAGE, ONEBIT_ERROR_UNSUPPORTED (a
 * device, bits or a schedule that this build does not have). */
onebit_status_t onebit_outer_create(onebit_comm_t comm, const onebit_tensor_t *tensors,
                                    size_t ntensors, const onebit_outer_options_t *options,
                                    onebit_outer_t *outer);

/* --- Several sites ----------------------------------------------------------------------------*/

/* Start from ONEBIT_SITES_OPTIONS_INIT; in every field zero means the default. */
typedef struct onebit_sites_options {
  size_t size;     /* sizeof(onebit_sites_options_t) */
  double patience; /* seconds that an exchange waits for late sites; default 10 */
  /* The smallest number of sites in a round, this one included. With fewer sites this site trains
   * on, and the drifts of its shard wait. 1 to the number of sites; default: more than half. */
  int quorum;
} onebit_sites_options_t;

/* clang-format off */
#define ONEBIT_SITES_OPTIONS_INIT \
  { sizeof(onebit_sites_options_t), 0, 0 }
/* clang-format on */

/* Makes the outer step of several sites. A site is one or more ranks that a fast network connects.
 * The ranks of a site have equal parameters in each step, by an optimizer of this library on `site`
 * or by other means. Between sites drifts are exchanged every local_steps steps. A round leaves out
 * a late or absent site; when the site returns, it receives the rounds that it missed.
 * docs/outer.md describes rounds, late sites and returns. Collective over all ranks of all sites.
 *   site       the ranks of this site; its rank 0 exchanges messages with the other sites
 *   between    on rank 0 of each site a communicator of the rank 0s of all sites, 1 to 64; NULL on
 *              all other ranks
 *   tensors, ntensors, outer   as in onebit_outer_create
 *   options    as in onebit_outer_create, but ONEBIT_OUTER_SPARSE, ONEBIT_BLOCK_BUFFER, a device
 *              and more than 67,108,863 fragments are not allowed; chunk_size and schedule are not
 *              used
 *   sites      the options that decide when a round leaves sites out, or NULL for the defaults; not
 *              kept; the same on all ranks
 *
 * Each fragment is cut into as many shards as there are sites. Site s receives the drifts of shard
 * s from all sites. It closes a round when it has the drifts of all sites, or after `patience` when
 * it has those of a quorum, and sends back the mean over the sites in the round. A site waits for a
 * round twice as long as `patience`, and then trains on. The changes of a site's parameters since
 * its last drift are not lost: they are part of its next drift. With `delay` a site waits only in
 * the step that applies a round; that step also returns the errors of the steps before it.
 *
 * Memory, in bytes per parameter: 8 + bits / 8 + 16 / sites, 4 more with a rule other than MEAN; on
 * rank 0 of a site 3 bits / 8 + 16 / sites more.
 *
 * The transport may deliver messages late but must not lose them. TCP keeps messages for some 15
 * minutes while a link is down. When a process has ended, all sites get ONEBIT_ERROR_TRANSPORT; the
 * remaining sites call onebit_outer_shrink, or onebit_outer_move with a new communicator, which a
 * restarted site can join. If one rank of a site ends, the others of that site must end too.
 *
 * Errors: those of onebit_outer_create, ONEBIT_ERROR_UNSUPPORTED (an option that is not possible
 * with sites), ONEBIT_ERROR_ARGUMENT (an option of `sites` out of range; no `between` on rank 0 of
 * a site: the other ranks then wait until ONEBIT_TIMEOUT). */
onebit_status_t onebit_outer_create_sites(onebit_comm_t site, onebit_comm_t between,
                                          const onebit_tensor_t *tensors, size_t ntensors,
                                          const onebit_outer_options_t *options,
                                          const onebit_sites_options_t *sites,
                                          onebit_outer_t *outer);

/* Set `size` to sizeof(onebit_sites_info_t), the call fills in the rest. */
typedef struct onebit_sites_info {
  size_t size;
  int sites, site;    /* the number of sites, and this one's place */
  int quorum;         /* in use */
  double patience;    /* in use */
  uint64_t late;      /* sites that no round waits for at present: bit s is site s */
  uint64_t rounds;    /* of the shards that this site serves, since the latest move or load */
  uint64_t left_out;  /* of these rounds, those that left out a site; only on rank 0 of the site */
  uint64_t caught_up; /* shards received whole, after this site had missed too many rounds */
} onebit_sites_info_t;

/* Reports the state of the sites. Local.
 *   outer   an outer step that onebit_outer_create_sites made
 *   info    out: all of it; `size` is set by the caller
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL, no sites, a size that the library does not know). */
onebit_status_t onebit_outer_get_sites(onebit_outer_t outer, onebit_sites_info_t *info);

/* --- Steps ------------------------------------------------------------------------------------*/

/* Counts a local step, after the inner optimizer has updated the parameters. In the steps in which
 * an exchange is due it is collective: it begins the exchange of a fragment, and waits for and
 * applies an exchange whose delay is over. In all other steps it is local, and progresses the
 * exchanges in flight.
 *   outer    the outer step
 *   weight   with `weighted` the weight of this local step, in samples or tokens, finite and not
 *            negative; all ranks use the same unit. Ignored without `weighted`
 * ONEBIT_SKIPPED (some rank's drift was not finite, in the exchange that ends here) and all errors
 * but two leave consensus, momentum and residuals unchanged, on every rank; the local steps are
 * part of the next exchange. After ONEBIT_ERROR_MESSAGE and ONEBIT_ERROR_TRANSPORT the state may
 * differ between ranks: go back to a checkpoint. The step counts as a local step, whatever this
 * function returns.
 * Errors: ONEBIT_SKIPPED, ONEBIT_ERROR_ARGUMENT (no outer; a weight out of range: the step counts
 * with weight 0, and an exchange that begins in it fails on all ranks), ONEBIT_ERROR_MISMATCH (the
 * consensus differs between ranks: every exchange compares its checksum, at no cost),
 * ONEBIT_ERROR_PEER, ONEBIT_ERROR_MESSAGE, ONEBIT_ERROR_TRANSPORT. */
onebit_status_t onebit_outer_step(onebit_outer_t outer, double weight);

/* Completes the exchanges in flight, exchanges all fragments once more, and sets the parameters to
 * the consensus: afterwards they are equal on all ranks, to the bit. Collective. Call it at the end
 * of a training, or when parameters must be equal. Among sites it waits for all sites, up to
 * ONEBIT_TIMEOUT.
 *   outer   the outer step
 * Errors: those of onebit_outer_step; if several fragments fail, that of the first. */
onebit_status_t onebit_outer_synchronize(onebit_outer_t outer);

/* Copies the consensus of one tensor, for validation or for storing. Local, without messages.
 *   outer    the outer step
 *   tensor   index in the list that the outer step was made from
 *   values   out: as many floats as the tensor has elements, owned by the caller
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL, no such tensor). */
onebit_status_t onebit_outer_get_consensus(onebit_outer_t outer, size_t tensor, float *values);

/* Set `size` to sizeof(onebit_outer_info_t), the call fills in the rest. */
typedef struct onebit_outer_info {
  size_t size;
  size_t local_steps; /* the value in use, as in the next seven fields */
  onebit_outer_rule_t rule;
  double learning_rate;
  double momentum;
  double mixing;
  int bits;
  size_t fragments; /* among sites each fragment is cut into `sites` shards */
  size_t delay;
  uint64_t steps;          /* local steps that were counted */
  uint64_t exchanges;      /* exchanges of one fragment each that were applied */
  uint64_t skipped;        /* exchanges of one fragment each that every rank skipped */
  uint64_t exchange_bytes; /* bytes that this rank hands to the transport for all fragments once */
  uint64_t memory_bytes;   /* bytes allocated for the outer step on this rank */
  double drift_norm;       /* Euclidean norm of the latest mean drifts */
  double residual_norm;    /* Euclidean norm of the residual of the drifts that this rank sends */
  double momentum_norm;    /* Euclidean norm of the outer momentum; 0 with MEAN */
  uint32_t checksum;       /* of the consensus: equal on all ranks */
  int in_flight;           /* exchanges that have begun and are not yet applied */
} onebit_outer_info_t;

/* Reports the state of the outer step. Local; reads the state once for the norms and the checksum.
 *   outer   the outer step
 *   info    out: all of it; `size` is set by the caller. While an exchange is in flight,
 *           residual_norm omits the residual of its fragment
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL, or a size the library does not know), ONEBIT_ERROR_MEMORY.
 */
onebit_status_t onebit_outer_get_info(onebit_outer_t outer, onebit_outer_info_t *info);

/* Warns of bits that are too few for the rule, or of a residual that is many times the drift.
 * Local; call it after creation, and now and then.
 *   outer   the outer step
 * Returns ONEBIT_WARNING, with a message that says what to change; else ONEBIT_OK.
 * Errors: those of onebit_outer_get_info. */
onebit_status_t onebit_outer_check(onebit_outer_t outer);

/* Moves the outer step to another communicator without a file, after a rank was lost or when new
 * ranks join. A new rank has made an outer step of the same tensors and options on a communicator
 * of its own (onebit_comm_create_self). Collective over comm's ranks. An exchange in flight is
 * applied if its messages have arrived; otherwise its drift is part of the next exchange.
 * Consensus, outer momentum and counts are those of the rank that has made the most exchanges (the
 * lowest of several). New ranks, and ranks whose consensus differs, begin at that consensus. All
 * other ranks keep their parameters; their residuals are multiplied by (number of ranks / number of
 * ranks with residuals), so that the mean over the ranks does not change. A rank that no longer
 * serves an element sends that element's server residual with its next drift. Ranks with the same
 * consensus only exchange checksums. Memory: 8 bytes per element more during the call.
 *   outer   the outer step of each rank
 *   comm    the new communicator; it may be destroyed before the outer step
 * Among sites it is collective over all ranks of all sites: `comm` is a communicator of the rank 0s
 * of all sites, and NULL on all other ranks. The shards are cut anew. A new site has made its outer
 * step with a `between` of one rank, and may have loaded a checkpoint into it. If the consensus of
 * a shard differs between sites, all sites begin with that of the site with the most rounds.
 * On failure all ranks of comm that are still there get an error. The state is kept: make another
 * communicator of the ranks that are left, and call this function again. Until then steps fail.
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL), ONEBIT_ERROR_UNSUPPORTED (a comm over NCCL),
 * ONEBIT_ERROR_MISMATCH (outer steps differ between ranks), ONEBIT_ERROR_MEMORY, ONEBIT_ERROR_PEER,
 * ONEBIT_ERROR_TRANSPORT, ONEBIT_ERROR_MESSAGE. */
onebit_status_t onebit_outer_move(onebit_outer_t outer, onebit_comm_t comm);

/* Continues with the remaining ranks after a step that failed with ONEBIT_ERROR_TRANSPORT or
 * ONEBIT_ERROR_PEER: calls onebit_comm_shrink for the outer step's communicator, and
 * onebit_outer_move with the result. It repeats both calls if another rank is lost meanwhile.
 * Collective over the remaining ranks. Among sites it is collective over all ranks of the remaining
 * sites, and shrinks the communicator between them; call it again if another site is lost
 * meanwhile.
 *   outer       the outer step of each remaining rank
 *   survivors   out: as in onebit_optimizer_shrink; NULL but on rank 0 of a site
 * Errors: those of onebit_comm_shrink and onebit_outer_move. */
onebit_status_t onebit_outer_shrink(onebit_outer_t outer, onebit_comm_t *survivors);

/* Destroys the outer step; parameters do not change. It waits for the exchanges in flight, and does
 * not apply them. Local if nothing is in flight.
 *   outer   NULL is fine. A handle that is no outer step is left alone, and onebit_last_error()
 *           says so */
void onebit_outer_destroy(onebit_outer_t outer);

#ifdef __cplusplus
}
#endif
#endif
