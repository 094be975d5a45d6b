/*
 * onebit-replay: recorded cases that are sound, wrong or damaged; on ranks that are threads.
 * mpi_replay.c has the ranks of MPI.
 */
#define _POSIX_C_SOURCE 200809L
#include <criterion/criterion.h>
#include <glob.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support.h"
#include "tests/support_program.h"
#include "tests/support_replay.h"
#include "tools/replay/replay.h"

#ifdef ONEBIT_HAVE_CUDA
#include <cuda_runtime_api.h>
#endif

static char scratch[PATH_ROOM];

static void begin(void) { scratch_create(scratch); }
static void end(void) { scratch_remove(scratch); }

/* A test that is skipped ends there and then, without what its suite does at the end. */
#define SKIP(...)                                                                                  \
  do {                                                                                             \
    end();                                                                                         \
    cr_skip_test(__VA_ARGS__);                                                                     \
  } while (0)
TestSuite(replay, .init = begin, .fini = end, .timeout = 120);

/* Replays and checks the verdict, and that the words say `part`. */
static struct replay_result replayed(const char *path, enum replay_verdict verdict,
                                     const char *part) {
  struct replay_result result;
  replay_with_threads(path, ONEBIT_DEVICE_HOST, &result);
  cr_expect_eq(result.verdict, verdict, "verdict %d, not %d: %s", result.verdict, verdict,
               result.error);
  cr_expect(strstr(result.error, part), "the words \"%s\" do not say \"%s\"", result.error, part);
  return result;
}

/* --- What is right and what is wrong -----------------------------------------------------------*/

Test(replay, sound_cases_are_ok) {
  const int worlds[] = {1, 2, 3, 4, 8};
  for (size_t i = 0; i < sizeof worlds / sizeof worlds[0]; i++) {
    char name[16], path[PATH_ROOM];
    snprintf(name, sizeof name, "allreduce-w%d", worlds[i]);
    record_allreduce(scratch, name, worlds[i], 1003, 4, path);
    struct replay_result result = replayed(path, REPLAY_OK, "");
    cr_expect(result.tally.values == 4 * 1003 && result.tally.exceptions == 0 &&
              result.tally.worst == 0);
    /* The oracle keeps the same bits. */
    cr_expect(result.drifts[0].value == 0 && result.drifts[1].value == 0);
    snprintf(name, sizeof name, "adam-w%d", worlds[i]);
    record_adam(scratch, name, worlds[i], 9, path);
    result = replayed(path, REPLAY_OK, "");
    cr_expect(result.tally.values == 9 * RECORDED_TOTAL && result.tally.exceptions == 0 &&
              result.tally.worst == 0);
    cr_expect(result.drifts[0].value < 1e-6, "momentum %g", result.drifts[0].value);
    snprintf(name, sizeof name, "zero-one-w%d", worlds[i]);
    record_zero_one(scratch, name, worlds[i], 14, path);
    result = replayed(path, REPLAY_OK, "");
    cr_expect(result.tally.values == 14 * RECORDED_TOTAL * (unsigned)worlds[i] &&
              result.tally.exceptions == 0 && result.tally.worst == 0);
    cr_expect(result.drifts[0].value < 1e-6, "momentum %g", result.drifts[0].value);
  }
}

/* Each rank has parameters of its own, and compares these. */
Test(replay, ranks_that_are_apart) {
  char path[PATH_ROOM];
  record_zero_one(scratch, "zero-one", 3, 14, path);
  const size_t last = recorded_values(path, "params.f32") - 3 * RECORDED_TOTAL; /* of step 13 */
  size_t differ = 0;
  for (size_t i = 0; i < RECORDED_TOTAL; i++)
    differ += recorded_value(path, "params.f32", last + i) !=
              recorded_value(path, "params.f32", last + RECORDED_TOTAL + i);
  cr_assert_gt(differ, RECORDED_TOTAL / 2, "only %zu parameters differ", differ);
  set_recorded_value(path, "params.f32", last + RECORDED_TOTAL + 5, 9); /* of rank 1 */
  struct replay_result result = replayed(path, REPLAY_FAILED, "step 13, value 5");
  cr_expect(result.tally.exceptions == 1 && result.tally.wild == 1);
}

