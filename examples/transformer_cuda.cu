/*
 * The transformer of transformer_cuda.h. It follows transformer.c, and has its names: the blocks
 * and the whole, forward and backward. Kernels are in transformer_kernels.cuh, products in
 * transformer_queue.cuh.
 */
#include "examples/transformer_cuda.h"

#include <math.h>

#include "examples/transformer_queue.cuh"

using namespace on_device;

typedef const transformer_tensor_t *tensor_t;

/* What callers in C hold. */
struct transformer_cuda {
  const transformer_shape_t shape;
  queue device;
  std::vector<transformer_tensor_t> tensors;
  unsigned char *tokens;    /* [sequence][context + 1] */
  float *next, *row_losses; /* [row][token], [row] */
  void (*ready)(void *context, size_t tensor) = nullptr;
  void *ready_context = nullptr;

  explicit transformer_cuda(const transformer_shape_t &its_shape) : shape(its_shape) {
    tokens = device.allocate<unsigned char>(shape.sequences * (shape.context + 1));
    next = device.allocate<float>(rows(shape.sequences) * shape.vocabulary);
    row_losses = device.allocate<float>(rows(shape.sequences));
  }
  virtual ~transformer_cuda() = default;
  virtual void forward(size_t rows) = 0;
  virtual void backward(size_t rows) = 0;

  size_t rows(size_t sequences) const { return sequences * shape.context; }
};

