/* Tests onebit-replay with recorded cases that are correct or wrong, and with cases recorded from
 * DeepSpeed. */
#include <glob.h>
#include <sys/stat.h>

#include "tests/oracle.h"
#include "tests/replay/replay.h"
#include "tests/support.h"
#include "tests/support_disk.h"

static char scratch[PATH_ROOM];

static void create_scratch(void) { scratch_create(scratch); }
static void remove_scratch(void) { scratch_remove(scratch); }

TestSuite(replay, .init = create_scratch, .fini = remove_scratch, .timeout = 120);

/* --- Recorded cases: the oracle's results in a directory, and functions that damage them */

#define RECORDED_SHAPES "513 37x3 1 8 64x40"
#define RECORDED_TOTAL  (513 + 37 * 3 + 1 + 8 + 64 * 40)
#define RECORDED_WARMUP 5

static FILE *open_in(const char *directory, const char *name, const char *mode) {
  char path[PATH_ROOM];
  path_join(path, directory, name);
  FILE *file = fopen(path, mode);
  cr_assert(file, "%s: cannot be opened", path);
  return file;
}

static void write_floats(FILE *file, const float *values, size_t count) {
  cr_assert_eq(fwrite(values, sizeof *values, count, file), count);
}

static void write_float_file(const char *path, const char *name, const float *values,
                             size_t count) {
  FILE *file = open_in(path, name, "wb");
  write_floats(file, values, count);
  cr_assert_eq(fclose(file), 0);
}

static size_t file_bytes(const char *path, const char *name) {
  char file[PATH_ROOM];
  struct stat facts;
  path_join(file, path, name);
  cr_assert_eq(stat(file, &facts), 0, "%s: cannot be found", file);
  return (size_t)facts.st_size;
}

/* recorded_value returns one value of a file; set_recorded_value changes one. */
static float recorded_value(const char *path, const char *name, size_t index) {
  float value;
  FILE *file = open_in(path, name, "rb");
  cr_assert_eq(fseek(file, (long)(index * sizeof value), SEEK_SET), 0);
  cr_assert_eq(fread(&value, sizeof value, 1, file), 1);
  fclose(file);
  return value;
}

static void set_recorded_value(const char *path, const char *name, size_t index, float value) {
  FILE *file = open_in(path, name, "r+b");
  cr_assert_eq(fseek(file, (long)(index * sizeof value), SEEK_SET), 0);
  write_floats(file, &value, 1);
  cr_assert_eq(fclose(file), 0);
}

/* Makes a file longer by `bytes`, or shorter if `bytes` is negative. */
static void lengthen_file(const char *path, const char *name, long bytes) {
  char file[PATH_ROOM];
  path_join(file, path, name);
  cr_assert_eq(truncate(file, (long)file_bytes(path, name) + bytes), 0);
}

static void create_case_directory(const char *directory, const char *name, char path[PATH_ROOM]) {
  path_join(path, directory, name);
  cr_assert_eq(mkdir(path, 0777), 0, "%s: cannot be made", path);
}

/* Fills in the inputs of all ranks for one step, one rank after the other. */
static void fill_all_ranks(float *inputs, size_t count, int world, int step) {
  for (int r = 0; r < world; r++)
    fill_input(inputs + (size_t)r * count, ONEBIT_FLOAT32, count, r, step);
}

static const float **list_rank_inputs(const float *inputs, size_t count, int world) {
  const float **ranks = allocate((size_t)world, sizeof *ranks);
  for (int r = 0; r < world; r++)
    ranks[r] = inputs + (size_t)r * count;
  return ranks;
}

/* Records a case that the oracle computes in directory/name, and sets `path` to it. */
static void record_allreduce(const char *directory, const char *name, int world, size_t count,
                             int steps, char path[PATH_ROOM]) {
  onebit_plan_options_t options = {.size = sizeof options, .profile = ONEBIT_PROFILE_DEEPSPEED};
  create_case_directory(directory, name, path);
  struct oracle *oracle = oracle_create(world, count, &options);
  float *inputs = allocate((size_t)world * count, sizeof *inputs);
  float *result = allocate(count, sizeof *result);
  const float **ranks = list_rank_inputs(inputs, count, world);
  FILE *in = open_in(path, "in.f32", "wb"), *out = open_in(path, "out.f32", "wb");
  for (int step = 0; step < steps; step++) {
    fill_all_ranks(inputs, count, world, step);
    cr_assert(oracle_exchange(oracle, ranks, result));
    write_floats(in, inputs, (size_t)world * count);
    write_floats(out, result, count);
  }
  cr_assert(fclose(in) == 0 && fclose(out) == 0);
  FILE *text = open_in(path, "case.txt", "w");
  fprintf(text, "kind = allreduce\nworld = %d\nsteps = %d\nseed = 1\ncount = %zu\n", world, steps,
          count);
  cr_assert_eq(fclose(text), 0);
  oracle_destroy(oracle);
  free((void *)ranks);
  free(inputs);
  free(result);
}

