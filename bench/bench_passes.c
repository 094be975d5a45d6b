/* Implements the passes of the codec, creates their arrays, and prepares the rounds in which they
 * are timed. */
#include "bench/bench_passes.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "collectives/schedules/schedule.h"
#include "compression/codec.h"
#include "onebit/optimizer.h"

const struct ob_adam_factors bench_factors = {0.9f, 0.999f, 0.1f, 0.001f, 1, 1, 1e-8f};
const struct ob_lion_factors bench_lion_factors = {0.9f, 0.1f, 0.99f, 0.01f};

/* --- The passes. A plan of one rank has one segment, which is divided into chunks. Each chunk has
 * a message. */

static struct ob_view passes_view(const struct bench_passes *passes, unsigned char *base,
                                  size_t chunk) {
  struct ob_message_shape shape = ob_plan_message(passes->plan, 0, chunk);
  return ob_message_view(base + chunk * passes->plan->geometry.stride, &shape);
}

/* Returns the distance in bytes between the messages of two streams. It is a cache line longer than
 * in a plan, so that messages that are read together do not compete for one set of the first-level
 * cache. */
static size_t stream_stride(const struct ob_geometry *geometry) {
  return geometry->chunks * geometry->stride + OB_ALIGNMENT;
}

static unsigned char *passes_stream_messages(const struct bench_passes *passes, size_t stream) {
  return passes->messages + stream * stream_stride(&passes->plan->geometry);
}

static void passes_compress(struct bench_passes *passes, const struct ob_source *source,
                            struct ob_residual *residual) {
  for (size_t chunk = 0; chunk < passes->plan->geometry.chunks; chunk++) {
    struct ob_message_shape shape = ob_plan_message(passes->plan, 0, chunk);
    struct ob_view last = passes_view(passes, passes->messages, chunk);
    struct ob_view out = passes_view(passes, passes->plan->geometry.outgoing, chunk);
    ob_compress_blocks(&passes->work, source, residual, &shape, &last, &out, passes->sums[0]);
  }
  if (passes->work.one_scale)
    ob_compute_buffer_scale(&passes->work, residual, passes->sums[0]);
  ob_residual_commit(residual);
}

/* Runs the compress pass. A pass in place uses no streaming stores, since the array was just read
 * and is still in the cache. */
static int passes_run_compress(const struct bench_entry *entry) {
  struct bench_passes *passes = entry->context;
  const struct bench_pass *pass = entry->pass;
  const struct ob_adam_factors *f = &bench_factors;
  struct ob_residual *residual = pass->in_place ? &passes->in_place : &passes->plan->state->worker;
  const void *input = passes->input;
  struct ob_source source = {.inputs = &input,
                             .factor = 1,
                             .momentum = pass->momentum,
                             .decay = f->beta1,
                             .weight = pass->momentum ? f->one_minus_beta1 : 1};
  passes->work.stream = !residual->changed && !pass->in_place && passes->plan->state->work.stream;
  passes_compress(passes, &source, residual);
  return BENCH_OK;
}

static int passes_run_reduce(const struct bench_entry *entry) {
  struct bench_passes *passes = entry->context;
  struct ob_residual *server = &passes->plan->state->server;
  struct ob_view in[1024]; /* --streams allows at most 1024 */
  passes->work.stream = passes->plan->state->work.stream;
  passes->work.streams = entry->streams;
  for (size_t chunk = 0; chunk < passes->plan->geometry.chunks; chunk++) {
    struct ob_message_shape shape = ob_plan_message(passes->plan, 0, chunk);
    struct ob_view out = passes_view(passes, passes->plan->geometry.results[0], chunk);
    for (size_t s = 0; s < entry->streams; s++)
      in[s] = passes_view(passes, passes_stream_messages(passes, s), chunk);
    ob_reduce_blocks(&passes->work, in, server, &shape, &out, passes->sums[0]);
  }
  if (passes->work.one_scale)
    ob_compute_buffer_scale(&passes->work, server, passes->sums[0]);
  ob_residual_commit(server);
  return BENCH_OK;
}

static int passes_run_store(const struct bench_entry *entry) {
  struct bench_passes *passes = entry->context;
  void *output = passes->arrays[BENCH_OUTPUT];
  passes->work.stream = passes->plan->state->work.stream;
  for (size_t chunk = 0; chunk < passes->plan->geometry.chunks; chunk++) {
    struct ob_message_shape shape = ob_plan_message(passes->plan, 0, chunk);
    struct ob_view in = passes_view(passes, passes->messages, chunk);
    ob_store_blocks(&passes->work, &in, &shape, &output);
  }
  return BENCH_OK;
}

