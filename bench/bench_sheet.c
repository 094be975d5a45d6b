/* Prints passes over memory, and steps made of them, as rows. */
#include "bench/bench_passes.h"

#include <math.h>
#include <string.h>

/* Checks the bits: on a device, optimizers have messages of one bit. */
static int check_width(const struct bench_sheet *sheet) {
  const int bits = sheet->job->options->bits;
  if (!BENCH_HAS_DEVICE(sheet->job) || bits <= 1 || sheet->list == &bench_codec_kernels)
    return BENCH_OK;
  fprintf(stderr, "onebit-bench: bits is %d: on a device optimizers have one bit\n", bits);
  return BENCH_USAGE;
}

static bool is_of_one_bit(const struct bench_sheet *sheet, const struct bench_pass *pass) {
  return BENCH_HAS_DEVICE(sheet->job) && sheet->job->options->bits > 1 &&
         (pass->momentum || pass->frozen);
}

/* Adds the list's passes. */
static int sheet_add_all(struct bench_sheet *sheet) {
  struct bench_rounds *rounds = &sheet->rounds;
  const struct bench_options *options = sheet->job->options;
  BENCH_TRY(check_width(sheet));
  for (const struct bench_pass *const *pass = sheet->list->passes; *pass; pass++) {
    if (is_of_one_bit(sheet, *pass))
      continue;
    if ((*pass)->streams && !sheet->reduce)
      sheet->reduce = rounds->count;
    for (size_t k = 0; k < ((*pass)->streams ? options->stream_count : 1); k++)
      bench_rounds_add(rounds, *pass, (*pass)->streams ? options->streams[k] : 0);
  }
  if (!sheet->reduce)
    sheet->reduce = rounds->count;
  return BENCH_OK;
}

/* Sets the bytes of a whole step: its parts, and the reduction of one rank's message. */
static void set_bytes_of_step(struct bench_sheet *sheet) {
  struct bench_entry *entries = sheet->rounds.entries, *reduce = &entries[sheet->reduce];
  size_t part = sheet->reduce - sheet->list->parts;
  double bytes = reduce->pass ? bench_pass_bytes(sheet->passes, reduce->pass, 1) : 0;
  for (size_t k = part; k < sheet->reduce; k++)
    bytes += entries[k].bytes;
  for (size_t k = 0; k < part; k++)
    if (entries[k].pass->whole_step)
      entries[k].bytes = bytes;
}

int bench_sheet_create(struct bench_job *job, struct bench_passes *passes,
                       const struct bench_list *list, struct bench_sheet *sheet) {
  *sheet = (struct bench_sheet){.job = job, .passes = passes, .list = list};
  sheet->rounds.progress = &job->progress;
  snprintf(job->progress.what, sizeof job->progress.what, "%s of %zu bytes",
           list->name ? list->name : job->benchmark->name, passes->count * sizeof(float));
  if (BENCH_HAS_DEVICE(job)) {
    sheet->rounds.space = &bench_space_cuda;
    sheet->rounds.device = job->device;
    sheet->rounds.repeats = BENCH_LAUNCHES;
  }
  BENCH_TRY(sheet_add_all(sheet));
  bench_rounds_prepare(&sheet->rounds, job->options, passes);
  set_bytes_of_step(sheet);
  sheet->sums = ob_allocate(sheet->rounds.rounds, sizeof *sheet->sums);
  return sheet->sums ? BENCH_OK : bench_no_memory("sums", sheet->rounds.rounds);
}

void bench_sheet_destroy(struct bench_sheet *sheet) {
  ob_release(sheet->sums);
  bench_rounds_destroy(&sheet->rounds);
}

/* --- Notes */

