/* The command line of word_options.h. */
#include "examples/word_options.h"

#include <stdio.h>

#define AT(field) offsetof(word_options_t, field)

static const option_t data[] = {
    {"data", OPTION_PATHS, AT(data), 0, 0, "PATH", 0,
     "text to train on: a file, or all files of a directory; may be given again"},
    {"vocabulary", OPTION_COUNT, AT(vocabulary), 2, 1e6, NULL, 0,
     "rows of a table: so many different words, the last of them for all others"},
    {"width", OPTION_COUNT, AT(width), 1, 4096, NULL, 0, "columns of a table"},
    {"context", OPTION_COUNT, AT(context), 1, 1024, NULL, 0,
     "words before the one that is predicted"},
    {"no-table", OPTION_FLAG, AT(no_table), 0, 0, NULL, 0,
     "Efficient-Adam compresses the table of outputs as it does other tensors"},
};

static const word_options_t defaults = {
    .train = {TRAIN_OPTIONS_DEFAULTS, .steps = 500, .batch = 64, .epsilon = 1e-8f},
    .vocabulary = 4096,
    .width = 32,
    .context = 4,
};

/* The dense forms end lowest with these, of rates a factor of two apart, on Perl's library
 * (docs/measured/rates.md); no comparison is made on it. */
static const float learning_rates[METHODS] = {
    [ADAM] = 4e-2f, [EFFICIENT_LAMB] = 2e-2f, [LAMB] = 2e-2f, [MOMENTUM] = 0.5f, [LION] = 4e-3f};

static const option_table_t own = OPTION_TABLE("Text and model", data);
static const option_table_t *const tables[] = {&own, TRAIN_TABLES};

const command_line_t word_command_line = {
    "train_words", "data-parallel training of tables of word embeddings, on the next word", tables,
    &defaults};

int word_options_parse(word_options_t *options, int argc, char **argv, char words[OPTION_WORDS]) {
  *options = defaults;
  if (command_line_parse(&word_command_line, options, argc, argv, words) != 0)
    return -1;
  train_options_complete(&options->train, learning_rates);
  if (options->train.help || options->data.count > 0)
    return train_options_check(&options->train, words);
  snprintf(words, OPTION_WORDS, "--data: missing; give a text file or a directory of them");
  return -1;
}
