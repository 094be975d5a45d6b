/*
 * The loss goes on without a jump when other ranks go on with what some ranks saved: it stays close
 * to that of the run that was not interrupted. A control that begins anew with the saved parameters
 * leaves it.
 */
#include "tests/support_checkpoint.h"

/* A sum of squares: sample s wants w_i to be target(s, i), with a weight. Ranks share the samples
 * evenly, so the mean of their gradients does not depend on how many they are. */
enum { UNKNOWNS = 600, SAMPLES = 24, SAVED_AT = 70, END = 130 };

static float weight(size_t i) { return 0.55f + 0.45f * uniform_value(i); }
static float target(int sample, size_t i) {
  return uniform_value(10000 + i) + 0.3f * uniform_value(20000 + (size_t)sample * 10000 + i);
}

/* The loss at these parameters, above the minimum. */
static double loss_of(const float *w) {
  double loss = 0;
  for (size_t i = 0; i < UNKNOWNS; i++) {
    double best = 0;
    for (int s = 0; s < SAMPLES; s++)
      best += (double)target(s, i) / SAMPLES;
    loss += 0.5 * (double)weight(i) * ((double)w[i] - best) * ((double)w[i] - best);
  }
  return loss;
}

/* The gradient, with targets seen through noise, another one in each step. */
static void gradient_of(const float *w, float *gradient, int rank, int size, int step) {
  int each = SAMPLES / size;
  for (size_t i = 0; i < UNKNOWNS; i++) {
    float mean = 0;
    for (int s = rank * each; s < (rank + 1) * each; s++)
      mean += (target(s, i) +
               3.0f * uniform_value((uint64_t)(step * SAMPLES + s) * 1000 + i + 1000000)) /
              (float)each;
    gradient[i] = weight(i) * (w[i] - mean);
  }
}

struct run {
  const struct ob_method *method;
  onebit_adam_exchange_t exchange;
  int size, first, end;
  struct saved_parts *from, *to; /* or NULL */
  float *start;                  /* parameters to begin with, or NULL: zeros */
  double loss[END + 1];
  float last[UNKNOWNS];
};

static onebit_status_t create(onebit_comm_t comm, const struct run *run,
                              const onebit_tensor_t *tensors, onebit_optimizer_t *optimizer) {
  struct any_options options = any_options_of(run->method, NULL);
  any_count(&options, "freeze_step", 40);
  if (run->method == &ob_method_efficient_adam) /* whose warm-up makes the control jump little */
    any_count(&options, "warmup_steps", ONEBIT_WARMUP_NONE);
  any_count(&options, "variance_freeze_step", 60);
  any_count(&options, "variance_update_scaler", 8);
  any_count(&options, "local_step_scaler", 40);
  any_count(&options, "local_step_clipper", 4);
  any_set(&options, "beta2", 0.97);
  any_set(&options, "exchange", run->exchange);
  return any_create(&options, comm, tensors, 2, optimizer);
}

static float rate_of(const struct ob_method *method, int step) {
  float rate = method == &ob_method_momentum ? 0.05f : method == &ob_method_lamb ? 0.2f : 0.02f;
  return rate / (1.0f + (float)step / 60.0f);
}

static void train(onebit_comm_t comm, void *context) {
  struct run *run = context;
  int rank = onebit_comm_rank(comm);
  float w[UNKNOWNS] = {0}, gradient[UNKNOWNS];
  onebit_tensor_t tensors[] = {
      {.parameter = w, .gradient = gradient, .count = 400},
      {.parameter = w + 400, .gradient = gradient + 400, .count = UNKNOWNS - 400}};
  struct trainee trainee = {.rank = rank};
  for (size_t i = 0; run->start && i < UNKNOWNS; i++)
    w[i] = run->start[i];
  CHECK_STATUS(create(comm, run, tensors, &trainee.optimizer), ONEBIT_OK);
  if (run->from)
    CHECK_STATUS(trainee_load(&trainee, run->from), ONEBIT_OK);
  for (int step = run->first; step < run->end; step++) {
    if (rank == 0)
      run->loss[step] = loss_of(w);
    gradient_of(w, gradient, rank, run->size, step);
    CHECK_STATUS(onebit_optimizer_step(trainee.optimizer, rate_of(run->method, step)), ONEBIT_OK);
  }
  if (rank == 0) {
    run->loss[run->end] = loss_of(w);
    for (size_t i = 0; i < UNKNOWNS; i++)
      run->last[i] = w[i];
  }
  if (run->to)
    trainee_save(&trainee, comm, run->to);
  onebit_optimizer_destroy(trainee.optimizer);
}

static struct run *go(struct run what) {
  struct run *run = allocate(1, sizeof *run);
  *run = what;
  on_ranks(run->size, train, run);
  return run;
}

/* The largest difference to the run that was not interrupted, in the steps after it was loaded, as
 * a part of the loss at that time. */
static double jump(const struct run *run, const struct run *whole) {
  double most = 0;
  for (int step = SAVED_AT; step <= SAVED_AT + 40; step++) {
    double difference = fabs(run->loss[step] - whole->loss[step]) / whole->loss[SAVED_AT];
    most = difference > most ? difference : most;
  }
  return most;
}

static void check_loss(const struct ob_method *method, onebit_adam_exchange_t exchange) {
  struct saved_parts parts = {0};
  struct run first = {.method = method, .exchange = exchange, .size = 4, .end = END};
  struct run *whole = go(first);
  first.end = SAVED_AT;
  first.to = &parts;
  struct run *before = go(first);
  struct run then = {
      .method = method, .exchange = exchange, .size = 4, .first = SAVED_AT, .end = END};
  then.start = before->last;
  struct run *anew = go(then);
  double control = jump(anew, whole);
  cr_expect_gt(control, 0.05, "the control does not jump: %g", control);
  then.start = NULL;
  then.from = &parts;
  static const int sizes[] = {3, 4, 8};
  for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
    then.size = sizes[k];
    struct run *run = go(then);
    double got = jump(run, whole);
    cr_log_info("4 ranks to %d: %g, the control %g", sizes[k], got, control);
    cr_expect_leq(got, sizes[k] == 4 ? 0 : control / 2, "4 ranks to %d: %g, the control %g",
                  sizes[k], got, control);
    free(run);
  }
  free(anew);
  free(before);
  free(whole);
  free_parts(&parts);
}

Test(checkpoint_loss, adam) { check_loss(&ob_method_adam, ONEBIT_ADAM_EXCHANGE_MOMENTUM); }
Test(checkpoint_loss, adam_steps) { check_loss(&ob_method_adam, ONEBIT_ADAM_EXCHANGE_STEP); }
Test(checkpoint_loss, lamb) { check_loss(&ob_method_lamb, 0); }
Test(checkpoint_loss, zero_one_adam) { check_loss(&ob_method_zero_one_adam, 0); }
Test(checkpoint_loss, momentum) { check_loss(&ob_method_momentum, 0); }
Test(checkpoint_loss, efficient_adam) { check_loss(&ob_method_efficient_adam, 0); }
Test(checkpoint_loss, lion) { check_loss(&ob_method_lion, 0); }
