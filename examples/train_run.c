/* Implements train_run.h: runs trainings. */
#define _POSIX_C_SOURCE 200809L
#include "examples/train_run.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static double current_seconds(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void sleep_until(double end) {
  for (double left; (left = end - current_seconds()) > 0;)
    nanosleep(&(struct timespec){(time_t)left, (long)(fmod(left, 1) * 1e9)}, NULL);
}

/* Returns the seconds that the simulated link needs for the bytes of an exchange. */
static double link_seconds(const train_options_t *options, uint64_t bytes) {
  return options->link > 0.0f ? (double)bytes * 8e-6 / (double)options->link : 0.0;
}

/* --- The method of --method auto ---------------------------------------------------------------*/

/* Makes an exchange, and sleeps for the additional time that the simulated link needs. */
static onebit_status_t training_exchange_on_link(void *context, onebit_method_t method,
                                                 size_t elements, double *seconds) {
  const training_t *training = context;
  const onebit_comm_t comm = training->team->comm;
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  onebit_plan_t plan = NULL;
  float *values = calloc(elements, sizeof *values);
  options.wire = method == ONEBIT_METHOD_DENSE ? ONEBIT_WIRE_DENSE : ONEBIT_WIRE_BITS;
  options.bits = method == ONEBIT_METHOD_EIGHT_BITS ? 8 : 1;
  onebit_status_t status =
      values ? onebit_plan_create(comm, elements, &options, &plan) : ONEBIT_ERROR_MEMORY;
  const uint64_t sent = onebit_comm_bytes_sent(comm);
  const double start = current_seconds();
  if (status == ONEBIT_OK)
    status = onebit_allreduce(values, values, plan);
  *seconds = current_seconds() - start +
             link_seconds(training->options, onebit_comm_bytes_sent(comm) - sent);
  onebit_plan_destroy(plan);
  free(values);
  return status;
}

/* Measures the time in seconds that a step's gradient takes. */
static double training_time_gradient(training_t *training) {
  const train_options_t *options = training->options;
  const double start = current_seconds();
  for (size_t k = 0; k < options->accumulate; k++)
    train_task_gradient(&training->task, 0);
  return fmax(current_seconds() - start, (double)options->step_seconds);
}

static int training_choose_method(training_t *training) {
  const train_options_t *options = training->options;
  const bool each_step = options->checkpoint || options->parameters || options->loss_scale > 0.0f;
  const int all = (2 << ONEBIT_METHOD_LOCAL_STEPS) - 1;
  onebit_method_choice_t choice = ONEBIT_METHOD_CHOICE_INIT;
  if (!options->automatic || training->form != COMPRESSED)
    return 0;
  choice.elements = training->parameters;
  choice.compute = training_time_gradient(training);
  choice.methods = each_step ? all >> 1 : options->automatic == 2 ? all : 0;
  choice.blocking = options->bucket_size == 0;
  onebit_status_t status =
      onebit_method_measure(training->team->comm, &choice, training_exchange_on_link, training);
  if (status == ONEBIT_OK)
    status = onebit_method_choose(training->team->comm, &choice);
  if (check_library_call(training->team, status, "--method auto") != 0)
    return -1;
  print_once(training->team, "auto %s\n", choice.text);
  training->chosen = *options;
  training->chosen.warmup = choice.warmup_steps;
  training->chosen.outer = choice.local_steps;
  training->options = &training->chosen;
  training->form = choice.local_steps                     ? OUTER
                   : choice.method == ONEBIT_METHOD_DENSE ? DENSE
                                                          : COMPRESSED;
  return 0;
}

static int training_create(training_t *training, const train_kind_t *kind, const void *data) {
  training->task = (train_task_t){
      .kind = kind, .team = training->team, .options = training->options, .data = data};
  if (train_task_create(&training->task) != 0)
    return -1;
  training->parameters = training->task.model->parameters;
  training->ntensors = training->task.model->ntensors;
  if (training_choose_method(training) != 0)
    return -1;
  return train_optimizer_create(&training->optimizer, training->form, &training->task,
                                training->options);
}

static void training_destroy(training_t *training) {
  report_close(training);
  train_optimizer_destroy(&training->optimizer);
  model_destroy(training->task.model);
  training->task.model = NULL;
}

/* --- Checkpoints -------------------------------------------------------------------------------*/

