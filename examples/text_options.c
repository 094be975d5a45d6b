/* The command line of text_options.h. */
#include "examples/text_options.h"

#include <stdio.h>

#define AT(field) offsetof(text_options_t, field)

static const option_t data[] = {
    {"data", OPTION_PATHS, AT(data), 0, 0, "PATH", 0,
     "text to train on: a file, or all files of a directory; may be given again"},
    {"context", OPTION_COUNT, AT(context), 1, 4096, NULL, 0, "bytes in a sequence, a sample"},
    {"layers", OPTION_COUNT, AT(layers), 1, 1000, NULL, 0, "blocks of the transformer"},
    {"width", OPTION_COUNT, AT(width), 1, 16384, NULL, 0, "its width"},
    {"heads", OPTION_COUNT, AT(heads), 1, 16384, NULL, 0, "attention heads; divides the width"},
    {"init", OPTION_CHOICE, AT(init), 0, 0, "gpt2|unit", 0,
     "first parameters: GPT-2's, of deviation 0.02, default, or those that keep activations of "
     "variance 1"},
    {"held-out", OPTION_COUNT, AT(held_out), 0, 1e15, NULL, 0,
     "bytes to look at, evenly spread, of the tenth that is held out; default 0: all of it"},
    {"sample", OPTION_COUNT, AT(sample), 0, 1e6, NULL, 0, "bytes of text to generate at the end"},
};

static const text_options_t defaults = {
    .train = {TRAIN_OPTIONS_DEFAULTS, .steps = 400, .batch = 8, .weight_decay = 0.1f,
              .epsilon = 1e-8f},
    .layers = 5,
    .width = 128,
    .heads = 4,
    .context = 64,
    .sample = 400,
};

/* The rates with which the dense forms end lowest, a factor of two apart, on Perl's library, with
 * --width 64 and --layers 2 (docs/measured/rates.md); no comparison is made on it. */
static const float learning_rates[METHODS] = {
    [ADAM] = 2e-3f, [EFFICIENT_LAMB] = 2e-2f, [LAMB] = 2e-2f, [MOMENTUM] = 1e-1f, [LION] = 1e-3f};

static const option_table_t own = OPTION_TABLE("Text and model", data);
static const option_table_t *const tables[] = {&own, TRAIN_TABLES};

const command_line_t text_command_line = {
    "train_text", "data-parallel training of a character-level transformer", tables, &defaults};

/* Checks options that go wrong together. */
static int check(const text_options_t *options, char *words) {
  if (options->train.help)
    return 0;
  if (options->data.count == 0)
    snprintf(words, OPTION_WORDS, "--data: missing; give a text file or a directory of them");
  else if (options->width % options->heads != 0)
    snprintf(words, OPTION_WORDS, "--heads %zu: does not divide --width %zu", options->heads,
             options->width);
  else
    return train_options_check(&options->train, words);
  return -1;
}

int text_options_parse(text_options_t *options, int argc, char **argv, char words[OPTION_WORDS]) {
  *options = defaults;
  if (command_line_parse(&text_command_line, options, argc, argv, words) != 0)
    return -1;
  train_options_complete(&options->train, learning_rates);
  return check(options, words);
}
