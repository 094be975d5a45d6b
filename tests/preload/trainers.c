/* Training runs whose allreduces sum gradients. streams.c runs them as cases, and each prints its
 * loss. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/preload/streams.h"

/* ---- Training runs in which a matrix is fitted to noisy samples of a linear map ---- */

enum { WIDE = 200, HIGH = 100, BATCH = 16 };

struct learner {
  float *weight, *truth, *mean, *square;
  int step;
};

static struct learner make_learner(unsigned number) {
  struct learner learner = {allocate_floats(COUNT), allocate_floats(COUNT), allocate_floats(COUNT),
                            allocate_floats(COUNT), 0};
  seed_random(number);
  for (int i = 0; i < COUNT; i++)
    learner.truth[i] = draw_normal();
  seed_random((unsigned)rank + 1);
  return learner;
}

/* Adds the gradient of a batch of this rank. Returns the loss of the batch. */
static float add_gradient(const struct learner *learner, float *gradient) {
  float x[WIDE], loss = 0;
  for (int sample = 0; sample < BATCH; sample++) {
    for (int k = 0; k < WIDE; k++)
      x[k] = draw_normal();
    for (int row = 0; row < HIGH; row++) {
      float error = 0.5F * draw_normal();
      for (int k = 0; k < WIDE; k++)
        error += (learner->weight[row * WIDE + k] - learner->truth[row * WIDE + k]) * x[k];
      loss += error * error / (BATCH * HIGH);
      for (int k = 0; k < WIDE; k++)
        gradient[row * WIDE + k] += error * x[k] / BATCH;
    }
  }
  return loss;
}

static void update_parameters(struct learner *learner, const float *sum, int adam) {
  learner->step++;
  for (int i = 0; i < COUNT; i++) {
    float g = sum[i] / (float)size;
    learner->mean[i] = 0.9F * learner->mean[i] + 0.1F * g;
    learner->square[i] = 0.99F * learner->square[i] + 0.01F * g * g;
    learner->weight[i] -=
        adam ? 0.01F * learner->mean[i] / (sqrtf(learner->square[i]) + 1e-6F) : 0.02F * g;
  }
}

static float train_step(struct learner *learner, int adam) {
  float *gradient = allocate_floats(COUNT), *sum = allocate_floats(COUNT);
  float loss = add_gradient(learner, gradient);
  sum_over_ranks(gradient, sum, COUNT);
  update_parameters(learner, sum, adam);
  float *spacer =
      malloc((size_t)(draw_uniform() * 100000) + 1); /* makes the next allocations return other
                                                      * addresses */
  free(gradient), free(sum), free(spacer);
  return loss;
}

static void print_loss(float loss) {
  float mean = 0;
  MPI_Allreduce(&loss, &mean, 1, MPI_FLOAT, MPI_SUM, comm);
  if (rank == 0)
    printf("loss %.4f\n", (double)(mean / (float)size));
}

void train_with_sgd(void) {
  struct learner learner = make_learner(7);
  float last = 0;
  for (int step = 0; step < 120; step++)
    last = train_step(&learner, 0);
  print_loss(last);
}

/* Trains two tensors of the same size alternately, like a policy and its critic. The number of
 * steps on the first tensor differs between epochs: after each step a sum determines whether the
 * epoch continues. */
void train_policy_and_critic(void) {
  struct learner one = make_learner(7), other = make_learner(8);
  float last = 0, bias[HIGH] = {0}, sum[HIGH];
  for (int epoch = 0; epoch < 6; epoch++) {
    for (int step = 0; step < 40 + epoch * 13 % 9; step++) {
      float go_on = 1, all;
      train_step(&one, 1);
      MPI_Allreduce(&go_on, &all, 1, MPI_FLOAT, MPI_SUM, comm);
    }
    for (int step = 0; step < 50; step++) {
      last = train_step(&other, 1);
      MPI_Allreduce(bias, sum, HIGH, MPI_FLOAT, MPI_SUM, comm);
    }
  }
  print_loss(last);
}

/* Sums values of at most scale / 2, in newly allocated buffers. Returns the largest result. */
static float largest_sum(float scale) {
  float *values = allocate_floats(COUNT), *sum = allocate_floats(COUNT), largest = 0;
  for (int i = 0; i < COUNT; i++)
    values[i] = scale * (float)(draw_uniform() - 0.5);
  sum_over_ranks(values, sum, COUNT);
  for (int i = 0; i < COUNT; i++)
    largest = fmaxf(largest, fabsf(sum[i]));
  free(malloc((size_t)(draw_uniform() * 100000) + 1));
  free(values), free(sum);
  return largest;
}

/* Sums the gradients of a policy, and of a critic whose gradients are a thousand times as large.
 * The critic's first call looks like the policy's next call. The policy's residual must not contain
 * the critic's error. */
