/* A recorded case: what its text says, and its files. */
#define _GNU_SOURCE /* O_CLOEXEC, pread */
#include "tools/replay/case.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tools/replay/text.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "recorded arrays are little-endian and are read as they are");

/* Loopback's largest group; and what only keeps products of sizes within a size_t and an off_t. */
#define MOST_RANKS 4096
#define MOST_STEPS ((size_t)1 << 24)
#define MOST_COUNT ((size_t)1 << 40)
#define MOST_TEXT  ((off_t)1 << 20)

static const char *const kinds[REPLAY_KINDS] = {"allreduce", "adam", "lamb", "zoadam"};

static bool refuse(const struct replay_case *recorded, const char *file, char words[REPLAY_WORDS],
                   const char *format, ...) __attribute__((format(printf, 4, 5)));

static bool refuse(const struct replay_case *recorded, const char *file, char words[REPLAY_WORDS],
                   const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int used = snprintf(words, REPLAY_WORDS, "%.300s/%s: ", recorded->directory, file);
  vsnprintf(words + used, REPLAY_WORDS - (size_t)used, format, arguments);
  va_end(arguments);
  return false;
}

/* --- Files -------------------------------------------------------------------------------------*/

/* Opens a file of the case and asks how long it is. */
static bool open_file(const struct replay_case *recorded, const char *name, int *file, off_t *bytes,
                      char words[REPLAY_WORDS]) {
  struct stat facts;
  *file = -1;
  char *path = malloc(strlen(recorded->directory) + strlen(name) + 2);
  if (!path)
    return refuse(recorded, name, words, "no memory for its path");
  sprintf(path, "%s/%s", recorded->directory, name);
  *file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe must not keep us waiting */
  int reason = errno;
  free(path);
  if (*file < 0)
    return refuse(recorded, name, words, "%s", strerror(reason));
  if (fstat(*file, &facts) != 0)
    return refuse(recorded, name, words, "%s", strerror(errno));
  if (!S_ISREG(facts.st_mode))
    return refuse(recorded, name, words, "not a regular file");
  *bytes = facts.st_size;
  return true;
}

/* Reads exactly so many bytes. */
static bool read_bytes(int file, void *buffer, size_t bytes, off_t at) {
  char *to = buffer;
  while (bytes > 0) {
    ssize_t got = pread(file, to, bytes, at);
    if (got < 0 && errno == EINTR)
      continue;
    if (got <= 0) {
      errno = got == 0 ? ENODATA : errno;
      return false;
    }
    to += got;
    at += got;
    bytes -= (size_t)got;
  }
  return true;
}

/* The files of each kind. */
static const char *const names[][REPLAY_FILES] = {
    [REPLAY_ALLREDUCE] = {[REPLAY_INPUT] = "in.f32",
                          [REPLAY_OUTPUT] = "out.f32",
                          [REPLAY_WORKER_ERROR] = "worker_error.f32",
                          [REPLAY_SERVER_ERROR] = "server_error.f32"},
    [REPLAY_ADAM] = {[REPLAY_INPUT] = "grads.f32",
                     [REPLAY_OUTPUT] = "params.f32",
                     [REPLAY_START] = "params0.f32",
                     [REPLAY_MOMENTUM] = "exp_avg.f32",
                     [REPLAY_VARIANCE] = "exp_avg_sq.f32"},
};

static const char *name_of(const struct replay_case *recorded, enum replay_file file) {
  return names[recorded->kind == REPLAY_ALLREDUCE ? REPLAY_ALLREDUCE : REPLAY_ADAM][file];
}

static bool open_array(struct replay_case *recorded, enum replay_file which, size_t rows,
                       size_t columns, size_t depth, char words[REPLAY_WORDS]) {
  const char *name = name_of(recorded, which);
  off_t bytes;
  size_t wanted;
  if (__builtin_mul_overflow(rows, columns, &wanted) ||
      __builtin_mul_overflow(wanted, depth * sizeof(float), &wanted))
    return refuse(recorded, name, words, "%zu x %zu x %zu values are more than a file can have",
                  rows, columns, depth);
  if (!open_file(recorded, name, &recorded->files[which], &bytes, words))
    return false;
  if ((size_t)bytes != wanted)
    return refuse(recorded, name, words, "%lld bytes, not the %zu of %zu x %zu x %zu float32",
                  (long long)bytes, wanted, rows, columns, depth);
  return true;
}

bool replay_case_read(const struct replay_case *recorded, enum replay_file file, size_t first,
                      size_t count, float *values, char words[REPLAY_WORDS]) {
  if (read_bytes(recorded->files[file], values, count * sizeof *values,
                 (off_t)(first * sizeof *values)))
    return true;
  int reason = errno;
  memset(values, 0, count * sizeof *values);
  return refuse(recorded, name_of(recorded, file), words, "%s", strerror(reason));
}

