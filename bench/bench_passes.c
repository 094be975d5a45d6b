/* The passes, what they work on, and their rounds. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/memory.h"
#include "bench/bench_passes.h"
#include "compression/codec.h"
#include "onebit/optimizer.h"

/* Adam's, and a learning rate that moves parameters little however long the benchmark runs. */
const struct ob_adam_factors bench_factors = {.beta1 = 0.9f,
                                              .beta2 = 0.999f,
                                              .one_minus_beta1 = 0.1f,
                                              .one_minus_beta2 = 0.001f,
                                              .momentum_factor = 1,
                                              .variance_factor = 1,
                                              .epsilon = 1e-8f};
const struct ob_lion_factors bench_lion_factors = {0.9f, 0.1f, 0.99f, 0.01f};
#define LEARNING_RATE 1e-6f

/* --- The passes. A plan of one rank has one share, cut in chunks: a message each. */

static struct ob_view view_of(const struct bench_passes *passes, unsigned char *base,
                              size_t chunk) {
  struct ob_message_shape shape = ob_plan_message(passes->plan, 0, chunk);
  return ob_message_view(base + chunk * passes->plan->geometry.stride, &shape);
}

static unsigned char *stream_of(const struct bench_passes *passes, size_t stream) {
  return passes->messages + stream * passes->plan->geometry.chunks * passes->plan->geometry.stride;
}

static void compress_source(struct bench_passes *passes, const struct ob_source *source,
                            struct ob_kept *kept, bool stream) {
  passes->work.stream = stream;
  for (size_t chunk = 0; chunk < passes->plan->geometry.chunks; chunk++) {
    struct ob_message_shape shape = ob_plan_message(passes->plan, 0, chunk);
    struct ob_view last = view_of(passes, passes->messages, chunk);
    struct ob_view out = view_of(passes, passes->plan->geometry.outgoing, chunk);
    ob_compress_blocks(&passes->work, source, kept, &shape, &last, &out, passes->sums);
  }
  if (passes->work.one_scale)
    ob_finish(&passes->work, kept, passes->sums);
  ob_kept_commit(kept);
}

void bench_pass_compress(struct bench_passes *passes, const struct ob_source *source) {
  compress_source(passes, source, &passes->plan->worker, passes->plan->work.stream);
}

static void compress(struct bench_passes *passes, struct ob_kept *kept, bool momentum,
                     bool stream) {
  const void *input = passes->input;
  const struct ob_source source = {.inputs = &input,
                                   .factor = 1,
                                   .momentum = momentum,
                                   .decay = bench_factors.beta1,
                                   .weight = momentum ? bench_factors.one_minus_beta1 : 1};
  compress_source(passes, &source, kept, stream);
}

static void run_compress(struct bench_passes *passes, size_t streams) {
  (void)streams;
  compress(passes, &passes->plan->worker, false, passes->plan->work.stream);
}

static void run_compress_momentum(struct bench_passes *passes, size_t streams) {
  (void)streams;
  compress(passes, &passes->plan->worker, true, passes->plan->work.stream);
}

/* What is read and then written is in the cache: there is nothing to gain by streaming. */
static void run_compress_in_place(struct bench_passes *passes, size_t streams) {
  (void)streams;
  compress(passes, &passes->in_place, false, false);
}

static void run_compress_streaming(struct bench_passes *passes, size_t streams) {
  (void)streams;
  compress(passes, &passes->plan->worker, false, true);
}

static void run_compress_cached(struct bench_passes *passes, size_t streams) {
  (void)streams;
  compress(passes, &passes->plan->worker, false, false);
}

static void run_reduce(struct bench_passes *passes, size_t streams) {
  struct ob_view in[1024]; /* as many as --streams allows */
  passes->work.stream = passes->plan->work.stream;
  passes->work.streams = streams;
  for (size_t chunk = 0; chunk < passes->plan->geometry.chunks; chunk++) {
    struct ob_message_shape shape = ob_plan_message(passes->plan, 0, chunk);
    struct ob_view out = view_of(passes, passes->plan->geometry.results[0], chunk);
    for (size_t s = 0; s < streams; s++)
      in[s] = view_of(passes, stream_of(passes, s), chunk);
    ob_reduce_blocks(&passes->work, in, &passes->plan->server, &shape, &out, passes->sums);
  }
  if (passes->work.one_scale)
    ob_finish(&passes->work, &passes->plan->server, passes->sums);
  ob_kept_commit(&passes->plan->server);
}

