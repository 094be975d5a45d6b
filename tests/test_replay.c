/*
 * onebit-replay: recorded cases that are sound, wrong, damaged or not for this version; on ranks
 * that are threads. mpi_replay.c has the ranks of MPI.
 */
#define _POSIX_C_SOURCE 200809L
#include <criterion/criterion.h>
#include <glob.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/replay_run.h"
#include "tests/support.h"
#include "tests/support_program.h"
#include "tests/support_replay.h"

#ifdef ONEBIT_HAVE_CUDA
#include <cuda_runtime_api.h>
#endif

static char scratch[PATH_ROOM];

static void begin(void) { scratch_create(scratch); }
static void end(void) { scratch_remove(scratch); }
TestSuite(replay, .init = begin, .fini = end, .timeout = 120);

/* Replays and checks the verdict, and that the words say `part`. */
static struct replay_result replayed(const char *path, enum replay_verdict verdict,
                                     const char *part) {
  struct replay_result result;
  replay_with_threads(path, ONEBIT_DEVICE_HOST, &result);
  cr_expect_eq(result.verdict, verdict, "verdict %d, not %d: %s", result.verdict, verdict,
               result.words);
  cr_expect(strstr(result.words, part), "the words \"%s\" do not say \"%s\"", result.words, part);
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
  }
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

/* --- Damage ------------------------------------------------------------------------------------*/

static const char *const allreduce_files[] = {"in.f32", "out.f32", "worker_error.f32",
                                              "server_error.f32", "case.txt"};
static const char *const adam_files[] = {"grads.f32",   "params.f32",     "params0.f32",
                                         "exp_avg.f32", "exp_avg_sq.f32", "case.txt"};

static void damage(const char *path, const char *name) {
  char file[PATH_ROOM], moved[PATH_ROOM];
  path_join(file, path, name);
  path_join(moved, path, "moved");
  if (strcmp(name, "case.txt") != 0) {
    size_t last = recorded_values(path, name) - 1;
    float value = recorded_value(path, name, last);
    lengthen_file(path, name, 4);
    replayed(path, REPLAY_FAILED, name);
    lengthen_file(path, name, -5);
    replayed(path, REPLAY_FAILED, name);
    set_recorded_value(path, name, last, value);
  }
  cr_assert_eq(rename(file, moved), 0);
  struct replay_result result = replayed(path, REPLAY_FAILED, name);
  cr_expect(strstr(result.words, "No such file"), "%s", result.words);
  cr_assert_eq(rename(moved, file), 0);
}

Test(replay, files_must_be_there_and_as_long_as_the_case_says) {
  char path[PATH_ROOM];
  record_allreduce(scratch, "allreduce", 3, 100, 2, path);
  for (size_t i = 0; i < sizeof allreduce_files / sizeof allreduce_files[0]; i++)
    damage(path, allreduce_files[i]);
  replayed(path, REPLAY_OK, "");
  record_adam(scratch, "adam", 3, 7, path);
  for (size_t i = 0; i < sizeof adam_files / sizeof adam_files[0]; i++)
    damage(path, adam_files[i]);
  replayed(path, REPLAY_OK, "");
  path_join(path, scratch, "nowhere");
  replayed(path, REPLAY_FAILED, "nowhere/case.txt: No such file");
}

struct edit {
  const char *key, *line, *words;
};

static void edit_each(const struct edit *edits, size_t count,
                      void (*record)(const char *name, char path[PATH_ROOM])) {
  for (size_t i = 0; i < count; i++) {
    char name[16], path[PATH_ROOM];
    snprintf(name, sizeof name, "case-%zu", i);
    record(name, path);
    edit_case(path, edits[i].key, edits[i].line);
    struct replay_result result = replayed(path, REPLAY_FAILED, edits[i].words);
    cr_expect(strstr(result.words, "case.txt") && strstr(result.words, name), "%s", result.words);
  }
}

static void small_allreduce(const char *name, char path[PATH_ROOM]) {
  record_allreduce(scratch, name, 2, 100, 2, path);
}

static void small_adam(const char *name, char path[PATH_ROOM]) {
  record_adam(scratch, name, 2, 7, path);
}

Test(replay, damaged_text_of_an_allreduce) {
  static const struct edit edits[] = {
      {"kind", "", "no line \"kind = ...\""},
      {"kind", "kind = adma", "kind is adma"},
      {"kind", "kind allreduce", "line 1: \"kind allreduce\" is not \"key = value\""},
      {"kind", "kind =", "line 1"},
      {"seed", "count = 100", "line 5: count was given in line 4"},
      {"world", "world = 0", "world is 0"},
      {"world", "world = -2", "world is -2"},
      {"world", "world = 2.5", "world is 2.5"},
      {"world", "world = two", "world is two"},
      {"world", "world = 99999999999999999999", "world is 9999"},
      {"world", "world = 5000", "world is 5000, not a whole number from 1 to 4096"},
      {"steps", "", "steps"},
      {"steps", "steps = 0", "steps is 0"},
      {"count", "count = 0", "count is 0"},
      {"padded", "padded = 99", "padded is 99"},
      {"padded", "padded = 113", "padded is 113, not a multiple of world, 2"},
  };
  edit_each(edits, sizeof edits / sizeof edits[0], small_allreduce);
}

