/* The data of a pass of an optimizer, in a scene. */
#include <math.h>

#include "onebit/optimizer.h"
#include "tests/gpu/scene.h"

/* All arrays are there, also those that a pass must leave alone. The variance of some elements is
 * zero. */
static void take_arrays(struct scene *scene) {
  static const char *const names[OB_ARRAYS] = {"momentum", "variance", "fresh",
                                               "anchor",   "moved",    "scratch"};
  const size_t elements = scene->host.geometry.layout.words * OB_LANES;
  for (int slot = 0; slot < OB_ARRAYS; slot++) {
    float *array = scene_take_floats(scene, names[slot], elements, 0, 80 + (uint32_t)slot);
    for (size_t i = 0; slot == OB_VARIANCE && i < elements; i++)
      array[i] = i % 11 == 4 ? 0 : fabsf(array[i]);
    for (size_t i = 0; slot == OB_FRESH && i < elements; i++)
      array[i] = fabsf(array[i]);
    if (slot == OB_MOVED && !scene->what->adds_up)
      continue;
    scene->sink.arrays[slot] = array;
    scene->pass.arrays[slot] = ON_DEVICE(scene, array);
  }
  if (!scene->what->last_values)
    return;
  /* The values count only until a call has ended well; then there is a message. */
  const float *last = scene_take_floats(scene, "last values", elements, 0, 89);
  scene->sink.last_values = scene->what->later ? NULL : last;
  scene->pass.last_values = ON_DEVICE(scene, last);
  scene->pass.only_at_first = true;
  scene->state->outcome.calls = scene->what->later ? 3 : 0;
}

/* A table of pointers to pieces, for the device. */
static void *table_of(struct scene *scene, void *const *pieces) {
  const size_t count = scene->what->pieces;
  void **table = twin_take(scene->twin, "pointers", count * sizeof *table, TWIN_BYTES, 0);
  for (size_t k = 0; k < count; k++)
    table[k] = ON_DEVICE(scene, pieces[k]);
  return ON_DEVICE(scene, table);
}

static void *take_numbers(struct scene *scene, const char *name, size_t k, onebit_dtype_t dtype,
                          enum codec_values values) {
  const size_t count = scene->host.geometry.layout.piece[k].valid, size = ob_dtype_size(dtype);
  const enum twin_content content = dtype == ONEBIT_FLOAT32    ? TWIN_FLOAT32
                                    : dtype == ONEBIT_BFLOAT16 ? TWIN_BFLOAT16
                                                               : TWIN_FLOAT16;
  if (!count)
    return NULL;
  void *numbers =
      twin_take(scene->twin, name, count * size, content, (scene->what->skew + k) % 8 * size);
  for (size_t i = 0; i < count; i++)
    ob_store(numbers, i, dtype, value_at(i, 100 + (uint32_t)k, values));
  return numbers;
}

/* Some pieces have no gradient. */
static void take_pieces(struct scene *scene) {
  const struct scene_case *what = scene->what;
  void *parameters[SCENE_PIECES];
  for (size_t k = 0; k < what->pieces; k++) {
    parameters[k] =
        take_numbers(scene, "parameters", k, ONEBIT_FLOAT32, scene_finite_values(scene));
    scene->parameters[k] = parameters[k];
    if (what->copies)
      scene->copies[k] =
          take_numbers(scene, "copies", k, what->copy_dtype, scene_finite_values(scene));
    if (k % 5 != 3)
      scene->gradients[k] = take_numbers(scene, "gradients", k, what->dtype, what->values);
  }
  scene->sink.parameters = scene->parameters;
  scene->sink.copies = what->copies ? scene->copies : NULL;
  scene->sink.gradients = (const void *const *)scene->gradients;
  scene->sink.copy_dtype = scene->pass.copy_dtype = what->copy_dtype;
  scene->sink.gradient_dtype = scene->pass.gradient_dtype = what->dtype;
  scene->pass.parameters = table_of(scene, parameters);
  scene->pass.copies = what->copies ? table_of(scene, scene->copies) : NULL;
  scene->pass.gradients = table_of(scene, scene->gradients);
}

/* Every piece has a rate and a decay of its own. The host is given the rates, already times the
 * step's, and perhaps the device too. */
