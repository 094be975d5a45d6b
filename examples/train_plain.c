/*
 * A data-parallel training as many programs make it: a network of two layers, gradients that
 * MPI_Allreduce sums, and its own optimizer. It contains no call of onebit, but `onebit run`
 * compresses its sums:
 *
 *   mpicc -O3 train_plain.c -o train_plain -lm
 *   mpirun -n 4 ./train_plain
 *   onebit run --gradients -- mpirun -n 4 ./train_plain
 *
 * The data are random points. Each point's label is the index of the largest of ten linear
 * functions of the point, but some points have a wrong label.
 */
#include <getopt.h>
#include <math.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INPUTS = 256, CLASSES = 10, HELD_OUT = 200 };

struct options {
  long parameters, steps, batch;
  double rate;
  int sgd, help;
};

struct network {
  size_t hidden, first, count; /* parameters of the first layer, and of both */
  float *weights, *gradient, *momentum, *variance;
};

/* ---- Data ---- */

static uint64_t seed; /* determines the data and the initial weights */

static float draw_normal(uint64_t *state) { /* approximated by the sum of four uniform numbers */
  float sum = 0;
  for (int i = 0; i < 4; i++) {
    *state = *state * 6364136223846793005U + 1442695040888963407U;
    sum += (float)(*state >> 40) * 0x1p-24F - 0.5F;
  }
  return sum * 1.7320508F;
}

static float teacher[CLASSES][INPUTS];

static int draw_point(uint64_t *state, float input[INPUTS]) {
  int best = 0;
  float largest = -INFINITY;
  for (int i = 0; i < INPUTS; i++)
    input[i] = draw_normal(state);
  for (int k = 0; k < CLASSES; k++) {
    float value = 2 * draw_normal(state); /* this noise makes some labels wrong */
    for (int i = 0; i < INPUTS; i++)
      value += teacher[k][i] * input[i];
    if (value > largest)
      largest = value, best = k;
  }
  return best;
}

/* ---- The network ---- */

