/*
 * A whole training run over a slow network: ways to train, from a dense exchange in each step to an
 * exchange in bits every H steps, and what each of them takes.
 *
 * With an outer step of H local steps and F fragments, each fragment is
 * exchanged once in H steps and has `delay` steps of computation to hide behind; what the codec
 * does takes the cores that compute, and is never hidden. With delay * F <= H no two exchanges are
 * on the way at once, so the link is never asked for more.
 */
#ifndef TOOLS_TUNE_WHOLE_H
#define TOOLS_TUNE_WHOLE_H

#include "tools/tune/training.h"

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

/* NULL, or the reason why there is no such way: "--delay times --fragments ...". */
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

/* Chooses among ways in that order the first whose run takes at most 5 % longer than without a
 * network, or else the fastest. */
#define TUNE_NEAR 1.05
size_t tune_choose(const struct ob_costs *costs, const struct tune_training *training,
                   const struct tune_way *ways, size_t count);

#endif
