/*
 * Ranks on hosts that they are told of: over loopback on the processor, and then over NCCL on
 * devices, which would find all ranks of a machine on one.
 */
#ifndef ONEBIT_TESTS_GPU_HOSTS_H
#define ONEBIT_TESTS_GPU_HOSTS_H

#include "tests/gpu/harness.h"

enum { HOSTS_MOST_RANKS = 6 };

struct hosts_split {
  int hosts, each;
  bool in_turns; /* ranks go to the hosts in turns; else a host's ranks follow each other */
};

/* Two hosts of two and three, in order and in turns, three of two; a rank each; all on one. */
#define HOSTS_SPLITS 6
extern const struct hosts_split hosts_splits[HOSTS_SPLITS];

/* The place of a plan, and the transport of its messages. */
enum hosts_place { ON_PROCESSOR, STAGED, OVER_NCCL };

typedef void hosts_body(const struct gpu_rank *self, const struct hosts_split *split,
                        enum hosts_place place, void *context);

/* Runs the body on all ranks: on the processor over loopback, on the device over loopback, and over
 * NCCL, with the rank's self->comm. Later runs find in a gpu_area the data that the first left
 * there. */
void hosts_run(const struct hosts_split *split, hosts_body *body, void *context);

#endif
