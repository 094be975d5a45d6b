/*
 * A program that, like Python, is linked neither to onebit nor to MPI. tests/scripts/check-preload
 * runs it:
 *
 *   loaded LIBONEBIT                   prints the error of a process without MPI
 *   loaded LIBONEBIT LIBMPI            loads both without RTLD_GLOBAL, uses them, and closes them
 *   loaded LIBONEBIT LIBMPI PRELOAD    the same, but libonebit-mpi.so defines MPI's calls
 */
#include <dlfcn.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "onebit/mpi.h"
#include "onebit/onebit.h"

enum { COUNT = 20000, STEPS = 30 };

static void *onebit, *mpi, *preload;

static void fail(const char *what, const char *why) {
  fprintf(stderr, "%s: %s\n", what, why ? why : "wrong");
  exit(3);
}

static void *open_library(const char *path) {
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library)
    fail(path, dlerror());
  return library;
}

static void *find_function(void *library, const char *name) {
  void *found = dlsym(library, name);
  if (!found)
    fail(name, "is not there");
  return found;
}

/* Calls a function of a library through a pointer of the type that the headers declare. */
#define CALL(library, name) (*(__typeof__(name) **)&(void *){find_function(library, #name)})

static MPI_Comm find_world(void) {
#ifdef OPEN_MPI
  return find_function(mpi, "ompi_mpi_comm_world");
#else
  return MPI_COMM_WORLD;
#endif
}

static MPI_Datatype find_float_type(void) {
#ifdef OPEN_MPI
  return find_function(mpi, "ompi_mpi_float");
#else
  return MPI_FLOAT;
#endif
}

static MPI_Op find_sum_operation(void) {
#ifdef OPEN_MPI
  return find_function(mpi, "ompi_mpi_op_sum");
#else
  return MPI_SUM;
#endif
}

static void check_values(const float *values, float wanted) {
  for (int i = 0; i < COUNT; i++)
    if (values[i] != (i % 3 ? wanted : -wanted))
      fail("a sum", NULL);
}

static void use_library(void) {
  static float values[COUNT];
  onebit_comm_t comm;
  onebit_plan_t plan;
  if (CALL(onebit, onebit_comm_create_mpi)(find_world(), &comm) != ONEBIT_OK ||
      CALL(onebit, onebit_plan_create)(comm, COUNT, NULL, &plan) != ONEBIT_OK)
    fail("onebit", CALL(onebit, onebit_last_error)());
  for (int step = 0; step < STEPS; step++) {
    for (int i = 0; i < COUNT; i++)
      values[i] = i % 3 ? 0.5F : -0.5F;
    if (CALL(onebit, onebit_allreduce)(values, values, plan) != ONEBIT_OK)
      fail("onebit_allreduce", CALL(onebit, onebit_last_error)());
    check_values(values, 0.5F);
  }
  CALL(onebit, onebit_plan_destroy)(plan);
  CALL(onebit, onebit_comm_destroy)(comm);
}

static void use_preload(int size) {
  static float values[COUNT], sum[COUNT], more[COUNT];
  for (int step = 0; step < STEPS; step++) {
    MPI_Request request;
    for (int i = 0; i < COUNT; i++)
      values[i] = i % 3 ? 0.5F : -0.5F;
    CALL(preload, MPI_Iallreduce)
    (values, more, COUNT, find_float_type(), find_sum_operation(), find_world(), &request);
    CALL(mpi, MPI_Wait)(&request, MPI_STATUS_IGNORE);
    CALL(preload, MPI_Allreduce)
    (values, sum, COUNT, find_float_type(), find_sum_operation(), find_world());
    check_values(sum, 0.5F * (float)size);
    check_values(more, 0.5F * (float)size);
  }
}

int main(int argc, char **argv) {
  int size = 1;
  MPI_Comm none;
  memset(&none, 0, sizeof none);
  onebit = open_library(argv[1]);
  if (argc == 2) {
    onebit_comm_t comm;
    if (CALL(onebit, onebit_comm_create_mpi)(none, &comm) != ONEBIT_ERROR_UNSUPPORTED)
      fail("onebit_comm_create_mpi", NULL);
    puts(CALL(onebit, onebit_last_error)());
    return 0;
  }
  mpi = open_library(argv[2]);
  preload = argc > 3 ? open_library(argv[3]) : mpi;
  CALL(preload, MPI_Init)(NULL, NULL);
  CALL(mpi, MPI_Comm_size)(find_world(), &size);
  use_library();
  if (argc > 3)
    use_preload(size);
  CALL(preload, MPI_Finalize)();
  if (argc > 3)
    dlclose(preload);
  dlclose(onebit);
  dlclose(mpi);
  puts("done");
  return 0;
}
