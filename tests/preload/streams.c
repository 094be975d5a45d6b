/*
 * MPI programs whose sums are gradients, or anything else, for tests/scripts/check-preload:
 * `streams CASE...` prints a hash of every result, which is that of the program alone where nothing
 * is compressed, and for a training its loss at the end. Each case has a communicator of its name.
 */
#include <math.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COUNT = 20000 };

static int rank, size;
static uint64_t hash = 14695981039346656037U;
static uint64_t state;
static MPI_Comm comm; /* of the case */

static double uniform(void) { /* splitmix64 */
  uint64_t z = (state += 0x9e3779b97f4a7c15U);
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9U;
  z = (z ^ z >> 27) * 0x94d049bb133111ebU;
  return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

static float normal(void) {
  double sum = -6;
  for (int i = 0; i < 12; i++)
    sum += uniform();
  return (float)sum;
}

static float *floats(size_t count) {
  float *values = calloc(count, sizeof *values);
  if (!values)
    MPI_Abort(MPI_COMM_WORLD, 4);
  return values;
}

static void reduce(const float *from, float *to, int count) {
  MPI_Allreduce(from, to, count, MPI_FLOAT, MPI_SUM, comm);
  for (int i = 0; i < count; i++) {
    uint32_t bits;
    memcpy(&bits, &to[i], sizeof bits);
    hash = (hash ^ bits) * 1099511628211U;
  }
}

/* ---- No gradients ---- */

/* Points in 0..10 around 820 centres; sums of points and their numbers, in the same buffers. */
static void kmeans(void) {
  enum { POINTS = 500, CENTRES = 820, WIDTH = 20, STEPS = 60 };
  float *points = floats(POINTS * WIDTH), *centres = floats(CENTRES * WIDTH);
  float *sums = floats(CENTRES * WIDTH), *mine = floats(CENTRES * WIDTH);
  float *counts = floats(CENTRES), *all = floats(CENTRES);
  for (int i = 0; i < POINTS * WIDTH; i++)
    points[i] = (float)(10 * uniform());
  state = 99;
  for (int i = 0; i < CENTRES * WIDTH; i++)
    centres[i] = (float)(10 * uniform());
  for (int step = 0; step < STEPS; step++) {
    memset(mine, 0, CENTRES * WIDTH * sizeof *mine);
    memset(counts, 0, CENTRES * sizeof *counts);
    for (int p = 0; p < POINTS; p++) {
      int best = 0;
      float least = INFINITY;
      for (int c = 0; c < CENTRES; c++) {
        float distance = 0;
        for (int k = 0; k < WIDTH && distance < least; k++) {
          float d = points[p * WIDTH + k] - centres[c * WIDTH + k];
          distance += d * d;
        }
        if (distance < least)
          least = distance, best = c;
      }
      for (int k = 0; k < WIDTH; k++)
        mine[best * WIDTH + k] += points[p * WIDTH + k];
      counts[best]++;
    }
    reduce(mine, sums, CENTRES * WIDTH);
    reduce(counts, all, CENTRES);
    for (int i = 0; i < CENTRES * WIDTH; i++)
      if (all[i / WIDTH] > 0)
        centres[i] = sums[i] / all[i / WIDTH];
  }
  for (int i = 0; i < CENTRES * WIDTH; i++)
    if (!(centres[i] >= 0 && centres[i] <= 10))
      MPI_Abort(MPI_COMM_WORLD, 3);
}

/* A histogram of new values each time, as floats. */
static void histogram(void) {
  float *bins = floats(COUNT), *all = floats(COUNT);
  for (int step = 0; step < 100; step++) {
    memset(bins, 0, COUNT * sizeof *bins);
    for (int i = 0; i < 4 * COUNT; i++)
      bins[(int)(uniform() * COUNT)]++;
    reduce(bins, all, COUNT);
  }
}

/* Jacobi: each rank has part of a row's neighbours, the sum is the next vector. */
static void jacobi(void) {
  float *x = floats(COUNT), *mine = floats(COUNT), *b = floats(COUNT);
  state = 5;
  for (int i = 0; i < COUNT; i++)
    b[i] = normal();
  for (int step = 0; step < 100; step++) {
    for (int i = 0; i < COUNT; i++) {
      int from = i - 4, to = i + 4;
      mine[i] = rank == 0 ? b[i] : 0;
      for (int j = from; j <= to; j++)
        if (j != i && j >= 0 && j < COUNT && j % size == rank)
          mine[i] += 0.12F * x[j];
    }
    reduce(mine, x, COUNT);
  }
}

/* Conjugate gradients, started anew for another right side every 25 iterations; each rank has some
 * columns, in buffers made anew. */
static void solver(void) {
  double *x = calloc(4 * COUNT, sizeof *x), *r = x + COUNT, *p = r + COUNT, *diagonal = p + COUNT;
  state = 5;
  for (int i = 0; i < COUNT; i++)
    diagonal[i] = 2.2 + 3 * uniform();
  for (int step = 0; step < 150; step++) {
    double rr = 0, pap = 0, next = 0;
    if (step % 25 == 0)
      for (int i = 0; i < COUNT; i++)
        p[i] = r[i] = (double)normal();
    float *mine = floats(COUNT), *z = floats(COUNT);
    for (int i = 0; i < COUNT; i++)
      for (int j = i ? i - 1 : 0; j <= i + 1 && j < COUNT; j++)
        if (j % size == rank)
          mine[i] += (float)((i == j ? diagonal[i] : -1) * p[j]);
    reduce(mine, z, COUNT);
    for (int i = 0; i < COUNT; i++)
      rr += r[i] * r[i], pap += p[i] * (double)z[i];
    for (int i = 0; i < COUNT; i++) {
      x[i] += rr / pap * p[i];
      r[i] -= rr / pap * (double)z[i];
      next += r[i] * r[i];
    }
    for (int i = 0; i < COUNT; i++)
      p[i] = r[i] + next / rr * p[i];
    free(mine), free(z);
  }
  free(x);
}

/* Particles on springs: forces from each rank's part of the bonds, leapfrog. Three components, in
 * one buffer after the other. */
static void forces(void) {
  float *x = floats(3 * COUNT), *v = floats(3 * COUNT), *mine = floats(COUNT), *f = floats(COUNT);
  state = 5;
  for (int i = 0; i < 3 * COUNT; i++)
    x[i] = normal(), v[i] = 0.3F * normal();
  for (int step = 0; step < 100; step++)
    for (int axis = 0; axis < 3; axis++) {
      float *at = x + axis * COUNT, *speed = v + axis * COUNT;
      for (int i = 0; i < COUNT; i++)
        mine[i] =
            i % size == rank ? at[(i + 1) % COUNT] - at[i] : at[(i + COUNT - 1) % COUNT] - at[i];
      reduce(mine, f, COUNT);
      for (int i = 0; i < COUNT; i++) {
        speed[i] += 0.1F * f[i];
        at[i] += 0.1F * speed[i];
      }
    }
}

/* Power iteration on a matrix with signs, of a diagonal and neighbours. */
static void power(void) {
  float *x = floats(COUNT), *mine = floats(COUNT), *y = floats(COUNT);
  state = 5;
  for (int i = 0; i < COUNT; i++)
    x[i] = normal();
  for (int step = 0; step < 100; step++) {
    double squares = 0;
    for (int i = 0; i < COUNT; i++) {
      mine[i] = i % size == rank ? (1 + 0.5F * (float)((i * 37) % 101) / 101) * x[i] : 0;
      mine[i] += (i + 1) % size == rank ? 0.3F * x[(i + 1) % COUNT] : 0;
    }
    reduce(mine, y, COUNT);
    for (int i = 0; i < COUNT; i++)
      squares += (double)y[i] * (double)y[i];
    for (int i = 0; i < COUNT; i++)
      x[i] = y[i] / (float)sqrt(squares / COUNT);
  }
}

/* Running means of values with signs. */
static void statistics(void) {
  float *sum = floats(COUNT), *mine = floats(COUNT), *all = floats(COUNT);
  for (int step = 0; step < 100; step++) {
    for (int i = 0; i < COUNT; i++) {
      sum[i] += normal() + (float)(i % 7 - 3) / 3;
      mine[i] = sum[i] / (float)(step + 1);
    }
    reduce(mine, all, COUNT);
  }
}

/* Squares and absolute values of new values. */
static void squares(void) {
  float *mine = floats(COUNT), *all = floats(COUNT);
  for (int step = 0; step < 100; step++) {
    for (int i = 0; i < COUNT; i++) {
      float value = normal();
      mine[i] = value * value;
    }
    reduce(mine, all, COUNT);
  }
}

/* Mostly zero, elsewhere each time. */
static void sparse(void) {
  float *mine = floats(COUNT), *all = floats(COUNT);
  for (int step = 0; step < 100; step++) {
    for (int i = 0; i < COUNT; i++)
      mine[i] = uniform() < 0.1 ? normal() : 0;
    reduce(mine, all, COUNT);
  }
}

/* ---- Trainings: a matrix learns a product from noisy samples ---- */

enum { WIDE = 200, HIGH = 100, BATCH = 16 };

struct learner {
  float *weight, *truth, *mean, *square;
  int step;
};

static struct learner learner_of(uint64_t seed) {
  struct learner learner = {floats(COUNT), floats(COUNT), floats(COUNT), floats(COUNT), 0};
  uint64_t before = state;
  state = seed;
  for (int i = 0; i < COUNT; i++)
    learner.truth[i] = normal();
  state = before;
  return learner;
}

/* The gradient of a batch of this rank; gives its loss. */
static float gradient_of(const struct learner *learner, float *gradient) {
  float x[WIDE], loss = 0;
  for (int sample = 0; sample < BATCH; sample++) {
    for (int k = 0; k < WIDE; k++)
      x[k] = normal();
    for (int row = 0; row < HIGH; row++) {
      float error = 0.5F * normal();
      for (int k = 0; k < WIDE; k++)
        error += (learner->weight[row * WIDE + k] - learner->truth[row * WIDE + k]) * x[k];
      loss += error * error / (BATCH * HIGH);
      for (int k = 0; k < WIDE; k++)
        gradient[row * WIDE + k] += error * x[k] / BATCH;
    }
  }
  return loss;
}

static void update(struct learner *learner, const float *sum, int adam) {
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
  float *gradient = floats(COUNT), *sum = floats(COUNT);
  float loss = gradient_of(learner, gradient);
  reduce(gradient, sum, COUNT);
  update(learner, sum, adam);
  float *spacer = malloc((size_t)(uniform() * 100000) + 1); /* buffers are elsewhere each time */
  free(gradient), free(sum), free(spacer);
  return loss;
}

static void print_loss(float loss) {
  float mean = 0;
  MPI_Allreduce(&loss, &mean, 1, MPI_FLOAT, MPI_SUM, comm);
  if (rank == 0)
    printf("loss %.4f\n", (double)(mean / (float)size));
}

static void train(int adam) {
  struct learner learner = learner_of(7);
  float last = 0;
  for (int step = 0; step < 120; step++)
    last = train_step(&learner, adam);
  print_loss(last);
}
static void sgd(void) { train(0); }
static void adam(void) { train(1); }

/* Two tensors of one size in turn, as a policy and its critic are: each epoch makes other numbers
 * of steps of the first, and asks after each whether to go on. */
static void policy(void) {
  struct learner one = learner_of(7), other = learner_of(8);
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

/* The largest sum of values of up to scale / 2, in buffers of its own. */
static float largest_sum(float scale) {
  float *values = floats(COUNT), *sum = floats(COUNT), largest = 0;
  for (int i = 0; i < COUNT; i++)
    values[i] = scale * (float)(uniform() - 0.5);
  reduce(values, sum, COUNT);
  for (int i = 0; i < COUNT; i++)
    largest = fmaxf(largest, fabsf(sum[i]));
  free(malloc((size_t)(uniform() * 100000) + 1));
  free(values), free(sum);
  return largest;
}

/* A policy and its critic with gradients a thousand times as large: the critic's first call comes
 * as one more of the policy's would, whose residual must not have the critic's error then. */
static void critic(void) {
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

/* What is averaged are the weights, after some local steps. */
static void averaging(void) {
  struct learner learner = learner_of(7);
  for (int round = 0; round < 100; round++) {
    float *sum = floats(COUNT);
    for (int step = 0; step < 2; step++) {
      float *gradient = floats(COUNT);
      gradient_of(&learner, gradient);
      for (int i = 0; i < COUNT; i++)
        learner.weight[i] -= 0.02F * gradient[i];
      free(gradient);
    }
    reduce(learner.weight, sum, COUNT);
    for (int i = 0; i < COUNT; i++)
      learner.weight[i] = sum[i] / (float)size;
    free(sum);
  }
}

static const struct {
  const char *name;
  void (*run)(void);
} cases[] = {{"kmeans", kmeans},
             {"histogram", histogram},
             {"jacobi", jacobi},
             {"solver", solver},
             {"forces", forces},
             {"power", power},
             {"statistics", statistics},
             {"squares", squares},
             {"sparse", sparse},
             {"averaging", averaging},
             {"sgd", sgd},
             {"adam", adam},
             {"policy", policy},
             {"critic", critic}};

int main(int argc, char **argv) {
  int ran = 0;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  for (int a = 1; a < argc; a++)
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
      if (!strcmp(argv[a], cases[i].name)) {
        state = (uint64_t)rank + 1;
        MPI_Comm_dup(MPI_COMM_WORLD, &comm);
        MPI_Comm_set_name(comm, cases[i].name);
        cases[i].run(), ran++;
      }
  if (rank == 0)
    printf("hash %016llx, %d done\n", (unsigned long long)hash, ran);
  MPI_Finalize();
  return ran == argc - 1 && ran ? 0 : 2;
}
