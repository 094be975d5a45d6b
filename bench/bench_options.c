/* Defines the command line. It has the options of OSU's benchmarks, and those of nccl-tests unless
 * the name means something else in OSU's benchmarks. onebit's own options have long names. */
#include <ctype.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "bench/bench.h"
#include "collectives/schedules/schedule.h"
#include "compression/codec.h"

const char *const bench_dtypes[] = {"float32", "bfloat16", "float16", NULL};
const char *const bench_scales[] = {"rms", "mean-absolute", "largest", NULL};
const char *const bench_schedules[] = {"automatic" OB_SCHEDULES(OB_SCHEDULE_NAME), NULL};
const char *const bench_wires[] = {"bits", "dense", NULL};
static const char *const devices[] = {"host", "cuda", NULL};
static const char *const algorithms[] = {"default", "all", NULL};

/* The default size on a device, which is several times the size of a GPU's caches. */
#define CUDA_BYTES ((size_t)256 << 20)

/* The largest size. With it, the size of a buffer of 64 bytes per element still fits in a size_t,
 * even with the elements of 65,536 ranks. */
#define MAX_BYTES (SIZE_MAX >> 20)

/* The result of a function that reads a value: NULL, or an error message. */
typedef const char *reading;

/* Reads a size in the form MAX, MIN: or MIN:MAX. */
static reading options_read_sizes(void *values, const char *value) {
  struct bench_options *options = values;
  size_t first, last = 0;
  const char *end = tool_read_integer(value, true, &first);
  bool range = end && *end == ':';
  if (range && *++end)
    end = tool_read_integer(end, true, &last);
  if (!end || *end || first < sizeof(float) || first > MAX_BYTES || last > MAX_BYTES ||
      (last && last < first))
    return "expected [MIN:]MAX or MIN: in bytes, at least 4, such as 4K:16M";
  if (range)
    options->smallest = first;
  if (!range || last)
    options->largest = range ? last : first;
  return NULL;
}

static reading read_check(void *values, const char *value) {
  size_t number;
  const char *end = tool_read_integer(value, false, &number);
  ((struct bench_options *)values)->check = end && number > 0;
  return end && !*end ? NULL : "expected 0 or 1";
}

static reading read_gpus(void *values, const char *value) {
  (void)values;
  return strcmp(value, "1") == 0
             ? NULL
             : "each rank has one GPU: start ranks with mpirun, or with --nccl-ranks N";
}

static reading read_link(void *values, const char *value) {
  ((struct bench_options *)values)->link = value;
  return isnan(bench_link_sent(value)) ? "there is no such network interface" : NULL;
}

/* Reads the block size. The library checks it when the plan is created. */
static reading options_read_block_size(void *values, const char *value) {
  struct bench_options *options = values;
  const char *end = tool_read_integer(value, true, &options->block_size);
  if (strcmp(value, "buffer") == 0)
    options->block_size = ONEBIT_BLOCK_BUFFER;
  else if (!end || *end || options->block_size == 0)
    return "expected a number of elements, or buffer";
  return NULL;
}

static reading read_codec(void *values, const char *value) {
  const struct ob_codec *codec;
  ((struct bench_options *)values)->codec = value;
  return ob_codec_find(value, &codec) == ONEBIT_OK ? NULL
                                                   : "this processor can run no codec of that name";
}

/* Reads one item of the list of --compare: SCHEDULE, or SCHEDULE:WIRE. */
static bool read_variant(const char *text, size_t length, struct bench_variant *variant) {
  const size_t name = strcspn(text, ":,");
  const int schedule = tool_find_name(text, name, bench_schedules);
  const int wire = name < length ? tool_find_name(text + name + 1, length - name - 1, bench_wires)
                                 : ONEBIT_WIRE_BITS;
  *variant = (struct bench_variant){(onebit_schedule_t)schedule, (onebit_wire_t)wire};
  return schedule >= 0 && wire >= 0;
}

static reading read_compare(void *values, const char *value) {
  struct bench_options *options = values;
  options->compare_count = 0;
  do {
    size_t length = strcspn(value, ",");
    if (options->compare_count == BENCH_VARIANTS ||
        !read_variant(value, length, &options->compare[options->compare_count++]))
      return "expected at most 12 items SCHEDULE[:WIRE], separated by commas";
    value += length;
  } while (*value++);
  return NULL;
}

/* Reads the list of --streams: numbers from 1 to 1024. */
static reading read_streams(void *values, const char *value) {
  struct bench_options *options = values;
  options->stream_count = tool_read_list(value, 1, 1024, options->streams, BENCH_STREAMS);
  return options->stream_count ? NULL
                               : "expected at most 16 numbers from 1 to 1024, separated by commas";
}

