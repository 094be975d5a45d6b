/*
 * Implements the transformer of model.h. Arrays are row-major, with one row for each position of
 * each sequence. The arithmetic is in model.c. This file has the attention, the blocks and the
 * whole model, each with its forward and backward pass.
 */
#include "examples/model.h"

#include <math.h>
#include <string.h>

#include "examples/numbers.h"

/* The six tensors of a block, and the values that its forward pass stores for its backward pass. */
struct transformer_layer {
  const tensor_t *attention_gain, *query_key_value, *attention_output;
  const tensor_t *mlp_gain, *mlp_input, *mlp_output;
  float *input;                  /* [row][width] */
  float *normed, *inverse_rms;   /* [row][width], [row] */
  float *heads;                  /* [row][query, key, value][width] */
  float *attention;              /* [sequence][head][position][position], rows sum to 1 */
  float *attended;               /* [row][width] */
  float *middle;                 /* [row][width]: input plus attention */
  float *normed2, *inverse_rms2; /* [row][width], [row] */
  float *hidden, *activated;     /* [row][4 width], before and after GELU */
};

static const transformer_t *transformer_of(const model_t *model) {
  return (const transformer_t *)(const void *)model;
}

/* --- Attention ---------------------------------------------------------------------------------*/

/* The offsets of one head of one sequence in the arrays. */
typedef struct head {
  size_t position; /* offset of its first element in a [row][width] array */
  size_t query;    /* in the [row][3 width] array of queries, keys and values */
  size_t scores;   /* in the array [sequence][head][position][position] */
  float scale;     /* 1 / sqrt(width of a head) */
} head_t;

static head_t locate_head(const transformer_shape_t *shape, size_t sequence, size_t head) {
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
    attend(shape, layer, locate_head(shape, i / shape->heads, i % shape->heads));
  memcpy(layer->middle, layer->input, rows * width * sizeof(float));
  linear(layer->middle, layer->attended, layer->attention_output, rows, width, width, ADD);

  normalise(layer->normed2, layer->inverse_rms2, layer->middle, layer->mlp_gain->value, rows,
            width);
  linear(layer->hidden, layer->normed2, layer->mlp_input, rows, width, 4 * width, REPLACE);
  gelu(layer->activated, layer->hidden, rows * 4 * width);
  memcpy(output, layer->middle, rows * width * sizeof(float));
  linear(output, layer->activated, layer->mlp_output, rows, 4 * width, width, ADD);
}

/* Replaces the gradient with respect to the block's output, in model->d_stream, by the gradient
 * with respect to the block's input. */
static void block_backward(const transformer_t *model, struct transformer_layer *layer,
                           size_t sequences) {
  const transformer_shape_t *shape = &model->shape;
  const size_t rows = sequences * shape->context, width = shape->width;
  float *d_stream = model->d_stream, *d_normed = model->d_normed, *d_wide = model->d_wide;
  linear_backward(d_wide, d_stream, layer->activated, layer->mlp_output, rows, 4 * width, width);
  model_report_ready(&model->model, layer->mlp_output);
  gelu_backward(d_wide, layer->hidden, rows * 4 * width);
  linear_backward(d_normed, d_wide, layer->normed2, layer->mlp_input, rows, width, 4 * width);
  model_report_ready(&model->model, layer->mlp_input);
  normalise_backward(d_stream, layer->mlp_gain->gradient, d_normed, layer->middle,
                     layer->inverse_rms2, layer->mlp_gain->value, rows, width);
  model_report_ready(&model->model, layer->mlp_gain);

  linear_backward(d_normed, d_stream, layer->attended, layer->attention_output, rows, width, width);
  model_report_ready(&model->model, layer->attention_output);
  for (size_t i = 0; i < sequences * shape->heads; i++)
    attend_backward(model, layer, locate_head(shape, i / shape->heads, i % shape->heads), d_normed,
                    d_wide);
  linear_backward(d_normed, d_wide, layer->normed, layer->query_key_value, rows, width, 3 * width);
  model_report_ready(&model->model, layer->query_key_value);
  normalise_backward(d_stream, layer->attention_gain->gradient, d_normed, layer->input,
                     layer->inverse_rms, layer->attention_gain->value, rows, width);
  model_report_ready(&model->model, layer->attention_gain);
}

/* --- The whole model
 * ---------------------------------------------------------------------------- */

