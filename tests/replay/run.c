/* Reads a recorded case and runs it on its ranks. Each rank compares its results with the recorded
 * ones, and the comparisons of all ranks are added up. */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "onebit/onebit.h"
#include "tests/replay/replay.h"

/* ---- Reading a case: its arrays, and case.txt, in which every key is checked ---- */

#define REFUSE(file, format, ...)                                                                  \
  replay_fail(result, "%.300s/%s: " format, recorded->directory, file, __VA_ARGS__)

/* Reads a file and appends a zero byte. If reading fails, stores the reason and returns NULL. */
static char *read_file(const struct replay_case *recorded, const char *name, size_t *bytes,
                       struct replay_result *result) {
  char path[4096], *data = NULL;
  snprintf(path, sizeof path, "%s/%s", recorded->directory, name);
  FILE *file = fopen(path, "rb");
  long size = file && fseek(file, 0, SEEK_END) == 0 ? ftell(file) : -1;
  if (size >= 0 && (data = calloc((size_t)size + 1, 1))) {
    rewind(file);
    *bytes = fread(data, 1, (size_t)size, file);
  } else
    REFUSE(name, "%s", strerror(errno));
  if (file)
    fclose(file);
  return data;
}

static bool read_array(const struct replay_case *recorded, const char *name, size_t rows,
                       size_t columns, float **values, struct replay_result *result) {
  size_t bytes = 0, wanted = rows * columns * recorded->count * sizeof **values;
  *values = (float *)(void *)read_file(recorded, name, &bytes, result);
  return *values &&
         (bytes == wanted || REFUSE(name, "%zu bytes, not the %zu of %zu x %zu x %zu float32",
                                    bytes, wanted, rows, columns, recorded->count));
}

/* A key that case.txt must have for cases of these kinds. For integers, low and high are the
 * limits. For reals, high is the number of values. */
struct key {
  const char *name;
  enum { INTEGER, REALS, SHAPES, TEXT } type;
  unsigned kinds;
  size_t at, low, high;
};

enum { ALLREDUCE = 1, ADAM = 2, LAMB = 4, ZERO_ONE = 8, OPTIMIZER = 14, ALL = 15 };
enum { MAX_RANKS = 4096, MAX_COUNT = 1 << 24 /* their products fit into a size_t */ };

#define AT(field) offsetof(struct replay_case, field)

static const struct key keys[] = {
    {"world", INTEGER, ALL, AT(world), 1, MAX_RANKS},
    {"steps", INTEGER, ALL, AT(steps), 1, MAX_COUNT},
    {"count", INTEGER, ALLREDUCE, AT(count), 1, MAX_COUNT},
    {"shapes", SHAPES, OPTIMIZER, AT(tensor_counts), 0, 0},
    {"lr", REALS, OPTIMIZER, AT(learning_rate), 0, 1},
    {"betas", REALS, OPTIMIZER, AT(betas), 0, 2},
    {"eps", REALS, OPTIMIZER, AT(epsilon), 0, 1},
    {"weight_decay", REALS, OPTIMIZER, AT(weight_decay), 0, 1},
    {"freeze_step", INTEGER, ADAM | LAMB, AT(freeze_step), 0, MAX_COUNT},
    {"max_coeff", REALS, LAMB, AT(max_coefficient), 0, 1},
    {"min_coeff", REALS, LAMB, AT(min_coefficient), 0, 1},
    {"coeff_beta", REALS, LAMB, AT(coefficient_beta), 0, 1},
    {"factor_max", REALS, LAMB, AT(max_factor), 0, 1},
    {"factor_min", REALS, LAMB, AT(min_factor), 0, 1},
    {"factor_threshold", REALS, LAMB, AT(factor_change), 0, 1},
    {"var_freeze_step", INTEGER, ZERO_ONE, AT(freeze_step), 0, MAX_COUNT},
    {"var_update_scaler", INTEGER, ZERO_ONE, AT(variance_update_scaler), 1, MAX_COUNT},
    {"local_step_scaler", INTEGER, ZERO_ONE, AT(local_step_scaler), 1, MAX_COUNT},
    {"local_step_clipper", INTEGER, ZERO_ONE, AT(local_step_clipper), 1, MAX_COUNT},
    {"params_ranks", INTEGER, OPTIMIZER, AT(params_ranks), 1, MAX_RANKS},
    {"dense_allreduce_before_step", TEXT, OPTIMIZER, AT(dense_steps), 0, 0},
};

