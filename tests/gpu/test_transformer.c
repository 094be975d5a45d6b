/*
 * The model of examples/train_text on a device against the one on the processor: predictions, loss
 * and every gradient; and that the same input gives the same bits.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "examples/random.h"
#include "examples/transformer.h"
#include "examples/transformer_cuda.h"
#include "tests/gpu/harness.h"

#ifdef ONEBIT_EMULATED_CUDA
#include <emulation.h>
#endif

/* Sizes that no tile and no warp divides; fewer rows than the slices of a gain's gradient, and
 * more; a row shorter than a warp, and longer. */
static const transformer_shape_t shapes[] = {
    {.vocabulary = 11, .context = 7, .width = 20, .heads = 2, .layers = 2, .sequences = 3},
    {.vocabulary = 70, .context = 37, .width = 45, .heads = 3, .layers = 1, .sequences = 2},
};

/* A pair of models with the same values, and a batch for both. */
struct pair {
  transformer_t *host, *fetched; /* the second has the device's gradients */
  transformer_cuda_t *device;
  unsigned char *tokens;
};

static struct pair create(const transformer_shape_t *shape, transformer_products_t products) {
  const size_t tokens = shape->sequences * (shape->context + 1);
  uint64_t random = random_stream(3, 1, 0);
  const char *words = NULL;
  struct pair pair = {.host = transformer_create(shape), .fetched = transformer_create(shape)};
  pair.tokens = gpu_allocate(tokens, 1);
  for (size_t i = 0; i < tokens; i++)
    pair.tokens[i] = (unsigned char)(random_bits(&random) % shape->vocabulary);
  if (CHECK(pair.host && pair.fetched, "no memory for models")) {
    transformer_initialise(pair.host, 3);
    pair.device = transformer_cuda_create(pair.host, shape->sequences, products, &words);
  }
  CHECK(pair.device, "%s", words);
  return pair;
}

static void destroy(struct pair *pair) {
  transformer_cuda_destroy(pair->device);
  transformer_destroy(pair->fetched);
  transformer_destroy(pair->host);
  free(pair->tokens);
}

/* |a - b| / |b|, Euclidean. */
static double distance(const float *a, const float *b, size_t count) {
  double difference = 0.0, size = 0.0;
  for (size_t i = 0; i < count; i++) {
    difference += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
    size += (double)b[i] * (double)b[i];
  }
  return sqrt(difference / size);
}

static void compare(struct pair *pair, size_t sequences, double tolerance) {
  const transformer_t *host = pair->host, *fetched = pair->fetched;
  const size_t predictions = sequences * host->shape.context * host->shape.vocabulary;
  transformer_forward(pair->host, pair->tokens, sequences);
  transformer_cuda_forward(pair->device, pair->tokens, sequences);
  transformer_cuda_next(pair->device, sequences, fetched->next);
  const double next = distance(fetched->next, host->next, predictions);
  CHECK(next <= tolerance, "predictions are off by %.2e", next);
  const double wanted = transformer_loss(host, pair->tokens, sequences);
  const double loss = transformer_cuda_loss(pair->device, sequences);
  CHECK(fabs(loss / wanted - 1.0) <= tolerance, "a loss of %.7f, not %.7f", loss, wanted);
  transformer_backward(pair->host, pair->tokens, sequences);
  transformer_cuda_backward(pair->device, sequences);
  transformer_cuda_store(pair->device, fetched);
  for (size_t t = 0; t < host->ntensors; t++) {
    const transformer_tensor_t *a = &fetched->tensors[t], *b = &host->tensors[t];
    const double gradient = distance(a->gradient, b->gradient, b->count);
    CHECK(gradient <= tolerance, "the gradient of tensor %zu is off by %.2e", t, gradient);
    CHECK(!memcmp(a->value, b->value, b->count * sizeof(float)), "tensor %zu has changed", t);
  }
  CHECK(!transformer_cuda_error(pair->device), "%s", transformer_cuda_error(pair->device));
}

/* All sequences, and then fewer than there is room for. */
static void compare_shape(const transformer_shape_t *shape, transformer_products_t products,
                          double tolerance) {
  struct pair pair = create(shape, products);
  for (size_t sequences = shape->sequences; pair.device && sequences > 0; sequences--) {
    check_case("width %zu, %zu sequences", shape->width, sequences);
    compare(&pair, sequences, tolerance);
  }
  destroy(&pair);
}

static void float32_products_agree(void) {
  for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
    compare_shape(&shapes[s], PRODUCTS_FLOAT32, 1e-4);
}

/* A number rounded to bfloat16 is off by at most 2^-8. On the way from a token to a gradient there
 * are eleven roundings a block (two normalisations, four matrices, the results of the first and
 * third product, attention weights, what they make, GELU), as many on the way back, and two at the
 * head each way: independent errors, whose squares add up. */
