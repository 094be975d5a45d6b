/*
 * MPI programs whose sums are gradients or other data, for tests/scripts/check-preload. `streams
 * CASE...` prints a hash of every result. Unless a call is compressed, the hash equals the hash
 * without the library. A training case also prints its final loss. Each case uses a communicator
 * with the case's name.
 */
#include "tests/preload/streams.h"

#include <math.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int rank, size;
MPI_Comm comm;
static uint64_t hash = 14695981039346656037U;
static uint64_t state;

void seed_random(unsigned long long from) { state = from; }

double draw_uniform(void) { /* splitmix64 */
  uint64_t z = (state += 0x9e3779b97f4a7c15U);
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9U;
  z = (z ^ z >> 27) * 0x94d049bb133111ebU;
  return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

float draw_normal(void) {
  double sum = -6;
  for (int i = 0; i < 12; i++)
    sum += draw_uniform();
  return (float)sum;
}

float *allocate_floats(size_t count) {
  float *values = calloc(count, sizeof *values);
  if (!values)
    MPI_Abort(MPI_COMM_WORLD, 4);
  return values;
}

void sum_over_ranks(const float *from, float *to, int count) {
  MPI_Allreduce(from, to, count, MPI_FLOAT, MPI_SUM, comm);
  for (int i = 0; i < count; i++) {
    uint32_t bits;
    memcpy(&bits, &to[i], sizeof bits);
    hash = (hash ^ bits) * 1099511628211U;
  }
}

/* ---- Programs whose sums are not gradients: each sum must be exact ---- */

/* Computes y = A x for an asymmetric matrix A with three bands. Each rank has some columns of A. */
static void multiply_matrix(const float *x, float *y) {
  static float partial[COUNT];
  for (int i = 0; i < COUNT; i++) {
    float left = i && (i - 1) % size == rank ? -0.4F * x[i - 1] : 0;
    float right = i + 1 < COUNT && (i + 1) % size == rank ? -x[i + 1] : 0;
    float own = i % size == rank ? (2.2F + 0.01F * (float)(i * 37 % 101)) * x[i] : 0;
    partial[i] = own + left + right;
  }
  sum_over_ranks(partial, y, COUNT);
}

static double dot_product(const float *a, const float *b) {
  double sum = 0;
  for (int i = 0; i < COUNT; i++)
    sum += (double)a[i] * (double)b[i];
  return sum;
}

static void add_scaled(float *to, double factor, const float *from) {
  for (int i = 0; i < COUNT; i++)
    to[i] += (float)(factor * (double)from[i]);
}

static float *make_right_side(void) {
  float *b = allocate_floats(COUNT);
  seed_random(5);
  for (int i = 0; i < COUNT; i++)
    b[i] = draw_normal();
  return b;
}

static void solve_with_bicgstab(void) {
  float *r = make_right_side(), *start = allocate_floats(COUNT), *p = allocate_floats(COUNT),
        *v = allocate_floats(COUNT);
  float *t = allocate_floats(COUNT), *x = allocate_floats(COUNT);
  double rho = 1, alpha = 1, omega = 1;
  memcpy(start, r, COUNT * sizeof *r);
  for (int step = 0; step < 20; step++) {
    double next = dot_product(start, r), beta = next / rho * alpha / omega;
    for (int i = 0; i < COUNT; i++)
      p[i] = (float)((double)r[i] + beta * ((double)p[i] - omega * (double)v[i]));
    multiply_matrix(p, v);
    alpha = next / dot_product(start, v);
    add_scaled(r, -alpha, v);
    multiply_matrix(r, t);
    omega = dot_product(t, r) / dot_product(t, t);
    add_scaled(x, alpha, p);
    add_scaled(x, omega, r);
    add_scaled(r, -omega, t);
    rho = next;
  }
}

/* Sums windows of signals. Some of the windows are nearly zero. */
static void stack_signals(void) {
  float *mine = allocate_floats(COUNT), *all = allocate_floats(COUNT);
  for (int window = 0; window < 60; window++) {
    for (int i = 0; i < COUNT; i++)
      mine[i] = (window % 10 == 9 ? 0.01F : 1) * draw_normal();
    sum_over_ranks(mine, all, COUNT);
  }
}

/* ---- Cases ---- */

static const struct {
  const char *name;
  void (*run)(void);
} cases[] = {{"bicgstab", solve_with_bicgstab},   {"stacking", stack_signals},
             {"network", train_on_new_samples},   {"wide", train_with_double_sums},
             {"whole", train_on_same_samples},    {"sgd", train_with_sgd},
             {"policy", train_policy_and_critic}, {"critic", sum_like_policy_and_critic}};

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
