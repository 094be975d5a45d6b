/*
 * The transformer of transformer.h. Arrays are row-major; a row is one position of one sequence.
 * The arithmetic is in transformer_math.h; here are attention, the blocks and the whole, each
 * forward and backward.
 */
#include "examples/transformer.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "examples/random.h"
#include "examples/transformer_math.h"

typedef const transformer_tensor_t *tensor_t;

/* A block's six tensors, and the values that its forward pass keeps for its backward pass. */
struct transformer_layer {
  tensor_t attention_gain, query_key_value, attention_output, mlp_gain, mlp_input, mlp_output;
  float *input;                  /* [row][width] */
  float *normed, *inverse_rms;   /* [row][width], [row] */
  float *heads;                  /* [row][query, key, value][width] */
  float *attention;              /* [sequence][head][position][position], rows sum to 1 */
  float *attended;               /* [row][width] */
  float *middle;                 /* [row][width]: input plus attention */
  float *normed2, *inverse_rms2; /* [row][width], [row] */
  float *hidden, *activated;     /* [row][4 width], before and after GELU */
};

/* y = x w, or y += x w, and its backward: dw = x' dy, dx = dy w'. */
static void linear(float *y, const float *x, tensor_t w, size_t rows, size_t in, size_t out,
                   product_mode_t mode) {
  multiply(y, out, stored(x, in), stored(w->value, out), rows, in, out, mode);
}

static void linear_backward(float *dx, const float *dy, const float *x, tensor_t w, size_t rows,
                            size_t in, size_t out) {
  multiply(w->gradient, out, transposed(x, in), stored(dy, out), in, rows, out, REPLACE);
  multiply(dx, in, stored(dy, out), transposed(w->value, out), rows, out, in, REPLACE);
}

/* The tensor's gradient will not change any more in this backward pass. */
static void report_ready(const transformer_t *model, tensor_t tensor) {
  if (model->ready)
    model->ready(model->ready_context, (size_t)(tensor - model->tensors));
}

/* --- Attention ---------------------------------------------------------------------------------*/

/* The positions of one head of one sequence. */
typedef struct head {
  size_t position; /* of the first element in a [row][width] array */
  size_t query;    /* the same in the [row][3 width] array of queries, keys and values */
  size_t scores;   /* the same in [sequence][head][position][position] */
  float scale;     /* 1 / sqrt(columns of a head) */
} head_t;

static head_t locate(const transformer_shape_t *shape, size_t sequence, size_t head) {
  const size_t columns = shape->width / shape->heads, row = sequence * shape->context;
  return (head_t){row * shape->width + head * columns, row * 3 * shape->width + head * columns,
                  (sequence * shape->heads + head) * shape->context * shape->context,
                  1.0f / sqrtf((float)columns)};
}

static void attend(const transformer_shape_t *shape, struct transformer_layer *layer, head_t at) {
  const size_t context = shape->context, width = shape->width, columns = width / shape->heads;
  const float *query = layer->heads + at.query, *key = query + width, *value = key + width;
  float *weights = layer->attention + at.scores;
  multiply(weights, context, stored(query, 3 * width), transposed(key, 3 * width), context, columns,
           context, REPLACE);
  softmax(weights, context, context, at.scale, 1);
  multiply(layer->attended + at.position, width, stored(weights, context), stored(value, 3 * width),
           context, context, columns, REPLACE);
}

static void attend_backward(const transformer_t *model, struct transformer_layer *layer, head_t at,
                            const float *d_attended, float *d_heads) {
  const size_t context = model->shape.context, width = model->shape.width;
  const size_t columns = width / model->shape.heads;
  const float *query = layer->heads + at.query, *key = query + width, *value = key + width;
  const float *weights = layer->attention + at.scores;
  const matrix_t d_out = stored(d_attended + at.position, width);
  float *d_query = d_heads + at.query, *d_key = d_query + width, *d_value = d_key + width;
  float *d_scores = model->d_scores;
  multiply(d_value, 3 * width, transposed(weights, context), d_out, context, context, columns,
           REPLACE);
  multiply(d_scores, context, d_out, transposed(value, 3 * width), context, columns, context,
           REPLACE);
  softmax_backward(d_scores, weights, context, context, at.scale);
  multiply(d_query, 3 * width, stored(d_scores, context), stored(key, 3 * width), context, context,
           columns, REPLACE);
  multiply(d_key, 3 * width, transposed(d_scores, context), stored(query, 3 * width), context,
           context, columns, REPLACE);
}

