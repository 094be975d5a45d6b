/* A step of data-parallel training, as the cost model sees it. */
#ifndef TOOLS_TUNE_TRAINING_H
#define TOOLS_TUNE_TRAINING_H

#include <stdbool.h>

#include "collectives/cost/cost.h"

enum tune_method {
  TUNE_DENSE,        /* MPI_Allreduce of float32 */
  TUNE_HALF,         /* MPI_Allreduce of two bytes an element */
  TUNE_FLAT,         /* one bit, schedule exchange */
  TUNE_HIERARCHICAL, /* one bit, hierarchical; as flat where that is not possible */
  TUNE_ZERO_ONE,     /* 0/1 Adam: the better of these two, and not in every step */
  TUNE_METHODS
};

extern const char *const tune_method_names[TUNE_METHODS];

struct tune_training {
  double parameters; /* elements exchanged */
  double compute;    /* seconds of a step without its exchange */
  double steps;      /* of the whole run: what 0/1 Adam's policies depend on */
  int hosts, ranks_per_host;
};

/* 0/1 Adam over a run, by the optimizer's own schedule: fraction of the steps in which the ranks
 * exchange one bit, and in which they exchange full precision for the variance. */
struct tune_policy {
  double one_bit, dense;
};

/* After which the variance is frozen, as in the recipe for BERT-Large that 0/1 Adam was published
 * with; the other options are the optimizer's defaults. */
#define TUNE_FREEZE_STEP 12500

struct tune_policy tune_policy(double steps);

/* Of the computation, the part that an exchange can hide behind (backward is two thirds); of the
 * exchange, the part that cannot be hidden (the last of 25 buckets). */
#define TUNE_HIDING  (2.0 / 3)
#define TUNE_EXPOSED (1.0 / 25)

/* TCP over Ethernet carries 1448 bytes in every 1538. */
#define TUNE_PAYLOAD (1448.0 / 1538)

/* An exchange of all parameters. */
struct tune_exchange {
  double seconds, host_bytes; /* bytes out of a host */
};
struct tune_exchange tune_exchange(const struct ob_costs *costs,
                                   const struct tune_training *training, enum tune_method method);
double tune_step_seconds(const struct ob_costs *costs, const struct tune_training *training,
                         enum tune_method method, bool overlap);

/* The bandwidth between hosts, in bytes a second, above which a dense step is as fast as the
 * method's without overlap. INFINITY: compression pays at any; 0: at none. Assumed: what moves the
 * bytes of a faster link is faster in proportion, or TCP's copies would keep dense slow always. */
double tune_break_even(const struct ob_costs *costs, const struct tune_training *training,
                       enum tune_method method);

#endif
