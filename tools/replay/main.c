/* onebit-replay: the command line, and a line for each case. */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/knobs.h"
#include "compression/codec.h"
#include "onebit/onebit.h"
#include "tools/options.h"
#include "tools/replay/replay.h"

#ifdef ONEBIT_HAVE_MPI
#include <mpi.h>
#endif

enum { ALL_OK = 0, SOME_FAILED = 1 };

struct options {
  bool loopback, verbose;
  int device;
};

/* The codec is chosen as users choose it, for all plans that follow. */
static const char *read_codec(void *values, const char *name) {
  const struct ob_codec *codec;
  (void)values;
  if (setenv(ob_knobs[OB_KNOB_CODEC].name, name, 1) != 0)
    return "no memory";
  return ob_codec_find(name, &codec) == ONEBIT_OK ? NULL : onebit_last_error();
}

#define AT(field) offsetof(struct options, field)
static const char *const devices[] = {
    [ONEBIT_DEVICE_HOST] = "host", [ONEBIT_DEVICE_CUDA] = "cuda", NULL};

static const struct tool_option rows[] = {
    {"loopback", 0, TOOL_FLAG, AT(loopback),
     .help = "ranks are threads of this process, as many as the case has"},
    {"codec", 0, TOOL_CALL, .argument = "NAME",
     .help = "scalar, avx2, avx512 or neon, instead of the fastest", .read = read_codec},
    {"device", 0, TOOL_CHOICE, AT(device), "NAME",
     "host or cuda: where the buffers are, and so what computes", .names = devices},
    {"verbose", 0, TOOL_FLAG, AT(verbose),
     .help = "adds how far the state after the last step is from the recorded one"},
    {0}};

static const struct tool tool = {
    .name = "onebit-replay",
    .usage = "onebit-replay [OPTION]... DIR...",
    .purpose =
        "Runs the recorded case in each DIR on the ranks that mpirun gave, compares every value "
        "with\nthe record and prints one line a case:\n\n"
        "  replay NAME: V values, X exceptions, worst W, ok|FAILED\n\n"
        "W is the largest relative difference met (for parameters, relative to |p| + 0.1, which "
        "is\nwhat their absolute tolerance comes to). A value is an exception when it differs by "
        "more than\n1e-5. Allowed are: of an allreduce one exception in 10,000 values, differing "
        "in sign alone; of\nan optimizer one in 1,000, by no more than a few update lengths. "
        "Reasons go to stderr.",
    .options = rows,
    .notes = "Exit status: 0 all cases are ok, 1 some are not, 2 a wrong command line.",
    .operands = true};

/* The directory's own name, as the caller wrote it: where it begins, and its length. */
static const char *name_of(const char *directory, int *length) {
  size_t end = strlen(directory), begin;
  while (end > 1 && directory[end - 1] == '/')
    end--;
  for (begin = end; begin > 0 && directory[begin - 1] != '/';)
    begin--;
  if (begin == end) /* the root */
    begin = 0;
  *length = (int)(end - begin);
  return directory + begin;
}

static void print_result(const char *directory, const struct replay_result *result, bool verbose) {
  int length;
  const char *name = name_of(directory, &length);
  printf("replay %.*s: %llu values, %llu exceptions, worst %.3g, %s", length, name,
         (unsigned long long)result->tally.values, (unsigned long long)result->tally.exceptions,
         result->tally.worst, result->verdict == REPLAY_OK ? "ok" : "FAILED");
  for (int k = 0; verbose && k < 2 && result->drifts[k].name; k++)
    printf(", %s %.3g", result->drifts[k].name, result->drifts[k].value);
  putchar('\n');
  fflush(stdout);
  if (result->verdict == REPLAY_FAILED)
    tool_complain(&tool, "%.*s: %s", length, name, result->error);
}

static int replay_all(const struct options *options, char **directories, bool speaks) {
  int status = ALL_OK;
  for (; *directories; directories++) {
    struct replay_result result;
    (options->loopback ? replay_with_threads
                       : replay_with_mpi)(*directories, (onebit_device_t)options->device, &result);
    if (speaks)
      print_result(*directories, &result, options->verbose);
    if (result.verdict == REPLAY_FAILED)
      status = SOME_FAILED;
  }
  return status;
}

/* Of several ranks all parse, and one says what is wrong. */
static int run(const struct options *options, char **directories, const char *wrong, bool speaks) {
  if (!*wrong)
    return replay_all(options, directories, speaks);
  return speaks ? tool_answer(&tool, TOOL_WRONG, wrong) : TOOL_USAGE;
}

int main(int argc, char **argv) {
  struct options options = {0};
  char wrong[TOOL_ERROR];
  enum tool_asked asked = tool_parse(&tool, &argc, argv, &options, wrong);
  if (asked == TOOL_HELP || asked == TOOL_VERSION)
    return tool_answer(&tool, asked, wrong);
  if (asked == TOOL_RUN && argc == 1)
    snprintf(wrong, sizeof wrong, "no DIR was given");
#ifndef ONEBIT_HAVE_CUDA
  if (!*wrong && options.device == ONEBIT_DEVICE_CUDA)
    snprintf(wrong, sizeof wrong, "--device cuda: this build is without CUDA");
#endif
  if (options.loopback)
    return run(&options, argv + 1, wrong, true);
#ifdef ONEBIT_HAVE_MPI
  int provided, rank;
  MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided); /* OpenMP's threads do not send */
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  int status = run(&options, argv + 1, wrong, rank == 0);
  MPI_Finalize();
  return status;
#else
  if (!*wrong)
    snprintf(wrong, sizeof wrong,
             "this build is without MPI: ranks can only be threads, --loopback");
  return run(&options, argv + 1, wrong, true);
#endif
}
