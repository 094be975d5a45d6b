/*
 * The choice of a training's method: in each step a dense exchange, one in 8 bits or one in one
 * bit, or local steps with an outer step. The best method depends on the link and on the time that
 * a step computes. So both are measured, the slowest rank counts, and all ranks make the same
 * choice (docs/optimizers.md, "By measurement", shows a program):
 *
 *   onebit_method_choice_t choice = ONEBIT_METHOD_CHOICE_INIT;
 *   choice.elements = count;
 *   choice.compute = seconds;                      (of a gradient and an update, without exchanges)
 *   onebit_method_choose(comm, &choice);
 *   options.warmup_steps = choice.warmup_steps;    (of Efficient-Adam, or of another optimizer)
 *   options.common.dense_below = choice.dense_below;
 *
 * With local steps the program makes the optimizer on a communicator of one rank, and an outer step
 * with choice.local_steps on all ranks (onebit/outer.h).
 *
 * The model of a step: an exchange hides behind two thirds of the computation, except for a 25th of
 * the exchange, the last bucket (with `blocking` it hides behind nothing). A method with fewer bits
 * is chosen if its steps are at least 5 % shorter, and its exchange saves that part of a step.
 *
 * Local steps change what is learned, and are chosen only if one bit in each step would wait for
 * the link longer than it computes, or send more than the caller allows: the smallest number of 10,
 * 30, 100 and 300 with which an exchange takes at most a 20th of the computation. A training with
 * local steps leaves them if one bit would wait for less than 0.7 of the computation, and changes
 * their number only if another is clearly better.
 */
#ifndef ONEBIT_METHOD_H
#define ONEBIT_METHOD_H

#include "onebit/communicator.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum onebit_method {
  ONEBIT_METHOD_DENSE = 0,      /* float32 in each step */
  ONEBIT_METHOD_EIGHT_BITS = 1, /* 8 bits an element in each step */
  ONEBIT_METHOD_ONE_BIT = 2,    /* one bit in each step, once the optimizer's warm-up is over */
  ONEBIT_METHOD_LOCAL_STEPS = 3 /* local steps, and an outer step in one bit */
} onebit_method_t;

/* Start from ONEBIT_METHOD_CHOICE_INIT. */
typedef struct onebit_method_choice {
  size_t size; /* sizeof(onebit_method_choice_t) */
  /* The caller gives these; zero means the default. All ranks give the same, but for compute. */
  size_t elements; /* that the ranks exchange */
  double compute;  /* seconds of a step of this rank without exchanges; the slowest rank's count */
  int methods;     /* methods that may be chosen, the sum of 1 << method; default all */
  int blocking;    /* nonzero: an exchange begins when the gradients are computed */
  onebit_method_t current; /* the training's present method; it stays unless another is worth it */
  double step;             /* measured seconds of its steps; 0: not measured */
  /* By method: seconds that its steps take beyond the model; out: that of `current`, from step. */
  double extra[4];
  /* The most that a host may send; default any. A method that sends more is not chosen; a warm-up
   * is not counted. */
  double bytes_a_day;
  /* By method: seconds of an exchange of all elements, on the slowest rank, as
   * onebit_method_measure finds them. All zero: onebit_method_choose measures. */
  double exchange[4];
  /* These are chosen. */
  onebit_method_t method;
  double expected[4];  /* by method: seconds of a step; infinite where it may not be chosen */
  size_t local_steps;  /* of an outer step; 0: the ranks exchange in each step. In, where `current`
                        * is LOCAL_STEPS: those that the training has */
  size_t warmup_steps; /* of Efficient-Adam: the default, or with 8 bits more than are ever made */
  size_t dense_below;  /* of onebit_optimizer_options_t: the default, or with DENSE all */
  char text[256]; /* "takes one bit, and expects a step of 0.17 s instead of 1.2 s dense: ..." */
} onebit_method_choice_t;

/* clang-format off */
#define ONEBIT_METHOD_CHOICE_INIT \
  { sizeof(onebit_method_choice_t), 0, 0, 0, 0, ONEBIT_METHOD_DENSE, 0, {0}, 0, {0}, \
    ONEBIT_METHOD_DENSE, {0}, 0, 0, 0, {0} }
/* clang-format on */

/* Makes an exchange as the program would with DENSE, EIGHT_BITS or ONE_BIT. Collective.
 *   context    as it was given
 *   method     which; `elements` how many elements, float32
 *   seconds    out: what it took on this rank
 * Returns ONEBIT_OK, or an error, which all ranks then get. */
typedef onebit_status_t (*onebit_method_exchange_t)(void *context, onebit_method_t method,
                                                    size_t elements, double *seconds);

/* Measures exchanges of growing sizes until the link's rate shows, and where one takes less than a
 * second, all elements with fewer bits: some 100 ms of each method, and less than two seconds.
 * Collective.
 *   comm      the ranks
 *   choice    elements and methods; out: exchange, the same on all ranks
 *   exchange  how exchanges are made; NULL: as the library makes them, in memory of the host
 *   context   of it
 * Errors: ONEBIT_ERROR_ARGUMENT (also for seconds that are negative or not finite),
 * ONEBIT_ERROR_MISMATCH (elements or methods differ between ranks), ONEBIT_ERROR_PEER, and those of
 * the exchange; without one those of onebit_plan_create and onebit_allreduce. */
onebit_status_t onebit_method_measure(onebit_comm_t comm, onebit_method_choice_t *choice,
                                      onebit_method_exchange_t exchange, void *context);

/* Chooses a method. Collective, also if exchanges have been measured before.
 *   comm     the ranks
 *   choice   out: what is chosen; compute becomes the slowest rank's
 * Errors: ONEBIT_ERROR_ARGUMENT (a number that is negative or not finite, a method that is none, or
 * all send more than bytes_a_day), ONEBIT_ERROR_MISMATCH (what the ranks give differs),
 * ONEBIT_ERROR_PEER, and those of onebit_method_measure. */
onebit_status_t onebit_method_choose(onebit_comm_t comm, onebit_method_choice_t *choice);

#ifdef __cplusplus
}
#endif
#endif
