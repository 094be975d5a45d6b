/* Tests of the benchmark program: its command line, its statistics, and its option -c, which checks
 * results. */
#include <criterion/criterion.h>
#include <criterion/redirect.h>

#include "base/process.h"
#include "bench/bench_collective.h"
#include "compression/numerics.h"
#include "tests/support.h"

#define RANKS 3

/* A list of thirteen schedules, one more than --compare accepts. */
#define THIRTEEN                                                                                   \
  "exchange,exchange,exchange,exchange,exchange,exchange,exchange,exchange,exchange,exchange,"     \
  "exchange,exchange,exchange"

/* Parses the arguments after the subcommand, which are separated by spaces. `error` may be NULL. */
static bool parse_arguments(const char *subcommand, const char *arguments,
                            struct bench_options *options, char *error) {
  char *argv[32], words[TOOL_ERROR] = "";
  int argc = split_line(argv, "onebit-bench %s %s", subcommand, arguments);
  bool well =
      bench_options_parse(argc, argv, bench_find_benchmark(subcommand), options, words) == TOOL_RUN;
  cr_assert_eq(well, words[0] == '\0', "%s: the error does not fit the result: \"%s\"", arguments,
               words);
  if (error)
    strcpy(error, words);
  return well;
}

/* Parses arguments that must be correct, and returns the options. */
static struct bench_options read_arguments(const char *subcommand, const char *arguments) {
  struct bench_options options;
  cr_assert(parse_arguments(subcommand, arguments, &options, NULL), "%s", arguments);
  return options;
}

Test(bench, options_are_read) {
  struct bench_options options = read_arguments(
      "allreduce", "-m 1K:2m -i5 -x 0 -f -c --no-dense --block-size=256 --scale mean-absolute "
                   "--dtype bfloat16 --chunk 64K --threads 2 --codec scalar --ranks 3");
  cr_expect_eq(options.smallest, 1 << 10);
  cr_expect_eq(options.largest, 2 << 20);
  cr_expect_eq(options.iterations, 5);
  cr_expect_eq(options.warmups, 0);
  cr_expect(options.full && options.check && options.no_dense);
  cr_expect_eq(options.block_size, 256);
  cr_expect_eq(options.chunk_size, 64 << 10);
  cr_expect_eq(options.scale, ONEBIT_SCALE_MEAN_ABSOLUTE);
  cr_expect_eq(options.dtype, ONEBIT_BFLOAT16);
  cr_expect_eq(options.threads, 2);
  cr_expect_eq(options.ranks, 3);
  cr_expect_str_eq(options.codec, "scalar");
}

Test(bench, sizes_have_a_default_on_either_side) {
  struct bench_options options = read_arguments("allreduce", "-m 1G");
  cr_expect_eq(options.smallest, bench_find_benchmark("allreduce")->smallest);
  cr_expect_eq(options.largest, 1 << 30);
  options = read_arguments("allreduce", "-m 8");
  cr_expect_eq(options.smallest, 8);
  options = read_arguments("codec", "-m 1M");
  cr_expect(options.smallest == 1 << 20 && options.largest == 1 << 20);
  options = read_arguments("codec", "");
  cr_expect_eq(options.smallest, options.largest);
}

Test(bench, an_end_of_the_sizes_alone_is_taken) {
  struct bench_options options = read_arguments("allreduce", "-m 8K:");
  cr_expect_eq(options.smallest, 8 << 10);
  cr_expect_eq(options.largest, bench_find_benchmark("allreduce")->largest);
  options = read_arguments("allreduce", "-m 1G:");
  cr_expect(options.smallest == 1 << 30 && options.largest == 1 << 30);
  options = read_arguments("codec", "-m 8K:");
  cr_expect(options.smallest == 8 << 10 &&
            options.largest == bench_find_benchmark("codec")->largest);
}

/* The program accepts the options of the OSU benchmark osu_iallreduce, e.g. --message-size
 * 1K:2K. */