/* --- case.txt ----------------------------------------------------------------------------------*/

/* 64-bit FNV-1a. */
static uint64_t fingerprint(const char *text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (; *text; text++)
    hash = (hash ^ (unsigned char)*text) * 0x100000001b3u;
  return hash;
}

/* Reads case.txt into memory. */
static bool load_text(struct replay_case *recorded, char words[REPLAY_WORDS]) {
  int file;
  off_t bytes = 0;
  bool good = open_file(recorded, "case.txt", &file, &bytes, words);
  if (good && bytes > MOST_TEXT)
    good = refuse(recorded, "case.txt", words, "%lld bytes are too many", (long long)bytes);
  if (good && !(recorded->text = calloc((size_t)bytes + 1, 1)))
    good = refuse(recorded, "case.txt", words, "no memory for it");
  if (good && !read_bytes(file, recorded->text, (size_t)bytes, 0))
    good = refuse(recorded, "case.txt", words, "%s", strerror(errno));
  if (good && strlen(recorded->text) != (size_t)bytes)
    good = refuse(recorded, "case.txt", words, "not a text: it holds a zero byte");
  if (file >= 0)
    close(file);
  return good;
}

static bool parse_kind(struct replay_case *recorded, struct replay_text *text) {
  const char *kind;
  if (!replay_text_string(text, "kind", &kind))
    return false;
  for (size_t k = 0; k < REPLAY_KINDS; k++)
    if (strcmp(kind, kinds[k]) == 0) {
      recorded->kind = (enum replay_kind)k;
      return true;
    }
  snprintf(text->words, sizeof text->words, "kind is %.60s, not allreduce, adam, lamb or zoadam",
           kind);
  return false;
}

static bool parse_allreduce(struct replay_case *recorded, struct replay_text *text) {
  if (!replay_text_whole(text, "count", 1, MOST_COUNT, &recorded->count) ||
      !replay_text_whole(text, "padded", recorded->count, MOST_COUNT, &recorded->padded))
    return false;
  if (recorded->padded % recorded->world == 0)
    return true;
  snprintf(text->words, sizeof text->words, "padded is %zu, not a multiple of world, %zu",
           recorded->padded, recorded->world);
  return false;
}

static bool parse_shapes(struct replay_case *recorded, struct replay_text *text) {
  size_t sum = 0;
  if (!replay_text_shapes(text, "shapes", &recorded->tensor_counts, &recorded->tensors) ||
      !replay_text_whole(text, "total", 1, MOST_COUNT, &recorded->count))
    return false;
  for (size_t t = 0; t < recorded->tensors; t++)
    if (__builtin_add_overflow(sum, recorded->tensor_counts[t], &sum))
      sum = SIZE_MAX;
  if (sum == recorded->count)
    return true;
  snprintf(text->words, sizeof text->words, "total is %zu, and the shapes have %zu elements",
           recorded->count, sum);
  return false;
}

static bool parse_options(struct replay_case *recorded, struct replay_text *text) {
  double betas[2];
  if (!replay_text_reals(text, "lr", 1, &recorded->learning_rate) ||
      !replay_text_reals(text, "betas", 2, betas) ||
      !replay_text_reals(text, "eps", 1, &recorded->epsilon) ||
      !replay_text_reals(text, "weight_decay", 1, &recorded->weight_decay))
    return false;
  recorded->beta1 = betas[0];
  recorded->beta2 = betas[1];
  /* The library takes zero for "the default", and reports what else is out of range. */
  if (betas[0] != 0 && betas[1] != 0 && recorded->epsilon != 0)
    return true;
  snprintf(text->words, sizeof text->words, "betas are %g %g, eps is %g: none of them can be 0",
           betas[0], betas[1], recorded->epsilon);
  return false;
}

static bool parse_dense_steps(struct replay_case *recorded, struct replay_text *text) {
  const char *digits;
  if (!replay_text_string(text, "dense_allreduce_before_step", &digits))
    return false;
  recorded->dense_steps = digits;
  if (strspn(digits, "01") == strlen(digits) && strlen(digits) == recorded->steps)
    return true;
  snprintf(text->words, sizeof text->words,
           "dense_allreduce_before_step is %.60s, not a 0 or 1 for each of %zu steps", digits,
           recorded->steps);
  return false;
}

static bool parse_freeze_step(struct replay_case *recorded, struct replay_text *text) {
  return replay_text_whole(text, "freeze_step", 0, MOST_COUNT, &recorded->freeze_step);
}

