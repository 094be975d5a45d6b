/* onebit-replay: recorded cases that are damaged. */
#define _POSIX_C_SOURCE 200809L
#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

#include "tests/support.h"
#include "tests/support_irregular.h"
#include "tests/support_replay.h"
#include "tools/replay/replay.h"

static char scratch[PATH_ROOM];

static void begin(void) { scratch_create(scratch); }
static void end(void) { scratch_remove(scratch); }
TestSuite(replay_damage, .init = begin, .fini = end, .timeout = 120);

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
  cr_expect(strstr(result.error, "No such file"), "%s", result.error);
  for (enum irregular kind = A_FIFO; kind < IRREGULARS; kind++) {
    irregular_make(kind, file);
    result = replayed(path, REPLAY_FAILED, name);
    cr_expect(strstr(result.error, "not a regular file"), "%s", result.error);
    irregular_remove(kind, file);
  }
  cr_assert_eq(rename(moved, file), 0);
}

Test(replay_damage, files_must_be_there_and_as_long_as_the_case_says) {
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
    cr_expect(strstr(result.error, "case.txt") && strstr(result.error, name), "%s", result.error);
  }
}

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

Test(replay_damage, damaged_text_of_an_allreduce) {
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

Test(replay_damage, damaged_text_of_adam) {
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

Test(replay_damage, damaged_text_of_zero_one_adam) {
  static const struct edit edits[] = {
      {"var_freeze_step", "", "no line \"var_freeze_step = ...\""},
      {"var_freeze_step", "var_freeze_step = -1", "var_freeze_step is -1"},
      {"var_update_scaler", "var_update_scaler = 0", "var_update_scaler is 0"},
      {"local_step_scaler", "local_step_scaler = 0", "local_step_scaler is 0"},
      {"local_step_clipper", "local_step_clipper = 0", "local_step_clipper is 0"},
      {"local_step_clipper", "local_step_clipper = two", "local_step_clipper is two"},
      {"params_ranks", "params_ranks = 3", "params_ranks is 3, not 1 or world, 2"},
  };
  edit_each(edits, sizeof edits / sizeof edits[0], small_zero_one);
}

Test(replay_damage, damaged_text_of_lamb) {
  static const struct edit edits[] = {
      {"freeze_step", "", "no line \"freeze_step = ...\""},
      {"max_coeff", "", "no line \"max_coeff = ...\""},
      {"min_coeff", "min_coeff = small", "min_coeff is small"},
      {"coeff_beta", "coeff_beta = 0.9 0.8", "coeff_beta is 0.9 0.8"},
      {"factor_max", "factor_max = inf", "factor_max is inf"},
      {"factor_min", "factor_min = ", "line "},
      {"factor_threshold", "", "no line \"factor_threshold = ...\""},
  };
  edit_each(edits, sizeof edits / sizeof edits[0], small_lamb);
}

/* Numbers that ask for other files name the file that does not fit. */
Test(replay_damage, text_and_files_must_fit) {
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
