/* The command line: OSU's letters, and long names for what is ours. */
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "bench/bench.h"
#include "bench/bench_link.h"
#include "bench/bench_values.h"
#include "compression/codec.h"

/* One option. `set` returns false when the value is not what `wants` says. */
struct row {
  char letter;
  const char *name;
  unsigned kinds; /* benchmarks that have it */
  bool (*set)(struct bench_options *options, const char *value);
  const char *wants; /* NULL: it takes no value */
  const char *help;
};

/* 64 bytes an element, and more ranks than a machine has, still fit in a size_t. */
#define BYTES_AT_MOST (SIZE_MAX >> 20)

static bool set_sizes(struct bench_options *options, const char *value) {
  size_t first, last;
  const char *end = bench_read_number(value, true, &first);
  bool range = end && *end == ':';
  last = first;
  if (range)
    end = bench_read_number(end + 1, true, &last);
  if (!end || *end || first < sizeof(float) || last < first || last > BYTES_AT_MOST)
    return false;
  options->sized = true;
  options->largest = last;
  if (range || options->smallest > last)
    options->smallest = first;
  return true;
}

static bool set_iterations(struct bench_options *options, const char *value) {
  return bench_whole_number(value, 1, INT_MAX, &options->iterations);
}

static bool set_warmups(struct bench_options *options, const char *value) {
  return bench_whole_number(value, 0, INT_MAX, &options->warmups);
}

static bool set_full(struct bench_options *options, const char *value) {
  (void)value;
  return options->full = true;
}

static bool set_check(struct bench_options *options, const char *value) {
  (void)value;
  return options->check = true;
}

static bool set_timeline(struct bench_options *options, const char *value) {
  (void)value;
  return options->timeline = true;
}

static bool set_link(struct bench_options *options, const char *value) {
  options->link = value;
  return !isnan(bench_link_sent(value));
}

static bool set_no_dense(struct bench_options *options, const char *value) {
  (void)value;
  return options->no_dense = true;
}

/* Which block sizes there are is the library's to say, when the plan is made. */
static bool set_block_size(struct bench_options *options, const char *value) {
  if (strcmp(value, "buffer") == 0) {
    options->block_size = ONEBIT_BLOCK_BUFFER;
    return true;
  }
  const char *end = bench_read_number(value, true, &options->block_size);
  return end && !*end && options->block_size > 0;
}

static bool set_chunk(struct bench_options *options, const char *value) {
  const char *end = bench_read_number(value, true, &options->chunk_size);
  return end && !*end && options->chunk_size > 0;
}

static bool set_scale(struct bench_options *options, const char *value) {
  static const char *const names[] = {"rms", "mean-absolute", NULL};
  int found = bench_among(value, strlen(value), names);
  options->scale = (onebit_scale_t)found;
  return found >= 0;
}

static bool set_dtype(struct bench_options *options, const char *value) {
  static const char *const names[] = {"float32", "bfloat16", "float16", NULL};
  int found = bench_among(value, strlen(value), names);
  options->dtype = (onebit_dtype_t)found;
  return found >= 0;
}

static bool set_threads(struct bench_options *options, const char *value) {
  return bench_whole_int(value, 1, INT_MAX, &options->threads);
}

static bool set_codec(struct bench_options *options, const char *value) {
  const struct ob_codec *codec;
  options->codec = value;
  return ob_codec_find(value, &codec) == ONEBIT_OK;
}

static bool set_ranks(struct bench_options *options, const char *value) {
  return bench_whole_int(value, 1, 4096, &options->ranks);
}

static bool set_checked_warmups(struct bench_options *options, const char *value) {
  return bench_whole_number(value, 0, INT_MAX, &options->checked_warmups);
}

static bool set_tails(struct bench_options *options, const char *value) {
  (void)value;
  return options->tails = true;
}

static bool set_json(struct bench_options *options, const char *value) {
  (void)value;
  return options->json = true;
}

static bool set_tests(struct bench_options *options, const char *value) {
  return bench_whole_number(value, 0, INT_MAX, &options->tests);
}

static const char *const schedules[] = {"automatic", "exchange", "allgather", "hierarchical", NULL};
static const char *const wires[] = {"bits", "dense", NULL};

const char *bench_schedule_name(onebit_schedule_t schedule) { return schedules[schedule]; }

const char *bench_wire_name(onebit_wire_t wire) { return wires[wire]; }