Test(replay, damaged_text_of_adam) {
  static const struct edit edits[] = {
      {"shapes", "", "no line \"shapes = ...\""},
      {"shapes", "shapes = 513 37x 1 8 64x40", "shape 2, \"37x\""},
      {"shapes", "shapes = 513 37x3 1 8 -64x40", "shape 5"},
      {"shapes", "shapes = 513 37x3 1 8 64*40", "shape 5"},
      {"shapes", "shapes = 99999999999x99999999999", "shape 1"},
      {"shapes", "shapes = 513 37x3 1 8 64x41", "the shapes have 3257 elements"},
      {"total", "total = 12", "total is 12"},
      {"lr", "lr = fast", "lr is fast, not 1 finite number"},
      {"lr", "lr = nan", "lr is nan"},
      {"betas", "betas = 0.9", "betas is 0.9, not 2 finite numbers"},
      {"betas", "betas = 0.9 0.97 0.99", "betas is"},
      {"betas", "betas = 0 0.97", "none of them can be 0"},
      {"eps", "eps = 0", "none of them can be 0"},
      {"eps", "eps = 1e999", "eps is 1e999"},
      {"weight_decay", "", "weight_decay"},
      {"freeze_step", "freeze_step = -1", "freeze_step is -1"},
      {"params_ranks", "params_ranks = 3", "params_ranks is 3, not 1 or world, 2"},
      {"dense_allreduce_before_step", "dense_allreduce_before_step = 111111", "each of 7 steps"},
      {"dense_allreduce_before_step", "dense_allreduce_before_step = 1111121", "each of 7 steps"},
  };
  edit_each(edits, sizeof edits / sizeof edits[0], small_adam);
}

/* Numbers that ask for other files name the file that does not fit. */
Test(replay, text_and_files_must_fit) {
  char path[PATH_ROOM];
  small_allreduce("steps", path);
  edit_case(path, "steps", "steps = 3");
  replayed(path, REPLAY_FAILED, "in.f32: 1600 bytes, not the 2400 of 3 x 2 x 100 float32");
  small_allreduce("huge", path);
  edit_case(path, "count", "count = 1099511627776");
  edit_case(path, "padded", "padded = 1099511627776");
  edit_case(path, "steps", "steps = 16777216");
  edit_case(path, "world", "world = 4096");
  replayed(path, REPLAY_FAILED, "more than a file can have");
  small_allreduce("padded", path);
  edit_case(path, "padded", "padded = 128");
  lengthen_file(path, "worker_error.f32", 2 * 16 * 4);
  lengthen_file(path, "server_error.f32", 16 * 4);
  replayed(path, REPLAY_FAILED, "padded is 128, in shares of 64; the library pads to 112");
}

/* --- The program -------------------------------------------------------------------------------*/

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

Test(replay, program_does_not_take_unsupported_for_ok) {
  char path[PATH_ROOM];
  small_adam("one", path);
  edit_case(path, "kind", "kind = zoadam");
  cr_expect_str_eq(program(1, "onebit-replay --loopback %s", path),
                   "replay one: not supported: kind zoadam\n");
  cr_expect_str_eq(program(0, "onebit-replay --loopback --skip-unsupported %s", path),
                   "replay one: not supported: kind zoadam\n");
}

Test(replay, program_refuses_a_wrong_command_line) {
  expect_said(program(2, "onebit-replay --loopback"), "no DIR was given");
  expect_said(program(2, "onebit-replay --loopback --codec abacus x"), "codec abacus: unknown");
  expect_said(program(2, "onebit-replay --loopback x --codec"), "--codec: needs a value");
  expect_said(program(2, "onebit-replay --loopback --gently x"), "--gently: unknown option");
  expect_said(program(2, "onebit-replay --loopback --device gpu x"), "neither host nor cuda");
  expect_said(program(0, "onebit-replay --help"), "Usage: onebit-replay");
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
  cr_expect(device.verdict == REPLAY_OK, "%s: %s", path, device.words);
  cr_expect(device.tally.values == host.tally.values && device.tally.worst == host.tally.worst &&
                device.drifts[0].value == host.drifts[0].value,
            "%s: %llu values, worst %g, drift %g; on the host %llu, %g, %g", path,
            (unsigned long long)device.tally.values, device.tally.worst, device.drifts[0].value,
            (unsigned long long)host.tally.values, host.tally.worst, host.drifts[0].value);
}

Test(replay, cases_on_a_device) {
  char path[PATH_ROOM];
  if (!device_is_here())
    cr_skip_test("no CUDA device");
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
              codec, result.words);
  }
}

Test(replay, golden_cases) {
  const char *shared = getenv("ONEBIT_SHARED");
  char pattern[PATH_ROOM];
  glob_t found;
  path_join(pattern, shared ? shared : "../shared", "golden/a[dl]*-w*");
  if (glob(pattern, 0, NULL, &found) != 0)
    cr_skip_test("no recorded cases here: %s", pattern);
  for (size_t c = 0; c < test_codecs_count; c++)
    replay_golden(test_codecs[c], found.gl_pathv, found.gl_pathc);
  replay_golden_on_device(found.gl_pathv, found.gl_pathc);
  globfree(&found);
}