Test(bench, osu_s_long_names_are_read) {
  struct bench_options options = read_arguments(
      "iallreduce", "--message-size 1K:2K --iterations 5 --warmup=3 --full --validation "
                    "--num-test-calls 7");
  cr_expect(options.smallest == 1 << 10 && options.largest == 2 << 10);
  cr_expect(options.iterations == 5 && options.warmups == 3 && options.tests == 7);
  cr_expect(options.full && options.check);
  options = read_arguments("iallreduce", "-f -c");
  cr_expect(options.full && options.check && options.factor == 2);
}

/* The program accepts the options of nccl-tests' all_reduce_perf, e.g. -b 8 -e 128M. */
Test(bench, nccl_tests_options_are_read) {
  struct bench_options options =
      read_arguments("allreduce", "-b 8 -e 128M -f 4 -n 5 -w 3 -c 1 -g 1");
  cr_expect(options.smallest == 8 && options.largest == 128 << 20 && options.factor == 4);
  cr_expect(options.iterations == 5 && options.warmups == 3);
  cr_expect(options.check && !options.full);
  options = read_arguments("allreduce", "--minbytes 64M --stepfactor=2 --check 0");
  cr_expect(options.smallest == 64 << 20 && options.largest == 64 << 20 && !options.check);
  options = read_arguments("allreduce", "-b8 -e1M -f4 -c1");
  cr_expect(options.largest == 1 << 20 && options.factor == 4 && options.check && !options.full);
  options = read_arguments("allreduce", "-f 8 -c0");
  cr_expect(options.factor == 8 && !options.check);
}

static enum tool_asked parse_word(char *word) {
  struct bench_options options;
  char error[TOOL_ERROR], name[] = "onebit-bench";
  char *argv[] = {name, name, word, NULL};
  return bench_options_parse(3, argv, bench_find_benchmark("codec"), &options, error);
}

Test(bench, a_version_is_asked_for_by_a_letter) {
  char words[][3] = {"-v", "-h"};
  cr_expect_eq(parse_word(words[0]), TOOL_VERSION);
  cr_expect_eq(parse_word(words[1]), TOOL_HELP);
}

Test(bench, streams_are_a_list) {
  struct bench_options options = read_arguments("codec", "--streams 3,16");
  cr_expect_eq(options.stream_count, 2);
  cr_expect(options.streams[0] == 3 && options.streams[1] == 16);
}

Test(bench, streams_have_a_default) {
  struct bench_options options = read_arguments("codec", "");
  cr_expect(options.stream_count == 3 && options.streams[0] == 2 && options.streams[2] == 8);
}

#ifdef ONEBIT_HAVE_CUDA

Test(bench, a_device_has_defaults_of_its_own) {
  struct bench_options options = read_arguments("codec", "-d cuda --json");
  cr_expect(options.device == ONEBIT_DEVICE_CUDA && options.json);
  cr_expect(options.smallest == 256 << 20 && options.largest == 256 << 20);
  cr_expect(options.stream_count == 4 && options.streams[0] == 2 && options.streams[3] == 16);
  options = read_arguments("allreduce", "--device cuda");
  cr_expect(options.smallest == 1 << 20 && options.largest == 256 << 20);
  options = read_arguments("allreduce", "--device cuda -m 4K:8K");
  cr_expect(options.smallest == 4 << 10 && options.largest == 8 << 10);
  options = read_arguments("allreduce", "-d cuda -d host");
  cr_expect_eq(options.device, ONEBIT_DEVICE_HOST);
}

Test(bench, a_device_leaves_out_what_is_of_the_host) {
  static const char *const wrong[] = {"--compare exchange", "--nccl-ranks 2 --ranks 2"};
  for (size_t k = 0; k < sizeof wrong / sizeof wrong[0]; k++) {
    struct bench_options options;
    char arguments[64];
    snprintf(arguments, sizeof arguments, "-d cuda %s", wrong[k]);
    cr_expect_not(parse_arguments("allreduce", arguments, &options, NULL), "%s", arguments);
  }
}