static bool set_schedule(struct bench_options *options, const char *value) {
  int found = bench_among(value, strlen(value), schedules);
  options->variant.schedule = (onebit_schedule_t)found;
  return found >= 0;
}

static bool set_wire(struct bench_options *options, const char *value) {
  int found = bench_among(value, strlen(value), wires);
  options->variant.wire = (onebit_wire_t)found;
  return found >= 0;
}

/* One of a list: SCHEDULE or SCHEDULE:WIRE. */
static bool read_variant(const char *text, size_t length, struct bench_variant *variant) {
  size_t name = 0;
  while (name < length && text[name] != ':')
    name++;
  int schedule = bench_among(text, name, schedules);
  int wire = name == length ? 0 : bench_among(text + name + 1, length - name - 1, wires);
  *variant = (struct bench_variant){(onebit_schedule_t)schedule, (onebit_wire_t)wire};
  return schedule >= 0 && wire >= 0;
}

static bool set_compare(struct bench_options *options, const char *value) {
  options->compare_count = 0;
  do {
    size_t length = strcspn(value, ",");
    if (options->compare_count == BENCH_VARIANTS ||
        !read_variant(value, length, &options->compare[options->compare_count++]))
      return false;
    value += length;
  } while (*value++);
  return true;
}

/* Which numbers there are is the MPI library's to say. */
static bool set_algorithms(struct bench_options *options, const char *value) {
  options->all_algorithms = strcmp(value, "all") == 0;
  options->algorithm_count = 0;
  if (options->all_algorithms || strcmp(value, "default") == 0)
    return true;
  do {
    size_t number;
    value = bench_read_number(value, false, &number);
    if (!value || (*value && *value != ',') || number < 1 || number > INT_MAX ||
        options->algorithm_count == BENCH_ALGORITHMS)
      return false;
    options->algorithms[options->algorithm_count++] = (int)number;
  } while (*value++);
  return true;
}

/* A list: 2,4,8. A thousand streams are more than a share of a buffer ever has. */
static bool set_streams(struct bench_options *options, const char *value) {
  options->stream_count = 0;
  do {
    size_t number;
    value = bench_read_number(value, false, &number);
    if (!value || (*value && *value != ',') || number < 1 || number > 1024 ||
        options->stream_count == BENCH_STREAMS)
      return false;
    options->streams[options->stream_count++] = number;
  } while (*value++);
  return true;
}

static bool set_device(struct bench_options *options, const char *value) {
  static const char *const names[] = {"host", "cuda", NULL};
  int found = bench_among(value, strlen(value), names);
  options->device = (onebit_device_t)found;
  return found >= 0;
}

static bool set_transport(struct bench_options *options, const char *value) {
  options->nccl = true;
  return strcmp(value, "nccl") == 0;
}

static bool set_nccl_ranks(struct bench_options *options, const char *value) {
  options->nccl = true;
  return bench_whole_int(value, 1, 1024, &options->nccl_ranks);
}

