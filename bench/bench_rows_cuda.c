/* The tables of -d cuda. */
#include <math.h>
#include <string.h>

#include "bench/bench_cuda.h"

/* The better of the copies. */
static const struct bench_put *best_copy(const struct bench_turns *turns) {
  const struct bench_put *best = NULL;
  for (const struct bench_put *put = turns->puts; put < turns->puts + turns->count; put++)
    if (put->baseline && (!best || put->time.median < best->time.median))
      best = put;
  return best;
}

/* The median of a ratio of times of the same round; where one has none, the ratio of medians. */
static double ratio(const struct bench_turns *turns, const struct bench_put *a,
                    const struct bench_put *b) {
  if (!a->times || !b->times)
    return a->time.median / b->time.median;
  return bench_ratio(a->times, b->times, turns->rounds, turns->scratch).median;
}

/* Bytes a second, as a share of the better copy's. */
static double of_copy(const struct bench_turns *turns, const struct bench_put *put) {
  const struct bench_put *copy = best_copy(turns);
  return ratio(turns, copy, put) * put->bytes / copy->bytes;
}

/* --- Kernels and steps */

void bench_sheet_head(const struct bench_sheet *sheet, bool dense) {
  const struct bench_turns *turns = sheet->turns;
  if (sheet->options->json)
    return;
  bench_device_print(turns->device, sheet->benchmark);
  printf(
      "# %zu elements (%zu bytes as float32), %zu rounds of %zu launches each, timed by events\n",
      sheet->elements, sheet->elements * sizeof(float), turns->rounds, turns->repeats);
  printf("# GB/s: what it must move. of copy: bytes a second, against the better of the two copies "
         "in the same round, median\n");
  printf("%-28s%8s%12s%12s%12s%14s%11s%10s%9s%s\n", dense ? "# Step" : "# Kernel", "Members",
         "Median(ms)", "Min(ms)", "Max(ms)", "Gelements/s", "B/element", "GB/s", "of copy",
         dense ? "  of dense" : "");
}

static void print_text(const struct bench_sheet *sheet, const struct bench_put *put,
                       const struct bench_put *dense) {
  const struct bench_statistics *time = &put->time;
  printf("%-28s", put->name);
  if (put->members)
    printf("%8zu", put->members);
  else
    printf("%8s", "-");
  printf("%12.4f%12.4f%12.4f%14.3f%11.3f%10.2f%9.3f", 1e3 * time->median, 1e3 * time->minimum,
         1e3 * time->maximum, 1e-9 * (double)sheet->elements / time->median,
         put->bytes / (double)sheet->elements, 1e-9 * put->bytes / time->median,
         of_copy(sheet->turns, put));
  if (dense)
    printf("%10.3f", ratio(sheet->turns, put, dense));
  printf("\n");
}

static void put_counts(const struct bench_counts *counts) {
  bench_json_number(stdout, "kernels", counts->known ? (double)counts->kernels : NAN);
  bench_json_number(stdout, "copies", counts->known ? (double)counts->copies : NAN);
  bench_json_number(stdout, "host_synchronisations",
                    counts->known ? (double)counts->synchronisations : NAN);
}

void bench_json_device(const struct bench_device *device) {
  bench_json_text(stdout, "device", device->properties.name);
  printf(",\"emulated\":%s", BENCH_EMULATED ? "true" : "false");
}

void bench_json_put(const struct bench_turns *turns, const struct bench_put *put) {
  const struct bench_statistics *time = &put->time;
  bench_json_whole(stdout, "rounds", turns->rounds);
  bench_json_whole(stdout, "launches", turns->repeats);
  bench_json_number(stdout, "median_us", 1e6 * time->median);
  bench_json_number(stdout, "minimum_us", 1e6 * time->minimum);
  bench_json_number(stdout, "maximum_us", 1e6 * time->maximum);
  put_counts(&put->counts);
}

static void print_json(const struct bench_sheet *sheet, const struct bench_put *put,
                       const struct bench_put *dense) {
  printf("{\"benchmark\":\"%s\"", sheet->benchmark);
  bench_json_device(sheet->turns->device);
  bench_json_whole(stdout, "bytes", sheet->elements * sizeof(float));
  bench_json_text(stdout, "row", put->name);
  bench_json_number(stdout, "members", put->members ? (double)put->members : NAN);
  bench_json_put(sheet->turns, put);
  bench_json_number(stdout, "gelements", 1e-9 * (double)sheet->elements / put->time.median);
  bench_json_number(stdout, "bytes_per_element", put->bytes / (double)sheet->elements);
  bench_json_number(stdout, "gbs", 1e-9 * put->bytes / put->time.median);
  bench_json_number(stdout, "of_copy", of_copy(sheet->turns, put));
  bench_json_number(stdout, "of_dense", dense ? ratio(sheet->turns, put, dense) : NAN);
  printf("}\n");
}

void bench_sheet_row(const struct bench_sheet *sheet, const struct bench_put *put,
                     const struct bench_put *dense) {
  if (sheet->options->json)
    print_json(sheet, put, dense);
  else
    print_text(sheet, put, dense);
  fflush(stdout);
}

/* --- What is put on a stream */

void bench_counts_head(void) {
  printf("%-28s%10s%10s%14s%14s%12s\n", "# Put on the stream", "Kernels", "Copies", "Host waits",
         "Collectives", "B/element");
}

void bench_counts_row(const struct bench_put *put, double bytes, size_t collectives) {
  if (!put->counts.known)
    return;
  printf("%-28s%10zu%10zu%14zu%14zu%12.2f\n", put->name, put->counts.kernels, put->counts.copies,
         put->counts.synchronisations, collectives, bytes);
}

/* Counted in the source of its compressed backend over NCCL. */
void bench_counts_deepspeed(void) {
  printf("%-28s%10s%10s%14s%14s%12s\n", "DeepSpeed's 1-bit allreduce", "35", "-", "2", "4", "~180");
}