Test(replay, one_sign_in_ten_thousand_is_allowed) {
  char path[PATH_ROOM];
  record_allreduce(scratch, "allreduce", 2, 5000, 3, path); /* 15,000 values */
  set_recorded_value(path, "out.f32", 7777, -recorded_value(path, "out.f32", 7777));
  struct replay_result result = replayed(path, REPLAY_OK, "");
  cr_expect(result.tally.exceptions == 1 && result.tally.wild == 0);
  cr_expect_float_eq(result.tally.worst, 2, 1e-6);
  set_recorded_value(path, "out.f32", 8888, -recorded_value(path, "out.f32", 8888));
  result = replayed(path, REPLAY_FAILED, "2 exceptions, 1 are allowed");
  cr_expect_eq(result.tally.exceptions, 2);
}

Test(replay, another_magnitude_is_not) {
  char path[PATH_ROOM];
  record_allreduce(scratch, "allreduce", 2, 5000, 3, path);
  float value = recorded_value(path, "out.f32", 12345);
  set_recorded_value(path, "out.f32", 12345, value * 1.000005f);
  struct replay_result result = replayed(path, REPLAY_OK, "");
  cr_expect(result.tally.exceptions == 0 && result.tally.worst > 1e-6);
  set_recorded_value(path, "out.f32", 12345, value * 1.0001f);
  replayed(path, REPLAY_FAILED, "1 differ in more than the sign; the first: step 2, value 2345");
  set_recorded_value(path, "out.f32", 12345, NAN);
  result = replayed(path, REPLAY_FAILED, "1 differ in more than the sign");
  cr_expect(isinf(result.tally.worst));
}

/* A parameter may be off by a few of its own updates, and only one in a thousand. */
Test(replay, parameters_may_differ_by_few_updates) {
  char path[PATH_ROOM];
  record_adam(scratch, "adam", 2, 9, path);
  size_t last = 8 * RECORDED_TOTAL;
  for (size_t i = 0; i < 28; i++) { /* of 28,737 values */
    float now = recorded_value(path, "params.f32", last + 10 * i);
    float before = recorded_value(path, "params.f32", last - RECORDED_TOTAL + 10 * i);
    set_recorded_value(path, "params.f32", last + 10 * i, now + 2 * (now - before));
  }
  struct replay_result result = replayed(path, REPLAY_OK, "");
  cr_expect_eq(result.tally.exceptions, 28);
  float value = recorded_value(path, "params.f32", last + 5);
  set_recorded_value(path, "params.f32", last + 5, value + 1e-3f);
  replayed(path, REPLAY_FAILED, "29 exceptions, 28 are allowed");
}

Test(replay, parameters_may_not_differ_by_more) {
  char path[PATH_ROOM];
  record_adam(scratch, "adam", 2, 9, path);
  set_recorded_value(path, "params.f32", 100, 2.0f + recorded_value(path, "params.f32", 100));
  replayed(path, REPLAY_FAILED, "by more than a few update lengths");
}

Test(replay, stages_must_agree) {
  char path[PATH_ROOM];
  record_adam(scratch, "adam", 2, 9, path);
  edit_case(path, "dense_allreduce_before_step", "dense_allreduce_before_step = 111111000");
  replayed(path, REPLAY_FAILED,
           "step 5: the optimizer is in its compressed stage, the recorded one was in its warm-up");
  edit_case(path, "dense_allreduce_before_step", "dense_allreduce_before_step = 111100000");
  replayed(path, REPLAY_FAILED, "step 4: the optimizer is in its warm-up stage");
}

