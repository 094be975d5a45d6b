/*
 * Which streams are like a gradient: made up here, with whole programs in tests/preload/streams.c.
 */
#include <criterion/criterion.h>
#include <math.h>
#include <stdint.h>

#include "base/memory.h"
#include "dropin/watch.h"

TestSuite(watch, .timeout = 60);

enum { COUNT = 20000 };

static double noise(uint64_t call, uint64_t element) { /* near normal: a sum of uniform ones */
  uint64_t z = call * 0x9e3779b97f4a7c15U + element * 0xd1342543de82ef95U + 1;
  double sum = -6;
  for (int i = 0; i < 12; i++) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9U;
    z = (z ^ z >> 27) * 0x94d049bb133111ebU;
    sum += (double)(z >> 11) * 0x1p-53;
  }
  return sum;
}

/* Each gives an element of a call; 1e6 + k is the k-th stream of noise that stays. */
static double white(int t, int i) { return 1e-4 * noise((uint64_t)t, (uint64_t)i); }
static double drifting(int t, int i) {
  return noise(1000000, (uint64_t)i) + 0.7 * noise((uint64_t)t, (uint64_t)i);
}
static double layered(int t, int i) { return noise((uint64_t)t, (uint64_t)i) * pow(2, i / 2500); }
static double falling(int t, int i) { return noise((uint64_t)t, (uint64_t)i) * pow(0.96, t); }
static double half_zero(int t, int i) { return i % 3 ? noise((uint64_t)t, (uint64_t)i) : 0; }
static double momentum(int t, int i) {
  double sum = 0;
  for (int back = 0; back < 60; back++)
    sum = 0.9 * sum + noise((uint64_t)(t + back), (uint64_t)i);
  return sum;
}

static double positive(int t, int i) { return fabs(noise((uint64_t)t, (uint64_t)i)); }
static double offset(int t, int i) { return 2 + noise((uint64_t)t, (uint64_t)i); }
static double whole(int t, int i) { return rint(9 * noise((uint64_t)t, (uint64_t)i)); }
static double sparse(int t, int i) {
  return noise((uint64_t)t + 77, (uint64_t)i) > 1.2 ? noise((uint64_t)t, (uint64_t)i) : 0;
}
static double nothing(int t, int i) { return 0 * (t + i); }
static double constant(int t, int i) { return t < 0 ? 0 : noise(1000000, (uint64_t)i); }
static double wave(int t, int i) { return sin(0.3 * t + 7 * noise(1000000, (uint64_t)i)); }
static double axes(int t, int i) {
  return noise(1000000 + (uint64_t)t % 3, (uint64_t)i) + 0.02 * t * noise(2000000, (uint64_t)i);
}
static double conjugate(int t, int i) {
  return noise((uint64_t)t, (uint64_t)i) - noise((uint64_t)t + 1, (uint64_t)i);
}
static double field(int t, int i) { /* a rough wave: sums of two that run */
  return noise(1000000, (uint64_t)(i + t)) + noise(2000000, (uint64_t)(i - t + 100));
}
static double growing(int t, int i) { return noise((uint64_t)t, (uint64_t)i) * pow(1.1, t); }
static double shrinking(int t, int i) { return noise((uint64_t)t, (uint64_t)i) * pow(0.9, t); }
static double varying(int t, int i) { return noise((uint64_t)t, (uint64_t)i) * (t % 4 ? 1 : 1e-3); }
static double walk(int t, int i) { /* weights */
  double sum = 20 * noise(1000000, (uint64_t)i);
  for (int step = 0; step <= t; step++)
    sum += noise((uint64_t)step, (uint64_t)i);
  return sum;
}
static double heavy(int t, int i) { /* a few elements, always of one sign, far above the others */
  return (i % 64 == 5 ? 900 : 1) * fabs(noise((uint64_t)t, (uint64_t)i)) * (i % 2 ? 1 : -1);
}
static double endless(int t, int i) {
  return t % 2 && i % 9 == 0 ? (double)INFINITY : noise((uint64_t)t, (uint64_t)i);
}

