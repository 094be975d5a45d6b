/* The oracle's 0/1 Adam, with all ranks in one process. It uses the tensors, exchanges and variance
 * of a struct oracle_adam, but makes its own steps. */
#ifndef ONEBIT_TESTS_ORACLE_ZERO_ONE_H
#define ONEBIT_TESTS_ORACLE_ZERO_ONE_H

#include "tests/oracle.h"

enum { ORACLE_DENSE, ORACLE_BITS, ORACLE_NOTHING };

/* The counters that decide what a step exchanges. Every step advances them, as in DeepSpeed's
 * ZeroOneAdam. Both profiles freeze the variance after the same number of steps. (DeepSpeed counts
 * steps from 2, and freezes after the first step whose number exceeds the option.) */
struct oracle_zero_one_clock {
  size_t update_scaler, step_scaler, clipper; /* the options */
  size_t left;                                /* steps before the freeze */
  size_t number;                              /* the number of the latest step */
  size_t variance_interval, variance_count, local_interval, local_count;
  bool local;
};

/* With `deepspeed` the clock starts after the first call, which makes no step. */
struct oracle_zero_one_clock oracle_zero_one_clock_of(const onebit_zero_one_adam_options_t *options,
                                                      bool deepspeed);

/* oracle_zero_one_clock_next returns what the next step exchanges; oracle_zero_one_clock_advance
 * counts that step. */
int oracle_zero_one_clock_next(const struct oracle_zero_one_clock *clock);
void oracle_zero_one_clock_advance(struct oracle_zero_one_clock *clock);

/* Each rank has its own parameters and momentum, since they differ between synchronisations. */
struct oracle_zero_one {
  struct oracle_adam *state; /* state->momentum is the result of an exchange */
  struct oracle_zero_one_clock clock;
  size_t ranks;
  float *parameter, *momentum, *moved, *sent; /* [ranks][total] */
  float *denominator, *anchor;                /* [total] */
  float gradient_factor;
  size_t updates, exchanges[3];
  double rates, corrected_rates; /* sums of learning rates since the last synchronisation */
};

/* Creates the optimizer with arguments as in oracle_adam_create. */
struct oracle_zero_one *oracle_zero_one_create(int ranks, int hosts, const onebit_tensor_t *tensors,
                                               size_t count,
                                               const onebit_zero_one_adam_options_t *options);
void oracle_zero_one_destroy(struct oracle_zero_one *oracle);

/* Makes one step. gradients[r] has rank r's gradients, all tensors one after the other. Sets
 * statuses[r] to rank r's status. If all ranks skip the step, nothing has changed. */
void oracle_zero_one_step(struct oracle_zero_one *oracle, const float *const *gradients,
                          float learning_rate, onebit_status_t *statuses);

/* True if parameters are equal on all ranks after the latest step. */
bool oracle_zero_one_is_synchronized(const struct oracle_zero_one *oracle);

#endif
