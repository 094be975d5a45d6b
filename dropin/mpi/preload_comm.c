/* Which communicators have ranks that have all agreed on rules: those within MPI_COMM_WORLD. */
#include <pthread.h>

#include "base/memory.h"
#include "dropin/mpi/preload.h"

/* Ranks that another MPI_Init has settled may have other rules, or nothing preloaded. */
static bool within_world(MPI_Comm comm, int size) {
  MPI_Group group, world;
  bool within = false;
  int *ranks = ob_allocate((size_t)size, 2 * sizeof *ranks), *found = ranks + size;
  if (!ranks)
    return false;
  for (int i = 0; i < size; i++)
    ranks[i] = i;
  PMPI_Comm_group(comm, &group);
  PMPI_Comm_group(MPI_COMM_WORLD, &world);
  if (PMPI_Group_translate_ranks(group, size, ranks, world, found) == MPI_SUCCESS) {
    within = true;
    for (int i = 0; i < size; i++)
      within &= found[i] != MPI_UNDEFINED;
  }
  PMPI_Group_free(&group);
  PMPI_Group_free(&world);
  ob_release(ranks);
  return within;
}

static int key = MPI_KEYVAL_INVALID;
static void make_key(void) {
  PMPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, MPI_COMM_NULL_DELETE_FN, &key, NULL);
}

bool ob_preload_settled(MPI_Comm comm, int size) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  static const char yes, no;
  void *verdict;
  int found = 0;
  if (comm == MPI_COMM_WORLD)
    return true;
  pthread_once(&once, make_key);
  if (PMPI_Comm_get_attr(comm, key, (void *)&verdict, &found) != MPI_SUCCESS)
    return false;
  if (!found) {
    verdict = (void *)(within_world(comm, size) ? (uintptr_t)&yes : (uintptr_t)&no);
    PMPI_Comm_set_attr(comm, key, verdict);
  }
  return verdict == (const void *)&yes;
}
