/* Runs the exchanges whose digests are recorded. The cases are all combinations of the lists
 * below. */
#include "tests/golden_cases.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/hash.h"
#include "base/memory.h"
#include "compression/blocks.h"
#include "tests/codec_cases.h"

/* COUNT is four whole blocks and a fifth block that ends within a word. */
enum { RANKS = 2, STEPS = 3, COUNT = 4 * 256 + 101, BLOCK = 256 };

static const struct {
  unsigned width;
  onebit_scale_t rule;
  const char *name;
} rules[] = {{1, ONEBIT_SCALE_RMS, "1 bit, rms"},  {1, ONEBIT_SCALE_MEAN_ABSOLUTE, "1 bit, mean"},
             {2, ONEBIT_SCALE_RMS, "2 bits, rms"}, {2, ONEBIT_SCALE_LARGEST, "2 bits, largest"},
             {4, ONEBIT_SCALE_RMS, "4 bits, rms"}, {4, ONEBIT_SCALE_LARGEST, "4 bits, largest"},
             {8, ONEBIT_SCALE_RMS, "8 bits, rms"}, {8, ONEBIT_SCALE_LARGEST, "8 bits, largest"}};
static const char *const dtypes[] = {"float32", "bfloat16", "float16"};
enum { RULES = sizeof rules / sizeof rules[0], DTYPES = 3, SERVER = RANKS };

struct exchange {
  struct ob_layout layout;
  struct ob_work work;
  struct ob_message_shape shape;
  struct ob_residual residuals[RANKS + 1];
  unsigned char *messages[RANKS + 1];
  void *input, *output;
};

static bool exchange_create(struct exchange *exchange, size_t index, const struct ob_codec *codec) {
  const size_t count = COUNT;
  const onebit_dtype_t dtype = (onebit_dtype_t)(index / RULES);
  bool made = ob_layout_create(&exchange->layout, BLOCK, 1, &count, NULL) == ONEBIT_OK;
  exchange->shape = (struct ob_message_shape){.blocks = exchange->layout.blocks,
                                              .words = exchange->layout.words,
                                              .width = rules[index % RULES].width};
  exchange->work = (struct ob_work){.codec = codec,
                                    .layout = &exchange->layout,
                                    .rule = rules[index % RULES].rule,
                                    .dtype = dtype,
                                    .output_dtype = dtype,
                                    .max_width = exchange->shape.width,
                                    .threads = 1};
  made = made && ob_work_create(&exchange->work, RANKS, RANKS) == ONEBIT_OK;
  for (int k = 0; made && k <= SERVER; k++) {
    made =
        ob_residual_create(&exchange->residuals[k], &exchange->layout, 0, exchange->layout.blocks,
                           false, false, 2, &ob_memory_host) == ONEBIT_OK;
    exchange->messages[k] = calloc(1, ob_message_bytes(&exchange->shape));
    made = made && exchange->messages[k];
  }
  exchange->input = calloc(COUNT, ob_dtype_size(dtype));
  exchange->output = calloc(COUNT, ob_dtype_size(dtype));
  return made && exchange->input && exchange->output;
}

static void exchange_destroy(struct exchange *exchange) {
  for (int k = 0; k <= SERVER; k++) {
    ob_residual_destroy(&exchange->residuals[k]);
    free(exchange->messages[k]);
  }
  free(exchange->input);
  free(exchange->output);
  ob_work_destroy(&exchange->work);
  ob_layout_destroy(&exchange->layout);
}

/* Seals the message of rank k, or of the server if k is SERVER. Adds the message to the digest, and
 * makes the new residual the current one. */
static void seal_message(struct exchange *exchange, int k, int step, struct golden *golden) {
  const struct ob_message_call call = {k == SERVER ? OB_MESSAGE_SERVER : OB_MESSAGE_WORKER,
                                       (uint32_t)step, COUNT, 0};
  const unsigned flags = ob_payload_flags(false, false, exchange->shape.width);
  struct ob_view view = ob_message_view(exchange->messages[k], &exchange->shape);
  *view.header = ob_header_make(&exchange->shape, &call, (uint16_t)flags, 0);
  ob_message_seal(exchange->messages[k], &exchange->shape, exchange->work.codec);
  golden->messages =
      ob_hash(golden->messages, exchange->messages[k], ob_message_bytes(&exchange->shape));
  ob_residual_commit(&exchange->residuals[k]);
}

/* Returns an input. Some inputs are so large that a scale of 3 RMS clips them. */
static float input_at(size_t i, uint32_t salt) {
  const float value = value_at(i, salt, VALUES_GRADIENTS), square = value * value;
  return square * square * value;
}

static void exchange_step(struct exchange *exchange, int step, struct golden *golden) {
  const onebit_dtype_t dtype = exchange->work.dtype;
  const void *inputs[1] = {exchange->input};
  void *const outputs[1] = {exchange->output};
  const struct ob_source source = {.inputs = inputs, .factor = 1, .weight = 1};
  struct ob_view views[RANKS + 1];
  for (int k = 0; k <= SERVER; k++)
    views[k] = ob_message_view(exchange->messages[k], &exchange->shape);
  for (int rank = 0; rank < RANKS; rank++) {
    for (size_t i = 0; i < COUNT; i++)
      ob_store(exchange->input, i, dtype, input_at(i, (uint32_t)(step * RANKS + rank)));
    ob_compress_blocks(&exchange->work, &source, &exchange->residuals[rank], &exchange->shape, NULL,
                       &views[rank], NULL);
    seal_message(exchange, rank, step, golden);
  }
  ob_reduce_blocks(&exchange->work, views, &exchange->residuals[SERVER], &exchange->shape,
                   &views[SERVER], NULL);
  seal_message(exchange, SERVER, step, golden);
  ob_store_blocks(&exchange->work, &views[SERVER], &exchange->shape, outputs);
  golden->results = ob_hash(golden->results, exchange->output, COUNT * ob_dtype_size(dtype));
}

static uint64_t hash_residual(uint64_t start, const struct ob_residual *residual) {
  const float *values = residual->values[residual->now], *scales = residual->scales[residual->now];
  const uint64_t hash = ob_hash(start, values, residual->words * OB_LANES * sizeof *values);
  return ob_hash(hash, scales, residual->blocks * sizeof *scales);
}

size_t golden_count(void) { return RULES * DTYPES; }

struct golden golden_run(size_t index, const struct ob_codec *codec) {
  static char name[64];
  struct golden golden = {NULL, OB_HASH_START, OB_HASH_START, OB_HASH_START};
  struct exchange exchange = {.input = NULL};
  if (exchange_create(&exchange, index, codec)) {
    snprintf(name, sizeof name, "%s, %s", rules[index % RULES].name, dtypes[index / RULES]);
    golden.name = name;
    for (int step = 0; step < STEPS; step++)
      exchange_step(&exchange, step, &golden);
    for (int k = 0; k <= SERVER; k++)
      golden.residuals = hash_residual(golden.residuals, &exchange.residuals[k]);
  }
  exchange_destroy(&exchange);
  return golden;
}
