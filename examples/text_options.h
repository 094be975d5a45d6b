/*
 * The command line of train_text.
 */
#ifndef EXAMPLES_TEXT_OPTIONS_H
#define EXAMPLES_TEXT_OPTIONS_H

#include "examples/train_options.h"

enum { INIT_GPT2, INIT_UNIT }; /* --init */

typedef struct text_options {
  train_options_t train;
  paths_t data;
  size_t layers, width, heads, context;
  int init;
  size_t held_out; /* bytes of the held-out text to look at; 0: all */
  size_t sample;   /* bytes of text to generate at the end */
} text_options_t;

extern const command_line_t text_command_line;

/* Fills in the options. Returns 0, or -1 with words that name the option at fault and its value. */
int text_options_parse(text_options_t *options, int argc, char **argv, char words[OPTION_WORDS]);

#endif
