/*
 * The outer step: every rank trains by itself for many steps, and then the ranks exchange the
 * change of their parameters. For networks of 10 Mbit/s to 10 Gbit/s, between sites above all:
 * between two exchanges there is no traffic at all, and what an exchange sends is one bit an
 * element.
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
 * The inner optimizer is the caller's: one of its own, or one of this library on a communicator
 * of one rank (onebit_comm_create_self), or of one site. Its state stays each rank's own, as in
 * DiLoCo. x - p is called the drift. docs/outer.md says how to choose.
 *
 * e is this rank's residual, what it has not sent yet. It stays in this rank's parameters: else the
 * local steps make up for a part of it, which is then sent twice (docs/outer.md has figures). So it
 * is the consensus that is equal on all ranks; parameters are after onebit_outer_synchronize. With
 * a mixing (but among sites), ONEBIT_OUTER_SPARSE, and where nothing is compressed, e is left out.
 *
 *   onebit_outer_create(comm, tensors, ntensors, NULL, &outer);
 *   for each step
 *     compute gradients, update the parameters          (no communication)
 *     onebit_outer_step(outer, 1);                      (communication, every 30th time)
 *   onebit_outer_synchronize(outer);
 *
 * Rule and bits. The residual delays a part of the drift, and outer momentum amplifies what is
 * late: one bit goes with MEAN, 2 bits go with MOMENTUM up to 0.5, and 4 with NESTEROV. That is
 * what `bits` is by default; onebit_outer_check warns of other pairs (docs/outer.md has figures).
 *
 * Streaming. With `fragments` F the elements are cut into F parts, and part f is exchanged
 * local_steps f / F steps later than part 0, so that the largest burst is 1 / F of the whole. With
 * `delay` the result of an exchange is applied so many local steps after it has begun, and the
 * training goes on meanwhile: then
 *   p = (1 - mixing) p + mixing x
 * Among sites x is there less what this site has trained since the exchange began, which stays.
 *
 * Ranks of unequal speed. With `weighted` the mean is weighted by what onebit_outer_step was told
 * since the last exchange, tokens for example, and local_steps may differ between ranks: a rank of
 * half the speed gives half the local steps. All make as many exchanges. It costs a message of a
 * few bytes to each rank.
 *
 * Mixed precision. Where parameters are float16 or bfloat16 the consensus is float32. The drift is
 * then what has changed since the parameters were last set, so rounding is no drift. An inner
 * optimizer with float32 master values of its own would not notice that the outer step changes the
 * parameters: then pass the tensors of the master values here.
 *
 * Not-a-number. If the drift of some rank is not finite every rank skips that exchange. The rank
 * whose drift it was goes back to the consensus; the others train on, and what they have done
 * counts in the next exchange.
 *
 * Memory of a GPU. With device ONEBIT_DEVICE_CUDA parameters are memory of the CUDA device that is
 * current when the outer step is made, and so is what is kept of them; the consensus has the bits
 * that it has on the host. A step that begins or applies an exchange works behind what was put on
 * the device's default stream, and returns when the parameters are set: what other streams do to
 * them must be complete by then (with one that does not wait for the default stream,
 * cudaStreamSynchronize). All other steps leave the device alone. Norms, checkpoints and moves go
 * through memory of the host. ONEBIT_OUTER_SPARSE and several sites are for the host only.
 *
 * Sources: Douillard et al., "DiLoCo", arXiv 2311.08105 (NESTEROV with rate 0.7 and momentum 0.9,
 * and the inner state); "Streaming DiLoCo with overlapping communication", arXiv 2501.18512,
 * algorithm 2 (fragments and delay; its alpha is 1 - mixing); error feedback as in plan.h.
 *
 * Threads: as a plan, by one thread at a time.
 */
#ifndef ONEBIT_OUTER_H
#define ONEBIT_OUTER_H

#include "onebit/optimizer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct onebit_outer *onebit_outer_t;

