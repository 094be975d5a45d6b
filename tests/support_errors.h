/*
 * Scenarios in which one rank makes an error, and all ranks must be notified. They run on any
 * communicator, over loopback and over MPI.
 */
#ifndef ONEBIT_TESTS_SUPPORT_ERRORS_H
#define ONEBIT_TESTS_SUPPORT_ERRORS_H

#include "tests/support_collectives.h"

/* Checks the status and message of a rank after `culprit` has passed a wrong argument called
 * `name`. In a hierarchical plan the message may instead name a rank that has forwarded the
 * error. */
void check_blame(onebit_status_t status, onebit_comm_t comm, int culprit, const char *name);

/* The rank that makes the error, the schedule of allreduces and optimizers, and the optimizers'
 * options clip_norm and shards. */
struct culprit {
  int rank;
  onebit_schedule_t schedule;
  double clip_norm;
  onebit_shards_t shards;
};

/* Each function is a rank_body whose context is a struct culprit. The culprit gets
 * ONEBIT_ERROR_ARGUMENT. The other ranks must get ONEBIT_ERROR_PEER, with the culprit's number in
 * the message. No rank may hang, nothing may change, and later calls must succeed. */
void wrong_buffers_on_one_rank(onebit_comm_t comm, void *culprit);
void wrong_operation_on_one_rank(onebit_comm_t comm, void *culprit);
void wrong_plan_on_one_rank(onebit_comm_t comm, void *culprit);
void wrong_tensors_on_one_rank(onebit_comm_t comm, void *culprit);
void wrong_learning_rate_on_one_rank(onebit_comm_t comm, void *culprit);
void mistakes_in_an_open_step(onebit_comm_t comm, void *culprit);

/* The culprit destroys its optimizer after it has reported some gradients as ready. The others get
 * an error. */
void destroyed_in_an_open_step(onebit_comm_t comm, void *culprit);

/* The culprit passes other options than the other ranks: all ranks get ONEBIT_ERROR_MISMATCH. */
void other_plan_on_one_rank(onebit_comm_t comm, void *culprit);
void other_adam_on_one_rank(onebit_comm_t comm, void *culprit);
void plan_here_and_optimizer_there(onebit_comm_t comm, void *culprit);

/* The culprit uses another number of threads, which is allowed. */
void other_threads_on_one_rank(onebit_comm_t comm, void *culprit);

/* Two optimizers of equal tensors. The first tensor stays uncompressed. */
enum { PAIR_TENSORS = 5, PAIR_EACH = 300, PAIR_COUNT = PAIR_TENSORS * PAIR_EACH };
struct adam_pair {
  float parameter[2][PAIR_COUNT], gradient[2][PAIR_COUNT];
  onebit_optimizer_t optimizer[2];
};
struct adam_pair *pair_make(onebit_comm_t comm, const onebit_adam_options_t options[2]);
void pair_free(struct adam_pair *pair);

#endif
