/*
 * train_words: data-parallel training of tables of word embeddings, on the next word of a text,
 * with any optimizer of the library or its dense form.
 *
 *   mpirun -n 4 train_words --data /usr/share/common-licenses --compare
 *
 * Nearly all parameters are in two tables of a row a word, and most words are rare: many elements
 * have a gradient of zero in most steps. Each rank draws its own places of the text;
 * onebit_optimizer_step exchanges and updates. The same seed gives the same run.
 */
#include <stdio.h>

#include "examples/text.h"
#include "examples/train_run.h"
#include "examples/word_options.h"
#include "examples/word_task.h"
#include "examples/words.h"

static int load(words_t *words, size_t *bytes, const word_options_t *options,
                char reason[TEXT_WORDS]) {
  text_t text;
  if (text_load(&text, options->data.path, options->data.count, reason) != 0)
    return -1;
  const int result = words_split(words, &text, options->vocabulary);
  *bytes = text.length;
  text_free(&text);
  if (result == 0 && words->training > options->context && words->length > words->training)
    return 0;
  snprintf(reason, TEXT_WORDS,
           result != 0 ? "--data: out of memory for the words of %zu bytes"
                       : "--data: %zu bytes have too few words: a tenth is held out, and the rest "
                         "must be longer than the context",
           *bytes);
  return -1;
}

static int load_and_train(team_t *team, const void *context) {
  const word_options_t *options = context;
  words_t words = {0};
  size_t bytes = 0;
  char reason[TEXT_WORDS];
  const int loaded = load(&words, &bytes, options, reason);
  int result = WRONG_USE;
  if (agree(team, loaded == 0, reason) == 0 &&
      agree(team,
            same(team, train_hash(words.vocabulary, words.word, words.length * sizeof *words.word)),
            "--data: the ranks read different texts") == 0) {
    say(team, "%zu ranks; %zu bytes of text, %zu words, of %zu kinds\n", team->size, bytes,
        words.length, words.vocabulary);
    result = train_all(team, &options->train, &word_kind, &words) == 0 ? DONE : FAILED;
  }
  words_free(&words);
  return result;
}

int main(int argc, char **argv) {
  const train_program_t program = {&word_command_line, load_and_train};
  word_options_t options;
  char words[OPTION_WORDS];
  const int wrong = word_options_parse(&options, argc, argv, words);
  return train_main(&program, &options.train, wrong ? words : NULL);
}
