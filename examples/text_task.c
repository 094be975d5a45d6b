/* The task of text_task.h. */
#include "examples/text_task.h"

#include <stdlib.h>
#include <string.h>

#include "examples/random.h"
#include "examples/transformer.h"

typedef struct text_task {
  train_task_t task;
  const text_options_t *options;
  const text_t *text;
  transformer_t *model;
  unsigned char *tokens; /* [batch][context + 1] */
} text_task_t;

static text_task_t *of(train_task_t *task) { return (text_task_t *)(void *)task; }

/* --- Making it ---------------------------------------------------------------------------------*/

static void destroy(train_task_t *task) {
  if (!task)
    return;
  transformer_destroy(of(task)->model);
  free(of(task)->tokens);
  free(task->tensors);
  free(task);
}

/* Tells that the model's backward pass has finished a tensor. */
static void report_ready(void *context, size_t tensor) {
  const text_task_t *own = context;
  if (own->task.ready)
    own->task.ready(own->task.ready_context, tensor);
}

static void describe(text_task_t *own) {
  transformer_t *model = own->model;
  own->task.ntensors = model->ntensors;
  own->task.parameters = model->parameters;
  own->task.samples = own->options->train.batch * own->options->context;
  for (size_t t = 0; t < model->ntensors; t++)
    own->task.tensors[t] = (train_tensor_t){model->tensors[t].value, model->tensors[t].gradient,
                                            model->tensors[t].count, !model->tensors[t].is_gain, 0};
  model->ready = report_ready;
  model->ready_context = own;
}

/* Creates the model, with the seed's first values. */
static int create_model(text_task_t *own) {
  const text_options_t *options = own->options;
  const transformer_shape_t shape = {.vocabulary = own->text->vocabulary,
                                     .context = options->context,
                                     .width = options->width,
                                     .heads = options->heads,
                                     .layers = options->layers,
                                     .sequences = options->train.batch};
  own->model = transformer_create(&shape);
  if (agree(own->task.team, own->model != NULL,
            "out of memory for the model; a smaller --batch, --context or --width needs less") != 0)
    return -1;
  if (options->init == INIT_UNIT)
    transformer_initialise_unit(own->model, options->train.seed);
  else
    transformer_initialise(own->model, options->train.seed);
  return 0;
}

static int fill(text_task_t *own) {
  const team_t *team = own->task.team;
  own->tokens = malloc(own->options->train.batch * (own->options->context + 1));
  if (agree(team, own->tokens != NULL, "out of memory for a batch") != 0 || create_model(own) != 0)
    return -1;
  own->task.tensors = calloc(own->model->ntensors, sizeof *own->task.tensors);
  if (agree(team, own->task.tensors != NULL, "out of memory for the list of tensors") != 0)
    return -1;
  describe(own);
  return 0;
}

static train_task_t *create(const team_t *team, const train_options_t *options, const void *data) {
  text_task_t *own = calloc(1, sizeof *own);
  if (own) {
    own->task.kind = &text_kind;
    own->task.team = team;
    own->options = (const text_options_t *)(const void *)options;
    own->text = data;
  }
  if (agree(team, own != NULL, "out of memory for the training") == 0 && fill(own) == 0)
    return &own->task;
  destroy(own ? &own->task : NULL);
  return NULL;
}

/* --- Learning ----------------------------------------------------------------------------------*/

static double loss(text_task_t *own, size_t sequences) {
  transformer_forward(own->model, own->tokens, sequences);
  return transformer_loss(own->model, own->tokens, sequences);
}

/* Computes the gradient of this rank's own sequences. */
static double gradient(train_task_t *task, size_t micro_batch) {
  text_task_t *own = of(task);
  const train_options_t *options = &own->options->train;
  uint64_t random =
      random_stream(options->seed, 1 + train_sampling_rank(task, options), micro_batch);
  text_sample(own->text, options->batch, own->options->context + 1, &random, own->tokens);
  const double found = loss(own, options->batch);
  transformer_backward(own->model, own->tokens, options->batch);
  return found;
}

/* The number of windows of the held-out text that validation uses. */
static size_t looked_at(const text_task_t *own) {
  const size_t context = own->options->context, most = own->options->held_out;
  const size_t windows = text_held_out(own->text, context);
  return most == 0 || most >= windows * context ? windows : (most + context - 1) / context;
}

/* Finds the loss on the held-out text: rank r takes every size-th window from window r on. */
static int validate(train_task_t *task, train_quality_t *quality) {
  text_task_t *own = of(task);
  const team_t *team = task->team;
  const size_t context = own->options->context, windows = looked_at(own);
  const size_t all = text_held_out(own->text, context);
  double sum = 0.0, count = 0.0;
  for (size_t window = team->rank; window < windows;) {
    size_t filled = 0;
    for (; filled < own->options->train.batch && window < windows; filled++, window += team->size)
      text_held_out_window(own->text, context, window * all / windows,
                           own->tokens + filled * (context + 1));
    sum += (double)filled * loss(own, filled);
    count += (double)filled;
  }
  float numbers[NUMBERS] = {(float)sum, (float)count};
  if (mean(team, numbers, "validation loss") != 0)
    return -1;
  *quality = (train_quality_t){(double)numbers[0] / (double)numbers[1], -1.0};
  say(team, "validation loss %.4f over %zu bytes of held-out text\n", quality->loss,
      windows * context);
  return 0;
}

static uint64_t checksum(train_task_t *task) {
  const transformer_t *model = of(task)->model;
  uint64_t sum = 0;
  for (size_t t = 0; t < model->ntensors; t++)
    sum = train_hash(sum, model->tensors[t].value, model->tensors[t].count * sizeof(float));
  return sum;
}

/* --- Showing what was learnt -------------------------------------------------------------------*/

static size_t draw_token(const float *probabilities, size_t vocabulary, uint64_t *random) {
  float left = random_uniform(random);
  size_t token = 0;
  while (token + 1 < vocabulary && left >= probabilities[token])
    left -= probabilities[token++];
  return token;
}

static void print_byte(unsigned char byte) { putchar(byte < ' ' && byte != '\n' ? '?' : byte); }

/* Continues the first held-out window, byte by byte. */
static void show(train_task_t *task) {
  text_task_t *own = of(task);
  if (own->options->sample == 0)
    return;
  const text_t *text = own->text;
  const size_t context = own->options->context;
  uint64_t random = random_stream(own->options->train.seed, 0, 1);
  unsigned char *tokens = own->tokens;
  text_held_out_window(text, context, 0, tokens);
  printf("\nSample, going on from the held-out text\n----\n");
  for (size_t i = 0; i < context; i++)
    print_byte(text->bytes[tokens[i]]);
  printf(" >>> ");
  for (size_t i = 0; i < own->options->sample; i++) {
    transformer_forward(own->model, tokens, 1);
    const float *next = own->model->next + (context - 1) * text->vocabulary;
    const size_t token = draw_token(next, text->vocabulary, &random);
    print_byte(text->bytes[token]);
    memmove(tokens, tokens + 1, context);
    tokens[context - 1] = (unsigned char)token;
  }
  printf("\n----\n");
}

const train_kind_t text_kind = {.name = "text",
                                .samples = "tokens",
                                .create = create,
                                .destroy = destroy,
                                .gradient = gradient,
                                .validate = validate,
                                .checksum = checksum,
                                .show = show};
