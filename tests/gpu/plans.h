/*
 * Tests of plans on devices: one rank's part in an exchange, the test cases, and functions that run
 * the ranks.
 */
#ifndef ONEBIT_TESTS_GPU_PLANS_H
#define ONEBIT_TESTS_GPU_PLANS_H

#include "onebit/cuda.h"
#include "tests/gpu/emulated.h"
#include "tests/gpu/harness.h"

/*
 * ---- A rank's part (part.c) ----
 *
 * One rank's part in an exchange: a plan, on a device or on the host, and buffers in the plan's
 * memory space. For the same input, results on a device must have the same bits as results on the
 * host.
 */
struct plan_case {
  size_t count;
  onebit_plan_options_t options; /* `device` is set by the creator of the plan */
  size_t offset;                 /* the buffers begin this many elements after an aligned address */
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

/* Create and destroy the plan and its buffers. Buffers on a device are allocated on the current
 * device. If creation fails, part_create reports a failure and returns false. */
bool part_create(struct part *part, onebit_comm_t comm, const struct plan_case *what, bool device);
void part_destroy(struct part *part);

/* part_write_input writes the input of a step to part->sent. With `not_finite` one value is a NaN.
 * part_load copies part->sent to the plan's send buffer; part_load_on enqueues the copy on a
 * stream. */
void part_write_input(struct part *part, unsigned step, bool not_finite);
void part_load(struct part *part);
void part_load_input(struct part *part, unsigned step, bool not_finite); /* does both */
void part_load_on(struct part *part, cudaStream_t stream);

/* Copies the result to part->received. */
void part_fetch(struct part *part);
void part_fetch_on(struct part *part, cudaStream_t stream);

/* Call the plan's operation. part_call: blocking. part_start: as a request. part_enqueue: on a
 * stream. part_enqueue_and_wait: on a stream, and wait for it. */
onebit_status_t part_call(struct part *part);
onebit_status_t part_start(struct part *part, onebit_request_t *request);
onebit_status_t part_enqueue(struct part *part, cudaStream_t stream);
onebit_status_t part_enqueue_and_wait(struct part *part, cudaStream_t stream);
/* Returns a graph of the operation, which the caller destroys. */
cudaGraphExec_t part_capture(struct part *part, cudaStream_t stream);

/* The effects of a call, as numbers to compare: hashes of result and input, and of both
 * residuals. */
struct traces {
  uint64_t result, input, worker, server;
};
struct traces part_hash_traces(struct part *part);
bool traces_equal(const struct traces *a, const struct traces *b);

/* Multiplies the residuals of the plan by `factor`. */
void part_scale_errors(struct part *part, float factor);

/* Returns a hash of those fields of the plan's info that must be equal on host and device. */
uint64_t part_hash_info(const struct part *part);

/* A hash of `count` bytes. */
uint64_t hash_bytes(const void *bytes, size_t count);

/*
 * ---- Cases (plans.c) ----
 *
 * Test cases of plans, and functions that run ranks. Over loopback the ranks are threads, and the
 * host controls each step of a call. Over NCCL the device runs all steps.
 */

/* The cases are all combinations of options. sample_plan_cases returns the cases to run, one in
 * `thinner` of them; the caller frees the rows. plan_case_at returns case number `index`. */
struct sample sample_plan_cases(const char *name, size_t thinner);
struct plan_case plan_case_at(size_t index);

/* Describes a case, for check_case. */
const char *describe_plan_case(const struct plan_case *what, char *text, size_t capacity);

int current_device(void);
int other_device(void); /* the current device if there is no other */

/* Returns a case with the default options. */
struct plan_case default_plan_case(onebit_operation_t operation, size_t count);

/* Functions that run the body on ranks, each with its self->comm, as gpu_run_loopback does.
 * run_ranks_nccl runs over NCCL, and run_ranks_self runs a single rank. run_ranks_aware runs over a
 * loopback transport that sends from device memory, like a CUDA-aware MPI. run_ranks_nccl skips the
 * test in a build without NCCL, and run_ranks_aware skips it on a real device. */
typedef bool plan_ranks(int size, gpu_rank_body *body, void *context);
plan_ranks run_ranks_nccl, run_ranks_self, run_ranks_aware;

/* Runs the body on `size` ranks, over loopback and then over NCCL. */
void run_ranks_both(int size, gpu_rank_body *body, void *context);

#ifdef ONEBIT_HAVE_NCCL
#include <nccl.h>

/* rank_nccl_comm returns this rank's NCCL communicator in run_ranks_nccl. forget_nccl_comm records
 * that the communicator was aborted. */
ncclComm_t rank_nccl_comm(void);
void forget_nccl_comm(void);
#endif

/* Makes a call on all ranks, which must be threads, and waits until the device has finished their
 * work. Returns the sum of all ranks' counts. Allocations and host waits are counted only during
 * the calls. */
struct emulation_counters count_call(onebit_status_t (*call)(void *context), void *context);

/*
 * ---- Hosts (plans.c) ----
 *
 * Ranks on given hosts, first over loopback on the processor, then over NCCL on devices. The hosts
 * must be given, because the library would otherwise find that all ranks are on one host, this
 * machine.
 */

enum { HOSTS_MOST_RANKS = 6 };

struct hosts_split {
  int hosts, each;
  bool in_turns; /* true: rank r is on host r modulo hosts; false: a host's ranks are consecutive */
};

/* The splits: two hosts of two ranks; two hosts of three ranks, consecutive or in turns; three
 * hosts of two ranks; four hosts of one rank; one host with all ranks. */
#define HOSTS_SPLITS 6
extern const struct hosts_split hosts_splits[HOSTS_SPLITS];

/* The executor of a plan, and the transport of its messages. */
enum hosts_place { ON_PROCESSOR, STAGED, OVER_NCCL };

typedef void hosts_body(const struct gpu_rank *self, const struct hosts_split *split,
                        enum hosts_place place, void *context);

/* Runs the body on all ranks, each with its self->comm, three times: on the processor over
 * loopback, on the device over loopback, and on the device over NCCL. Later runs find the data that
 * the first run left in a gpu_allocate_area. */
void run_on_hosts(const struct hosts_split *split, hosts_body *body, void *context);

#endif
