/*
 * train_text: data-parallel training of a character-level transformer, with any optimizer of the
 * library or its dense form.
 *
 *   mpirun -n 4 train_text --data /usr/share/common-licenses --compare
 *
 * Each rank draws its own sequences and computes its own gradients. onebit_optimizer_step exchanges
 * the gradients and updates the parameters, which stay equal on all ranks to the last bit. The
 * dense form is the same optimizer without compression: its variance is never frozen. The same seed
 * gives the same run.
 */
#include <stdlib.h>
#include <string.h>

#include "examples/model.h"
#include "examples/numbers.h"
#include "examples/text.h"
#include "examples/train_task.h"

/* --- Options -----------------------------------------------------------------------------------*/

enum { INIT_GPT2, INIT_UNIT }; /* --init */

#define AT(field) offsetof(train_options_t, field)

static const char *const init_names[] = {"gpt2", "unit", NULL};
/* clang-format off */
static const struct tool_option rows[] = {
    {"data", 0, TOOL_CALL, 0, "PATH",
     "text to train on: a file, or all files of a directory; may be given again",
     .read = train_read_path},
    {"context", 0, TOOL_COUNT, AT(context), "N",
     "bytes in a sequence, a sample", .low = 1, .high = 4096},
    {"layers", 0, TOOL_COUNT, AT(layers), "N", "blocks of the transformer", .low = 1, .high = 1000},
    {"width", 0, TOOL_COUNT, AT(width), "N", "its width", .low = 1, .high = 16384},
    {"heads", 0, TOOL_COUNT, AT(heads), "N",
     "attention heads; divides the width", .low = 1, .high = 16384},
    {"init", 0, TOOL_CHOICE, AT(init), "gpt2|unit",
     "initial parameters: as in GPT-2, with deviation 0.02 (default), or such as keep\n"
     "activations of variance 1", .names = init_names},
    {"held-out", 0, TOOL_COUNT, AT(held_out), "N",
     "bytes to look at, evenly spread, of the tenth that is held out; default 0:\n"
     "all of it", .high = 1e15},
    {.kind = TOOL_ROWS, .rows = train_rows}};
/* clang-format on */

static const train_options_t defaults = {
    TRAIN_OPTIONS_DEFAULTS, .steps = 400,     .batch = 8,
    .weight_decay = 0.1f,   .epsilon = 1e-8f, .layers = 5,
    .width = 128,           .heads = 4,       .context = 64,
};

/* The best learning rates of the uncompressed optimizers, from a search in steps of a factor of two
 * on Perl's library, with --width 64 and --layers 2 (docs/measured/trainings.md). No comparison
 * uses this text. */
static const float learning_rates[METHODS] = {
    [ADAM] = 2e-3f, [EFFICIENT_LAMB] = 2e-2f, [LAMB] = 2e-2f, [MOMENTUM] = 1e-1f, [LION] = 1e-3f};

static const struct tool tool = {.name = "train_text",
                                 .usage = "train_text [OPTION]...",
                                 .purpose =
                                     "data-parallel training of a character-level transformer",
                                 .options = rows,
                                 .defaults = &defaults};

static int text_task_check_options(const train_options_t *options, char error[TRAIN_ERROR]) {
  if (options->width % options->heads == 0)
    return train_check_text(options, error);
  snprintf(error, TRAIN_ERROR, "--heads %zu: does not divide --width %zu", options->heads,
           options->width);
  return -1;
}

/* --- Data --------------------------------------------------------------------------------------*/

static void text_task_unload(void *loaded) {
  text_free(loaded);
  free(loaded);
}

/* Loads a text. It must have at least one window to train on and one to hold out. */
static void *text_task_load(const train_options_t *options, char error[TRAIN_ERROR]) {
  text_t *text = calloc(1, sizeof *text);
  if (!text || text_load(text, options->data.path, options->data.count, error) != 0) {
    free(text);
    return NULL;
  }
  if (text->length / 10 > options->context)
    return text;
  snprintf(error, TRAIN_ERROR,
           "--data: %zu bytes are too short for --context %zu: a tenth is held out, and each part "
           "must be longer than the context",
           text->length, options->context);
  text_task_unload(text);
  return NULL;
}

static uint64_t text_task_hash(const void *loaded) {
  const text_t *text = loaded;
  return train_hash(text->vocabulary, text->tokens, text->length);
}

static void text_task_describe(const team_t *team, const train_options_t *options,
                               const void *loaded) {
  const text_t *text = loaded;
  (void)options;
  print_once(team, "%zu ranks; %zu bytes of text from %zu files, of %zu kinds\n", team->size,
             text->length, text->files, text->vocabulary);
}

/* --- Learning ----------------------------------------------------------------------------------*/

static model_t *text_task_create(train_task_t *task) {
  const train_options_t *options = task->options;
  const text_t *text = task->data;
  const transformer_shape_t shape = {.vocabulary = text->vocabulary,
                                     .context = options->context,
                                     .width = options->width,
                                     .heads = options->heads,
                                     .layers = options->layers,
                                     .sequences = options->batch};
  transformer_t *model = transformer_create(&shape);
  if (!model)
    return NULL;
  (options->init == INIT_UNIT ? transformer_initialise_unit
                              : transformer_initialise)(model, options->seed);
  return &model->model;
}

static unsigned char *tokens_of(const train_task_t *task) {
  return ((const transformer_t *)(const void *)task->model)->tokens;
}

/* Draws this rank's own sequences. */
static void text_task_draw(train_task_t *task, size_t micro_batch) {
  const train_options_t *options = task->options;
  uint64_t random = random_stream(options->seed, 1 + train_sampling_rank(task), micro_batch);
  text_sample(task->data, options->batch, options->context + 1, &random, tokens_of(task));
}

/* Returns the number of windows of the held-out text that validation uses. */
static size_t text_task_held_out(const train_task_t *task) {
  const size_t context = task->options->context, most = task->options->held_out;
  const size_t windows = text_held_out(task->data, context);
  return most == 0 || most >= windows * context ? windows : (most + context - 1) / context;
}

static void text_task_fill_held_out(const train_task_t *task, size_t place, size_t window) {
  const size_t context = task->options->context, all = text_held_out(task->data, context);
  text_held_out_window(task->data, context, window * all / text_task_held_out(task),
                       tokens_of(task) + place * (context + 1));
}

const train_kind_t train_kind = {.name = "text",
                                 .samples = "tokens",
                                 .held_out_name = "bytes of held-out text",
                                 .smaller = "--batch, --context or --width",
                                 .different = "--data: the ranks read different texts",
                                 .tool = &tool,
                                 .learning_rates = learning_rates,
                                 .check = text_task_check_options,
                                 .load = text_task_load,
                                 .unload = text_task_unload,
                                 .hash = text_task_hash,
                                 .describe = text_task_describe,
                                 .create = text_task_create,
                                 .draw = text_task_draw,
                                 .hold = text_task_fill_held_out,
                                 .held_out = text_task_held_out};
