/* Which schedule a plan takes. */
#include "base/error.h"
#include "collectives/schedule.h"

static const char *const names[] = {"ONEBIT_SCHEDULE_AUTOMATIC", "ONEBIT_SCHEDULE_EXCHANGE",
                                    "ONEBIT_SCHEDULE_ALLGATHER", "ONEBIT_SCHEDULE_HIERARCHICAL"};

/* Can what was asked for be had? */
static onebit_status_t check(const struct onebit_plan *plan, const struct ob_plan_shape *shape) {
  const onebit_plan_options_t *options = &shape->options;
  const struct ob_hosts *hosts = &plan->comm->hosts;
  if (options->schedule <= ONEBIT_SCHEDULE_EXCHANGE)
    return ONEBIT_OK;
  if (options->operation != ONEBIT_ALLREDUCE || options->profile == ONEBIT_PROFILE_DEEPSPEED)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "schedule is %s, which is for ONEBIT_ALLREDUCE in the default profile only",
                    names[options->schedule]);
  if (options->schedule == ONEBIT_SCHEDULE_ALLGATHER)
    return ONEBIT_OK;
  if (shape->one_scale)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "schedule is %s, block_size is ONEBIT_BLOCK_BUFFER: a rank has a part of the "
                    "buffer only",
                    names[options->schedule]);
  if (!hosts->each)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "schedule is %s: the hosts have %d to %d ranks, and would all need as many",
                    names[options->schedule], hosts->fewest, hosts->most);
  return ONEBIT_OK;
}

onebit_status_t ob_schedule_choose(struct onebit_plan *plan, const struct ob_plan_shape *shape) {
  OB_TRY(check(plan, shape));
  plan->schedule = shape->options.schedule ? shape->options.schedule : ONEBIT_SCHEDULE_EXCHANGE;
  return ONEBIT_OK;
}
