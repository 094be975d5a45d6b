/* The command line: OSU's letters, and long names for what is ours. */
#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/bench.h"
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

/* A whole number with K, M or G behind it where `suffix` allows. *end points past it; NULL: none.
 */
static const char *read_number(const char *text, bool suffix, size_t *number) {
  static const char letters[] = "KMG";
  char *end;
  if (!isdigit((unsigned char)*text))
    return NULL;
  errno = 0;
  unsigned long long value = strtoull(text, &end, 10);
  const char *letter = *end && suffix ? strchr(letters, toupper((unsigned char)*end)) : NULL;
  unsigned shift = letter ? 10 * (unsigned)(letter - letters + 1) : 0;
  if (errno || value > (SIZE_MAX >> shift))
    return NULL;
  *number = (size_t)value << shift;
  return end + (letter != NULL);
}

static bool whole_number(const char *text, size_t low, size_t high, size_t *number) {
  const char *end = read_number(text, false, number);
  return end && !*end && *number >= low && *number <= high;
}

static bool whole_int(const char *text, int low, int high, int *number) {
  size_t value;
  if (!whole_number(text, (size_t)low, (size_t)high, &value))
    return false;
  *number = (int)value;
  return true;
}

/* The position of the value among names, which end with NULL; -1: it is not there. */
static int among(const char *value, const char *const *names) {
  for (int i = 0; names[i]; i++)
    if (strcmp(value, names[i]) == 0)
      return i;
  return -1;
}

/* 64 bytes an element, and more ranks than a machine has, still fit in a size_t. */
#define BYTES_AT_MOST (SIZE_MAX >> 20)

static bool set_sizes(struct bench_options *options, const char *value) {
  size_t first, last;
  const char *end = read_number(value, true, &first);
  bool range = end && *end == ':';
  last = first;
  if (range)
    end = read_number(end + 1, true, &last);
  if (!end || *end || first < sizeof(float) || last < first || last > BYTES_AT_MOST)
    return false;
  options->largest = last;
  if (range || options->smallest > last)
    options->smallest = first;
  return true;
}

static bool set_iterations(struct bench_options *options, const char *value) {
  return whole_number(value, 1, INT_MAX, &options->iterations);
}

static bool set_warmups(struct bench_options *options, const char *value) {
  return whole_number(value, 0, INT_MAX, &options->warmups);
}

static bool set_full(struct bench_options *options, const char *value) {
  (void)value;
  return options->full = true;
}

static bool set_check(struct bench_options *options, const char *value) {
  (void)value;
  return options->check = true;
}

static bool set_no_dense(struct bench_options *options, const char *value) {
  (void)value;
  return options->no_dense = true;
}

static bool set_timeline(struct bench_options *options, const char *value) {
  (void)value;
  return options->timeline = true;
}

/* Which block sizes there are is the library's to say, when the plan is made. */
static bool set_block_size(struct bench_options *options, const char *value) {
  if (strcmp(value, "buffer") == 0) {
    options->block_size = ONEBIT_BLOCK_BUFFER;
    return true;
  }
  const char *end = read_number(value, true, &options->block_size);
  return end && !*end && options->block_size > 0;
}

static bool set_chunk(struct bench_options *options, const char *value) {
  const char *end = read_number(value, true, &options->chunk_size);
  return end && !*end && options->chunk_size > 0;
}

static bool set_scale(struct bench_options *options, const char *value) {
  static const char *const names[] = {"rms", "mean-absolute", NULL};
  int found = among(value, names);
  options->scale = (onebit_scale_t)found;
  return found >= 0;
}

static bool set_dtype(struct bench_options *options, const char *value) {
  static const char *const names[] = {"float32", "bfloat16", "float16", NULL};
  int found = among(value, names);
  options->dtype = (onebit_dtype_t)found;
  return found >= 0;
}

static bool set_threads(struct bench_options *options, const char *value) {
  return whole_int(value, 1, INT_MAX, &options->threads);
}

static bool set_codec(struct bench_options *options, const char *value) {
  const struct ob_codec *codec;
  options->codec = value;
  return ob_codec_find(value, &codec) == ONEBIT_OK;
}

static bool set_ranks(struct bench_options *options, const char *value) {
  return whole_int(value, 1, 4096, &options->ranks);
}

/* A list: 2,4,8. A thousand streams are more than a share of a buffer ever has. */
static bool set_streams(struct bench_options *options, const char *value) {
  options->stream_count = 0;
  do {
    size_t number;
    value = read_number(value, false, &number);
    if (!value || (*value && *value != ',') || number < 1 || number > 1024 ||
        options->stream_count == BENCH_STREAMS)
      return false;
    options->streams[options->stream_count++] = number;
  } while (*value++);
  return true;
}

static const struct row rows[] = {
    {'m', NULL, BENCH_ALL, set_sizes, "[MIN:]MAX",
     "sizes, doubling: bytes of float32 elements, at least 4, with K, M or G"},
    {'i', NULL, BENCH_ALL, set_iterations, "N", "timed iterations a size, at least 1"},
    {'x', NULL, BENCH_ALL, set_warmups, "N", "iterations before them that are not timed"},
    {'f', NULL, BENCH_ALL, set_full, NULL, "all columns: the spread too"},
    {'c', NULL, BENCH_COLLECTIVES, set_check, NULL,
     "check the results; exit status 1 if one is wrong"},
    {0, "block-size", BENCH_ALL, set_block_size, "N",
     "elements that share a scale, or 'buffer' for all of them"},
    {0, "scale", BENCH_ALL, set_scale, "NAME", "rms or mean-absolute"},
    {0, "dtype", BENCH_COLLECTIVES | BENCH_CODEC, set_dtype, "NAME",
     "float32, bfloat16 or float16, of the compressed buffers"},
    {0, "chunk", BENCH_ALL, set_chunk, "N", "elements in one message"},
    {0, "threads", BENCH_COLLECTIVES | BENCH_ADAM, set_threads, "N",
     "OpenMP threads that compress and reduce, at least 1"},
    {0, "codec", BENCH_ALL, set_codec, "NAME", "the codec: one that this processor can run"},
    {0, "no-dense", BENCH_COLLECTIVES, set_no_dense, NULL, "leave out the dense collective"},
    {0, "timeline", BENCH_COLLECTIVES, set_timeline, NULL,
     "after each size, where the time of one more call goes, by rank and step"},
    {0, "ranks", BENCH_COLLECTIVES, set_ranks, "N",
     "ranks that are threads of this process, 1 to 4096, instead of MPI's"},
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
      .threads = 0,
      .streams = {2, 4, 8},
      .stream_count = 3,
  };
  if (benchmark->kind == BENCH_ADAM)
    for (size_t k = 0; k < options->stream_count; k++)
      options->streams[k] *= 2; /* 4, 8 and 16: where the step is of interest */
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
  if (!options->smallest)
    options->smallest = options->largest;
  return true;
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
  if (benchmark->kind != BENCH_COLLECTIVES)
    return;
  printf(
      "\nEach iteration begins with a barrier and lasts as long as the slowest rank takes. The\n"
      "dense collective runs on the same numbers as float32, by turns with the compressed one.\n"
      "It is the MPI library's, with the algorithm that the library chooses. To compare with\n"
      "another one, ask MPI for it, in Open MPI for example\n"
      "  mpirun --mca coll_tuned_use_dynamic_rules 1 --mca coll_tuned_allreduce_algorithm 4 ...\n"
      "where `ompi_info --param coll tuned --level 9` names the algorithms. Ranks that outnumber\n"
      "cores want --mca mpi_yield_when_idle 1.\n");
}