#ifdef ONEBIT_HAVE_NCCL
Test(bench, ranks_over_nccl) {
  struct bench_options options = read_arguments("allreduce", "-d cuda --nccl-ranks 3");
  cr_expect(options.nccl && options.nccl_ranks == 3);
  options = read_arguments("allgather", "-d cuda --transport nccl");
  cr_expect(options.nccl && options.nccl_ranks == 0);
}
#endif

#else

Test(bench, a_build_without_cuda_says_so) {
  struct bench_options options;
  char error[TOOL_ERROR];
  cr_expect_not(parse_arguments("codec", "-d cuda", &options, error));
  cr_expect(strstr(error, "built without CUDA"), "%s", error);
}

#endif

Test(bench, ranks_over_sockets) {
  struct bench_options options;
  char error[TOOL_ERROR];
  options = read_arguments("iallreduce", "--transport sockets --connections 3");
  cr_expect(options.sockets && !options.nccl && options.connections == 3);
  cr_expect_not(parse_arguments("allreduce", "--transport sockets --ranks 2", &options, error));
  cr_expect(strstr(error, "cannot be combined with --ranks"), "%s", error);
}

Test(bench, comparisons_are_lists) {
  struct bench_options options =
      read_arguments("allreduce", "--compare automatic,allgather:dense,hierarchical:bits --json "
                                  "--mpi-algorithms all --schedule exchange --wire dense");
  cr_expect_eq(options.compare_count, 3);
  cr_expect_eq(options.compare[0].schedule, ONEBIT_SCHEDULE_AUTOMATIC);
  cr_expect_eq(options.compare[0].wire, ONEBIT_WIRE_BITS);
  cr_expect_eq(options.compare[1].schedule, ONEBIT_SCHEDULE_ALLGATHER);
  cr_expect_eq(options.compare[1].wire, ONEBIT_WIRE_DENSE);
  cr_expect_eq(options.compare[2].schedule, ONEBIT_SCHEDULE_HIERARCHICAL);
  cr_expect_eq(options.compare[2].wire, ONEBIT_WIRE_BITS);
  cr_expect_eq(options.variant.schedule, ONEBIT_SCHEDULE_EXCHANGE);
  cr_expect_eq(options.variant.wire, ONEBIT_WIRE_DENSE);
  cr_expect(options.json);
  cr_expect(options.all_algorithms);
}

Test(bench, rates_are_bytes_a_second) {
  struct bench_options options = read_arguments("allreduce", "--rate 1gbit --cores 2");
  cr_expect(options.rate == 125e6 && options.cores == 2);
}

Test(bench, comparisons_have_defaults) {
  struct bench_options options =
      read_arguments("allreduce", "--mpi-algorithms all --mpi-algorithms default");
  cr_expect(!options.all_algorithms);
  options = read_arguments("iallreduce", "");
  cr_expect_eq(options.tests, BENCH_BY_TIME);
  cr_expect_eq(options.compare_count, 0);
  options = read_arguments("iallreduce", "-t 0");
  cr_expect_eq(options.tests, 0);
}