void sum_like_policy_and_critic(void) {
  float largest = 0, go_on = 1, all, bias[HIGH] = {0}, sum[HIGH];
  for (int epoch = 0; epoch < 4; epoch++) {
    for (int step = 0; step < 25 + epoch * 13 % 9; step++) {
      MPI_Allreduce(&go_on, &all, 1, MPI_FLOAT, MPI_SUM, comm);
      largest = fmaxf(largest, largest_sum(1));
    }
    MPI_Allreduce(&go_on, &all, 1, MPI_FLOAT, MPI_SUM, comm);
    for (int step = 0; step < 25; step++) {
      largest_sum(1000);
      MPI_Allreduce(bias, sum, HIGH, MPI_FLOAT, MPI_SUM, comm);
    }
  }
  if (rank == 0)
    printf("largest sum of the policy's: %.2f times what there can be\n",
           (double)(largest / (0.5F * (float)size)));
}

/* A network of two layers of the same size, with one gradient buffer each. It is trained to compute
 * the same function as another network. Samples are new in each step, or always the same. */
struct network {
  float *first, *second, *gradients[2], *sums[2];
};

static struct network make_network(unsigned number, float scale) {
  struct network net = {allocate_floats(COUNT), allocate_floats(COUNT), {NULL}, {NULL}};
  for (int layer = 0; layer < 2; layer++)
    net.gradients[layer] = allocate_floats(COUNT), net.sums[layer] = allocate_floats(COUNT);
  seed_random(number);
  for (int i = 0; i < COUNT; i++)
    net.first[i] = scale * draw_normal() / 14, net.second[i] = scale * draw_normal() / 10;
  return net;
}

static void run_network(const struct network *net, const float *x, float *hidden, float *y) {
  for (int h = 0; h < HIGH; h++) {
    float sum = 0;
    for (int k = 0; k < WIDE; k++)
      sum += net->first[h * WIDE + k] * x[k];
    hidden[h] = tanhf(sum);
  }
  for (int k = 0; k < WIDE; k++) {
    y[k] = 0;
    for (int h = 0; h < HIGH; h++)
      y[k] += net->second[k * HIGH + h] * hidden[h];
  }
}

static float learn_sample(struct network *net, const struct network *teacher) {
  float x[WIDE], hidden[HIGH], y[WIDE], wanted[WIDE], back[HIGH] = {0}, loss = 0;
  for (int k = 0; k < WIDE; k++)
    x[k] = draw_normal();
  run_network(teacher, x, hidden, wanted);
  run_network(net, x, hidden, y);
  for (int k = 0; k < WIDE; k++) {
    float error = y[k] - wanted[k];
    loss += error * error / WIDE;
    for (int h = 0; h < HIGH; h++) {
      net->gradients[1][k * HIGH + h] += error * hidden[h] / BATCH;
      back[h] += error * net->second[k * HIGH + h];
    }
  }
  for (int h = 0; h < HIGH; h++)
    for (int k = 0; k < WIDE; k++)
      net->gradients[0][h * WIDE + k] += back[h] * (1 - hidden[h] * hidden[h]) * x[k] / BATCH;
  return loss / BATCH;
}

static void sum_gradients(struct network *net, int as_doubles) {
  static double mine[COUNT], all[COUNT];
  for (int layer = 1; layer >= 0; layer--) {
    float *gradient = net->gradients[layer], *sum = net->sums[layer];
    if (!as_doubles) {
      sum_over_ranks(gradient, sum, COUNT);
      continue;
    }
    for (int i = 0; i < COUNT; i++)
      mine[i] = (double)gradient[i];
    MPI_Allreduce(mine, all, COUNT, MPI_DOUBLE, MPI_SUM, comm);
    for (int i = 0; i < COUNT; i++)
      sum[i] = (float)all[i];
  }
}

static void train_network(int as_doubles, int same_samples) {
  struct network net = make_network(3, 0.3F), teacher = make_network(4, 1);
  float loss = 0;
  for (int step = 0; step < 120; step++) {
    loss = 0;
    if (step == 0 || same_samples)
      seed_random((unsigned)rank + 1);
    for (int layer = 0; layer < 2; layer++)
      memset(net.gradients[layer], 0, COUNT * sizeof(float));
    for (int sample = 0; sample < BATCH; sample++)
      loss += learn_sample(&net, &teacher);
    sum_gradients(&net, as_doubles);
    for (int i = 0; i < COUNT; i++) {
      net.first[i] -= 0.02F * net.sums[0][i] / (float)size;
      net.second[i] -= 0.02F * net.sums[1][i] / (float)size;
    }
  }
  print_loss(loss);
}
void train_on_new_samples(void) { train_network(0, 0); }
void train_with_double_sums(void) { train_network(1, 0); }
void train_on_same_samples(void) { train_network(0, 1); }
