/*
 * train_images: data-parallel training of a small convolutional network on images, with any
 * optimizer of the library or its dense form.
 *
 *   mpirun -n 4 train_images --compare
 *   mpirun -n 4 train_images --images t10k-images-idx3-ubyte --labels t10k-labels-idx1-ubyte
 *
 * Without files it trains on drawn digits. The images are shuffled, always in the same way, and a
 * fifth of them is held out. Each rank computes the gradient of its part of each batch.
 * onebit_optimizer_step exchanges the gradients and updates the parameters. The same seed gives the
 * same run.
 */
#include <stdlib.h>

#include "examples/images.h"
#include "examples/model.h"
#include "examples/numbers.h"
#include "examples/train_task.h"

/* --- Options -----------------------------------------------------------------------------------*/

#define AT(field) offsetof(train_options_t, field)

/* clang-format off */
static const struct tool_option rows[] = {
    {"images", 0, TOOL_TEXT, AT(images), "FILE",
     "images to learn, in MNIST's IDX format; default: drawn digits", .low = 0},
    {"labels", 0, TOOL_TEXT, AT(labels), "FILE", "their labels", .low = 0},
    {"drawn", 0, TOOL_COUNT, AT(drawn), "N", "how many digits to draw", .low = 2, .high = 1e7},
    {"side", 0, TOOL_COUNT, AT(side), "N",
     "pixels a side of drawn digits", .low = IMAGE_LEAST, .high = 256},
    {"held-out", 0, TOOL_COUNT, AT(held_out), "N",
     "images to keep from learning, for the accuracy; default a fifth", .low = 1, .high = 1e7},
    {"channels", 0, TOOL_COUNT, AT(channels), "N",
     "of the first convolution; the second has twice as many", .low = 1, .high = 4096},
    {"hidden", 0, TOOL_COUNT, AT(hidden), "N", "units of the dense layer", .low = 1, .high = 65536},
    {.kind = TOOL_ROWS, .rows = train_rows}};
/* clang-format on */

/* Default options. Weights of a unit that is rarely active have almost no variance, and steps with
 * a frozen variance must not divide by it. Therefore epsilon is large compared with that variance,
 * and small compared with the variance of all other weights (about 1e-2). */
static const train_options_t defaults = {
    TRAIN_OPTIONS_DEFAULTS, .steps = 500, .batch = 32,    .weight_decay = 0.01f, .epsilon = 1e-4f,
    .drawn = 10000,         .side = 28,   .channels = 16, .hidden = 64,
};

/* The best learning rates of the uncompressed optimizers, from a search in steps of a factor of two
 * on MNIST's 10,000 test digits (docs/measured/trainings.md). No comparison uses these digits. */
static const float learning_rates[METHODS] = {
    [ADAM] = 8e-3f, [EFFICIENT_LAMB] = 5e-3f, [LAMB] = 5e-3f, [MOMENTUM] = 8e-2f, [LION] = 5e-4f};

static const struct tool tool = {.name = "train_images",
                                 .usage = "train_images [OPTION]...",
                                 .purpose =
                                     "data-parallel training of a small convolutional network",
                                 .options = rows,
                                 .defaults = &defaults};

static int image_task_check_options(const train_options_t *options, char error[TRAIN_ERROR]) {
  if (!options->images == !options->labels)
    return 0;
  snprintf(error, TRAIN_ERROR, "--%s: missing; images and labels come in a file each",
           options->images ? "labels" : "images");
  return -1;
}

/* --- Data --------------------------------------------------------------------------------------*/

static void image_task_unload(void *loaded) {
  images_free(loaded);
  free(loaded);
}

static void *image_task_load(const train_options_t *options, char error[TRAIN_ERROR]) {
  images_t *images = calloc(1, sizeof *images);
  if (!images ||
      (options->images ? images_load(images, options->images, options->labels, error)
                       : images_draw(images, options->drawn, options->side, error)) != 0) {
    free(images);
    return NULL;
  }
  const size_t fifth = images->count / 5 > 0 ? images->count / 5 : 1;
  const size_t held_out = options->held_out > 0 ? options->held_out : fifth;
  if (held_out < images->count) {
    images_split(images, held_out);
    return images;
  }
  snprintf(error, TRAIN_ERROR, "--held-out %zu: leaves nothing of %zu images to learn from",
           held_out, images->count);
  image_task_unload(images);
  return NULL;
}