void bench_sheet_notes(const struct bench_sheet *sheet, const char *about, const char *columns) {
  struct bench_job *job = sheet->job;
  const struct bench_passes *passes = sheet->passes;
  const struct ob_work *work = &passes->work;
  size_t bytes = passes->count * sizeof(float), rounds = sheet->rounds.rounds;
  char block[32] = "the buffer";
  if (BENCH_HAS_DEVICE(job)) {
    bench_device_note(job);
    bench_note(job->table,
               "%zu elements (%zu bytes as float32), %zu rounds of %zu launches each, "
               "timed by events\n# GB/s: what it must move. of copy: bytes a second, "
               "against cudaMemcpyAsync in the same round, median",
               passes->count, bytes, rounds, sheet->rounds.repeats);
    return;
  }
  if (job->first)
    bench_note(job->table, "onebit-bench %s, version %s: %s\n# %s", job->benchmark->name,
               onebit_version(), about, columns);
  job->first = false;
  if (!work->one_scale)
    snprintf(block, sizeof block, "%zu elements", passes->plan->geometry.layout.block);
  bench_note(job->table,
             "codec %s, %zu elements of %s (%zu bytes as float32), one %s scale for %s, %s stores, "
             "%d thread%s, %zu rounds",
             work->codec->name, passes->count, bench_dtypes[work->dtype], bytes,
             bench_scales[job->options->scale], block,
             passes->plan->state->work.stream ? "streaming" : "cached", work->threads,
             work->threads == 1 ? "" : "s", rounds);
}

/* --- Rows */

struct row {
  const struct bench_sheet *sheet;
  const struct bench_entry *entry;
};

/* The quicker one of some entries. */
static const struct bench_entry *sheet_best_of(const struct bench_sheet *sheet, size_t first,
                                               size_t count) {
  const struct bench_entry *best = &sheet->rounds.entries[first];
  for (size_t k = first; k < first + count; k++)
    if (sheet->rounds.entries[k].time.median < best->time.median)
      best = &sheet->rounds.entries[k];
  return best;
}

const struct bench_entry *bench_sheet_dense(const struct bench_sheet *sheet) {
  return sheet_best_of(sheet, sheet->list->copy, sheet->list->dense);
}

/* Puts the ratio a / b: the median over rounds, or where one has no rounds the ratio of medians. */
static void put_ratio(struct bench_table *table, const struct bench_sheet *sheet, const char *name,
                      const struct bench_entry *a, const struct bench_entry *b, double factor) {
  const struct bench_rounds *rounds = &sheet->rounds;
  bool spread = sheet->job->options->full || sheet->list->name;
  struct bench_statistics ratio = {
      .median = a->time.median / b->time.median, .minimum = NAN, .maximum = NAN};
  char keys[3][40], head[40];
  static const char *const ends[] = {"", "_minimum", "_maximum"};
  for (int k = 0; k < 3; k++)
    snprintf(keys[k], sizeof keys[k], "of_%s%s", name, ends[k]);
  snprintf(head, sizeof head, "of %s", name);
  if (a->times && b->times)
    ratio = bench_ratio(a->times, b->times, rounds->rounds, rounds->scratch);
  bench_number(table, keys[0], head, 11, 3, factor * ratio.median);
  bench_number(table, keys[1], spread ? "Min" : NULL, 9, 3, factor * ratio.minimum);
  bench_number(table, keys[2], spread ? "Max" : NULL, 9, 3, factor * ratio.maximum);
}

/* Puts the ratio to a plain loop with the same traffic; passes that write residuals in place have
 * that of the triad. */
static void put_loop(struct bench_table *table, const struct bench_sheet *sheet,
                     const struct bench_entry *own) {
  const struct bench_entry none = {.time = {.median = NAN}}, *loop = &none;
  const struct bench_pass *like = own->pass->like;
  if (sheet->passes->plan->state->worker.changed)
    like = like == &bench_triad_apart   ? &bench_triad
           : like == &bench_scale_apart ? &bench_scale
                                        : like;
  for (size_t k = 0; like && k < sheet->rounds.count; k++)
    if (sheet->rounds.entries[k].pass == like)
      loop = &sheet->rounds.entries[k];
  put_ratio(table, sheet, "loop", loop, own, own->bytes / loop->bytes);
}

