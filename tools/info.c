/*
 * onebit-info: prints the properties of this build of the library, and what the library chooses on
 * this machine.
 */
#define _GNU_SOURCE /* environ */
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "base/knobs.h"
#include "base/log.h"
#include "base/process.h"
#include "collectives/cost/tuning.h"
#include "collectives/plan.h"
#include "collectives/steps.h"
#include "collectives/watch.h"
#include "compression/codec.h"
#include "dropin/rules.h"
#include "onebit/onebit.h"
#include "optimizers/method.h"
#include "tools/options.h"

#ifdef ONEBIT_HAVE_MPI
#include <mpi.h>
#endif
#ifdef ONEBIT_HAVE_CUDA
#include <cuda_runtime_api.h>

#include "cuda/device.h"
#endif
#ifdef ONEBIT_HAVE_NCCL
#include <nccl.h>
#endif

/* --- Knobs, with their values in force ---------------------------------------------------------*/

/* Writes the value that the library uses for a knob: the given value or the default. Returns an
 * error if the library rejects the given value. */
static onebit_status_t resolve_knob(enum ob_knob knob, char *value, size_t capacity) {
  const char *text = ob_knob_text(knob);
  const struct ob_codec *codec;
  struct ob_plan_shape shape;
  struct ob_rules rules;
  onebit_status_t status = ONEBIT_OK;
  bool thread;
  double seconds;
  struct ob_bits bits;
  enum ob_log_level level;
  int on;
  snprintf(value, capacity, "%s", text ? text : knob == OB_KNOB_REPORT ? "1" : "-");
  switch (knob) {
  case OB_KNOB_CODEC:
    if ((status = ob_codec_choose(&codec)) == ONEBIT_OK)
      snprintf(value, capacity, "%s", codec->name);
    break;
  case OB_KNOB_THREADS:
    if ((status = ob_plan_resolve(NULL, &shape)) == ONEBIT_OK)
      snprintf(value, capacity, "%d", shape.options.threads);
    break;
  case OB_KNOB_EXPLAIN:
  case OB_KNOB_REQUIRE:
  case OB_KNOB_EVERY_RANK:
  case OB_KNOB_GRADIENTS:
    if ((status = ob_knob_number(knob, 0, 1, 0, &on)) == ONEBIT_OK)
      snprintf(value, capacity, "%d", on);
    break;
  case OB_KNOB_PROGRESS:
    if ((status = ob_progress_wanted(&thread)) == ONEBIT_OK)
      snprintf(value, capacity, "%s", thread ? "thread" : "calls");
    break;
  case OB_KNOB_TIMEOUT:
    if ((status = ob_watch_timeout(&seconds)) == ONEBIT_OK)
      isinf(seconds) ? snprintf(value, capacity, "never")
                     : snprintf(value, capacity, "%g", seconds);
    break;
  case OB_KNOB_BITS:
    if ((status = ob_knob_bits(OB_SAFE_BITS, &bits)) == ONEBIT_OK)
      snprintf(value, capacity, bits.max > bits.min ? "%d..%d" : "%d", bits.min, bits.max);
    break;
  case OB_KNOB_BUDGET:
    if ((status = ob_knob_budget(&seconds)) == ONEBIT_OK && text)
      snprintf(value, capacity, "%g", seconds);
    break;
  case OB_KNOB_RULES:
    status = ob_rules_load(text, &rules);
    break;
  case OB_KNOB_CONFIG:
    status = ob_config_check();
    break;
  case OB_KNOB_DEBUG:
    if ((status = ob_log_read_level(&level)) == ONEBIT_OK && !text)
      snprintf(value, capacity, "WARN");
    break;
  case OB_KNOB_METRICS_EVERY:
    if ((status = ob_knob_number(knob, 1, INT_MAX, 10, &on)) == ONEBIT_OK)
      snprintf(value, capacity, "%d", on);
    break;
  case OB_KNOB_JOB:
  case OB_KNOB_METRICS:
  case OB_KNOB_DEBUG_FILE:
  case OB_KNOB_TUNING: /* print_tuning reports a file that cannot be used */
  case OB_KNOB_REPORT:
  case OB_KNOB_COMMAND:
  case OB_KNOB_COUNT:
    break;
  }
  return status;
}

/* Prints the environment variables that begin with ONEBIT_ but are no knobs of the C library:
 * typing errors, or variables of the Python package and of builds. */
static void print_unknown_variables(void) {
  for (char **variable = environ; *variable; variable++) {
    const size_t length = strcspn(*variable, "=");
    bool known = strncmp(*variable, "ONEBIT_", 7) != 0;
    for (enum ob_knob knob = 0; knob < OB_KNOB_COUNT; knob++)
      known |= strlen(ob_knobs[knob].name) == length &&
               strncmp(*variable, ob_knobs[knob].name, length) == 0;
    if (!known)
      printf("  %.*s: the C library does not read it\n", (int)length, *variable);
  }
}

static bool print_knobs(void) {
  bool all_good = true;
  printf("knobs\n");
  for (enum ob_knob knob = 0; knob < OB_KNOB_COUNT; knob++) {
    const char *text = ob_knob_text(knob);
    char value[64];
    bool good = resolve_knob(knob, value, sizeof value) == ONEBIT_OK;
    printf("  %-15s %-8s %-12s %s\n", ob_knobs[knob].name, good ? value : text,
           ob_knob_origin(knob), ob_knobs[knob].meaning);
    if (!good)
      printf("  %-15s wrong: %s\n", "", onebit_last_error());
    else if (!text)
      printf("  %-15s default: %s\n", "", ob_knobs[knob].fallback);
    all_good &= good;
  }
  print_unknown_variables();
  return all_good;
}

