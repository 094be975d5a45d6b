/* Allocates memory on the host and on the device, and fills it with the contents of a scene. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "collectives/messages.h"
#include "compression/numerics.h"
#include "tests/gpu/harness.h"
#include "tests/gpu/scene.h"

/* --- Twins */

/* The alignment of CUDA's allocations, and the minimum length of the pattern between arrays. */
#define TWIN_ALIGNMENT ((size_t)256)
#define TWIN_GAP       ((size_t)256)

bool twin_create(struct twin *twin, size_t capacity) {
  *twin = (struct twin){.capacity = capacity};
  if (!CHECK_CUDA(cudaMalloc((void **)&twin->device, capacity)))
    return false;
  twin->host = gpu_allocate(capacity, 1);
  twin->back = gpu_allocate(capacity, 1);
  twin_clear(twin);
  return true;
}

void twin_destroy(struct twin *twin) {
  free(twin->host);
  free(twin->back);
  CHECK_CUDA(cudaFree(twin->device));
}

/* Fills memory with bytes that read as large, unexpected floats such as -1.6e25. */
static void fill_pattern(unsigned char *bytes, size_t count) {
  for (size_t i = 0; i < count; i++)
    bytes[i] = (unsigned char)(0xd3 + i % 7);
}

void twin_clear(struct twin *twin) {
  twin->count = 0;
  twin->used = TWIN_GAP;
  fill_pattern(twin->host, TWIN_GAP);
}

/* Aligns the device address: cudaMalloc aligns the beginning of the memory. The host address has
 * only its allocator's alignment. */
void *twin_allocate(struct twin *twin, const char *name, size_t bytes, enum twin_content content,
                    size_t skew) {
  size_t at = (twin->used + TWIN_ALIGNMENT - 1) / TWIN_ALIGNMENT * TWIN_ALIGNMENT + skew;
  size_t end = at + bytes + TWIN_GAP;
  if (twin->count == TWIN_ARRAYS || end > twin->capacity) {
    CHECK(false, "the twin is too small for %zu bytes of %s", bytes, name);
    abort();
  }
  fill_pattern(twin->host + twin->used, end - twin->used);
  twin->arrays[twin->count++] = (struct twin_array){name, at, bytes, content};
  twin->used = end;
  return twin->host + at;
}

void *twin_on_device(const struct twin *twin, const void *host) {
  return host ? twin->device + ((const unsigned char *)host - twin->host) : NULL;
}

void *twin_in_copy(const struct twin *twin, const void *host) {
  return host ? twin->back + ((const unsigned char *)host - twin->host) : NULL;
}

bool twin_copy_to_device(struct twin *twin) {
  return gpu_copy(twin->device, twin->host, twin->used);
}

bool twin_copy_back(struct twin *twin) {
  return CHECK_CUDA(cudaDeviceSynchronize()) &&
         CHECK_CUDA(cudaMemcpy(twin->back, twin->device, twin->used, cudaMemcpyDeviceToHost));
}

static size_t unit_bytes(enum twin_content content) {
  static const size_t units[] = {1, 4, 2, 2, 8};
  return units[content];
}

static double number_at(const unsigned char *bytes, enum twin_content content) {
  uint16_t half;
  float single;
  double number;
  switch (content) {
  case TWIN_FLOAT32:
    memcpy(&single, bytes, sizeof single);
    return (double)single;
  case TWIN_BFLOAT16:
  case TWIN_FLOAT16:
    memcpy(&half, bytes, sizeof half);
    return (double)(content == TWIN_FLOAT16 ? ob_from_float16(half) : ob_from_bfloat16(half));
  case TWIN_FLOAT64:
    memcpy(&number, bytes, sizeof number);
    return number;
  default:
    return *bytes;
  }
}

static bool is_same(const struct twin *twin, size_t at, enum twin_content content) {
  const unsigned char *host = twin->host + at, *device = twin->back + at;
  return memcmp(host, device, unit_bytes(content)) == 0 ||
         (content != TWIN_BYTES && isnan(number_at(host, content)) &&
          isnan(number_at(device, content)));
}

static bool check_array(const struct twin *twin, const struct twin_array *array, const char *file,
                        int line) {
  size_t unit = unit_bytes(array->content), count = array->bytes / unit, first = count,
         differing = 0;
  if (memcmp(twin->host + array->at, twin->back + array->at, array->bytes) == 0)
    return true;
  for (size_t i = count; i-- > 0;)
    if (!is_same(twin, array->at + i * unit, array->content)) {
      first = i;
      differing++;
    }
  size_t at = array->at + first * unit;
  return differing == 0 ||
         check_note(false, file, line, "%s[%zu] is %.9g and should be %.9g; %zu of %zu differ",
                    array->name, first, number_at(twin->back + at, array->content),
                    number_at(twin->host + at, array->content), differing, count);
}

