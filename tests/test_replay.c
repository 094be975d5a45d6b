/* onebit-replay: recorded cases that are sound or wrong, and those of DeepSpeed. */
#include <glob.h>

#include "tests/replay/replay.h"
#include "tests/support.h"
#include "tests/support_replay.h"

static char scratch[PATH_ROOM];

static void begin(void) { scratch_create(scratch); }
static void end(void) { scratch_remove(scratch); }

TestSuite(replay, .init = begin, .fini = end, .timeout = 120);

/* Replays and checks the verdict, and that the words say `part`. */
static struct replay_result replayed(const char *path, bool ok, const char *part) {
  struct replay_result result;
  replay_run(path, &result);
  cr_expect_eq(!result.failed, ok, "ok is %d: %s", !result.failed, result.error);
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
    struct replay_result result = replayed(path, true, "");
    cr_expect(result.values == 4 * 1003 && result.exceptions == 0 && result.worst == 0);
    snprintf(name, sizeof name, "adam-w%d", worlds[i]);
    record_adam(scratch, name, worlds[i], 9, path);
    result = replayed(path, true, "");
    cr_expect(result.values == 9 * RECORDED_TOTAL && result.exceptions == 0 && result.worst == 0);
  }
}

Test(replay, one_sign_in_ten_thousand_is_allowed) {
  char path[PATH_ROOM];
  record_allreduce(scratch, "allreduce", 2, 5000, 3, path); /* 15,000 values */
  set_recorded_value(path, "out.f32", 7777, -recorded_value(path, "out.f32", 7777));
  struct replay_result result = replayed(path, true, "");
  cr_expect(result.exceptions == 1 && result.wild == 0);
  cr_expect_float_eq(result.worst, 2, 1e-6);
  set_recorded_value(path, "out.f32", 8888, -recorded_value(path, "out.f32", 8888));
  result = replayed(path, false, "2 exceptions, 1 are allowed");
  cr_expect_eq(result.exceptions, 2);
}

Test(replay, another_magnitude_is_not) {
  char path[PATH_ROOM];
  record_allreduce(scratch, "allreduce", 2, 5000, 3, path);
  float value = recorded_value(path, "out.f32", 12345);
  set_recorded_value(path, "out.f32", 12345, value * 1.000005f);
  struct replay_result result = replayed(path, true, "");
  cr_expect(result.exceptions == 0 && result.worst > 1e-6);
  set_recorded_value(path, "out.f32", 12345, value * 1.0001f);
  replayed(path, false, "1 by more than rounding; the first: step 2, value 2345");
  set_recorded_value(path, "out.f32", 12345, NAN);
  result = replayed(path, false, "1 by more than rounding");
  cr_expect(isinf(result.worst));
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
  struct replay_result result = replayed(path, true, "");
  cr_expect_eq(result.exceptions, 28);
  float value = recorded_value(path, "params.f32", last + 5);
  set_recorded_value(path, "params.f32", last + 5, value + 1e-3f);
  replayed(path, false, "29 exceptions, 28 are allowed");
}

Test(replay, parameters_may_not_differ_by_more) {
  char path[PATH_ROOM];
  record_adam(scratch, "adam", 2, 9, path);
  set_recorded_value(path, "params.f32", 100, 2.0f + recorded_value(path, "params.f32", 100));
  replayed(path, false, " 1 by more than rounding");
}

/* --- The program -------------------------------------------------------------------------------*/

Test(replay, program_prints_a_line_a_case) {
  char good[PATH_ROOM], bad[PATH_ROOM], other[PATH_ROOM];
  record_allreduce(scratch, "good", 2, 100, 2, good);
  record_adam(scratch, "bad", 2, 7, bad);
  record_adam(scratch, "other", 2, 7, other);
  cr_expect_str_eq(program(0, "tests/onebit-replay --loopback --codec scalar %s/ %s", good, good),
                   "replay good: 200 values, 0 exceptions, worst 0, ok\n"
                   "replay good: 200 values, 0 exceptions, worst 0, ok\n");
  set_recorded_value(bad, "params.f32", 0, 9);
  lengthen_file(other, "grads.f32", -4);
  const char *said = program(1, "tests/onebit-replay --loopback %s %s %s", bad, other, good);
  expect_said(said, "replay bad: 22351 values, 1 exceptions, worst ");
  expect_said(said, ", FAILED\n");
  expect_said(said, "other/grads.f32: 178804 bytes, not the 178808 of 7 x 2 x 3193 float32\n");
  expect_said(said, "replay other: 0 values, 0 exceptions, worst 0, FAILED\n");
  expect_said(said, "replay good: 200 values, 0 exceptions, worst 0, ok\n");
}

/* --- What DeepSpeed recorded -------------------------------------------------------------------*/

static void replay_golden(const char *codec, char **paths, size_t count) {
  if (!use_codec(codec))
    return;
  for (size_t i = 0; i < count; i++) {
    struct replay_result result;
    replay_run(paths[i], &result);
    cr_expect(!result.failed && result.exceptions == 0, "%s on %s: %s", paths[i], codec,
              result.error);
  }
}

Test(replay, golden_cases) {
  const char *shared = getenv("ONEBIT_SHARED");
  char pattern[PATH_ROOM];
  glob_t found;
  path_join(pattern, shared ? shared : "../shared", "golden/*-w*");
  if (glob(pattern, 0, NULL, &found) !=
      0) { /* a skipped test ends without what its suite does at the end */
    end();
    cr_skip_test("no recorded cases here: %s", pattern);
  }
  for (size_t c = 0; c < test_codecs_count; c++)
    replay_golden(test_codecs[c], found.gl_pathv, found.gl_pathc);
  globfree(&found);
}
