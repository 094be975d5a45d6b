/*
 * train_text: data-parallel training of a character-level transformer, with any optimizer of the
 * library or its dense form.
 *
 *   mpirun -n 4 train_text --data /usr/share/common-licenses --compare
 *
 * Each rank draws its own sequences and computes its own gradients; onebit_optimizer_step exchanges
 * them and updates the parameters, which stay equal on all ranks to the last bit. The dense form is
 * the same optimizer, never frozen. The same seed gives the same run.
 */
#include <stdio.h>

#include "examples/text_task.h"
#include "examples/train_run.h"

/* Checks that the text is the same everywhere, and long enough for a window to learn from and one
 * to hold out. */
static int check_text(const team_t *team, const text_options_t *options, const text_t *text) {
  char words[TEXT_WORDS];
  snprintf(words, sizeof words,
           "--data: %zu bytes are too short for --context %zu: a tenth is held out, and each part "
           "must be longer than the context",
           text->length, options->context);
  if (agree(team, text->length / 10 > options->context, words) != 0)
    return -1;
  return agree(team, same(team, train_hash(text->vocabulary, text->tokens, text->length)),
               "--data: the ranks read different texts");
}

static int load_and_train(team_t *team, const void *context) {
  const text_options_t *options = context;
  text_t text;
  char words[TEXT_WORDS];
  const int loaded = text_load(&text, options->data.path, options->data.count, words);
  int result = WRONG_USE;
  if (agree(team, loaded == 0, words) == 0 && check_text(team, options, &text) == 0) {
    say(team, "%zu ranks; %zu bytes of text from %zu files, of %zu kinds\n", team->size,
        text.length, text.files, text.vocabulary);
    result = train_all(team, &options->train, &text_kind, &text) == 0 ? DONE : FAILED;
  }
  text_free(&text);
  return result;
}

int main(int argc, char **argv) {
  const train_program_t program = {&text_command_line, load_and_train};
  text_options_t options;
  char words[OPTION_WORDS];
  const int wrong = text_options_parse(&options, argc, argv, words);
  return train_main(&program, &options.train, wrong ? words : NULL);
}
