/*
 * No optimizer runs away where its dense form converges: on tasks whose variance, once it is
 * frozen, is far too small for some elements. What an optimizer cannot do there with one bit an
 * element (gradients of six orders of magnitude under one scale) it leaves about where it was.
 */
#include "tests/support.h"
#include "tests/support_tasks.h"

enum form { DENSE, COMPRESSED };
enum subject { EFFICIENT_ADAM, ADAM, ADAM_STEP, ADAM_SHARDS, LAMB, ZERO_ONE_ADAM, LION };

struct choice {
  enum subject subject;
  enum form form;
  size_t steps; /* of the task */
  double beta2; /* 0: the default */
};

static onebit_status_t create_adam(onebit_comm_t comm, const onebit_tensor_t *tensor,
                                   const struct choice *choice, onebit_optimizer_t *optimizer) {
  onebit_adam_options_t options = ONEBIT_ADAM_OPTIONS_INIT;
  options.freeze_step = choice->form == DENSE ? ONEBIT_FREEZE_NEVER : choice->steps / 5;
  options.beta2 = choice->beta2;
  if (choice->subject == ADAM_STEP)
    options.exchange = ONEBIT_ADAM_EXCHANGE_STEP;
  if (choice->subject == ADAM_SHARDS)
    options.shards = ONEBIT_SHARDS_STEP;
  return onebit_adam_create(comm, tensor, 1, &options, optimizer);
}

static onebit_status_t create_lamb(onebit_comm_t comm, const onebit_tensor_t *tensor,
                                   const struct choice *choice, onebit_optimizer_t *optimizer) {
  onebit_lamb_options_t options = ONEBIT_LAMB_OPTIONS_INIT;
  options.freeze_step = choice->form == DENSE ? ONEBIT_FREEZE_NEVER : choice->steps / 5;
  return onebit_lamb_create(comm, tensor, 1, &options, optimizer);
}

static onebit_status_t create(onebit_comm_t comm, const onebit_tensor_t *tensor,
                              const void *options, onebit_optimizer_t *optimizer) {
  const struct choice *choice = options;
  if (choice->subject == EFFICIENT_ADAM)
    return onebit_efficient_adam_create(comm, tensor, 1, NULL, optimizer);
  if (choice->subject == LION)
    return onebit_lion_create(comm, tensor, 1, NULL, optimizer);
  if (choice->subject == LAMB)
    return create_lamb(comm, tensor, choice, optimizer);
  if (choice->subject != ZERO_ONE_ADAM || choice->form == DENSE)
    return create_adam(comm, tensor, choice, optimizer);
  onebit_zero_one_adam_options_t adam = ONEBIT_ZERO_ONE_ADAM_OPTIONS_INIT;
  adam.variance_freeze_step = choice->steps / 2;
  adam.variance_update_scaler = choice->steps / 100;
  adam.local_step_scaler = choice->steps / 10;
  adam.local_step_clipper = 4;
  return onebit_zero_one_adam_create(comm, tensor, 1, &adam, optimizer);
}

/* The largest distance from the optimum at which a run may end, relative to its start, less than 1
 * for a run that moves at all; 0: is not tried. */
typedef double limits[TASK_KINDS];

/* It does not move: the variance was frozen before the first gradient came, and one bit has no zero
 * (onebit/adam.h, onebit/zero_one_adam.h). Adam that is not sharded waits with the freeze. */
#define STAYS 1

static void hold(enum subject subject, const limits most) {
  for (int kind = 0; kind < TASK_KINDS; kind++) {
    if (most[kind] == 0)
      continue;
    struct task task = task_of((enum task_kind)kind);
    struct choice choice = {.subject = subject, .form = COMPRESSED, .steps = (size_t)task.steps};
    double start = task_start_distance(&task);
    struct task_end end = task_run(&task, create, &choice);
    cr_log_info("%s: from %.3g to %.3g", task.name, start, end.distance);
    cr_expect_eq(end.skipped, 0, "%s: %d steps were skipped", task.name, end.skipped);
    cr_expect_leq(end.largest, 1.1 * start, "%s: runs away, to %g", task.name, end.largest);
    cr_expect_leq(end.distance, most[kind] * start, "%s: ends at %g of %g", task.name, end.distance,
                  start);
    cr_expect(most[kind] < STAYS || end.distance == start, "%s: moves, to %g of %g", task.name,
              end.distance, start);
  }
}

