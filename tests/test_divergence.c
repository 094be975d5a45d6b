/*
 * Tests that no compressed optimizer diverges where dense training converges. In the tasks, a
 * frozen variance is far too small for some elements. Where one bit per element is too little
 * (gradients of six orders of magnitude share one scale), parameters must stay about where they
 * were.
 *
 * Each task is a sum of squares. Its rows are drawn or scaled so that a frozen variance, or one
 * scale for a block, is wrong for some elements. Dense Adam comes close to the optimum in all
 * tasks. The tasks are the same on every machine.
 */
#include "tests/support.h"
#include "tests/support_optimizers.h"

enum task_kind {
  TASK_EMBEDDING,   /* rows of a table are drawn by Zipf's law: most rows seldom have a gradient */
  TASK_SCALES,      /* gradients of one tensor differ by six orders of magnitude */
  TASK_QUIET,       /* 2 % of the elements have almost no gradient in the first quarter */
  TASK_ZEROS_FIRST, /* no rank has a gradient in the first half of the steps */
  TASK_ZEROS_LATER, /* no rank has a gradient in the second and third quarters */
  TASK_IDLE,        /* one rank never has a gradient */
  TASK_KINDS
};

enum { TASK_RANKS = 4 };

struct task {
  enum task_kind kind;
  const char *name;
  size_t count; /* parameters, in one tensor */
  int steps;
  float rate; /* the highest learning rate */
};

/* The results of a run. */
struct task_end {
  double distance;        /* the largest final distance of any rank from the optimum */
  double largest;         /* the largest distance of any rank over all steps */
  int skipped;            /* number of skipped steps */
  int warned;             /* the step after which onebit_optimizer_check first warned; -1: never */
  double distance_warned; /* the distance at that step */
};

enum { WIDTH = 16, DRAWS = 8, CHECK_EVERY = 10 };