static reading read_transport(void *values, const char *value) {
  struct bench_options *options = values;
  options->nccl = strcmp(value, "nccl") == 0;
  options->sockets = strcmp(value, "sockets") == 0;
  return options->nccl || options->sockets ? NULL : "expected nccl or sockets";
}

#define AT(field) offsetof(struct bench_options, field)

/* clang-format off */
static const struct tool_option rows[] = {
    {"message-size", 'm', TOOL_CALL, 0, "[MIN:]MAX",
     "sizes from MIN to MAX, doubling; MIN: ends at the default's MAX. Sizes are\n"
     "bytes of float32 elements, at least 4, and may end in K, M or G",
     .read = options_read_sizes},
    {"iterations", 'i', TOOL_COUNT, AT(iterations), "N", "timed iterations per size, at least 1",
     .low = 1, .high = INT_MAX},
    {"warmup", 'x', TOOL_COUNT, AT(warmups), "N", "untimed iterations before the timed ones",
     .high = INT_MAX},
    {"full", 'f', TOOL_FLAG, AT(full), NULL,
     "print all columns, including the spread", .low = 0},
    {"validation", 'c', TOOL_FLAG, AT(check), NULL,
     "check the results; exit status 1 if one is wrong", .groups = BENCH_RANKED},
    {"num-test-calls", 't', TOOL_COUNT, AT(tests), "N",
     "test calls during the computation (0: none); default: one per 200 us",
     .high = INT_MAX, .groups = BENCH_NONBLOCKING},
    {"device", 'd', TOOL_CHOICE, AT(device), "NAME", "where the buffers are: host or cuda",
     .names = devices},
    {"block-size", 0, TOOL_CALL, 0, "N",
     "elements that share a scale; buffer: all elements share one",
     .read = options_read_block_size},
    {"scale", 0, TOOL_CHOICE, AT(scale), "NAME", "rms, mean-absolute or largest",
     .names = bench_scales},
    {"bits", 0, TOOL_INTEGER, AT(bits), "N", "bits per element: 1, 2, 4 or 8", .low = 1},
    {"residual-copies", 0, TOOL_INTEGER, AT(residual_copies), "N",
     "copies of the residuals that a plan or an optimizer keeps, 1 or 2", .low = 1},
    {"dtype", 0, TOOL_CHOICE, AT(dtype), "NAME",
     "type of the compressed buffers: float32, bfloat16 or float16",
     .names = bench_dtypes, .groups = BENCH_RANKED | BENCH_CODEC},
    {"chunk", 0, TOOL_SIZE, AT(chunk_size), "N", "elements in one message", .low = 1},
    {"threads", 0, TOOL_INTEGER, AT(threads), "N", "OpenMP threads that compress and reduce",
     .low = 1, .groups = BENCH_RANKED},
    {"codec", 0, TOOL_CALL, 0, "NAME", "the codec: one that this processor can run",
     .read = read_codec},
    {"schedule", 0, TOOL_CHOICE, AT(variant.schedule), "NAME",
     "automatic, exchange, allgather or hierarchical",
     .names = bench_schedules, .groups = BENCH_RANKED},
    {"wire", 0, TOOL_CHOICE, AT(variant.wire), "NAME",
     "bits, or dense: float32 by the same schedule", .names = bench_wires, .groups = BENCH_RANKED},
    {"compare", 0, TOOL_CALL, 0, "LIST",
     "SCHEDULE[:WIRE],... measured by turns, one line each; at most 12",
     .read = read_compare, .groups = BENCH_COLLECTIVES},
    {"mpi-algorithms", 0, TOOL_CHOICE, AT(all_algorithms), "default|all",
     "all: the dense collective is the best of the MPI library's algorithms",
     .names = algorithms, .groups = BENCH_COLLECTIVES},
    {"no-dense", 0, TOOL_FLAG, AT(no_dense), NULL, "leave out the dense collective",
     .groups = BENCH_RANKED},
    {"json", 0, TOOL_FLAG, AT(json), NULL,
     "print one JSON object per line instead of the table", .low = 0},
    {"csv", 0, TOOL_FLAG, AT(csv), NULL,
     "print the same fields separated by commas, under a line of their names",
     .low = 0},
    {"link", 0, TOOL_CALL, 0, "NAME",
     "counts the bytes that each host's network interface sends, by the\nkernel's counters",
     .read = read_link, .groups = BENCH_COLLECTIVES},
    {"rate", 0, TOOL_RATE, AT(rate), "RATE",
     "rate of each host's link: adds columns with lower bounds for the time of a\n"
     "call, from its bytes at this rate and from its arithmetic",
     .groups = BENCH_COLLECTIVES},
    {"cores", 0, TOOL_INTEGER, AT(cores), "N",
     "number of cores of all ranks together; --rate needs it; default: one per rank",
     .low = 1, .high = INT_MAX, .groups = BENCH_COLLECTIVES},
    {"ranks", 0, TOOL_INTEGER, AT(ranks), "N",
     "use N threads of this process as ranks, 1 to 4096, instead of MPI's ranks",
     .low = 1, .high = 4096, .groups = BENCH_RANKED},
    {"transport", 0, TOOL_CALL, 0, "NAME",
     "nccl, with -d cuda: messages go over NCCL, not through the host.\n"
     "sockets: messages go over the library's own connections, without MPI;\n"
     "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are as torchrun sets them",
     .read = read_transport, .groups = BENCH_RANKED},
    {"connections", 0, TOOL_INTEGER, AT(connections), "N",
     "connections between each two ranks, with --transport sockets, 1 to 64",
     .low = 1, .high = ONEBIT_SOCKETS_STREAMS, .groups = BENCH_RANKED},
    {"nccl-ranks", 0, TOOL_INTEGER, AT(nccl_ranks), "N",
     "like --transport nccl, with N ranks, 1 to 1024, which are processes\nthat this one starts",
     .low = 1, .high = 1024, .groups = BENCH_COLLECTIVES},
    {"streams", 0, TOOL_CALL, 0, "N,N,...",
     "ranks whose messages are reduced, each 1 to 1024, at most 16 of them",
     .read = read_streams, .groups = BENCH_CODEC},
    {.kind = TOOL_HEADING,
     .help = "The options of nccl-tests; -f and -c also take a number, as there:"},
    {"minbytes", 'b', TOOL_SIZE, AT(smallest), "N", "-m N:", .low = 4, .high = MAX_BYTES},
    {"maxbytes", 'e', TOOL_SIZE, AT(largest), "N", "-m N", .low = 4, .high = MAX_BYTES},
    {"stepfactor", 0, TOOL_COUNT, AT(factor), "N",
     "factor from one size to the next, as -f N; default 2", .low = 2, .high = 1024},
    {"iters", 'n', TOOL_COUNT, AT(iterations), "N", "-i N", .low = 1, .high = INT_MAX},
    {"warmup_iters", 'w', TOOL_COUNT, AT(warmups), "N", "-x N", .high = INT_MAX},
    {"check", 0, TOOL_CALL, 0, "N", "1: the same as -c; 0: without -c; also as -c N",
     .read = read_check, .groups = BENCH_RANKED},
    {"ngpus", 'g', TOOL_CALL, 0, "1", "each rank has one GPU; --nccl-ranks N starts ranks",
     .read = read_gpus, .groups = BENCH_COLLECTIVES},
    {.kind = TOOL_END}};