static int passes_run_apply(const struct bench_entry *entry) {
  struct bench_passes *passes = entry->context;
  const struct ob_pass_sink sink = {.kind = OB_PASS_APPLY,
                                    .parameters = &passes->arrays[BENCH_PARAMETERS],
                                    .learning_rates = &passes->learning_rate,
                                    .weight_decays = &passes->weight_decay,
                                    .factors = {.adam = bench_factors,
                                                .gradient_factor = 1,
                                                .scaling = 1,
                                                .bound = ONEBIT_STEP_BOUND},
                                    .arrays = {[OB_VARIANCE] = passes->arrays[BENCH_RECIPROCALS]}};
  passes->work.stream = passes->plan->state->work.stream;
  for (size_t chunk = 0; chunk < passes->plan->geometry.chunks; chunk++) {
    struct ob_message_shape shape = ob_plan_message(passes->plan, 0, chunk);
    struct ob_view in = passes_view(passes, passes->messages, chunk);
    ob_pass_blocks(&passes->work, &in, NULL, &shape, &sink);
  }
  return BENCH_OK;
}

/* Defines a function that runs a pass: a plain loop over arrays. */
#define LOOP(name, call)                                                                           \
  static int name(const struct bench_entry *entry) {                                               \
    struct bench_passes *passes = entry->context;                                                  \
    float *const *arrays = passes->arrays;                                                         \
    call;                                                                                          \
    return BENCH_OK;                                                                               \
  }

LOOP(run_triad, bench_triad_loop(arrays[BENCH_OUTPUT], arrays[BENCH_GRADIENT], 0.5f, passes->count))
LOOP(run_triad_apart, bench_triad_apart_loop(arrays[BENCH_OUTPUT], arrays[BENCH_PARAMETERS],
                                             arrays[BENCH_GRADIENT], 0.5f, passes->count))
LOOP(run_scale, bench_scale_loop(arrays[BENCH_OUTPUT], 0.5f, passes->count))
LOOP(run_scale_apart,
     bench_scale_apart_loop(arrays[BENCH_OUTPUT], arrays[BENCH_GRADIENT], 0.5f, passes->count))
LOOP(run_write, bench_write_loop(arrays[BENCH_OUTPUT], 0.5f, passes->count))

/* The bytes that each pass must move. Each read and each write of memory counts once. A cached
 * store makes the processor read the memory first; this read does not count, since it is a cost of
 * the pass and not its work. Scales, 8 bytes per block, do not count either. */
/* clang-format off */
const struct bench_pass
    /* reads a and b, writes a */
    bench_triad = {"triad", run_triad, .floats = 3},
    bench_triad_apart = {"triad, third array", run_triad_apart, .floats = 3},
    bench_scale = {"scale", run_scale, .floats = 2},
    bench_scale_apart = {"scale, second array", run_scale_apart, .floats = 2},
    bench_write = {"write", run_write, .floats = 1},
    /* reads the input and the residual, writes the residual and the bit */
    bench_compress = {"compress", passes_run_compress, .inputs = 1, .floats = 2, .bits = 1,
                      .like = &bench_triad_apart},
    bench_compress_in_place = {"compress in place", passes_run_compress, .inputs = 1, .floats = 2,
                               .bits = 1, .like = &bench_triad, .in_place = true},
    /* reads and writes the same as compress; also reads the momentum's bit */
    bench_compress_momentum = {"compress momentum", passes_run_compress, .inputs = 1, .floats = 2,
                               .bits = 2, .like = &bench_triad_apart, .momentum = true},
    /* reads a bit of each stream and the residual, writes the residual and the bit */
    bench_reduce = {"reduce", passes_run_reduce, .floats = 2, .bits = 1, .each = {.bits = 1},
                    .like = &bench_scale_apart, .streams = true},
    /* reads a bit, writes a value of the dtype */
    bench_store = {"store", passes_run_store, .inputs = 1, .bits = 1, .like = &bench_write},
    bench_apply = {"adam apply", passes_run_apply, .kind = OB_PASS_APPLY, .like = &bench_triad};
/* clang-format on */

/* Returns the bytes per element that a pass of an optimizer moves. Does not count the array
 * OB_MOVED, which is not used here. */