static const struct row rows[] = {
    {'m', NULL, BENCH_ALL, set_sizes, "[MIN:]MAX",
     "sizes, doubling: bytes of float32 elements, at least 4, with K, M or G"},
    {'i', NULL, BENCH_ALL, set_iterations, "N", "timed iterations a size, at least 1"},
    {'x', NULL, BENCH_ALL, set_warmups, "N", "iterations before them that are not timed"},
    {'u', NULL, BENCH_RANKED, set_checked_warmups, "N", "the same, of runs with -c: instead of -x"},
    {'f', NULL, BENCH_ALL, set_full, NULL, "all columns: the spread too, and the error of a call"},
    {'z', NULL, BENCH_RANKED, set_tails, NULL, "columns of the percentiles 50, 90 and 99"},
    {'c', NULL, BENCH_RANKED, set_check, NULL, "check the results; exit status 1 if one is wrong"},
    {'t', NULL, BENCH_NONBLOCKING, set_tests, "N",
     "test calls in the computation, 0: none; default: one for each 200 us of it"},
    {'d', "device", BENCH_ALL, set_device, "NAME",
     "where the buffers are, and who computes: host or cuda"},
    {0, "block-size", BENCH_ALL, set_block_size, "N",
     "elements that share a scale, or 'buffer' for all of them"},
    {0, "scale", BENCH_ALL, set_scale, "NAME", "rms or mean-absolute"},
    {0, "dtype", BENCH_RANKED | BENCH_CODEC, set_dtype, "NAME",
     "float32, bfloat16 or float16, of the compressed buffers"},
    {0, "chunk", BENCH_ALL, set_chunk, "N", "elements in one message"},
    {0, "threads", BENCH_RANKED | BENCH_ADAM, set_threads, "N",
     "OpenMP threads that compress and reduce, at least 1"},
    {0, "codec", BENCH_ALL, set_codec, "NAME", "the codec: one that this processor can run"},
    {0, "schedule", BENCH_RANKED, set_schedule, "NAME",
     "automatic, exchange, allgather or hierarchical"},
    {0, "wire", BENCH_RANKED, set_wire, "NAME", "bits, or dense: float32 by the same schedule"},
    {0, "compare", BENCH_COLLECTIVES, set_compare, "LIST",
     "SCHEDULE[:WIRE],... by turns, a line each; at most 12"},
    {0, "mpi-algorithms", BENCH_COLLECTIVES, set_algorithms, "LIST",
     "default, all or N,N,...: the dense collective is the best of them"},
    {0, "no-dense", BENCH_RANKED, set_no_dense, NULL, "leave out the dense collective"},
    {0, "json", BENCH_RANKED | BENCH_CODEC | BENCH_ADAM, set_json, NULL,
     "a JSON object a line, instead of the table"},
    {0, "timeline", BENCH_COLLECTIVES, set_timeline, NULL,
     "after each size, where the time of one more call goes, by rank and step"},
    {0, "link", BENCH_COLLECTIVES, set_link, "NAME",
     "counts the bytes that each host's network interface sends, by the kernel's counters"},
    {0, "ranks", BENCH_RANKED, set_ranks, "N",
     "ranks that are threads of this process, 1 to 4096, instead of MPI's"},
    {0, "transport", BENCH_COLLECTIVES, set_transport, "nccl",
     "with -d cuda: the ranks talk over NCCL, not by way of the host"},
    {0, "nccl-ranks", BENCH_COLLECTIVES, set_nccl_ranks, "N",
     "the same, with N ranks that are processes which this one starts, 1 to 1024"},
    {0, "streams", BENCH_CODEC | BENCH_ADAM, set_streams, "N,N,...",
     "ranks whose messages are reduced, each 1 to 1024, at most 16 of them"},
    {'h', "help", BENCH_ALL, NULL, NULL, "this text"},
};

enum { row_count = sizeof rows / sizeof rows[0] };

/* The row that an argument names. *value points to what is attached to it (-i5, --ranks=4), or is
 * NULL. */
static const struct row *find_row(const char *argument, const char **value) {
  bool is_long = strncmp(argument, "--", 2) == 0;
  size_t length = is_long ? strcspn(argument + 2, "=") : 1;
  for (const struct row *row = rows; row < rows + row_count; row++) {
    if (is_long && row->name && strlen(row->name) == length &&
        strncmp(argument + 2, row->name, length) == 0) {
      *value = argument[2 + length] ? argument + 3 + length : NULL;
      return row;
    }
    if (!is_long && argument[0] == '-' && row->letter && argument[1] == row->letter) {
      *value = argument[2] ? argument + 2 : NULL;
      return row;
    }
  }
  return NULL;
}

static void set_defaults(const struct bench_benchmark *benchmark, struct bench_options *options) {
  *options = (struct bench_options){
      .smallest = benchmark->smallest,
      .largest = benchmark->largest,
      .iterations = BENCH_BY_SIZE,
      .warmups = BENCH_BY_SIZE,
      .checked_warmups = BENCH_BY_SIZE,
      .tests = BENCH_BY_TIME,
  };
}

/* 4, 8 and 16 streams are where the step is of interest. On a device sizes are such that no cache
 * has them. */
static void fill_in_defaults(const struct bench_benchmark *benchmark,
                             struct bench_options *options) {
  bool cuda = options->device == ONEBIT_DEVICE_CUDA;
  size_t first = benchmark->kind & BENCH_ADAM ? 4 : 2;
  size_t last = cuda || benchmark->kind & BENCH_ADAM ? 16 : 8;
  if (!options->stream_count)
    for (size_t streams = first; streams <= last; streams *= 2)
      options->streams[options->stream_count++] = streams;
  if (cuda && !options->sized) {
    options->largest = BENCH_CUDA_BYTES;
    options->smallest = benchmark->smallest ? BENCH_CUDA_BYTES >> 8 : 0;
  }
  if (!options->smallest)
    options->smallest = options->largest;
}

