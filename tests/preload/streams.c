/*
 * MPI programs whose sums are gradients, or anything else, for tests/scripts/check-preload:
 * `streams CASE...` prints a hash of every result, which is that of the program alone where nothing
 * is compressed, and for a training its loss at the end. Each case has a communicator of its name.
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

/* ---- No gradients ---- */

/* Clusters points in 0..10 around 820 centres; one buffer holds sums of points and their counts. */
static void cluster_points(void) {
  enum { POINTS = 500, CENTRES = 820, WIDTH = 20, STEPS = 60 };
  float *points = allocate_floats(POINTS * WIDTH), *centres = allocate_floats(CENTRES * WIDTH);
  float *sums = allocate_floats(CENTRES * WIDTH), *mine = allocate_floats(CENTRES * WIDTH);
  float *counts = allocate_floats(CENTRES), *all = allocate_floats(CENTRES);
  for (int i = 0; i < POINTS * WIDTH; i++)
    points[i] = (float)(10 * draw_uniform());
  state = 99;
  for (int i = 0; i < CENTRES * WIDTH; i++)
    centres[i] = (float)(10 * draw_uniform());
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
    sum_over_ranks(mine, sums, CENTRES * WIDTH);
    sum_over_ranks(counts, all, CENTRES);
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
} cases[] = {{"kmeans", cluster_points},
             {"gmres", solve_with_gmres},
             {"bicgstab", solve_with_bicgstab},
             {"stacking", stack_signals},
             {"network", train_on_new_samples},
             {"wide", train_with_double_sums},
             {"whole", train_on_same_samples},
             {"sgd", train_with_sgd},
             {"adam", train_with_adam},
             {"policy", train_policy_and_critic},
             {"critic", sum_like_policy_and_critic}};

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

/*
 * ---- Programs that solve or stack something ----
 *
 * Their sums of floats must each be right. Each rank has some columns of the matrix, or some of the
 * data.
 */

/* ---- A sparse matrix, by columns ---- */

static float *partial; /* of this rank */

/* Computes y = A x with three bands; A is not symmetric. */
static void multiply_matrix(const float *x, float *y) {
  if (!partial)
    partial = allocate_floats(COUNT);
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

static void divide_vector(float *to, const float *from, double by) {
  for (int i = 0; i < COUNT; i++)
    to[i] = (float)((double)from[i] / by);
}

/* ---- Krylov methods ---- */

enum { BASIS = 8 };

/* Solves the small least-squares problem: Givens rotations of H, and the solution in y. */
static void solve_small(double h[BASIS + 1][BASIS], double beta, double y[BASIS]) {
  double g[BASIS + 1] = {beta};
  for (int j = 0; j < BASIS; j++) {
    double length = hypot(h[j][j], h[j + 1][j]), c = h[j][j] / length, s = h[j + 1][j] / length;
    for (int k = j; k < BASIS; k++) {
      double upper = h[j][k], lower = h[j + 1][k];
      h[j][k] = c * upper + s * lower;
      h[j + 1][k] = c * lower - s * upper;
    }
    g[j + 1] = -s * g[j];
    g[j] *= c;
  }
  for (int j = BASIS - 1; j >= 0; j--) {
    y[j] = g[j];
    for (int k = j + 1; k < BASIS; k++)
      y[j] -= h[j][k] * y[k];
    y[j] /= h[j][j];
  }
}

/* Restarted GMRES: sums of unit vectors, and of the residual at each restart. */
void solve_with_gmres(void) {
  float *b = make_right_side(), *x = allocate_floats(COUNT), *w = allocate_floats(COUNT),
        *v[BASIS + 1];
  for (int j = 0; j <= BASIS; j++)
    v[j] = allocate_floats(COUNT);
  for (int cycle = 0; cycle < 8; cycle++) {
    double h[BASIS + 1][BASIS] = {{0}}, y[BASIS], beta;
    multiply_matrix(x, w);
    for (int i = 0; i < COUNT; i++)
      v[0][i] = b[i] - w[i];
    beta = sqrt(dot_product(v[0], v[0]));
    divide_vector(v[0], v[0], beta);
    for (int j = 0; j < BASIS; j++) {
      multiply_matrix(v[j], w);
      for (int k = 0; k <= j; k++) {
        h[k][j] = dot_product(w, v[k]);
        add_scaled(w, -h[k][j], v[k]);
      }
      h[j + 1][j] = sqrt(dot_product(w, w));
      divide_vector(v[j + 1], w, h[j + 1][j]);
    }
    solve_small(h, beta, y);
    for (int j = 0; j < BASIS; j++)
      add_scaled(x, y[j], v[j]);
  }
}

void solve_with_bicgstab(void) {
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

/* Sums windows of signals, some of which are quiet. */
void stack_signals(void) {
  float *mine = allocate_floats(COUNT), *all = allocate_floats(COUNT);
  for (int window = 0; window < 60; window++) {
    for (int i = 0; i < COUNT; i++)
      mine[i] = (window % 10 == 9 ? 0.01F : 1) * draw_normal();
    sum_over_ranks(mine, all, COUNT);
  }
}