static uint64_t image_task_hash(const void *loaded) {
  const images_t *images = loaded;
  const uint64_t pixels =
      train_hash(images->rows, images->pixel, images->count * images->rows * images->columns);
  return train_hash(pixels, images->label, images->count);
}

static void image_task_describe(const team_t *team, const train_options_t *options,
                                const void *loaded) {
  const images_t *images = loaded;
  print_once(team, "%zu ranks; %zu %s of %zu x %zu pixels, %zu of them held out, %zu classes\n",
             team->size, images->count, options->images ? "images" : "drawn digits", images->rows,
             images->columns, images->count - images->training, images->classes);
}

/* --- Learning ----------------------------------------------------------------------------------*/

static model_t *image_task_create(train_task_t *task) {
  const images_t *images = task->data;
  const train_options_t *options = task->options;
  const network_shape_t shape = {.rows = images->rows,
                                 .columns = images->columns,
                                 .channels = options->channels,
                                 .hidden = options->hidden,
                                 .classes = images->classes,
                                 .images = options->batch};
  network_t *network = network_create(&shape);
  if (!network)
    return NULL;
  network_initialise(network, options->seed);
  task->order = model_array(&network->model, images->training, sizeof *task->order);
  return model_complete(&network->model);
}

/* Copies an image to position `place` of the batch. With MNIST the pixels get a mean of about 0 and
 * a standard deviation of about 1. */
static void image_task_fill_place(const train_task_t *task, size_t place, size_t image) {
  const network_t *network = (const network_t *)(const void *)task->model;
  const images_t *images = task->data;
  const size_t size = images->rows * images->columns;
  const unsigned char *from = images->pixel + image * size;
  float *to = network->pixels + place * size;
  for (size_t i = 0; i < size; i++)
    to[i] = ((float)from[i] - 33.0f) * (1.0f / 79.0f);
  task->model->target[place] = images->label[image];
}

/* Returns the image of a sample. All ranks use the images in the same order, which is new in each
 * epoch, and each rank takes its own part of the next size * batch images. */
static size_t find_image(train_task_t *task, size_t sample) {
  const size_t training = ((const images_t *)task->data)->training;
  const size_t epoch = sample / training + 1;
  if (task->epoch != epoch) {
    uint64_t random = random_stream(task->options->seed, 0, 1 + epoch);
    shuffle(task->order, training, &random);
    task->epoch = epoch;
  }
  return task->order[sample % training];
}

static void image_task_draw(train_task_t *task, size_t micro_batch) {
  const size_t batch = task->options->batch;
  const size_t first = (micro_batch * task->team->size + train_sampling_rank(task)) * batch;
  for (size_t i = 0; i < batch; i++)
    image_task_fill_place(task, i, find_image(task, first + i));
}

static size_t image_task_held_out(const train_task_t *task) {
  const images_t *images = task->data;
  return images->count - images->training;
}

static void image_task_fill_held_out(const train_task_t *task, size_t place, size_t image) {
  image_task_fill_place(task, place, ((const images_t *)task->data)->training + image);
}

const train_kind_t train_kind = {.name = "images",
                                 .samples = "images",
                                 .held_out_name = "held-out images",
                                 .smaller = "--batch or --channels",
                                 .different = "--images: the ranks read different images",
                                 .classifies = 1,
                                 .tool = &tool,
                                 .learning_rates = learning_rates,
                                 .check = image_task_check_options,
                                 .load = image_task_load,
                                 .unload = image_task_unload,
                                 .hash = image_task_hash,
                                 .describe = image_task_describe,
                                 .create = image_task_create,
                                 .draw = image_task_draw,
                                 .hold = image_task_fill_held_out,
                                 .held_out = image_task_held_out};