/* What an option is alone says nothing of whether it makes sense beside the others. */
static bool make_sense(const struct bench_benchmark *benchmark, const struct bench_options *options,
                       char error[256]) {
  bool cuda = options->device == ONEBIT_DEVICE_CUDA, ranked = benchmark->kind & BENCH_RANKED;
  error[0] = '\0';
#ifndef ONEBIT_HAVE_CUDA
  if (cuda)
    snprintf(error, 256, "-d cuda: this onebit-bench was built without CUDA");
#else
  if (cuda && !benchmark->run_cuda)
    snprintf(error, 256, "-d cuda: %s is of the host only", benchmark->name);
#endif
  else if (!cuda && options->json && !ranked)
    snprintf(error, 256, "--json: of %s only with -d cuda", benchmark->name);
  else if (!cuda && options->nccl)
    snprintf(error, 256, "--%s: wants -d cuda",
             options->nccl_ranks ? "nccl-ranks" : "transport nccl");
#ifndef ONEBIT_HAVE_NCCL
  else if (options->nccl)
    snprintf(error, 256, "--transport nccl: this onebit-bench was built without NCCL");
#endif
  else if (options->nccl_ranks && options->ranks)
    snprintf(error, 256, "--nccl-ranks %d: not with --ranks", options->nccl_ranks);
  else if (cuda && (options->compare_count || options->timeline || options->link))
    snprintf(error, 256, "-d cuda: not with --compare, --timeline and --link");
  return !error[0];
}

/* One option, with its value, which may be the next argument. Returns how many arguments it took, 0
 * when it is wrong. */
static int take(char **arguments, const struct bench_benchmark *benchmark,
                struct bench_options *options, bool *help, char error[256]) {
  const char *value = NULL, *argument = arguments[0];
  const struct row *row = find_row(argument, &value);
  bool attached = value != NULL;
  if (!row || !(row->kinds & benchmark->kind)) {
    snprintf(error, 256, "%.99s: %s of %s; see onebit-bench %s --help", argument,
             row ? "is not an option" : "unknown option", benchmark->name, benchmark->name);
    return 0;
  }
  if (row->wants && !attached)
    value = arguments[1];
  if (row->wants ? !value : attached) {
    snprintf(error, 256, "%.99s: %s%s", argument, row->wants ? "wants a value: " : "takes no value",
             row->wants ? row->wants : "");
    return 0;
  }
  *help = *help || !row->set;
  if (row->set && !row->set(options, value)) {
    snprintf(error, 256, "%.99s%s%.60s: wrong value; wanted is %s: %s", argument,
             attached ? "" : " ", attached ? "" : value, row->wants, row->help);
    return 0;
  }
  return row->wants && !attached ? 2 : 1;
}

bool bench_options_parse(int argc, char **argv, const struct bench_benchmark *benchmark,
                         struct bench_options *options, bool *help, char error[256]) {
  set_defaults(benchmark, options);
  *help = false;
  for (int i = 2; i < argc;) {
    int taken = take(argv + i, benchmark, options, help, error);
    if (!taken)
      return false;
    i += taken;
  }
  fill_in_defaults(benchmark, options);
  return *help || make_sense(benchmark, options, error);
}

static void print_row(const struct row *row) {
  char letter[4] = "", name[40] = "";
  if (row->letter)
    snprintf(letter, sizeof letter, "-%c", row->letter);
  if (row->name)
    snprintf(name, sizeof name, "%s--%s", row->letter ? ", " : "", row->name);
  int width =
      printf("  %s%s%s%s", letter, name, row->wants ? " " : "", row->wants ? row->wants : "");
  printf("%*s%s\n", width < 24 ? 24 - width : 1, "", row->help);
}

void bench_print_help(const struct bench_benchmark *benchmark) {
  printf("usage: onebit-bench %s [options]\n\n%s.\n\n", benchmark->name, benchmark->summary);
  for (const struct row *row = rows; row < rows + row_count; row++)
    if (row->kinds & benchmark->kind)
      print_row(row);
  if (benchmark->smallest)
    printf("\nWhere -m does not say, sizes begin with %zu and end with %zu.\n", benchmark->smallest,
           benchmark->largest);
  else
    printf("\nWhere -m does not say, the size is %zu; -m MAX is one size.\n", benchmark->largest);
  bench_print_notes(benchmark);
}