/* The use of the mean drift: the formulas are above. */
typedef enum onebit_outer_rule {
  ONEBIT_OUTER_MEAN = 0,
  ONEBIT_OUTER_MOMENTUM = 1, /* heavy ball, without dampening */
  ONEBIT_OUTER_NESTEROV = 2
} onebit_outer_rule_t;

/* A value of bits: float32, without compression and residuals. */
#define ONEBIT_OUTER_DENSE 32

/* A value of bits: SparseLoCo's messages (arXiv 2508.15706), for comparison. Of every 4096 elements
 * of a tensor every rank sends the 64 of the largest compensated drift to all others, two bits each
 * and their positions, 0.164 bits an element in all; the next exchange adds 0.95 of the residual.
 * The paper uses it with ONEBIT_OUTER_MEAN. Memory: 8 bytes an element for the residual. */
#define ONEBIT_OUTER_SPARSE (-1)

/* Start from ONEBIT_OUTER_OPTIONS_INIT; in every field zero means the default. All ranks give the
 * same, except threads, and, with `weighted`, local_steps and delay. */
typedef struct onebit_outer_options {
  size_t size;              /* sizeof(onebit_outer_options_t) */
  size_t local_steps;       /* H, from one exchange of an element to the next; default 30 */
  onebit_outer_rule_t rule; /* default ONEBIT_OUTER_MEAN */
  double learning_rate;     /* lr, positive; default 1, of NESTEROV 0.7 */
  double momentum;          /* b, in (0, 1); default 0.5, of NESTEROV 0.9; not with MEAN */
  /* An element's, in messages: 1, 2, 4, 8, ONEBIT_OUTER_DENSE or ONEBIT_OUTER_SPARSE. Default 1
   * with MEAN, 2 with MOMENTUM up to 0.5; else 4. */
  int bits;
  size_t fragments; /* F, at most local_steps; default 1 */
  size_t delay;     /* local steps, less than local_steps; default 0: waits for an exchange */
  /* After an exchange the parameters become mixing * consensus + (1 - mixing) * parameters. In
   * (0, 1]; default 1, or 0.5 where delay is not 0. */
  double mixing;
  int weighted;                   /* nonzero: by the weights given to onebit_outer_step */
  onebit_dtype_t parameter_dtype; /* default ONEBIT_FLOAT32 */
  onebit_scale_t scale;           /* as in onebit_plan_options_t, and so are the next six */
  size_t block_size;              /* a block never spans two tensors */
  size_t chunk_size;
  int no_error_feedback;
  int threads;
  onebit_schedule_t schedule;
  onebit_device_t device; /* of the parameters; it may differ between ranks */
  size_t dense_below;     /* tensors of fewer elements count as `uncompressed`; default 0: none */
} onebit_outer_options_t;

/* clang-format off */
#define ONEBIT_OUTER_OPTIONS_INIT \
  { sizeof(onebit_outer_options_t), 0, ONEBIT_OUTER_MEAN, 0, 0, 0, 0, 0, 0, 0, ONEBIT_FLOAT32, \
    ONEBIT_SCALE_RMS, 0, 0, 0, 0, ONEBIT_SCHEDULE_AUTOMATIC, ONEBIT_DEVICE_HOST, 0 }
/* clang-format on */

/* Makes the outer step of a list of tensors. Collective.
 *   comm       the ranks among which drifts are exchanged; it may be destroyed before the outer
 *   tensors    parameter, count and uncompressed of each count (that is exchanged in float32); the
 *              list that an optimizer of this library was made from will do. Parameters are equal
 *              on all ranks. The arrays are the caller's and must outlive the outer; the list is
 *              not kept
 *   ntensors   how many; 0 is allowed
 *   options    how, or NULL for the defaults; not kept
 *   outer      out; NULL when the call fails
 * Memory, in bytes an element: 8 (the consensus and the drift), 4 more with a rule other than
 * MEAN, and what the plan keeps (onebit_plan_create), which with ONEBIT_OUTER_DENSE are messages
 * only. On a device all of it is there, and during this call parameters and arrays are copied to
 * the host.
 * Errors: ONEBIT_ERROR_ARGUMENT (no communicator, an option out of range or that does not go with
 * another, a NULL or misaligned parameter, one in other memory than `device` says, one that is not
 * finite), ONEBIT_ERROR_DEVICE (CUDA failed; so do all calls below),
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
  double patience; /* seconds that an exchange waits for sites that are late; default 10 */
  /* The least number of sites in a round, this one included: with fewer a site trains on, and the
   * drift that it serves waits. 1 to the number of sites; default: more than half. */
  int quorum;
} onebit_sites_options_t;