/* 0/1 Adam has no warm-up: what counts is in which steps gradients were averaged. */
Test(replay, exchanges_must_agree) {
  char path[PATH_ROOM];
  record_zero_one(scratch, "zero-one", 2, 10, path);
  edit_case(path, "dense_allreduce_before_step", "dense_allreduce_before_step = 1111010000");
  replayed(path, REPLAY_FAILED,
           "step 3: the optimizer averaged gradients in bits or not at all, the recorded one in "
           "full precision");
  edit_case(path, "dense_allreduce_before_step", "dense_allreduce_before_step = 1100010000");
  replayed(path, REPLAY_FAILED, "step 2: the optimizer averaged gradients in full precision");
}

Test(replay, what_the_library_refuses_is_told) {
  char path[PATH_ROOM];
  record_adam(scratch, "adam", 2, 9, path);
  edit_case(path, "betas", "betas = 0.9 1.5");
  replayed(path, REPLAY_FAILED, "onebit_adam_create after 0 steps: ONEBIT_ERROR_ARGUMENT: beta2");
  char other[PATH_ROOM];
  record_allreduce(scratch, "allreduce", 2, 100, 4, other);
  set_recorded_value(other, "in.f32", 2 * 200 + 150, INFINITY); /* step 2, rank 1 */
  replayed(other, REPLAY_FAILED, "onebit_allreduce after 2 steps: ONEBIT_SKIPPED");
}

/* --- The program -------------------------------------------------------------------------------*/

static void small_allreduce(const char *name, char path[PATH_ROOM]) {
  record_allreduce(scratch, name, 2, 100, 2, path);
}

static void small_adam(const char *name, char path[PATH_ROOM]) {
  record_adam(scratch, name, 2, 7, path);
}

static void small_zero_one(const char *name, char path[PATH_ROOM]) {
  record_zero_one(scratch, name, 2, 7, path);
}

static void small_lamb(const char *name, char path[PATH_ROOM]) {
  record_lamb(scratch, name, 2, 7, path);
}

Test(replay, program_prints_a_line_a_case) {
  char good[PATH_ROOM], bad[PATH_ROOM], other[PATH_ROOM];
  small_allreduce("good", good);
  small_adam("bad", bad);
  small_adam("other", other);
  cr_expect_str_eq(program(0, "onebit-replay --loopback --codec scalar %s/ %s", good, good),
                   "replay good: 200 values, 0 exceptions, worst 0, ok\n"
                   "replay good: 200 values, 0 exceptions, worst 0, ok\n");
  set_recorded_value(bad, "params.f32", 0, 9);
  lengthen_file(other, "grads.f32", -4);
  const char *said = program(1, "onebit-replay --loopback %s %s %s", bad, other, good);
  expect_said(said, "replay bad: 22351 values, 1 exceptions, worst ");
  expect_said(said, ", FAILED\n");
  expect_said(said, "other/grads.f32: 178804 bytes, not the 178808 of 7 x 2 x 3193 float32\n");
  expect_said(said, "replay other: 0 values, 0 exceptions, worst 0, FAILED\n");
  expect_said(said, "replay good: 200 values, 0 exceptions, worst 0, ok\n");
}

/* The same steps, made by another optimizer. */
Test(replay, program_knows_kinds_apart) {
  char adam[PATH_ROOM], zero_one[PATH_ROOM], lamb[PATH_ROOM];
  small_adam("adam", adam);
  small_zero_one("zero-one", zero_one);
  small_lamb("lamb", lamb);
  expect_said(program(0, "onebit-replay --loopback %s", adam), "replay adam: 22351 values, 0 ex");
  expect_said(program(0, "onebit-replay --loopback %s", zero_one),
              "replay zero-one: 44702 values, 0 exceptions, worst 0, ok\n");
  expect_said(program(1, "onebit-replay --loopback %s", lamb), "replay lamb: 22351 values, ");
  expect_said(program(2, "onebit-replay --loopback --skip-unsupported %s", adam),
              "--skip-unsupported: unknown option");
}