namespace {

/* Places among the tensors; behind the layers' come the final gain and the head. */
enum { TOKEN_EMBEDDING, POSITION_EMBEDDING, FIRST_LAYER, LAYER_TENSORS = 6 };

/* What a block's forward pass keeps for its backward pass, and its six tensors. */
template <typename Number> struct layer {
  tensor_t attention_gain, query_key_value, attention_output, mlp_gain, mlp_input, mlp_output;
  float *input, *inverse_rms;   /* [row][width], [row] */
  Number *normed;               /* [row][width] */
  Number *heads;                /* [query, key, value][sequence][head][position][column] */
  Number *attention;            /* [sequence][head][position][position], rows sum to 1 */
  Number *attended;             /* [row][width] */
  float *middle, *inverse_rms2; /* [row][width]: input plus attention; [row] */
  Number *normed2;              /* [row][width] */
  Number *hidden, *activated;   /* [row][4 width], before and after GELU */
};

transformer_shape_t with_sequences(transformer_shape_t shape, size_t sequences) {
  shape.sequences = sequences;
  return shape;
}

/* The model whose products multiply such numbers. */
template <typename Number> class model final : public transformer_cuda {
public:
  model(const transformer_t *host, size_t sequences)
      : transformer_cuda(with_sequences(host->shape, sequences)) {
    create_tensors(host);
    for (size_t l = 0; l < shape.layers; l++)
      layers.push_back(create_layer(FIRST_LAYER + LAYER_TENSORS * l));
    create_buffers(rows(shape.sequences), shape.width);
  }

  void forward(size_t rows) override {
    const size_t width = shape.width, context = shape.context, vocabulary = shape.vocabulary;
    device.launch_elements(round_values<Number>, parameters, rounded, values, parameters);
    device.launch_rows(embed, rows, layers[0].input, tensors[TOKEN_EMBEDDING].value,
                       tensors[POSITION_EMBEDDING].value, tokens, rows, context, width);
    for (size_t l = 0; l < shape.layers; l++)
      block_forward(layers[l], l + 1 < shape.layers ? layers[l + 1].input : last, rows);
    device.launch_rows(normalise<Number>, rows, last_normed, last_inverse_rms, last,
                       final_gain()->value, rows, width);
    linear(next, last_normed, head(), rows, width, vocabulary);
    device.launch_rows(predict, rows, next, row_losses, tokens, rows, context, vocabulary);
  }

  void backward(size_t rows) override {
    const size_t width = shape.width, vocabulary = shape.vocabulary;
    device.launch_rows(predict_backward<Number>, rows, d_logits, next, tokens, rows, shape.context,
                       vocabulary);
    linear_backward(d_normed, d_logits, last_normed, head(), rows, width, vocabulary);
    device.clear(d_stream, rows * width);
    normalise_backward(final_gain(), last, last_inverse_rms, rows);
    for (size_t l = shape.layers; l-- > 0;)
      block_backward(layers[l], rows);
    embed_backward(rows);
  }

private:
  std::vector<layer<Number>> layers;
  size_t parameters = 0;     /* with the gaps between tensors */
  float *values, *gradients; /* of all tensors, one after the other */
  Number *rounded;           /* the values as the products read them */
  /* What the last block hands to the head, and its normalisation. */
  float *last, *last_inverse_rms;
  Number *last_normed;
  /* Of what passes from kernel to kernel; d_ is a gradient. */
  Number *d_logits;                /* [row][token] */
  float *d_stream, *d_normed;      /* [row][width] */
  Number *narrow, *narrow2, *wide; /* [row][width] and [row][4 width] */
  Number *d_heads, *d_scores;      /* as in the layers: heads and attention */
  float *scores;                   /* as attention */
  float *slices;                   /* [SLICES][width] */

  tensor_t final_gain() const { return &tensors[tensors.size() - 2]; }
  tensor_t head() const { return &tensors[tensors.size() - 1]; }

  /* The tensor's gradient will not change any more in this backward pass. */
  void tell(tensor_t tensor) const {
    if (ready)
      ready(ready_context, static_cast<size_t>(tensor - tensors.data()));
  }

  /* --- Products --------------------------------------------------------------------------------*/

  const Number *weights(tensor_t tensor) const { return rounded + (tensor->value - values); }

  /* y = x w, or y += x w, and its backward: dw = x' dy, dx = dy w'. */
  template <typename Result>
  void linear(Result *y, const Number *x, tensor_t w, size_t rows, size_t in, size_t out,
              product_mode mode = REPLACE) {
    device.multiply(y, stored(x), stored(weights(w)), rows, in, out, mode);
  }

  template <typename Result>
  void linear_backward(Result *dx, const Number *dy, const Number *x, tensor_t w, size_t rows,
                       size_t in, size_t out) {
    device.multiply(w->gradient, transposed(x), stored(dy), in, rows, out);
    tell(w);
    device.multiply(dx, stored(dy), transposed(weights(w)), rows, out, in);
  }

  /* Adds to d_stream, from d_normed; narrow becomes d_stream rounded. */
  void normalise_backward(tensor_t gain, const float *x, const float *inverse_rms, size_t rows) {
    const size_t width = shape.width;
    device.launch_rows(on_device::normalise_backward<Number>, rows, d_stream, narrow, d_normed, x,
                       inverse_rms, gain->value, rows, width);
    device.launch(gain_slices, dim3(queue::blocks(width), SLICES), slices, d_normed, x, inverse_rms,
                  rows, width);
    device.launch_elements(sum_slices, width, gain->gradient, slices, SLICES, width);
    tell(gain);
  }

  /* --- Attention -------------------------------------------------------------------------------*/

  head_layout heads_of(size_t parts, size_t rows) const {
    return {parts, rows, shape.context, shape.heads, shape.width / shape.heads};
  }
  float score_scale() const { return 1.0f / sqrtf((float)(shape.width / shape.heads)); }

  /* From wide, which has a row's queries, keys and values. */
  void attend(const layer<Number> &at, size_t rows) {
    const size_t context = shape.context, columns = shape.width / shape.heads;
    const size_t count = rows / context * shape.heads, part = rows * shape.width;
    const Number *query = at.heads, *key = query + part, *value = key + part;
    device.launch_rows(split_heads<Number>, rows * 3 * shape.heads, at.heads, wide,
                       heads_of(3, rows));
    device.multiply_each(scores, stored(query), transposed(key), context, columns, context, count);
    device.launch_rows(attention_weights<Number>, count * context, at.attention, scores,
                       count * context, context, score_scale());
    device.multiply_each(narrow, stored(at.attention), stored(value), context, context, columns,
                         count);
    device.launch_rows(join_heads<Number>, rows * shape.heads, at.attended, narrow,
                       heads_of(1, rows));
  }

  /* From narrow2, the gradient of attended, to wide. */
  void attend_backward(const layer<Number> &at, size_t rows) {
    const size_t context = shape.context, columns = shape.width / shape.heads;
    const size_t count = rows / context * shape.heads, part = rows * shape.width;
    const Number *query = at.heads, *key = query + part, *value = key + part;
    Number *d_query = d_heads, *d_key = d_query + part, *d_value = d_key + part;
    const matrix<Number> d_out = stored(narrow);
    device.launch_rows(split_heads<Number>, rows * shape.heads, narrow, narrow2, heads_of(1, rows));
    device.multiply_each(d_value, transposed(at.attention), d_out, context, context, columns,
                         count);
    device.multiply_each(scores, d_out, transposed(value), context, columns, context, count);
    device.launch_rows(attention_weights_backward<Number>, count * context, d_scores, scores,
                       at.attention, count * context, context, score_scale());
    device.multiply_each(d_query, stored(d_scores), stored(key), context, context, columns, count);
    device.multiply_each(d_key, transposed(d_scores), stored(query), context, context, columns,
                         count);
    device.launch_rows(join_heads<Number>, rows * 3 * shape.heads, wide, d_heads,
                       heads_of(3, rows));
  }

  /* --- Blocks ----------------------------------------------------------------------------------*/

  void block_forward(const layer<Number> &at, float *output, size_t rows) {
    const size_t width = shape.width;
    device.launch_rows(normalise<Number>, rows, at.normed, at.inverse_rms, at.input,
                       at.attention_gain->value, rows, width);
    linear(wide, at.normed, at.query_key_value, rows, width, 3 * width);
    attend(at, rows);
    device.copy(at.middle, at.input, rows * width);
    linear(at.middle, at.attended, at.attention_output, rows, width, width, ADD);

    device.launch_rows(normalise<Number>, rows, at.normed2, at.inverse_rms2, at.middle,
                       at.mlp_gain->value, rows, width);
    linear(at.hidden, at.normed2, at.mlp_input, rows, width, 4 * width);
    device.launch_elements(gelu<Number>, rows * 4 * width, at.activated, at.hidden,
                           rows * 4 * width);
    device.copy(output, at.middle, rows * width);
    linear(output, at.activated, at.mlp_output, rows, 4 * width, width, ADD);
  }

  /* d_stream, and narrow: on entry the gradient of the block's output, on return of its input. */
  void block_backward(const layer<Number> &at, size_t rows) {
    const size_t width = shape.width;
    linear_backward(wide, narrow, at.activated, at.mlp_output, rows, 4 * width, width);
    device.launch_elements(gelu_backward<Number>, rows * 4 * width, wide, at.hidden,
                           rows * 4 * width);
    linear_backward(d_normed, wide, at.normed2, at.mlp_input, rows, width, 4 * width);
    normalise_backward(at.mlp_gain, at.middle, at.inverse_rms2, rows);

    linear_backward(narrow2, narrow, at.attended, at.attention_output, rows, width, width);
    attend_backward(at, rows);
    linear_backward(d_normed, wide, at.normed, at.query_key_value, rows, width, 3 * width);
    normalise_backward(at.attention_gain, at.input, at.inverse_rms, rows);
  }

  /* A position's rows are one in each sequence. */
  void embed_backward(size_t rows) {
    const size_t width = shape.width, context = shape.context, vocabulary = shape.vocabulary;
    Number *const ones = d_logits; /* not needed any more */
    device.launch_rows(one_hot<Number>, rows, ones, tokens, rows, context, vocabulary);
    device.multiply(tensors[TOKEN_EMBEDDING].gradient, transposed(ones), stored(narrow), vocabulary,
                    rows, width);
    device.launch_elements(sum_slices, context * width, tensors[POSITION_EMBEDDING].gradient,
                           d_stream, rows / context, context * width);
    tell(&tensors[POSITION_EMBEDDING]);
    tell(&tensors[TOKEN_EMBEDDING]);
  }

  /* --- Memory ----------------------------------------------------------------------------------*/

  /* A tensor begins where a line of the cache does, in every kind of numbers. */
  static size_t whole_lines(size_t count) { return (count + 63) / 64 * 64; }

  /* The host's tensors, with its values. */
  void create_tensors(const transformer_t *host) {
    for (size_t t = 0; t < host->ntensors; t++)
      parameters += whole_lines(host->tensors[t].count);
    values = device.allocate<float>(parameters);
    gradients = device.allocate<float>(parameters);
    rounded = device.allocate<Number>(parameters);
    tensors.assign(host->tensors, host->tensors + host->ntensors);
    size_t at = 0;
    for (transformer_tensor_t &tensor : tensors) {
      if (device.error())
        return;
      device.transfer(values + at, tensor.value, tensor.count, cudaMemcpyHostToDevice);
      tensor.value = values + at;
      tensor.gradient = gradients + at;
      at += whole_lines(tensor.count);
    }
  }

  layer<Number> create_layer(size_t first) {
    const size_t rows = this->rows(shape.sequences), width = shape.width;
    layer<Number> at = {};
    at.attention_gain = &tensors[first];
    at.query_key_value = &tensors[first + 1];
    at.attention_output = &tensors[first + 2];
    at.mlp_gain = &tensors[first + 3];
    at.mlp_input = &tensors[first + 4];
    at.mlp_output = &tensors[first + 5];
    at.input = device.allocate<float>(rows * width);
    at.inverse_rms = device.allocate<float>(rows);
    at.normed = device.allocate<Number>(rows * width);
    at.heads = device.allocate<Number>(rows * 3 * width);
    at.attention = device.allocate<Number>(rows * shape.heads * shape.context);
    at.attended = device.allocate<Number>(rows * width);
    at.middle = device.allocate<float>(rows * width);
    at.inverse_rms2 = device.allocate<float>(rows);
    at.normed2 = device.allocate<Number>(rows * width);
    at.hidden = device.allocate<Number>(rows * 4 * width);
    at.activated = device.allocate<Number>(rows * 4 * width);
    return at;
  }

  void create_buffers(size_t rows, size_t width) {
    last = device.allocate<float>(rows * width);
    last_inverse_rms = device.allocate<float>(rows);
    last_normed = device.allocate<Number>(rows * width);
    d_logits = device.allocate<Number>(rows * shape.vocabulary);
    d_stream = device.allocate<float>(rows * width);
    d_normed = device.allocate<float>(rows * width);
    narrow = device.allocate<Number>(rows * width);
    narrow2 = device.allocate<Number>(rows * width);
    wide = device.allocate<Number>(rows * 4 * width);
    d_heads = device.allocate<Number>(rows * 3 * width);
    d_scores = device.allocate<Number>(rows * shape.heads * shape.context);
    scores = device.allocate<float>(rows * shape.heads * shape.context);
    slices = device.allocate<float>(SLICES * width);
  }
};

transformer_cuda_t *create(const transformer_t *host, size_t sequences,
                           transformer_products_t products) {
  if (products == PRODUCTS_FLOAT32)
    return new model<float>(host, sequences);
  return new model<bfloat16>(host, sequences);
}

} /* namespace */