static bool parse_lamb(struct replay_case *recorded, struct replay_text *text) {
  return parse_freeze_step(recorded, text) &&
         replay_text_reals(text, "max_coeff", 1, &recorded->max_coefficient) &&
         replay_text_reals(text, "min_coeff", 1, &recorded->min_coefficient) &&
         replay_text_reals(text, "coeff_beta", 1, &recorded->coefficient_beta) &&
         replay_text_reals(text, "factor_max", 1, &recorded->max_factor) &&
         replay_text_reals(text, "factor_min", 1, &recorded->min_factor) &&
         replay_text_reals(text, "factor_threshold", 1, &recorded->factor_change);
}

/* To DeepSpeed a scaler of 0 means "never". No case was recorded with it. */
static bool parse_zero_one(struct replay_case *recorded, struct replay_text *text) {
  return replay_text_whole(text, "var_freeze_step", 0, MOST_COUNT,
                           &recorded->variance_freeze_step) &&
         replay_text_whole(text, "var_update_scaler", 1, MOST_COUNT,
                           &recorded->variance_update_scaler) &&
         replay_text_whole(text, "local_step_scaler", 1, MOST_COUNT,
                           &recorded->local_step_scaler) &&
         replay_text_whole(text, "local_step_clipper", 1, MOST_COUNT,
                           &recorded->local_step_clipper);
}

/* Each kind's own options. */
static bool (*const parse_own[REPLAY_KINDS])(struct replay_case *, struct replay_text *) = {
    [REPLAY_ADAM] = parse_freeze_step,
    [REPLAY_LAMB] = parse_lamb,
    [REPLAY_ZERO_ONE_ADAM] = parse_zero_one,
};

static bool parse_optimizer(struct replay_case *recorded, struct replay_text *text) {
  if (!parse_shapes(recorded, text) || !parse_options(recorded, text) ||
      !parse_own[recorded->kind](recorded, text) ||
      !replay_text_whole(text, "params_ranks", 1, MOST_RANKS, &recorded->params_ranks) ||
      !parse_dense_steps(recorded, text))
    return false;
  if (recorded->params_ranks == 1 || recorded->params_ranks == recorded->world)
    return true;
  snprintf(text->words, sizeof text->words, "params_ranks is %zu, not 1 or world, %zu",
           recorded->params_ranks, recorded->world);
  return false;
}

static bool parse(struct replay_case *recorded, struct replay_text *text) {
  if (!replay_text_cut(text, recorded->text) || !parse_kind(recorded, text))
    return false;
  if (!replay_text_whole(text, "world", 1, MOST_RANKS, &recorded->world) ||
      !replay_text_whole(text, "steps", 1, MOST_STEPS, &recorded->steps))
    return false;
  return recorded->kind == REPLAY_ALLREDUCE ? parse_allreduce(recorded, text)
                                            : parse_optimizer(recorded, text);
}

/* --- The whole ---------------------------------------------------------------------------------*/

static bool open_arrays(struct replay_case *recorded, char words[REPLAY_WORDS]) {
  size_t steps = recorded->steps, world = recorded->world, count = recorded->count;
  if (recorded->kind == REPLAY_ALLREDUCE)
    return open_array(recorded, REPLAY_INPUT, steps, world, count, words) &&
           open_array(recorded, REPLAY_OUTPUT, steps, 1, count, words) &&
           open_array(recorded, REPLAY_WORKER_ERROR, world, 1, recorded->padded, words) &&
           open_array(recorded, REPLAY_SERVER_ERROR, world, 1, recorded->padded / world, words);
  return open_array(recorded, REPLAY_INPUT, steps, world, count, words) &&
         open_array(recorded, REPLAY_OUTPUT, steps, recorded->params_ranks, count, words) &&
         open_array(recorded, REPLAY_START, 1, 1, count, words) &&
         open_array(recorded, REPLAY_MOMENTUM, 1, 1, count, words) &&
         open_array(recorded, REPLAY_VARIANCE, 1, 1, count, words);
}

bool replay_case_open(struct replay_case *recorded, const char *directory,
                      char words[REPLAY_WORDS]) {
  struct replay_text text = {0};
  *recorded = (struct replay_case){.directory = directory};
  for (size_t i = 0; i < REPLAY_FILES; i++)
    recorded->files[i] = -1;
  if (!load_text(recorded, words))
    return false;
  recorded->fingerprint = fingerprint(recorded->text);
  if (!parse(recorded, &text))
    return refuse(recorded, "case.txt", words, "%s", text.words);
  return open_arrays(recorded, words);
}

void replay_case_close(struct replay_case *recorded) {
  for (size_t i = 0; i < REPLAY_FILES; i++)
    if (recorded->files[i] >= 0)
      close(recorded->files[i]);
  free(recorded->tensor_counts);
  free(recorded->text);
}