/* Lists five tensors with the initial parameters. */
static void describe_tensors(onebit_tensor_t tensors[5]) {
  static float parameter[RECORDED_TOTAL];
  const size_t counts[] = {513, 37 * 3, 1, 8, 64 * 40};
  for (size_t i = 0; i < RECORDED_TOTAL; i++)
    parameter[i] = (float)(i * 31 % 199) / 100.0f - 0.995f;
  for (size_t t = 0, first = 0; t < 5; first += counts[t++])
    tensors[t] = (onebit_tensor_t){
        .parameter = parameter + first, .count = counts[t], .weight_decay = 0.01f};
}

static struct oracle_adam *create_adam(int world) {
  onebit_tensor_t tensors[5];
  describe_tensors(tensors);
  onebit_adam_options_t options = ONEBIT_ADAM_OPTIONS_INIT;
  options.common.profile = ONEBIT_PROFILE_DEEPSPEED;
  options.freeze_step = RECORDED_WARMUP + 1;
  options.beta2 = 0.97;
  options.epsilon = 1e-6;
  return oracle_adam_create(world, 1, tensors, 5, &options);
}

static void record_adam_steps(const char *path, struct oracle_adam *adam, int steps, char *dense) {
  float *gradients = allocate((size_t)adam->size * adam->total, sizeof *gradients);
  const float **ranks = list_rank_inputs(gradients, adam->total, adam->size);
  FILE *in = open_in(path, "grads.f32", "wb"), *out = open_in(path, "params.f32", "wb");
  for (int step = 0; step < steps; step++) {
    dense[step] = adam->compressed ? '0' : '1';
    fill_all_ranks(gradients, adam->total, adam->size, step);
    cr_assert(oracle_adam_step(adam, ranks, 0.003f));
    write_floats(in, gradients, (size_t)adam->size * adam->total);
    write_floats(out, adam->parameter, adam->total);
  }
  cr_assert(fclose(in) == 0 && fclose(out) == 0);
  free((void *)ranks);
  free(gradients);
}

static void record_adam(const char *directory, const char *name, int world, int steps,
                        char path[PATH_ROOM]) {
  create_case_directory(directory, name, path);
  char *dense = allocate((size_t)steps + 1, 1);
  struct oracle_adam *adam = create_adam(world);
  write_float_file(path, "params0.f32", adam->parameter, adam->total);
  record_adam_steps(path, adam, steps, dense);
  FILE *text = open_in(path, "case.txt", "w");
  fprintf(text,
          "kind = adam\nworld = %d\nsteps = %d\nseed = 2\nshapes = %s\nlr = 0.003\n"
          "betas = 0.9 0.97\neps = 1e-06\nweight_decay = 0.01\nfreeze_step = %d\ntotal = %d\n"
          "params_ranks = 1\ndense_allreduce_before_step = %s\n",
          world, steps, RECORDED_SHAPES, RECORDED_WARMUP + 1, RECORDED_TOTAL, dense);
  cr_assert_eq(fclose(text), 0);
  oracle_adam_destroy(adam);
  free(dense);
}

/* --- Replays */

/* Replays a case. Checks the verdict, and that the error message contains `part`. */
static struct replay_result check_replay(const char *path, bool ok, const char *part) {
  struct replay_result result;
  replay_run(path, &result);
  cr_expect_eq(!result.failed, ok, "ok is %d: %s", !result.failed, result.error);
  cr_expect(strstr(result.error, part), "the words \"%s\" do not say \"%s\"", result.error, part);
  return result;
}

/* --- Correct and wrong recordings
 * -------------------------------------------------------------- */

