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

static const struct {
  const char *name;
  void (*run)(void);
} cases[] = {{"kmeans", kmeans},     {"gmres", gmres},     {"bicgstab", bicgstab},
             {"stacking", stacking}, {"network", network}, {"wide", wide},
             {"whole", whole},       {"sgd", sgd},         {"adam", adam},
             {"policy", policy},     {"critic", critic}};

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