static bool check_gap(const struct twin *twin, size_t from, size_t to, const char *before,
                      const char *file, int line) {
  return memcmp(twin->host + from, twin->back + from, to - from) == 0 ||
         check_note(false, file, line, "memory after %s (of %zu bytes) is written to", before,
                    to - from);
}

bool twin_check(const struct twin *twin, const char *file, int line) {
  size_t end = 0;
  const char *before = "the beginning";
  bool same = true;
  for (size_t i = 0; i < twin->count; i++) {
    const struct twin_array *array = &twin->arrays[i];
    same &= check_gap(twin, end, array->at, before, file, line);
    same &= check_array(twin, array, file, line);
    end = array->at + array->bytes;
    before = array->name;
  }
  return check_gap(twin, end, twin->used, before, file, line) && same;
}

/* --- Data of a scene */

/* Returns the kind of values, or a finite kind if the case's values are not finite. Residuals and
 * messages must be finite. */
static enum codec_values finite_values(const struct scene *scene) {
  return scene->what->values == VALUES_NAN ? VALUES_GRADIENTS : scene->what->values;
}

static float scale_at(const struct scene *scene, size_t i, uint32_t salt) {
  if (i % 5 == 3)
    return 0;
  float scale = 0.01f + fabsf(value_at(i, salt, VALUES_GRADIENTS));
  return scene->what->values == VALUES_OVERFLOW ? scale * 1e30f : scale;
}

/* Fills a message with an earlier call's content, so that the test fails if a kernel does not write
 * a field. */
static void fill_message(const struct scene *scene, unsigned char *memory, size_t share,
                         size_t chunk, uint32_t salt) {
  struct ob_message_shape shape = ob_plan_message(&scene->host, share, chunk);
  struct ob_view view = ob_message_view(memory, &shape);
  salt += (uint32_t)chunk * 31;
  view.header->scale = shape.one_scale ? scale_at(scene, salt, salt) : 0;
  if (shape.dense) {
    for (size_t i = 0; i < shape.words * OB_LANES; i++)
      view.values[i] = value_at(i, salt, finite_values(scene));
    return;
  }
  for (size_t b = 0; b < ob_message_scales(&shape); b++)
    view.scales[b] = scale_at(scene, b, salt);
  for (size_t w = 0; w < shape.words; w++)
    view.words[w] = scramble((uint32_t)w + salt);
}

static void fill_chunk(struct scene *scene, size_t chunk) {
  struct onebit_plan *plan = &scene->host;
  bool whole = plan->geometry.whole;
  if (whole && scene->what->dense)
    fill_message(scene, ob_message_at(&plan->geometry, plan->geometry.outgoing, 0, chunk), 0, chunk,
                 900);
  for (size_t m = 0; m < plan->geometry.members; m++) {
    uint32_t salt = 1000 * (uint32_t)(m + 1);
    if (!whole) {
      fill_message(scene, ob_message_at(&plan->geometry, plan->geometry.outgoing, m, chunk),
                   ob_segment_of(&plan->geometry, m), chunk, salt);
      fill_message(scene, ob_message_at(&plan->geometry, plan->geometry.incoming, m, chunk),
                   ob_own_segment(plan), chunk, salt + 100);
    }
    size_t share = ob_segment_of(&plan->geometry, m);
    fill_message(scene, ob_message_at(&plan->geometry, plan->geometry.results[0], m, chunk), share,
                 chunk, salt + 200);
    if (plan->geometry.results[1] != plan->geometry.results[0])
      fill_message(scene, ob_message_at(&plan->geometry, plan->geometry.results[1], m, chunk),
                   share, chunk, salt + 300);
  }
}

static void fill_residual(const struct scene *scene, struct ob_residual *residual, uint32_t salt) {
  const struct ob_layout *layout = &scene->host.geometry.layout;
  float *values = residual->values[residual->now];
  size_t piece = 0;
  memset(values, 0, residual->words * OB_LANES * sizeof(float));
  for (size_t b = residual->first; b < residual->first + residual->blocks; b++) {
    struct ob_block block = ob_layout_block(layout, b, &piece);
    size_t first = (block.word - residual->first_word) * OB_LANES;
    for (size_t i = first; i < first + block.count; i++)
      values[i] = value_at(i, salt, finite_values(scene));
  }
  for (size_t i = 0; residual->moments[0] && i < residual->words * OB_LANES; i++)
    residual->moments[residual->now][i] =
        i % 5 == 2 ? 0 : ob_to_bfloat16(fabsf(value_at(i, salt + 1, VALUES_GRADIENTS)));
  for (size_t b = 0; b < (residual->one_scale ? 1 : residual->blocks); b++)
    residual->scales[residual->now][b] = scale_at(scene, b, salt);
  if (residual->one_scale && !residual->blocks)
    residual->scales[!residual->now][0] = 0;
}

