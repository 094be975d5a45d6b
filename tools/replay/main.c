/*
 * onebit-replay: runs recorded cases and compares what the library computes with the record.
 * Prints one line a case; exit status 0 when all cases are ok, 1 when one is not, 2 for a wrong
 * command line.
 */
#define _GNU_SOURCE /* getopt_long */
#include <getopt.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/knobs.h"
#include "compression/codec.h"
#include "onebit/onebit.h"
#include "tools/replay/run.h"

#ifdef ONEBIT_HAVE_MPI
#include <mpi.h>
#endif

enum { ALL_OK = 0, SOME_FAILED = 1, WRONG_USE = 2 };

static const char help[] =
    "Usage: onebit-replay [OPTION]... DIR...\n"
    "\n"
    "Runs the recorded case in each DIR on the ranks that mpirun gave, compares every value with\n"
    "the record and prints one line a case:\n"
    "\n"
    "  replay NAME: V values, X exceptions, worst W, ok|FAILED\n"
    "\n"
    "W is the largest relative difference met (for parameters, relative to |p| + 0.1, which is\n"
    "what their absolute tolerance comes to). A value is an exception when it differs by more "
    "than\n"
    "1e-5. Allowed are: of an allreduce one exception in 10,000 values, differing in sign alone; "
    "of\n"
    "an optimizer one in 1,000, by no more than a few update lengths. Reasons go to stderr.\n"
    "\n"
    "  --loopback           ranks are threads of this process, as many as the case has\n"
    "  --codec NAME         scalar, avx2, avx512 or neon, instead of the fastest\n"
    "  --device NAME        host or cuda: where the buffers are, and so what computes\n"
    "  --verbose            adds how far the state after the last step is from the recorded one\n"
    "  --help               prints this\n"
    "\n"
    "Exit status: 0 all cases are ok, 1 some are not, 2 a wrong command line.\n";

struct options {
  bool loopback, verbose, help;
  onebit_device_t device;
  char wrong[REPLAY_WORDS]; /* "" or what is wrong with the command line */
};

/* The codec is chosen as users choose it, for all plans that follow. */
static void set_codec(struct options *options, const char *name) {
  const struct ob_codec *codec;
  if (setenv(ob_knobs[OB_KNOB_CODEC].name, name, 1) != 0)
    snprintf(options->wrong, sizeof options->wrong, "--codec %.60s: no memory", name);
  else if (ob_codec_find(name, &codec) != ONEBIT_OK)
    snprintf(options->wrong, sizeof options->wrong, "--codec: %s", onebit_last_error());
}

static void set_device(struct options *options, const char *name) {
  bool cuda = strcmp(name, "cuda") == 0;
  options->device = cuda ? ONEBIT_DEVICE_CUDA : ONEBIT_DEVICE_HOST;
  if (!cuda && strcmp(name, "host") != 0)
    snprintf(options->wrong, sizeof options->wrong, "--device %.60s: neither host nor cuda", name);
#ifndef ONEBIT_HAVE_CUDA
  else if (cuda)
    snprintf(options->wrong, sizeof options->wrong, "--device cuda: this build is without CUDA");
#endif
}

static void parse(struct options *options, int argc, char **argv) {
  static const struct option table[] = {
      {"loopback", no_argument, NULL, 'l'},     {"codec", required_argument, NULL, 'c'},
      {"device", required_argument, NULL, 'd'}, {"verbose", no_argument, NULL, 'v'},
      {"help", no_argument, NULL, 'h'},         {0}};
  int option;
  opterr = 0; /* all ranks parse, one speaks */
  while ((option = getopt_long(argc, argv, ":", table, NULL)) != -1) {
    options->loopback |= option == 'l';
    options->verbose |= option == 'v';
    options->help |= option == 'h';
    if (option == 'c')
      set_codec(options, optarg);
    else if (option == 'd')
      set_device(options, optarg);
    else if (option == ':' || option == '?')
      snprintf(options->wrong, sizeof options->wrong, "%.60s: %s", argv[optind - 1],
               option == ':' ? "needs a value" : "unknown option");
  }
  if (!*options->wrong && optind == argc)
    snprintf(options->wrong, sizeof options->wrong, "no DIR was given");
}

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
  printf("replay %.*s: ", length, name);
  printf("%llu values, %llu exceptions, worst %.3g, %s", (unsigned long long)result->tally.values,
         (unsigned long long)result->tally.exceptions, result->tally.worst,
         result->verdict == REPLAY_OK ? "ok" : "FAILED");
  for (int k = 0; verbose && k < 2 && result->drifts[k].name; k++)
    printf(", %s %.3g", result->drifts[k].name, result->drifts[k].value);
  putchar('\n');
  fflush(stdout);
  if (result->verdict == REPLAY_FAILED)
    fprintf(stderr, "onebit-replay: %.*s: %s\n", length, name, result->words);
}

static int replay_all(const struct options *options, char **directories, bool speaks) {
  int status = ALL_OK;
  for (; *directories; directories++) {
    struct replay_result result;
    if (options->loopback)
      replay_with_threads(*directories, options->device, &result);
    else
      replay_with_mpi(*directories, options->device, &result);
    if (speaks)
      print_result(*directories, &result, options->verbose);
    if (result.verdict == REPLAY_FAILED)
      status = SOME_FAILED;
  }
  return status;
}

static int run(const struct options *options, char **directories, bool speaks) {
  if (!*options->wrong)
    return replay_all(options, directories, speaks);
  if (speaks)
    fprintf(stderr, "onebit-replay: %s; --help says more\n", options->wrong);
  return WRONG_USE;
}

#ifdef ONEBIT_HAVE_MPI
/* Rank 0 speaks for all. */
static int run_mpi(struct options *options, char **directories) {
  int provided, rank;
  MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided); /* OpenMP's threads do not send */
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  int status = run(options, directories, rank == 0);
  MPI_Finalize();
  return status;
}
#else
static int run_mpi(struct options *options, char **directories) {
  if (!*options->wrong)
    snprintf(options->wrong, sizeof options->wrong,
             "this build is without MPI: ranks can only be threads, --loopback");
  return run(options, directories, true);
}
#endif

int main(int argc, char **argv) {
  struct options options = {0};
  parse(&options, argc, argv);
  if (options.help) {
    fputs(help, stdout);
    return ALL_OK;
  }
  return options.loopback ? run(&options, argv + optind, true) : run_mpi(&options, argv + optind);
}
