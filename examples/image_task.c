/* The task of image_task.h. */
#include "examples/image_task.h"

#include <stdlib.h>

#include "examples/image_options.h"
#include "examples/images.h"
#include "examples/network.h"
#include "examples/random.h"

typedef struct image_task {
  train_task_t task;
  const image_options_t *options;
  const images_t *images;
  network_t *network;
  float *pixels;         /* [batch][rows][columns] */
  unsigned char *labels; /* [batch] */
  uint32_t *order;       /* of the images to learn from, in this epoch */
  size_t epoch;          /* counted from 1; 0: no order yet */
} image_task_t;

static image_task_t *of(train_task_t *task) { return (image_task_t *)(void *)task; }

/* --- Making it ---------------------------------------------------------------------------------*/

static void destroy(train_task_t *task) {
  if (!task)
    return;
  network_destroy(of(task)->network);
  free(of(task)->pixels);
  free(of(task)->labels);
  free(of(task)->order);
  free(task->tensors);
  free(task);
}

/* Tells that the network's backward pass has finished a tensor. */
static void report_ready(void *context, size_t tensor) {
  const image_task_t *own = context;
  if (own->task.ready)
    own->task.ready(own->task.ready_context, tensor);
}

static void describe(image_task_t *own) {
  network_t *network = own->network;
  own->task.ntensors = NETWORK_TENSORS;
  own->task.parameters = network->parameters;
  own->task.samples = own->options->train.batch;
  for (size_t t = 0; t < NETWORK_TENSORS; t++)
    own->task.tensors[t] =
        (train_tensor_t){network->tensors[t].value, network->tensors[t].gradient,
                         network->tensors[t].count, !network->tensors[t].is_bias, 0};
  network->ready = report_ready;
  network->ready_context = own;
}

static int allocate(image_task_t *own) {
  const images_t *images = own->images;
  const size_t batch = own->options->train.batch;
  const network_shape_t shape = {.rows = images->rows,
                                 .columns = images->columns,
                                 .channels = own->options->channels,
                                 .hidden = own->options->hidden,
                                 .classes = images->classes,
                                 .images = batch};
  own->network = network_create(&shape);
  own->pixels = malloc(batch * images->rows * images->columns * sizeof(float));
  own->labels = malloc(batch);
  own->order = malloc(images->training * sizeof *own->order);
  own->task.tensors = calloc(NETWORK_TENSORS, sizeof *own->task.tensors);
  return own->network && own->pixels && own->labels && own->order && own->task.tensors ? 0 : -1;
}

static train_task_t *create(const team_t *team, const train_options_t *options, const void *data) {
  image_task_t *own = calloc(1, sizeof *own);
  int well = own != NULL;
  if (own) {
    own->task.kind = &image_kind;
    own->task.team = team;
    own->options = (const image_options_t *)(const void *)options;
    own->images = data;
    well = allocate(own) == 0;
  }
  if (agree(team, well, "out of memory; a smaller --batch or --channels needs less") != 0) {
    destroy(own ? &own->task : NULL);
    return NULL;
  }
  network_initialise(own->network, options->seed);
  describe(own);
  return &own->task;
}

/* --- Learning ----------------------------------------------------------------------------------*/

/* Puts an image into a place of the batch, its pixels of about mean 0 and deviation 1 for MNIST. */
static void take(image_task_t *own, size_t place, size_t image) {
  const size_t size = own->images->rows * own->images->columns;
  const unsigned char *from = own->images->pixel + image * size;
  float *to = own->pixels + place * size;
  for (size_t i = 0; i < size; i++)
    to[i] = ((float)from[i] - 33.0f) * (1.0f / 79.0f);
  own->labels[place] = own->images->label[image];
}

/* The image of a sample. All ranks go through the images in one order, a new one each epoch: of
 * every size * batch images each rank takes its batch. */
static size_t image_of(image_task_t *own, size_t sample) {
  const size_t epoch = sample / own->images->training + 1;
  if (own->epoch != epoch) {
    uint64_t random = random_stream(own->options->train.seed, 0, 1 + epoch);
    shuffle(own->order, own->images->training, &random);
    own->epoch = epoch;
  }
  return own->order[sample % own->images->training];
}

static double gradient(train_task_t *task, size_t micro_batch) {
  image_task_t *own = of(task);
  const size_t batch = own->options->train.batch;
  const size_t rank = train_sampling_rank(task, &own->options->train);
  const size_t first = (micro_batch * task->team->size + rank) * batch;
  for (size_t i = 0; i < batch; i++)
    take(own, i, image_of(own, first + i));
  network_forward(own->network, own->pixels, batch);
  const double loss = network_loss(own->network, own->labels, batch);
  network_backward(own->network, own->labels, batch);
  return loss;
}

/* Finds the loss and the right answers on this rank's held-out images: every size-th. */
static void evaluate(image_task_t *own, double *loss, double *correct) {
  const size_t batch = own->options->train.batch, size = own->task.team->size;
  for (size_t image = own->images->training + own->task.team->rank; image < own->images->count;) {
    size_t filled = 0;
    for (; filled < batch && image < own->images->count; filled++, image += size)
      take(own, filled, image);
    network_forward(own->network, own->pixels, filled);
    *loss += (double)filled * network_loss(own->network, own->labels, filled);
    *correct += (double)network_correct(own->network, own->labels, filled);
  }
}

static int validate(train_task_t *task, train_quality_t *quality) {
  image_task_t *own = of(task);
  const double held_out = (double)(own->images->count - own->images->training);
  const double size = (double)task->team->size;
  double loss = 0.0, correct = 0.0;
  evaluate(own, &loss, &correct);
  float numbers[NUMBERS] = {(float)loss, (float)correct};
  if (mean(task->team, numbers, "validation") != 0)
    return -1;
  *quality = (train_quality_t){.loss = (double)numbers[0] * size / held_out,
                               .accuracy = (double)numbers[1] * size / held_out};
  say(task->team, "accuracy %.2f %%, loss %.4f, of %.0f held-out images\n",
      100.0 * quality->accuracy, quality->loss, held_out);
  return 0;
}

static uint64_t checksum(train_task_t *task) {
  uint64_t sum = 0;
  for (size_t t = 0; t < task->ntensors; t++)
    sum = train_hash(sum, task->tensors[t].value, task->tensors[t].count * sizeof(float));
  return sum;
}

const train_kind_t image_kind = {.name = "images",
                                 .samples = "images",
                                 .create = create,
                                 .destroy = destroy,
                                 .gradient = gradient,
                                 .validate = validate,
                                 .checksum = checksum};
