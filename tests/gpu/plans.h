/*
 * Plans on devices: one rank's part in an exchange, cases of plans, and ranks that run them.
 */
#ifndef ONEBIT_TESTS_GPU_PLANS_H
#define ONEBIT_TESTS_GPU_PLANS_H

#include "onebit/cuda.h"
#include "tests/gpu/emulated.h"
#include "tests/gpu/harness.h"

/*
 * ---- A rank's part (part.c) ----
 *
 * One rank's part in an exchange: a plan, on a device or on the host, and buffers where the plan
 * is. The expected result of a device is the host's result of the same input, in every bit.
 */
struct plan_case {
  size_t count;
  onebit_plan_options_t options; /* `device` is set by the creator of the plan */
  size_t offset;                 /* elements between an aligned address and the buffers */
  bool in_place;
  uint32_t salt;
  float magnitude; /* the factor of inputs; 0 means 1 */
};

struct part {
  struct plan_case what;
  onebit_plan_t plan;
  int rank, size;
  bool device;
  void *in, *out;        /* the buffers, in the plan's memory space */
  void *sent, *received; /* copies of the buffers on the host, in pinned memory */
  size_t sent_bytes, received_bytes;
  void *memory[2]; /* the allocations that contain the buffers */
  onebit_plan_info_t info;
};

/* Create and destroy the plan and its buffers; those of a device are on the current one.
 * part_create returns false, after noting a failure, if it cannot. */
bool part_create(struct part *part, onebit_comm_t comm, const struct plan_case *what, bool device);
void part_destroy(struct part *part);

/* Writes the input of a step to part->sent, and copies it to the plan's memory, on the stream if
 * one is given. With `not_finite` one value is not-a-number. */
void part_write_input(struct part *part, unsigned step, bool not_finite);
void part_load(struct part *part);
void part_load_input(struct part *part, unsigned step, bool not_finite); /* does both */
void part_load_on(struct part *part, cudaStream_t stream);

/* Copies the result to part->received. */
void part_fetch(struct part *part);
void part_fetch_on(struct part *part, cudaStream_t stream);

/* Call the plan's operation in four ways: blocking; as a request; on a stream; on a stream,
 * followed by a wait. */
onebit_status_t part_call(struct part *part);
onebit_status_t part_start(struct part *part, onebit_request_t *request);
onebit_status_t part_enqueue(struct part *part, cudaStream_t stream);
onebit_status_t part_enqueue_and_wait(struct part *part, cudaStream_t stream);
/* Returns the operation as a graph, which the caller destroys. */
cudaGraphExec_t part_capture(struct part *part, cudaStream_t stream);

/* The effects of a call, as numbers to compare: bits of result and input, and residuals. */
struct traces {
  uint64_t result, input, worker, server;
};
struct traces part_hash_traces(struct part *part);
bool traces_equal(const struct traces *a, const struct traces *b);

/* Multiplies the residuals of the plan by `factor`. */
void part_scale_errors(struct part *part, float factor);

/* Returns a number for the fields of the info that are equal in two plans of the same case. */
uint64_t part_hash_info(const struct part *part);

/* A hash of `count` bytes. */
uint64_t hash_bytes(const void *bytes, size_t count);

/*
 * ---- Cases (plans.c) ----
 *
 * Cases of plans, and ranks that run them: over loopback, where the ranks are threads and the host
 * walks the steps, and over NCCL, where the device does.
 */

/* The cases are the product of all options. sample_plan_cases returns those to run, one of
 * `thinner`, whose rows the caller frees; plan_case_at returns case number `index`. */
struct sample sample_plan_cases(const char *name, size_t thinner);
struct plan_case plan_case_at(size_t index);

/* Describes a case, for check_case. */
const char *describe_plan_case(const struct plan_case *what, char *text, size_t capacity);

int current_device(void);
int other_device(void); /* the current one if there is no other */

/* A case with the default options. */
struct plan_case default_plan_case(onebit_operation_t operation, size_t count);

/* Functions that run the body on ranks, each with its self->comm, as gpu_run_loopback does: over
 * NCCL; a single rank by itself; and over loopback that moves messages in memory of the device, as
 * a CUDA-aware MPI does. Without NCCL the first skips the test, on a real device the last. */
typedef bool plan_ranks(int size, gpu_rank_body *body, void *context);
plan_ranks run_ranks_nccl, run_ranks_self, run_ranks_aware;

/* Runs the body on `size` ranks, over loopback and then over NCCL. */
void run_ranks_both(int size, gpu_rank_body *body, void *context);

#ifdef ONEBIT_HAVE_NCCL
#include <nccl.h>

/* Returns this rank's NCCL communicator, in run_ranks_nccl; forget_nccl_comm records that it was
 * aborted. */
ncclComm_t rank_nccl_comm(void);
void forget_nccl_comm(void);
#endif

/* Makes a call on all ranks, which are threads, and waits until the device has done the work of
 * all. Returns the counts of all ranks; allocations and waits of the host are those of the calls
 * alone. */
struct emulation_counters count_call(onebit_status_t (*call)(void *context), void *context);

/*
 * ---- Hosts (plans.c) ----
 *
 * Ranks on given hosts: over loopback on the processor, and then over NCCL on devices. Without the
 * given hosts the library would find all ranks on one, this machine.
 */

enum { HOSTS_MOST_RANKS = 6 };

struct hosts_split {
  int hosts, each;
  bool in_turns; /* ranks go to the hosts in turns; else a host's ranks follow each other */
};

/* Two hosts of two and of three ranks, in order and in turns; three hosts of two ranks; one rank on
 * each host; all ranks on one host. */
#define HOSTS_SPLITS 6
extern const struct hosts_split hosts_splits[HOSTS_SPLITS];

/* The place of a plan, and the transport of its messages. */
enum hosts_place { ON_PROCESSOR, STAGED, OVER_NCCL };

typedef void hosts_body(const struct gpu_rank *self, const struct hosts_split *split,
                        enum hosts_place place, void *context);

/* Runs the body on all ranks: on the processor over loopback, on the device over loopback, and over
 * NCCL, with the rank's self->comm. Later runs find the data that the first left in a
 * gpu_allocate_area. */
void run_on_hosts(const struct hosts_split *split, hosts_body *body, void *context);

#endif
