/*
 * Programs that solve, sample or filter something with sums of floats, each of which must be right:
 * cases of streams.c. Each rank has some columns of the matrix, or some of the data.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/preload/streams.h"

/* ---- A sparse matrix, by columns ---- */

static float *partial; /* of this rank */

/* Computes y = A x with three bands; A is symmetric if `lower` equals `upper`. */
static void multiply(const float *x, float *y, float lower, float upper) {
  if (!partial)
    partial = floats(COUNT);
  for (int i = 0; i < COUNT; i++) {
    float left = i && (i - 1) % size == rank ? lower * x[i - 1] : 0;
    float right = i + 1 < COUNT && (i + 1) % size == rank ? upper * x[i + 1] : 0;
    float own = i % size == rank ? (2.2F + 0.01F * (float)(i * 37 % 101)) * x[i] : 0;
    partial[i] = own + left + right;
  }
  reduce(partial, y, COUNT);
}

static double dot(const float *a, const float *b) {
  double sum = 0;
  for (int i = 0; i < COUNT; i++)
    sum += (double)a[i] * (double)b[i];
  return sum;
}

static void add(float *to, double factor, const float *from) {
  for (int i = 0; i < COUNT; i++)
    to[i] += (float)(factor * (double)from[i]);
}

static float *right_side(float scale) {
  float *b = floats(COUNT);
  seed(5);
  for (int i = 0; i < COUNT; i++)
    b[i] = scale * normal();
  return b;
}

