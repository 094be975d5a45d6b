/*
 * Implements train_task.h. Ranks are processes of an MPI job or threads of this process, and
 * exchange a few numbers besides the gradients. The file also has the functions that all kinds of
 * tasks share.
 */
#include "examples/train_task.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>

#ifdef ONEBIT_HAVE_MPI
#include "onebit/mpi.h"
#endif

static const char *program_name = "training"; /* the argument of team_run */

void print_complaint(const team_t *team, const char *error) {
  if (team->rank == 0)
    fprintf(stderr, "%s: %s\n", program_name, error);
}

int check_library_call(const team_t *team, onebit_status_t status, const char *what) {
  if (status == ONEBIT_OK)
    return 0;
  if (team->rank == 0)
    fprintf(stderr, "%s: %s: %s: %s\n", program_name, what, onebit_status_string(status),
            onebit_last_error());
  return -1;
}

static int team_create(team_t *team, onebit_comm_t comm) {
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  options.wire = ONEBIT_WIRE_DENSE;
  *team = (team_t){
      .comm = comm, .rank = (size_t)onebit_comm_rank(comm), .size = (size_t)onebit_comm_size(comm)};
  return check_library_call(team, onebit_plan_create(comm, NUMBERS, &options, &team->plan), "plan");
}

int average_over_ranks(const team_t *team, float numbers[NUMBERS], const char *what) {
  return check_library_call(team, onebit_allreduce(numbers, numbers, team->plan), what);
}

int agree_on_success(const team_t *team, int well, const char *error) {
  float numbers[NUMBERS] = {well ? 0.0f : 1.0f, team->rank == 0 && !well ? 1.0f : 0.0f};
  if (average_over_ranks(team, numbers, "agreement of the ranks") != 0)
    return -1;
  if (!well && (team->rank == 0 || numbers[1] == 0.0f))
    fprintf(stderr, "%s: %s\n", program_name, error);
  return numbers[0] == 0.0f ? 0 : -1;
}

/* Replaces each bit by +1 or -1 and averages the numbers over the ranks. The bits are the same on
 * all ranks if each mean is +1 or -1. */
int is_same_on_all_ranks(const team_t *team, uint64_t bits) {
  float numbers[NUMBERS];
  int unanimous = 1;
  for (int b = 0; b < NUMBERS; b++)
    numbers[b] = bits >> b & 1 ? 1.0f : -1.0f;
  if (average_over_ranks(team, numbers, "comparison of the ranks") != 0)
    return 0;
  for (int b = 0; b < NUMBERS; b++)
    unanimous &= fabsf(numbers[b]) == 1.0f;
  return unanimous;
}

static int run_body(onebit_comm_t comm, rank_body_t *body, const void *context) {
  team_t team;
  const int created = team_create(&team, comm);
  const int status = created == 0 ? body(&team, context) : EXIT_FAILURE;
  onebit_plan_destroy(team.plan);
  onebit_comm_destroy(comm);
  return status;
}

void end_process(const char *what, const char *why) {
  fprintf(stderr, "%s: %s: %s\n", program_name, what, why);
  exit(EXIT_FAILURE);
}

/* --- Ranks as threads --------------------------------------------------------------------------*/

typedef struct rank_thread {
  pthread_t thread;
  onebit_comm_t comm;
  rank_body_t *body;
  const void *context;
  int status;
} rank_thread_t;

static void *team_run_thread(void *argument) {
  rank_thread_t *rank = argument;
  rank->status = run_body(rank->comm, rank->body, rank->context);
  return NULL;
}

static int team_run_threads(size_t size, rank_body_t *body, const void *context) {
  onebit_comm_t *comms = calloc(size, sizeof *comms);
  rank_thread_t *ranks = calloc(size, sizeof *ranks);
  int status = 0;
  if (!comms || !ranks)
    end_process("--ranks", "out of memory");
  if (onebit_comm_create_loopback((int)size, comms) != ONEBIT_OK)
    end_process("--ranks", onebit_last_error());
  for (size_t r = 0; r < size; r++) {
    ranks[r] = (rank_thread_t){.comm = comms[r], .body = body, .context = context};
    if (pthread_create(&ranks[r].thread, NULL, team_run_thread, &ranks[r]) != 0)
      end_process("--ranks", "no more threads can be made");
  }
  for (size_t r = 0; r < size; r++) {
    pthread_join(ranks[r].thread, NULL);
    status = ranks[r].status > status ? ranks[r].status : status;
  }
  free(ranks);
  free(comms);
  return status;
}

/* --- Ranks as processes ------------------------------------------------------------------------*/