/* Returns the value of a key. The text consists of lines "key = value", each of which ends with a
 * zero byte. */
static char *find_value(const struct replay_case *recorded, size_t bytes, const char *key) {
  const size_t length = strlen(key);
  for (char *line = recorded->text; line < recorded->text + bytes; line += strlen(line) + 1) {
    char *at = line + strspn(line, " ");
    if (strncmp(at, key, length) == 0 && *(at += length + strspn(at + length, " ")) == '=')
      return at + 1 + strspn(at + 1, " ");
  }
  return NULL;
}

static bool read_reals(const char *text, size_t count, double *values) {
  for (size_t i = 0; i < count; i++) {
    char *end;
    values[i] = strtod(text, &end);
    if (end == text || !isfinite(values[i]) || (*end && *end != ' '))
      return false;
    text = end;
  }
  return !*text;
}

/* Reads shapes separated by blanks, such as "513 37x3 1". */
static bool read_shapes(const char *text, struct replay_case *recorded) {
  for (recorded->tensors = 0; *text; text += strspn(text, " ")) {
    size_t elements = 1;
    char *end = NULL;
    do {
      const char *digits = end ? end + 1 : text;
      elements *= strtoul(digits, &end, 10);
      if (end == digits || *digits < '0' || elements > MAX_COUNT)
        return false;
    } while (*end == 'x');
    if ((*end && *end != ' ') || recorded->tensors == REPLAY_TENSORS)
      return false;
    recorded->tensor_counts[recorded->tensors++] = elements;
    recorded->count += elements;
    text = end;
  }
  return true;
}

static bool read_value(struct replay_case *recorded, const struct key *key, const char *text) {
  void *field = (char *)recorded + key->at;
  double number;
  if (key->type == TEXT) /* one digit for each step */
    return strlen(*(const char **)field = text) == recorded->steps;
  if (key->type == SHAPES)
    return read_shapes(text, recorded);
  if (key->type == REALS)
    return read_reals(text, key->high, field);
  const bool good = read_reals(text, 1, &number) && number == floor(number) &&
                    number >= (double)key->low && number <= (double)key->high;
  *(size_t *)field = good ? (size_t)number : 0;
  return good;
}

static bool parse_case(struct replay_case *recorded, size_t bytes, struct replay_result *result) {
  static const char *const kinds[REPLAY_KINDS] = {"allreduce", "adam", "lamb", "zoadam"};
  for (char *at = recorded->text; (at = strchr(at, '\n')); at++)
    *at = '\0';
  const char *text = find_value(recorded, bytes, "kind");
  while (text && recorded->kind < REPLAY_KINDS && strcmp(text, kinds[recorded->kind]) != 0)
    recorded->kind++;
  if (!text || recorded->kind == REPLAY_KINDS)
    return REFUSE("case.txt", "kind is %.60s", text ? text : "missing");
  for (const struct key *key = keys; key < keys + sizeof keys / sizeof keys[0]; key++)
    if (key->kinds & 1u << recorded->kind) {
      text = find_value(recorded, bytes, key->name);
      if (!text || !read_value(recorded, key, text))
        return REFUSE("case.txt", "%s is %.60s, out of its range or no such value", key->name,
                      text ? text : "missing");
    }
  return true;
}

