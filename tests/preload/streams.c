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

#include "tests/preload/streams.h"

int rank, size;
MPI_Comm comm;
static uint64_t hash = 14695981039346656037U;
static uint64_t state;

void seed(unsigned long long from) { state = from; }

double uniform(void) { /* splitmix64 */
  uint64_t z = (state += 0x9e3779b97f4a7c15U);
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9U;
  z = (z ^ z >> 27) * 0x94d049bb133111ebU;
  return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

float normal(void) {
  double sum = -6;
  for (int i = 0; i < 12; i++)
    sum += uniform();
  return (float)sum;
}

float *floats(size_t count) {
  float *values = calloc(count, sizeof *values);
  if (!values)
    MPI_Abort(MPI_COMM_WORLD, 4);
  return values;
}

void reduce(const float *from, float *to, int count) {
  MPI_Allreduce(from, to, count, MPI_FLOAT, MPI_SUM, comm);
  for (int i = 0; i < count; i++) {
    uint32_t bits;
    memcpy(&bits, &to[i], sizeof bits);
    hash = (hash ^ bits) * 1099511628211U;
  }
}

/* ---- No gradients ---- */

/* Clusters points in 0..10 around 820 centres; one buffer holds sums of points and their counts. */
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

/* Sums a histogram of new values each time, as floats. */
static void histogram(void) {
  float *bins = floats(COUNT), *all = floats(COUNT);
  for (int step = 0; step < 100; step++) {
    memset(bins, 0, COUNT * sizeof *bins);
    for (int i = 0; i < 4 * COUNT; i++)
      bins[(int)(uniform() * COUNT)]++;
    reduce(bins, all, COUNT);
  }
}

/* Iterates with Jacobi's method: each rank has some neighbours of a row; the sum is the next
 * vector. */
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

/* Solves with conjugate gradients, a new right side every 25 iterations; each rank has some
 * columns, in newly allocated buffers. */
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

/* Moves particles on springs by leapfrog: each rank adds the forces of some bonds; one buffer
 * serves the three components in turn. */
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

/* Power iteration with a bidiagonal matrix, from a vector with signs. */
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

/* Sums running means of values with signs. */
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

/* Sums squares and absolute values of new values. */
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

/* Sums vectors that are mostly zero, each time elsewhere. */
static void sparse(void) {
  float *mine = floats(COUNT), *all = floats(COUNT);
  for (int step = 0; step < 100; step++) {
    for (int i = 0; i < COUNT; i++)
      mine[i] = uniform() < 0.1 ? normal() : 0;
    reduce(mine, all, COUNT);
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
             {"gmres", gmres},
             {"bicgstab", bicgstab},
             {"lanczos", lanczos},
             {"chebyshev", chebyshev},
             {"moments", moments},
             {"hybrid", hybrid},
             {"ensemble", ensemble},
             {"particles", particles},
             {"sketch", sketch},
             {"stacking", stacking},
             {"mixture", mixture},
             {"landweber", landweber},
             {"network", network},
             {"wide", wide},
             {"whole", whole},
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
