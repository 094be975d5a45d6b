/*
 * Tests the loss of a rank, at the beginning or in the middle of a step. Another rank may be lost
 * while the others are about to continue. The survivors continue with onebit_optimizer_shrink.
 * Their replicas must be equal to the bit, whatever each of them was doing when the rank was lost.
 */
#include <pthread.h>
#include <stdatomic.h>

#include "tests/support.h"
#include "tests/support_checkpoint.h"
#include "tests/support_optimizers.h"

enum { MAX_RANKS = 8, MAX_STEPS = 32 };

enum moment { BEFORE_A_STEP, IN_A_STEP, AND_ANOTHER_ONE, MOMENTS };

struct loss {
  const struct checkpoint_case *what;
  enum moment moment;
  int step, rank; /* the step in which the rank is lost, and the rank */
  /* The survivors' results, by their initial rank: parameters after each step, or NULL. went_on is
   * the number of survivors that have continued. */
  unsigned char *parameters[MAX_RANKS][MAX_STEPS + 1];
  atomic_int went_on;
  pthread_barrier_t created; /* of all ranks, because an abort would end another rank's creation */
};

static float step_rate(int step) { return 1e-3f * (float)(1 + step % 3); }

/* Ends a rank without a message, as if its process were killed. The other ranks only notice that it
 * sends nothing. */
static void lose_rank(struct loss *loss, struct trainee *trainee, onebit_comm_t comm, int step) {
  if (loss->moment == IN_A_STEP && onebit_optimizer_begin(trainee->optimizer, step_rate(step)) == 0)
    for (size_t t = 3; t < TRAINEE_TENSORS; t++)
      onebit_optimizer_ready(trainee->optimizer, t);
  onebit_comm_abort(comm);
  onebit_optimizer_destroy(trainee->optimizer);
  trainee->optimizer = NULL;
}

static void record_parameters(struct loss *loss, const struct trainee *trainee, int rank) {
  onebit_optimizer_info_t info = optimizer_info(trainee->optimizer);
  size_t bytes = trainee_parameter_bytes(loss->what);
  unsigned char **copy = &loss->parameters[rank][info.steps];
  if (!info.synchronized)
    return;
  if (!*copy)
    *copy = allocate(1, bytes);
  memcpy(*copy, trainee->parameters, bytes);
}

/* True if the first remaining rank is lost as well, between the two calls that it makes to
 * continue. */
static bool is_second_lost_rank(const struct loss *loss, int rank) {
  return loss->moment == AND_ANOTHER_ONE && rank == (loss->rank + 1) % loss->what->size;
}

static onebit_comm_t shrink_to_survivors(struct loss *loss, struct trainee *trainee,
                                         onebit_comm_t comm, int rank) {
  onebit_comm_t survivors = NULL;
  if (is_second_lost_rank(loss, rank)) {
    CHECK_STATUS(onebit_comm_shrink(comm, &survivors), ONEBIT_OK);
    onebit_comm_destroy(survivors);
    onebit_optimizer_destroy(trainee->optimizer);
    trainee->optimizer = NULL;
    return NULL;
  }
  int fewer = loss->moment == AND_ANOTHER_ONE ? 2 : 1;
  CHECK_STATUS(onebit_optimizer_shrink(trainee->optimizer, &survivors), ONEBIT_OK);
  CHECK(onebit_comm_size(survivors) == loss->what->size - fewer, "%d ranks are left",
        onebit_comm_size(survivors));
  atomic_fetch_add(&loss->went_on, 1);
  record_parameters(loss, trainee, rank);
  return survivors;
}

static void lose_and_go_on(onebit_comm_t first, void *context) {
  struct loss *loss = context;
  const struct checkpoint_case *what = loss->what;
  int rank = onebit_comm_rank(first), step = 0;
  onebit_comm_t comm = first;
  struct trainee trainee = trainee_create(comm, what, 0);
  check_case("%s, moment %d of step %d", what->name, loss->moment, loss->step);
  pthread_barrier_wait(&loss->created);
  while (trainee.optimizer && (step = (int)optimizer_info(trainee.optimizer).steps) < what->steps) {
    if (step == loss->step && rank == loss->rank) {
      lose_rank(loss, &trainee, comm, step);
      break;
    }
    fill_input(trainee.gradients, what->common.gradient_dtype, TRAINEE_ELEMENTS, rank, step);
    onebit_status_t status = onebit_optimizer_step(trainee.optimizer, step_rate(step));
    if (status == ONEBIT_OK) {
      record_parameters(loss, &trainee, rank);
      continue;
    }
    bool lost = comm == first && (status == ONEBIT_ERROR_TRANSPORT || status == ONEBIT_ERROR_PEER);
    if (!CHECK(lost, "step %d: %s", step, onebit_last_error()))
      break;
    onebit_comm_t next = shrink_to_survivors(loss, &trainee, comm, rank);
    comm = next;
  }
  trainee_destroy(&trainee);
  if (comm != first)
    onebit_comm_destroy(comm);
}