bool replay_case_open(struct replay_case *recorded, const char *directory,
                      struct replay_result *result) {
  size_t bytes = 0;
  *recorded = (struct replay_case){.directory = directory, .params_ranks = 1};
  recorded->text = read_file(recorded, "case.txt", &bytes, result);
  if (!recorded->text || !parse_case(recorded, bytes, result))
    return false;
  const bool reduces = recorded->kind == REPLAY_ALLREDUCE;
  return read_array(recorded, reduces ? "in.f32" : "grads.f32", recorded->steps, recorded->world,
                    &recorded->input, result) &&
         read_array(recorded, reduces ? "out.f32" : "params.f32", recorded->steps,
                    recorded->params_ranks, &recorded->output, result) &&
         (reduces || read_array(recorded, "params0.f32", 1, 1, &recorded->start, result));
}

void replay_case_close(struct replay_case *recorded) {
  free(recorded->text);
  free(recorded->input);
  free(recorded->output);
  free(recorded->start);
}

/* ---- The ranks of a case ---- */

struct run {
  pthread_t thread;
  const struct replay_case *recorded;
  onebit_comm_t comm;
  size_t rank, steps; /* steps: the number of steps made so far */
  struct replay_result result;
  float *gradient, *got, *before, *length; /* before: the parameters before the step */
  onebit_tensor_t tensors[REPLAY_TENSORS];
};

bool replay_fail(struct replay_result *result, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  if (!result->failed)
    vsnprintf(result->error, REPLAY_ERROR, format, arguments);
  va_end(arguments);
  result->failed = true;
  return false;
}

static bool check_call(struct run *run, onebit_status_t status, const char *call) {
  if (status != ONEBIT_OK)
    replay_fail(&run->result, "%s after %zu steps: %s: %s", call, run->steps,
                onebit_status_string(status), onebit_last_error());
  return status == ONEBIT_OK;
}

static double relative_difference(double got, double recorded, double offset) {
  if (got == recorded)
    return 0;
  double relative = fabs(got - recorded) / (fabs(recorded) + offset);
  return isnan(relative) ? INFINITY : relative;
}

/* Compares values with the record. A value is an exception if |difference| / (|recorded| + offset)
 * is above 1e-5. The offset is 0.1 for parameters (recorded_before is not NULL), and otherwise 0.
 * Implementations add up a norm in different orders, so a value near zero can get the other sign,
 * which error feedback corrects later. Therefore an exception is allowed in an allreduce if only
 * the sign differs, and in a parameter if the difference is at most four times its longest update
 * so far. The update of a step is the shorter one of the recorded update and ours. */
static void compare_values(struct run *run, const float *recorded, const float *recorded_before) {
  struct replay_result *result = &run->result;
  for (size_t i = 0; i < run->recorded->count; i++) {
    const double got = (double)run->got[i], wanted = (double)recorded[i];
    const double far = relative_difference(got, wanted, recorded_before ? 0.1 : 0);
    if (recorded_before)
      run->length[i] = fmaxf(run->length[i], fminf(fabsf(recorded[i] - recorded_before[i]),
                                                   fabsf(run->got[i] - run->before[i])));
    result->worst = fmax(result->worst, far);
    if (far <= 1e-5)
      continue;
    if (result->exceptions++ == 0 && !result->failed)
      snprintf(result->error, REPLAY_ERROR, "step %zu, value %zu is %.9g, recorded %.9g",
               run->steps, i, got, wanted);
    const bool wild = recorded_before ? !(fabs(got - wanted) <= 4 * (double)run->length[i])
                                      : relative_difference(-got, wanted, 0) > 1e-5;
    result->wild += wild;
  }
  result->values += run->recorded->count;
  result->hash = ob_hash(result->hash, run->got, run->recorded->count * sizeof *run->got);
  memcpy(run->before, run->got, run->recorded->count * sizeof *run->got);
  run->steps++;
}

static const float *own_input(const struct run *run) {
  const struct replay_case *recorded = run->recorded;
  return recorded->input + (run->steps * recorded->world + run->rank) * recorded->count;
}

