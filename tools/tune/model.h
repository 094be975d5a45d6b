/* The costs of training, as the cost model sees them: a step on hosts, a whole run over a slow
 * network, and a step on GPUs. */
#ifndef TOOLS_TUNE_MODEL_H
#define TOOLS_TUNE_MODEL_H

#include <stdbool.h>

#include "collectives/cost/cost.h"
#include "collectives/cost/model.h"

enum tune_method {
  TUNE_DENSE,        /* MPI_Allreduce of float32 */
  TUNE_HALF,         /* MPI_Allreduce of two bytes an element */
  TUNE_FLAT,         /* Efficient-Adam, whose warm-up sends 8 bits: schedule exchange */
  TUNE_HIERARCHICAL, /* the same, hierarchical; the flat one if that is not possible */
  TUNE_ADAM,         /* 1-bit Adam: the better of these two, after a dense warm-up */
  TUNE_ZERO_ONE,     /* 0/1 Adam: the better of these two, and not in every step */
  TUNE_SGD,          /* 1-bit momentum SGD: the better of these two */
  TUNE_RUN,          /* onebit run --gradients: likewise in 8 bits */
  TUNE_METHODS,
  TUNE_CARD_METHODS = TUNE_SGD, /* those that are known for GPUs */
};

extern const char *const tune_method_names[TUNE_METHODS];

struct tune_training {
  double parameters; /* elements exchanged */
  double compute;    /* seconds of a step without its exchange, of a rank with its own core */
  double steps;      /* of the whole run: what 0/1 Adam's policies depend on */
  double warm_up;    /* share of the steps that 1-bit Adam makes dense */
  int hosts, ranks_per_host;
};

/* The published recipe of 1-bit Adam for BERT-Large: 23 k of 152 k steps (arXiv 2102.02888). */
#define TUNE_WARM_UP 0.15

/* A whole run: the shares of the steps in which the ranks exchange one bit, 8 bits (the warm-up of
 * Efficient-Adam) and full precision (a warm-up, a variance). 0/1 Adam's are by the optimizer's own
 * schedule. */
struct tune_policy {
  double one_bit, eight_bits, dense;
};

/* The steps after which the variance is frozen, as in the recipe for BERT-Large that 0/1 Adam was
 * published with; the other options are the optimizer's defaults. */
#define TUNE_FREEZE_STEP 12500

struct tune_policy tune_policy(const struct tune_training *training, enum tune_method method);

/* TCP over Ethernet carries 1448 bytes in every 1538. */
#define TUNE_PAYLOAD (1448.0 / 1538)

/* Returns the factor by which shared cores slow down all that ranks compute: 1 or more. */
double tune_sharing(const struct ob_costs *costs, const struct tune_training *training);

/* One exchange of all parameters, as a mean over the steps of the run. */
struct tune_exchange {
  double seconds, host_bytes; /* bytes out of a host */
  double work;                /* of `seconds`, those that codec and TCP take from the computation */
};
struct tune_exchange tune_exchange(const struct ob_costs *costs,
                                   const struct tune_training *training, enum tune_method method);
/* The same with `bits` bits (1 to 8) an element, flat or hierarchical. */
struct tune_exchange tune_exchange_bits(const struct ob_costs *costs,
                                        const struct tune_training *training, int bits);
/* overlap: the exchange hides behind the computation, but for the work of codec and TCP, which take
 * one of the rank's cores from it. */
double tune_step_seconds(const struct ob_costs *costs, const struct tune_training *training,
                         enum tune_method method, bool overlap);

/* The bandwidth between hosts, in bytes a second, above which a run with the method is less than
 * OB_STEP_WORTH times as fast as a dense one, overlapped. INFINITY: at none; 0: at all. It assumes
 * that software moves the bytes of a faster link faster in proportion: otherwise TCP's copies would
 * always limit the dense step. */
double tune_break_even(const struct ob_costs *costs, const struct tune_training *training,
                       enum tune_method method);