/* --- For C -------------------------------------------------------------------------------------*/

transformer_cuda_t *transformer_cuda_create(const transformer_t *host, size_t sequences,
                                            transformer_products_t products, const char **words) {
  transformer_cuda_t *model = create(host, sequences, products);
  *words = model->device.error();
  if (!*words)
    return model;
  delete model;
  return NULL;
}

void transformer_cuda_destroy(transformer_cuda_t *model) { delete model; }

const transformer_tensor_t *transformer_cuda_tensors(const transformer_cuda_t *model) {
  return model->tensors.data();
}

cudaStream_t transformer_cuda_stream(const transformer_cuda_t *model) {
  return model->device.stream();
}

const char *transformer_cuda_error(const transformer_cuda_t *model) {
  return model->device.error();
}

void transformer_cuda_store(transformer_cuda_t *model, const transformer_t *host) {
  for (size_t t = 0; t < model->tensors.size(); t++) {
    const transformer_tensor_t &from = model->tensors[t], &to = host->tensors[t];
    model->device.transfer(to.value, from.value, from.count, cudaMemcpyDeviceToHost);
    model->device.transfer(to.gradient, from.gradient, from.count, cudaMemcpyDeviceToHost);
  }
}

void transformer_cuda_forward(transformer_cuda_t *model, const unsigned char *tokens,
                              size_t sequences) {
  model->device.transfer(model->tokens, tokens, sequences * (model->shape.context + 1),
                         cudaMemcpyHostToDevice);
  model->forward(model->rows(sequences));
}

void transformer_cuda_backward(transformer_cuda_t *model, size_t sequences) {
  model->backward(model->rows(sequences));
}

void transformer_cuda_tell(transformer_cuda_t *model, void (*ready)(void *context, size_t tensor),
                           void *context) {
  model->ready = ready;
  model->ready_context = context;
}

double transformer_cuda_loss(transformer_cuda_t *model, size_t sequences) {
  std::vector<float> losses(model->rows(sequences));
  double sum = 0.0;
  model->device.transfer(losses.data(), model->row_losses, losses.size(), cudaMemcpyDeviceToHost);
  for (float loss : losses)
    sum += (double)loss;
  return sum / (double)losses.size();
}

void transformer_cuda_next(transformer_cuda_t *model, size_t sequences, float *next) {
  model->device.transfer(next, model->next, model->rows(sequences) * model->shape.vocabulary,
                         cudaMemcpyDeviceToHost);
}
