/*
 * One rank's part in an exchange: a plan, on a device or on the host, and buffers where the plan
 * is. The expected result of a device is the host's result of the same input, in every bit.
 */
#ifndef ONEBIT_TESTS_GPU_PART_H
#define ONEBIT_TESTS_GPU_PART_H

#include "onebit/cuda.h"
#include "tests/gpu/harness.h"

struct plan_case {
  size_t count;
  onebit_plan_options_t options; /* `device` is set by the creator of the plan */
  size_t offset;                 /* elements between an aligned address and the buffers */
  bool in_place;
  uint32_t salt;
  float magnitude; /* what inputs are multiplied with; 0 is 1 */
};

struct part {
  struct plan_case what;
  onebit_plan_t plan;
  int rank, size;
  bool device;
  void *in, *out;        /* the buffers, where the plan is */
  void *sent, *received; /* copies of them on the host, in pinned memory */
  size_t sent_bytes, received_bytes;
  void *memory[2]; /* what the buffers lie in */
  onebit_plan_info_t info;
};

/* Makes plan and buffers, and gives them back. On a device: the one that is current. False: it
 * cannot, which is noted. */
bool part_create(struct part *part, onebit_comm_t comm, const struct plan_case *what, bool device);
void part_destroy(struct part *part);

/* Writes the input of a step to part->sent, and copies it to the plan's memory, on the stream if
 * one is given. With `spoilt` one value is not-a-number. */
void part_make(struct part *part, unsigned step, bool spoilt);
void part_load(struct part *part);
void part_load_on(struct part *part, cudaStream_t stream);

/* Copies the result to part->received. */
void part_fetch(struct part *part);
void part_fetch_on(struct part *part, cudaStream_t stream);

/* The plan's operation: at once; on a stream; and that with the plan's synchronize behind it. */
onebit_status_t part_call(struct part *part);
onebit_status_t part_start(struct part *part, onebit_request_t *request);
onebit_status_t part_put(struct part *part, cudaStream_t stream);
onebit_status_t part_put_and_wait(struct part *part, cudaStream_t stream);

/* The effects of a call, as numbers to compare: bits of result and input, and residuals. */
struct traces {
  uint64_t result, input, worker, server;
};
struct traces part_traces(struct part *part);
bool traces_equal(const struct traces *a, const struct traces *b);

/* Gives the plan `factor` times its residuals. */
void part_scale_errors(struct part *part, float factor);

/* Returns a number for the fields of the info that are equal in two plans of the same case. */
uint64_t part_account(const struct part *part);

/* A number for so many bytes. */
uint64_t digest(const void *bytes, size_t count);

#endif