/* Loads the checkpoint. It contains only the optimizer's state, since the samples of a step depend
 * only on the step's number. */
static int training_resume(training_t *training) {
  const train_options_t *options = training->options;
  train_optimizer_t *optimizer = &training->optimizer;
  char error[TRAIN_ERROR];
  if (!options->resume)
    return 0;
  if (check_library_call(training->team, train_optimizer_load(optimizer, options->checkpoint),
                         "--resume") != 0)
    return -1;
  const onebit_optimizer_info_t info = train_optimizer_info(optimizer);
  training->first = (size_t)(info.steps + info.skipped);
  snprintf(error, sizeof error, "--resume: %.300s is of step %zu, but the training has %zu steps",
           options->checkpoint, training->first, train_last_step(options));
  print_once(training->team, "resumed after step %zu, from %s\n", training->first,
             options->checkpoint);
  return agree_on_success(training->team, training->first < train_last_step(options), error);
}

static int is_saved(const train_options_t *options, size_t step) {
  const size_t every = options->save_every;
  return options->checkpoint &&
         (step == train_last_step(options) || (every > 0 && step % every == 0));
}

/* Creates the directory of checkpoints before the training starts, so that an error does not come
 * only at the first save. */
static int make_directory(const training_t *training) {
  const char *path = training->options->checkpoint;
  const int well = !path || mkdir(path, 0777) == 0 || errno == EEXIST;
  return agree_on_success(training->team, well && (!path || access(path, W_OK) == 0),
                          "--checkpoint: the directory cannot be written");
}

/* Saves a checkpoint if one is due after this number of steps. */
static int training_save(training_t *training, size_t step) {
  const train_options_t *options = training->options;
  if (!is_saved(options, step))
    return 0;
  return check_library_call(
      training->team, onebit_optimizer_save_files(training->optimizer.onebit, options->checkpoint),
      "--checkpoint");
}

/* --- Steps -------------------------------------------------------------------------------------*/

/* Makes a step. The optimizer's time includes waiting for slower ranks. */
static int make_step(training_t *training, size_t step, tally_t *tally) {
  train_optimizer_t *optimizer = &training->optimizer;
  const float rate = train_learning_rate(training->options, step);
  const uint64_t sent = train_optimizer_sent(optimizer);
  const double start = current_seconds();
  onebit_status_t status = train_optimizer_begin(optimizer, rate);
  if (check_library_call(training->team, status, "optimizer") != 0)
    return -1;
  const double loss = train_optimizer_gradient(optimizer, step);
  sleep_until(start + (double)training->options->step_seconds);
  const double middle = current_seconds();
  status = train_optimizer_step(optimizer, rate);
  const uint64_t bytes = train_optimizer_sent(optimizer) - sent;
  sleep_until(current_seconds() + link_seconds(training->options, bytes));
  const double end = current_seconds();
  *tally = (tally_t){.steps = 1,
                     .bytes = bytes,
                     .loss = loss,
                     .seconds = end - start,
                     .optimizer_seconds = end - middle};
  training->skipped = status == ONEBIT_SKIPPED ? training->skipped + 1 : 0;
  return status == ONEBIT_SKIPPED ? 0
                                  : check_library_call(training->team, status, "optimizer step");
}

static void tally_add(tally_t *sum, const tally_t *tally) {
  sum->steps += tally->steps;
  sum->bytes += tally->bytes;
  sum->loss += tally->loss;
  sum->seconds += tally->seconds;
  sum->optimizer_seconds += tally->optimizer_seconds;
}

/* True if the log has a line for the step. A resumed training needs a line for each checkpoint. */
static int is_reported(const train_options_t *options, size_t step) {
  return step % options->report_every == 0 || step == train_last_step(options) ||
         is_saved(options, step) ||
         (options->validate_every > 0 && step % options->validate_every == 0);
}

/* Returns the stage of the next step. Queries the optimizer's info only if the stage may have
 * changed, because computing the info reads the optimizer's whole state. */
static onebit_stage_t next_stage(const training_t *training, onebit_stage_t stage) {
  if (training->form != COMPRESSED || stage == ONEBIT_STAGE_COMPRESSED)
    return stage;
  return train_optimizer_info(&training->optimizer).stage;
}

