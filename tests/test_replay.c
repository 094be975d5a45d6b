/* onebit-replay: recorded cases that are sound, wrong or damaged. */
#include <glob.h>

#include "tests/replay/replay.h"
#include "tests/support.h"
#include "tests/support_program.h"
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

Test(replay, exchanges_must_agree) {
  char adam[PATH_ROOM];
  record_adam(scratch, "adam", 2, 9, adam);
  edit_case(adam, "dense_allreduce_before_step", "dense_allreduce_before_step = 111111000");
  replayed(adam, false, "step 5: gradients are not averaged in full precision");
  edit_case(adam, "dense_allreduce_before_step", "dense_allreduce_before_step = 111100000");
  replayed(adam, false, "step 4: gradients are averaged in full precision");
}

Test(replay, what_the_library_refuses_is_told) {
  char path[PATH_ROOM];
  record_adam(scratch, "adam", 2, 9, path);
  edit_case(path, "betas", "betas = 0.9 1.5");
  replayed(path, false, "onebit_adam_create after 0 steps: ONEBIT_ERROR_ARGUMENT: beta2");
  char other[PATH_ROOM];
  record_allreduce(scratch, "allreduce", 2, 100, 4, other);
  set_recorded_value(other, "in.f32", 2 * 200 + 150, INFINITY); /* step 2, rank 1 */
  replayed(other, false, "onebit_allreduce after 2 steps: ONEBIT_SKIPPED");
}

/* --- The program -------------------------------------------------------------------------------*/

static void small_allreduce(const char *name, char path[PATH_ROOM]) {
  record_allreduce(scratch, name, 2, 100, 2, path);
}

static void small_adam(const char *name, char path[PATH_ROOM]) {
  record_adam(scratch, name, 2, 7, path);
}

Test(replay, program_prints_a_line_a_case) {
  char good[PATH_ROOM], bad[PATH_ROOM], other[PATH_ROOM];
  small_allreduce("good", good);
  small_adam("bad", bad);
  small_adam("other", other);
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

Test(replay, program_refuses_a_wrong_command_line) {
  expect_said(program(2, "tests/onebit-replay --loopback"), "usage: onebit-replay");
  expect_said(program(2, "tests/onebit-replay --gently x"), "usage: onebit-replay");
  expect_said(program(2, "tests/onebit-replay --codec"), "usage: onebit-replay");
  expect_said(program(1, "tests/onebit-replay --codec abacus /nowhere"),
              "/nowhere/case.txt: No such");
}

/* --- Damage ------------------------------------------------------------------------------------*/

static void damage(const char *path, const char *name) {
  char file[PATH_ROOM], moved[PATH_ROOM];
  path_join(file, path, name);
  path_join(moved, path, "moved");
  if (strcmp(name, "case.txt") != 0) {
    lengthen_file(path, name, 4);
    replayed(path, false, name);
    lengthen_file(path, name, -4);
  }
  cr_assert_eq(rename(file, moved), 0);
  struct replay_result result = replayed(path, false, name);
  cr_expect(strstr(result.error, "No such file"), "%s", result.error);
  cr_assert_eq(rename(moved, file), 0);
}

Test(replay, files_must_be_there_and_as_long_as_the_case_says) {
  static const char *const files[] = {"in.f32",     "out.f32",     "case.txt", "grads.f32",
                                      "params.f32", "params0.f32", "case.txt"};
  char path[PATH_ROOM];
  for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
    if (i == 0)
      record_allreduce(scratch, "allreduce", 3, 100, 2, path);
    if (i == 3)
      record_adam(scratch, "adam", 3, 7, path);
    damage(path, files[i]);
    replayed(path, true, "");
  }
}

static const struct edit {
  void (*record)(const char *name, char path[PATH_ROOM]);
  const char *key, *line, *words;
} edits[] = {
    {small_allreduce, "kind", "", "kind is missing"},
    {small_allreduce, "kind", "kind = adma", "kind is adma"},
    {small_allreduce, "kind", "kind allreduce", "kind is missing"},
    {small_allreduce, "kind", "kind =", "kind is "},
    {small_allreduce, "world", "world = 0", "world is 0"},
    {small_allreduce, "world", "world = -2", "world is -2"},
    {small_allreduce, "world", "world = 2.5", "world is 2.5"},
    {small_allreduce, "world", "world = two", "world is two"},
    {small_allreduce, "world", "world = 5000", "world is 5000, out of its range"},
    {small_allreduce, "steps", "", "steps is missing"},
    {small_allreduce, "count", "count = 0", "count is 0"},
    {small_adam, "shapes", "", "shapes is missing"},
    {small_adam, "shapes", "shapes = 513 37x 1 8 64x40", "shapes is 513 37x"},
    {small_adam, "shapes", "shapes = 513 37x3 1 8 -64x40", "shapes is 513"},
    {small_adam, "shapes", "shapes = 513 37x3 1 8 64*40", "shapes is 513"},
    {small_adam, "shapes", "shapes = 99999999999x99999999999", "shapes is 9999"},
    {small_adam, "shapes", "shapes = 513 37x3 1 8 64x41",
     "grads.f32: 178808 bytes, not the 182392"},
    {small_adam, "lr", "lr = nan", "lr is nan"},
    {small_adam, "betas", "betas = 0.9", "betas is 0.9"},
    {small_adam, "betas", "betas = 0.9 0.97 0.99", "betas is 0.9 0.97"},
    {small_adam, "eps", "eps = 1e999", "eps is 1e999"},
    {small_adam, "weight_decay", "", "weight_decay is missing"},
    {small_adam, "freeze_step", "freeze_step = -1", "freeze_step is -1"},
    {small_adam, "params_ranks", "params_ranks = 3", "params.f32"},
    {small_adam, "dense_allreduce_before_step", "dense_allreduce_before_step = 11111", "is 11111"},
};

Test(replay, damaged_text) {
  for (size_t i = 0; i < sizeof edits / sizeof edits[0]; i++) {
    char name[16], path[PATH_ROOM];
    snprintf(name, sizeof name, "case-%zu", i);
    edits[i].record(name, path);
    edit_case(path, edits[i].key, edits[i].line);
    struct replay_result result = replayed(path, false, edits[i].words);
    cr_expect(strstr(result.error, name), "%s", result.error);
  }
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
