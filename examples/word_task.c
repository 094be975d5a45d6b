/* The task of word_task.h. */
#include "examples/word_task.h"

#include <stdlib.h>
#include <string.h>

#include "examples/log_bilinear.h"
#include "examples/random.h"
#include "examples/word_options.h"
#include "examples/words.h"

typedef struct word_task {
  train_task_t task;
  train_tensor_t tensors[LOG_BILINEAR_TENSORS];
  const word_options_t *options;
  const words_t *words;
  log_bilinear_t *model;
  uint32_t *samples; /* [batch][context + 1] */
} word_task_t;

static word_task_t *of(train_task_t *task) { return (word_task_t *)(void *)task; }

/* --- Making it ---------------------------------------------------------------------------------*/

static void destroy(train_task_t *task) {
  if (!task)
    return;
  log_bilinear_destroy(of(task)->model);
  free(of(task)->samples);
  free(task);
}

/* The model's backward pass has come to a tensor. */
static void report_ready(void *context, size_t tensor) {
  const word_task_t *own = context;
  if (own->task.ready)
    own->task.ready(own->task.ready_context, tensor);
}

static void describe(word_task_t *own) {
  log_bilinear_t *model = own->model;
  own->task.tensors = own->tensors;
  own->task.ntensors = LOG_BILINEAR_TENSORS;
  own->task.parameters = model->parameters;
  own->task.samples = own->options->train.batch;
  for (size_t t = 0; t < LOG_BILINEAR_TENSORS; t++)
    own->tensors[t] = (train_tensor_t){model->tensors[t].value, model->tensors[t].gradient,
                                       model->tensors[t].count, t != WORD_BIAS,
                                       t == WORD_TABLE && !own->options->no_table};
  model->ready = report_ready;
  model->ready_context = own;
}

static int allocate(word_task_t *own) {
  const word_options_t *options = own->options;
  const log_bilinear_shape_t shape = {.vocabulary = own->words->vocabulary,
                                      .width = options->width,
                                      .context = options->context,
                                      .samples = options->train.batch};
  own->model = log_bilinear_create(&shape);
  own->samples = malloc(shape.samples * (shape.context + 1) * sizeof *own->samples);
  return own->model && own->samples ? 0 : -1;
}

static train_task_t *create(const team_t *team, const train_options_t *options, const void *data) {
  word_task_t *own = calloc(1, sizeof *own);
  int well = own != NULL;
  if (own) {
    own->task.kind = &word_kind;
    own->task.team = team;
    own->options = (const word_options_t *)(const void *)options;
    own->words = data;
    well = allocate(own) == 0;
  }
  if (agree(team, well, "out of memory; a smaller --batch or --vocabulary needs less") != 0) {
    destroy(own ? &own->task : NULL);
    return NULL;
  }
  log_bilinear_initialise(own->model, options->seed);
  describe(own);
  return &own->task;
}

/* --- Learning ----------------------------------------------------------------------------------*/

/* The word at this place, after those before it, as a sample. */
static void take(word_task_t *own, size_t sample, size_t place) {
  const size_t context = own->options->context;
  memcpy(own->samples + sample * (context + 1), own->words->word + place - context,
         (context + 1) * sizeof *own->samples);
}

/* The gradient of this rank's own samples. */
static double gradient(train_task_t *task, size_t micro_batch) {
  word_task_t *own = of(task);
  const train_options_t *options = &own->options->train;
  const size_t context = own->options->context;
  uint64_t random =
      random_stream(options->seed, 1 + train_sampling_rank(task, options), micro_batch);
  for (size_t s = 0; s < options->batch; s++)
    take(own, s, context + (size_t)(random_bits(&random) % (own->words->training - context)));
  log_bilinear_forward(own->model, own->samples, options->batch);
  const double loss = log_bilinear_loss(own->model, own->samples, options->batch);
  log_bilinear_backward(own->model, own->samples, options->batch);
  return loss;
}

/* The loss on the held-out words: rank r takes every size-th from the r-th on. */
static int validate(train_task_t *task, train_quality_t *quality) {
  word_task_t *own = of(task);
  const words_t *words = own->words;
  const size_t batch = own->options->train.batch;
  double sum = 0.0, count = 0.0;
  for (size_t place = words->training + task->team->rank; place < words->length;) {
    size_t filled = 0;
    for (; filled < batch && place < words->length; filled++, place += task->team->size)
      take(own, filled, place);
    log_bilinear_forward(own->model, own->samples, filled);
    sum += (double)filled * log_bilinear_loss(own->model, own->samples, filled);
    count += (double)filled;
  }
  float numbers[NUMBERS] = {(float)sum, (float)count};
  if (mean(task->team, numbers, "validation loss") != 0)
    return -1;
  *quality = (train_quality_t){(double)numbers[0] / (double)numbers[1], -1.0};
  say(task->team, "validation loss %.4f over %zu held-out words\n", quality->loss,
      words->length - words->training);
  return 0;
}

static uint64_t checksum(train_task_t *task) {
  uint64_t sum = 0;
  for (size_t t = 0; t < task->ntensors; t++)
    sum = train_hash(sum, task->tensors[t].value, task->tensors[t].count * sizeof(float));
  return sum;
}

const train_kind_t word_kind = {.name = "words",
                                .samples = "words",
                                .create = create,
                                .destroy = destroy,
                                .gradient = gradient,
                                .validate = validate,
                                .checksum = checksum};
