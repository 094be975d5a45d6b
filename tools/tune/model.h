/* Predicts the costs of training by the cost model: of a step on hosts, of a whole run over a slow
 * network, and of a step on GPUs. */
#ifndef TOOLS_TUNE_MODEL_H
#define TOOLS_TUNE_MODEL_H

#include <stdbool.h>

#include "collectives/cost/cost.h"
#include "collectives/cost/model.h"

enum tune_method {
  TUNE_DENSE,                 /* MPI_Allreduce of float32 */
  TUNE_HALF,                  /* MPI_Allreduce of two bytes an element */
  TUNE_FLAT,                  /* Efficient-Adam, whose warm-up sends 8 bits: schedule exchange */
  TUNE_HIERARCHICAL,          /* Efficient-Adam, hierarchical; flat if that is not possible */
  TUNE_ADAM,                  /* 1-bit Adam: the faster of both schedules, after a dense warm-up */
  TUNE_ZERO_ONE,              /* 0/1 Adam: the faster of both schedules, not in every step */
  TUNE_SGD,                   /* 1-bit momentum SGD: the faster of both schedules */
  TUNE_RUN,                   /* onebit run --gradients: the faster of both schedules, in 8 bits */
  TUNE_METHODS,               /* the number of methods on hosts; the two below are only for GPUs */
  TUNE_STAGED = TUNE_METHODS, /* Efficient-Adam for each GPU, in memory of its host */
  TUNE_STAGED_SHARES,         /* the same, for a share of the parameters that NCCL scatters */
  TUNE_ALL_METHODS
};

extern const char *const tune_method_names[TUNE_ALL_METHODS];

struct tune_training {
  double parameters; /* elements exchanged */
  double compute;    /* seconds of a step without its exchange, on a rank with its own core */
  double steps;      /* steps of the whole run; 0/1 Adam's policies depend on them */
  double warm_up;    /* the share of the steps in which 1-bit Adam is dense */
  int hosts, ranks_per_host;
};

/* The published recipe of 1-bit Adam for BERT-Large: 23 k of 152 k steps (arXiv 2102.02888). */
#define TUNE_WARM_UP 0.15

/* The policy of a run: in which shares of the steps the ranks exchange one bit, 8 bits (the warm-up
 * of Efficient-Adam), and full precision (a warm-up, or a variance). For 0/1 Adam the shares follow
 * from the optimizer's own schedule. */
struct tune_policy {
  double one_bit, eight_bits, dense;
};

/* The number of steps after which the variance is frozen, as in the published recipe of 0/1 Adam
 * for BERT-Large. All other options are the optimizer's defaults. */
#define TUNE_FREEZE_STEP 12500

struct tune_policy tune_policy(const struct tune_training *training, enum tune_method method);

/* TCP over Ethernet carries 1448 bytes in every 1538. */
#define TUNE_PAYLOAD (1448.0 / 1538)

/* Returns the factor by which shared cores slow down the ranks' computation, at least 1. */
double tune_sharing_factor(const struct ob_costs *costs, const struct tune_training *training);

/* The costs of one exchange of all parameters, as a mean over the steps of the run. */
struct tune_exchange {
  double seconds, host_bytes; /* bytes out of a host */
  double work;                /* the part of `seconds` in which codec and TCP use the rank's core */
};
struct tune_exchange tune_exchange(const struct ob_costs *costs,
                                   const struct tune_training *training, enum tune_method method);
/* Returns the costs of an exchange with `bits` bits (1 to 8) an element, flat or hierarchical. */
struct tune_exchange tune_exchange_bits(const struct ob_costs *costs,
                                        const struct tune_training *training, int bits);
/* Returns the seconds of a step. overlap: the exchange takes place during the computation, except
 * for the work of codec and TCP, which use one of the rank's cores. */
double tune_step_seconds(const struct ob_costs *costs, const struct tune_training *training,
                         enum tune_method method, bool overlap);

/* Returns the bandwidth between hosts, in bytes a second, above which an overlapped run with the
 * method is less than OB_STEP_WORTH times as fast as a dense one. INFINITY: this is so at no
 * bandwidth; 0: at every bandwidth. The function assumes that software moves bytes faster on a
 * faster link, in proportion: otherwise TCP's copies would always limit the dense step. */
double tune_break_even(const struct ob_costs *costs, const struct tune_training *training,
                       enum tune_method method);