Test(replay, sound_cases_are_ok) {
  const int worlds[] = {1, 2, 3, 4, 8};
  for (size_t i = 0; i < sizeof worlds / sizeof worlds[0]; i++) {
    char name[16], path[PATH_ROOM];
    snprintf(name, sizeof name, "allreduce-w%d", worlds[i]);
    record_allreduce(scratch, name, worlds[i], 1003, 4, path);
    struct replay_result result = check_replay(path, true, "");
    cr_expect(result.values == 4 * 1003 && result.exceptions == 0 && result.worst == 0);
    snprintf(name, sizeof name, "adam-w%d", worlds[i]);
    record_adam(scratch, name, worlds[i], 9, path);
    result = check_replay(path, true, "");
    cr_expect(result.values == 9 * RECORDED_TOTAL && result.exceptions == 0 && result.worst == 0);
  }
}

Test(replay, one_sign_in_ten_thousand_is_allowed) {
  char path[PATH_ROOM];
  record_allreduce(scratch, "allreduce", 2, 5000, 3, path); /* the case has 15,000 values */
  set_recorded_value(path, "out.f32", 7777, -recorded_value(path, "out.f32", 7777));
  struct replay_result result = check_replay(path, true, "");
  cr_expect(result.exceptions == 1 && result.wild == 0);
  cr_expect_float_eq(result.worst, 2, 1e-6);
  set_recorded_value(path, "out.f32", 8888, -recorded_value(path, "out.f32", 8888));
  result = check_replay(path, false, "2 exceptions, 1 are allowed");
  cr_expect_eq(result.exceptions, 2);
}

Test(replay, another_magnitude_is_not) {
  char path[PATH_ROOM];
  record_allreduce(scratch, "allreduce", 2, 5000, 3, path);
  float value = recorded_value(path, "out.f32", 12345);
  set_recorded_value(path, "out.f32", 12345, value * 1.000005f);
  struct replay_result result = check_replay(path, true, "");
  cr_expect(result.exceptions == 0 && result.worst > 1e-6);
  set_recorded_value(path, "out.f32", 12345, value * 1.0001f);
  check_replay(path, false, "1 by more than rounding; the first: step 2, value 2345");
  set_recorded_value(path, "out.f32", 12345, NAN);
  result = check_replay(path, false, "1 by more than rounding");
  cr_expect(isinf(result.worst));
}

/* At most one parameter in a thousand may differ, and only by a few of its own updates. */
Test(replay, parameters_may_differ_by_few_updates) {
  char path[PATH_ROOM];
  record_adam(scratch, "adam", 2, 9, path);
  size_t last = 8 * RECORDED_TOTAL;
  for (size_t i = 0; i < 28; i++) { /* of 28,737 values */
    float now = recorded_value(path, "params.f32", last + 10 * i);
    float before = recorded_value(path, "params.f32", last - RECORDED_TOTAL + 10 * i);
    set_recorded_value(path, "params.f32", last + 10 * i, now + 2 * (now - before));
  }
  struct replay_result result = check_replay(path, true, "");
  cr_expect_eq(result.exceptions, 28);
  float value = recorded_value(path, "params.f32", last + 5);
  set_recorded_value(path, "params.f32", last + 5, value + 1e-3f);
  check_replay(path, false, "29 exceptions, 28 are allowed");
}

Test(replay, parameters_may_not_differ_by_more) {
  char path[PATH_ROOM];
  record_adam(scratch, "adam", 2, 9, path);
  set_recorded_value(path, "params.f32", 100, 2.0f + recorded_value(path, "params.f32", 100));
  check_replay(path, false, " 1 by more than rounding");
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
  expect_output(said, "replay bad: 22351 values, 1 exceptions, worst ");
  expect_output(said, ", FAILED\n");
  expect_output(said, "other/grads.f32: 178804 bytes, not the 178808 of 7 x 2 x 3193 float32\n");
  expect_output(said, "replay other: 0 values, 0 exceptions, worst 0, FAILED\n");
  expect_output(said, "replay good: 200 values, 0 exceptions, worst 0, ok\n");
}

/* --- Recordings of DeepSpeed -------------------------------------------------------------------*/

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
      0) { /* a skipped test does not run the fini function of its suite */
    remove_scratch();
    cr_skip_test("no recorded cases here: %s", pattern);
  }
  for (size_t c = 0; c < test_codecs_count; c++)
    replay_golden(test_codecs[c], found.gl_pathv, found.gl_pathc);
  globfree(&found);
}
