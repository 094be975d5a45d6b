/* A step of data-parallel training, as the cost model sees it. */
#ifndef TOOLS_TUNE_TRAINING_H
#define TOOLS_TUNE_TRAINING_H

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
  TUNE_SGD,          /* 1-bit momentum SGD: the better of these two, without a warm-up */
  TUNE_RUN,          /* onebit run --gradients: likewise in 8 bits */
  TUNE_METHODS,
  TUNE_CARD_METHODS = TUNE_SGD, /* those that are known for GPUs, and shown for more hosts */
};

extern const char *const tune_method_names[TUNE_METHODS];

struct tune_training {
  double parameters; /* elements exchanged */
  double compute;    /* seconds of a step without its exchange */
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

/* An exchange of all parameters: the mean over the steps of the run. */
struct tune_exchange {
  double seconds, host_bytes; /* bytes out of a host */
};
struct tune_exchange tune_exchange(const struct ob_costs *costs,
                                   const struct tune_training *training, enum tune_method method);
/* The same in `bits` bits, 1 to 8: the cost model's exchange of one bit, flat or hierarchical, and
 * the additional bytes at the rate that exchanges reach. */
struct tune_exchange tune_exchange_bits(const struct ob_costs *costs,
                                        const struct tune_training *training, int bits);
double tune_step_seconds(const struct ob_costs *costs, const struct tune_training *training,
                         enum tune_method method, bool overlap);

/* The bandwidth between hosts, in bytes a second, above which a run with the method is less than
 * OB_STEP_WORTH times as fast as a dense one, overlapped. INFINITY: at none; 0: at all. It assumes
 * that software moves the bytes of a faster link faster in proportion: otherwise TCP's copies would
 * always limit the dense step. */
double tune_break_even(const struct ob_costs *costs, const struct tune_training *training,
                       enum tune_method method);

#endif
