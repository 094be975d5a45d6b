/*
 * Where train_text computes: the processor, or a CUDA device a rank, behind the same few calls.
 */
#ifndef EXAMPLES_TRAIN_DEVICE_H
#define EXAMPLES_TRAIN_DEVICE_H

#include "examples/train_options.h"
#include "examples/train_team.h"
#include "examples/transformer.h"

typedef struct train_device train_device_t;

typedef struct train_model {
  const train_device_t *device;
  transformer_t *host; /* the model, or what the device's was made from and is fetched to */
  struct transformer_cuda *cuda;       /* NULL on the processor */
  const transformer_tensor_t *tensors; /* host->ntensors, in the device's memory */
} train_model_t;

struct train_device {
  onebit_device_t memory;
  /* Before anything else: this rank's device, and team->gradients. 0, or -1 after saying why. */
  int (*open)(team_t *team, const train_options_t *options);
  void (*close)(team_t *team);
  /* The device's model and `tensors`, once host->tensors have values. NULL, or words that say what
   * went wrong. */
  const char *(*create)(train_model_t *model, const train_options_t *options);
  void (*destroy)(train_model_t *model);
  /* Both return the loss; the first also leaves the gradients. */
  double (*gradient)(train_model_t *model, const unsigned char *tokens, size_t sequences);
  double (*loss)(train_model_t *model, const unsigned char *tokens, size_t sequences);
  /* Of one sequence: host->next. */
  void (*predict)(train_model_t *model, const unsigned char *tokens);
  onebit_status_t (*step)(train_model_t *model, onebit_optimizer_t optimizer, float learning_rate);
  /* host->tensors become the model's. */
  void (*fetch)(train_model_t *model);
};

/* What --device names; NULL when this program was built without it. */
const train_device_t *train_device(const train_options_t *options);

/* The first values are the seed's, on every device. 0, or -1 after saying why. */
int train_model_create(train_model_t *model, const train_device_t *device, const team_t *team,
                       const train_options_t *options, size_t vocabulary);
void train_model_destroy(train_model_t *model);

#ifdef ONEBIT_HAVE_CUDA
extern const train_device_t train_device_cuda;
#endif

#endif