static void run_reduce_lion(struct bench_passes *passes, size_t streams) {
  struct ob_serving *serving = &passes->plan->server.serving;
  *serving = (struct ob_serving){OB_SERVE_LION, bench_lion_factors};
  run_reduce(passes, streams);
  *serving = (struct ob_serving){0};
}

static void run_store(struct bench_passes *passes, size_t streams) {
  void *output = passes->output;
  (void)streams;
  passes->work.stream = passes->plan->work.stream;
  for (size_t chunk = 0; chunk < passes->plan->geometry.chunks; chunk++) {
    struct ob_message_shape shape = ob_plan_message(passes->plan, 0, chunk);
    struct ob_view in = view_of(passes, passes->messages, chunk);
    ob_store_blocks(&passes->work, &in, &shape, &output);
  }
}

struct ob_pass_sink bench_sink(const struct bench_passes *passes, enum ob_pass_kind kind,
                               float **parameters) {
  return (struct ob_pass_sink){
      .kind = kind,
      .parameters = parameters,
      .learning_rates = &passes->learning_rate,
      .weight_decays = &passes->weight_decay,
      .factors = {.adam = bench_factors, .gradient_factor = 1, .bound = ONEBIT_STEP_BOUND}};
}

void bench_pass_on_arrays(struct bench_passes *passes, const struct ob_pass_sink *sink) {
  ob_pass_blocks(&passes->work, NULL, NULL, NULL, sink);
}

/* The message before, where it is wanted, is another one. */
void bench_pass_on_messages(struct bench_passes *passes, const struct ob_pass_sink *sink) {
  bool wants_last = ob_pass_reads(sink->kind) & OB_MASK(OB_LAST);
  passes->work.stream = passes->plan->work.stream;
  for (size_t chunk = 0; chunk < passes->plan->geometry.chunks; chunk++) {
    struct ob_message_shape shape = ob_plan_message(passes->plan, 0, chunk);
    struct ob_view in = view_of(passes, passes->messages, chunk), last = {0};
    if (wants_last)
      last = view_of(passes, stream_of(passes, 1), chunk);
    ob_pass_blocks(&passes->work, &in, wants_last ? &last : NULL, &shape, sink);
  }
}

static void run_apply(struct bench_passes *passes, size_t streams) {
  float *parameters = passes->parameters;
  struct ob_pass_sink sink = bench_sink(passes, OB_PASS_APPLY, &parameters);
  (void)streams;
  sink.arrays[OB_VARIANCE] = passes->reciprocals;
  bench_pass_on_messages(passes, &sink);
}

/* The dense step, on blocks, as the library's warm-up does it. */
static void run_adam(struct bench_passes *passes, size_t streams) {
  float *parameters = passes->parameters;
  struct ob_pass_sink sink = bench_sink(passes, OB_PASS_ADAM, &parameters);
  (void)streams;
  sink.arrays[OB_SCRATCH] = passes->gradient;
  sink.arrays[OB_MOMENTUM] = passes->momentum;
  sink.arrays[OB_VARIANCE] = passes->variance;
  sink.sums[0] = passes->sums;
  bench_pass_on_arrays(passes, &sink);
}

static void run_triad(struct bench_passes *passes, size_t streams) {
  (void)streams;
  bench_triad_loop(passes->output, passes->gradient, 0.5f, passes->count);
}

static void run_triad_apart(struct bench_passes *passes, size_t streams) {
  (void)streams;
  bench_triad_apart_loop(passes->output, passes->parameters, passes->gradient, 0.5f, passes->count);
}

static void run_memcpy(struct bench_passes *passes, size_t streams) {
  (void)streams;
  memcpy(passes->output, passes->gradient, passes->count * sizeof(float));
}

/* What must move: memory that is read counts once and so does memory that is written. What a
 * processor reads only because a cached store will write there does not count: it is a cost of the
 * pass, not its work. */
