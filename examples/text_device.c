/* The processor as a device of text_device.h, and what all devices share. */
#include "examples/text_device.h"

static int open_processor(team_t *team, const text_options_t *options) {
  (void)options;
  team->gradients = team->comm;
  return 0;
}

static void close_processor(team_t *team) { team->gradients = NULL; }

static const char *create(text_model_t *model, const text_options_t *options) {
  (void)options;
  model->tensors = model->host->tensors;
  return NULL;
}

static void nothing(text_model_t *model) { (void)model; }

static double loss(text_model_t *model, const unsigned char *tokens, size_t sequences) {
  transformer_forward(model->host, tokens, sequences);
  return transformer_loss(model->host, tokens, sequences);
}

static double gradient(text_model_t *model, const unsigned char *tokens, size_t sequences) {
  const double found = loss(model, tokens, sequences);
  transformer_backward(model->host, tokens, sequences);
  return found;
}

static void predict(text_model_t *model, const unsigned char *tokens) {
  transformer_forward(model->host, tokens, 1);
}

static onebit_status_t step(text_model_t *model, onebit_optimizer_t optimizer,
                            float learning_rate) {
  (void)model;
  return onebit_optimizer_step(optimizer, learning_rate);
}

static const text_device_t processor = {.memory = ONEBIT_DEVICE_HOST,
                                        .open = open_processor,
                                        .close = close_processor,
                                        .create = create,
                                        .destroy = nothing,
                                        .gradient = gradient,
                                        .loss = loss,
                                        .predict = predict,
                                        .step = step,
                                        .fetch = nothing};

const text_device_t *text_device(const text_options_t *options) {
  if (options->device == ON_HOST)
    return &processor;
#ifdef ONEBIT_HAVE_CUDA
  return &text_device_cuda;
#else
  return NULL;
#endif
}

/* --- Models ------------------------------------------------------------------------------------*/

int text_model_create(text_model_t *model, const text_device_t *device, const team_t *team,
                      const text_options_t *options, size_t vocabulary) {
  const transformer_shape_t shape = {.vocabulary = vocabulary,
                                     .context = options->context,
                                     .width = options->width,
                                     .heads = options->heads,
                                     .layers = options->layers,
                                     /* beside a device's it predicts one at a time */
                                     .sequences = device == &processor ? options->train.batch : 1};
  *model = (text_model_t){.device = device, .host = transformer_create(&shape)};
  if (agree(team, model->host != NULL,
            "out of memory for the model; a smaller --batch, --context or --width needs less") != 0)
    return -1;
  transformer_initialise(model->host, options->train.seed);
  char line[OPTION_WORDS];
  const char *words = device->create(model, options);
  snprintf(line, sizeof line, "the model does not come about: %s", words ? words : "");
  return agree(team, !words, line);
}

void text_model_destroy(text_model_t *model) {
  if (model->device)
    model->device->destroy(model);
  transformer_destroy(model->host);
}