/* Indices of tensors. The final gain and the head follow the tensors of the layers. */
enum { TOKEN_EMBEDDING, POSITION_EMBEDDING, FIRST_LAYER, LAYER_TENSORS = 6, OTHER_TENSORS = 4 };

/* Embeds the tokens, and sets each row's target to the next token. */
static void embed_tokens(const transformer_t *own, size_t sequences) {
  const size_t context = own->shape.context, width = own->shape.width;
  const tensor_t *tensors = own->model.tensors;
  float *x = own->layers[0].input;
  for (size_t row = 0; row < sequences * context; row++, x += width) {
    const unsigned char *at = own->tokens + row + row / context;
    const float *token = tensors[TOKEN_EMBEDDING].value + width * at[0];
    const float *position = tensors[POSITION_EMBEDDING].value + width * (row % context);
    own->model.target[row] = at[1];
    for (size_t j = 0; j < width; j++)
      x[j] = token[j] + position[j];
  }
}

static void embed_tokens_backward(const transformer_t *own, size_t sequences) {
  const size_t context = own->shape.context, width = own->shape.width;
  const tensor_t *tensors = own->model.tensors;
  const float *dx = own->d_stream;
  for (int t = TOKEN_EMBEDDING; t <= POSITION_EMBEDDING; t++)
    memset(tensors[t].gradient, 0, tensors[t].count * sizeof(float));
  for (size_t row = 0; row < sequences * context; row++, dx += width) {
    float *token = tensors[TOKEN_EMBEDDING].gradient + width * own->tokens[row + row / context];
    float *position = tensors[POSITION_EMBEDDING].gradient + width * (row % context);
    for (size_t j = 0; j < width; j++) {
      token[j] += dx[j];
      position[j] += dx[j];
    }
  }
  model_report_ready(&own->model, &tensors[POSITION_EMBEDDING]);
  model_report_ready(&own->model, &tensors[TOKEN_EMBEDDING]);
}

static void transformer_forward(model_t *model, size_t sequences) {
  const transformer_t *own = transformer_of(model);
  const transformer_shape_t *shape = &own->shape;
  const size_t rows = sequences * shape->context;
  embed_tokens(own, sequences);
  for (size_t l = 0; l < shape->layers; l++)
    block_forward(own, &own->layers[l],
                  l + 1 < shape->layers ? own->layers[l + 1].input : own->stream, sequences);
  normalise(own->normed, own->inverse_rms, own->stream, own->final_gain->value, rows, shape->width);
  linear(model->predicted, own->normed, own->head, rows, shape->width, shape->vocabulary, REPLACE);
  softmax(model->predicted, rows, shape->vocabulary, 1.0f, 0);
}

static void transformer_backward(model_t *model, size_t sequences) {
  const transformer_t *own = transformer_of(model);
  const transformer_shape_t *shape = &own->shape;
  const size_t rows = sequences * shape->context;
  linear_backward(own->d_normed, model_loss_backward(model, sequences), own->normed, own->head,
                  rows, shape->width, shape->vocabulary);
  model_report_ready(&own->model, own->head);
  memset(own->d_stream, 0, rows * shape->width * sizeof(float));
  normalise_backward(own->d_stream, own->final_gain->gradient, own->d_normed, own->stream,
                     own->inverse_rms, own->final_gain->value, rows, shape->width);
  model_report_ready(&own->model, own->final_gain);
  for (size_t l = shape->layers; l-- > 0;)
    block_backward(own, &own->layers[l], sequences);
  embed_tokens_backward(own, sequences);
}

/* --- Memory and first values -------------------------------------------------------------------*/

static void transformer_create_layer(transformer_t *own, size_t l) {
  const transformer_shape_t *shape = &own->shape;
  const size_t width = shape->width, rows = shape->sequences * shape->context;
  const size_t first = FIRST_LAYER + LAYER_TENSORS * l;
  model_t *model = &own->model;
  own->layers[l] = (struct transformer_layer){
      .attention_gain = model_tensor(model, first, width, 0),
      .query_key_value = model_tensor(model, first + 1, width * 3 * width, 1),
      .attention_output = model_tensor(model, first + 2, width * width, 1),
      .mlp_gain = model_tensor(model, first + 3, width, 0),
      .mlp_input = model_tensor(model, first + 4, width * 4 * width, 1),
      .mlp_output = model_tensor(model, first + 5, 4 * width * width, 1),
      .input = model_floats(model, rows * width),
      .normed = model_floats(model, rows * width),
      .inverse_rms = model_floats(model, rows),
      .heads = model_floats(model, rows * 3 * width),
      .attention = model_floats(model, rows * shape->heads * shape->context),
      .attended = model_floats(model, rows * width),
      .middle = model_floats(model, rows * width),
      .normed2 = model_floats(model, rows * width),
      .inverse_rms2 = model_floats(model, rows),
      .hidden = model_floats(model, rows * 4 * width),
      .activated = model_floats(model, rows * 4 * width),
  };
}