static int make_steps(training_t *training) {
  onebit_stage_t stage = next_stage(training, ONEBIT_STAGE_WARMUP);
  tally_t since = {0}, one;
  report_head(training);
  for (size_t step = training->first + 1; step <= train_last_step(training->options); step++) {
    if (make_step(training, step - 1, &one) != 0)
      return -1;
    tally_add(&training->tally[stage], &one);
    tally_add(&since, &one);
    if (is_reported(training->options, step)) {
      if (report_steps(training, step, stage, &since) != 0)
        return -1;
      since = (tally_t){0};
    }
    if (training_save(training, step) != 0)
      return -1;
    stage = next_stage(training, stage);
  }
  return 0;
}

/* Checks that all ranks have the same parameters, except between two synchronisations of 0/1 Adam,
 * where parameters differ between ranks. */
static int training_check_parameters(training_t *training) {
  const team_t *team = training->team;
  training->info = train_optimizer_info(&training->optimizer);
  training->outer = train_outer_info(&training->optimizer.outer);
  train_outer_report(&training->optimizer.outer, team);
  training->residual_ratio = train_optimizer_residual_ratio(&training->optimizer);
  training->checksum = train_task_checksum(&training->task);
  const int equal = is_same_on_all_ranks(team, training->checksum);
  if (equal)
    print_once(team, "parameters: the same bits on all %zu ranks, checksum %016llx\n", team->size,
               (unsigned long long)training->checksum);
  else if (!training->info.synchronized)
    print_once(team,
               "parameters: each of the %zu ranks has its own, between two synchronisations\n",
               team->size);
  else
    print_complaint(team, "the ranks do not hold the same parameters");
  return equal || !training->info.synchronized ? 0 : -1;
}

int train(training_t *training, const train_kind_t *kind, const void *data) {
  int result = training_create(training, kind, data);
  if (result == 0)
    result = training_resume(training);
  if (result == 0)
    result = make_directory(training);
  if (result == 0)
    result = report_open(training);
  if (result == 0)
    result = make_steps(training);
  if (result == 0)
    result = training_check_parameters(training);
  if (result == 0)
    report_end(training);
  training_destroy(training);
  return result;
}

/* Trains as the options say; with --compare trains twice. */
static int train_all(const team_t *team, const train_options_t *options, const train_kind_t *kind,
                     const void *data) {
  training_t training = {.options = options, .team = team, .form = train_options_form(options)};
  training_t dense = {.options = options, .team = team, .form = DENSE};
  if (options->compare && train(&dense, kind, data) != 0)
    return -1;
  if (train(&training, kind, data) != 0)
    return -1;
  if (options->compare && prints(team))
    report_comparison(&dense, &training);
  return 0;
}

static int training_load_and_run(const team_t *team, const train_options_t *options,
                                 const train_kind_t *kind) {
  char error[TRAIN_ERROR] = "out of memory";
  void *data = kind->load(options, error);
  int result = WRONG_USE;
  if (agree_on_success(team, data != NULL, error) == 0 &&
      agree_on_success(team, is_same_on_all_ranks(team, kind->hash(data)), kind->different) == 0) {
    kind->describe(team, options, data);
    result = train_all(team, options, kind, data) == 0 ? DONE : FAILED;
  }
  if (data)
    kind->unload(data);
  return result;
}

typedef struct command {
  const train_kind_t *kind;
  train_options_t options;
  enum tool_asked asked; /* the parser's result; the command line may differ between ranks */
  char error[TRAIN_ERROR];
} command_t;

static int training_run_rank(team_t *team, const void *context) {
  const command_t *command = context;
  team->quiet = command->options.quiet;
  if (command->asked == TOOL_RUN)
    return training_load_and_run(team, &command->options, command->kind);
  if (team->rank == 0)
    tool_print_answer(command->kind->tool, command->asked, command->error);
  return command->asked == TOOL_WRONG ? WRONG_USE : DONE;
}

int train_main(const train_kind_t *kind, int argc, char **argv) {
  command_t command = {.kind = kind};
  command.asked = train_options_parse(kind, &command.options, argc, argv, command.error);
  setvbuf(stdout, NULL, _IOLBF, BUFSIZ);
  return team_run(kind->tool->name, command.asked == TOOL_RUN ? command.options.ranks : 0,
                  training_run_rank, &command);
}
