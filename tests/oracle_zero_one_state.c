/* 0/1 Adam of the oracle: the schedule of its exchanges, and its state. */
#include "tests/oracle_zero_one.h"

#include "tests/support.h"

enum { DENSE = ORACLE_DENSE, BITS = ORACLE_BITS, NOTHING = ORACLE_NOTHING };

/* --- The schedule of exchanges */

struct oracle_zero_one_clock oracle_zero_one_clock_of(const onebit_zero_one_adam_options_t *options,
                                                      bool deepspeed) {
  return (struct oracle_zero_one_clock){
      .left = options->variance_freeze_step ? options->variance_freeze_step : 100000,
      .update_scaler = options->variance_update_scaler ? options->variance_update_scaler : 16,
      .step_scaler = options->local_step_scaler ? options->local_step_scaler : 32678,
      .clipper = options->local_step_clipper ? options->local_step_clipper : 16,
      .number = deepspeed ? 1 : 0,
      .variance_interval = 1,
      .local_interval = 1};
}

int oracle_zero_one_clock_next(const struct oracle_zero_one_clock *clock) {
  size_t number = clock->number + 1;
  if (clock->local)
    return number % clock->local_interval == 0 ? BITS : NOTHING;
  return number % clock->variance_interval == 0 ? DENSE : BITS;
}

void oracle_zero_one_clock_advance(struct oracle_zero_one_clock *clock) {
  bool updated = oracle_zero_one_clock_next(clock) == DENSE;
  clock->number++;
  if (clock->local) {
    if (++clock->local_count == clock->step_scaler) {
      clock->local_count = 0;
      clock->local_interval *= 2;
      if (clock->local_interval > clock->clipper)
        clock->local_interval = clock->clipper;
    }
    return;
  }
  if (updated && ++clock->variance_count == clock->update_scaler) {
    clock->variance_count = 0;
    clock->variance_interval *= 2;
  }
  clock->local = --clock->left == 0;
}

/* --- Creation */

static onebit_adam_options_t make_adam_options(const onebit_zero_one_adam_options_t *options) {
  onebit_adam_options_t adam = ONEBIT_ADAM_OPTIONS_INIT;
  adam.beta1 = options->beta1;
  adam.beta2 = options->beta2;
  adam.epsilon = options->epsilon;
  adam.no_bias_correction = options->no_bias_correction;
  adam.common = options->common;
  return adam;
}

struct oracle_zero_one *oracle_zero_one_create(int ranks, int hosts, const onebit_tensor_t *tensors,
                                               size_t count,
                                               const onebit_zero_one_adam_options_t *options) {
  struct oracle_zero_one *oracle = allocate(1, sizeof *oracle);
  onebit_adam_options_t adam = make_adam_options(options);
  oracle->state = oracle_adam_create(ranks, hosts, tensors, count, &adam);
  oracle->clock =
      oracle_zero_one_clock_of(options, options->common.profile == ONEBIT_PROFILE_DEEPSPEED);
  oracle->ranks = (size_t)ranks;
  oracle->gradient_factor = (float)oracle->state->weigher.options.gradient_factor;
  size_t total = oracle->state->total;
  float **separate[] = {&oracle->parameter, &oracle->momentum, &oracle->moved, &oracle->sent};
  for (size_t k = 0; k < 4; k++)
    *separate[k] = allocate(oracle->ranks * total, sizeof(float));
  oracle->denominator = allocate(total, sizeof(float));
  oracle->anchor = allocate(total, sizeof(float));
  for (size_t r = 0; r < oracle->ranks; r++)
    memcpy(oracle->parameter + r * total, oracle->state->parameter, total * sizeof(float));
  return oracle;
}

void oracle_zero_one_destroy(struct oracle_zero_one *oracle) {
  oracle_adam_destroy(oracle->state);
  free(oracle->parameter);
  free(oracle->momentum);
  free(oracle->moved);
  free(oracle->sent);
  free(oracle->denominator);
  free(oracle->anchor);
  free(oracle);
}

bool oracle_zero_one_is_synchronized(const struct oracle_zero_one *oracle) {
  size_t total = oracle->state->total;
  for (size_t r = 1; r < oracle->ranks; r++)
    if (memcmp(oracle->parameter, oracle->parameter + r * total, total * sizeof(float)) != 0)
      return false;
  return true;
}
