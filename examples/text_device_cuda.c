/*
 * A CUDA device for each rank of train_text, as a device of text_device.h: the model of
 * transformer_cuda.h, and steps of the optimizer on the model's stream.
 */
#include "examples/text_device.h"
#include "examples/train_nccl.h"
#include "examples/transformer_cuda.h"
#include "onebit/cuda.h"

/* --- Devices -----------------------------------------------------------------------------------*/

/* The ranks of a host take its devices in turn; more ranks than devices share them. */
static cudaError_t take_device(const team_t *team, struct cudaDeviceProp *device) {
  int count = 0;
  cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess)
    status = cudaSetDevice((int)team->local_rank % count);
  if (status == cudaSuccess)
    status = cudaGetDeviceProperties(device, (int)team->local_rank % count);
  return status;
}

static int open_device(team_t *team, const text_options_t *options) {
  struct cudaDeviceProp device;
  char words[OPTION_WORDS];
  const cudaError_t status = take_device(team, &device);
  snprintf(words, sizeof words, "--device cuda: %s", cudaGetErrorString(status));
  if (agree(team, status == cudaSuccess, words) != 0)
    return -1;
  say(team, "CUDA: %s, %s products, gradients %s\n", device.name,
      options->products == PRODUCTS_BFLOAT16 ? "bfloat16" : "float32",
      options->transport == OVER_NCCL ? "over NCCL" : "staged by the host");
  team->gradients = team->comm;
#ifdef ONEBIT_HAVE_NCCL
  return options->transport == OVER_NCCL ? train_nccl_open(team) : 0;
#else
  return agree(team, options->transport != OVER_NCCL,
               "--transport nccl: this program was built without NCCL");
#endif
}

static void close_device(team_t *team) {
#ifdef ONEBIT_HAVE_NCCL
  train_nccl_close(team);
#endif
  team->gradients = NULL;
}

/* --- Models ------------------------------------------------------------------------------------*/

static const char *create(text_model_t *model, const text_options_t *options) {
  const char *words;
  model->cuda = transformer_cuda_create(model->host, options->train.batch,
                                        (transformer_products_t)options->products, &words);
  if (model->cuda) {
    model->tensors = transformer_cuda_tensors(model->cuda);
    model->stream = transformer_cuda_stream(model->cuda);
  }
  return words;
}

static void destroy(text_model_t *model) { transformer_cuda_destroy(model->cuda); }

/* A device that fails leaves a rank without gradients, while the others wait for them. */
static void look(const text_model_t *model) {
  const char *words = transformer_cuda_error(model->cuda);
  if (words)
    give_up("CUDA", words);
}

static double loss(text_model_t *model, const unsigned char *tokens, size_t sequences) {
  transformer_cuda_forward(model->cuda, tokens, sequences);
  const double found = transformer_cuda_loss(model->cuda, sequences);
  look(model);
  return found;
}

/* The loss is asked for last, because that waits. */
static double gradient(text_model_t *model, const unsigned char *tokens, size_t sequences) {
  transformer_cuda_forward(model->cuda, tokens, sequences);
  transformer_cuda_tell(model->cuda, model->host->ready, model->host->ready_context);
  transformer_cuda_backward(model->cuda, sequences);
  const double found = transformer_cuda_loss(model->cuda, sequences);
  look(model);
  return found;
}

static void predict(text_model_t *model, const unsigned char *tokens) {
  transformer_cuda_forward(model->cuda, tokens, 1);
  transformer_cuda_next(model->cuda, 1, model->host->next);
  look(model);
}

static void fetch(text_model_t *model) {
  transformer_cuda_store(model->cuda, model->host);
  look(model);
}

/* Waits, for the sake of the times that are reported; a program that only trains need not. */
static onebit_status_t step(text_model_t *model, onebit_optimizer_t optimizer,
                            float learning_rate) {
  const onebit_status_t status =
      onebit_optimizer_step_stream(optimizer, learning_rate, transformer_cuda_stream(model->cuda));
  return status == ONEBIT_OK ? onebit_optimizer_synchronize(optimizer) : status;
}

const text_device_t text_device_cuda = {.memory = ONEBIT_DEVICE_CUDA,
                                        .open = open_device,
                                        .close = close_device,
                                        .create = create,
                                        .destroy = destroy,
                                        .gradient = gradient,
                                        .loss = loss,
                                        .predict = predict,
                                        .step = step,
                                        .fetch = fetch};
