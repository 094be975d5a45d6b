/*
 * onebit-bench codec: prints a row for each pass over memory, with the bytes that the pass must
 * move, and its speed relative to the triad loop and to a plain loop with the same reads and
 * writes. On a device the passes are kernels, and their speed is relative to a copy in device
 * memory.
 */
#include "bench/bench_passes.h"

#include <math.h>
#include <string.h>

/* --- Notes */

void bench_passes_print_notes(const struct bench_passes *passes, const struct bench_rounds *rounds,
                              const char *about, const char *columns) {
  struct bench_job *job = passes->job;
  const struct ob_work *work = &passes->work;
  size_t bytes = passes->count * sizeof(float);
  char block[32] = "the buffer";
  if (BENCH_HAS_DEVICE(job)) {
    bench_device_print_notes(job);
    bench_print_note(job->table,
                     "%zu elements (%zu bytes as float32), %zu rounds of %zu launches each, "
                     "timed by events\n# %s",
                     passes->count, bytes, rounds->rounds, rounds->repeats, columns);
    return;
  }
  if (job->first)
    bench_print_note(job->table, "onebit-bench %s, version %s: %s %s\n# %s", job->benchmark->name,
                     onebit_version(), about, bench_triad_width(), columns);
  job->first = false;
  if (!work->one_scale)
    snprintf(block, sizeof block, "%zu elements", passes->plan->geometry.layout.block);
  bench_print_note(
      job->table,
      "codec %s, %zu elements of %s (%zu bytes as float32), one %s scale for %s, %s stores, "
      "%zu rounds",
      work->codec->name, passes->count, bench_dtypes[work->dtype], bytes,
      bench_scales[job->options->scale], block,
      passes->plan->state->work.stream ? "streaming" : "cached", rounds->rounds);
}

/* --- Rows */

struct row {
  const struct bench_passes *passes;
  const struct bench_rounds *rounds;
  const struct bench_entry *entry;
};

/* Puts the ratio of the row's bytes per second to another entry's in the same round: the median
 * over all rounds. */
static void put_ratio(struct bench_table *table, const struct row *row, const char *name,
                      const struct bench_entry *other) {
  const struct bench_entry *own = row->entry;
  const bool spread = row->passes->job->options->full;
  struct bench_statistics ratio = {.median = NAN, .minimum = NAN, .maximum = NAN};
  const double factor = own->bytes / other->bytes;
  char keys[3][40], head[40];
  static const char *const ends[] = {"", "_minimum", "_maximum"};
  for (int k = 0; k < 3; k++)
    snprintf(keys[k], sizeof keys[k], "of_%s%s", name, ends[k]);
  snprintf(head, sizeof head, "of %s", name);
  if (other->times && own->times)
    ratio = bench_ratio(other->times, own->times, row->rounds->rounds, row->rounds->scratch);
  bench_put_number(table, keys[0], head, 11, 3, factor * ratio.median);
  bench_put_number(table, keys[1], spread ? "Min" : NULL, 9, 3, factor * ratio.minimum);
  bench_put_number(table, keys[2], spread ? "Max" : NULL, 9, 3, factor * ratio.maximum);
}

/* Puts the ratio of the row's speed to that of the plain loop with the same reads and writes. If
 * the plan writes residuals in place, the loop is one that works in place. */
static void put_loop(struct bench_table *table, const struct row *row) {
  const struct bench_entry none = {.time = {.median = NAN}}, *loop = &none;
  const struct bench_rounds *rounds = row->rounds;
  const struct bench_pass *like = row->entry->pass->like;
  if (row->passes->plan->state->worker.changed)
    like = like == &bench_triad_apart   ? &bench_triad
           : like == &bench_scale_apart ? &bench_scale
                                        : like;
  for (size_t k = 0; like && k < rounds->count; k++)
    if (rounds->entries[k].pass == like)
      loop = &rounds->entries[k];
  put_ratio(table, row, "loop", loop);
}

static void sheet_fields(struct bench_table *table, const void *context) {
  const struct row *row = context;
  const struct bench_passes *passes = row->passes;
  const struct bench_entry *entry = row->entry, *copy = row->rounds->entries;
  const double elements = (double)passes->count, seconds = entry->time.median;
  const bool device = passes->job->device != NULL;
  if (!device)
    bench_put_text(table, "codec", NULL, 0, passes->work.codec->name);
  bench_put_number(table, "bytes", NULL, 0, 0, elements * sizeof(float));
  bench_put_text(table, "row", "Pass", -30, entry->name);
  bench_put_number(table, "members", "Streams", 8, 0,
                   entry->streams ? (double)entry->streams : NAN);
  bench_put_number(table, "rounds", NULL, 0, 0, (double)row->rounds->rounds);
  bench_put_number(table, "launches", NULL, 0, 0, (double)row->rounds->repeats);
  bench_put_time(table, "median_us", "Median(ms)", 12, 4, seconds);
  bench_put_time(table, "minimum_us", "Min(ms)", 12, 4, entry->time.minimum);
  bench_put_time(table, "maximum_us", "Max(ms)", 12, 4, entry->time.maximum);
  bench_put_number(table, "gelements_per_s", "Gelements/s", 13, 3, 1e-9 * elements / seconds);
  bench_put_number(table, "bytes_per_element", "B/element", 11, 2, entry->bytes / elements);
  bench_put_number(table, "gbs", "GB/s", 10, 2, 1e-9 * entry->bytes / seconds);
  put_ratio(table, row, device ? "copy" : copy->name, copy);
  if (!device)
    put_loop(table, row);
}