/* --- Blocks ------------------------------------------------------------------------------------*/

/* middle = input + attention(normalised input), output = middle + network(normalised middle) */
static void block_forward(const transformer_t *model, struct transformer_layer *layer,
                          float *output, size_t sequences) {
  const transformer_shape_t *shape = &model->shape;
  const size_t rows = sequences * shape->context, width = shape->width;
  normalise(layer->normed, layer->inverse_rms, layer->input, layer->attention_gain->value, rows,
            width);
  linear(layer->heads, layer->normed, layer->query_key_value, rows, width, 3 * width, REPLACE);
  for (size_t i = 0; i < sequences * shape->heads; i++)
    attend(shape, layer, locate(shape, i / shape->heads, i % shape->heads));
  memcpy(layer->middle, layer->input, rows * width * sizeof(float));
  linear(layer->middle, layer->attended, layer->attention_output, rows, width, width, ADD);

  normalise(layer->normed2, layer->inverse_rms2, layer->middle, layer->mlp_gain->value, rows,
            width);
  linear(layer->hidden, layer->normed2, layer->mlp_input, rows, width, 4 * width, REPLACE);
  gelu(layer->activated, layer->hidden, rows * 4 * width);
  memcpy(output, layer->middle, rows * width * sizeof(float));
  linear(output, layer->activated, layer->mlp_output, rows, 4 * width, width, ADD);
}

/* model->d_stream: on entry the gradient of the block's output, on return that of its input. */
static void block_backward(const transformer_t *model, struct transformer_layer *layer,
                           size_t sequences) {
  const transformer_shape_t *shape = &model->shape;
  const size_t rows = sequences * shape->context, width = shape->width;
  float *d_stream = model->d_stream, *d_normed = model->d_normed, *d_wide = model->d_wide;
  linear_backward(d_wide, d_stream, layer->activated, layer->mlp_output, rows, 4 * width, width);
  report_ready(model, layer->mlp_output);
  gelu_backward(d_wide, layer->hidden, rows * 4 * width);
  linear_backward(d_normed, d_wide, layer->normed2, layer->mlp_input, rows, width, 4 * width);
  report_ready(model, layer->mlp_input);
  normalise_backward(d_stream, layer->mlp_gain->gradient, d_normed, layer->middle,
                     layer->inverse_rms2, layer->mlp_gain->value, rows, width);
  report_ready(model, layer->mlp_gain);

  linear_backward(d_normed, d_stream, layer->attended, layer->attention_output, rows, width, width);
  report_ready(model, layer->attention_output);
  for (size_t i = 0; i < sequences * shape->heads; i++)
    attend_backward(model, layer, locate(shape, i / shape->heads, i % shape->heads), d_normed,
                    d_wide);
  linear_backward(d_normed, d_wide, layer->normed, layer->query_key_value, rows, width, 3 * width);
  report_ready(model, layer->query_key_value);
  normalise_backward(d_stream, layer->attention_gain->gradient, d_normed, layer->input,
                     layer->inverse_rms, layer->attention_gain->value, rows, width);
  report_ready(model, layer->attention_gain);
}

/* --- The whole ---------------------------------------------------------------------------------*/

/* Places in model->tensors; behind the layers' come the final gain and the head. */
enum { TOKEN_EMBEDDING, POSITION_EMBEDDING, FIRST_LAYER, LAYER_TENSORS = 6, OTHER_TENSORS = 4 };

static void embed(const transformer_t *model, const unsigned char *tokens, size_t sequences) {
  const size_t context = model->shape.context, width = model->shape.width;
  float *x = model->layers[0].input;
  for (size_t row = 0; row < sequences * context; row++, x += width) {
    const float *token =
        model->tensors[TOKEN_EMBEDDING].value + width * tokens[row + row / context];
    const float *position = model->tensors[POSITION_EMBEDDING].value + width * (row % context);
    for (size_t j = 0; j < width; j++)
      x[j] = token[j] + position[j];
  }
}

static void embed_backward(const transformer_t *model, const unsigned char *tokens,
                           size_t sequences) {
  const size_t context = model->shape.context, width = model->shape.width;
  const float *dx = model->d_stream;
  for (int t = TOKEN_EMBEDDING; t <= POSITION_EMBEDDING; t++)
    memset(model->tensors[t].gradient, 0, model->tensors[t].count * sizeof(float));
  for (size_t row = 0; row < sequences * context; row++, dx += width) {
    float *token = model->tensors[TOKEN_EMBEDDING].gradient + width * tokens[row + row / context];
    float *position = model->tensors[POSITION_EMBEDDING].gradient + width * (row % context);
    for (size_t j = 0; j < width; j++) {
      token[j] += dx[j];
      position[j] += dx[j];
    }
  }
  report_ready(model, &model->tensors[POSITION_EMBEDDING]);
  report_ready(model, &model->tensors[TOKEN_EMBEDDING]);
}

