/* Predicts by the cost model what training costs: a step on hosts, a whole run over a slow network,
 * and a step on GPUs. */
#ifndef TOOLS_TUNE_MODEL_H
#define TOOLS_TUNE_MODEL_H

#include <stdbool.h>

#include "collectives/cost/cost.h"
#include "collectives/cost/model.h"

enum tune_method {
  TUNE_DENSE,                 /* MPI_Allreduce of float32 */
  TUNE_HALF,                  /* MPI_Allreduce with two bytes per element */
  TUNE_FLAT,                  /* Efficient-Adam with schedule exchange; its warm-up sends 8 bits */
  TUNE_HIERARCHICAL,          /* the same with the hierarchical schedule, if possible */
  TUNE_ADAM,                  /* 1-bit Adam: the faster of both schedules, after a dense warm-up */
  TUNE_ZERO_ONE,              /* 0/1 Adam: the faster of both schedules, not in every step */
  TUNE_SGD,                   /* 1-bit momentum SGD: the faster of both schedules */
  TUNE_RUN,                   /* onebit run --gradients: the faster of both schedules, in 8 bits */
  TUNE_METHODS,               /* the number of methods on hosts; the methods below are for GPUs */
  TUNE_STAGED = TUNE_METHODS, /* Efficient-Adam for each GPU, computed by its host */
  TUNE_STAGED_SHARES,         /* the same, after a reduce-scatter by NCCL inside the host */
  TUNE_ALL_METHODS
};

extern const char *const tune_method_names[TUNE_ALL_METHODS];

struct tune_training {
  double parameters; /* number of elements that are exchanged */
  double compute;    /* seconds of a step without its exchange, on a rank with its own core */
  double steps;      /* number of steps of the whole run; 0/1 Adam's policy depends on it */
  double warm_up;    /* the fraction of the steps in which 1-bit Adam is dense */
  double buckets;    /* 0: as many as DistributedDataParallel makes */
  int hosts, ranks_per_host;
  bool clip; /* the program clips gradients, so that no exchange in one bit overlaps */
};

/* The published recipe of 1-bit Adam for BERT-Large: 23 k of 152 k steps (arXiv 2102.02888). */
#define TUNE_WARM_UP 0.15

/* The policy of a run: the fractions of the steps in which ranks exchange one bit, 8 bits (the
 * warm-up of Efficient-Adam), and full precision (a dense warm-up, or a step that updates the
 * variance). For 0/1 Adam the fractions follow from the optimizer's own schedule. */
struct tune_policy {
  double one_bit, eight_bits, dense;
};

/* The number of steps after which 0/1 Adam's variance is frozen, as in its published recipe for
 * BERT-Large. All other options have the optimizer's defaults. */
#define TUNE_FREEZE_STEP 12500

struct tune_policy tune_policy(const struct tune_training *training, enum tune_method method);

/* The fraction of a link's bytes that is payload: TCP over Ethernet carries 1448 bytes in every
 * 1538. */
#define TUNE_PAYLOAD (1448.0 / 1538)

/* Returns the factor, at least 1, by which the computation is slower because ranks share cores. */
double tune_sharing_factor(const struct ob_costs *costs, const struct tune_training *training);

/* tune_buckets returns the number of buckets whose exchanges begin one after another in the
 * backward pass. tune_overlaps returns true if a method's exchange can overlap with the
 * computation: the norm by which a one-bit optimizer clips is known only after the last bucket. */
double tune_buckets(const struct tune_training *training);
bool tune_overlaps(const struct tune_training *training, enum tune_method method);

/* The costs of one exchange of all parameters, as a mean over the steps of the run. */
struct tune_exchange {
  double seconds, host_bytes; /* bytes out of a host */
  double work;                /* the part of `seconds` in which codec and TCP use a core */
};
struct tune_exchange tune_exchange(const struct ob_costs *costs,
                                   const struct tune_training *training, enum tune_method method);
/* Returns the costs of an exchange with `bits` bits (1 to 8) per element, by the faster
 * schedule. */
struct tune_exchange tune_exchange_bits(const struct ob_costs *costs,
                                        const struct tune_training *training, int bits);
/* Returns the seconds of a step. overlap: the exchange overlaps with the computation, except for
 * the work of codec and TCP, which needs a core that would compute. */
double tune_step_seconds(const struct ob_costs *costs, const struct tune_training *training,
                         enum tune_method method, bool overlap);

/* Returns the bandwidth between hosts, in bytes per second, up to which the method pays: an
 * overlapped run with it is then at least OB_STEP_WORTH times as fast as an overlapped dense run.
 * INFINITY: it pays at every bandwidth; 0: at none. The function assumes that software moves bytes
 * faster on a faster link, in proportion. Otherwise TCP's copies would always limit the dense
 * step. */