/* That the tasks can be done at all, with the rates that they have. */
Test(divergence, dense_forms_converge) {
  static const enum subject subjects[] = {ADAM, LAMB};
  for (size_t s = 0; s < 2; s++)
    for (int kind = 0; kind < TASK_KINDS; kind++) {
      struct task task = task_of((enum task_kind)kind);
      struct choice choice = {subjects[s], DENSE, (size_t)task.steps, 0};
      double start = task_start_distance(&task), end = task_run(&task, create, &choice).distance;
      cr_expect_leq(end, 0.3 * start, "%s: ends at %g of %g", task.name, end, start);
    }
}

/* It comes as close as dense Adam, or closer. */
Test(divergence, efficient_adam_converges) {
  static const limits most = {
      [TASK_EMBEDDING] = 0.3,   [TASK_SCALES] = 0.3,      [TASK_QUIET] = 0.3,
      [TASK_ZEROS_FIRST] = 0.3, [TASK_ZEROS_LATER] = 0.3, [TASK_IDLE] = 0.3,
  };
  hold(EFFICIENT_ADAM, most);
}

Test(divergence, one_bit_adam_stays) {
  static const limits most = {
      [TASK_EMBEDDING] = 0.55,  [TASK_SCALES] = 0.7,      [TASK_QUIET] = 0.35,
      [TASK_ZEROS_FIRST] = 0.1, [TASK_ZEROS_LATER] = 0.3, [TASK_IDLE] = 0.35,
  };
  hold(ADAM, most);
}

Test(divergence, exchanging_steps_stays) {
  static const limits most = {
      [TASK_EMBEDDING] = 0.75,  [TASK_SCALES] = 0.35,     [TASK_QUIET] = 0.65,
      [TASK_ZEROS_FIRST] = 0.1, [TASK_ZEROS_LATER] = 0.3, [TASK_IDLE] = 0.35,
  };
  hold(ADAM_STEP, most);
}

Test(divergence, shards_stay) {
  static const limits most = {
      [TASK_EMBEDDING] = 0.55,    [TASK_SCALES] = 0.7,      [TASK_QUIET] = 0.35,
      [TASK_ZEROS_FIRST] = STAYS, [TASK_ZEROS_LATER] = 0.3, [TASK_IDLE] = 0.35,
  };
  hold(ADAM_SHARDS, most);
}

Test(divergence, one_bit_lamb_stays) {
  static const limits most = {
      [TASK_EMBEDDING] = 0.6,   [TASK_SCALES] = 0.65,     [TASK_QUIET] = 0.25,
      [TASK_ZEROS_FIRST] = 0.5, [TASK_ZEROS_LATER] = 0.2, [TASK_IDLE] = 0.25,
  };
  hold(LAMB, most);
}

Test(divergence, zero_one_adam_stays) {
  static const limits most = {
      [TASK_EMBEDDING] = 0.8,     [TASK_SCALES] = 0.95,     [TASK_QUIET] = 0.4,
      [TASK_ZEROS_FIRST] = STAYS, [TASK_ZEROS_LATER] = 0.3, [TASK_IDLE] = 0.4,
  };
  hold(ZERO_ONE_ADAM, most);
}

/* But where nobody has a gradient any more: the sign of what is left of the momentum stays, and
 * Lion goes on by it, also without compression. */
Test(divergence, lion_converges) {
  static const limits most = {
      [TASK_EMBEDDING] = 0.55,  [TASK_SCALES] = 0.3, [TASK_QUIET] = 0.3,
      [TASK_ZEROS_FIRST] = 0.3, [TASK_IDLE] = 0.4,
  };
  hold(LION, most);
}

/* A run that ends far from the dense form's end is warned of soon after the freeze. */
Test(divergence, is_warned_of) {
  static const struct {
    enum task_kind kind;
    enum subject subject;
  } warned[] = {{TASK_SCALES, ADAM}, {TASK_SCALES, LAMB}, {TASK_QUIET, ADAM_STEP}};
  for (size_t k = 0; k < sizeof warned / sizeof warned[0]; k++) {
    struct task task = task_of(warned[k].kind);
    struct choice choice = {warned[k].subject, COMPRESSED, (size_t)task.steps, 0};
    struct task_end end = task_run(&task, create, &choice);
    cr_expect(end.warned >= 0 && end.warned < task.steps / 3, "%s: the first warning is after %d",
              task.name, end.warned);
  }
}

/* The freeze is due at 400 and waits for gradients that begin at 1,000: 1 / (1 - beta2) later. */
Test(divergence, a_freeze_that_waits_is_warned_of) {
  struct task task = task_of(TASK_ZEROS_FIRST);
  struct choice choice = {ADAM, COMPRESSED, (size_t)task.steps, 0.99};
  struct task_end end = task_run(&task, create, &choice);
  cr_expect(end.warned >= 499 && end.warned < 520, "the first warning is after step %d",
            end.warned);
}
