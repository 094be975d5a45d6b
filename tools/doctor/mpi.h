/* The doctor's measuring among ranks: what tune_doctor.c puts together. Collective all of it. */
#ifndef TOOLS_TUNE_DOCTOR_MPI_H
#define TOOLS_TUNE_DOCTOR_MPI_H

#include <mpi.h>

#include "tools/doctor/doctor.h"

struct doctor_team {
  MPI_Comm all, local, leaders; /* leaders: one rank a host, MPI_COMM_NULL on the others */
  int rank, size, local_rank, local_size;
  int host; /* the leader's rank among the leaders */
};

void doctor_team_create(struct doctor_team *team);
void doctor_team_destroy(struct doctor_team *team);

/* All of it on every rank: ranks and hosts, subnets, and room for what is measured. False when
 * memory runs out anywhere. */
bool doctor_gather(const struct doctor_team *team, struct doctor_facts *facts);
void doctor_facts_destroy(struct doctor_facts *facts);

/* Each adds to the facts that are there: a rate becomes the larger one, a time the smaller one, as
 * noise only makes them worse. The leader of host 0 has the results afterwards. */
void doctor_measure_waiting(const struct doctor_team *team, struct doctor_facts *facts);
void doctor_measure_carrier(const struct doctor_team *team, struct doctor_facts *facts);
void doctor_measure_pairs(const struct doctor_team *team, struct doctor_facts *facts);
void doctor_measure_streams(const struct doctor_team *team, struct doctor_facts *facts);
void doctor_measure_subnets(const struct doctor_team *team, struct doctor_facts *facts);

/* Waits for the other ranks of a communicator without using a processor. */
void doctor_wait_asleep(MPI_Comm comm);

/* One message stream between two ranks: seconds that `pieces` of DOCTOR_PIECE bytes take. */
enum { DOCTOR_PIECE = 256 << 10 };
double doctor_transfer(MPI_Comm comm, int peer, bool sends, int pieces);

/* Pieces that take about so long, agreed between the two ranks. */
int doctor_transfer_length(MPI_Comm comm, int peer, bool sends, double seconds);

/* Round trips of small messages for so many seconds; on the first rank of the two the mean, and the
 * median if asked for. */
double doctor_round_trips(MPI_Comm comm, int peer, bool first, double seconds, double *median);

#endif
