/* Cuts an oracle's buffer into shares, one for each server, and into runs, whose elements are
 * summed together. */
#include "tests/oracle.h"
#include "tests/support.h"

#define WORD       32   /* elements whose signs are in one word; shares begin at words */
#define RUN        2048 /* elements that are summed together if a scale covers more than these */
#define BLOCK_SIZE 2048 /* the default block size */

static size_t smaller_of(size_t a, size_t b) { return a < b ? a : b; }

static void add_run(struct oracle *oracle, size_t first, size_t count, int server) {
  struct oracle_run *runs =
      realloc(oracle->runs, (oracle->run_count + 1) * sizeof *runs); /* grows by one each time,
                                                                      * since layouts are small */
  cr_assert(runs, "no memory for runs");
  oracle->runs = runs;
  oracle->runs[oracle->run_count++] = (struct oracle_run){first, count, server};
}

static void add_runs(struct oracle *oracle, size_t first, size_t count, size_t length, int server) {
  for (size_t done = 0; done < count; done += length)
    add_run(oracle, first + done, smaller_of(length, count - done), server);
}

/* Returns floor(k * words / size), computed so that it cannot overflow. */
static size_t share_begin(size_t k, size_t words, size_t size) {
  return words / size * k + words % size * k / size;
}

/* Returns the server of a block that begins at `word`: the last rank whose share begins at this
 * word or before it. */
static int find_server(size_t word, size_t words, int size) {
  int server = 0;
  while (server + 1 < size && share_begin((size_t)server + 1, words, (size_t)size) <= word)
    server++;
  return server;
}

/* Lays out one tensor of an allreduce in blocks, or in runs if one scale covers all blocks. Each
 * block or run belongs to the server of its first word. */
static void lay_out_tensor(struct oracle *oracle, size_t first, size_t count, size_t word,
                           size_t words) {
  size_t length = oracle->common_scale ? RUN : oracle->options.block_size;
  for (size_t done = 0; done < count; done += length)
    add_run(oracle, first + done, smaller_of(length, count - done),
            find_server(word + done / WORD, words, oracle->size * oracle->each));
}

static void lay_out_allreduce(struct oracle *oracle, const size_t *counts, size_t tensors) {
  size_t words = 0, word = 0, first = 0;
  for (size_t k = 0; k < tensors; k++)
    words += (counts[k] + WORD - 1) / WORD;
  for (size_t k = 0; k < tensors; k++) {
    lay_out_tensor(oracle, first, counts[k], word, words);
    first += counts[k];
    word += (counts[k] + WORD - 1) / WORD;
  }
  oracle->valid = oracle->elements = oracle->result_count = first;
}

/* Lays out one segment for each rank (reduce-scatter), or a single segment (allgather, which has no
 * servers). */
static void lay_out_segments(struct oracle *oracle, size_t count, int segments) {
  size_t length = oracle->common_scale ? RUN : oracle->options.block_size;
  for (int k = 0; k < segments; k++)
    add_runs(oracle, (size_t)k * count, count, length, k);
  oracle->valid = oracle->elements = (size_t)segments * count;
  oracle->result_count = (size_t)oracle->size * count;
}

static size_t least_common_multiple(size_t a, size_t b) {
  size_t multiple = a;
  while (multiple % b)
    multiple += a;
  return multiple;
}

/* Adds the runs of the part of a tensor that lies in one chunk. */
static void lay_out_part(struct oracle *oracle, size_t first, size_t end, size_t chunk, size_t k) {
  size_t begin = first > k * chunk ? first : k * chunk;
  size_t last = smaller_of(end, (k + 1) * chunk);
  if (begin < last)
    add_runs(oracle, begin, last - begin, RUN, (int)k);
}

/* Lays out the tensors one after the other, and cuts them into P chunks for P ranks. The last
 * tensor's runs include the padding to a multiple of P * lcm(P, 8) elements. */
static void lay_out_deepspeed(struct oracle *oracle, const size_t *counts, size_t tensors) {
  size_t size = (size_t)oracle->size, quantum = size * least_common_multiple(size, 8), count = 0;
  for (size_t t = 0; t < tensors; t++)
    count += counts[t];
  size_t padded = (count + quantum - 1) / quantum * quantum, chunk = padded / size;
  for (size_t k = 0; k < size; k++)
    for (size_t t = 0, first = 0; t < tensors; first += counts[t++])
      lay_out_part(oracle, first, t + 1 < tensors ? first + counts[t] : padded, chunk, k);
  oracle->valid = oracle->result_count = count;
  oracle->elements = padded;
}

void oracle_lay_out(struct oracle *oracle, const size_t *counts, size_t tensors) {
  onebit_plan_options_t *options = &oracle->options;
  if (options->block_size == 0)
    options->block_size = BLOCK_SIZE;
  bool deepspeed = options->profile == ONEBIT_PROFILE_DEEPSPEED;
  oracle->common_scale = deepspeed || options->block_size == ONEBIT_BLOCK_BUFFER;
  options->scale = deepspeed ? ONEBIT_SCALE_RMS : options->scale;
  if (deepspeed)
    lay_out_deepspeed(oracle, counts, tensors);
  else if (options->operation == ONEBIT_ALLREDUCE)
    lay_out_allreduce(oracle, counts, tensors);
  else
    lay_out_segments(oracle, counts[0], options->operation == ONEBIT_ALLGATHER ? 1 : oracle->size);
}

/* Returns the number of the share that a rank reduces. The buffer has one segment per local rank,
 * and a segment has one share per host. */
static int share_number(const struct oracle *oracle, int rank) {
  return rank % oracle->each * oracle->size + rank / oracle->each;
}

bool oracle_has_servers(const struct oracle *oracle) {
  return oracle->options.operation == ONEBIT_ALLREDUCE &&
         oracle->options.schedule != ONEBIT_SCHEDULE_ALLGATHER;
}

/* Returns the first element of a share. */
static size_t share_first(const struct oracle *oracle, int share) {
  for (size_t k = 0; k < oracle->run_count; k++)
    if (oracle->runs[k].server >= share)
      return oracle->runs[k].first;
  return oracle->elements;
}

/* Returns the first element of the worker residual that a rank stores. On a host with several
 * ranks, each rank stores one segment, which has one share for each host. */
size_t oracle_worker_first(const struct oracle *oracle, int rank) {
  return oracle->each > 1 ? share_first(oracle, rank % oracle->each * oracle->size) : 0;
}

size_t oracle_worker_count(const struct oracle *oracle, int rank) {
  if (oracle->each == 1)
    return oracle->elements;
  return share_first(oracle, (rank % oracle->each + 1) * oracle->size) -
         oracle_worker_first(oracle, rank);
}

const float *oracle_worker_error(const struct oracle *oracle, int rank) {
  return oracle->worker_error + (size_t)(rank / oracle->each) * oracle->elements +
         oracle_worker_first(oracle, rank);
}

size_t oracle_server_first(const struct oracle *oracle, int rank) {
  return share_first(oracle, share_number(oracle, rank));
}

size_t oracle_server_count(const struct oracle *oracle, int rank) {
  size_t count = 0;
  if (oracle->options.wire == ONEBIT_WIRE_BITS && oracle_has_servers(oracle))
    for (size_t k = 0; k < oracle->run_count; k++)
      count += oracle->runs[k].server == share_number(oracle, rank) ? oracle->runs[k].count : 0;
  return count;
}
