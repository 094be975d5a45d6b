/*
 * The command line of train_text: one table that parsing and --help share.
 */
#include "examples/train_options.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "onebit/onebit.h"

typedef enum kind {
  PATH,   /* may be given several times */
  OUTPUT, /* a path */
  COUNT,  /* a size_t from `least` to `most`, or the word in `choices`, which means `special` */
  REAL,   /* a float from `least` to `most` */
  CHOICE, /* an int: the place of the word in `choices` */
  FLAG    /* an int: 1 when the option is there; takes no value */
} kind_t;

typedef struct option {
  const char *name;
  kind_t kind;
  size_t offset; /* in train_options_t */
  double least, most;
  const char *choices; /* words with | between */
  size_t special;
  const char *help;
} option_t;

#define AT(field) offsetof(train_options_t, field)

/* The upper limits only keep products of sizes within a size_t. */
static const option_t table[] = {
    {"data", PATH, AT(data), 0, 0, "PATH", 0,
     "text to train on: a file, or all files of a directory; may be given again"},
    {"optimizer", CHOICE, AT(optimizer), 0, 0, "adam|onebit-adam|dense-mpi", 0,
     "default onebit-adam; adam: the same, never frozen; dense-mpi: a plain Adam on gradients "
     "summed "
     "by MPI_Allreduce"},
    {"compare", FLAG, AT(compare), 0, 0, NULL, 0,
     "train with dense Adam, again with 1-bit Adam, and end with a table"},
    {"steps", COUNT, AT(steps), 1, 1e9, NULL, 0, "training steps"},
    {"freeze", COUNT, AT(freeze), 1, 1e9, "auto", ONEBIT_FREEZE_AUTOMATIC,
     "warm-up steps of 1-bit Adam; auto: until the variance is steady; default a fifth of the "
     "steps"},
    {"learning-rate", REAL, AT(learning_rate), 0, 10, NULL, 0, "its highest value"},
    {"beta2", REAL, AT(beta2), 0.1, 0.999999, NULL, 0, "how slowly the variance forgets"},
    {"weight-decay", REAL, AT(weight_decay), 0, 10, NULL, 0, "of the matrices"},
    {"scale", CHOICE, AT(scale), 0, 0, "rms|mean-absolute", 0,
     "what stands for a block; default rms"},
    {"block-size", COUNT, AT(block_size), 32, 65536, "buffer", ONEBIT_BLOCK_BUFFER,
     "elements that share a scale, a multiple of 32; buffer: all; default the library's"},
    {"bucket-size", COUNT, AT(bucket_size), 0, 1e15, NULL, 0,
     "exchange tensors in buckets of so many elements, while the backward pass goes on; default 0: "
     "all at once, after it"},
    {"no-error-feedback", FLAG, AT(no_error_feedback), 0, 0, NULL, 0,
     "forget the rounding errors: a control that should train worse"},
    {"batch", COUNT, AT(batch), 1, 65536, NULL, 0, "sequences of each rank in a step"},
    {"context", COUNT, AT(context), 1, 4096, NULL, 0, "bytes in a sequence"},
    {"layers", COUNT, AT(layers), 1, 1000, NULL, 0, "blocks of the transformer"},
    {"width", COUNT, AT(width), 1, 16384, NULL, 0, "its width"},
    {"heads", COUNT, AT(heads), 1, 16384, NULL, 0, "attention heads; divides the width"},
    {"seed", COUNT, AT(seed), 0, 1e15, NULL, 0, "of the first parameters, the batches, the sample"},
    {"report-every", COUNT, AT(report_every), 1, 1e9, NULL, 0, "steps from one line to the next"},
    {"validate-every", COUNT, AT(validate_every), 0, 1e9, NULL, 0,
     "steps from one validation to the next; default 0: only at the end"},
    {"log", OUTPUT, AT(log), 0, 0, "FILE", 0,
     "write a line a report: step, seconds of training, training loss, and, of a step with "
     "validation, the validation loss"},
    {"sample", COUNT, AT(sample), 0, 1e6, NULL, 0, "bytes of text to generate at the end"},
    {"ranks", COUNT, AT(ranks), 1, 1024, NULL, 0,
     "ranks as threads of this process, instead of MPI's processes"},
    {"device", CHOICE, AT(device), 0, 0, "host|cuda", 0,
     "where to compute: the processor, default, or a GPU; the ranks of a host take its GPUs in "
     "turn"},
    {"transport", CHOICE, AT(transport), 0, 0, "staged|nccl", 0,
     "how gradients leave a GPU: by way of the host, default, or over NCCL"},
    {"products", CHOICE, AT(products), 0, 0, "bfloat16|float32", 0,
     "what a GPU's matrix products multiply; default bfloat16"},
    {"help", FLAG, AT(help), 0, 0, NULL, 0, "print this and stop"},
};