/* The wrong arguments of each subcommand, separated by bars. */
Test(bench, wrong_command_lines_get_words) {
  static const char *const wrong[][2] = {
      {"allreduce",
       "-t 5|--schedule ring|--schedule exchange:dense|--wire 16|--compare ,|--cores 2|"
       "--compare exchange:64|--compare exchange,|--compare exchange:|"
       "--compare exchange:bits:dense|--compare exchange:dens|--compare exchange;allgather|"
       "--mpi-algorithms ring|-d gpu|--transport tcp|--transport nccl|--connections 2|"
       "--connections 65 --transport sockets|--nccl-ranks 2|--nccl-ranks 0|-m 2M:1M|-m 3|-m 1T|"
       "-m :1M|-m 1M:2M:3M|-m -1|-m 99999999999999999999|-m 99999999999G|-i 0|-i 99999999999|"
       "-x -1|--block-size 0|--block-size none|--scale max|--dtype double|--chunk 0|--threads 0|"
       "--codec mmx|--ranks 0|--ranks 4097|--streams 2|-m :|-m 2:|-b 3|-b 2048 -e 1K|-n 0|"
       "--stepfactor 1|-g 2|--check no"},
      {"iallreduce", "--compare exchange|--mpi-algorithms all|-t -1|-d cuda"},
      {"codec",
       "--csv --json|--transport sockets|--nccl-ranks 2|--ranks 2|-c|--threads 2|--streams 0|"
       "--streams 2,|--streams 1025|--streams 1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1|--check 1"},
      {"optimizers", "--dtype float16|--streams 2"},
      {"allreduce", "--compare " THIRTEEN},
  };
  for (size_t k = 0; k < sizeof wrong / sizeof wrong[0]; k++) {
    char all[1400], *rest = all;
    snprintf(all, sizeof all, "%s", wrong[k][1]);
    for (char *one; (one = strsep(&rest, "|"));) {
      struct bench_options options;
      char error[TOOL_ERROR];
      cr_expect_not(parse_arguments(wrong[k][0], one, &options, error), "%s %s", wrong[k][0], one);
      cr_expect(strncmp(error, one, strcspn(one, " =")) == 0,
                "%s: the message does not begin with it: %s", one, error);
    }
  }
}

Test(bench, statistics_of_few_samples) {
  double four[] = {4, 1, 3, 10}, one[] = {7}, scratch[4];
  struct bench_statistics s = bench_statistics(four, 4);
  cr_expect(s.minimum == 1 && s.median == 3.5 && s.mean == 4.5 && s.maximum == 10);
  s = bench_statistics(one, 1);
  cr_expect(s.minimum == 7 && s.median == 7 && s.percentile90 == 7 && s.maximum == 7);
  double hundred[101];
  for (int i = 0; i <= 100; i++)
    hundred[i] = 100 - i;
  s = bench_statistics(hundred, 101);
  cr_expect(s.median == 50 && s.percentile90 == 90 && s.percentile99 == 99 && s.maximum == 100);
  const double a[] = {1, 2, 30}, b[] = {2, 2, 2};
  cr_expect_eq(bench_ratio(a, b, 3, scratch).median, 1);
}

/* Returns the progress line of a measurement that began `seconds` ago and is a quarter done. */
static const char *read_progress(double seconds, bool open) {
  static char text[1000];
  struct bench_progress progress = {
      .open = open, .what = "codec of 64 bytes", .start = ob_seconds() - seconds};
  cr_redirect_stderr();
  for (int k = 0; k < 2; k++) /* the second call comes too early to print */
    bench_progress_show(&progress, "store", 0.25, 3);
  bench_progress_clear(&progress);
  fflush(stderr);
  fclose(stderr);
  text[fread(text, 1, sizeof text - 1, cr_get_redirected_stderr())] = '\0';
  return text;
}

Test(bench, progress_is_printed_after_seconds) {
  cr_expect_str_eq(read_progress(6, true),
                   "onebit-bench: codec of 64 bytes: store, 25 %, 9 s left\n");
}

Test(bench, progress_is_not_printed_early) { cr_expect_str_eq(read_progress(0, true), ""); }

Test(bench, progress_is_rank_0_s) { cr_expect_str_eq(read_progress(6, false), ""); }

Test(bench, data_is_never_constant) {
  float a[4000], b[4000];
  bench_fill_values(a, 4000, 1);
  bench_fill_values(b, 4000, 2);
  size_t equal = 0, zeros = 0, negative = 0;
  for (size_t i = 0; i < 4000; i++) {
    equal += a[i] == b[i] || (i > 0 && a[i] == a[i - 1]);
    zeros += a[i] == 0;
    negative += a[i] < 0;
  }
  cr_expect(equal < 10 && zeros == 0, "%zu equal, %zu zeros", equal, zeros);
  cr_expect(negative > 1800 && negative < 2200, "%zu of 4000 are negative", negative);
}

/* --- Option -c, which checks results */