static void take_rates(struct scene *scene) {
  const struct scene_case *what = scene->what;
  float *factors = scene_take_floats(scene, "factors", what->pieces, 0, 90);
  float *decays = scene_take_floats(scene, "weight decays", what->pieces, 0, 91);
  float *rates = scene_take_floats(scene, "rates", what->pieces, 0, 92);
  scene->pass.learning_rate = 0.013f;
  for (size_t k = 0; k < what->pieces; k++) {
    factors[k] = 0.5f + 0.3f * (float)k;
    decays[k] = k % 2 ? 0 : 0.07f / (float)(k + 1);
    rates[k] = scene->pass.learning_rate * factors[k] * (what->rated ? 1.7f : 1);
  }
  scene->pass.learning_rates = what->rated ? ON_DEVICE(scene, rates) : NULL;
  scene->sink.learning_rates = rates;
  scene->sink.weight_decays = decays;
  scene->pass.rate_factors = ON_DEVICE(scene, factors);
  scene->sink.rate_factors = what->sums_of_rates ? factors : NULL;
  scene->pass.sums_of_rates = what->sums_of_rates;
  scene->pass.weight_decays = ON_DEVICE(scene, decays);
  if (!what->scalings)
    return;
  scene->sink.scalings = scene_take_scalings(scene, false);
  scene->pass.scalings = ON_DEVICE(scene, scene->sink.scalings);
}

/* The bias corrections are perhaps the state's, and not what the kernel is told. */
static void set_factors(struct scene *scene) {
  const struct scene_case *what = scene->what;
  scene->sink.kind = scene->pass.kind = what->kind;
  scene->sink.last_decay = scene->pass.last_decay = 0.9f;
  scene->sink.factors = (struct ob_pass_factors){
      .adam = {0.9f, 0.99f, 0.1f, 0.01f, 1.7f, 3.3f, 1e-8f},
      .gradient_factor = 0.7f,
      .rate_sum = 0.6f,
      .anchor_decay = 0.03f,
      .bound = what->keep_zero ? ONEBIT_STEP_BOUND : INFINITY,
      .keep_zero = what->keep_zero,
      .adds_up = what->adds_up,
  };
  scene->pass.factors = scene->sink.factors;
  scene->pass.counted = what->counted;
  if (!what->counted)
    return;
  scene->state->momentum_factor = scene->sink.factors.adam.momentum_factor;
  scene->state->variance_factor = scene->sink.factors.adam.variance_factor;
  scene->pass.factors.adam.momentum_factor = scene->pass.factors.adam.variance_factor = 5;
}

static void gather_sums(struct scene *scene) {
  const size_t blocks = scene->host.geometry.layout.blocks;
  for (int k = 0; k < OB_SUMS; k++) {
    double *sums = twin_take(scene->twin, "sums", blocks * sizeof *sums, TWIN_FLOAT64, 0);
    for (size_t b = 0; b < blocks; b++)
      sums[b] = scene_sum_at(scene, b, 95 + (uint32_t)k);
    if (!(ob_pass_sums(scene->what->kind) & OB_MASK(k)))
      continue;
    scene->sink.sums[k] = sums;
    scene->pass.sums[k] = ON_DEVICE(scene, sums);
  }
}

static double *take_doubles(struct scene *scene, const char *name, uint32_t salt) {
  const size_t count = scene->what->pieces;
  double *doubles = twin_take(scene->twin, name, count * sizeof *doubles, TWIN_FLOAT64, 0);
  for (size_t t = 0; t < count; t++)
    doubles[t] = 0.5 + fabs((double)value_at(t, salt, VALUES_GRADIENTS));
  return doubles;
}

static void fill_lamb(struct scene *scene) {
  const size_t count = scene->what->pieces;
  const struct ob_piece *piece = scene->host.geometry.layout.piece;
  struct ob_cuda_tensor *tensors =
      twin_take(scene->twin, "tensors", count * sizeof *tensors, TWIN_BYTES, 0);
  for (size_t k = 0; k < count; k++) /* their numbers are in another order */
    tensors[k] = (struct ob_cuda_tensor){count - 1 - k, piece[k].first_block,
                                         piece[k + 1].first_block, k, k + 1};
  scene->coefficients = take_doubles(scene, "coefficients", 98);
  scene->factors = take_doubles(scene, "tensors' factors", 99);
  scene->lamb = (struct ob_cuda_lamb){
      .limits = {1e-6, 1e6, 0, 0.5, 4, 0.1}, /* coefficients are ratios, to the last bit */
      .tensors = ON_DEVICE(scene, tensors),
      .count = count,
      .coefficients = ON_DEVICE(scene, scene->coefficients),
      .factors = ON_DEVICE(scene, scene->factors),
      .learning_rates = ON_DEVICE(scene, scene->sink.learning_rates),
      .rate_factors = scene->pass.rate_factors,
  };
  for (int k = 0; k < OB_SUMS; k++)
    scene->lamb.sums[k] = scene->pass.sums[k];
}

void scene_fill_pass(struct scene *scene) {
  take_arrays(scene);
  take_pieces(scene);
  take_rates(scene);
  gather_sums(scene);
  set_factors(scene);
  fill_lamb(scene);
  scene->host.flight->call.sink = &scene->sink;
}
