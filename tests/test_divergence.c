/*
 * No optimizer runs away where its dense form converges: on tasks whose variance, once it is
 * frozen, is far too small for some elements. What an optimizer cannot do there with one bit an
 * element (gradients of six orders of magnitude under one scale) it leaves about where it was.
 */
#include "tests/support.h"
#include "tests/support_optimizers.h"
#include "tests/support_tasks.h"

enum form { DENSE, COMPRESSED };

struct choice {
  struct any_case what;
  enum form form;
  size_t steps; /* of the task */
};

static const struct any_case efficient_adam = {ANY(efficient_adam, .gain = 0)},
                             adam = {ANY(adam, .beta2 = 0)},
                             adam_step = {ANY(adam, .exchange = ONEBIT_ADAM_EXCHANGE_STEP)},
                             adam_shards = {ANY(adam, .shards = ONEBIT_SHARDS_STEP)},
                             late_adam = {ANY(adam, .beta2 = 0.99)}, lamb = {ANY(lamb, .beta2 = 0)},
                             zero_one_adam = {ANY(zero_one_adam, .local_step_clipper = 4)},
                             lion = {ANY(lion, .beta2 = 0)};

static onebit_status_t create(onebit_comm_t comm, const onebit_tensor_t *tensor,
                              const void *context, onebit_optimizer_t *optimizer) {
  const struct choice *choice = context;
  struct any_options options = any_options_of(choice->what.method, choice->what.options);
  any_count(&options, "freeze_step",
            choice->form == DENSE ? ONEBIT_FREEZE_NEVER : choice->steps / 5);
  any_count(&options, "variance_freeze_step", choice->steps / 2);
  any_count(&options, "variance_update_scaler", choice->steps / 100);
  any_count(&options, "local_step_scaler", choice->steps / 10);
  return any_create(&options, comm, tensor, 1, optimizer);
}

/* The largest distance from the optimum at which a run may end, relative to its start, less than 1
 * for a run that moves at all; 0: is not tried. */
typedef double limits[TASK_KINDS];

/* It does not move: the variance was frozen before the first gradient came, and one bit has no zero
 * (onebit/adam.h, onebit/zero_one_adam.h). Adam that is not sharded waits with the freeze. */
#define STAYS 1

static void hold(struct any_case what, const limits most) {
  for (int kind = 0; kind < TASK_KINDS; kind++) {
    if (most[kind] == 0)
      continue;
    struct task task = task_of((enum task_kind)kind);
    struct choice choice = {what, COMPRESSED, (size_t)task.steps};
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
  const struct any_case subjects[] = {adam, lamb};
  for (size_t s = 0; s < 2; s++)
    for (int kind = 0; kind < TASK_KINDS; kind++) {
      struct task task = task_of((enum task_kind)kind);
      struct choice choice = {subjects[s], DENSE, (size_t)task.steps};
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
  hold(efficient_adam, most);
}

Test(divergence, one_bit_adam_stays) {
  static const limits most = {
      [TASK_EMBEDDING] = 0.55,  [TASK_SCALES] = 0.7,      [TASK_QUIET] = 0.35,
      [TASK_ZEROS_FIRST] = 0.1, [TASK_ZEROS_LATER] = 0.3, [TASK_IDLE] = 0.35,
  };
  hold(adam, most);
}

Test(divergence, exchanging_steps_stays) {
  static const limits most = {
      [TASK_EMBEDDING] = 0.75,  [TASK_SCALES] = 0.35,     [TASK_QUIET] = 0.65,
      [TASK_ZEROS_FIRST] = 0.1, [TASK_ZEROS_LATER] = 0.3, [TASK_IDLE] = 0.35,
  };
  hold(adam_step, most);
}

Test(divergence, shards_stay) {
  static const limits most = {
      [TASK_EMBEDDING] = 0.55,    [TASK_SCALES] = 0.7,      [TASK_QUIET] = 0.35,
      [TASK_ZEROS_FIRST] = STAYS, [TASK_ZEROS_LATER] = 0.3, [TASK_IDLE] = 0.35,
  };
  hold(adam_shards, most);
}

Test(divergence, one_bit_lamb_stays) {
  static const limits most = {
      [TASK_EMBEDDING] = 0.6,   [TASK_SCALES] = 0.65,     [TASK_QUIET] = 0.25,
      [TASK_ZEROS_FIRST] = 0.5, [TASK_ZEROS_LATER] = 0.2, [TASK_IDLE] = 0.25,
  };
  hold(lamb, most);
}

Test(divergence, zero_one_adam_stays) {
  static const limits most = {
      [TASK_EMBEDDING] = 0.8,     [TASK_SCALES] = 0.95,     [TASK_QUIET] = 0.4,
      [TASK_ZEROS_FIRST] = STAYS, [TASK_ZEROS_LATER] = 0.3, [TASK_IDLE] = 0.4,
  };
  hold(zero_one_adam, most);
}

/* But where nobody has a gradient any more: the sign of what is left of the momentum stays, and
 * Lion goes on by it, also without compression. */
Test(divergence, lion_converges) {
  static const limits most = {
      [TASK_EMBEDDING] = 0.55,  [TASK_SCALES] = 0.3, [TASK_QUIET] = 0.3,
      [TASK_ZEROS_FIRST] = 0.3, [TASK_IDLE] = 0.4,
  };
  hold(lion, most);
}

/* A run that ends far from the dense form's end is warned of soon after the freeze. */
Test(divergence, is_warned_of) {
  const struct {
    enum task_kind kind;
    struct any_case what;
  } warned[] = {{TASK_SCALES, adam}, {TASK_SCALES, lamb}, {TASK_QUIET, adam_step}};
  for (size_t k = 0; k < sizeof warned / sizeof warned[0]; k++) {
    struct task task = task_of(warned[k].kind);
    struct choice choice = {warned[k].what, COMPRESSED, (size_t)task.steps};
    struct task_end end = task_run(&task, create, &choice);
    cr_expect(end.warned >= 0 && end.warned < task.steps / 3, "%s: the first warning is after %d",
              task.name, end.warned);
  }
}

/* The freeze is due at 400 and waits for gradients that begin at 1,000: 1 / (1 - beta2) later. */
Test(divergence, a_freeze_that_waits_is_warned_of) {
  struct task task = task_of(TASK_ZEROS_FIRST);
  struct choice choice = {late_adam, COMPRESSED, (size_t)task.steps};
  struct task_end end = task_run(&task, create, &choice);
  cr_expect(end.warned >= 499 && end.warned < 520, "the first warning is after step %d",
            end.warned);
}
