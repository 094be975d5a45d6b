/* Reads what launchers say of a job in the environment of its ranks. */
#ifdef ONEBIT_HAVE_MPI
#include "base/launch_mpi.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/error.h"

static const struct launcher {
  const char *size; /* its variable */
  const char *sign; /* set by this launcher and by no other that has the same variables */
  bool open_mpi;    /* it starts ranks of Open MPI; otherwise of MPICH's relatives */
} launchers[] = {{"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", true},
                 {"PMI_SIZE", "MPI_LOCALNRANKS", false},
                 {"MPI_LOCALNRANKS", "MPI_LOCALNRANKS", false}}; /* of this host: -pmi-port */

static int number_of_variable(const char *name) {
  const char *text = getenv(name);
  return text ? atoi(text) : 0;
}

static const struct launcher *launch_find(void) {
  for (size_t i = 0; i < sizeof launchers / sizeof launchers[0]; i++)
    if (number_of_variable(launchers[i].size) > 0)
      return &launchers[i];
  return NULL;
}

int ob_launch_rank(void) {
  static const char *const names[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMI_ID", "PMIX_RANK"};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
    if (getenv(names[i]))
      return number_of_variable(names[i]);
  return 0;
}

static bool launch_is_alone(void) {
  MPI_Comm parent = MPI_COMM_NULL;
  int size = 1;
  PMPI_Comm_size(MPI_COMM_WORLD, &size);
  PMPI_Comm_get_parent(&parent);
  return size == 1 && parent == MPI_COMM_NULL;
}

bool ob_launch_is_foreign(char *text, size_t bytes) {
  const struct launcher *launcher = launch_find();
  const struct ob_mpi_found *mpi = ob_mpi_find();
  if (!launcher || number_of_variable(launcher->size) < 2 || !mpi ||
      launcher->open_mpi == mpi->is_open_mpi || !getenv(launcher->sign))
    return false;
  snprintf(text, bytes,
           "the launcher has started %d ranks (%s): it is %s, and the program runs with %s",
           number_of_variable(launcher->size), launcher->size,
           launcher->open_mpi ? "Open MPI's" : "that of MPICH or a relative", mpi->version);
  return true;
}

onebit_status_t ob_launch_check(MPI_Comm comm) {
  static atomic_flag said = ATOMIC_FLAG_INIT;
  char text[256];
  const struct launcher *launcher = launch_find();
  if (!launcher || number_of_variable(launcher->size) < 2 || comm == MPI_COMM_SELF ||
      !launch_is_alone())
    return ONEBIT_OK;
  if (ob_launch_is_foreign(text, sizeof text))
    return ob_error(ONEBIT_ERROR_UNSUPPORTED, "%s; each rank is alone in MPI_COMM_WORLD", text);
  if (!atomic_flag_test_and_set(&said))
    fprintf(stderr,
            "onebit: the launcher has started %d ranks (%s), and this one is alone in "
            "MPI_COMM_WORLD, of %s; unless that is meant, it is not the launcher of this MPI\n",
            number_of_variable(launcher->size), launcher->size, ob_mpi_version());
  return ONEBIT_OK;
}

#else
typedef int ob_no_mpi_here; /* ISO C wants a declaration in every file */
#endif