/* clang-format off */
#define ONEBIT_SITES_OPTIONS_INIT \
  { sizeof(onebit_sites_options_t), 0, 0 }
/* clang-format on */

/* Makes the outer step of several sites, each of one or more ranks that a fast network joins:
 * inside a site the ranks train as one, with an optimizer of this library on `site` or anything
 * else that keeps their parameters equal in each step; between sites drifts are exchanged every
 * local_steps steps. A site that is late, or gone for a while, is left out of a round and caught
 * up. Collective over all ranks of all sites.
 *   site       the ranks of this site; its rank 0 speaks for it
 *   between    on rank 0 of each site a communicator of all of these, 1 to 64; NULL on all others
 *   tensors, ntensors, outer   as of onebit_outer_create
 *   options    as of onebit_outer_create; but sparse bits, ONEBIT_BLOCK_BUFFER and a device do not
 *              go with sites, nor more than 67,108,863 fragments; chunk_size, schedule: not used
 *   sites      when sites are left out, or NULL for the defaults; not kept; the same on all ranks
 *
 * Each fragment is cut into as many shards as there are sites. Site s receives the drifts of its
 * shard s from all, and sends back their mean: as many bytes as an allreduce between the rank 0s,
 * the fewest that go between sites, however many ranks they have. Inside, the means are passed on
 * in their bits. onebit_outer_step exchanges every local_steps steps:
 *   - site s closes a round of its shard when drifts of all sites are there, or after `patience`
 *     with those that are, if these are a quorum. The mean is over the sites in the round;
 *     With `weighted` it is weighted by what each site was told since its last drift;
 *   - a site waits for a round for twice that, and trains on then, from where it is. The drift that
 *     it has sent counts in the first round that is closed with it there; what it has trained
 *     since, and what compression has left, stays in its parameters, and counts in the next.
 *     Nothing is lost;
 *   - who was waited for in vain is not waited for again until something comes from it;
 *   - a site that returns applies the rounds that it has missed, one by one, and compares a
 *     checksum with each; where they are more bytes than the consensus and outer momentum of that
 *     shard, it is sent these;
 *   - of a drift of more than local_steps steps what exceeds these is averaged without outer
 *     momentum.
 * The shard that an absent site serves waits for it, and its elements drift meanwhile.
 *
 * With `delay` drifts are sent in one step, and the rounds that they are in are applied so many
 * steps later; only there a site waits. Until then every step receives what has come, and closes a
 * round for which all drifts are there. What fails in such a step is told in the next one that
 * applies something.
 *
 * Memory, in bytes a parameter: 8 + bits / 8 + 16 / sites, 4 more with a rule other than MEAN; on
 * rank 0 of a site 3 bits / 8 + 16 / sites more.
 *
 * Over any transport on which messages are late but not lost: TCP does that for some 15 minutes of
 * a link that is down, and so do onebit/sockets.h and MPI over TCP. A process that has ended is an
 * ONEBIT_ERROR_TRANSPORT on all sites, and those that are left go on with onebit_outer_shrink, or
 * with onebit_outer_move to a communicator that they make, to which a site comes that is started
 * again. A site is lost as a whole: its ranks end together.
 *
 * Errors: those of onebit_outer_create, ONEBIT_ERROR_UNSUPPORTED (an option that does not go with
 * sites), ONEBIT_ERROR_ARGUMENT (sites; no `between` on rank 0 of a site: the others then wait
 * ONEBIT_TIMEOUT). */
onebit_status_t onebit_outer_create_sites(onebit_comm_t site, onebit_comm_t between,
                                          const onebit_tensor_t *tensors, size_t ntensors,
                                          const onebit_outer_options_t *options,
                                          const onebit_sites_options_t *sites,
                                          onebit_outer_t *outer);