/* clang-format on */

/* --- Defaults, and valid combinations */

/* Fills in sizes that were not given. The default is the range from `first` to `last`, or only
 * `last` if `first` is 0. */
static void set_default_sizes(size_t first, size_t last, struct bench_options *options) {
  if (!options->largest)
    options->largest = options->smallest > last ? options->smallest : last;
  if (!options->smallest)
    options->smallest = first && first < options->largest ? first : options->largest;
}

/* Fills in the other defaults, which depend on the benchmark and the device. */
static void set_defaults(const struct bench_benchmark *benchmark, struct bench_options *options) {
  bool cuda = options->device == ONEBIT_DEVICE_CUDA;
  options->nccl = options->nccl || options->nccl_ranks;
  if (!options->stream_count)
    for (size_t streams = 2; streams <= (cuda ? 16 : 8); streams *= 2)
      options->streams[options->stream_count++] = streams;
  set_default_sizes(cuda && benchmark->smallest ? CUDA_BYTES >> 8 : benchmark->smallest,
                    cuda ? CUDA_BYTES : benchmark->largest, options);
}

/* Returns false and writes an error if an option cannot be combined with the other options or with
 * this build. */
static bool check_combination(const struct bench_benchmark *benchmark,
                              const struct bench_options *options, char error[TOOL_ERROR]) {
  bool cuda = options->device == ONEBIT_DEVICE_CUDA, has_cuda = false, has_nccl = false;
#ifdef ONEBIT_HAVE_CUDA
  has_cuda = true;
#endif
#ifdef ONEBIT_HAVE_NCCL
  has_nccl = true;
#endif
  char smallest[32];
  snprintf(smallest, sizeof smallest, "-b %zu", options->smallest);
  const struct {
    bool wrong;
    const char *what, *why;
  } rules[] = {
      {cuda && !has_cuda, "-d cuda", "this onebit-bench was built without CUDA"},
      {cuda && !benchmark->run_cuda, "-d cuda", "this subcommand runs on the host only"},
      {options->smallest > options->largest, smallest, "the smallest size is above -e"},
      {options->json && options->csv, "--csv", "cannot be combined with --json"},
      {!cuda && options->nccl_ranks, "--nccl-ranks", "needs -d cuda"},
      {!cuda && options->nccl, "--transport nccl", "needs -d cuda"},
      {options->nccl && !has_nccl, "--transport nccl", "this onebit-bench was built without NCCL"},
      {options->nccl_ranks && options->ranks, "--nccl-ranks", "cannot be combined with --ranks"},
      {options->sockets && options->ranks, "--transport sockets",
       "cannot be combined with --ranks"},
      {options->sockets && cuda, "--transport sockets", "cannot be combined with -d cuda"},
      {options->connections && !options->sockets, "--connections", "needs --transport sockets"},
      {options->cores && !(options->rate > 0), "--cores", "needs --rate"},
      {cuda && (options->compare_count || options->link || options->rate > 0), "-d cuda",
       "cannot be combined with --compare, --link or --rate"}};
  for (size_t k = 0; k < sizeof rules / sizeof rules[0]; k++)
    if (rules[k].wrong) {
      snprintf(error, TOOL_ERROR, "%s: %s", rules[k].what, rules[k].why);
      return false;
    }
  return true;
}