void transformer_forward(transformer_t *model, const unsigned char *tokens, size_t sequences) {
  const transformer_shape_t *shape = &model->shape;
  const size_t rows = sequences * shape->context;
  embed(model, tokens, sequences);
  for (size_t l = 0; l < shape->layers; l++)
    block_forward(model, &model->layers[l],
                  l + 1 < shape->layers ? model->layers[l + 1].input : model->stream, sequences);
  normalise(model->normed, model->inverse_rms, model->stream, model->final_gain->value, rows,
            shape->width);
  linear(model->next, model->normed, model->head, rows, shape->width, shape->vocabulary, REPLACE);
  softmax(model->next, rows, shape->vocabulary, 1.0f, 0);
}

/* Place in model->next of the probability of the token that did come next. */
static size_t target(const transformer_t *model, const unsigned char *tokens, size_t row) {
  return row * model->shape.vocabulary + tokens[row + row / model->shape.context + 1];
}

double transformer_loss(const transformer_t *model, const unsigned char *tokens, size_t sequences) {
  const size_t rows = sequences * model->shape.context;
  double sum = 0.0;
  for (size_t row = 0; row < rows; row++)
    sum -= log((double)model->next[target(model, tokens, row)] + (double)FLT_MIN);
  return sum / (double)rows;
}

void transformer_backward(transformer_t *model, const unsigned char *tokens, size_t sequences) {
  const transformer_shape_t *shape = &model->shape;
  const size_t rows = sequences * shape->context;
  float *d_logits = model->next;
  for (size_t row = 0; row < rows; row++)
    d_logits[target(model, tokens, row)] -= 1.0f;
  for (size_t i = 0; i < rows * shape->vocabulary; i++)
    d_logits[i] /= (float)rows;
  linear_backward(model->d_normed, d_logits, model->normed, model->head, rows, shape->width,
                  shape->vocabulary);
  report_ready(model, model->head);
  memset(model->d_stream, 0, rows * shape->width * sizeof(float));
  normalise_backward(model->d_stream, model->final_gain->gradient, model->d_normed, model->stream,
                     model->inverse_rms, model->final_gain->value, rows, shape->width);
  report_ready(model, model->final_gain);
  for (size_t l = shape->layers; l-- > 0;)
    block_backward(model, &model->layers[l], sequences);
  embed_backward(model, tokens, sequences);
}

/* --- Memory and first values -------------------------------------------------------------------*/

/* An array that the model owns, of zeros; NULL when there is no memory, or was none before. */
static void *allocate(transformer_t *model, size_t count, size_t size) {
  if (model->nallocations > 0 && !model->allocations[model->nallocations - 1])
    return NULL;
  return model->allocations[model->nallocations++] = calloc(count, size);
}

static float *floats(transformer_t *model, size_t count) {
  return allocate(model, count, sizeof(float));
}

static tensor_t tensor(transformer_t *model, size_t index, size_t count, int is_gain) {
  float *value = floats(model, count), *gradient = floats(model, count);
  model->tensors[index] = (transformer_tensor_t){value, gradient, count, is_gain};
  model->parameters += count;
  return &model->tensors[index];
}

static void create_layer(transformer_t *model, size_t l) {
  const transformer_shape_t *shape = &model->shape;
  const size_t width = shape->width, rows = shape->sequences * shape->context;
  const size_t first = FIRST_LAYER + LAYER_TENSORS * l;
  model->layers[l] = (struct transformer_layer){
      .attention_gain = tensor(model, first, width, 1),
      .query_key_value = tensor(model, first + 1, width * 3 * width, 0),
      .attention_output = tensor(model, first + 2, width * width, 0),
      .mlp_gain = tensor(model, first + 3, width, 1),
      .mlp_input = tensor(model, first + 4, width * 4 * width, 0),
      .mlp_output = tensor(model, first + 5, 4 * width * width, 0),
      .input = floats(model, rows * width),
      .normed = floats(model, rows * width),
      .inverse_rms = floats(model, rows),
      .heads = floats(model, rows * 3 * width),
      .attention = floats(model, rows * shape->heads * shape->context),
      .attended = floats(model, rows * width),
      .middle = floats(model, rows * width),
      .normed2 = floats(model, rows * width),
      .inverse_rms2 = floats(model, rows),
      .hidden = floats(model, rows * 4 * width),
      .activated = floats(model, rows * 4 * width),
  };
}

