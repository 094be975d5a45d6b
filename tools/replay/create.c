/* From a recorded case's options to an optimizer's. */
#include "tools/replay/create.h"

#include "onebit/onebit.h"

/* What a kind's create call is given besides the options of its own. */
struct request {
  const struct replay_case *recorded;
  onebit_comm_t comm;
  const onebit_tensor_t *tensors;
  onebit_optimizer_options_t common;
};

/* To DeepSpeed 0 is as good as 1: one step of warm-up. The library has another use for 0. */
static size_t at_least_one(size_t step) { return step ? step : 1; }

static onebit_status_t create_adam(const struct request *request, onebit_optimizer_t *optimizer) {
  const struct replay_case *recorded = request->recorded;
  onebit_adam_options_t options = ONEBIT_ADAM_OPTIONS_INIT;
  options.common = request->common;
  options.beta1 = recorded->beta1;
  options.beta2 = recorded->beta2;
  options.epsilon = recorded->epsilon;
  options.freeze_step = at_least_one(recorded->freeze_step);
  return onebit_adam_create(request->comm, request->tensors, recorded->tensors, &options,
                            optimizer);
}

static onebit_status_t create_lamb(const struct request *request, onebit_optimizer_t *optimizer) {
  const struct replay_case *recorded = request->recorded;
  onebit_lamb_options_t options = ONEBIT_LAMB_OPTIONS_INIT;
  options.common = request->common;
  options.beta1 = recorded->beta1;
  options.beta2 = recorded->beta2;
  options.epsilon = recorded->epsilon;
  options.freeze_step = at_least_one(recorded->freeze_step);
  options.max_coefficient = recorded->max_coefficient;
  options.min_coefficient = recorded->min_coefficient;
  options.coefficient_beta = recorded->coefficient_beta;
  options.max_factor = recorded->max_factor;
  options.min_factor = recorded->min_factor;
  options.factor_change = recorded->factor_change;
  return onebit_lamb_create(request->comm, request->tensors, recorded->tensors, &options,
                            optimizer);
}

static onebit_status_t create_zero_one_adam(const struct request *request,
                                            onebit_optimizer_t *optimizer) {
  const struct replay_case *recorded = request->recorded;
  onebit_zero_one_adam_options_t options = ONEBIT_ZERO_ONE_ADAM_OPTIONS_INIT;
  options.common = request->common;
  options.beta1 = recorded->beta1;
  options.beta2 = recorded->beta2;
  options.epsilon = recorded->epsilon;
  options.variance_freeze_step = at_least_one(recorded->variance_freeze_step);
  options.variance_update_scaler = recorded->variance_update_scaler;
  options.local_step_scaler = recorded->local_step_scaler;
  options.local_step_clipper = recorded->local_step_clipper;
  return onebit_zero_one_adam_create(request->comm, request->tensors, recorded->tensors, &options,
                                     optimizer);
}

static const struct {
  const char *name;
  onebit_status_t (*create)(const struct request *request, onebit_optimizer_t *optimizer);
} kinds[REPLAY_KINDS] = {
    [REPLAY_ADAM] = {"onebit_adam_create", create_adam},
    [REPLAY_LAMB] = {"onebit_lamb_create", create_lamb},
    [REPLAY_ZERO_ONE_ADAM] = {"onebit_zero_one_adam_create", create_zero_one_adam},
};

const char *replay_create_name(const struct replay_case *recorded) {
  return kinds[recorded->kind].name;
}

onebit_status_t replay_create(const struct replay_case *recorded, onebit_comm_t comm,
                              const onebit_tensor_t *tensors, onebit_device_t device,
                              onebit_optimizer_t *optimizer) {
  onebit_optimizer_options_t common = ONEBIT_OPTIMIZER_OPTIONS_INIT;
  common.profile = ONEBIT_PROFILE_DEEPSPEED;
  common.device = device;
  const struct request request = {recorded, comm, tensors, common};
  return kinds[recorded->kind].create(&request, optimizer);
}