static struct tool describe_tool(const struct bench_benchmark *benchmark, char name[64],
                                 char usage[96]) {
  snprintf(name, 64, "onebit-bench %s", benchmark->name);
  snprintf(usage, 96, "%s [options]", name);
  return (struct tool){.name = name,
                       .usage = usage,
                       .purpose = benchmark->summary,
                       .options = rows,
                       .group = benchmark->kind};
}

/* Replaces -f and -c by --stepfactor and --check if a number follows in the same or in the next
 * argument. In nccl-tests these two options take a number, and in OSU's benchmarks they do not. */
static void read_numbered_flags(int argc, char **argv) {
  static char words[2][48];
  for (int k = 2; k < argc; k++) {
    const bool factor = strncmp(argv[k], "-f", 2) == 0, check = strncmp(argv[k], "-c", 2) == 0;
    const char *number = (factor || check) && argv[k][2] ? argv[k] + 2 : NULL;
    const char *next = k + 1 < argc ? argv[k + 1] : "";
    if (!(factor || check) || !isdigit((unsigned char)*(number ? number : next)))
      continue;
    snprintf(words[check], sizeof words[check], "--%s%s%.24s", check ? "check" : "stepfactor",
             number ? "=" : "", number ? number : "");
    argv[k] = words[check];
  }
}

/* True if the command line has --transport sockets anywhere, even after the argument at which
 * parsing stops. */
static bool has_sockets_option(int argc, char **argv) {
  bool found = false;
  for (int k = 2; k < argc; k++)
    found |= !strcmp(argv[k], "--transport=sockets") ||
             (!strcmp(argv[k - 1], "--transport") && !strcmp(argv[k], "sockets"));
  return found;
}

enum tool_asked bench_options_parse(int argc, char **argv, const struct bench_benchmark *benchmark,
                                    struct bench_options *options, char error[TOOL_ERROR]) {
  char name[64], usage[96];
  struct tool tool = describe_tool(benchmark, name, usage);
  read_numbered_flags(argc, argv);
  *options = (struct bench_options){
      .factor = 2, .iterations = BENCH_BY_SIZE, .warmups = BENCH_BY_SIZE, .tests = BENCH_BY_TIME};
  const bool sockets = has_sockets_option(argc, argv);
  argc--;
  enum tool_asked asked = tool_parse(&tool, &argc, argv + 1, options, error);
  if (asked != TOOL_RUN) /* with sockets, rank 0 prints the answer without MPI */
    options->sockets |= sockets;
  set_defaults(benchmark, options);
  return asked == TOOL_RUN && !check_combination(benchmark, options, error) ? TOOL_WRONG : asked;
}

int bench_options_answer(const struct bench_benchmark *benchmark, enum tool_asked asked,
                         const char *error, bool speak) {
  char name[64], usage[96];
  struct tool tool = describe_tool(benchmark, name, usage);
  if (asked == TOOL_WRONG && speak)
    bench_print_error("%s; see %s --help", error, name);
  else if (speak)
    tool_print_answer(&tool, asked, error);
  if (asked == TOOL_HELP && speak)
    printf(
        "\nWithout -m, sizes are %zu to %zu bytes. onebit-bench(1) says what the columns mean.\n",
        benchmark->smallest ? benchmark->smallest : benchmark->largest, benchmark->largest);
  return asked == TOOL_WRONG ? BENCH_USAGE : BENCH_OK;
}