static void bfloat16_products_agree(void) {
  for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
    const double roundings = 2.0 * (11.0 * (double)shapes[s].layers + 2.0);
    compare_shape(&shapes[s], PRODUCTS_BFLOAT16, sqrt(roundings) / 256.0);
  }
}

static void run(struct pair *pair) {
  transformer_cuda_forward(pair->device, pair->tokens, pair->host->shape.sequences);
  transformer_cuda_backward(pair->device, pair->host->shape.sequences);
}

static void the_same_bits_every_time(void) {
  struct pair a = create(&shapes[1], PRODUCTS_BFLOAT16);
  if (a.device) {
    run(&a);
    transformer_cuda_store(a.device, a.host);
    run(&a);
    transformer_cuda_store(a.device, a.fetched);
  }
  for (size_t t = 0; t < a.host->ntensors; t++) {
    const transformer_tensor_t *first = &a.host->tensors[t], *again = &a.fetched->tensors[t];
    CHECK(!memcmp(first->gradient, again->gradient, first->count * sizeof(float)),
          "the gradient of tensor %zu has other bits", t);
  }
  destroy(&a);
}

/* A copy of each gradient, put on the stream when it is told of, is what the pass leaves. */
struct told {
  transformer_cuda_t *device;
  float *copies;
  size_t order[64], count;
};

static void note_told(void *context, size_t tensor) {
  struct told *told = context;
  const transformer_tensor_t *from = &transformer_cuda_tensors(told->device)[tensor];
  size_t first = 0;
  for (size_t t = 0; t < tensor; t++)
    first += transformer_cuda_tensors(told->device)[t].count;
  CHECK_CUDA(cudaMemcpyAsync(told->copies + first, from->gradient, from->count * sizeof(float),
                             cudaMemcpyDeviceToDevice, transformer_cuda_stream(told->device)));
  if (told->count < 64)
    told->order[told->count++] = tensor;
}

static void tells_of_final_gradients(void) {
  struct pair pair = create(&shapes[1], PRODUCTS_BFLOAT16);
  struct told told = {.device = pair.device};
  const transformer_t *host = pair.host;
  float *copies = gpu_allocate(host->parameters, sizeof *copies);
  size_t first = 0;
  CHECK_CUDA(cudaMalloc((void **)&told.copies, host->parameters * sizeof *copies));
  transformer_cuda_tell(pair.device, note_told, &told);
  run(&pair);
  transformer_cuda_store(pair.device, pair.fetched);
  CHECK_CUDA(
      cudaMemcpy(copies, told.copies, host->parameters * sizeof *copies, cudaMemcpyDeviceToHost));
  CHECK(told.count == host->ntensors && told.order[0] == host->ntensors - 1,
        "%zu of %zu tensors are told of", told.count, host->ntensors);
  for (size_t t = 0; t < host->ntensors; first += host->tensors[t++].count)
    CHECK(!memcmp(copies + first, pair.fetched->tensors[t].gradient,
                  host->tensors[t].count * sizeof(float)),
          "tensor %zu was told of too early", t);
  CHECK_CUDA(cudaFree(told.copies));
  free(copies);
  destroy(&pair);
}

/* Each allocation fails in its turn, until none is left that could. */
static void no_memory_gives_words(void) {
#ifdef ONEBIT_EMULATED_CUDA
  transformer_t *host = transformer_create(&shapes[0]);
  transformer_cuda_t *device = NULL;
  const char *words = NULL;
  for (long n = 1; !device; n++) {
    emulation_fail_allocation(n);
    device = transformer_cuda_create(host, shapes[0].sequences, PRODUCTS_BFLOAT16, &words);
    emulation_fail_allocation(0);
    if (!CHECK(n < 1000 && (device ? !words : words && strstr(words, "memory")),
               "allocation %ld fails: %s", n, words))
      break;
  }
  transformer_cuda_destroy(device);
  transformer_destroy(host);
#else
  SKIP("no allocation of a real device fails when it is told to");
#endif
}

/* A device that fails says so, and does not stop. */
static void a_failed_launch_is_kept(void) {
#ifdef ONEBIT_EMULATED_CUDA
  struct pair pair = create(&shapes[0], PRODUCTS_BFLOAT16);
  emulation_fail_launch(5);
  run(&pair);
  transformer_cuda_loss(pair.device, shapes[0].sequences);
  CHECK(transformer_cuda_error(pair.device), "a launch has failed, and the model says nothing");
  destroy(&pair);
#else
  SKIP("no launch on a real device fails when it is told to");
#endif
}

static const struct gpu_test tests[] = {
    {"float32 products agree", float32_products_agree, false},
    {"bfloat16 products agree", bfloat16_products_agree, false},
    {"tells of final gradients", tells_of_final_gradients, false},
    {"the same bits every time", the_same_bits_every_time, false},
    {"no memory gives words", no_memory_gives_words, false},
    {"a failed launch is kept", a_failed_launch_is_kept, false},
};
GPU_SUITE("transformer", tests)
