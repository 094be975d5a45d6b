/*
 * train_images: data-parallel training of a small convolutional network on images, with any
 * optimizer of the library or its dense form.
 *
 *   mpirun -n 4 train_images --compare
 *   mpirun -n 4 train_images --images t10k-images-idx3-ubyte.gz --labels t10k-labels-idx1-ubyte.gz
 *
 * Without files it draws digits. The images are shuffled, always in the same way, and a fifth of
 * them is held out. Each rank computes the gradient of its part of each batch;
 * onebit_optimizer_step exchanges and updates. The same seed gives the same run.
 */
#include <stdio.h>

#include "examples/image_options.h"
#include "examples/image_task.h"
#include "examples/images.h"
#include "examples/train_run.h"

static int load(images_t *images, const image_options_t *options, char words[IMAGE_WORDS]) {
  const int loaded = options->images ? images_load(images, options->images, options->labels, words)
                                     : images_draw(images, options->drawn, options->side, words);
  if (loaded != 0)
    return -1;
  const size_t fifth = images->count / 5 > 0 ? images->count / 5 : 1;
  const size_t held_out = options->held_out > 0 ? options->held_out : fifth;
  if (held_out < images->count) {
    images_split(images, held_out);
    return 0;
  }
  snprintf(words, IMAGE_WORDS, "--held-out %zu: leaves nothing of %zu images to learn from",
           held_out, images->count);
  images_free(images);
  return -1;
}

static uint64_t hash(const images_t *images) {
  const uint64_t pixels =
      train_hash(images->rows, images->pixel, images->count * images->rows * images->columns);
  return train_hash(pixels, images->label, images->count);
}

static int load_and_train(team_t *team, const void *context) {
  const image_options_t *options = context;
  images_t images = {0};
  char words[IMAGE_WORDS];
  const int loaded = load(&images, options, words);
  int result = WRONG_USE;
  if (agree(team, loaded == 0, words) == 0 &&
      agree(team, same(team, hash(&images)), "--images: the ranks read different images") == 0) {
    say(team, "%zu ranks; %zu %s of %zu x %zu pixels, %zu of them held out, %zu classes\n",
        team->size, images.count, options->images ? "images" : "drawn digits", images.rows,
        images.columns, images.count - images.training, images.classes);
    result = train_all(team, &options->train, &image_kind, &images) == 0 ? DONE : FAILED;
  }
  images_free(&images);
  return result;
}

int main(int argc, char **argv) {
  const train_program_t program = {&image_command_line, load_and_train};
  image_options_t options;
  char words[OPTION_WORDS];
  const int wrong = image_options_parse(&options, argc, argv, words);
  return train_main(&program, &options.train, wrong ? words : NULL);
}
