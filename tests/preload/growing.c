/*
 * An MPI library that gets two more performance variables in MPI_Init, and a category of them: for
 * tests/scripts/check-preload, between libonebit-mpi.so and the MPI library. They can be found, not
 * read.
 */
#define _GNU_SOURCE /* RTLD_NEXT */
#include <dlfcn.h>
#include <mpi.h>
#include <stdio.h>
#include <string.h>

enum { MORE = 2 };

static const char *const names[MORE] = {"grown_first", "grown_second"};

/* The call of that name that the MPI library has. */
static void *next(const char *name) { return dlsym(RTLD_NEXT, name); }
#define NEXT(result, name, ...)                                                                    \
  int (*result)(__VA_ARGS__);                                                                      \
  void *result##_found = next(name);                                                               \
  memcpy(&result, &result##_found, sizeof result)

static int has_grown(void) {
  int initialized = 0;
  PMPI_Initialized(&initialized);
  return initialized;
}

static int of_mpi(void) {
  NEXT(get_num, "PMPI_T_pvar_get_num", int *);
  int num = 0;
  get_num(&num);
  return num;
}

int PMPI_T_pvar_get_num(int *num) {
  NEXT(get_num, "PMPI_T_pvar_get_num", int *);
  int code = get_num(num);
  if (code == MPI_SUCCESS && has_grown())
    *num += MORE;
  return code;
}

int PMPI_T_pvar_get_info(int index, char *name, int *name_len, int *verbosity, int *class,
                         MPI_Datatype *datatype, MPI_T_enum *values, char *words, int *words_len,
                         int *bind, int *readonly, int *continuous, int *atomic) {
  NEXT(get_info, "PMPI_T_pvar_get_info", int, char *, int *, int *, int *, MPI_Datatype *,
       MPI_T_enum *, char *, int *, int *, int *, int *, int *);
  if (index < of_mpi())
    return get_info(index, name, name_len, verbosity, class, datatype, values, words, words_len,
                    bind, readonly, continuous, atomic);
  *name_len = snprintf(name, (size_t)*name_len, "%s", names[index - of_mpi()]) + 1;
  *class = MPI_T_PVAR_CLASS_COUNTER;
  return MPI_SUCCESS;
}

int PMPI_T_pvar_get_index(const char *name, int class, int *index) {
  NEXT(get_index, "PMPI_T_pvar_get_index", const char *, int, int *);
  for (int i = 0; i < MORE && has_grown(); i++)
    if (!strcmp(name, names[i])) {
      *index = of_mpi() + i;
      return MPI_SUCCESS;
    }
  return get_index(name, class, index);
}

static int categories(void) {
  NEXT(get_num, "PMPI_T_category_get_num", int *);
  int num = 0;
  get_num(&num);
  return num;
}

int MPI_T_category_get_num(int *num) {
  *num = categories() + 1;
  return MPI_SUCCESS;
}

int PMPI_T_category_get_info(int index, char *name, int *name_len, char *words, int *words_len,
                             int *cvars, int *pvars, int *within) {
  NEXT(get_info, "PMPI_T_category_get_info", int, char *, int *, char *, int *, int *, int *,
       int *);
  if (index < categories())
    return get_info(index, name, name_len, words, words_len, cvars, pvars, within);
  if (name_len)
    *name_len = snprintf(name, (size_t)*name_len, "growth") + 1;
  *pvars = MORE;
  return MPI_SUCCESS;
}

int MPI_T_category_get_info(int index, char *name, int *name_len, char *words, int *words_len,
                            int *cvars, int *pvars, int *within) {
  return PMPI_T_category_get_info(index, name, name_len, words, words_len, cvars, pvars, within);
}

int PMPI_T_category_get_pvars(int index, int length, int indices[]) {
  NEXT(get_pvars, "PMPI_T_category_get_pvars", int, int, int[]);
  if (index < categories())
    return get_pvars(index, length, indices);
  for (int i = 0; i < MORE && i < length; i++)
    indices[i] = of_mpi() + i;
  return MPI_SUCCESS;
}