static double bytes_of_kind(const struct bench_passes *passes, enum ob_pass_kind kind) {
  double bytes = 0;
  const unsigned accesses[] = {ob_pass_reads(kind), ob_pass_writes(kind)};
  for (int k = 0; k < 2; k++)
    for (int slot = 0; slot < OB_SLOTS; slot++)
      if (accesses[k] & OB_MASK(slot))
        bytes += slot == OB_MOVED                        ? 0
                 : slot == OB_GRADIENT                   ? (double)ob_dtype_size(passes->work.dtype)
                 : slot == OB_MESSAGE || slot == OB_LAST ? passes->plan->geometry.width / 8.0
                                                         : 4;
  return bytes;
}

static double bytes_of_pass(const struct bench_passes *passes, const struct bench_pass *pass,
                            size_t streams) {
  double each = (double)streams, block = (double)passes->plan->geometry.layout.block;
  double bytes = pass->inputs * (double)ob_dtype_size(passes->work.dtype) +
                 4 * (pass->floats + each * pass->each.floats) +
                 (pass->bits + each * pass->each.bits) * passes->plan->geometry.width / 8 +
                 4 * (pass->scales + each * pass->each.scales) / block;
  return (bytes > 0 ? bytes : bytes_of_kind(passes, pass->kind)) * (double)passes->count;
}

/* --- Data of the passes */

static uint32_t random_word(uint64_t *state) {
  *state = *state * 6364136223846793005u + 1442695040888963407u; /* from Knuth, TAOCP 3.3.4 */
  return (uint32_t)(*state >> 32);
}

void bench_fill_message(unsigned char *message, const struct ob_message_shape *shape,
                        uint64_t seed) {
  struct ob_view view = ob_message_view(message, shape);
  view.header->scale = 0.01f;
  if (shape->dense)
    bench_fill_values(view.values, shape->words * OB_LANES, seed);
  for (size_t k = 0; !shape->dense && !shape->one_scale && k < shape->blocks; k++)
    view.scales[k] = 0.01f / (float)(1 + k % 7);
  for (size_t k = 0; !shape->dense && k < shape->words * shape->width; k++)
    view.words[k] = random_word(&seed);
}

/* Fills an array with random parameters or gradients, or with the variance or reciprocals that
 * follow from the gradients. Momentum and output stay zeros. */
static int fill_array(const struct bench_passes *passes, int array, float *values) {
  bool parameters = array == BENCH_PARAMETERS || array == BENCH_ANCHOR;
  if (array == BENCH_MOMENTUM || array == BENCH_OUTPUT)
    return BENCH_OK;
  bench_fill_values(values, passes->count, parameters ? 2 : 1);
  for (size_t i = 0; !parameters && array != BENCH_GRADIENT && i < passes->count; i++) {
    float variance = values[i] * values[i];
    values[i] =
        array == BENCH_RECIPROCALS ? 1 / ob_adam_denominator(variance, &bench_factors) : variance;
  }
  return bench_check_status(
      passes->space->memory->copy(passes->arrays[array], values, passes->count * sizeof *values),
      "filling arrays");
}

int bench_passes_allocate(struct bench_passes *passes, int first, int end) {
  float *values = ob_allocate(passes->count, sizeof *values);
  int status = values ? BENCH_OK : bench_report_no_memory("numbers", passes->count);
  for (int k = first; status == BENCH_OK && k < end; k++) {
    passes->arrays[k] = passes->space->memory->allocate(passes->count, sizeof(float));
    status = passes->arrays[k] ? fill_array(passes, k, values)
                               : bench_report_no_memory("elements of an array", passes->count);
  }
  ob_release(values);
  return status;
}

onebit_status_t bench_passes_create_plan(const struct bench_options *options, onebit_dtype_t dtype,
                                         onebit_wire_t wire, const struct bench_passes *passes,
                                         onebit_plan_t *plan) {
  onebit_plan_options_t wanted = ONEBIT_PLAN_OPTIONS_INIT;
  wanted.device = options->device;
  wanted.dtype = dtype;
  wanted.wire = wire;
  wanted.scale = options->scale;
  wanted.bits = wire == ONEBIT_WIRE_BITS ? options->bits : 0;
  wanted.residual_copies = options->residual_copies;
  wanted.block_size = options->block_size;
  wanted.chunk_size = options->chunk_size;
  if (!wanted.chunk_size && wanted.device == ONEBIT_DEVICE_CUDA)
    wanted.chunk_size = OB_MAX_CHUNK_ELEMENTS; /* one launch then processes as much as possible */
  wanted.threads = options->threads;
  return onebit_plan_create(passes->comm, passes->count, &wanted, plan);
}