const struct bench_pass
    /* b and a in, a out */
    bench_triad = {"triad", run_triad, .floats = 3},
    bench_triad_apart = {"triad, third array", run_triad_apart, .floats = 3},
    bench_memcpy = {"memcpy", run_memcpy, .floats = 2},
    /* input and kept value in; kept value and bit out */
    bench_compress = {"compress", run_compress, .inputs = 1, .floats = 2, .bits = 1},
    /* the momentum's bit in, besides */
    bench_compress_momentum = {"compress momentum", run_compress_momentum, .inputs = 1, .floats = 2,
                               .bits = 2},
    /* as `compress` */
    bench_compress_in_place = {"compress in place", run_compress_in_place, .inputs = 1, .floats = 2,
                               .bits = 1},
    bench_compress_streaming = {"compress, streaming", run_compress_streaming, .inputs = 1,
                                .floats = 2, .bits = 1},
    bench_compress_cached = {"compress, cached", run_compress_cached, .inputs = 1, .floats = 2,
                             .bits = 1},
    /* a bit of each stream and the kept value in; kept value and bit out */
    bench_reduce = {"reduce", run_reduce, .floats = 2, .bits = 1, .streams = true},
    bench_reduce_lion = {"reduce lion", run_reduce_lion, .floats = 2, .bits = 1, .streams = true},
    /* a bit in, a value of the dtype out */
    bench_store = {"store", run_store, .inputs = 1, .bits = 1},
    /* a bit, the reciprocal and the parameter in; the parameter out */
    bench_apply = {"adam apply", run_apply, .floats = 3, .bits = 1},
    /* gradient, momentum, variance and parameter in; the last three out */
    bench_adam = {"dense adam", run_adam, .floats = 7};

double bench_pass_bytes(const struct bench_passes *passes, const struct bench_entry *entry) {
  const struct bench_pass *pass = entry->pass;
  double bits = pass->bits + (pass->streams ? (double)entry->streams : 0);
  double element =
      pass->inputs * (double)ob_dtype_size(passes->work.dtype) + pass->floats * 4 + bits / 8;
  return element * (double)passes->count;
}

/* --- What they work on */

static void fill_message(struct bench_passes *passes, size_t stream, size_t chunk) {
  struct ob_message_shape shape = ob_plan_message(passes->plan, 0, chunk);
  struct ob_view view = view_of(passes, stream_of(passes, stream), chunk);
  uint64_t state = stream * passes->plan->geometry.chunks + chunk + 1;
  view.header->scale = 0.01f;
  for (size_t k = 0; !shape.one_scale && k < shape.blocks; k++)
    view.scales[k] = 0.01f / (float)(1 + k % 7);
  for (size_t k = 0; k < shape.words; k++) {
    state = state * 6364136223846793005u + 1442695040888963407u; /* Knuth's, TAOCP 3.3.4 */
    view.words[k] = (uint32_t)(state >> 32);
  }
}

static void fill(struct bench_passes *passes, size_t streams) {
  bench_fill(passes->gradient, passes->count, 1);
  bench_fill(passes->parameters, passes->count, 2);
  for (size_t i = 0; i < passes->count; i++) {
    passes->variance[i] = passes->gradient[i] * passes->gradient[i];
    passes->reciprocals[i] = 1 / ob_adam_denominator(passes->variance[i], &bench_factors);
    if (passes->input != passes->gradient)
      ob_store(passes->input, i, passes->work.dtype, passes->gradient[i]);
  }
  for (size_t s = 0; s < streams; s++)
    for (size_t chunk = 0; chunk < passes->plan->geometry.chunks; chunk++)
      fill_message(passes, s, chunk);
}

static float *floats(const struct bench_passes *passes) {
  return ob_allocate(passes->count, sizeof(float));
}

static bool allocate(struct bench_passes *passes, size_t streams) {
  size_t size = ob_dtype_size(passes->work.dtype);
  passes->gradient = floats(passes);
  passes->output = floats(passes);
  passes->parameters = floats(passes);
  passes->reciprocals = floats(passes);
  passes->momentum = floats(passes);
  passes->variance = floats(passes);
  passes->input = size == sizeof(float) ? passes->gradient : ob_allocate(passes->count, size);
  passes->sums = ob_allocate(passes->plan->geometry.layout.blocks, sizeof(double));
  passes->messages =
      ob_allocate(streams * passes->plan->geometry.chunks, passes->plan->geometry.stride);
  return passes->gradient && passes->output && passes->parameters && passes->reciprocals &&
         passes->momentum && passes->variance && passes->input && passes->sums && passes->messages;
}

static onebit_status_t create_plan(const struct bench_options *options,
                                   struct bench_passes *passes) {
  onebit_plan_options_t plan = ONEBIT_PLAN_OPTIONS_INIT;
  plan.dtype = options->dtype;
  plan.scale = options->scale;
  plan.block_size = options->block_size;
  plan.chunk_size = options->chunk_size;
  plan.threads = options->threads;
  onebit_status_t status = onebit_comm_create_self(&passes->comm);
  if (status == ONEBIT_OK)
    status = onebit_plan_create(passes->comm, passes->count, &plan, &passes->plan);
  return status;
}