static void create_ends(transformer_t *model) {
  const transformer_shape_t *shape = &model->shape;
  const size_t width = shape->width, rows = shape->sequences * shape->context;
  tensor(model, TOKEN_EMBEDDING, shape->vocabulary * width, 0);
  tensor(model, POSITION_EMBEDDING, shape->context * width, 0);
  model->final_gain = tensor(model, model->ntensors - 2, width, 1);
  model->head = tensor(model, model->ntensors - 1, width * shape->vocabulary, 0);
  model->stream = floats(model, rows * width);
  model->normed = floats(model, rows * width);
  model->inverse_rms = floats(model, rows);
  model->d_stream = floats(model, rows * width);
  model->d_normed = floats(model, rows * width);
  model->d_wide = floats(model, rows * 4 * width);
  model->d_scores = floats(model, shape->context * shape->context);
  model->next = floats(model, rows * shape->vocabulary);
}

transformer_t *transformer_create(const transformer_shape_t *shape) {
  transformer_t *model = calloc(1, sizeof *model);
  if (!model)
    return NULL;
  model->shape = *shape;
  model->ntensors = OTHER_TENSORS + LAYER_TENSORS * shape->layers;
  /* two for a tensor, eleven more in a layer, eight at the ends, two tables */
  model->allocations = calloc(2 * model->ntensors + 11 * shape->layers + 10, sizeof(void *));
  if (model->allocations) {
    model->tensors = allocate(model, model->ntensors, sizeof *model->tensors);
    model->layers = allocate(model, shape->layers, sizeof *model->layers);
    if (model->layers) {
      create_ends(model);
      for (size_t l = 0; l < shape->layers; l++)
        create_layer(model, l);
    }
    if (model->allocations[model->nallocations - 1])
      return model;
  }
  transformer_destroy(model);
  return NULL;
}

void transformer_destroy(transformer_t *model) {
  if (!model)
    return;
  for (size_t i = 0; i < model->nallocations; i++)
    free(model->allocations[i]);
  free(model->allocations);
  free(model);
}

/* Uniform with the standard deviation given. */
static void draw(const transformer_tensor_t *tensor, float deviation, uint64_t *random) {
  for (size_t i = 0; i < tensor->count; i++)
    tensor->value[i] = deviation * 1.7320508f * (2.0f * random_uniform(random) - 1.0f);
}

/* Standard deviations at first. The two matrices of a block that end in the residual stream start
 * smaller than `matrix` and `mlp_output` say, so that all 2 * layers of them together add as much
 * as one. */
typedef struct deviations {
  float embedding, matrix, mlp_output;
} deviations_t;

static void initialise(transformer_t *model, uint64_t seed, deviations_t deviation) {
  uint64_t random = random_stream(seed, 0, 0);
  const float residual = 1.0f / sqrtf(2.0f * (float)model->shape.layers);
  draw(&model->tensors[TOKEN_EMBEDDING], deviation.embedding, &random);
  draw(&model->tensors[POSITION_EMBEDDING], deviation.embedding, &random);
  draw(model->head, deviation.matrix, &random);
  for (size_t l = 0; l < model->shape.layers; l++) {
    const struct transformer_layer *layer = &model->layers[l];
    draw(layer->query_key_value, deviation.matrix, &random);
    draw(layer->attention_output, deviation.matrix * residual, &random);
    draw(layer->mlp_input, deviation.matrix, &random);
    draw(layer->mlp_output, deviation.mlp_output * residual, &random);
  }
  for (size_t t = 0; t < model->ntensors; t++)
    for (size_t i = 0; model->tensors[t].is_gain && i < model->tensors[t].count; i++)
      model->tensors[t].value[i] = 1.0f;
}

void transformer_initialise(transformer_t *model, uint64_t seed) {
  initialise(model, seed, (deviations_t){0.02f, 0.02f, 0.02f});
}

/* A product of rows of variance 1 with a matrix of variance 1 / rows keeps variance 1. */
void transformer_initialise_unit(transformer_t *model, uint64_t seed) {
  const float unit = 1.0f / sqrtf((float)model->shape.width);
  initialise(model, seed, (deviations_t){1.0f, unit, unit / 2.0f});
}
