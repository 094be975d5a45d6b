/* Recorded cases made for the tests. */
#include "tests/support_replay.h"

#include <ftw.h>
#include <sys/stat.h>

#include "tests/oracle.h"
#include "tests/support.h"

/* --- Directories and files ---------------------------------------------------------------------*/

void scratch_create(char path[PATH_ROOM]) {
  const char *parent = getenv("TMPDIR");
  path_join(path, parent && *parent ? parent : "/tmp", "onebit-test-XXXXXX");
  cr_assert(mkdtemp(path), "%s: cannot be made", path);
}

static int remove_one(const char *path, const struct stat *facts, int type, struct FTW *place) {
  (void)facts;
  (void)type;
  (void)place;
  return remove(path);
}

void scratch_remove(const char *path) { nftw(path, remove_one, 8, FTW_DEPTH | FTW_PHYS); }

void path_join(char path[PATH_ROOM], const char *directory, const char *name) {
  int length = snprintf(path, PATH_ROOM, "%s/%s", directory, name);
  cr_assert(length < PATH_ROOM, "%s/%s is too long", directory, name);
}

static FILE *open_in(const char *directory, const char *name, const char *mode) {
  char path[PATH_ROOM];
  path_join(path, directory, name);
  FILE *file = fopen(path, mode);
  cr_assert(file, "%s: cannot be opened", path);
  return file;
}

static void put(FILE *file, const float *values, size_t count) {
  cr_assert_eq(fwrite(values, sizeof *values, count, file), count);
}

static void put_all(const char *path, const char *name, const float *values, size_t count) {
  FILE *file = open_in(path, name, "wb");
  put(file, values, count);
  cr_assert_eq(fclose(file), 0);
}

static size_t bytes_of(const char *path, const char *name) {
  char file[PATH_ROOM];
  struct stat facts;
  path_join(file, path, name);
  cr_assert_eq(stat(file, &facts), 0, "%s: cannot be found", file);
  return (size_t)facts.st_size;
}

float recorded_value(const char *path, const char *name, size_t index) {
  float value;
  FILE *file = open_in(path, name, "rb");
  cr_assert_eq(fseek(file, (long)(index * sizeof value), SEEK_SET), 0);
  cr_assert_eq(fread(&value, sizeof value, 1, file), 1);
  fclose(file);
  return value;
}

void set_recorded_value(const char *path, const char *name, size_t index, float value) {
  FILE *file = open_in(path, name, "r+b");
  cr_assert_eq(fseek(file, (long)(index * sizeof value), SEEK_SET), 0);
  put(file, &value, 1);
  cr_assert_eq(fclose(file), 0);
}

void lengthen_file(const char *path, const char *name, long bytes) {
  char file[PATH_ROOM];
  path_join(file, path, name);
  cr_assert_eq(truncate(file, (long)bytes_of(path, name) + bytes), 0);
}

/* --- Recording ---------------------------------------------------------------------------------*/

static void begin_case(const char *directory, const char *name, char path[PATH_ROOM]) {
  path_join(path, directory, name);
  cr_assert_eq(mkdir(path, 0777), 0, "%s: cannot be made", path);
}

/* One step's inputs of all ranks, one after the other. */
static void fill_all(float *inputs, size_t count, int world, int step) {
  for (int r = 0; r < world; r++)
    fill_input(inputs + (size_t)r * count, ONEBIT_FLOAT32, count, r, step);
}

static const float **by_rank(const float *inputs, size_t count, int world) {
  const float **ranks = allocate((size_t)world, sizeof *ranks);
  for (int r = 0; r < world; r++)
    ranks[r] = inputs + (size_t)r * count;
  return ranks;
}

void record_allreduce(const char *directory, const char *name, int world, size_t count, int steps,
                      char path[PATH_ROOM]) {
  onebit_plan_options_t options = {.size = sizeof options, .profile = ONEBIT_PROFILE_DEEPSPEED};
  begin_case(directory, name, path);
  struct oracle *oracle = oracle_create(world, count, &options);
  float *inputs = allocate((size_t)world * count, sizeof *inputs);
  float *result = allocate(count, sizeof *result);
  const float **ranks = by_rank(inputs, count, world);
  FILE *in = open_in(path, "in.f32", "wb"), *out = open_in(path, "out.f32", "wb");
  for (int step = 0; step < steps; step++) {
    fill_all(inputs, count, world, step);
    cr_assert(oracle_exchange(oracle, ranks, result));
    put(in, inputs, (size_t)world * count);
    put(out, result, count);
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

/* The first parameters, in five tensors. */
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
  const float **ranks = by_rank(gradients, adam->total, adam->size);
  FILE *in = open_in(path, "grads.f32", "wb"), *out = open_in(path, "params.f32", "wb");
  for (int step = 0; step < steps; step++) {
    dense[step] = adam->compressed ? '0' : '1';
    fill_all(gradients, adam->total, adam->size, step);
    cr_assert(oracle_adam_step(adam, ranks, 0.003f));
    put(in, gradients, (size_t)adam->size * adam->total);
    put(out, adam->parameter, adam->total);
  }
  cr_assert(fclose(in) == 0 && fclose(out) == 0);
  free((void *)ranks);
  free(gradients);
}

void record_adam(const char *directory, const char *name, int world, int steps,
                 char path[PATH_ROOM]) {
  begin_case(directory, name, path);
  char *dense = allocate((size_t)steps + 1, 1);
  struct oracle_adam *adam = create_adam(world);
  put_all(path, "params0.f32", adam->parameter, adam->total);
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
