/*
 * Errors that one rank makes and all must learn of: scenarios that run on any communicator, over
 * loopback and over MPI.
 */
#ifndef ONEBIT_TESTS_SUPPORT_ERRORS_H
#define ONEBIT_TESTS_SUPPORT_ERRORS_H

#include "tests/support_collectives.h"

/* Checks what a rank gets when `culprit` has given a wrong argument that is called `name`. In a
 * hierarchical plan that may be another, who has heard of it. */
void check_blame(onebit_status_t status, onebit_comm_t comm, int culprit, const char *name);

/* The rank at fault, the schedule of allreduces and optimizers, and the latters' clipping and
 * shards. */
struct culprit {
  int rank;
  onebit_schedule_t schedule;
  double clip_norm;
  onebit_shards_t shards;
};

/* Each is a rank_body whose context is a struct culprit. The culprit gets ONEBIT_ERROR_ARGUMENT,
 * the others ONEBIT_ERROR_PEER with its number; nobody hangs, nothing is changed, and what follows
 * works. */
void wrong_buffers_on_one_rank(onebit_comm_t comm, void *culprit);
void wrong_operation_on_one_rank(onebit_comm_t comm, void *culprit);
void wrong_plan_on_one_rank(onebit_comm_t comm, void *culprit);
void wrong_tensors_on_one_rank(onebit_comm_t comm, void *culprit);
void wrong_learning_rate_on_one_rank(onebit_comm_t comm, void *culprit);
void mistakes_in_an_open_step(onebit_comm_t comm, void *culprit); /* support_steps.c */

/* The culprit ends its optimizer when it has told of some gradients: the others learn of it. */
void destroyed_in_an_open_step(onebit_comm_t comm, void *culprit);

/* The culprit asks for something else than the others: all get ONEBIT_ERROR_MISMATCH. */
void other_plan_on_one_rank(onebit_comm_t comm, void *culprit);
void other_adam_on_one_rank(onebit_comm_t comm, void *culprit);
void plan_here_and_optimizer_there(onebit_comm_t comm, void *culprit);

/* The culprit differs in what may differ: its threads. */
void other_threads_on_one_rank(onebit_comm_t comm, void *culprit);

#endif
