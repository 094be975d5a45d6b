/*
 * The loss goes on as if nothing had happened when one of eight ranks is lost: at the end it is
 * within 0.5 % of that of the run that lost none. The survivors share the samples of the lost one,
 * so the mean of all gradients is the same, and what differs is what the lost rank alone had.
 */
#include "tests/support.h"
#include "tests/support_optimizers.h"

/* Sample s wants unknown i to be target(s, i), and is seen through noise, another one in each step.
 */
enum { RANKS = 8, UNKNOWNS = 1000, SAMPLES = 56, STEPS = 240, FREEZE = 40 };

static float weight(size_t i) { return 0.55f + 0.45f * uniform_value(i); }
static float target(int sample, size_t i) {
  return uniform_value(100000 + i) + 0.6f * uniform_value(200000 + (size_t)sample * 10000 + i);
}

/* The mean over the samples of half the squared distances, with weights. */
static double loss_of(const float *w) {
  double loss = 0;
  for (size_t i = 0; i < UNKNOWNS; i++)
    for (int s = 0; s < SAMPLES; s++) {
      double d = (double)w[i] - (double)target(s, i);
      loss += 0.5 * (double)weight(i) * d * d / SAMPLES;
    }
  return loss;
}

/* The gradient of the samples rank, rank + size, ... */
static void gradient_of(const float *w, float *gradient, int rank, int size, int step) {
  for (size_t i = 0; i < UNKNOWNS; i++) {
    float sum = 0;
    for (int s = rank; s < SAMPLES; s += size)
      sum += target(s, i) + uniform_value((uint64_t)(step * SAMPLES + s) * 10000 + i + 100000000);
    gradient[i] = weight(i) * (w[i] - sum * (float)size / SAMPLES);
  }
}

struct row {
  const struct ob_method *method;
  float rate;
  onebit_adam_exchange_t exchange;
  onebit_shards_t shards;
};

struct run {
  const struct row *row;
  int lost_at; /* STEPS: nobody is lost */
  int lost, joined_at;
  onebit_comm_t fewer[RANKS], again[RANKS];
  double loss;
};

static onebit_status_t create(onebit_comm_t comm, const struct row *row,
                              const onebit_tensor_t *tensors, onebit_optimizer_t *optimizer) {
  struct any_options options = any_options_of(row->method, NULL);
  any_common(&options)->block_size = 32; /* each rank serves some */
  any_count(&options, "freeze_step", row->method == &ob_method_momentum ? 0 : FREEZE);
  any_count(&options, "variance_freeze_step", 60);
  any_count(&options, "variance_update_scaler", 8);
  any_count(&options, "local_step_scaler", 40);
  any_count(&options, "local_step_clipper", 4);
  any_set(&options, "beta2", 0.97);
  any_set(&options, "exchange", row->exchange);
  any_set(&options, "shards", row->shards);
  return any_create(&options, comm, tensors, 3, optimizer);
}

struct worker {
  float w[UNKNOWNS], gradient[UNKNOWNS];
  onebit_tensor_t tensors[3];
  onebit_optimizer_t optimizer;
};

static struct worker *begin(onebit_comm_t comm, const struct run *run) {
  struct worker *worker = allocate(1, sizeof *worker);
  static const size_t counts[] = {150, 600, 250};
  for (size_t k = 0, at = 0; k < 3; at += counts[k++])
    worker->tensors[k] = (onebit_tensor_t){
        .parameter = worker->w + at, .gradient = worker->gradient + at, .count = counts[k]};
  CHECK_STATUS(create(comm, run->row, worker->tensors, &worker->optimizer), ONEBIT_OK);
  return worker;
}

static void train(struct worker *worker, const struct run *run, int rank, int size, int from,
                  int to) {
  for (int step = from; step < to; step++) {
    gradient_of(worker->w, worker->gradient, rank, size, step);
    float rate = run->row->rate * (1.02f - (float)step / STEPS);
    CHECK_STATUS(onebit_optimizer_step(worker->optimizer, rate), ONEBIT_OK);
  }
}