static void divide(float *to, const float *from, double by) {
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
void gmres(void) {
  float *b = right_side(1), *x = floats(COUNT), *w = floats(COUNT), *v[BASIS + 1];
  for (int j = 0; j <= BASIS; j++)
    v[j] = floats(COUNT);
  for (int cycle = 0; cycle < 8; cycle++) {
    double h[BASIS + 1][BASIS] = {{0}}, y[BASIS], beta;
    multiply(x, w, -0.4F, -1);
    for (int i = 0; i < COUNT; i++)
      v[0][i] = b[i] - w[i];
    beta = sqrt(dot(v[0], v[0]));
    divide(v[0], v[0], beta);
    for (int j = 0; j < BASIS; j++) {
      multiply(v[j], w, -0.4F, -1);
      for (int k = 0; k <= j; k++) {
        h[k][j] = dot(w, v[k]);
        add(w, -h[k][j], v[k]);
      }
      h[j + 1][j] = sqrt(dot(w, w));
      divide(v[j + 1], w, h[j + 1][j]);
    }
    solve_small(h, beta, y);
    for (int j = 0; j < BASIS; j++)
      add(x, y[j], v[j]);
  }
}

void bicgstab(void) {
  float *r = right_side(1), *start = floats(COUNT), *p = floats(COUNT), *v = floats(COUNT);
  float *t = floats(COUNT), *x = floats(COUNT);
  double rho = 1, alpha = 1, omega = 1;
  memcpy(start, r, COUNT * sizeof *r);
  for (int step = 0; step < 20; step++) {
    double next = dot(start, r), beta = next / rho * alpha / omega;
    for (int i = 0; i < COUNT; i++)
      p[i] = (float)((double)r[i] + beta * ((double)p[i] - omega * (double)v[i]));
    multiply(p, v, -0.4F, -1);
    alpha = next / dot(start, v);
    add(r, -alpha, v);
    multiply(r, t, -0.4F, -1);
    omega = dot(t, r) / dot(t, t);
    add(x, alpha, p);
    add(x, omega, r);
    add(r, -omega, t);
    rho = next;
  }
}

void lanczos(void) {
  float *v = right_side(1), *before = floats(COUNT), *w = floats(COUNT);
  double beta = 0;
  divide(v, v, sqrt(dot(v, v)));
  for (int step = 0; step < 50; step++) {
    multiply(v, w, -1, -1);
    double alpha = dot(w, v);
    add(w, -alpha, v);
    add(w, -beta, before);
    beta = sqrt(dot(w, w));
    float *old = before;
    before = v;
    v = old;
    divide(v, w, beta);
  }
}

void chebyshev(void) {
  const double centre = 2.7, radius = 2.5;
  float *r = right_side(1), *x = floats(COUNT), *p = floats(COUNT), *w = floats(COUNT);
  double alpha = 0;
  for (int step = 0; step < 50; step++) {
    double beta = step == 0   ? 0
                  : step == 1 ? 0.5 * radius * alpha * radius * alpha
                              : radius * alpha / 2 * radius * alpha / 2;
    alpha = step == 0 ? 1 / centre : 1 / (centre - beta / alpha);
    for (int i = 0; i < COUNT; i++)
      p[i] = (float)((double)r[i] + beta * (double)p[i]);
    add(x, alpha, p);
    multiply(p, w, -1, -1);
    add(r, -alpha, w);
  }
}

/* The kernel polynomial method: T(n+1) = 2 A T(n) - T(n-1), from some random vectors. */
void moments(void) {
  float *now = floats(COUNT), *before = floats(COUNT), *w = floats(COUNT);
  for (int start = 0; start < 3; start++) {
    seed(11 + (unsigned)start);
    for (int i = 0; i < COUNT; i++)
      before[i] = uniform() < 0.5 ? -1 : 1;
    multiply(before, now, -1, -1);
    for (int n = 0; n < 16; n++) {
      multiply(now, w, -1, -1);
      for (int i = 0; i < COUNT; i++) {
        float next = 2 * (w[i] - 2.7F * now[i]) / 2.6F - before[i];
        before[i] = now[i];
        now[i] = next;
      }
    }
  }
}

/* ---- Sampling ---- */

/* Hybrid Monte Carlo: the force is a sum over data, momenta are new for each trajectory. */
void hybrid(void) {
  float *x = floats(COUNT), *p = floats(COUNT), *mine = floats(COUNT), *force = floats(COUNT);
  float *data = floats(COUNT);
  for (int i = 0; i < COUNT; i++)
    data[i] = normal();
  for (int trajectory = 0; trajectory < 6; trajectory++) {
    seed(100 + (unsigned)trajectory);
    for (int i = 0; i < COUNT; i++)
      p[i] = normal();
    for (int step = 0; step < 10; step++) {
      for (int i = 0; i < COUNT; i++)
        mine[i] = data[i] - x[i] - 0.1F * x[i] * x[i] * x[i];
      reduce(mine, force, COUNT);
      for (int i = 0; i < COUNT; i++) {
        p[i] += 0.05F * force[i];
        x[i] += 0.05F * p[i];
      }
    }
  }
}

/* An ensemble Kalman filter: means, then anomalies, of each rank's members. */
void ensemble(void) {
  enum { MEMBERS = 3 };
  float *member[MEMBERS], *mine = floats(COUNT), *mean = floats(COUNT), *spread = floats(COUNT);
  for (int m = 0; m < MEMBERS; m++) {
    member[m] = floats(COUNT);
    for (int i = 0; i < COUNT; i++)
      member[m][i] = normal();
  }
  for (int step = 0; step < 25; step++) {
    memset(mine, 0, COUNT * sizeof *mine);
    for (int m = 0; m < MEMBERS; m++)
      add(mine, 1.0 / (MEMBERS * size), member[m]);
    reduce(mine, mean, COUNT);
    memset(mine, 0, COUNT * sizeof *mine);
    for (int m = 0; m < MEMBERS; m++)
      for (int i = 0; i < COUNT; i++)
        mine[i] += (member[m][i] - mean[i]) * (member[m][i] - mean[i]);
    reduce(mine, spread, COUNT);
    for (int m = 0; m < MEMBERS; m++)
      for (int i = 0; i < COUNT; i++)
        member[m][i] += spread[i] / (1 + spread[i]) * (sinf((float)step) - member[m][i]) / 2;
  }
}

/* A particle filter: each rank's weighted states, and their weights. */
void particles(void) {
  float *state = floats(COUNT), *mine = floats(COUNT), *mean = floats(COUNT), weight, all;
  for (int step = 0; step < 50; step++) {
    weight = (float)exp(-uniform());
    MPI_Allreduce(&weight, &all, 1, MPI_FLOAT, MPI_SUM, comm);
    for (int i = 0; i < COUNT; i++) {
      state[i] = 0.95F * state[i] + 0.1F * normal();
      mine[i] = weight / all * state[i];
    }
    reduce(mine, mean, COUNT);
    for (int i = 0; i < COUNT; i++)
      state[i] += 0.2F * (mean[i] - state[i]);
  }
}

/* Sums a random sketch of each rank's rows, with new signs each time. */
void sketch(void) {
  float *row = floats(COUNT), *mine = floats(COUNT), *all = floats(COUNT);
  for (int i = 0; i < COUNT; i++)
    row[i] = normal();
  for (int step = 0; step < 50; step++) {
    for (int i = 0; i < COUNT; i++)
      mine[i] = uniform() < 0.5 ? row[i] : -row[(i * 7 + step) % COUNT];
    reduce(mine, all, COUNT);
  }
}

/* Stacks windows of signals, some of which are quiet. */
void stacking(void) {
  float *mine = floats(COUNT), *all = floats(COUNT);
  for (int window = 0; window < 60; window++) {
    for (int i = 0; i < COUNT; i++)
      mine[i] = (window % 10 == 9 ? 0.01F : 1) * normal();
    reduce(mine, all, COUNT);
  }
}

/* Expectation-maximization for two classes: weights of points, and weighted sums. */
void mixture(void) {
  float *centre = floats(COUNT), *mine = floats(COUNT), *all = floats(COUNT), *data = floats(COUNT);
  for (int i = 0; i < COUNT; i++)
    data[i] = normal() + (i % 2 ? 2.0F : -2.0F);
  for (int step = 0; step < 50; step++) {
    for (int i = 0; i < COUNT; i++) {
      float belongs = 1 / (1 + expf(-2 * centre[i] * data[i]));
      mine[i] = (2 * belongs - 1) * data[i] + 0.1F;
    }
    reduce(mine, all, COUNT);
    divide(centre, all, size);
  }
}

/* Landweber's iteration, with a right side that the result is compared with. */
void landweber(void) {
  float *b = right_side(100), *x = floats(COUNT), *w = floats(COUNT), *residual = floats(COUNT);
  for (int step = 0; step < 25; step++) {
    multiply(x, w, -1, -1);
    for (int i = 0; i < COUNT; i++)
      residual[i] = b[i] - w[i];
    multiply(residual, w, -1, -1);
    add(x, 0.05, w);
  }
}