int bench_passes_create(const struct bench_options *options, size_t count, size_t streams,
                        struct bench_passes *passes) {
  *passes = (struct bench_passes){.count = count, .learning_rate = LEARNING_RATE};
  onebit_status_t status = create_plan(options, passes);
  if (status != ONEBIT_OK)
    return bench_status(status, "onebit_plan_create");
  passes->work = passes->plan->work;
  status = ob_work_create(&passes->work, streams, streams);
  if (status != ONEBIT_OK || !allocate(passes, streams)) {
    bench_complain("no memory for the arrays of %zu elements", count);
    return BENCH_FAILED;
  }
  passes->in_place = passes->plan->worker;
  passes->in_place.values[1] = passes->in_place.values[0];
  passes->in_place.scales[1] = passes->in_place.scales[0];
  fill(passes, streams);
  return BENCH_OK;
}

void bench_passes_destroy(struct bench_passes *passes) {
  float *arrays[] = {passes->output, passes->parameters, passes->reciprocals, passes->momentum,
                     passes->variance};
  ob_work_destroy(&passes->work);
  for (size_t k = 0; k < sizeof arrays / sizeof arrays[0]; k++)
    ob_release(arrays[k]);
  if (passes->input != passes->gradient)
    ob_release(passes->input);
  ob_release(passes->gradient);
  ob_release(passes->sums);
  ob_release(passes->messages);
  onebit_plan_destroy(passes->plan);
  onebit_comm_destroy(passes->comm);
}

size_t bench_most_streams(const struct bench_options *options) {
  size_t most = 1;
  for (size_t k = 0; k < options->stream_count; k++)
    most = options->streams[k] > most ? options->streams[k] : most;
  return most;
}

/* --- Rounds */

#define ROUNDS  15
#define WARMUPS 2

/* A time is of this many elements at least: some milliseconds, as against the clock's fraction of a
 * microsecond. */
#define ELEMENTS_A_TIME ((size_t)4 << 20)

void bench_rounds_add(struct bench_rounds *rounds, const struct bench_pass *pass, size_t streams) {
  rounds->entries[rounds->count++] = (struct bench_entry){pass, streams, NULL};
}

static double time_entry(const struct bench_rounds *rounds, const struct bench_entry *entry,
                         struct bench_passes *passes) {
  double start = bench_now();
  for (size_t k = 0; k < rounds->repeats; k++)
    entry->pass->run(passes, entry->streams);
  return (bench_now() - start) / (double)rounds->repeats;
}

int bench_rounds_run(struct bench_rounds *rounds, const struct bench_options *options,
                     struct bench_passes *passes) {
  bool asked = options->iterations != BENCH_BY_SIZE, warmed = options->warmups != BENCH_BY_SIZE;
  rounds->rounds = asked ? options->iterations : ROUNDS;
  rounds->warmups = warmed ? options->warmups : WARMUPS;
  rounds->repeats = passes->count < ELEMENTS_A_TIME ? ELEMENTS_A_TIME / passes->count : 1;
  double *memory = ob_allocate((rounds->count + 1) * rounds->rounds, sizeof(double));
  if (!memory) {
    bench_complain("no memory for the times of %zu rounds", rounds->rounds);
    return BENCH_FAILED;
  }
  rounds->scratch = memory;
  for (size_t e = 0; e < rounds->count; e++)
    rounds->entries[e].times = memory + (e + 1) * rounds->rounds;
  for (size_t r = 0; r < rounds->warmups + rounds->rounds; r++)
    for (size_t e = 0; e < rounds->count; e++)
      rounds->entries[e].times[r < rounds->warmups ? 0 : r - rounds->warmups] =
          time_entry(rounds, &rounds->entries[e], passes);
  return bench_status(passes->status, "onebit_optimizer_step");
}

void bench_rounds_destroy(struct bench_rounds *rounds) { ob_release(rounds->scratch); }

void bench_print_plan(const struct bench_options *options, const struct bench_passes *passes,
                      const struct bench_rounds *rounds) {
  char block[32] = "the buffer";
  if (!passes->work.one_scale)
    snprintf(block, sizeof block, "%zu elements", passes->plan->geometry.layout.block);
  printf("# codec %s, %zu elements of %s (%zu bytes as float32), one %s scale for %s, %s stores, "
         "%d thread%s, %zu rounds\n",
         passes->work.codec->name, passes->count, bench_dtype_name(passes->work.dtype),
         passes->count * sizeof(float), bench_scale_name(options->scale), block,
         passes->plan->work.stream ? "streaming" : "cached", passes->work.threads,
         passes->work.threads == 1 ? "" : "s", rounds->rounds);
}