double tune_break_even(const struct ob_costs *costs, const struct tune_training *training,
                       enum tune_method method);

/* --- A whole run over a slow network -----------------------------------------------------------*/

/* With an outer step, ranks compute H local steps between two exchanges of the same fragment of the
 * parameters; there are F fragments. An exchange overlaps with `delay` steps of computation, except
 * for the work of codec and TCP. With delay * F <= H only one exchange is in progress at a time, so
 * that it has the whole link. */

/* Bits per element in messages: 1 to 8, 32 for dense float32, and 0 for SparseLoCo's sparse
 * format. */
enum { TUNE_FLOAT32 = 32, TUNE_SPARSE = 0 };

/* SparseLoCo (arXiv 2508.15706) sends 64 elements of every 4096, and two levels of two bytes each.
 * A sent element takes two bits for its value, and 8 bits for its position in the code of
 * compression/sparse.h. In the paper's format, a position takes 12 bits. */
#define TUNE_SPARSE_BITS ((64 * (8.0 + 2) + 32) / 4096)

struct tune_way {
  const char *name;
  int bits, warm_up_bits; /* TUNE_FLOAT32, 8, 4, 2, 1; TUNE_SPARSE */
  int warm_up_steps;      /* the number of steps that exchange warm_up_bits */
  int local_steps;        /* H; 1: the ranks exchange gradients in each step */
  int fragments, delay;   /* F; number of steps from a fragment's exchange until it is applied */
};

struct tune_whole {
  double exchange;         /* seconds of one exchange, of all parameters or of a fragment */
  double waiting, seconds; /* seconds that the run waits for the network, and its seconds in all */
  double host_bytes;       /* bytes that a host sends in the whole run */
};

struct tune_whole tune_whole(const struct ob_costs *costs, const struct tune_training *training,
                             const struct tune_way *way);

/* Returns NULL, or the reason why a way is impossible: "--delay times --fragments ...". */
const char *tune_way_error(const struct tune_way *way);

/* The values that the command line gives for outer steps. Not given: 0 in local_steps and
 * fragments, -1 in bits and delay. */
struct tune_wanted {
  int local_steps, bits, fragments, delay;
};

/* Lists ways to train, in the order of how much they change training: first an exchange in each
 * step, dense and in one bit, and then outer steps by increasing H. For each H, 4 bits come before
 * one bit; for each number of bits, blocking exchanges come before overlapped ones. Returns the
 * number of ways, at most TUNE_WAYS. */
enum { TUNE_WAYS = 24 };
size_t tune_list_ways(const struct tune_wanted *wanted, struct tune_way ways[TUNE_WAYS]);

/* Chooses the first way whose run takes at most 5 % longer than if the network took no time. If
 * there is no such way, chooses the fastest one. */
#define TUNE_NEAR 1.05
size_t tune_choose_way(const struct ob_costs *costs, const struct tune_training *training,
                       const struct tune_way *ways, size_t count);

/* --- GPUs whose ranks talk over NCCL -----------------------------------------------------------*/

/* The time of a step is computed, not measured. It is the sum of three parts. The first is the time
 * to read and write the kernels' bytes at the bandwidth of a copy; the comments at the top of the
 * files in cuda/ have these bytes. The second is a latency for each launch and each NCCL group. The
 * third is the time of the messages on the links inside a host and between hosts. */

struct tune_card {
  double copy;    /* bytes per second that a copy in the GPU's memory reads and writes */
  double launch;  /* seconds of a kernel that does almost nothing */
  double group;   /* seconds of an NCCL group of tiny messages inside a host */
  double inside;  /* bytes per second from one GPU to the others of its host, each way */
  double latency; /* additional seconds of messages between hosts */
  double link;    /* bytes per second of a host's link to other hosts, each way */
  double pcie;    /* bytes per second of copies between a GPU and its host, each way */
  double memory;  /* bytes per second that a host's processors read and write */
};

/* The values of an H200 in a host where NVLink connects all GPUs. The caller sets `link`. */
extern const struct tune_card tune_card_default;

/* The costs of an update: the exchange of all gradients, and the update kernels. If chunks overlap,
 * `together` is less than the sum of `kernels` and `messages`. */
struct tune_update {
  double kernels, messages, together; /* seconds on a rank, including launches and latencies */
  double launches, groups, host_bytes;
};

struct tune_update tune_card_update(const struct tune_card *card,
                                    const struct tune_training *training, enum tune_method method);

/* Returns the seconds of a step. overlap: messages are sent during the backward pass, as in
 * tune_step_seconds. The kernels run after the backward pass, since they would slow it down. */
double tune_card_step(const struct tune_card *card, const struct tune_training *training,
                      enum tune_method method, bool overlap);

#endif