static struct ob_watch *watched(double (*value)(int, int), unsigned calls) {
  static float values[COUNT];
  struct ob_watch *watch = ob_watch_create();
  cr_assert_not_null(watch);
  for (unsigned t = 0; t < calls; t++) {
    for (int i = 0; i < COUNT; i++)
      values[i] = (float)value((int)t, i);
    ob_watch_add(watch, ONEBIT_FLOAT32, values, COUNT);
  }
  return watch;
}

static enum ob_finding finding_of(double (*value)(int, int), unsigned calls) {
  struct ob_watch *watch = watched(value, calls);
  enum ob_finding finding = ob_watch_judge(watch, calls);
  ob_watch_destroy(watch);
  return finding;
}

Test(watch, gradients_are_found_to_be_such) {
  static double (*const streams[])(int, int) = {white,   drifting,  layered,
                                                falling, half_zero, momentum};
  for (size_t i = 0; i < sizeof streams / sizeof streams[0]; i++) {
    cr_expect_eq(finding_of(streams[i], OB_WATCH_CALLS), OB_FINDING_NONE, "stream %zu: %s", i,
                 ob_finding_text(finding_of(streams[i], OB_WATCH_CALLS)));
    cr_expect_eq(finding_of(streams[i], OB_WATCH_AGAIN), OB_FINDING_NONE, "short, stream %zu", i);
  }
}

Test(watch, others_are_refused) {
  static const struct {
    double (*value)(int, int);
    enum ob_finding finding;
  } cases[] = {{positive, OB_FINDING_ONE_SIGNED}, {offset, OB_FINDING_ONE_SIGNED},
               {whole, OB_FINDING_INTEGER},       {sparse, OB_FINDING_SPARSE},
               {nothing, OB_FINDING_SPARSE},      {constant, OB_FINDING_SMOOTH},
               {wave, OB_FINDING_SMOOTH},         {walk, OB_FINDING_SMOOTH},
               {axes, OB_FINDING_REPEATED},       {conjugate, OB_FINDING_ALTERNATING},
               {field, OB_FINDING_PREDICTED},     {growing, OB_FINDING_GROWING},
               {shrinking, OB_FINDING_SHRINKING}, {varying, OB_FINDING_VARYING},
               {endless, OB_FINDING_UNSEEN}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    enum ob_finding finding = finding_of(cases[i].value, OB_WATCH_CALLS);
    cr_expect_eq(finding, cases[i].finding, "case %zu: %s", i, ob_finding_text(finding));
  }
  cr_expect_neq(finding_of(heavy, OB_WATCH_CALLS), OB_FINDING_NONE);
  cr_expect_eq(ob_watch_judge(NULL, OB_WATCH_CALLS), OB_FINDING_UNSEEN);
}

static double solver(int t, int i) {
  return noise((uint64_t)t, (uint64_t)i) + noise((uint64_t)t + 500, (uint64_t)i);
}

Test(watch, calls_that_correlate_are_related) {
  struct ob_watch *one = watched(white, 8), *two = watched(solver, 7), *three = watched(wave, 8);
  cr_expect(ob_watch_related(one, two));
  cr_expect(!ob_watch_related(one, three));
  cr_expect(!ob_watch_related(one, NULL));
  ob_watch_destroy(one), ob_watch_destroy(two), ob_watch_destroy(three);
}

Test(watch, small_tensors_and_no_memory_are_fine) {
  float few[3] = {1, -2, 3};
  uint16_t halves[3] = {0x3c00, 0xc000, 0x3c00};
  struct ob_watch *watch = ob_watch_create();
  for (int t = 0; t < OB_WATCH_CALLS + 2; t++)
    ob_watch_add(watch, t % 2 ? ONEBIT_FLOAT16 : ONEBIT_FLOAT32,
                 t % 2 ? (const void *)halves : (const void *)few, 3);
  cr_expect_neq(ob_watch_judge(watch, OB_WATCH_CALLS), OB_FINDING_NONE);
  ob_watch_destroy(watch);
  ob_memory_fail_at(1);
  cr_expect_null(ob_watch_create());
  ob_memory_fail_at(0);
  ob_watch_add(NULL, ONEBIT_FLOAT32, few, 3);
  for (int finding = 0; finding <= OB_FINDING_COUNT; finding++)
    cr_expect_not_null(ob_finding_text((enum ob_finding)finding));
}