/* Settings of a collective whose result is 5 % too large in one element, on ranks whose bit is set
 * in wrong_on. */
static unsigned wrong_on;
static onebit_operation_t wrong_operation;
static onebit_dtype_t wrong_dtype;
static size_t wrong_at;
static _Thread_local int own_rank;

#define NONE 0
#define ALL  ~0u

static onebit_status_t call_wrong(const void *sendbuf, void *recvbuf, onebit_plan_t plan) {
  onebit_status_t status = bench_collectives[wrong_operation].call(sendbuf, recvbuf, plan);
  if (wrong_on >> own_rank & 1)
    ob_store(recvbuf, wrong_at, wrong_dtype, 1.05f * ob_load(recvbuf, wrong_at, wrong_dtype));
  return status;
}

static int check_on_rank(struct bench_team *team, const void *context) {
  struct bench_options options = {.dtype = wrong_dtype, .threads = 1, .no_dense = true};
  struct bench_collective collective = bench_collectives[wrong_operation];
  struct bench_case test;
  bool right = true;
  (void)context;
  own_rank = team->rank;
  collective.call = call_wrong;
  int status = bench_case_create(team, &options, &collective, 100003 * sizeof(float), &test);
  if (status != BENCH_OK)
    return 100;
  for (int step = 0; step < 3 && right && status == BENCH_OK; step++)
    status = bench_case_check(&test, &right);
  bench_case_destroy(&test);
  return status != BENCH_OK ? 100 : right ? 0 : 1;
}

static void check_collectives(unsigned wrong, int expected) {
  for (int operation = 0; operation < 3; operation++)
    for (int dtype = 0; dtype < 3; dtype++) {
      wrong_on = wrong;
      wrong_operation = (onebit_operation_t)operation;
      wrong_dtype = (onebit_dtype_t)dtype;
      wrong_at = 33331; /* an index in the middle, so that every rank checks it */
      cr_expect_eq(bench_team_run_threads(RANKS, check_on_rank, NULL), expected, "%s of %s",
                   bench_collectives[operation].name, bench_dtypes[wrong_dtype]);
    }
}

Test(bench, check_passes_what_is_right) { check_collectives(NONE, 0); }

Test(bench, check_fails_what_is_wrong_on_all_ranks) { check_collectives(ALL, 1); }

Test(bench, check_fails_what_is_wrong_on_one_rank) { check_collectives(1u << 1, 1); }

/* --- Ranks that are processes */

/* Combines more numbers than fit into one exchange. The exit status tells whether the results are
 * correct. */
static int combine_many(struct bench_team *team, const void *context) {
  static double values[10000];
  const size_t count = sizeof values / sizeof values[0];
  bool right = team->size == *(const int *)context && onebit_comm_size(team->comm) == 1;
  for (size_t i = 0; i < count; i++)
    values[i] = (double)i + team->rank;
  team->kind->combine(team, values, count, false);
  for (size_t i = 0; i < count; i++)
    right = right && values[i] == (double)i + team->size - 1;
  for (size_t i = 0; i < count; i++)
    values[i] = 1;
  team->kind->combine(team, values, count, true);
  for (size_t i = 0; i < count; i++)
    right = right && values[i] == team->size;
  return right && bench_team_agree(team, right) ? BENCH_OK : BENCH_FAILED;
}

Test(bench, processes_combine_their_numbers) {
  for (int ranks = 1; ranks <= 3; ranks++)
    cr_expect_eq(bench_team_run_processes(ranks, combine_many, &ranks), BENCH_OK, "%d", ranks);
}

/* Returns early on one rank, while the other ranks wait for it. */
static int leave_early(struct bench_team *team, const void *context) {
  if (team->rank == 1)
    return *(const int *)context;
  team->kind->barrier(team);
  return BENCH_OK;
}

Test(bench, processes_do_not_wait_for_one_that_failed) {
  int status = BENCH_USAGE;
  cr_expect_eq(bench_team_run_processes(3, leave_early, &status), BENCH_USAGE);
}
