/*
 * The command line of train_words.
 */
#ifndef EXAMPLES_WORD_OPTIONS_H
#define EXAMPLES_WORD_OPTIONS_H

#include "examples/train_options.h"

typedef struct word_options {
  train_options_t train;
  paths_t data;
  size_t vocabulary, width, context;
  int no_table;
} word_options_t;

extern const command_line_t word_command_line;

/* Fills in the options. Returns 0, or -1 with words that name the option at fault and its value. */
int word_options_parse(word_options_t *options, int argc, char **argv, char words[OPTION_WORDS]);

#endif
