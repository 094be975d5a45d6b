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

enum { DONE = 0, FAILED = 1, WRONG_USE = 2 }; /* exit statuses */

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

static int load_and_train(team_t *team, const image_options_t *options) {
  images_t images = {0};
  char words[IMAGE_WORDS];
  const int well = !options->train.dense_mpi || team->has_mpi;
  const int loaded = load(&images, options, words);
  int result = WRONG_USE;
  team->gradients = team->comm;
  if (agree(team, well, "--dense-mpi: wants ranks that are MPI's processes") == 0 &&
      agree(team, loaded == 0, words) == 0 &&
      agree(team, same(team, hash(&images)), "--images: the ranks read different images") == 0) {
    say(team, "%zu ranks; %zu %s of %zu x %zu pixels, %zu of them held out, %zu classes\n",
        team->size, images.count, options->images ? "images" : "drawn digits", images.rows,
        images.columns, images.count - images.training, images.classes);
    result = train_all(team, &options->train, &image_kind, &images) == 0 ? DONE : FAILED;
  }
  images_free(&images);
  return result;
}

/* What the command line asks for. */
typedef struct command {
  image_options_t options;
  int wrong; /* nonzero: words say what is */
  char words[OPTION_WORDS];
} command_t;

static int run_rank(team_t *team, const void *context) {
  const command_t *command = context;
  team->quiet = command->options.train.quiet;
  if (command->wrong)
    complain(team, command->words);
  else if (!command->options.train.help)
    return load_and_train(team, &command->options);
  else if (team->rank == 0)
    image_options_print_help();
  return command->wrong ? WRONG_USE : DONE;
}

int main(int argc, char **argv) {
  command_t command;
  setvbuf(stdout, NULL, _IOLBF, BUFSIZ);
  command.wrong = image_options_parse(&command.options, argc, argv, command.words);
  return team_run("train_images", command.wrong ? 0 : command.options.train.ranks, run_rank,
                  &command);
}
