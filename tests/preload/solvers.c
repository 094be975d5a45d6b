/*
 * Programs that solve or stack something with sums of floats, each of which must be right: cases of
 * streams.c. Each rank has some columns of the matrix, or some of the data.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/preload/streams.h"

/* ---- A sparse matrix, by columns ---- */

static float *partial; /* of this rank */

/* Computes y = A x with three bands; A is not symmetric. */
static void multiply(const float *x, float *y) {
  if (!partial)
    partial = floats(COUNT);
  for (int i = 0; i < COUNT; i++) {
    float left = i && (i - 1) % size == rank ? -0.4F * x[i - 1] : 0;
    float right = i + 1 < COUNT && (i + 1) % size == rank ? -x[i + 1] : 0;
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

static float *right_side(void) {
  float *b = floats(COUNT);
  seed(5);
  for (int i = 0; i < COUNT; i++)
    b[i] = normal();
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
  float *b = right_side(), *x = floats(COUNT), *w = floats(COUNT), *v[BASIS + 1];
  for (int j = 0; j <= BASIS; j++)
    v[j] = floats(COUNT);
  for (int cycle = 0; cycle < 8; cycle++) {
    double h[BASIS + 1][BASIS] = {{0}}, y[BASIS], beta;
    multiply(x, w);
    for (int i = 0; i < COUNT; i++)
      v[0][i] = b[i] - w[i];
    beta = sqrt(dot(v[0], v[0]));
    divide(v[0], v[0], beta);
    for (int j = 0; j < BASIS; j++) {
      multiply(v[j], w);
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
  float *r = right_side(), *start = floats(COUNT), *p = floats(COUNT), *v = floats(COUNT);
  float *t = floats(COUNT), *x = floats(COUNT);
  double rho = 1, alpha = 1, omega = 1;
  memcpy(start, r, COUNT * sizeof *r);
  for (int step = 0; step < 20; step++) {
    double next = dot(start, r), beta = next / rho * alpha / omega;
    for (int i = 0; i < COUNT; i++)
      p[i] = (float)((double)r[i] + beta * ((double)p[i] - omega * (double)v[i]));
    multiply(p, v);
    alpha = next / dot(start, v);
    add(r, -alpha, v);
    multiply(r, t);
    omega = dot(t, r) / dot(t, t);
    add(x, alpha, p);
    add(x, omega, r);
    add(r, -omega, t);
    rho = next;
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