/* Compares the parameters of the survivors after they have continued. */
static void compare_survivors(struct loss *loss) {
  const struct checkpoint_case *what = loss->what;
  int rank0 = -1, compared = 0;
  for (int rank = 0; rank < what->size; rank++) {
    if (rank == loss->rank || is_second_lost_rank(loss, rank))
      continue;
    rank0 = rank0 < 0 ? rank : rank0;
    for (int step = loss->step + 1; step <= what->steps; step++) {
      unsigned char **copies = loss->parameters[rank], **first = loss->parameters[rank0];
      CHECK(!copies[step] == !first[step], "rank %d, step %d: there or not", rank, step);
      if (copies[step] && first[step])
        compared += CHECK_BITS("parameters", copies[step], first[step], TRAINEE_ELEMENTS,
                               what->common.parameter_dtype);
    }
  }
  CHECK(compared > 0 && loss->went_on > 0, "nobody went on");
}

static void check_loss(const struct checkpoint_case *what, enum moment moment, int step, int rank) {
  struct loss loss = {.what = what, .moment = moment, .step = step, .rank = rank};
  pthread_barrier_init(&loss.created, NULL, (unsigned)what->size);
  on_hosts(what->size, what->hosts ? what->hosts : 1, lose_and_go_on, &loss);
  check_case("%s, moment %d of step %d", what->name, (int)moment, step);
  compare_survivors(&loss);
  checks_must_hold();
  pthread_barrier_destroy(&loss.created);
  for (int r = 0; r < MAX_RANKS; r++)
    for (int s = 0; s <= MAX_STEPS; s++)
      free(loss.parameters[r][s]);
}

static void check_moment(enum moment moment) {
  for (size_t k = 0; k < checkpoint_cases_count; k++) {
    const struct checkpoint_case *what = &checkpoint_cases[k];
    int fewer = moment == AND_ANOTHER_ONE ? 2 : 1;
    for (int step = (int)k % 2; what->size > fewer && step + 1 < what->steps; step += 3)
      check_loss(what, moment, step, (step + (int)k) % what->size);
  }
}

Test(survive, before_a_step) { check_moment(BEFORE_A_STEP); }
Test(survive, in_a_step) { check_moment(IN_A_STEP); }
Test(survive, and_another_one) { check_moment(AND_ANOTHER_ONE); }

/*
 * Tests that losing one of eight ranks hardly affects a training: the final loss is within 0.5 % of
 * that of a run that lost no rank. The survivors share the samples of the lost rank, so the mean of
 * all gradients is the same. Only the state that the lost rank alone had is missing.
 */

/* For sample s, the target of unknown i is target(s, i). Noise is added to it, which differs in
 * each step.
 */
enum { RANKS = 8, UNKNOWNS = 1000, SAMPLES = 56, STEPS = 240, FREEZE = 40 };

static float unknown_weight(size_t i) { return 0.55f + 0.45f * uniform_value(i); }
static float target_value(int sample, size_t i) {
  return uniform_value(100000 + i) + 0.6f * uniform_value(200000 + (size_t)sample * 10000 + i);
}

/* Returns the loss of the model with weights w: half the squared error, averaged over samples. */
static double mean_loss(const float *w) {
  double loss = 0;
  for (size_t i = 0; i < UNKNOWNS; i++)
    for (int s = 0; s < SAMPLES; s++) {
      double d = (double)w[i] - (double)target_value(s, i);
      loss += 0.5 * (double)unknown_weight(i) * d * d / SAMPLES;
    }
  return loss;
}