enum { OPTIONS = sizeof table / sizeof table[0] };

static const train_options_t defaults = {
    .optimizer = ONEBIT_ADAM,
    .steps = 400,
    .seed = 1,
    .learning_rate = 4e-3f,
    .batch = 8,
    .freeze = FREEZE_DEFAULT,
    .beta2 = 0.99f,
    .weight_decay = 0.1f,
    .scale = ONEBIT_SCALE_RMS,
    .layers = 5,
    .width = 128,
    .heads = 4,
    .context = 64,
    .report_every = 20,
    .sample = 400,
};

static int refuse(char *words, const option_t *option, const char *value, const char *why) {
  snprintf(words, OPTION_WORDS, "--%s %.100s: %.300s", option->name, value, why);
  return -1;
}

static int refuse_range(char *words, const option_t *option, const char *value) {
  char why[100];
  snprintf(why, sizeof why, "not a number from %.10g to %.10g%s%s", option->least, option->most,
           option->choices ? ", nor " : "", option->choices ? option->choices : "");
  return refuse(words, option, value, why);
}

/* The place of the word among the choices, or -1. */
static int place(const char *choices, const char *word) {
  const size_t length = strlen(word);
  for (int i = 0; choices; i++) {
    const char *end = strchr(choices, '|');
    if (length > 0 && strncmp(choices, word, length) == 0 && choices[length] == (end ? '|' : '\0'))
      return i;
    choices = end ? end + 1 : NULL;
  }
  return -1;
}

static int set_count(const option_t *option, size_t *field, const char *value, char *words) {
  char *end;
  if (place(option->choices, value) == 0) {
    *field = option->special;
    return 0;
  }
  errno = 0;
  const unsigned long long number = strtoull(value, &end, 10);
  if (*value < '0' || *value > '9' || *end || errno || (double)number < option->least ||
      (double)number > option->most)
    return refuse_range(words, option, value);
  *field = (size_t)number;
  return 0;
}

static int set_real(const option_t *option, float *field, const char *value, char *words) {
  char *end;
  const double number = strtod(value, &end);
  if (end == value || *end || !(number >= option->least && number <= option->most))
    return refuse_range(words, option, value);
  *field = (float)number;
  return 0;
}

static int set_choice(const option_t *option, int *field, const char *value, char *words) {
  const int choice = place(option->choices, value);
  if (choice < 0) {
    char why[100];
    snprintf(why, sizeof why, "not one of %s", option->choices);
    return refuse(words, option, value, why);
  }
  *field = choice;
  return 0;
}

static int add_path(const option_t *option, train_options_t *options, const char *value,
                    char *words) {
  if (options->ndata == MOST_PATHS)
    return refuse(words, option, value, "too many; give a directory");
  options->data[options->ndata++] = value;
  return 0;
}

static int set(const option_t *option, train_options_t *options, const char *value, char *words) {
  void *field = (char *)options + option->offset;
  switch (option->kind) {
  case PATH:
    return add_path(option, options, value, words);
  case OUTPUT:
    *(const char **)field = value;
    return 0;
  case COUNT:
    return set_count(option, field, value, words);
  case REAL:
    return set_real(option, field, value, words);
  case CHOICE:
    return set_choice(option, field, value, words);
  case FLAG:
    break;
  }
  *(int *)field = 1;
  return 0;
}

