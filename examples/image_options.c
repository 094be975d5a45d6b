/* The command line of image_options.h. */
#include "examples/image_options.h"

#include <stdio.h>

#include "examples/images.h"

#define AT(field) offsetof(image_options_t, field)

static const option_t data[] = {
    {"images", OPTION_PATH, AT(images), 0, 0, "FILE", 0,
     "images to learn, in MNIST's IDX format, plain or compressed by gzip; default: drawn digits"},
    {"labels", OPTION_PATH, AT(labels), 0, 0, "FILE", 0, "their labels"},
    {"drawn", OPTION_COUNT, AT(drawn), 2, 1e7, NULL, 0, "how many digits to draw"},
    {"side", OPTION_COUNT, AT(side), IMAGE_LEAST, 256, NULL, 0, "pixels a side of drawn digits"},
    {"held-out", OPTION_COUNT, AT(held_out), 1, 1e7, NULL, 0,
     "images to keep from learning, for the accuracy; default a fifth"},
    {"channels", OPTION_COUNT, AT(channels), 1, 4096, NULL, 0,
     "of the first convolution; the second has twice as many"},
    {"hidden", OPTION_COUNT, AT(hidden), 1, 65536, NULL, 0, "units of the dense layer"},
};

/* Weights behind a unit that is rarely active have almost no variance. Steps must not be divided by
 * that once it is frozen: epsilon is large against it, and small against all others' (some
 * 1e-2). */
static const image_options_t defaults = {
    .train = {TRAIN_OPTIONS_DEFAULTS, .steps = 500, .batch = 32, .weight_decay = 0.01f,
              .epsilon = 1e-4f},
    .drawn = 10000,
    .side = 28,
    .channels = 16,
    .hidden = 64,
};

/* The rates with which the dense forms end lowest, a factor of two apart, on MNIST's 10,000 test
 * digits (docs/measured/rates.md); no comparison is made on these. */
static const float learning_rates[METHODS] = {
    [ADAM] = 8e-3f, [EFFICIENT_LAMB] = 5e-3f, [LAMB] = 5e-3f, [MOMENTUM] = 8e-2f, [LION] = 5e-4f};

static const option_table_t own = OPTION_TABLE("Images and network", data);
static const option_table_t *const tables[] = {&own, TRAIN_TABLES};

const command_line_t image_command_line = {
    "train_images", "data-parallel training of a small convolutional network", tables, &defaults};

int image_options_parse(image_options_t *options, int argc, char **argv, char words[OPTION_WORDS]) {
  *options = defaults;
  if (command_line_parse(&image_command_line, options, argc, argv, words) != 0)
    return -1;
  train_options_complete(&options->train, learning_rates);
  if (!options->images == !options->labels)
    return train_options_check(&options->train, words);
  snprintf(words, OPTION_WORDS, "--%s: missing; images and labels come in a file each",
           options->images ? "labels" : "images");
  return -1;
}