static float *array(size_t count) {
  float *values = calloc(count, sizeof *values);
  if (!values) {
    fprintf(stderr, "train_plain: no memory for %zu numbers\n", count);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  return values;
}

static struct network make_network(long parameters) {
  struct network net = {.hidden = (size_t)parameters / (INPUTS + CLASSES)};
  uint64_t state = 7 + seed;
  net.first = net.hidden * INPUTS;
  net.count = net.first + net.hidden * CLASSES;
  net.weights = array(net.count);
  net.gradient = array(net.count);
  net.momentum = array(net.count);
  net.variance = array(net.count);
  for (size_t i = 0; i < net.count; i++)
    net.weights[i] = draw_normal(&state) / sqrtf(i < net.first ? INPUTS : (float)net.hidden);
  for (int k = 0; k < CLASSES; k++)
    for (int i = 0; i < INPUTS; i++)
      teacher[k][i] = draw_normal(&state);
  return net;
}

/* Computes the hidden layer's activations, and the probabilities of the classes. */
static void forward(const struct network *net, const float *input, float *active, float *classes) {
  float most = -INFINITY, sum = 0;
  for (size_t h = 0; h < net->hidden; h++) {
    const float *row = net->weights + h * INPUTS;
    float part[8] = {0};
    for (int i = 0; i < INPUTS; i += 8)
      for (int lane = 0; lane < 8; lane++)
        part[lane] += row[i + lane] * input[i + lane];
    float value = part[0] + part[1] + part[2] + part[3] + part[4] + part[5] + part[6] + part[7];
    active[h] = value > 0 ? value : 0;
  }
  for (int k = 0; k < CLASSES; k++) {
    const float *row = net->weights + net->first + (size_t)k * net->hidden;
    classes[k] = 0;
    for (size_t h = 0; h < net->hidden; h++)
      classes[k] += row[h] * active[h];
    most = classes[k] > most ? classes[k] : most;
  }
  for (int k = 0; k < CLASSES; k++)
    sum += classes[k] = expf(classes[k] - most);
  for (int k = 0; k < CLASSES; k++)
    classes[k] /= sum;
}

/* Adds the gradient of a point to net->gradient. */
static void backward(struct network *net, const float *input, const float *active,
                     const float *error) {
  for (int k = 0; k < CLASSES; k++) {
    float *row = net->gradient + net->first + (size_t)k * net->hidden;
    for (size_t h = 0; h < net->hidden; h++)
      row[h] += error[k] * active[h];
  }
  for (size_t h = 0; h < net->hidden; h++) {
    float *row = net->gradient + h * INPUTS, slope = 0;
    for (int k = 0; k < CLASSES && active[h] > 0; k++)
      slope += error[k] * net->weights[net->first + (size_t)k * net->hidden + h];
    for (int i = 0; i < INPUTS && slope != 0; i++)
      row[i] += slope * input[i];
  }
}

/* Computes the gradient of a batch; returns the loss of the batch. */
static double compute_batch_gradient(struct network *net, float *active, uint64_t *state,
                                     long batch) {
  float input[INPUTS], classes[CLASSES];
  double loss = 0;
  memset(net->gradient, 0, net->count * sizeof *net->gradient);
  for (long b = 0; b < batch; b++) {
    int label = draw_point(state, input);
    forward(net, input, active, classes);
    loss -= log((double)classes[label] + 1e-30) / (double)batch;
    classes[label] -= 1;
    backward(net, input, active, classes);
  }
  return loss;
}

/* Returns the loss on held-out points, which depend only on the seed: all ranks have the same. */
static double held_out_loss(const struct network *net, float *active) {
  float input[INPUTS], classes[CLASSES];
  uint64_t state = 99 + seed;
  double sum = 0;
  for (int n = 0; n < HELD_OUT; n++) {
    int label = draw_point(&state, input);
    forward(net, input, active, classes);
    sum -= log((double)classes[label] + 1e-30);
  }
  return sum / HELD_OUT;
}

/* ---- Training ---- */

/* Sums the gradients of each layer as they become final, from the last to the first. */
static void sum_gradients(struct network *net) {
  MPI_Allreduce(MPI_IN_PLACE, net->gradient + net->first, (int)(net->count - net->first), MPI_FLOAT,
                MPI_SUM, MPI_COMM_WORLD);
  MPI_Allreduce(MPI_IN_PLACE, net->gradient, (int)net->first, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static void update(struct network *net, const struct options *options, long step, float scale) {
  float first = 1 - powf(0.9F, (float)step), second = 1 - powf(0.999F, (float)step);
  float rate = (float)options->rate;
  for (size_t i = 0; i < net->count; i++) {
    float g = net->gradient[i] * scale;
    net->momentum[i] = 0.9F * net->momentum[i] + (options->sgd ? g : 0.1F * g);
    if (options->sgd) {
      net->weights[i] -= rate * net->momentum[i];
      continue;
    }
    net->variance[i] = 0.999F * net->variance[i] + 0.001F * g * g;
    net->weights[i] -= rate * net->momentum[i] / first / (sqrtf(net->variance[i] / second) + 1e-8F);
  }
}

static void train(struct network *net, const struct options *options, int rank, int size) {
  float *active = array(net->hidden);
  uint64_t state = 1000 + (uint64_t)rank + seed;
  long every = (options->steps + 9) / 10;
  double start = MPI_Wtime(), summing = 0, loss = 0;
  for (long step = 1; step <= options->steps; step++) {
    loss += compute_batch_gradient(net, active, &state, options->batch) / (double)every;
    double before = MPI_Wtime();
    sum_gradients(net);
    summing += MPI_Wtime() - before;
    update(net, options, step, 1.0F / (float)(size * options->batch));
    if (rank == 0 && step % every == 0)
      printf("step %5ld  loss of rank 0's own points %.4f\n", step, loss);
    loss = step % every == 0 ? 0 : loss;
  }
  double seconds = MPI_Wtime() - start;
  if (rank == 0)
    printf("%zu parameters, %ld steps in %.2f s, %.2f s of them in MPI_Allreduce; loss %.4f\n",
           net->count, options->steps, seconds, summing, held_out_loss(net, active));
  free(active);
}

static int read_options(int argc, char **argv, struct options *options) {
  static const struct option names[] = {{"parameters", 1, NULL, 'p'}, {"steps", 1, NULL, 's'},
                                        {"batch", 1, NULL, 'b'},      {"rate", 1, NULL, 'r'},
                                        {"seed", 1, NULL, 'd'},       {"sgd", 0, NULL, 'g'},
                                        {"help", 0, NULL, 'h'},       {NULL, 0, NULL, 0}};
  for (int c; (c = getopt_long(argc, argv, "", names, NULL)) != -1;)
    switch (c) {
    case 'p':
      options->parameters = atol(optarg);
      break;
    case 's':
      options->steps = atol(optarg);
      break;
    case 'b':
      options->batch = atol(optarg);
      break;
    case 'r':
      options->rate = atof(optarg);
      break;
    case 'd':
      seed = strtoull(optarg, NULL, 10) * 0x9E3779B97F4A7C15U;
      break;
    case 'g':
      options->sgd = 1;
      break;
    case 'h':
      options->help = 1;
      break;
    default:
      return 0;
    }
  return optind == argc && options->parameters >= INPUTS + CLASSES && options->steps > 0 &&
         options->batch > 0 && options->rate > 0 && !options->help;
}

int main(int argc, char **argv) {
  struct options options = {.parameters = 2000000, .steps = 100, .batch = 4, .rate = 5e-4};
  int rank, size;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (!read_options(argc, argv, &options)) {
    if (rank == 0)
      fprintf(options.help ? stdout : stderr, "usage: train_plain [--parameters N] [--steps N] "
                                              "[--batch N] [--rate R] [--seed N] [--sgd]\n");
    MPI_Finalize();
    return options.help ? 0 : 2;
  }
  struct network net = make_network(options.parameters);
  train(&net, &options, rank, size);
  free(net.weights), free(net.gradient), free(net.momentum), free(net.variance);
  MPI_Finalize();
  return 0;
}
