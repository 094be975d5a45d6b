/* The choice of a plan's schedule. schedule.c may replace it by doubling where a message is one
 * small chunk. */
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "collectives/plan_private.h"

/* Fails unless the schedule that was asked for is possible. */
static onebit_status_t choose_check(const struct onebit_plan *plan,
                                    const struct ob_plan_shape *shape) {
  static const char *const names[] = {"", "", "ONEBIT_SCHEDULE_ALLGATHER",
                                      "ONEBIT_SCHEDULE_HIERARCHICAL"};
  const onebit_plan_options_t *options = &shape->options;
  if (options->schedule <= ONEBIT_SCHEDULE_EXCHANGE)
    return ONEBIT_OK;
  if (options->operation != ONEBIT_ALLREDUCE || options->profile == ONEBIT_PROFILE_DEEPSPEED)
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "schedule is %s, which is for ONEBIT_ALLREDUCE in the default profile only",
                    names[options->schedule]);
  return ob_schedule_named(options->schedule)->applicable(plan, shape);
}

/* Elements of the buffer that an allreduce is about. */
static size_t choose_elements_of(const struct ob_plan_shape *shape) {
  size_t elements = 0;
  for (size_t k = 0; k < shape->pieces; k++)
    elements += shape->counts[k];
  return elements;
}

/* The ranks may have different numbers of threads, and must choose alike: the model counts one. */
static struct ob_cost_task choose_task_of(const struct onebit_plan *plan,
                                          const struct ob_plan_shape *shape) {
  const struct ob_hosts *hosts = &plan->comm->hosts;
  const onebit_plan_options_t *options = &shape->options;
  return (struct ob_cost_task){
      .operation = options->operation,
      .elements = choose_elements_of(shape) / (shape->of_segments ? (size_t)plan->comm->size : 1),
      .block = options->block_size,
      .wire = options->wire,
      .bits = options->bits,
      .hosts = hosts->count,
      .ranks_per_host = ob_hierarchical_can_add(plan) || hosts->each == 1 ? hosts->each : 0,
      .ranks = plan->comm->size,
      .max_ranks = hosts->max,
      .schedule = options->schedule,
      .chunk = options->chunk_size,
  };
}

static bool is_between_gpus(const struct onebit_plan *plan) {
  return plan->comm->transport->put && plan->comm->size > 1;
}

/* Limits the cost model's choice. Ranks that are threads have no network, and get the schedule that
 * they ask for. The model has no numbers for messages between GPUs: there the schedule that needs
 * none is taken. Profile deepspeed fixes the arithmetic, and so the schedule; an optimizer takes
 * servers' messages: one bit an element, or means that it streams through a window of messages. */
static void set_freedom(const struct onebit_plan *plan, const struct ob_plan_shape *shape,
                        struct ob_cost_task *task) {
  const struct ob_hosts *hosts = &plan->comm->hosts;
  bool modelled = plan->comm->transport->network;
  bool free = (modelled || is_between_gpus(plan)) && !shape->one_scale &&
              shape->options.profile == ONEBIT_PROFILE_DEFAULT &&
              shape->options.operation == ONEBIT_ALLREDUCE;
  bool from_servers = shape->windowed || shape->from_servers;
  if (task->schedule)
    return;
  if (!free)
    task->schedule = ONEBIT_SCHEDULE_EXCHANGE;
  else if (from_servers)
    task->schedule = hosts->count > 1 && task->ranks_per_host > 1 ? ONEBIT_SCHEDULE_HIERARCHICAL
                                                                  : ONEBIT_SCHEDULE_EXCHANGE;
  else if (modelled)
    task->dense_allowed = true;
  else
    task->schedule = ONEBIT_SCHEDULE_EXCHANGE;
}

static void tell_of_gpus(struct ob_cost_choice *choice) {
  size_t length = strlen(choice->text);
  snprintf(choice->text + length, sizeof choice->text - length,
           "between GPUs these times are not to be trusted: an optimizer is hierarchical where it "
           "can be, an allreduce the exchange unless another schedule is asked for\n");
}

/* Takes the schedule that was asked for, even if the model has no time for it (on one host, or
 * dense) and names another one. */
static void take_requested_schedule(struct ob_cost_choice *choice,
                                    const struct ob_cost_task *task) {
  if (!task->schedule || choice->schedule == task->schedule)
    return;
  choice->schedule = task->schedule;
  snprintf(choice->text, sizeof choice->text,
           "chosen: %s, %s, as asked for: the cost model has no time for it here\n",
           ob_cost_schedule_name(choice->schedule), ob_wire_name(choice->wire, task->bits));
}

onebit_status_t ob_schedule_choose(struct onebit_plan *plan, const struct ob_plan_shape *shape) {
  OB_TRY(choose_check(plan, shape));
  struct ob_cost_task task = choose_task_of(plan, shape);
  set_freedom(plan, shape, &task);
  ob_cost_choose(&plan->comm->costs, &task, &plan->choice);
  take_requested_schedule(&plan->choice, &task);
  if (is_between_gpus(plan) && !shape->options.schedule)
    tell_of_gpus(&plan->choice);
  plan->options.wire = plan->choice.wire;
  plan->schedule = ob_schedule_named(plan->choice.schedule);
  if (shape->windowed && plan->choice.schedule != ONEBIT_SCHEDULE_ALLGATHER)
    plan->schedule = &ob_schedule_window;
  else if (shape->options.operation == ONEBIT_ALLGATHER)
    plan->schedule = &ob_schedule_allgather;
  return ONEBIT_OK;
}