/* Set `size` to sizeof(onebit_sites_info_t), the call fills in the rest. */
typedef struct onebit_sites_info {
  size_t size;
  int sites, site;    /* their number, and this one's */
  int quorum;         /* in use */
  double patience;    /* in use */
  uint64_t late;      /* sites that no round waits for at present: bit s is site s */
  uint64_t rounds;    /* of the shards that this site serves, since the latest move or load */
  uint64_t left_out;  /* of these rounds, those without some site; on rank 0 of the site */
  uint64_t caught_up; /* shards that this site got whole after it had missed too many rounds */
} onebit_sites_info_t;

/* Reports the state of the sites. Local.
 *   outer   one of onebit_outer_create_sites
 *   info    out: all of it; `size` is set by the caller
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL, no sites, a size that the library does not know). */
onebit_status_t onebit_outer_get_sites(onebit_outer_t outer, onebit_sites_info_t *info);

/* --- Steps ------------------------------------------------------------------------------------*/

/* Counts a local step, after the inner optimizer has updated the parameters, and does what is due:
 * begins the exchange of a fragment, and applies that of one whose delay is over, for which it
 * waits. Collective in the steps in which something is due; local in all others, where it moves
 * what is in flight on.
 *   outer    the outer step
 *   weight   with `weighted` what this local step counts, in samples or tokens, finite and not
 *            negative; the units are the caller's, the same on all ranks. Without, it is not looked
 *            at
 * ONEBIT_SKIPPED (some rank's drift was not finite, in the exchange that ends here) and all errors
 * but two leave consensus, momentum and residuals as they were, on every rank; the local steps
 * count in the next exchange. After ONEBIT_ERROR_MESSAGE and ONEBIT_ERROR_TRANSPORT ranks may have
 * come to differ: go back to a checkpoint. A step counts whatever it returns.
 * Errors: ONEBIT_SKIPPED, ONEBIT_ERROR_ARGUMENT (no outer; a weight out of range: the step counts
 * with weight 0, and an exchange that begins in it fails on all ranks), ONEBIT_ERROR_MISMATCH (the
 * consensus is not the same on all ranks: every exchange compares a checksum of it, at no cost),
 * ONEBIT_ERROR_PEER, ONEBIT_ERROR_MESSAGE, ONEBIT_ERROR_TRANSPORT. */
onebit_status_t onebit_outer_step(onebit_outer_t outer, double weight);

/* Ends what is in flight, exchanges all fragments once more, and sets the parameters to the
 * consensus: afterwards they are equal on all ranks, to the bit. Collective. For the end of a
 * training, or before something that wants equal parameters. It is an outer step of its own, whose
 * drift is that of the local steps since the last one. Among sites it waits for all of them,
 * however late, up to ONEBIT_TIMEOUT.
 *   outer   the outer step
 * Errors: those of onebit_outer_step; the first of several fragments. */
onebit_status_t onebit_outer_synchronize(onebit_outer_t outer);

/* Copies the consensus of one tensor: to validate with, or to keep. Local, and no traffic.
 *   outer    the outer step
 *   tensor   place in the list that it was made from
 *   values   out: as many floats as the tensor has elements, owned by the caller
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL, no such tensor). */
onebit_status_t onebit_outer_get_consensus(onebit_outer_t outer, size_t tensor, float *values);

/* Set `size` to sizeof(onebit_outer_info_t), the call fills in the rest. */
typedef struct onebit_outer_info {
  size_t size;
  size_t local_steps; /* as decided, and so are the next seven */
  onebit_outer_rule_t rule;
  double learning_rate;
  double momentum;
  double mixing;
  int bits;
  size_t fragments; /* among sites times these: the shards */
  size_t delay;
  uint64_t steps;          /* local steps that were counted */
  uint64_t exchanges;      /* of one fragment each, that were applied */
  uint64_t skipped;        /* of one fragment each, that every rank skipped */
  uint64_t exchange_bytes; /* bytes that this rank hands to the transport for all fragments once */
  uint64_t memory_bytes;   /* bytes allocated for it on this rank */
  double drift_norm;       /* Euclidean norm of the latest mean drifts */
  double residual_norm;    /* of this rank's residual; of what it sends */
  double momentum_norm;    /* of the outer momentum; 0 with MEAN */
  uint32_t checksum;       /* of the consensus: equal on all ranks */
  int in_flight;           /* exchanges that have begun and are not yet applied */
} onebit_outer_info_t;

