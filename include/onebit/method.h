/*
 * Chooses the method of a training run: an exchange in each step, which is dense, in 8 bits or in
 * one bit per element; or local steps with an outer step. The best method depends on the link and
 * on the computing time of a step. Both are measured on the slowest rank, and all ranks make the
 * same choice (docs/optimizers.md, "By measurement", shows a program):
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
 * The model of a step: an exchange overlaps with two thirds of the computation, except for its last
 * bucket, a 25th of the exchange, which overlaps with nothing. With `blocking` no part of an
 * exchange overlaps. A method with fewer bits is chosen if its steps are at least 5 % shorter, and
 * its exchange alone saves as much time.
 *
 * Local steps change the result of a training, and cost loss in a long one
 * (docs/measured/time-to-loss.md). By default they are chosen only if steps with one bit per
 * element would send more than `bytes_a_day`. If a caller allows them in `methods`, they are also
 * chosen if such steps would wait for the link longer than they compute; if not, `text` says there
 * how long local steps would take. Their number is the smallest of 10, 30, 100 and 300 with which
 * an exchange takes at most 0.75 of the time in which the local steps before it compute. A run with
 * local steps returns to an exchange in each step if, with one bit per element, the wait would be
 * less than 0.7 of the computing time. The number of local steps changes only if another number is
 * clearly better.
 */
#ifndef ONEBIT_METHOD_H
#define ONEBIT_METHOD_H

#include "onebit/communicator.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum onebit_method {
  ONEBIT_METHOD_DENSE = 0,      /* float32 in each step */
  ONEBIT_METHOD_EIGHT_BITS = 1, /* 8 bits per element in each step */
  ONEBIT_METHOD_ONE_BIT = 2,    /* one bit in each step, once the optimizer's warm-up is over */
  ONEBIT_METHOD_LOCAL_STEPS = 3 /* local steps, and an outer step in one bit */
} onebit_method_t;

/* Start from ONEBIT_METHOD_CHOICE_INIT. */
typedef struct onebit_method_choice {
  size_t size; /* sizeof(onebit_method_choice_t) */
  /* The caller sets these fields; zero means the default. All ranks give the same values, except of
   * `compute`. */
  size_t elements; /* exchanged by the ranks */
  double compute;  /* seconds of this rank's step without exchanges; the slowest rank's is used */
  /* Methods that may be chosen, the sum of 1 << method. Default: all, but LOCAL_STEPS only if each
   * other method sends more than bytes_a_day. */
  int methods;
  int blocking;            /* nonzero: an exchange begins when the gradients are computed */
  onebit_method_t current; /* the run's present method; it stays unless another is clearly better */
  double step;             /* measured seconds of a step with `current`; 0: not measured */
  /* By method: seconds by which measured steps exceed the model's prediction. Out: the entry of
   * `current`, computed from `step`. */
  double extra[4];
  /* The most bytes that a host may send in a day; default: no limit. A method that sends more is
   * not chosen; a warm-up is not counted. */
  double bytes_a_day;
  /* By method: seconds of an exchange of all elements on the slowest rank, as measured by
   * onebit_method_measure. All zero: onebit_method_choose measures them. */
  double exchange[4];
  /* The results of the choice. */
  onebit_method_t method;
  double expected[4];  /* by method: seconds of a step; infinite where it may not be chosen */
  size_t local_steps;  /* of an outer step; 0: the ranks exchange in each step. In, if `current` is
                        * LOCAL_STEPS: the training's present number */
  size_t warmup_steps; /* of Efficient-Adam: the default; with 8 bits more than any training has */
  size_t dense_below;  /* of onebit_optimizer_options_t: the default; with DENSE, above any count */
  char text[384]; /* "chooses one bit, and expects a step of 0.17 s instead of 1.2 s dense: ..." */
} onebit_method_choice_t;

/* clang-format off */
#define ONEBIT_METHOD_CHOICE_INIT \
  { sizeof(onebit_method_choice_t), 0, 0, 0, 0, ONEBIT_METHOD_DENSE, 0, {0}, 0, {0}, \
    ONEBIT_METHOD_DENSE, {0}, 0, 0, 0, {0} }
/* clang-format on */

/* Makes an exchange as the program would with the method DENSE, EIGHT_BITS or ONE_BIT. Collective.
 *   context    the argument `context` of onebit_method_measure
 *   method     the method; `elements` is the number of float32 elements
 *   seconds    out: the time of the exchange on this rank
 * Returns ONEBIT_OK, or an error, which all ranks then get. */
typedef onebit_status_t (*onebit_method_exchange_t)(void *context, onebit_method_t method,
                                                    size_t elements, double *seconds);

/* Measures each method, from one bit to dense, by a few exchanges of growing sizes, until their
 * time depends on the link's rate. A method whose exchange of few elements takes longer than a
 * whole exchange with fewer bits needs no other one. Measuring takes some 100 ms, and on a link
 * with a long delay one to three seconds. Collective.
 *   comm      the ranks
 *   choice    elements and methods; out: exchange, the same on all ranks
 *   exchange  the function that makes an exchange; NULL: the library makes exchanges, in host
 *             memory
 *   context   the first argument of `exchange`
 * Errors: ONEBIT_ERROR_ARGUMENT (also for seconds that are negative or not finite),
 * ONEBIT_ERROR_MISMATCH (elements or methods differ between ranks), ONEBIT_ERROR_PEER, and those of
 * `exchange`, or if it is NULL those of onebit_plan_create and onebit_allreduce. */
onebit_status_t onebit_method_measure(onebit_comm_t comm, onebit_method_choice_t *choice,
                                      onebit_method_exchange_t exchange, void *context);

/* Chooses a method. Collective, also if exchanges have been measured before.
 *   comm     the ranks
 *   choice   out: the results; `compute` becomes the slowest rank's
 * Errors: ONEBIT_ERROR_ARGUMENT (a number that is negative or not finite, an unknown method, or
 * every method sends more than bytes_a_day), ONEBIT_ERROR_MISMATCH (the ranks give different
 * values), ONEBIT_ERROR_PEER, and those of onebit_method_measure. */
onebit_status_t onebit_method_choose(onebit_comm_t comm, onebit_method_choice_t *choice);

#ifdef __cplusplus
}
#endif
#endif