static int passes_fill_messages(struct bench_passes *passes) {
  const struct onebit_plan *plan = passes->plan;
  passes->messages = ob_allocate(passes->streams, stream_stride(&plan->geometry));
  if (!passes->messages)
    return bench_report_no_memory("messages", passes->streams * plan->geometry.chunks);
  for (size_t s = 0; s < passes->streams; s++)
    for (size_t chunk = 0; chunk < plan->geometry.chunks; chunk++) {
      struct ob_message_shape shape = ob_plan_message(plan, 0, chunk);
      bench_fill_message(passes_stream_messages(passes, s) + chunk * plan->geometry.stride, &shape,
                         s * plan->geometry.chunks + chunk + 1);
    }
  return BENCH_OK;
}

static int create_arrays(struct bench_passes *passes) {
  onebit_dtype_t dtype = passes->work.dtype;
  size_t blocks = passes->plan->geometry.layout.blocks;
  BENCH_TRY(bench_passes_allocate(passes, 0, BENCH_FRESH));
  passes->sums[0] = ob_allocate(blocks, sizeof(double));
  passes->input = dtype == ONEBIT_FLOAT32 ? passes->arrays[BENCH_GRADIENT]
                                          : ob_allocate(passes->count, ob_dtype_size(dtype));
  if (!passes->input || !passes->sums[0])
    return bench_report_no_memory("elements of an array", passes->count);
  if (dtype != ONEBIT_FLOAT32)
    BENCH_TRY(bench_space_fill(passes->space, passes->input, passes->count, dtype, 1));
  return passes_fill_messages(passes);
}

int bench_passes_create(struct bench_job *job, size_t count, size_t streams,
                        struct bench_passes *passes) {
  const struct bench_options *options = job->options;
  *passes = (struct bench_passes){.job = job,
                                  .space = &bench_space_host,
                                  .count = count,
                                  .streams = streams,
                                  .learning_rate = BENCH_LEARNING_RATE};
  onebit_status_t status = onebit_comm_create_self(&passes->comm);
  if (status == ONEBIT_OK)
    status =
        bench_passes_create_plan(options, options->dtype, ONEBIT_WIRE_BITS, passes, &passes->plan);
  BENCH_TRY(bench_check_status(status, "onebit_plan_create"));
  passes->work = passes->plan->state->work;
  BENCH_TRY(
      bench_check_status(ob_work_create(&passes->work, streams, streams), "the codec's memory"));
  passes->in_place = passes->plan->state->worker;
  passes->in_place.values[1] = passes->in_place.values[0];
  passes->in_place.scales[1] = passes->in_place.scales[0];
  return create_arrays(passes);
}

/* Destroys passes in host memory or device memory. */
void bench_passes_destroy(struct bench_passes *passes) {
  void (*release)(void *) = passes->space->memory->release;
  if (!passes->kernels)
    ob_work_destroy(&passes->work);
  if (passes->input != passes->arrays[BENCH_GRADIENT])
    release(passes->input);
  for (int k = 0; k < BENCH_ARRAYS; k++)
    release(passes->arrays[k]);
  for (int k = 0; k < OB_SUMS; k++)
    release(passes->sums[k]);
  release(passes->moments[0]);
  release(passes->moments[1]);
  release(passes->messages);
  onebit_plan_destroy(passes->plan);
  onebit_comm_destroy(passes->comm);
}

/* --- Rounds */

#define ROUNDS  15
#define WARMUPS 2

/* The smallest number of elements in a timed measurement: with so many it takes milliseconds, and
 * the clock's error does not matter. For smaller arrays, several calls are timed together, at most
 * MOST_REPEATS. */
#define ELEMENTS_A_TIME ((size_t)4 << 20)
#define MOST_REPEATS    ((size_t)1024)

void bench_rounds_prepare(struct bench_rounds *rounds, struct bench_passes *passes) {
  struct bench_job *job = passes->job;
  const struct bench_options *options = job->options;
  rounds->progress = &job->progress;
  rounds->space = passes->space;
  rounds->device = job->device;
  rounds->rounds = options->iterations == BENCH_BY_SIZE ? ROUNDS : options->iterations;
  rounds->warmups = options->warmups == BENCH_BY_SIZE ? WARMUPS : options->warmups;
  rounds->repeats = (ELEMENTS_A_TIME + passes->count - 1) / passes->count;
  if (BENCH_HAS_DEVICE(job))
    rounds->repeats = BENCH_LAUNCHES;
  else if (rounds->repeats > MOST_REPEATS)
    rounds->repeats = MOST_REPEATS;
  for (size_t k = 0; k < rounds->count; k++) {
    struct bench_entry *entry = &rounds->entries[k];
    if (entry->pass)
      entry->bytes = bytes_of_pass(passes, entry->pass, entry->streams);
  }
}
