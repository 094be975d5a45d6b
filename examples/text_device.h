/*
 * Where train_text computes: the processor, or a CUDA device a rank, behind the same few calls.
 */
#ifndef EXAMPLES_TEXT_DEVICE_H
#define EXAMPLES_TEXT_DEVICE_H

#include "examples/text_options.h"
#include "examples/train_team.h"
#include "examples/transformer.h"

typedef struct text_device text_device_t;

typedef struct text_model {
  const text_device_t *device;
  transformer_t *host; /* the model, or what the device's was made from and is fetched to */
  struct transformer_cuda *cuda;       /* NULL on the processor */
  const transformer_tensor_t *tensors; /* host->ntensors, in the device's memory */
  void *stream;                        /* of the device's work; NULL on the processor */
} text_model_t;

struct text_device {
  onebit_device_t memory;
  /* Before anything else: this rank's device, and team->gradients. 0, or -1 after saying why. */
  int (*open)(team_t *team, const text_options_t *options);
  void (*close)(team_t *team);
  /* The device's model and `tensors`, once host->tensors have values. NULL, or words that say what
   * went wrong. */
  const char *(*create)(text_model_t *model, const text_options_t *options);
  void (*destroy)(text_model_t *model);
  /* Both return the loss; the first also leaves the gradients. */
  double (*gradient)(text_model_t *model, const unsigned char *tokens, size_t sequences);
  double (*loss)(text_model_t *model, const unsigned char *tokens, size_t sequences);
  /* Of one sequence: host->next. */
  void (*predict)(text_model_t *model, const unsigned char *tokens);
  onebit_status_t (*step)(text_model_t *model, onebit_optimizer_t optimizer, float learning_rate);
  /* host->tensors become the model's. */
  void (*fetch)(text_model_t *model);
};

/* What --device names; NULL when this program was built without it. */
const text_device_t *text_device(const text_options_t *options);

/* The first values are the seed's, on every device. 0, or -1 after saying why. */
int text_model_create(text_model_t *model, const text_device_t *device, const team_t *team,
                      const text_options_t *options, size_t vocabulary);
void text_model_destroy(text_model_t *model);

#ifdef ONEBIT_HAVE_CUDA
extern const text_device_t text_device_cuda;
#endif

#endif