static void run_allreduce(struct run *run) {
  const struct replay_case *recorded = run->recorded;
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  onebit_plan_t plan = NULL;
  options.profile = ONEBIT_PROFILE_DEEPSPEED;
  check_call(run, onebit_plan_create(run->comm, recorded->count, &options, &plan),
             "onebit_plan_create");
  while (!run->result.failed && run->steps < recorded->steps)
    if (check_call(run, onebit_allreduce(own_input(run), run->got, plan), "onebit_allreduce"))
      compare_values(run, recorded->output + run->steps * recorded->count, NULL);
  onebit_plan_destroy(plan);
}

/* Creates an optimizer. The option 0 for the freeze step is changed to 1. DeepSpeed makes one
 * warm-up step with 0, but in the library 0 means ONEBIT_FREEZE_AUTOMATIC. */
#define CREATE(kind, KIND, freeze, ...)                                                            \
  do {                                                                                             \
    onebit_##kind##_options_t options = ONEBIT_##KIND##_OPTIONS_INIT;                              \
    options.common.profile = ONEBIT_PROFILE_DEEPSPEED;                                             \
    options.beta1 = recorded->betas[0];                                                            \
    options.beta2 = recorded->betas[1];                                                            \
    options.epsilon = recorded->epsilon;                                                           \
    options.freeze = recorded->freeze_step ? recorded->freeze_step : 1;                            \
    __VA_ARGS__;                                                                                   \
    return check_call(                                                                             \
        run,                                                                                       \
        onebit_##kind##_create(run->comm, run->tensors, recorded->tensors, &options, optimizer),   \
        "onebit_" #kind "_create");                                                                \
  } while (0)

static bool create_optimizer(struct run *run, onebit_optimizer_t *optimizer) {
  const struct replay_case *recorded = run->recorded;
  if (recorded->kind == REPLAY_ADAM)
    CREATE(adam, ADAM, freeze_step, );
  if (recorded->kind == REPLAY_LAMB)
    CREATE(lamb, LAMB, freeze_step, options.max_coefficient = recorded->max_coefficient,
           options.min_coefficient = recorded->min_coefficient,
           options.coefficient_beta = recorded->coefficient_beta,
           options.max_factor = recorded->max_factor, options.min_factor = recorded->min_factor,
           options.factor_change = recorded->factor_change);
  CREATE(zero_one_adam, ZERO_ONE_ADAM, variance_freeze_step,
         options.variance_update_scaler = recorded->variance_update_scaler,
         options.local_step_scaler = recorded->local_step_scaler,
         options.local_step_clipper = recorded->local_step_clipper);
}

/* Makes a step, and checks whether it averaged gradients in full precision. 1-bit Adam and LAMB do
 * so during their warm-up, and always on a single rank. 0/1 Adam does so in some steps of its
 * schedule, which its count of exchanges shows. */
static bool make_step(struct run *run, onebit_optimizer_t optimizer) {
  const struct replay_case *recorded = run->recorded;
  const bool scheduled = recorded->kind == REPLAY_ZERO_ONE_ADAM;
  onebit_optimizer_info_t before = {.size = sizeof before}, after = before;
  onebit_optimizer_get_info(optimizer, &before);
  memcpy(run->gradient, own_input(run), recorded->count * sizeof(float));
  if (!check_call(run, onebit_optimizer_step(optimizer, (float)recorded->learning_rate),
                  "onebit_optimizer_step"))
    return false;
  onebit_optimizer_get_info(optimizer, &after);
  const bool dense =
      scheduled ? after.exchanges[0] > before.exchanges[0] : before.stage == ONEBIT_STAGE_WARMUP;
  if (dense != (recorded->dense_steps[run->steps] == '1'))
    replay_fail(&run->result,
                "step %zu: gradients are %saveraged in full precision, unlike the recorded",
                run->steps, dense ? "" : "not ");
  return true;
}

static void run_optimizer(struct run *run) {
  const struct replay_case *recorded = run->recorded;
  const size_t count = recorded->count, own = run->rank % recorded->params_ranks * count;
  onebit_optimizer_t optimizer = NULL;
  memcpy(run->got, recorded->start, count * sizeof *run->got);
  memcpy(run->before, recorded->start, count * sizeof *run->got);
  for (size_t t = 0, first = 0; t < recorded->tensors; first += recorded->tensor_counts[t++])
    run->tensors[t] = (onebit_tensor_t){.parameter = run->got + first,
                                        .gradient = run->gradient + first,
                                        .count = recorded->tensor_counts[t],
                                        .weight_decay = (float)recorded->weight_decay};
  const float *before = recorded->start, *wanted = recorded->output + own;
  bool good = create_optimizer(run, &optimizer);
  while (good && run->steps < recorded->steps && (good = make_step(run, optimizer))) {
    compare_values(run, wanted, before);
    before = wanted;
    wanted += recorded->params_ranks * count;
  }
  onebit_optimizer_destroy(optimizer);
}

static void *run_rank(void *argument) {
  struct run *run = argument;
  const size_t count = run->recorded->count;
  float *memory = calloc(4 * count, sizeof *memory);
  if (!memory)
    abort(); /* ends the process, since the other ranks would wait for this one */
  run->gradient = memory, run->got = memory + count;
  run->before = run->got + count, run->length = run->before + count;
  (run->recorded->kind == REPLAY_ALLREDUCE ? run_allreduce : run_optimizer)(run);
  free(memory);
  onebit_comm_destroy(run->comm);
  return NULL;
}

/* Adds a rank's result to the case's result. If `separate` is true, ranks have different
 * parameters. */
static void add_result(struct replay_result *whole, const struct run *run, bool separate) {
  const struct replay_result *one = &run->result;
  if (one->failed)
    replay_fail(whole, "rank %zu: %.400s", run->rank, one->error);
  else if (run->rank > 0 && one->hash != whole->hash && !separate)
    replay_fail(whole, "rank %zu: its results have other bits than rank 0's", run->rank);
  if (run->rank > 0 && !separate)
    return;
  if (whole->exceptions == 0 && !whole->failed)
    memcpy(whole->error, one->error, REPLAY_ERROR);
  whole->hash = one->hash;
  whole->values += one->values;
  whole->exceptions += one->exceptions;
  whole->wild += one->wild;
  whole->worst = fmax(whole->worst, one->worst);
}

static void judge_result(struct replay_result *result, uint64_t values_per_exception) {
  const struct replay_result all = *result;
  const uint64_t allowed = all.values / values_per_exception;
  if (all.exceptions > allowed || all.wild > 0)
    replay_fail(result,
                "%llu exceptions, %llu are allowed, %llu by more than rounding; the first: %.300s",
                (unsigned long long)all.exceptions, (unsigned long long)allowed,
                (unsigned long long)all.wild, all.error);
}

void replay_run(const char *directory, struct replay_result *result) {
  struct replay_case recorded;
  *result = (struct replay_result){0};
  const size_t size = replay_case_open(&recorded, directory, result) ? recorded.world : 0;
  struct run *runs = calloc(size + 1, sizeof *runs);
  onebit_comm_t *comms = calloc(size + 1, sizeof *comms);
  if (!runs || !comms || (size > 0 && onebit_comm_create_loopback((int)size, comms) != ONEBIT_OK))
    abort();
  for (size_t r = 0; r < size; r++) {
    runs[r] = (struct run){.recorded = &recorded, .comm = comms[r], .rank = r};
    if (pthread_create(&runs[r].thread, NULL, run_rank, &runs[r]) != 0)
      abort(); /* ends the process, since the ranks that run already would wait for the others */
  }
  for (size_t r = 0; r < size && pthread_join(runs[r].thread, NULL) == 0; r++)
    add_result(result, &runs[r], recorded.params_ranks > 1);
  judge_result(result, recorded.kind == REPLAY_ALLREDUCE ? 10000 : 1000);
  free(runs);
  free(comms);
  replay_case_close(&recorded);
}
