/*
 * train_words: data-parallel training of tables of word embeddings that predict the next word of a
 * text, with any optimizer of the library or its dense form.
 *
 *   mpirun -n 4 train_words --data /usr/share/common-licenses --compare
 *
 * Nearly all parameters are in two tables with one row for each word, and most words are rare.
 * Therefore many elements have a gradient of zero in most steps. Each rank draws its own positions
 * in the text. onebit_optimizer_step exchanges the gradients and updates the parameters. The same
 * seed gives the same run.
 */
#include <stdlib.h>
#include <string.h>

#include "examples/model.h"
#include "examples/numbers.h"
#include "examples/text.h"
#include "examples/train_task.h"

/* --- Options -----------------------------------------------------------------------------------*/

#define AT(field) offsetof(train_options_t, field)

/* clang-format off */
static const struct tool_option rows[] = {
    {"data", 0, TOOL_CALL, 0, "PATH",
     "text to train on: a file, or all files of a directory; may be given again",
     .read = train_read_path},
    {"vocabulary", 0, TOOL_COUNT, AT(vocabulary), "N",
     "rows of a table, a different word each, the last one for all other words",
     .low = 2, .high = 1e6},
    {"width", 0, TOOL_COUNT, AT(width), "N", "columns of a table", .low = 1, .high = 4096},
    {"context", 0, TOOL_COUNT, AT(context), "N",
     "words before the one that is predicted", .low = 1, .high = 1024},
    {"no-table", 0, TOOL_FLAG, AT(no_table), NULL,
     "Efficient-Adam compresses the table of outputs as it does other tensors", .low = 0},
    {.kind = TOOL_ROWS, .rows = train_rows}};
/* clang-format on */

static const train_options_t defaults = {
    TRAIN_OPTIONS_DEFAULTS, .steps = 500, .batch = 64,  .epsilon = 1e-8f,
    .vocabulary = 4096,     .width = 32,  .context = 4,
};

/* The best learning rates of the uncompressed optimizers, from a search in steps of a factor of two
 * on Perl's library (docs/measured/trainings.md). No comparison uses this text. */
static const float learning_rates[METHODS] = {
    [ADAM] = 4e-2f, [EFFICIENT_LAMB] = 2e-2f, [LAMB] = 2e-2f, [MOMENTUM] = 0.5f, [LION] = 4e-3f};

static const struct tool tool = {
    .name = "train_words",
    .usage = "train_words [OPTION]...",
    .purpose = "data-parallel training of tables of word embeddings, on the next word",
    .options = rows,
    .defaults = &defaults};

/* --- Data --------------------------------------------------------------------------------------*/

static void word_task_unload(void *loaded) {
  words_free(loaded);
  free(loaded);
}

static void *word_task_load(const train_options_t *options, char error[TRAIN_ERROR]) {
  words_t *words = calloc(1, sizeof *words);
  text_t text;
  if (!words || text_load(&text, options->data.path, options->data.count, error) != 0) {
    free(words);
    return NULL;
  }
  const int split = words_split(words, &text, options->vocabulary);
  words->bytes = text.length;
  text_free(&text);
  if (split == 0 && words->training > options->context && words->length > words->training)
    return words;
  snprintf(error, TRAIN_ERROR,
           split != 0 ? "--data: out of memory for the words of %zu bytes"
                      : "--data: %zu bytes have too few words: a tenth is held out, and the rest "
                        "must be longer than the context",
           words->bytes);
  word_task_unload(words);
  return NULL;
}

static uint64_t word_task_hash(const void *loaded) {
  const words_t *words = loaded;
  return train_hash(words->vocabulary, words->word, words->length * sizeof *words->word);
}

static void word_task_describe(const team_t *team, const train_options_t *options,
                               const void *loaded) {
  const words_t *words = loaded;
  (void)options;
  print_once(team, "%zu ranks; %zu bytes of text, %zu words, of %zu kinds\n", team->size,
             words->bytes, words->length, words->vocabulary);
}

/* --- Learning ----------------------------------------------------------------------------------*/

static model_t *word_task_create(train_task_t *task) {
  const train_options_t *options = task->options;
  const log_bilinear_shape_t shape = {.vocabulary = ((const words_t *)task->data)->vocabulary,
                                      .width = options->width,
                                      .context = options->context,
                                      .samples = options->batch};
  log_bilinear_t *model = log_bilinear_create(&shape);
  if (!model)
    return NULL;
  model->model.tensors[WORD_TABLE].table = !options->no_table;
  log_bilinear_initialise(model, options->seed);
  return &model->model;
}

/* Fills in a sample: the word at this place is the target, and the words before it are the
 * context. */
static void word_task_fill_sample(const train_task_t *task, size_t sample, size_t place) {
  const log_bilinear_t *model = (const log_bilinear_t *)(const void *)task->model;
  const words_t *words = task->data;
  const size_t context = task->options->context;
  memcpy(model->words + sample * (context + 1), words->word + place - context,
         (context + 1) * sizeof *words->word);
}

static void word_task_draw(train_task_t *task, size_t micro_batch) {
  const size_t context = task->options->context;
  const size_t places = ((const words_t *)task->data)->training - context;
  uint64_t random = random_stream(task->options->seed, 1 + train_sampling_rank(task), micro_batch);
  for (size_t s = 0; s < task->options->batch; s++)
    word_task_fill_sample(task, s, context + (size_t)(random_bits(&random) % places));
}

static size_t word_task_held_out(const train_task_t *task) {
  const words_t *words = task->data;
  return words->length - words->training;
}

static void word_task_fill_held_out(const train_task_t *task, size_t place, size_t word) {
  word_task_fill_sample(task, place, ((const words_t *)task->data)->training + word);
}

const train_kind_t train_kind = {.name = "words",
                                 .samples = "words",
                                 .held_out_name = "held-out words",
                                 .smaller = "--batch or --vocabulary",
                                 .different = "--data: the ranks read different texts",
                                 .tool = &tool,
                                 .learning_rates = learning_rates,
                                 .check = train_check_text,
                                 .load = word_task_load,
                                 .unload = word_task_unload,
                                 .hash = word_task_hash,
                                 .describe = word_task_describe,
                                 .create = word_task_create,
                                 .draw = word_task_draw,
                                 .hold = word_task_fill_held_out,
                                 .held_out = word_task_held_out};
