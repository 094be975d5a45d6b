/*
 * The command line of train_images.
 */
#ifndef EXAMPLES_IMAGE_OPTIONS_H
#define EXAMPLES_IMAGE_OPTIONS_H

#include "examples/train_options.h"

typedef struct image_options {
  train_options_t train;
  const char *images, *labels; /* NULL: drawn digits */
  size_t drawn, side;          /* so many, of so many pixels a side */
  size_t held_out;             /* images; 0: a fifth */
  size_t channels, hidden;     /* of the network */
} image_options_t;

extern const command_line_t image_command_line;

/* Fills in the options. Returns 0, or -1 with words that name the option at fault and its value. */
int image_options_parse(image_options_t *options, int argc, char **argv, char words[OPTION_WORDS]);

#endif