static void create_ends(transformer_t *own) {
  const transformer_shape_t *shape = &own->shape;
  const size_t width = shape->width, rows = shape->sequences * shape->context;
  model_t *model = &own->model;
  model_tensor(model, TOKEN_EMBEDDING, shape->vocabulary * width, 1);
  model_tensor(model, POSITION_EMBEDDING, shape->context * width, 1);
  own->final_gain = model_tensor(model, model->ntensors - 2, width, 0);
  own->head = model_tensor(model, model->ntensors - 1, width * shape->vocabulary, 1);
  own->tokens = model_array(model, shape->sequences, shape->context + 1);
  own->stream = model_floats(model, rows * width);
  own->normed = model_floats(model, rows * width);
  own->inverse_rms = model_floats(model, rows);
  own->d_stream = model_floats(model, rows * width);
  own->d_normed = model_floats(model, rows * width);
  own->d_wide = model_floats(model, rows * 4 * width);
  own->d_scores = model_floats(model, shape->context * shape->context);
}

transformer_t *transformer_create(const transformer_shape_t *shape) {
  const model_t like = {.ntensors = OTHER_TENSORS + LAYER_TENSORS * shape->layers,
                        .rows = shape->context,
                        .classes = shape->vocabulary,
                        .forward = transformer_forward,
                        .backward = transformer_backward};
  transformer_t *own = model_create(sizeof *own, &like, shape->sequences);
  if (!own)
    return NULL;
  own->shape = *shape;
  own->layers = model_array(&own->model, shape->layers, sizeof *own->layers);
  create_ends(own);
  for (size_t l = 0; own->layers && l < shape->layers; l++)
    transformer_create_layer(own, l);
  return model_complete(&own->model);
}

/* Draws uniform values with the given standard deviation. */
static void transformer_draw(const tensor_t *tensor, float deviation, uint64_t *random) {
  tensor_draw(tensor, deviation * 1.7320508f, random);
}

/* Initial standard deviations. In each block, the two matrices that write to the residual stream
 * start smaller than `matrix` and `mlp_output` say, so that all 2 * layers of them together add as
 * much variance as one. */
typedef struct deviations {
  float embedding, matrix, mlp_output;
} deviations_t;

static void initialise_with(transformer_t *model, uint64_t seed, deviations_t deviation) {
  const tensor_t *tensors = model->model.tensors;
  uint64_t random = random_stream(seed, 0, 0);
  const float residual = 1.0f / sqrtf(2.0f * (float)model->shape.layers);
  transformer_draw(&tensors[TOKEN_EMBEDDING], deviation.embedding, &random);
  transformer_draw(&tensors[POSITION_EMBEDDING], deviation.embedding, &random);
  transformer_draw(model->head, deviation.matrix, &random);
  for (size_t l = 0; l < model->shape.layers; l++) {
    const struct transformer_layer *layer = &model->layers[l];
    transformer_draw(layer->query_key_value, deviation.matrix, &random);
    transformer_draw(layer->attention_output, deviation.matrix * residual, &random);
    transformer_draw(layer->mlp_input, deviation.matrix, &random);
    transformer_draw(layer->mlp_output, deviation.mlp_output * residual, &random);
  }
  for (size_t t = 0; t < model->model.ntensors; t++)
    for (size_t i = 0; !tensors[t].decays && i < tensors[t].count; i++)
      tensors[t].value[i] = 1.0f;
}

void transformer_initialise(transformer_t *model, uint64_t seed) {
  initialise_with(model, seed, (deviations_t){0.02f, 0.02f, 0.02f});
}

/* Initialises so that activations have variance 1: inputs of variance 1, times a matrix of variance
 * 1 / rows, have variance 1. */
void transformer_initialise_unit(transformer_t *model, uint64_t seed) {
  const float unit = 1.0f / sqrtf((float)model->shape.width);
  initialise_with(model, seed, (deviations_t){1.0f, unit, unit / 2.0f});
}
