/*
 * NCCL between the devices of train_text's ranks.
 */
#ifndef EXAMPLES_TRAIN_NCCL_H
#define EXAMPLES_TRAIN_NCCL_H

#include "examples/train_team.h"

/* team->gradients becomes a communicator over NCCL of the ranks' current devices; the team's other
 * one stays what it is. 0, or -1 after saying why. */
int train_nccl_open(team_t *team);
void train_nccl_close(team_t *team);

#endif