/* --- A whole run over a slow network -----------------------------------------------------------*/

/* An outer step has H local steps and F fragments. Each fragment is exchanged once in H steps,
 * during `delay` steps of computation, except for the work of codec and TCP. With delay * F <= H
 * only one exchange is in progress at a time, so that it has the whole link. */

/* Bits an element in messages: 1 to 8, 32 for dense float32, and 0 for SparseLoCo's sparse
 * format. */
enum { TUNE_FLOAT32 = 32, TUNE_SPARSE = 0 };

/* SparseLoCo (arXiv 2508.15706) sends 64 of 4096 elements, and two levels of two bytes. Each
 * element takes two bits and its position. A position takes 8 bits in the code of
 * compression/sparse.h, and 12 in the paper's format. */
#define TUNE_SPARSE_BITS ((64 * (8.0 + 2) + 32) / 4096)

struct tune_way {
  const char *name;
  int bits, warm_up_bits; /* TUNE_FLOAT32, 8, 4, 2, 1; TUNE_SPARSE */
  int warm_up_steps;      /* the number of steps that exchange warm_up_bits */
  int local_steps;        /* H; 1: there is an exchange in each step */
  int fragments, delay;   /* fragments of an outer step; steps until each is applied */
};

struct tune_whole {
  double exchange;         /* seconds of one exchange, of one fragment if there are fragments */
  double waiting, seconds; /* seconds of waiting for the network, and of the whole run */
  double host_bytes;       /* bytes out of a host in the whole run */
};

struct tune_whole tune_whole(const struct ob_costs *costs, const struct tune_training *training,
                             const struct tune_way *way);

/* Returns NULL, or the reason why a way is impossible: "--delay times --fragments ...". */
const char *tune_way_error(const struct tune_way *way);

/* The values that every outer step must have. 0 stands for any value; in delay and bits, -1
 * does. */
struct tune_wanted {
  int local_steps, bits, fragments, delay;
};

/* Lists ways to train. Those that change training least come first: dense and one bit in each step.
 * Outer steps follow by growing H. For each H the order is 4 bits, then one bit, and blocking
 * before overlapped. Returns the number of ways, at most TUNE_WAYS. */
enum { TUNE_WAYS = 24 };
size_t tune_list_ways(const struct tune_wanted *wanted, struct tune_way ways[TUNE_WAYS]);

/* Chooses the first way whose run takes at most 5 % longer than a run without a network. If no way
 * does, chooses the fastest. */
#define TUNE_NEAR 1.05
size_t tune_choose_way(const struct ob_costs *costs, const struct tune_training *training,
                       const struct tune_way *ways, size_t count);

/* --- GPUs whose ranks talk over NCCL -----------------------------------------------------------*/

/* The time of a step is computed, not measured. It is the sum of three parts: the bytes that
 * kernels read and write, by the comments at the top of the files in cuda/, at the bandwidth of a
 * copy; a latency for each launch and each NCCL group; and the messages over the links inside a
 * host and between hosts. */

struct tune_card {
  double copy;    /* bytes a second that a copy in the GPU's memory reads and writes */
  double launch;  /* seconds of a kernel that does almost nothing */
  double group;   /* seconds of an NCCL group of tiny messages inside a host */
  double inside;  /* bytes a second from one GPU to the others of its host, each way */
  double latency; /* additional seconds from host to host */
  double link;    /* bytes a second of a host's link to other hosts, each way */
  double pcie;    /* bytes a second of copies between a GPU and its host, each way */
  double memory;  /* bytes a second that a host's processors read and write */
};

/* The values of an H200 in a host where NVLink connects all GPUs. The caller sets the link. */
extern const struct tune_card tune_card_default;

/* An update is the exchange of all gradients, and the update kernels. If chunks overlap, `together`
 * is less than the sum of kernels and messages. */
struct tune_update {
  double kernels, messages, together; /* seconds of a rank, launches and latencies included */
  double launches, groups, host_bytes;
};

struct tune_update tune_card_update(const struct tune_card *card,
                                    const struct tune_training *training, enum tune_method method);

/* Returns the seconds of a step. overlap: messages are sent during the backward pass, as in
 * tune_step_seconds. The kernels run after it, since they would slow it down. */
double tune_card_step(const struct tune_card *card, const struct tune_training *training,
                      enum tune_method method, bool overlap);

#endif