/* --- Measuring */

static void add_pass(struct bench_rounds *rounds, const struct bench_pass *pass, size_t streams,
                     struct bench_passes *passes) {
  struct bench_entry *entry = bench_rounds_add_entry(rounds, pass->name, pass->run, passes);
  entry->pass = pass;
  entry->streams = streams;
}

/* Adds the passes of the list. With several bits, leaves out the device's kernels that support only
 * messages of one bit. */
static void add_passes(struct bench_rounds *rounds, const struct bench_list *list,
                       struct bench_passes *passes) {
  const struct bench_options *options = passes->job->options;
  for (const struct bench_pass *const *pass = list->passes; *pass; pass++) {
    if (BENCH_HAS_DEVICE(passes->job) && options->bits > 1 &&
        ((*pass)->momentum || (*pass)->frozen))
      continue;
    for (size_t k = 0; k < ((*pass)->streams ? options->stream_count : 1); k++)
      add_pass(rounds, *pass, (*pass)->streams ? options->streams[k] : 0, passes);
  }
}

static int measure_list(struct bench_job *job, struct bench_passes *passes,
                        const struct bench_list *list) {
  struct bench_rounds rounds = {0};
  struct row row = {passes, &rounds, rounds.entries};
  snprintf(job->progress.what, sizeof job->progress.what, "%s of %zu bytes", job->benchmark->name,
           passes->count * sizeof(float));
  add_passes(&rounds, list, passes);
  bench_rounds_prepare(&rounds, passes);
  bench_passes_print_notes(
      passes, &rounds, "one core; the triad loop uses",
      BENCH_HAS_DEVICE(job)
          ? "GB/s: what it must move. of copy: bytes a second, against "
            "cudaMemcpyAsync in the same round, median"
          : "GB/s: what the pass must move. of triad, of loop: bytes a second, "
            "against the triad loop of the same round, and against a plain loop that "
            "reads and writes likewise, median");
  bench_print_heads(job->table, sheet_fields, &row);
  int status = bench_rounds_measure(&rounds);
  for (size_t k = 0; status == BENCH_OK && k < rounds.count; k++) {
    row.entry = &rounds.entries[k];
    bench_print_row(job->table, sheet_fields, &row);
  }
  bench_rounds_destroy(&rounds);
  return status;
}

/* The plain loops and the passes of the codec. The loops show how fast memory allows passes to be,
 * with a second array for residuals and in place. */
static const struct bench_list codec_list = {{&bench_triad, &bench_triad_apart, &bench_scale,
                                              &bench_scale_apart, &bench_write, &bench_compress,
                                              &bench_compress_momentum, &bench_compress_in_place,
                                              &bench_reduce, &bench_store, &bench_apply}};

/* Measures the requested codec, or all codecs that this machine can run, on the same arrays. */
static int measure_codecs(struct bench_job *job, struct bench_passes *passes) {
  const struct ob_codec *codec;
  for (size_t k = 0; (codec = ob_codec_row(k)) != NULL; k++)
    if (ob_codec_usable(codec) &&
        (!job->options->codec || strcmp(codec->name, job->options->codec) == 0)) {
      passes->work.codec = codec;
      BENCH_TRY(measure_list(job, passes, &codec_list));
    }
  return BENCH_OK;
}

/* Measures the device's kernels. Those of optimizers support only messages of one bit. */
static int measure_kernels(struct bench_job *job, struct bench_passes *passes) {
  BENCH_TRY(measure_list(job, passes, &bench_codec_kernels));
  if (job->options->bits > 1)
    return BENCH_OK;
  BENCH_TRY(bench_kernels_extend(passes));
  return measure_list(job, passes, &bench_optimizer_kernels);
}

static int measure_size(struct bench_job *job, size_t bytes, void *context) {
  bench_measure_passes *const *measure = context;
  struct bench_passes passes;
  size_t most = 2, count = bytes / sizeof(float);
  for (size_t k = 0; k < job->options->stream_count; k++)
    most = job->options->streams[k] > most ? job->options->streams[k] : most;
  int status = BENCH_HAS_DEVICE(job) ? bench_kernels_create(job, count, most, &passes)
                                     : bench_passes_create(job, count, most, &passes);
  if (status == BENCH_OK)
    status = (*measure)(job, &passes);
  if (BENCH_HAS_DEVICE(job))
    bench_kernels_destroy(passes.kernels);
  bench_passes_destroy(&passes);
  return status;
}

int bench_measure_on_one_core(struct bench_job *job, bench_measure_passes *measure) {
  struct bench_options one_core = *job->options;
  one_core.threads = 1;
  job->options = &one_core;
  return bench_measure_sizes(job, measure_size, &measure);
}

int bench_run_codec(struct bench_job *job) {
  return bench_measure_on_one_core(job, BENCH_HAS_DEVICE(job) ? measure_kernels : measure_codecs);
}