/* The option that --NAME or --NAME=VALUE names. */
static const option_t *find(const char *argument) {
  const size_t length = strncmp(argument, "--", 2) == 0 ? strcspn(argument + 2, "=") : 0;
  for (size_t i = 0; i < OPTIONS; i++)
    if (length == strlen(table[i].name) && strncmp(argument + 2, table[i].name, length) == 0)
      return &table[i];
  return NULL;
}

/* What no option alone can be blamed for. */
static int check(const train_options_t *options, char *words) {
  if (options->help)
    return 0;
  if (options->ndata == 0)
    snprintf(words, OPTION_WORDS, "--data: missing; give a text file or a directory of them");
  else if (options->log && options->compare)
    snprintf(words, OPTION_WORDS, "--log %.300s: of one training, and --compare makes two",
             options->log);
  else if (options->width % options->heads != 0)
    snprintf(words, OPTION_WORDS, "--heads %zu: does not divide --width %zu", options->heads,
             options->width);
  else if (options->block_size != ONEBIT_BLOCK_BUFFER && options->block_size % 32 != 0)
    snprintf(words, OPTION_WORDS, "--block-size %zu: not a multiple of 32", options->block_size);
  else if (options->device == ON_HOST && options->transport == OVER_NCCL)
    snprintf(words, OPTION_WORDS, "--transport nccl: is between GPUs; wants --device cuda");
  else if (options->device == ON_CUDA && options->optimizer == DENSE_MPI && !options->compare)
    snprintf(words, OPTION_WORDS, "--optimizer dense-mpi: not with --device cuda");
  else if (options->device == ON_CUDA && options->bucket_size > 0)
    snprintf(words, OPTION_WORDS,
             "--bucket-size %zu: not with --device cuda, where gradients are exchanged after the "
             "backward pass",
             options->bucket_size);
  else
    return 0;
  return -1;
}

int train_options_parse(train_options_t *options, int argc, char **argv, char words[OPTION_WORDS]) {
  *options = defaults;
  for (int i = 1; i < argc; i++) {
    const option_t *option = find(argv[i]);
    const char *value = strchr(argv[i], '=');
    if (!option) {
      snprintf(words, OPTION_WORDS, "%.100s: unknown option; --help lists them", argv[i]);
      return -1;
    }
    if (option->kind == FLAG ? value != NULL : !value && i + 1 == argc)
      return refuse(words, option, value ? value : "",
                    value ? "takes no value" : "a value is missing");
    if (option->kind != FLAG)
      value = value ? value + 1 : argv[++i];
    if (set(option, options, value, words) != 0)
      return -1;
  }
  if (options->freeze == FREEZE_DEFAULT)
    options->freeze = options->steps < 5 ? 1 : options->steps / 5;
  return check(options, words);
}

static void print_default(const option_t *option) {
  const void *field = (const char *)&defaults + option->offset;
  if (option->kind == REAL)
    printf("; default %g", (double)*(const float *)field);
  if (option->kind != COUNT)
    return;
  const size_t count = *(const size_t *)field;
  if (count != 0 && count != FREEZE_DEFAULT)
    printf("; default %zu", count);
}

void train_options_print_help(void) {
  printf("train_text: data-parallel training of a character-level transformer\n\n");
  for (size_t i = 0; i < OPTIONS; i++) {
    const option_t *option = &table[i];
    static const char *const values[] = {"PATH", "", "N", "X", "", ""};
    char left[64];
    snprintf(left, sizeof left, "--%s %s%s%s", option->name,
             option->kind == PATH ? "" : values[option->kind],
             option->kind == COUNT && option->choices ? "|" : "",
             option->choices ? option->choices : "");
    printf("  %-30s %s", left, option->help);
    print_default(option);
    printf("\n");
  }
}