Test(replay, program_refuses_a_wrong_command_line) {
  expect_said(program(2, "onebit-replay --loopback"), "no DIR was given");
  expect_said(program(2, "onebit-replay --loopback --codec abacus x"), "codec abacus: unknown");
  expect_said(program(2, "onebit-replay --loopback x --codec"), "--codec: needs a value");
  expect_said(program(2, "onebit-replay --loopback --gently x"), "--gently: unknown option");
  expect_said(program(2, "onebit-replay --loopback --device gpu x"),
              "--device=gpu: expected host or cuda");
  expect_said(program(0, "onebit-replay --help"), "usage: onebit-replay");
}

/* --- On a device -------------------------------------------------------------------------------*/

#ifdef ONEBIT_HAVE_CUDA

static bool device_is_here(void) {
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0;
}

/* The same bits as on the host: the same worst value. */
static void compare_devices(const char *path) {
  struct replay_result host, device;
  replay_with_threads(path, ONEBIT_DEVICE_HOST, &host);
  replay_with_threads(path, ONEBIT_DEVICE_CUDA, &device);
  cr_expect(device.verdict == REPLAY_OK, "%s: %s", path, device.error);
  cr_expect(device.tally.values == host.tally.values && device.tally.worst == host.tally.worst &&
                device.drifts[0].value == host.drifts[0].value,
            "%s: %llu values, worst %g, drift %g; on the host %llu, %g, %g", path,
            (unsigned long long)device.tally.values, device.tally.worst, device.drifts[0].value,
            (unsigned long long)host.tally.values, host.tally.worst, host.drifts[0].value);
}

Test(replay, cases_on_a_device) {
  char path[PATH_ROOM];
  if (!device_is_here())
    SKIP("no CUDA device");
  record_allreduce(scratch, "allreduce", 3, 1003, 4, path);
  compare_devices(path);
  for (int world = 1; world <= 3; world += 2) {
    record_adam(scratch, world == 1 ? "adam-alone" : "adam", world, 9, path);
    compare_devices(path);
  }
  char *said = strdup(program(0, "onebit-replay --loopback --device cuda %s", path));
  cr_expect_str_eq(program(0, "onebit-replay --loopback %s", path), said);
  free(said);
}

static void replay_golden_on_device(char **paths, size_t count) {
  for (size_t i = 0; i < count && device_is_here(); i++)
    compare_devices(paths[i]);
}

#else

Test(replay, no_device_gives_words) {
  expect_said(program(2, "onebit-replay --loopback --device cuda x"),
              "--device cuda: this build is without CUDA");
}

static void replay_golden_on_device(char **paths, size_t count) { (void)paths, (void)count; }

#endif

/* --- What DeepSpeed recorded -------------------------------------------------------------------*/

static void replay_golden(const char *codec, char **paths, size_t count) {
  if (!use_codec(codec))
    return;
  for (size_t i = 0; i < count; i++) {
    struct replay_result result;
    replay_with_threads(paths[i], ONEBIT_DEVICE_HOST, &result);
    cr_expect(result.verdict == REPLAY_OK && result.tally.exceptions == 0, "%s on %s: %s", paths[i],
              codec, result.error);
  }
}

Test(replay, golden_cases) {
  const char *shared = getenv("ONEBIT_SHARED");
  char pattern[PATH_ROOM];
  glob_t found;
  path_join(pattern, shared ? shared : "../shared", "golden/*-w*");
  if (glob(pattern, 0, NULL, &found) != 0)
    SKIP("no recorded cases here: %s", pattern);
  for (size_t c = 0; c < test_codecs_count; c++)
    replay_golden(test_codecs[c], found.gl_pathv, found.gl_pathc);
  replay_golden_on_device(found.gl_pathv, found.gl_pathc);
  globfree(&found);
}