/* Returns the task of that kind, in its usual size. */
static struct task make_task(enum task_kind kind) {
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

/* Returns a random number for element i of a rank in a step, with mean 0 and variance 1. */
static float noise_value(size_t i, int rank, int step) {
  uint64_t place = 3 * (i + ((uint64_t)step * TASK_RANKS + (uint64_t)rank) * 1000003);
  return uniform_value(place) + uniform_value(place + 1) + uniform_value(place + 2);
}

static float target_value(const struct task *task, size_t i) {
  return task->kind == TASK_EMBEDDING ? 0.5f * uniform_value(77000000 + i) : 0.5f;
}

/* Writes the initial parameters. */
static void task_start(const struct task *task, float *parameters) {
  float size = task->kind == TASK_EMBEDDING ? 0.1f : 1.0f;
  for (size_t i = 0; i < task->count; i++)
    parameters[i] = size * noise_value(i, 0, 1000000);
}

/* Returns the learning rate of a step; the first step is 0. The rate rises for a twentieth of the
 * steps, and then falls linearly to a tenth. */
static float task_rate(const struct task *task, int step) {
  float done = (float)(step + 1) / (float)task->steps;
  return task->rate * fminf(1.0f, 20.0f * done) * (1.0f - 0.9f * done);
}

/* Returns the factor by which the task multiplies the gradient of element i. */
static float gradient_scale(const struct task *task, size_t i, int step) {
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

/* Adds the gradients of drawn rows. A row may be drawn twice. */
static void add_gradients_of_drawn_rows(const struct task *task, const float *parameters, int rank,
                                        int step, float *gradient) {
  size_t rows = task->count / WIDTH;
  for (size_t d = 0; d < DRAWS; d++) {
    size_t draw = (size_t)(step * TASK_RANKS + rank) * DRAWS + d;
    double place = 0.5 + 0.5 * (double)uniform_value(99000000 + draw);
    size_t row = (size_t)(pow((double)rows, place) - 1.0);
    for (size_t i = row * WIDTH; i < (row + 1) * WIDTH; i++)
      gradient[i] +=
          parameters[i] - target_value(task, i) + 0.1f * noise_value(i, (int)d, step * 64 + rank);
  }
}

/* Writes the gradient of a rank in a step at these parameters. If the rank has no gradient, writes
 * zeros and returns false, and the optimizer gets NULL. */
static bool task_gradient(const struct task *task, const float *parameters, int rank, int step,
                          float *gradient) {
  memset(gradient, 0, task->count * sizeof *gradient);
  if (task->kind == TASK_IDLE && rank == 1)
    return false;
  if (task->kind == TASK_EMBEDDING) {
    add_gradients_of_drawn_rows(task, parameters, rank, step, gradient);
    return true;
  }
  for (size_t i = 0; i < task->count; i++)
    gradient[i] = gradient_scale(task, i, step) *
                  (parameters[i] - target_value(task, i) + noise_value(i, rank, step));
  return true;
}

/* Returns the root mean square of the distance from the optimum. It is NaN if a parameter is
 * NaN. */
static double task_distance(const struct task *task, const float *parameters) {
  double sum = 0.0;
  for (size_t i = 0; i < task->count; i++) {
    double distance = (double)parameters[i] - (double)target_value(task, i);
    sum += distance * distance;
  }
  return sqrt(sum / (double)task->count);
}

/* Returns the distance of the initial parameters from the optimum. */
static double task_start_distance(const struct task *task) {
  float *parameters = allocate(task->count, sizeof *parameters);
  task_start(task, parameters);
  double distance = task_distance(task, parameters);
  free(parameters);
  return distance;
}

/* --- Runs */

enum form { DENSE, COMPRESSED };

struct run {
  const struct task *task;
  struct any_case what;
  enum form form;
  struct task_end ends[TASK_RANKS];
};

static onebit_status_t create_optimizer(onebit_comm_t comm, const onebit_tensor_t *tensor,
                                        const struct run *run, onebit_optimizer_t *optimizer) {
  struct any_options options = any_options_of(run->what.method, run->what.options);
  const size_t steps = (size_t)run->task->steps;
  any_count(&options, "freeze_step", run->form == DENSE ? ONEBIT_FREEZE_NEVER : steps / 5);
  any_count(&options, "variance_freeze_step", steps / 2);
  any_count(&options, "variance_update_scaler", steps / 100);
  any_count(&options, "local_step_scaler", steps / 10);
  return any_create(&options, comm, tensor, 1, optimizer);
}

/* Returns the larger distance; NaN is larger than any number. */
static double larger_distance(double one, double other) { return one >= other ? one : other; }

static void record_state(const struct run *run, onebit_optimizer_t optimizer,
                         const float *parameters, int step, struct task_end *end) {
  end->distance = task_distance(run->task, parameters);
  end->largest = larger_distance(end->largest, end->distance);
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
  if (CHECK_STATUS(create_optimizer(comm, &tensor, run, &optimizer), ONEBIT_OK)) {
    for (int step = 0; step < task->steps; step++) {
      bool any = task_gradient(task, parameters, rank, step, gradient);
      CHECK_STATUS(onebit_optimizer_set_gradient(optimizer, 0, any ? gradient : NULL), ONEBIT_OK);
      onebit_status_t status = onebit_optimizer_step(optimizer, task_rate(task, step));
      if (status == ONEBIT_SKIPPED) /* a gradient has become infinite */
        end->skipped++;
      else
        CHECK_STATUS(status, ONEBIT_OK);
      if (step % CHECK_EVERY == CHECK_EVERY - 1 || step == task->steps - 1)
        record_state(run, optimizer, parameters, step, end);
    }
    onebit_optimizer_destroy(optimizer);
  }
  free(parameters);
  free(gradient);
}

/* Runs the task on TASK_RANKS ranks, which are threads of this process. */
static struct task_end task_run(const struct task *task, struct any_case what, enum form form) {
  struct run run = {.task = task, .what = what, .form = form};
  on_ranks(TASK_RANKS, run_rank, &run);
  struct task_end end = run.ends[0];
  for (int r = 1; r < TASK_RANKS; r++) {
    end.distance = larger_distance(run.ends[r].distance, end.distance);
    end.largest = larger_distance(run.ends[r].largest, end.largest);
    if (run.ends[r].warned >= 0 && (end.warned < 0 || run.ends[r].warned < end.warned)) {
      end.warned = run.ends[r].warned;
      end.distance_warned = run.ends[r].distance_warned;
    }
  }
  return end;
}

/* --- Optimizers --------------------------------------------------------------------------------*/

static const struct any_case efficient_adam = {ANY(efficient_adam, .gain = 0)},
                             adam = {ANY(adam, .beta2 = 0)},
                             adam_step = {ANY(adam, .exchange = ONEBIT_ADAM_EXCHANGE_STEP)},
                             adam_shards = {ANY(adam, .shards = ONEBIT_SHARDS_STEP)},
                             late_adam = {ANY(adam, .beta2 = 0.99)}, lamb = {ANY(lamb, .beta2 = 0)},
                             zero_one_adam = {ANY(zero_one_adam, .local_step_clipper = 4)},
                             lion = {ANY(lion, .beta2 = 0)};

/* A limit for each task: the largest distance from the optimum at which a run may end, relative to
 * its initial distance. A limit below 1 means that the run must make progress. With limit 0 the
 * task is not run. */
typedef double limits[TASK_KINDS];

/* The limit for runs that never move, because the variance was frozen before the first gradient,
 * and one bit cannot represent zero (onebit/adam.h, onebit/zero_one_adam.h). Adam without shards
 * delays the freeze instead. */
#define STAYS 1

static void check_limits(struct any_case what, const limits most) {
  for (int kind = 0; kind < TASK_KINDS; kind++) {
    if (most[kind] == 0)
      continue;
    struct task task = make_task((enum task_kind)kind);
    double start = task_start_distance(&task);
    struct task_end end = task_run(&task, what, COMPRESSED);
    cr_log_info("%s: from %.3g to %.3g", task.name, start, end.distance);
    cr_expect_eq(end.skipped, 0, "%s: %d steps were skipped", task.name, end.skipped);
    cr_expect_leq(end.largest, 1.1 * start, "%s: runs away, to %g", task.name, end.largest);
    cr_expect_leq(end.distance, most[kind] * start, "%s: ends at %g of %g", task.name, end.distance,
                  start);
    cr_expect(most[kind] < STAYS || end.distance == start, "%s: moves, to %g of %g", task.name,
              end.distance, start);
  }
}

/* Dense Adam and LAMB must solve the tasks with these learning rates. */
Test(divergence, dense_forms_converge) {
  const struct any_case subjects[] = {adam, lamb};
  for (size_t s = 0; s < 2; s++)
    for (int kind = 0; kind < TASK_KINDS; kind++) {
      struct task task = make_task((enum task_kind)kind);
      double start = task_start_distance(&task), end = task_run(&task, subjects[s], DENSE).distance;
      cr_expect_leq(end, 0.3 * start, "%s: ends at %g of %g", task.name, end, start);
    }
}

/* Defines a test that an optimizer stays within its limits, which are listed in the order of the
 * tasks. */
#define HOLDS(name, what, ...)                                                                     \
  Test(divergence, name) { check_limits(what, (const limits){__VA_ARGS__}); }

/* Efficient-Adam must come as close to the optimum as dense Adam. */
HOLDS(efficient_adam_converges, efficient_adam, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3)

HOLDS(one_bit_adam_stays, adam, 0.55, 0.7, 0.35, 0.1, 0.3, 0.35)
HOLDS(exchanging_steps_stays, adam_step, 0.75, 0.35, 0.65, 0.1, 0.3, 0.35)
HOLDS(shards_stay, adam_shards, 0.55, 0.7, 0.35, STAYS, 0.3, 0.35)
HOLDS(one_bit_lamb_stays, lamb, 0.6, 0.65, 0.25, 0.5, 0.2, 0.25)
HOLDS(zero_one_adam_stays, zero_one_adam, 0.8, 0.95, 0.4, STAYS, 0.3, 0.4)

/* Lion continues to move after the last gradient, because it follows the sign of the remaining
 * momentum. Uncompressed Lion does the same. */
HOLDS(lion_converges, lion, 0.55, 0.3, 0.3, 0.3, 0, 0.4)

/* If a run ends far from the result of dense training, onebit_optimizer_check must warn soon after
 * the freeze. */
Test(divergence, is_warned_of) {
  const struct {
    enum task_kind kind;
    struct any_case what;
  } warned[] = {{TASK_SCALES, adam}, {TASK_SCALES, lamb}, {TASK_QUIET, adam_step}};
  for (size_t k = 0; k < sizeof warned / sizeof warned[0]; k++) {
    struct task task = make_task(warned[k].kind);
    struct task_end end = task_run(&task, warned[k].what, COMPRESSED);
    cr_expect(end.warned >= 0 && end.warned < task.steps / 3, "%s: the first warning is after %d",
              task.name, end.warned);
  }
}

/* The freeze is set for step 400. It waits for gradients, which begin at step 1,000, and comes 1 /
 * (1 - beta2) steps after the first gradient. */
Test(divergence, a_freeze_that_waits_is_warned_of) {
  struct task task = make_task(TASK_ZEROS_FIRST);
  struct task_end end = task_run(&task, late_adam, COMPRESSED);
  cr_expect(end.warned >= 499 && end.warned < 520, "the first warning is after step %d",
            end.warned);
}