/* --- CUDA --------------------------------------------------------------------------------------*/

#ifdef ONEBIT_HAVE_CUDA
static void print_device(int number) {
  struct cudaDeviceProp properties;
  cudaError_t error = cudaGetDeviceProperties(&properties, number);
  if (error == cudaSuccess)
    error = cudaSetDevice(number);
  if (error == cudaSuccess)
    error = cudaFree(NULL); /* creates a context, which a GPU may refuse */
  if (error != cudaSuccess) {
    printf("  device %-8d %s\n", number, cudaGetErrorString(error));
    return;
  }
  bool usable = ob_cuda_current_device(&number) == ONEBIT_OK;
  printf("  device %-8d %s, compute capability %d.%d, %.1f GiB, %s\n", number, properties.name,
         properties.major, properties.minor,
         (double)properties.totalGlobalMem / (double)((size_t)1 << 30),
         usable ? "usable" : onebit_last_error());
}

static void print_version(const char *name, int version) {
  if (version)
    printf("%s %d.%d", name, version / 1000, version % 1000 / 10);
  else
    printf("no %s", name);
}

static void print_cuda(void) {
  int runtime = 0, driver = 0, count = 0;
  cudaRuntimeGetVersion(&runtime);
  cudaDriverGetVersion(&driver); /* 0: no driver */
  printf("CUDA              ");
  print_version("runtime", runtime);
  printf(", ");
  print_version("driver", driver);
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess)
    printf("; no device: %s\n", cudaGetErrorString(error));
  else
    printf("; %d device%s\n", count, count == 1 ? "" : "s");
  for (int number = 0; error == cudaSuccess && number < count; number++)
    print_device(number);
#ifdef ONEBIT_HAVE_NCCL
  int version = 0;
  ncclResult_t result = ncclGetVersion(&version);
  if (result == ncclSuccess)
    printf("NCCL              %d.%d.%d\n", version / 10000, version / 100 % 100, version % 100);
  else
    printf("NCCL              %s\n", ncclGetErrorString(result));
#else
  printf("NCCL              built without NCCL\n");
#endif
}
#else
static void print_cuda(void) { printf("CUDA              built without CUDA\n"); }
#endif

/* --- Codecs, threads, MPI and tuning -----------------------------------------------------------*/

static void print_codecs(void) {
  const struct ob_codec *codec, *chosen = NULL;
  bool good = ob_codec_choose(&chosen) == ONEBIT_OK;
  printf("codecs, the fastest first\n");
  for (size_t i = 0; (codec = ob_codec_row(i)); i++)
    printf("  %-15s %s%s\n", codec->name,
           ob_codec_usable(codec) ? "usable" : "not usable on this processor",
           good && codec == chosen ? ", chosen" : "");
  if (!good)
    printf("  %-15s no codec is chosen: %s\n", "", onebit_last_error());
}

static void print_threads(void) {
  char threads[64];
  bool good = resolve_knob(OB_KNOB_THREADS, threads, sizeof threads) == ONEBIT_OK;
#ifdef _OPENMP
  printf("threads           OpenMP %d; ", _OPENMP);
#else
  printf("threads           built without OpenMP, so plans compress with one thread; ");
#endif
  printf("%d processors; ", ob_machine_processors());
  if (good)
    printf("a plan without the option threads uses %s\n", threads);
  else
    printf("no plan can be made: %s\n", onebit_last_error());
}

static void print_mpi(void) {
#ifdef ONEBIT_HAVE_MPI
  char name[MPI_MAX_LIBRARY_VERSION_STRING];
  int length, version, subversion;
  MPI_Get_library_version(name, &length); /* these two functions may be called before MPI_Init */
  MPI_Get_version(&version, &subversion);
  name[strcspn(name, "\n")] = '\0';
  printf("MPI               %d.%d: %s\n", version, subversion, name);
#else
  printf("MPI               built without MPI\n");
#endif
}

static void print_tuning(void) {
  struct ob_costs costs;
  ob_tuning_find(&costs);
  printf("tuning            %s\n", costs.source);
}

int main(int argc, char **argv) {
  static const struct tool_option rows[] = {{.kind = TOOL_END}};
  static const struct tool tool = {
      .name = "onebit-info",
      .usage = "onebit-info [--help]",
      .purpose = "Prints the version, the codecs and the chosen codec, the threads, the MPI "
                 "library, CUDA and its\ndevices, and every ONEBIT_ variable with its value and "
                 "where the value comes from.",
      .options = rows,
      .notes = "Exit status: 0; 1 if the library refuses the value of a variable; 2 for a wrong "
               "command line."};
  char error[TOOL_ERROR];
  enum tool_asked asked = tool_parse(&tool, &argc, argv, NULL, error);
  if (asked != TOOL_RUN)
    return tool_print_answer(&tool, asked, error);
  printf("onebit            %s\n", onebit_version());
  print_codecs();
  print_threads();
  print_mpi();
  print_cuda();
  print_tuning();
  bool good = print_knobs();
  return good ? 0 : 1;
}