static void put_comparisons(struct bench_table *table, const struct row *row) {
  const struct bench_sheet *sheet = row->sheet;
  const struct bench_entry *own = row->entry, *copy = sheet->rounds.entries;
  bool device = sheet->job->device != NULL;
  if (sheet->list->copy)
    put_ratio(table, sheet, device ? "copy" : copy->name, copy, own, own->bytes / copy->bytes);
  if (sheet->list->copy && !device)
    put_loop(table, sheet, own);
  if (sheet->list->dense)
    put_ratio(table, sheet, "dense", own, bench_sheet_dense(sheet), 1);
  else if (device)
    bench_number(table, "of_dense", NULL, 0, 0, NAN);
}

static void sheet_fields(struct bench_table *table, const void *context) {
  const struct row *row = context;
  const struct bench_sheet *sheet = row->sheet;
  const struct bench_entry *entry = row->entry;
  double elements = (double)sheet->passes->count, seconds = entry->time.median;
  if (!sheet->job->device)
    bench_text(table, "codec", NULL, 0, sheet->passes->work.codec->name);
  bench_number(table, "bytes", NULL, 0, 0, elements * sizeof(float));
  if (sheet->list->name)
    bench_text(table, "step", NULL, 0, sheet->list->name);
  bench_text(table, "row", "Pass", -30, entry->name);
  bench_number(table, "members", "Streams", 8, 0, entry->streams ? (double)entry->streams : NAN);
  bench_number(table, "rounds", NULL, 0, 0, (double)sheet->rounds.rounds);
  bench_number(table, "launches", NULL, 0, 0, (double)sheet->rounds.repeats);
  bench_time(table, "median_us", "Median(ms)", 12, 4, seconds);
  bench_time(table, "minimum_us", "Min(ms)", 12, 4, entry->time.minimum);
  bench_time(table, "maximum_us", "Max(ms)", 12, 4, entry->time.maximum);
  bench_number(table, "gelements_per_s", "Gelements/s", 13, 3, 1e-9 * elements / seconds);
  bench_number(table, "bytes_per_element", "B/element", 11, 2, entry->bytes / elements);
  bench_number(table, "gbs", "GB/s", 10, 2, 1e-9 * entry->bytes / seconds);
  put_comparisons(table, row);
}

void bench_sheet_heads(const struct bench_sheet *sheet) {
  bench_print_heads(sheet->job->table, sheet_fields, &(struct row){sheet, sheet->rounds.entries});
}

void bench_sheet_row(const struct bench_sheet *sheet, const struct bench_entry *entry) {
  bench_print_row(sheet->job->table, sheet_fields, &(struct row){sheet, entry});
}

void bench_sheet_sum(const struct bench_sheet *sheet, const char *name,
                     const struct bench_entry *reduce) {
  const struct bench_rounds *rounds = &sheet->rounds;
  double share = reduce ? 1 / (double)reduce->streams : 0;
  struct bench_entry sum = {.streams = reduce ? reduce->streams : 0, .times = sheet->sums};
  snprintf(sum.name, sizeof sum.name, "%s", name);
  sum.bytes = reduce ? share * reduce->bytes : 0;
  for (size_t r = 0; r < rounds->rounds; r++)
    sheet->sums[r] = reduce ? share * reduce->times[r] : 0;
  for (size_t k = sheet->reduce - sheet->list->parts; k < sheet->reduce; k++) {
    sum.bytes += rounds->entries[k].bytes;
    for (size_t r = 0; r < rounds->rounds; r++)
      sheet->sums[r] += rounds->entries[k].times[r];
  }
  memcpy(rounds->scratch, sheet->sums, rounds->rounds * sizeof *sheet->sums);
  sum.time = bench_statistics(rounds->scratch, rounds->rounds);
  bench_sheet_row(sheet, &sum);
}