/* --- A whole run over a slow network -----------------------------------------------------------*/

/* With an outer step of H local steps and F fragments, each fragment is exchanged once in H steps,
 * and has `delay` steps of computation to hide behind, but for the work of codec and TCP. With
 * delay * F <= H no two exchanges are on the way at once, so that the link is never asked for
 * more. */

/* Bits of an element on the wire: 1 to 8, dense float32, and what SparseLoCo gathers. */
enum { TUNE_FLOAT32 = 32, TUNE_SPARSE = 0 };

/* SparseLoCo (arXiv 2508.15706): of 4096 elements 64, each two bits and its position, and two
 * levels of two bytes. Positions take 8 bits as compression/sparse.h codes them, in the paper's
 * own form 12. */
#define TUNE_SPARSE_BITS ((64 * (8.0 + 2) + 32) / 4096)

struct tune_way {
  const char *name;
  int bits, warm_up_bits; /* TUNE_FLOAT32, 8, 4, 2, 1; TUNE_SPARSE */
  int warm_up_steps;      /* which exchange warm_up_bits */
  int local_steps;        /* H; 1: an exchange in each step */
  int fragments, delay;   /* of an outer step */
};

struct tune_whole {
  double exchange;         /* seconds on the way of one exchange, of a fragment where there are */
  double waiting, seconds; /* of the whole run: for the network, and in all */
  double host_bytes;       /* out of a host, in the whole run */
};

struct tune_whole tune_whole(const struct ob_costs *costs, const struct tune_training *training,
                             const struct tune_way *way);

/* Returns NULL, or why there is no such way: "--delay times --fragments ...". */
const char *tune_way_error(const struct tune_way *way);

/* The values that all outer steps must have; 0, and -1 for delay and bits: any. */
struct tune_wanted {
  int local_steps, bits, fragments, delay;
};

/* Ways to train, those first that change training least: dense and one bit in each step, then
 * outer steps of growing H, and for each H first 4 bits, then one, blocking before overlapped.
 * Returns how many, at most TUNE_WAYS. */
enum { TUNE_WAYS = 24 };
size_t tune_ways(const struct tune_wanted *wanted, struct tune_way ways[TUNE_WAYS]);

/* Chooses the first of the ways in that order whose run takes at most 5 % longer than without a
 * network, or else the fastest. */
#define TUNE_NEAR 1.05
size_t tune_choose(const struct ob_costs *costs, const struct tune_training *training,
                   const struct tune_way *ways, size_t count);

/* --- GPUs whose ranks talk over NCCL -----------------------------------------------------------*/

/* The bytes of kernels, by the counts at the heads of cuda/, at a copy's bandwidth; launches and
 * NCCL's groups, a latency each; and messages over the links inside a host and between hosts. It is
 * counted, not measured. */

struct tune_card {
  double copy;    /* bytes a second that a copy in its memory reads and writes */
  double launch;  /* seconds of a kernel that does almost nothing */
  double group;   /* likewise an NCCL group, inside a host */
  double inside;  /* bytes a second of one GPU to the others of its host, each way */
  double latency; /* seconds from host to host, besides */
  double link;    /* bytes a second between hosts, of a host's link, each way */
};

/* An H200, in a host where NVLink joins all GPUs; the link is to be filled in. */
extern const struct tune_card tune_card_default;

/* An update: exchange of all gradients, and the pass that applies it. Where chunks overlap,
 * `together` is less than kernels and messages. */
struct tune_update {
  double kernels, messages, together; /* seconds of a rank, launches and latencies included */
  double launches, groups, host_bytes;
};

struct tune_update tune_card_update(const struct tune_card *card,
                                    const struct tune_training *training, enum tune_method method);

/* overlap: messages hide behind the backward pass, as tune_step_seconds has it; kernels do not,
 * which would slow it down. */
double tune_card_step(const struct tune_card *card, const struct tune_training *training,
                      enum tune_method method, bool overlap);

#endif
