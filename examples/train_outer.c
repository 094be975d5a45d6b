/* Implements the outer step of train_optimizer.h. */
#include "examples/train_optimizer.h"

#include <stdlib.h>

static onebit_outer_options_t train_outer_options(const train_options_t *options) {
  static const int bits[] = {0, 1, 2, 4, 8, ONEBIT_OUTER_DENSE, ONEBIT_OUTER_SPARSE};
  onebit_outer_options_t outer = ONEBIT_OUTER_OPTIONS_INIT;
  outer.local_steps = options->outer;
  outer.rule = (onebit_outer_rule_t)options->outer_rule;
  outer.bits = bits[options->outer_bits];
  outer.fragments = options->outer_fragments;
  outer.delay = options->outer_delay;
  outer.mixing = (double)options->outer_mixing;
  outer.scale = (onebit_scale_t)options->scale;
  outer.block_size = options->block_size;
  outer.no_error_feedback = options->no_error_feedback;
  outer.dense_below = options->dense_below;
  return outer;
}

static onebit_status_t train_outer_create_onebit(train_outer_t *outer) {
  const train_task_t *task = outer->task;
  const onebit_outer_options_t options = train_outer_options(outer->options);
  onebit_tensor_t *tensors = calloc(task->model->ntensors, sizeof *tensors);
  for (size_t t = 0; tensors && t < task->model->ntensors; t++)
    tensors[t] = (onebit_tensor_t){.parameter = task->model->tensors[t].value,
                                   .count = task->model->tensors[t].count};
  onebit_sites_options_t sites = ONEBIT_SITES_OPTIONS_INIT;
  sites.patience = (double)outer->options->outer_patience;
  const onebit_status_t status =
      sites.patience > 0
          ? onebit_outer_create_sites(outer->alone, task->team->comm, tensors,
                                      task->model->ntensors, &options, &sites, &outer->onebit)
          : onebit_outer_create(task->team->comm, tensors, task->model->ntensors, &options,
                                &outer->onebit);
  free(tensors);
  return status;
}

int train_outer_create(train_outer_t *outer, const train_task_t *task,
                       const train_options_t *options) {
  *outer = (train_outer_t){.options = options, .task = task};
  if (agree_on_success(task->team, onebit_comm_create_self(&outer->alone) == ONEBIT_OK,
                       "out of memory for a communicator") != 0 ||
      check_library_call(task->team, train_outer_create_onebit(outer), "outer step") != 0)
    return -1;
  if (onebit_outer_check(outer->onebit) == ONEBIT_WARNING)
    print_complaint(task->team, onebit_last_error());
  return 0;
}

void train_outer_destroy(train_outer_t *outer) {
  onebit_outer_destroy(outer->onebit);
  onebit_comm_destroy(outer->alone);
}

/* Makes the parameters equal on all ranks at the end of the training. They are already equal if the
 * last step has exchanged all elements, and no site can have been left out. Otherwise this function
 * makes one more exchange. */
static onebit_status_t train_outer_end(const train_outer_t *outer) {
  const train_options_t *options = outer->options;
  onebit_status_t status = ONEBIT_OK;
  if (outer->steps % options->outer > 0 || options->outer_fragments > 1 ||
      options->outer_delay > 0 || options->outer_patience > 0.0f)
    return onebit_outer_synchronize(outer->onebit);
  for (size_t t = 0; status == ONEBIT_OK && t < outer->task->model->ntensors; t++)
    status = onebit_outer_get_consensus(outer->onebit, t, outer->task->model->tensors[t].value);
  return status;
}

onebit_status_t train_outer_step(train_outer_t *outer) {
  if (!outer->onebit)
    return ONEBIT_OK;
  const onebit_status_t status = onebit_outer_step(outer->onebit, 1);
  const int goes_on = status == ONEBIT_OK || status == ONEBIT_SKIPPED;
  outer->steps++;
  return goes_on && outer->steps == train_last_step(outer->options) ? train_outer_end(outer)
                                                                    : status;
}

void train_outer_report(const train_outer_t *outer, const team_t *team) {
  onebit_sites_info_t info = {.size = sizeof info};
  if (outer->onebit && onebit_outer_get_sites(outer->onebit, &info) == ONEBIT_OK)
    print_once(team,
               "sites: %d; rank 0 closed %llu rounds of its shard, %llu with a site missing\n",
               info.sites, (unsigned long long)info.rounds, (unsigned long long)info.left_out);
}

onebit_outer_info_t train_outer_info(const train_outer_t *outer) {
  onebit_outer_info_t info = {.size = sizeof info};
  if (outer->onebit)
    onebit_outer_get_info(outer->onebit, &info);
  return info;
}
