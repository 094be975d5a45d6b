/*
 * The transformer of transformer.h on a CUDA device: the same model, the same calls, and gradients
 * that agree to the rounding of the products. The products are cuBLAS's, of numbers rounded to
 * bfloat16 with sums in float; parameters, gradients and what passes from block to block are float.
 * The same input gives the same bits every time: no sum depends on which thread comes first.
 *
 * A model belongs to the device that was current when it was made, which is current in each call,
 * and works on a stream of its own: forward and backward return before the device is done.
 */
#ifndef EXAMPLES_TRANSFORMER_CUDA_H
#define EXAMPLES_TRANSFORMER_CUDA_H

#include <cuda_runtime_api.h>

#include "examples/transformer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct transformer_cuda transformer_cuda_t;

/* What the products multiply. FLOAT32 is for comparing with the processor. */
typedef enum transformer_products { PRODUCTS_BFLOAT16, PRODUCTS_FLOAT32 } transformer_products_t;

/* The model with the shape and the values of one on the processor, but for up to so many sequences.
 * Returns it, or NULL after pointing *words to why. */
transformer_cuda_t *transformer_cuda_create(const transformer_t *host, size_t sequences,
                                            transformer_products_t products, const char **words);
void transformer_cuda_destroy(transformer_cuda_t *model);

/* As many tensors as the host's, in the same order, in memory of the device. */
const transformer_tensor_t *transformer_cuda_tensors(const transformer_cuda_t *model);
cudaStream_t transformer_cuda_stream(const transformer_cuda_t *model);

/* Values and gradients become the host's. Waits, as all do that bring something to the host. */
void transformer_cuda_store(transformer_cuda_t *model, const transformer_t *host);

/* As their namesakes; a forward pass copies the tokens, which are the host's, for the others to
 * use. The loss may be asked for before the backward pass or after it. */
void transformer_cuda_forward(transformer_cuda_t *model, const unsigned char *tokens,
                              size_t sequences);
void transformer_cuda_backward(transformer_cuda_t *model, size_t sequences);
/* As the host's `ready`, while a backward pass is put on the stream: the tensor's gradient is final
 * when what is there by then is done. NULL: nobody is told. */
void transformer_cuda_tell(transformer_cuda_t *model, void (*ready)(void *context, size_t tensor),
                           void *context);
double transformer_cuda_loss(transformer_cuda_t *model, size_t sequences);

/* transformer_t's `next` of the latest forward pass, which was of so many sequences. */
void transformer_cuda_next(transformer_cuda_t *model, size_t sequences, float *next);

/* What went wrong first, here or earlier on the device; NULL: nothing, up to the latest call that
 * waited. From then on the model's results mean nothing. */
const char *transformer_cuda_error(const transformer_cuda_t *model);

#ifdef __cplusplus
}
#endif
#endif