/* Computes the gradient of the samples rank, rank + size, ... */
static void compute_gradient(const float *w, float *gradient, int rank, int size, int step) {
  for (size_t i = 0; i < UNKNOWNS; i++) {
    float sum = 0;
    for (int s = rank; s < SAMPLES; s += size)
      sum += target_value(s, i) +
             uniform_value((uint64_t)(step * SAMPLES + s) * 10000 + i + 100000000);
    gradient[i] = unknown_weight(i) * (w[i] - sum * (float)size / SAMPLES);
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
  int lost_at; /* STEPS if no rank is lost */
  int lost, joined_at;
  onebit_comm_t fewer[RANKS], again[RANKS];
  double loss;
};

static onebit_status_t create_optimizer(onebit_comm_t comm, const struct row *row,
                                        const onebit_tensor_t *tensors,
                                        onebit_optimizer_t *optimizer) {
  struct any_options options = any_options_of(row->method, NULL);
  any_common(&options)->block_size = 32; /* each rank then reduces some elements as a server */
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

static struct worker *create_worker(onebit_comm_t comm, const struct run *run) {
  struct worker *worker = allocate(1, sizeof *worker);
  static const size_t counts[] = {150, 600, 250};
  for (size_t k = 0, at = 0; k < 3; at += counts[k++])
    worker->tensors[k] = (onebit_tensor_t){
        .parameter = worker->w + at, .gradient = worker->gradient + at, .count = counts[k]};
  CHECK_STATUS(create_optimizer(comm, run->row, worker->tensors, &worker->optimizer), ONEBIT_OK);
  return worker;
}

static void train_worker(struct worker *worker, const struct run *run, int rank, int size, int from,
                         int to) {
  for (int step = from; step < to; step++) {
    compute_gradient(worker->w, worker->gradient, rank, size, step);
    float rate = run->row->rate * (1.02f - (float)step / STEPS);
    CHECK_STATUS(onebit_optimizer_step(worker->optimizer, rate), ONEBIT_OK);
  }
}

static void train_and_lose_a_rank(onebit_comm_t comm, void *context) {
  struct run *run = context;
  struct worker *worker = create_worker(comm, run);
  int rank = onebit_comm_rank(comm), size = RANKS;
  train_worker(worker, run, rank, size, 0, run->lost_at);
  bool gone = run->lost_at < STEPS && rank == run->lost;
  if (run->lost_at < STEPS && !gone) {
    rank -= rank > run->lost;
    CHECK_STATUS(onebit_optimizer_move(worker->optimizer, run->fewer[rank]), ONEBIT_OK);
    train_worker(worker, run, rank, --size, run->lost_at, run->joined_at);
  }
  if (gone && run->joined_at < STEPS) {
    onebit_optimizer_destroy(worker->optimizer);
    free(worker);
    onebit_comm_t self = self_comm();
    worker = create_worker(self, run);
    rank = RANKS - 1;
    CHECK_STATUS(onebit_optimizer_move(worker->optimizer, run->again[rank]), ONEBIT_OK);
    train_worker(worker, run, rank, RANKS, run->joined_at, STEPS);
    onebit_comm_destroy(self);
  } else if (!gone && run->joined_at < STEPS) {
    CHECK_STATUS(onebit_optimizer_move(worker->optimizer, run->again[rank]), ONEBIT_OK);
    train_worker(worker, run, rank, RANKS, run->joined_at, STEPS);
  }
  if (rank == 0 && !gone)
    run->loss = mean_loss(worker->w);
  onebit_optimizer_destroy(worker->optimizer);
  free(worker);
}

static double loss_after(const struct row *row, int lost_at, int lost, int joined_at) {
  struct run *run = allocate(1, sizeof *run);
  *run = (struct run){.row = row, .lost_at = lost_at, .lost = lost, .joined_at = joined_at};
  CHECK_STATUS(onebit_comm_create_loopback(RANKS - 1, run->fewer), ONEBIT_OK);
  CHECK_STATUS(onebit_comm_create_loopback(RANKS, run->again), ONEBIT_OK);
  on_ranks(RANKS, train_and_lose_a_rank, run);
  double loss = run->loss;
  for (int rank = 0; rank < RANKS; rank++) {
    onebit_comm_destroy(rank < RANKS - 1 ? run->fewer[rank] : NULL);
    onebit_comm_destroy(run->again[rank]);
  }
  free(run);
  return loss;
}

static void compare_losses(const char *name, double loss, double whole, int lost_at,
                           int joined_at) {
  double change = loss / whole - 1;
  cr_log_info("%s, lost after %d steps, joined after %d: %+.4f %%", name, lost_at, joined_at,
              100 * change);
  cr_expect_lt(fabs(change), 0.005, "%s, lost after %d steps, joined after %d: %+.4f %%", name,
               lost_at, joined_at, 100 * change);
}

/* Checks the final loss of runs that lose a rank in the warm-up (if there is one), in the first
 * compressed step, or later. */
static void check_losses(const char *name, const struct row *row) {
  static const int lost_at[] = {15, FREEZE + 1, 150};
  double whole = loss_after(row, STEPS, 0, STEPS);
  for (int k = 0; k < 3; k++)
    compare_losses(name, loss_after(row, lost_at[k], 3 * k + 1, STEPS), whole, lost_at[k], STEPS);
  compare_losses(name, loss_after(row, 50, 0, 60), whole, 50, 60);
}

#define GOES_ON(name, ...)                                                                         \
  Test(move_loss, name) { check_losses(#name, &(struct row){__VA_ARGS__}); }
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