/* Reports the state of the outer step. Local; reads the state once for the norms and the checksum.
 *   outer   the outer step
 *   info    out: all of it; `size` is set by the caller. With an exchange in flight residual_norm
 *           is without that fragment's
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL, or a size the library does not know), ONEBIT_ERROR_MEMORY.
 */
onebit_status_t onebit_outer_get_info(onebit_outer_t outer, onebit_outer_info_t *info);

/* Checks for what needs attention: bits that are too few for the rule, or a residual that
 * is many times the drift. Local; to be called after creation, and now and then.
 *   outer   the outer step
 * ONEBIT_WARNING, with a message that says what to change; else ONEBIT_OK.
 * Errors: those of onebit_outer_get_info. */
onebit_status_t onebit_outer_check(onebit_outer_t outer);

/* Moves the outer step to another communicator, with no file: after a rank was lost, or with ranks
 * that have come, which have made theirs of the same tensors and options on a communicator of their
 * own (onebit_comm_create_self). Collective over comm's ranks. What is in flight is applied where
 * it has come, else its drift counts in the next exchange. Consensus, outer momentum and counts are
 * those of the rank that has made the most exchanges, of several the lowest; a rank that has
 * others, and one that has come, begins at the consensus. The others keep their parameters and
 * residuals, times ranks / ranks that have any, so that the mean stays; what a rank held back as a
 * server of elements that it no longer serves, it sends itself. Between ranks that have the same
 * nothing but checksums travels. What only the lost rank had, is lost. Memory: 8 bytes an element
 * more during the call.
 *   outer   of each rank
 *   comm    the new communicator; it may be destroyed before the outer
 * Among sites it is collective over all ranks of all sites, and `comm` is on rank 0 of each site a
 * communicator of these, NULL on all others. The shards are cut anew. A site that comes has made
 * its outer step alone, of `between` with one rank, and may have loaded a checkpoint into it. A
 * site whose consensus of a shard is not the source's begins there at that consensus.
 * On failure all ranks of comm that are still there get an error. The state is kept: make another
 * communicator of the ranks that are left, and call this again. Until then steps fail.
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL), ONEBIT_ERROR_UNSUPPORTED (a comm over NCCL),
 * ONEBIT_ERROR_MISMATCH (outer steps differ between ranks), ONEBIT_ERROR_MEMORY, ONEBIT_ERROR_PEER,
 * ONEBIT_ERROR_TRANSPORT, ONEBIT_ERROR_MESSAGE. */
onebit_status_t onebit_outer_move(onebit_outer_t outer, onebit_comm_t comm);

/* When a step has failed with ONEBIT_ERROR_TRANSPORT or ONEBIT_ERROR_PEER: onebit_comm_shrink of
 * the outer step's communicator, and onebit_outer_move to what it gives; where another rank is lost
 * meanwhile, once more. Collective over the ranks that are left; among sites over all ranks of the
 * sites that are left, of what joins these, and where another is lost meanwhile it is to be called
 * again.
 *   outer       of each rank that is left
 *   survivors   out: as in onebit_optimizer_shrink; NULL but on rank 0 of a site
 * Errors: those of onebit_comm_shrink and onebit_outer_move. */
onebit_status_t onebit_outer_shrink(onebit_outer_t outer, onebit_comm_t *survivors);

/* Gives the outer step back; parameters stay as they are. What is in flight ends without being
 * applied, for which it is waited. Local where nothing is in flight.
 *   outer   NULL is fine; what is no outer step is left alone, and onebit_last_error() says so */
void onebit_outer_destroy(onebit_outer_t outer);

#ifdef __cplusplus
}
#endif
#endif