#ifdef ONEBIT_HAVE_MPI
static int team_run_process(rank_body_t *body, const void *context) {
  onebit_comm_t comm;
  int status = EXIT_FAILURE;
  MPI_Init(NULL, NULL);
  if (onebit_comm_create_mpi(MPI_COMM_WORLD, &comm) == ONEBIT_OK)
    status = run_body(comm, body, context);
  else
    fprintf(stderr, "%s: MPI: %s\n", program_name, onebit_last_error());
  MPI_Finalize();
  return status;
}
#else
static int team_run_process(rank_body_t *body, const void *context) {
  return team_run_threads(1, body, context);
}
#endif

/* --- Ranks as processes that another program has started ---------------------------------------*/

static int run_over_sockets(rank_body_t *body, const void *context) {
  onebit_comm_t comm;
  if (onebit_comm_create_sockets(NULL, &comm) != ONEBIT_OK)
    end_process("sockets", onebit_last_error());
  return run_body(comm, body, context);
}

int team_run(const char *program, size_t threads, rank_body_t *body, const void *context) {
  program_name = program;
  if (threads == 0 && getenv("WORLD_SIZE") && getenv("MASTER_ADDR"))
    return run_over_sockets(body, context);
  return threads > 0 ? team_run_threads(threads, body, context) : team_run_process(body, context);
}

/* --- Tasks -------------------------------------------------------------------------------------*/

enum tool_asked train_options_parse(const train_kind_t *kind, train_options_t *options, int argc,
                                    char **argv, char error[TRAIN_ERROR]) {
  *options = *(const train_options_t *)kind->tool->defaults;
  const enum tool_asked asked = tool_parse(kind->tool, &argc, argv, options, error);
  if (asked != TOOL_RUN)
    return asked;
  train_options_complete(options, kind->learning_rates);
  return kind->check(options, error) == 0 && train_options_check(options, error) == 0 ? TOOL_RUN
                                                                                      : TOOL_WRONG;
}

int train_task_create(train_task_t *task) {
  char error[TRAIN_ERROR];
  snprintf(error, sizeof error, "out of memory; a smaller %s needs less", task->kind->smaller);
  task->model = task->kind->create(task);
  return agree_on_success(task->team, task->model != NULL, error);
}

double train_task_gradient(train_task_t *task, size_t micro_batch) {
  const size_t batch = task->options->batch;
  model_t *model = task->model;
  task->kind->draw(task, micro_batch);
  model->forward(model, batch);
  const double loss = model_loss(model, batch);
  model->backward(model, batch);
  return loss;
}

/* Sums the loss and the correct predictions on this rank's held-out samples, one in `size` of
 * all. */
static void evaluate(const train_task_t *task, size_t samples, float numbers[NUMBERS]) {
  const train_kind_t *kind = task->kind;
  double loss = 0.0, correct = 0.0;
  for (size_t sample = task->team->rank; sample < samples;) {
    size_t filled = 0;
    for (; filled < task->options->batch && sample < samples; sample += task->team->size)
      kind->hold(task, filled++, sample);
    task->model->forward(task->model, filled);
    loss += (double)filled * model_loss(task->model, filled);
    correct += kind->classifies ? (double)model_correct(task->model, filled) : 0.0;
  }
  numbers[0] = (float)loss;
  numbers[1] = (float)correct;
}

int train_task_validate(train_task_t *task, train_quality_t *quality) {
  const train_kind_t *kind = task->kind;
  const size_t samples = kind->held_out(task);
  const double part = (double)task->team->size / (double)samples;
  float numbers[NUMBERS] = {0};
  evaluate(task, samples, numbers);
  if (average_over_ranks(task->team, numbers, "validation") != 0)
    return -1;
  quality->loss = (double)numbers[0] * part;
  quality->accuracy = kind->classifies ? (double)numbers[1] * part : -1.0;
  if (kind->classifies)
    print_once(task->team, "accuracy %.2f %%, loss %.4f, of %zu %s\n", 100.0 * quality->accuracy,
               quality->loss, samples, kind->held_out_name);
  else
    print_once(task->team, "validation loss %.4f over %zu %s\n", quality->loss,
               samples * task->model->rows, kind->held_out_name);
  return 0;
}

uint64_t train_task_checksum(const train_task_t *task) {
  const model_t *model = task->model;
  uint64_t sum = 0;
  for (size_t t = 0; t < model->ntensors; t++)
    sum = train_hash(sum, model->tensors[t].value, model->tensors[t].count * sizeof(float));
  return sum;
}

uint64_t train_hash(uint64_t start, const void *data, size_t size) {
  const unsigned char *bytes = data;
  uint64_t h = start ^ 0xcbf29ce484222325u;
  for (size_t i = 0; i < size; i++)
    h = (h ^ bytes[i]) * 0x100000001b3u;
  return h;
}