/* Fills the state with values that reveal a wrong write: kernels must leave some fields unchanged,
 * and no kernel sets some of these flags. Without blocks, a scale is zero from the beginning. */
static void fill_state(struct scene *scene) {
  const struct onebit_plan *plan = &scene->host;
  *scene->state = (struct ob_cuda_state){.now = scene->what->now,
                                         .flags = OB_FLAG_DENSE,
                                         .server_flags = OB_FLAG_MISMATCH,
                                         .residual_flags = OB_FLAG_ERROR,
                                         .stop = scene->what->stop,
                                         .worker_scale = plan->state->worker.blocks ? 17 : 0,
                                         .server_scale = plan->state->server.blocks ? 19 : 0,
                                         .sequence = 5,
                                         .failed = -1,
                                         .not_finite = -1};
}

static double sum_at(const struct scene *scene, size_t block, uint32_t salt) {
  return ldexp(fabs((double)value_at(block, salt, scene->what->values)), -(int)(block % 41));
}

void scene_fill_plan(struct scene *scene) {
  struct onebit_plan *plan = &scene->host;
  plan->flight->outcome.status = scene->what->stop ? ONEBIT_SKIPPED : ONEBIT_OK;
  for (size_t chunk = scene->first_chunk; chunk < scene->end_chunk; chunk++)
    fill_chunk(scene, chunk);
  fill_residual(scene, &plan->state->worker, 1);
  fill_residual(scene, &plan->state->server, 2);
  for (size_t b = 0; b < plan->state->worker.blocks; b++)
    plan->state->worker_sums[b] = sum_at(scene, b, 3);
  for (size_t b = 0; b < plan->state->server.blocks; b++)
    plan->state->server_sums[b] = sum_at(scene, b, 4);
  fill_state(scene);
}

/* --- The caller's buffers */

/* Allocates the pieces of a buffer. With what->each every piece is a separate array; empty pieces
 * are NULL, and so is every fifth input. Without it all pieces share one array, `step` elements
 * apart. */
static struct ob_cuda_pieces allocate_pieces(struct scene *scene, const char *name, void **host,
                                             size_t pieces, size_t step, onebit_dtype_t dtype) {
  const struct scene_case *what = scene->what;
  const struct ob_layout *layout = &scene->host.geometry.layout;
  const bool inputs = host == (void **)scene->host.inputs;
  size_t size = ob_dtype_size(dtype);
  enum twin_content content = dtype == ONEBIT_FLOAT32    ? TWIN_FLOAT32
                              : dtype == ONEBIT_BFLOAT16 ? TWIN_BFLOAT16
                                                         : TWIN_FLOAT16;
  if (!what->each) {
    size_t last = pieces == layout->pieces ? layout->piece[pieces - 1].valid : step;
    char *base = twin_allocate(scene->twin, name, (step ? (pieces - 1) * step + last : last) * size,
                               content, what->skew * size);
    for (size_t k = 0; k < pieces; k++)
      host[k] = base + k * step * size;
    return (struct ob_cuda_pieces){NULL, ON_DEVICE(scene, base), step * size};
  }
  void **table = twin_allocate(scene->twin, "pointers", pieces * sizeof *table, TWIN_BYTES, 0);
  for (size_t k = 0; k < pieces; k++) {
    size_t valid = layout->piece[pieces == layout->pieces ? k : 0].valid;
    host[k] = valid && !(inputs && k % 5 == 3) ? twin_allocate(scene->twin, name, valid * size,
                                                               content, (what->skew + k) % 8 * size)
                                               : NULL;
    table[k] = ON_DEVICE(scene, host[k]);
  }
  return (struct ob_cuda_pieces){ON_DEVICE(scene, table), NULL, 0};
}

static size_t longest_piece(const struct scene *scene) {
  size_t longest = 0;
  for (size_t k = 0; k < scene->what->pieces; k++)
    longest = scene->what->counts[k] > longest ? scene->what->counts[k] : longest;
  return longest;
}

