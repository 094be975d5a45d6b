/* Which communicators have ranks that all have the library, with the same rules. */
#include <pthread.h>

#include "base/memory.h"
#include "dropin/mpi/preload_presence.h"

/* The numbers in MPI_COMM_WORLD of a communicator's ranks; NULL where one is not in there: ranks
 * of another MPI_Init may have other rules, or nothing preloaded. */
static int *ranks_in_world(MPI_Comm comm, int size) {
  MPI_Group group, world;
  int *ranks = ob_allocate((size_t)size, 2 * sizeof *ranks), *found = ranks + size;
  if (!ranks)
    return NULL;
  for (int i = 0; i < size; i++)
    found[i] = i;
  PMPI_Comm_group(comm, &group);
  PMPI_Comm_group(MPI_COMM_WORLD, &world);
  bool within = PMPI_Group_translate_ranks(group, size, found, world, ranks) == MPI_SUCCESS;
  for (int i = 0; i < size; i++)
    within = within && ranks[i] != MPI_UNDEFINED;
  PMPI_Group_free(&group);
  PMPI_Group_free(&world);
  if (within)
    return ranks;
  ob_release(ranks);
  return NULL;
}

static struct ob_presence look(MPI_Comm comm, int size, bool wait) {
  int *ranks = ranks_in_world(comm, size);
  struct ob_presence found = {false, false};
  if (ranks)
    found = ob_presence_of(ranks, size, wait);
  ob_release(ranks);
  return found;
}

struct ob_presence ob_preload_world(int size) {
  return look(MPI_COMM_WORLD, size, true);
}

/* ---- The calls of a communicator ---- */

/* What is known after its first calls that might be compressed, which all ranks count alike. The
 * second comes when every rank has made the first, and so is past MPI_Init: its first rank looks
 * for all. The third comes when every rank has made the second: what that rank has found is there.
 * Of nonblocking calls this may be otherwise, and then a rank looks for itself. */
enum { FIRST, SECOND, THIRD, SETTLED, REFUSED };
static const char states[REFUSED + 1]; /* an attribute is the address of one */

static int key = MPI_KEYVAL_INVALID;
static void make_key(void) {
  PMPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, MPI_COMM_NULL_DELETE_FN, &key, NULL);
}

static int state_after(int state, MPI_Comm comm, int size) {
  int rank = 0;
  if (ob_preload.trusted || state == FIRST) {
    int *ranks = ranks_in_world(comm, size);
    bool within = ranks != NULL;
    ob_release(ranks);
    return !within ? REFUSED : ob_preload.trusted ? SETTLED : SECOND;
  }
  if (state == SECOND) {
    PMPI_Comm_rank(comm, &rank);
    if (rank == 0)
      look(comm, size, false);
    return THIRD;
  }
  return look(comm, size, false).agreed ? SETTLED : REFUSED;
}

enum ob_reason ob_preload_settled(MPI_Comm comm, int size) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  void *value;
  int found = 0, before = FIRST;
  pthread_once(&once, make_key);
  if (PMPI_Comm_get_attr(comm, key, (void *)&value, &found) != MPI_SUCCESS)
    return OB_REASON_REFUSED;
  if (found)
    before = (int)((const char *)value - states);
  int now = before < SETTLED ? state_after(before, comm, size) : before;
  if (now != before)
    PMPI_Comm_set_attr(comm, key, (void *)(uintptr_t)&states[now]);
  return now == SETTLED ? OB_REASON_NONE : now == REFUSED ? OB_REASON_REFUSED : OB_REASON_LEARNING;
}
