/*
 * onebit-info: what this build of the library is, and what it would do on this machine now.
 * Exit status 1 when a knob has a wrong value.
 */
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/knobs.h"
#include "collectives/cost/tuning.h"
#include "collectives/plan.h"
#include "collectives/progress.h"
#include "compression/codec.h"
#include "dropin/rules.h"
#include "onebit/onebit.h"
#include "tools/info/info_cuda.h"

#ifdef ONEBIT_HAVE_MPI
#include <mpi.h>
#endif

static const char help[] =
    "Usage: onebit-info [--help]\n"
    "\n"
    "Prints the version, the codecs and which of them is chosen, the threads, the MPI library, "
    "CUDA\n"
    "and its devices, and every knob of the environment with its value and where it comes from.\n"
    "\n"
    "Exit status: 0, or 1 when a knob has a value that the library refuses, 2 for a wrong command\n"
    "line.\n";

/* --- Knobs: what the library makes of them -----------------------------------------------------*/

/* Fills in the value that counts, in words; a negative status when the library refuses the knob. */
typedef onebit_status_t resolve_knob(char *value, size_t room);

static onebit_status_t resolve_codec(char *value, size_t room) {
  const struct ob_codec *codec;
  onebit_status_t status = ob_codec_choose(&codec);
  if (status == ONEBIT_OK)
    snprintf(value, room, "%s", codec->name);
  return status;
}

static onebit_status_t resolve_threads(char *value, size_t room) {
  struct ob_plan_shape shape;
  onebit_status_t status = ob_plan_resolve(NULL, &shape);
  if (status == ONEBIT_OK)
    snprintf(value, room, "%d", shape.options.threads);
  return status;
}

/* A file that cannot be used is no wrong value: the defaults serve. print_tuning says which. */
static onebit_status_t resolve_tuning(char *value, size_t room) {
  const char *text = ob_knob_text(OB_KNOB_TUNING);
  snprintf(value, room, "%s", text ? text : "-");
  return ONEBIT_OK;
}

/* 0 or 1. */
static onebit_status_t resolve_switch(enum ob_knob knob, char *value, size_t room) {
  int on;
  onebit_status_t status = ob_knob_number(knob, 0, 1, 0, &on);
  if (status == ONEBIT_OK)
    snprintf(value, room, "%d", on);
  return status;
}

static onebit_status_t resolve_explain(char *value, size_t room) {
  return resolve_switch(OB_KNOB_EXPLAIN, value, room);
}

static onebit_status_t resolve_progress(char *value, size_t room) {
  bool thread;
  onebit_status_t status = ob_progress_wanted(&thread);
  if (status == ONEBIT_OK)
    snprintf(value, room, "%s", thread ? "thread" : "calls");
  return status;
}

static onebit_status_t resolve_rules(char *value, size_t room) {
  const char *text = ob_knob_text(OB_KNOB_RULES);
  struct ob_rules rules;
  snprintf(value, room, "%s", text ? text : "-");
  return ob_rules_load(text, &rules);
}

static onebit_status_t resolve_report(char *value, size_t room) {
  const char *text = ob_knob_text(OB_KNOB_REPORT);
  snprintf(value, room, "%s", text ? text : "1");
  return ONEBIT_OK;
}

static onebit_status_t resolve_require(char *value, size_t room) {
  return resolve_switch(OB_KNOB_REQUIRE, value, room);
}

static resolve_knob *const resolvers[] = {
    [OB_KNOB_CODEC] = resolve_codec,       [OB_KNOB_THREADS] = resolve_threads,
    [OB_KNOB_TUNING] = resolve_tuning,     [OB_KNOB_EXPLAIN] = resolve_explain,
    [OB_KNOB_PROGRESS] = resolve_progress, [OB_KNOB_RULES] = resolve_rules,
    [OB_KNOB_REPORT] = resolve_report,     [OB_KNOB_REQUIRE] = resolve_require};
_Static_assert(sizeof resolvers / sizeof resolvers[0] == OB_KNOB_COUNT,
               "every knob's value is checked here");

static bool print_knob(size_t knob) {
  const char *text = ob_knob_text((enum ob_knob)knob);
  char value[64];
  bool good = resolvers[knob](value, sizeof value) == ONEBIT_OK;
  printf("  %-15s %-8s %-12s %s\n", ob_knobs[knob].name, good ? value : text,
         text ? "environment" : "default", ob_knobs[knob].meaning);
  if (!good)
    printf("  %-15s wrong: %s\n", "", onebit_last_error());
  else if (!text)
    printf("  %-15s default: %s\n", "", ob_knobs[knob].fallback);
  return good;
}

static bool print_knobs(void) {
  bool good = true;
  printf("knobs\n");
  for (size_t k = 0; k < OB_KNOB_COUNT; k++)
    good &= print_knob(k);
  return good;
}

/* --- The rest ----------------------------------------------------------------------------------*/

static void print_codecs(void) {
  const struct ob_codec *codec, *chosen = NULL;
  bool good = ob_codec_choose(&chosen) == ONEBIT_OK;
  printf("codecs, the fastest first\n");
  for (size_t i = 0; (codec = ob_codec_row(i)); i++)
    printf("  %-15s %s%s\n", codec->name,
           ob_codec_usable(codec) ? "usable" : "not usable on this processor",
           good && codec == chosen ? ", chosen" : "");
  if (!good)
    printf("  %-15s none is chosen: %s\n", "", onebit_last_error());
}

static void print_threads(void) {
  char threads[64];
  bool good = resolve_threads(threads, sizeof threads) == ONEBIT_OK;
#ifdef _OPENMP
  printf("threads           OpenMP %d; ", _OPENMP);
#else
  printf("threads           built without OpenMP, so plans compress with one thread; ");
#endif
  printf("%ld processors; ", sysconf(_SC_NPROCESSORS_ONLN));
  if (good)
    printf("a plan that does not say asks for %s\n", threads);
  else
    printf("no plan can be made: %s\n", onebit_last_error());
}

static void print_mpi(void) {
#ifdef ONEBIT_HAVE_MPI
  char name[MPI_MAX_LIBRARY_VERSION_STRING];
  int length, version, subversion;
  MPI_Get_library_version(name, &length); /* these two may be called before MPI_Init */
  MPI_Get_version(&version, &subversion);
  name[strcspn(name, "\n")] = '\0';
  printf("MPI               %d.%d: %s\n", version, subversion, name);
#else
  printf("MPI               built without MPI\n");
#endif
}

static void print_cuda(void) {
#ifdef ONEBIT_HAVE_CUDA
  info_print_cuda();
#else
  printf("CUDA              built without CUDA\n");
#endif
}

static void print_tuning(void) {
  struct ob_costs costs;
  ob_tuning_find(&costs);
  printf("tuning            %s\n", costs.source);
}

int main(int argc, char **argv) {
  if (argc == 2 && strcmp(argv[1], "--help") == 0) {
    fputs(help, stdout);
    return 0;
  }
  if (argc > 1) {
    fprintf(stderr, "onebit-info: %s: takes no argument but --help\n", argv[1]);
    return 2;
  }
  printf("onebit            %s\n", onebit_version());
  print_codecs();
  print_threads();
  print_mpi();
  print_cuda();
  print_tuning();
  return print_knobs() ? 0 : 1;
}
