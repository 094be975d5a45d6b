/* The tasks of support_tasks.h. */
#include "tests/support_tasks.h"

#include "tests/support.h"

enum { WIDTH = 16, DRAWS = 8, CHECK_EVERY = 10 };

struct task task_of(enum task_kind kind) {
  static const struct task tasks[TASK_KINDS] = {
      [TASK_EMBEDDING] = {TASK_EMBEDDING, "embedding", 1000 * WIDTH, 1200, 1e-2f},
      [TASK_SCALES] = {TASK_SCALES, "scales", 4096, 800, 5e-3f},
      [TASK_QUIET] = {TASK_QUIET, "quiet", 4096, 800, 5e-3f},
      [TASK_ZEROS_FIRST] = {TASK_ZEROS_FIRST, "zeros first", 1024, 2000, 5e-3f},
      [TASK_ZEROS_LATER] = {TASK_ZEROS_LATER, "zeros later", 1024, 2000, 5e-3f},
      [TASK_IDLE] = {TASK_IDLE, "idle", 4096, 800, 5e-3f},
  };
  return tasks[kind];
}

/* A number for element i of a rank in a step, with mean 0 and variance 1. */
static float noise(size_t i, int rank, int step) {
  uint64_t place = 3 * (i + ((uint64_t)step * TASK_RANKS + (uint64_t)rank) * 1000003);
  return uniform_value(place) + uniform_value(place + 1) + uniform_value(place + 2);
}

static float target(const struct task *task, size_t i) {
  return task->kind == TASK_EMBEDDING ? 0.5f * uniform_value(77000000 + i) : 0.5f;
}

void task_start(const struct task *task, float *parameters) {
  float size = task->kind == TASK_EMBEDDING ? 0.1f : 1.0f;
  for (size_t i = 0; i < task->count; i++)
    parameters[i] = size * noise(i, 0, 1000000);
}

float task_rate(const struct task *task, int step) {
  float done = (float)(step + 1) / (float)task->steps;
  return task->rate * fminf(1.0f, 20.0f * done) * (1.0f - 0.9f * done);
}

/* The factor of the gradient of element i. */
static float scale_of(const struct task *task, size_t i, int step) {
  int quarter = task->steps / 4;
  switch (task->kind) {
  case TASK_SCALES:
    return powf(10.0f, 3.0f * uniform_value(88000000 + i));
  case TASK_QUIET:
    return i % 50 == 0 && step < quarter ? 1e-3f : 1.0f;
  case TASK_ZEROS_FIRST:
    return step < 2 * quarter ? 0.0f : 1.0f;
  case TASK_ZEROS_LATER:
    return step >= quarter && step < 3 * quarter ? 0.0f : 1.0f;
  default:
    return 1.0f;
  }
}

/* The gradients of the rows that are drawn, one after the other: a row may be drawn twice. */
static void draw_rows(const struct task *task, const float *parameters, int rank, int step,
                      float *gradient) {
  size_t rows = task->count / WIDTH;
  for (size_t d = 0; d < DRAWS; d++) {
    size_t draw = (size_t)(step * TASK_RANKS + rank) * DRAWS + d;
    double place = 0.5 + 0.5 * (double)uniform_value(99000000 + draw);
    size_t row = (size_t)(pow((double)rows, place) - 1.0);
    for (size_t i = row * WIDTH; i < (row + 1) * WIDTH; i++)
      gradient[i] += parameters[i] - target(task, i) + 0.1f * noise(i, (int)d, step * 64 + rank);
  }
}

bool task_gradient(const struct task *task, const float *parameters, int rank, int step,
                   float *gradient) {
  memset(gradient, 0, task->count * sizeof *gradient);
  if (task->kind == TASK_IDLE && rank == 1)
    return false;
  if (task->kind == TASK_EMBEDDING) {
    draw_rows(task, parameters, rank, step, gradient);
    return true;
  }
  for (size_t i = 0; i < task->count; i++)
    gradient[i] =
        scale_of(task, i, step) * (parameters[i] - target(task, i) + noise(i, rank, step));
  return true;
}

double task_distance(const struct task *task, const float *parameters) {
  double sum = 0.0;
  for (size_t i = 0; i < task->count; i++) {
    double distance = (double)parameters[i] - (double)target(task, i);
    sum += distance * distance;
  }
  return sqrt(sum / (double)task->count);
}

double task_start_distance(const struct task *task) {
  float *parameters = allocate(task->count, sizeof *parameters);
  task_start(task, parameters);
  double distance = task_distance(task, parameters);
  free(parameters);
  return distance;
}

/* --- Runs */

struct run {
  const struct task *task;
  task_create *create;
  const void *options;
  struct task_end ends[TASK_RANKS];
};

/* A distance that is no number is larger than any. */
static double larger(double one, double other) { return one >= other ? one : other; }

static void look(const struct run *run, onebit_optimizer_t optimizer, const float *parameters,
                 int step, struct task_end *end) {
  end->distance = task_distance(run->task, parameters);
  end->largest = larger(end->largest, end->distance);
  if (end->warned < 0 && onebit_optimizer_check(optimizer, NULL) == ONEBIT_WARNING) {
    end->warned = step;
    end->distance_warned = end->distance;
  }
}

static void run_rank(onebit_comm_t comm, void *context) {
  struct run *run = context;
  const struct task *task = run->task;
  int rank = onebit_comm_rank(comm);
  struct task_end *end = &run->ends[rank];
  float *parameters = allocate(task->count, sizeof(float));
  float *gradient = allocate(task->count, sizeof(float));
  onebit_tensor_t tensor = {parameters, gradient, task->count, 0, 0, 0};
  onebit_optimizer_t optimizer;
  task_start(task, parameters);
  *end = (struct task_end){.warned = -1};
  if (CHECK_STATUS(run->create(comm, &tensor, run->options, &optimizer), ONEBIT_OK)) {
    for (int step = 0; step < task->steps; step++) {
      bool any = task_gradient(task, parameters, rank, step, gradient);
      CHECK_STATUS(onebit_optimizer_set_gradient(optimizer, 0, any ? gradient : NULL), ONEBIT_OK);
      onebit_status_t status = onebit_optimizer_step(optimizer, task_rate(task, step));
      if (status == ONEBIT_SKIPPED) /* a gradient has grown beyond all numbers */
        end->skipped++;
      else
        CHECK_STATUS(status, ONEBIT_OK);
      if (step % CHECK_EVERY == CHECK_EVERY - 1 || step == task->steps - 1)
        look(run, optimizer, parameters, step, end);
    }
    onebit_optimizer_destroy(optimizer);
  }
  free(parameters);
  free(gradient);
}

struct task_end task_run(const struct task *task, task_create *create, const void *options) {
  struct run run = {.task = task, .create = create, .options = options};
  on_ranks(TASK_RANKS, run_rank, &run);
  struct task_end end = run.ends[0];
  for (int r = 1; r < TASK_RANKS; r++) {
    end.distance = larger(run.ends[r].distance, end.distance);
    end.largest = larger(run.ends[r].largest, end.largest);
    if (run.ends[r].warned >= 0 && (end.warned < 0 || run.ends[r].warned < end.warned)) {
      end.warned = run.ends[r].warned;
      end.distance_warned = run.ends[r].distance_warned;
    }
  }
  return end;
}
