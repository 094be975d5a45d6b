/*
 * Optimizers that are saved and loaded: a table of cases, and struct trainee, the optimizer of a
 * case on one rank, with its tensors. Its gradients are the same in every run.
 */
#ifndef ONEBIT_TESTS_SUPPORT_CHECKPOINT_H
#define ONEBIT_TESTS_SUPPORT_CHECKPOINT_H

#include "tests/support.h"
#include "tests/support_optimizers.h"

struct checkpoint_case {
  const char *name;
  const struct ob_method *method;
  int size, hosts, steps; /* hosts: 0 means 1 */
  size_t freeze_step;     /* the method's option for the end of its warm-up */
  double beta2;           /* 0: the default value */
  onebit_adam_exchange_t exchange;
  onebit_shards_t shards;
  int trust_ratio;       /* of Efficient-Adam */
  unsigned uncompressed; /* bit k: tensor k stays uncompressed */
  bool skips; /* before some steps, a step with a gradient that is not finite is made and skipped */
  onebit_optimizer_options_t common;
};

/* The cases: every optimizer, in every stage, in both profiles, on one rank and on several. */
extern const struct checkpoint_case checkpoint_cases[];
extern const size_t checkpoint_cases_count;

/* A simple case: 1-bit Adam on two ranks. */
extern const struct checkpoint_case two_ranks;

enum { TRAINEE_TENSORS = 6, TRAINEE_ELEMENTS = 33 + 2049 + 4097 + 1 + 100 };

struct trainee {
  const struct checkpoint_case *what;
  int rank;
  void *parameters, *gradients; /* of the case's types */
  onebit_tensor_t tensors[TRAINEE_TENSORS];
  onebit_optimizer_t optimizer; /* NULL if this build lacks the optimizer */
};

/* Returns the bytes of a trainee's parameters. */
size_t trainee_parameter_bytes(const struct checkpoint_case *what);

/* Creates a trainee, collectively. Its parameters are the values of input_value at step `start`. */
struct trainee trainee_create(onebit_comm_t comm, const struct checkpoint_case *what, int start);
void trainee_destroy(struct trainee *trainee);

/* Makes step number `step`; the first step is 0. */
void trainee_step(struct trainee *trainee, int step);

/* The parts of all ranks. */
struct saved_parts {
  int count;
  void *memory[16];
  size_t bytes[16];
};

/* Returns a rank's part, which the caller frees. */
void *optimizer_part(onebit_optimizer_t optimizer, size_t *bytes);

/* Saves this rank's part to `parts` and waits until all ranks have done so. */
void trainee_save(struct trainee *trainee, onebit_comm_t comm, struct saved_parts *parts);
onebit_status_t trainee_load(struct trainee *trainee, const struct saved_parts *parts);
void free_parts(struct saved_parts *parts);

/* Runs a case for `steps` steps and saves the parts. */
void save_after(const struct checkpoint_case *what, int steps, struct saved_parts *parts);

/*
 * Functions that read checkpoint parts as docs/checkpoints.md describes them, without the library's
 * code. A test that has changed a part sets its checksums again.
 */

/* Offsets of fields of the header. */
enum {
  PART_VERSION = 8,
  PART_BYTES = 16,
  PART_FRONT = 24,
  PART_CHECKSUM = 32,
  PART_KIND = 40,
  PART_RANKS = 64,
  PART_STAGE = 72,
  PART_APART = 84, /* 4 bytes */
  PART_TENSORS = 88,
  PART_ELEMENTS = 96,
  PART_PADDING = 104,
  PART_STEPS = 112,
  PART_FROZEN_AT = 120,
  PART_RANK = 176,
  PART_SECTIONS = 224,
  PART_ROWS = 232
};

/* The values of a section's `what` field. */
enum {
  SECTION_NORMS = 1,
  SECTION_NUMBERS,
  SECTION_PARAMETERS,
  SECTION_MOMENTUM,
  SECTION_VARIANCE,
  SECTION_FRESH,
  SECTION_ANCHOR,
  SECTION_MOVED,
  SECTION_WORKER,
  SECTION_SERVER,
  SECTION_MOMENTS,
  SECTION_CONSENSUS,
  SECTION_OUTER_MOMENTUM,
  SECTION_DRIFT
};

struct section {
  uint32_t what, space;
  uint64_t first, count, offset, checksum;
};

uint64_t part_number(const void *part, size_t offset);
void part_set(void *part, size_t offset, uint64_t number);
struct section part_section(const void *part, size_t number);
void part_set_section(void *part, size_t number, const struct section *section);

/* Returns all elements of one kind (a section's `what`). Elements that the part does not have are
 * NaN. The caller frees the array. */
float *part_values(const struct saved_parts *parts, int part, uint32_t what);
/* Returns all elements of one kind from all parts. An element that is in several parts is read from
 * the last one. */
float *parts_values(const struct saved_parts *parts, uint32_t what);
/* Checks that the elements of one kind are equal in two sets of parts, to the bit. */
void check_same_values(const char *name, uint32_t what, const struct saved_parts *wanted,
                       const struct saved_parts *parts);
/* Returns the mean of each element over the parts that have it. */
double *parts_mean(const struct saved_parts *parts, uint32_t what);

/* part_sign_section sets a section's checksum; part_sign sets the checksum of the part's front
 * (header and tables). */
void part_sign_section(void *part, size_t number);
void part_sign(void *part);

#endif
