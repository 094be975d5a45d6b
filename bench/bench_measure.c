/* Computes statistics, generates numbers, and times entries by turns. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/process.h"
#include "bench/bench.h"
#include "compression/numerics.h"

static int compare_samples(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

struct bench_statistics bench_statistics(double *samples, size_t count) {
  double sum = 0;
  qsort(samples, count, sizeof *samples, compare_samples);
  for (size_t i = 0; i < count; i++)
    sum += samples[i];
  return (struct bench_statistics){
      .minimum = samples[0],
      .median = (samples[(count - 1) / 2] + samples[count / 2]) / 2,
      .mean = sum / (double)count,
      .percentile90 = samples[(count - 1) * 9 / 10],
      .percentile99 = samples[(count - 1) * 99 / 100],
      .maximum = samples[count - 1],
  };
}

struct bench_statistics bench_ratio(const double *a, const double *b, size_t count,
                                    double *scratch) {
  for (size_t i = 0; i < count; i++)
    scratch[i] = a[i] / b[i];
  return bench_statistics(scratch, count);
}

/* Returns random bits by SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). */
static uint64_t random_bits(uint64_t *state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

/* Returns a number that is nearly normally distributed, with variance 1. It is a scaled sum of four
 * 16-bit numbers; the sum's variance is 4 * 2^32 / 12. */
static float random_normal(uint64_t *state) {
  uint64_t bits = random_bits(state);
  int32_t sum = 0;
  for (int k = 0; k < 4; k++)
    sum += (int32_t)(bits >> 16 * k & 0xffff) - 0x8000;
  return ((float)sum + 0.5f) * (float)(1 / 37837.0);
}

/* The number of consecutive elements that have the same magnitude. The magnitude changes, as it
 * does between the layers of a real gradient. The number is a prime, so that regions do not end
 * where blocks end. */
#define REGION 3011

void bench_fill_values(float *values, size_t count, uint64_t seed) {
  uint64_t state = seed * 0x2545f4914f6cdd1du + 1;
  for (size_t first = 0; first < count; first += REGION) {
    float magnitude = exp2f(-6 - (float)(random_bits(&state) % 8));
    size_t end = count - first < REGION ? count : first + REGION;
    for (size_t i = first; i < end; i++)
      values[i] = magnitude * random_normal(&state);
  }
}

/* Repeats a multiplication and an addition on 1024 elements, which stay in the first-level
 * cache. */
void bench_compute_units(size_t units) {
  enum { ROW = 1024, PASSES = 8 };
  float row[ROW];
  for (int i = 0; i < ROW; i++)
    row[i] = (float)i;
  for (size_t k = 0; k < units * PASSES; k++)
    for (int i = 0; i < ROW; i++)
      row[i] = row[i] * 0.999f + 0.001f;
  __asm__ volatile("" : : "r"(row) : "memory"); /* keeps the compiler from removing the loop */
}

int bench_check_status(onebit_status_t status, const char *what) {
  if (status == ONEBIT_OK)
    return BENCH_OK;
  bench_print_error("%s: %s: %s", what, onebit_status_string(status), onebit_last_error());
  return status == ONEBIT_ERROR_ARGUMENT ? BENCH_USAGE : BENCH_FAILED;
}

int bench_report_no_memory(const char *what, size_t count) {
  bench_print_error("out of memory for %zu %s", count, what);
  return BENCH_FAILED;
}

double bench_link_sent(const char *interface) {
  char path[128];
  double bytes = NAN;
  snprintf(path, sizeof path, "/sys/class/net/%.60s/statistics/tx_bytes", interface);
  FILE *file = strchr(interface, '/') ? NULL : fopen(path, "r");
  if (file && fscanf(file, "%lf", &bytes) != 1)
    bytes = NAN;
  if (file)
    fclose(file);
  return bytes;
}

bool bench_team_agree(struct bench_team *team, bool well) {
  double worst = well ? 0 : 1;
  team->kind->combine(team, &worst, 1, false);
  return worst == 0;
}

/* --- Memory and clock of the host */

static int start_clock(struct bench_device *device, double *seconds) {
  (void)device;
  *seconds = ob_seconds();
  return BENCH_OK;
}

static int stop_clock(struct bench_device *device, double *seconds) {
  (void)device;
  *seconds = ob_seconds() - *seconds;
  return BENCH_OK;
}

const struct bench_space bench_space_host = {&ob_memory_host, start_clock, stop_clock};

int bench_space_fill(const struct bench_space *space, void *to, size_t count, onebit_dtype_t dtype,
                     uint64_t seed) {
  float *values = ob_allocate(count, sizeof *values);
  if (!values)
    return bench_report_no_memory("numbers", count);
  bench_fill_values(values, count, seed);
  /* Converts in place. Elements of `dtype` are shorter, so they never overwrite values that are
   * still to be read. */
  for (size_t i = 0; dtype != ONEBIT_FLOAT32 && i < count; i++)
    ob_store(values, i, dtype, values[i]);
  onebit_status_t status = space->memory->copy(to, values, count * ob_dtype_size(dtype));
  ob_release(values);
  return bench_check_status(status, "copying numbers");
}

/* --- Progress */

/* Seconds between progress lines: TERMINAL_SECONDS on a terminal. Otherwise the first line is due
 * after FIRST_SECONDS, and then the interval doubles up to MAX_SECONDS. */
#define TERMINAL_SECONDS 0.5
#define FIRST_SECONDS    5
#define MAX_SECONDS      60

static void progress_print(const struct bench_progress *progress, const char *entry, double part,
                           double seconds) {
  fprintf(stderr, "%sonebit-bench: %s: %s", progress->terminal ? "\r\033[K" : "", progress->what,
          entry);
  if (part > 0)
    fprintf(stderr, ", %.0f %%, %.0f s left", 100 * part, seconds * (1 - part) / part);
  fputs(progress->terminal ? "" : "\n", stderr);
  fflush(stderr);
}

void bench_progress_show(struct bench_progress *progress, const char *entry, double part,
                         double seconds) {
  if (!progress || !progress->open)
    return;
  double since = ob_seconds() - progress->start;
  if (progress->next <= 0)
    progress->next = progress->terminal ? TERMINAL_SECONDS : FIRST_SECONDS;
  if (since < progress->next)
    return;
  progress_print(progress, entry, part, seconds);
  progress->shown = true;
  progress->next = since + (progress->terminal ? TERMINAL_SECONDS : fmin(since, MAX_SECONDS));
}

void bench_progress_clear(struct bench_progress *progress) {
  if (progress && progress->shown && progress->terminal)
    fputs("\r\033[K", stderr);
  if (progress)
    progress->shown = false;
}

/* --- Rounds */

struct bench_entry *bench_rounds_add_entry(struct bench_rounds *rounds, const char *name,
                                           bench_timed *run, void *context) {
  struct bench_entry *entry = &rounds->entries[rounds->count++];
  *entry = (struct bench_entry){.run = run, .context = context};
  snprintf(entry->name, sizeof entry->name, "%s", name);
  return entry;
}

/* Returns the number of bytes that this host's interface has sent. The barrier separates the
 * messages of two measurements: when it ends, all messages of the earlier one have left (only
 * acknowledgements may follow), and none of the later one has. */
static double read_link_bytes(const struct bench_rounds *rounds) {
  if (!rounds->link)
    return 0;
  rounds->team->kind->barrier(rounds->team);
  return bench_link_sent(rounds->link);
}

static int time_entry(const struct bench_rounds *rounds, struct bench_entry *entry,
                      double *seconds) {
  struct bench_team *team = rounds->team;
  const struct bench_space *space =
      rounds->space && !entry->waits ? rounds->space : &bench_space_host;
  uint64_t sent = team ? onebit_comm_bytes_sent(team->comm) : 0;
  double link = read_link_bytes(rounds);
  if (team)
    team->kind->barrier(team);
  BENCH_TRY(space->start(rounds->device, seconds));
  for (size_t k = 0; k < rounds->repeats; k++)
    BENCH_TRY(entry->run(entry));
  BENCH_TRY(space->stop(rounds->device, seconds));
  *seconds /= (double)rounds->repeats;
  entry->link_bytes += read_link_bytes(rounds) - link;
  entry->wire_bytes += team ? (double)(onebit_comm_bytes_sent(team->comm) - sent) : 0;
  return BENCH_OK;
}

/* Shuffles the order of the entries, in the same way on all ranks. In a fixed order, an entry would
 * always run after the same other entry, and find its network buffers and cached memory. */
static void rounds_shuffle(size_t *order, size_t count, uint64_t *state) {
  for (size_t k = count; k > 1; k--) {
    *state = *state * 6364136223846793005u + 1442695040888963407u; /* Knuth's MMIX generator */
    size_t other = (size_t)(*state >> 33) % k, residual = order[k - 1];
    order[k - 1] = order[other];
    order[other] = residual;
  }
}

/* Times the entries. If a call fails, it fails on all ranks, so all ranks return here. */
static int time_entries(struct bench_rounds *rounds) {
  size_t order[BENCH_ENTRIES];
  uint64_t state = 1;
  size_t all = rounds->warmups + rounds->rounds;
  double start = ob_seconds();
  for (size_t k = 0; k < rounds->count; k++)
    order[k] = k;
  for (size_t r = 0; r < all; r++) {
    rounds_shuffle(order, rounds->count, &state);
    for (size_t k = 0; k < rounds->count; k++) {
      struct bench_entry *entry = &rounds->entries[order[k]];
      bench_progress_show(rounds->progress, entry->name,
                          (double)(r * rounds->count + k) / (double)(all * rounds->count),
                          ob_seconds() - start);
      if (entry->run)
        BENCH_TRY(time_entry(rounds, entry,
                             &entry->times[r < rounds->warmups ? 0 : r - rounds->warmups]));
    }
  }
  bench_progress_clear(rounds->progress);
  return BENCH_OK;
}

static void compute_statistics(const struct bench_rounds *rounds, struct bench_entry *entry) {
  double *bytes[] = {&entry->wire_bytes, &entry->link_bytes};
  for (int k = 0; k < 2; k++) {
    *bytes[k] /= (double)((rounds->warmups + rounds->rounds) * rounds->repeats);
    if (rounds->team)
      rounds->team->kind->combine(rounds->team, bytes[k], 1, false);
  }
  if (rounds->team)
    rounds->team->kind->combine(rounds->team, entry->times, rounds->rounds, false);
  memcpy(rounds->scratch, entry->times, rounds->rounds * sizeof *entry->times);
  entry->time = bench_statistics(rounds->scratch, rounds->rounds);
}

int bench_rounds_measure(struct bench_rounds *rounds) {
  size_t each = rounds->rounds;
  ob_release(rounds->memory);
  rounds->memory = ob_allocate((rounds->count + 1) * each, sizeof(double));
  if (rounds->team ? !bench_team_agree(rounds->team, rounds->memory) : !rounds->memory)
    return bench_report_no_memory("times", rounds->count * each);
  rounds->scratch = rounds->memory + rounds->count * each;
  for (size_t k = 0; k < rounds->count; k++) {
    rounds->entries[k].times = rounds->memory + k * each;
    rounds->entries[k].wire_bytes = rounds->entries[k].link_bytes = 0;
  }
  BENCH_TRY(time_entries(rounds));
  for (size_t k = 0; k < rounds->count; k++)
    compute_statistics(rounds, &rounds->entries[k]);
  return BENCH_OK;
}

void bench_rounds_destroy(struct bench_rounds *rounds) { ob_release(rounds->memory); }
