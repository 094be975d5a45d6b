/* The NCCL of train_nccl.h. */
#include "examples/train_nccl.h"

#include <math.h>
#include <string.h>

#include "onebit/nccl.h"

/* NCCL leaves it to the program to hand its 128 bytes round. A mean with zeros from all ranks but
 * the first, times the number of ranks, is the first one's number: rounding leaves it within a
 * hundredth. */
static int share_id(const team_t *team, ncclUniqueId *id) {
  uint16_t halves[NUMBERS];
  float numbers[NUMBERS];
  _Static_assert(sizeof halves == sizeof *id, "two bytes a number");
  memcpy(halves, id, sizeof halves);
  for (int i = 0; i < NUMBERS; i++)
    numbers[i] = team->rank == 0 ? (float)halves[i] : 0.0f;
  if (mean(team, numbers, "NCCL") != 0)
    return -1;
  for (int i = 0; i < NUMBERS; i++)
    halves[i] = (uint16_t)lrintf(numbers[i] * (float)team->size);
  memcpy(id, halves, sizeof halves);
  return 0;
}

static int agree_on(const team_t *team, ncclResult_t result) {
  char words[256];
  snprintf(words, sizeof words, "--transport nccl: %s: %s", ncclGetErrorString(result),
           ncclGetLastError(NULL));
  return agree(team, result == ncclSuccess, words);
}

int train_nccl_open(team_t *team) {
  ncclUniqueId id = {{0}};
  ncclComm_t nccl = NULL;
  if (agree_on(team, team->rank == 0 ? ncclGetUniqueId(&id) : ncclSuccess) != 0 ||
      share_id(team, &id) != 0 ||
      agree_on(team, ncclCommInitRank(&nccl, (int)team->size, id, (int)team->rank)) != 0)
    return -1;
  team->nccl = nccl;
  return check(team, onebit_comm_create_nccl(nccl, &team->gradients), "--transport nccl");
}

void train_nccl_close(team_t *team) {
  if (!team->nccl)
    return;
  onebit_comm_destroy(team->gradients);
  ncclCommDestroy(team->nccl);
}
