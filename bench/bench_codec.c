/* onebit-bench codec: the passes of each codec on one core, beside what memory allows. */
#define _DEFAULT_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/bench_passes.h"

static void print_head(const struct bench_options *options, const struct bench_passes *passes,
                       const struct bench_rounds *rounds) {
  bench_print_plan(options, passes, rounds);
  printf("%-22s%8s%12s%10s%12s%10s%10s", "# Pass", "Streams", "Median(ms)", "GB/s", "Gelements/s",
         "of triad", "of memcpy");
  if (options->full)
    printf("%10s%10s%12s%12s", "Min(ms)", "Max(ms)", "Min/triad", "Max/triad");
  printf("\n");
}

static void print_streams(size_t streams) {
  if (streams)
    printf("%8zu", streams);
  else
    printf("%8s", "-");
}

/* Bytes a second relative to a baseline's: of the times of the same round. */
static struct bench_statistics relative(const struct bench_rounds *rounds,
                                        const struct bench_passes *passes,
                                        const struct bench_entry *base,
                                        const struct bench_entry *entry) {
  double bytes = bench_pass_bytes(passes, entry) / bench_pass_bytes(passes, base);
  struct bench_statistics s =
      bench_ratio(base->times, entry->times, rounds->rounds, rounds->scratch);
  return (struct bench_statistics){.minimum = s.minimum * bytes,
                                   .median = s.median * bytes,
                                   .mean = s.mean * bytes,
                                   .percentile90 = s.percentile90 * bytes,
                                   .percentile99 = s.percentile99 * bytes,
                                   .maximum = s.maximum * bytes};
}

static void print_entry(const struct bench_rounds *rounds, const struct bench_passes *passes,
                        const struct bench_entry *entry, bool full) {
  const struct bench_entry *triad = &rounds->entries[0], *copy = &rounds->entries[1];
  struct bench_statistics of_triad = relative(rounds, passes, triad, entry);
  struct bench_statistics of_copy = relative(rounds, passes, copy, entry);
  memcpy(rounds->scratch, entry->times, rounds->rounds * sizeof *entry->times);
  struct bench_statistics time = bench_statistics(rounds->scratch, rounds->rounds);
  printf("%-22s", entry->pass->name);
  print_streams(entry->streams);
  printf("%12.3f%10.2f%12.3f%10.3f%10.3f", 1e3 * time.median,
         1e-9 * bench_pass_bytes(passes, entry) / time.median,
         1e-9 * (double)passes->count / time.median, of_triad.median, of_copy.median);
  if (full)
    printf("%10.3f%10.3f%12.3f%12.3f", 1e3 * time.minimum, 1e3 * time.maximum, of_triad.minimum,
           of_triad.maximum);
  printf("\n");
}

/* The baselines are the first two. The third shows what a pass like compress can reach, which
 * writes what it keeps to a second array: not all of the first. */
static void add_entries(struct bench_rounds *rounds, const struct bench_options *options,
                        const struct bench_passes *passes) {
  bench_rounds_add(rounds, &bench_triad, 0);
  bench_rounds_add(rounds, &bench_memcpy, 0);
  bench_rounds_add(rounds, &bench_triad_apart, 0);
  bench_rounds_add(rounds, &bench_compress, 0);
  bench_rounds_add(rounds, &bench_compress_momentum, 0);
  for (size_t k = 0; k < options->stream_count; k++)
    bench_rounds_add(rounds, &bench_reduce, options->streams[k]);
  bench_rounds_add(rounds, &bench_store, 0);
  bench_rounds_add(rounds, &bench_apply, 0);
  bench_rounds_add(rounds, &bench_adam, 0);
  /* What the library could do instead. */
  bench_rounds_add(
      rounds, passes->plan->work.stream ? &bench_compress_cached : &bench_compress_streaming, 0);
  bench_rounds_add(rounds, &bench_compress_in_place, 0);
}

static int run_one(const struct bench_options *options, struct bench_passes *passes) {
  struct bench_rounds rounds = {.count = 0};
  add_entries(&rounds, options, passes);
  int status = bench_rounds_run(&rounds, options, passes);
  if (status == BENCH_OK) {
    print_head(options, passes, &rounds);
    for (size_t e = 0; e < rounds.count; e++)
      print_entry(&rounds, passes, &rounds.entries[e], options->full);
    fflush(stdout);
  }
  bench_rounds_destroy(&rounds);
  return status;
}

/* All codecs that can run here, or the one that was asked for, on the same memory. */
static int run_size(const struct bench_options *options, size_t bytes) {
  struct bench_passes passes;
  int status =
      bench_passes_create(options, bytes / sizeof(float), bench_most_streams(options), &passes);
  const struct ob_codec *codec;
  for (size_t k = 0; status == BENCH_OK && (codec = ob_codec_row(k)) != NULL; k++)
    if (ob_codec_usable(codec) && (!options->codec || strcmp(codec->name, options->codec) == 0)) {
      passes.work.codec = codec;
      status = run_one(options, &passes);
    }
  bench_passes_destroy(&passes);
  return status;
}

int bench_run_codec(const struct bench_benchmark *benchmark, const struct bench_options *options,
                    struct bench_team *team) {
  (void)team;
  struct bench_options one_core = *options;
  one_core.threads = 1;
  int status = BENCH_OK;
  printf("# onebit-bench %s, version %s: one core; the triad loop uses %s\n", benchmark->name,
         onebit_version(), bench_triad_width());
  printf("# GB/s: what the pass must move. of triad, of memcpy: bytes a second, against the "
         "baseline of the same round, median\n");
  for (size_t bytes = options->smallest; status == BENCH_OK && bytes <= options->largest;
       bytes *= 2)
    status = run_size(&one_core, bytes);
  return status;
}