static void fill_inputs(struct scene *scene) {
  const struct scene_case *what = scene->what;
  const struct ob_layout *layout = &scene->host.geometry.layout;
  const onebit_dtype_t dtype = what->float32 ? ONEBIT_FLOAT32 : what->dtype;
  void **inputs = gpu_allocate(what->pieces, sizeof *inputs);
  scene->host.inputs = (const void **)inputs;
  scene->source.inputs =
      allocate_pieces(scene, "input", inputs, what->pieces, longest_piece(scene), dtype);
  for (size_t k = 0; k < what->pieces; k++)
    for (size_t i = 0; inputs[k] && i < layout->piece[k].valid; i++)
      ob_store(inputs[k], i, dtype, value_at(i, 50 + (uint32_t)k, what->values));
  if (!what->from_values)
    return;
  scene->source.step = ob_plan_longest_message(&scene->host);
  size_t elements = scene->host.geometry.members * scene->source.step;
  float *values = twin_allocate(scene->twin, "values", elements * sizeof *values, TWIN_FLOAT32, 0);
  for (size_t i = 0; i < elements; i++)
    values[i] = value_at(i, 70, what->values);
  scene->input_values = values;
  scene->source.values = ON_DEVICE(scene, values);
}

static void allocate_outputs(struct scene *scene) {
  const struct scene_case *what = scene->what;
  bool gathered = what->mode >= SCENE_GATHERED;
  size_t count = gathered ? what->members : what->pieces;
  scene->host.outputs = gpu_allocate(count, sizeof *scene->host.outputs);
  /* The pieces of a reduce-scatter share one output buffer, so the step between them is 0. */
  scene->outputs =
      allocate_pieces(scene, "output", scene->host.outputs, count,
                      what->mode == SCENE_SCATTER ? 0 : longest_piece(scene), what->output_dtype);
}

static float *allocate_floats(struct scene *scene, const char *name, size_t count, uint32_t salt) {
  float *floats = twin_allocate(scene->twin, name, count * sizeof *floats, TWIN_FLOAT32, 0);
  for (size_t i = 0; i < count; i++)
    floats[i] = value_at(i, salt, finite_values(scene));
  return floats;
}

static float *allocate_scalings(struct scene *scene) {
  size_t pieces = scene->what->pieces;
  float *scalings = allocate_floats(scene, "scalings", pieces, 96);
  for (size_t k = 0; k < pieces; k++)
    scalings[k] = k % 4 == 2 ? 0 : 1.3f / (float)(k + 1);
  return scalings;
}

static void add_scalings(struct scene *scene) {
  struct ob_source *source = &scene->host.flight->call.source;
  float *scalings = allocate_scalings(scene);
  float *reciprocals =
      allocate_floats(scene, "reciprocals", scene->host.geometry.layout.words * OB_LANES, 97);
  source->scalings = scalings;
  source->reciprocals = reciprocals;
  scene->source.scalings = ON_DEVICE(scene, scalings);
  scene->source.reciprocals = ON_DEVICE(scene, reciprocals);
}

/* In every third case only the device knows the bias correction. */
static void add_moments(struct scene *scene) {
  struct ob_source *source = &scene->host.flight->call.source;
  source->moment_rule = scene->source.moment_rule = OB_MOMENTS_SECOND;
  source->moment = (struct ob_moment_factors){.beta2 = 0.97f,
                                              .one_minus_beta2 = 0.03f,
                                              .epsilon = 1e-4f,
                                              .now = 0.11f,
                                              .before = 0.33f,
                                              .fresh = 0.44f};
  float *floors = allocate_scalings(scene);
  source->floors = floors;
  const struct ob_residual *worker = &scene->host.state->worker;
  source->own = scene->source.own =
      (struct ob_interval){worker->first_word, worker->first_word + worker->words};
  scene->source.floors = ON_DEVICE(scene, floors);
  scene->source.moment = source->moment;
  scene->source.counted = scene->what->counted;
  if (!scene->what->counted)
    return;
  scene->state->moment = source->moment;
  scene->source.moment.now = scene->source.moment.before = scene->source.moment.fresh = 5;
}

void scene_fill_buffers(struct scene *scene) {
  fill_inputs(scene);
  allocate_outputs(scene);
  struct ob_source *source = &scene->host.flight->call.source;
  source->inputs = scene->host.inputs;
  source->factor = scene->source.factor = 0.7f;
  source->float32 = scene->source.float32 = scene->what->float32;
  source->momentum = scene->source.momentum = scene->what->momentum;
  source->decay = scene->source.decay = 0.9f;
  source->weight = scene->source.weight = scene->what->momentum ? 0.1f : 1;
  if (scene->what->weighed)
    add_scalings(scene);
  if (scene->what->moments)
    add_moments(scene);
  scene->host.flight->call.outputs = scene->host.outputs;
}