static void rank_body_of(onebit_comm_t comm, void *context) {
  struct run *run = context;
  struct worker *worker = begin(comm, run);
  int rank = onebit_comm_rank(comm), size = RANKS;
  train(worker, run, rank, size, 0, run->lost_at);
  bool gone = run->lost_at < STEPS && rank == run->lost;
  if (run->lost_at < STEPS && !gone) {
    rank -= rank > run->lost;
    CHECK_STATUS(onebit_optimizer_move(worker->optimizer, run->fewer[rank]), ONEBIT_OK);
    train(worker, run, rank, --size, run->lost_at, run->joined_at);
  }
  if (gone && run->joined_at < STEPS) {
    onebit_optimizer_destroy(worker->optimizer);
    free(worker);
    onebit_comm_t self = self_comm();
    worker = begin(self, run);
    rank = RANKS - 1;
    CHECK_STATUS(onebit_optimizer_move(worker->optimizer, run->again[rank]), ONEBIT_OK);
    train(worker, run, rank, RANKS, run->joined_at, STEPS);
    onebit_comm_destroy(self);
  } else if (!gone && run->joined_at < STEPS) {
    CHECK_STATUS(onebit_optimizer_move(worker->optimizer, run->again[rank]), ONEBIT_OK);
    train(worker, run, rank, RANKS, run->joined_at, STEPS);
  }
  if (rank == 0 && !gone)
    run->loss = loss_of(worker->w);
  onebit_optimizer_destroy(worker->optimizer);
  free(worker);
}

static double loss_after(const struct row *row, int lost_at, int lost, int joined_at) {
  struct run *run = allocate(1, sizeof *run);
  *run = (struct run){.row = row, .lost_at = lost_at, .lost = lost, .joined_at = joined_at};
  CHECK_STATUS(onebit_comm_create_loopback(RANKS - 1, run->fewer), ONEBIT_OK);
  CHECK_STATUS(onebit_comm_create_loopback(RANKS, run->again), ONEBIT_OK);
  on_ranks(RANKS, rank_body_of, run);
  double loss = run->loss;
  for (int rank = 0; rank < RANKS; rank++) {
    onebit_comm_destroy(rank < RANKS - 1 ? run->fewer[rank] : NULL);
    onebit_comm_destroy(run->again[rank]);
  }
  free(run);
  return loss;
}

static void compare(const char *name, double loss, double whole, int lost_at, int joined_at) {
  double change = loss / whole - 1;
  cr_log_info("%s, lost after %d steps, joined after %d: %+.4f %%", name, lost_at, joined_at,
              100 * change);
  cr_expect_lt(fabs(change), 0.005, "%s, lost after %d steps, joined after %d: %+.4f %%", name,
               lost_at, joined_at, 100 * change);
}

/* In the warm-up, where there is one, in the first compressed step, and later. */
static void check_loss(const char *name, const struct row *row) {
  static const int lost_at[] = {15, FREEZE + 1, 150};
  double whole = loss_after(row, STEPS, 0, STEPS);
  for (int k = 0; k < 3; k++)
    compare(name, loss_after(row, lost_at[k], 3 * k + 1, STEPS), whole, lost_at[k], STEPS);
  compare(name, loss_after(row, 50, 0, 60), whole, 50, 60);
}

#define GOES_ON(name, ...)                                                                         \
  Test(move_loss, name) { check_loss(#name, &(struct row){__VA_ARGS__}); }
GOES_ON(efficient_adam, .method = &ob_method_efficient_adam, .rate = 0.02f)
GOES_ON(adam, .method = &ob_method_adam, .rate = 0.02f)
GOES_ON(adam_steps, .method = &ob_method_adam, .rate = 0.02f, .exchange = ONEBIT_ADAM_EXCHANGE_STEP)
GOES_ON(shards_of_steps, .method = &ob_method_adam, .rate = 0.02f, .shards = ONEBIT_SHARDS_STEP)
GOES_ON(shards_of_parameters, .method = &ob_method_adam, .rate = 0.02f,
        .shards = ONEBIT_SHARDS_PARAMETERS)
GOES_ON(lamb, .method = &ob_method_lamb, .rate = 0.1f)
GOES_ON(zero_one_adam, .method = &ob_method_zero_one_adam, .rate = 0.02f)
GOES_ON(momentum, .method = &ob_method_momentum, .rate = 0.05f)
GOES_ON(lion, .method = &ob_method_lion, .rate = 0.01f)
