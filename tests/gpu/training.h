/*
 * Short training runs. Each is recorded on the host, and must give the same bits on a device.
 */
#ifndef ONEBIT_TESTS_GPU_TRAINING_H
#define ONEBIT_TESTS_GPU_TRAINING_H

#include "tests/gpu/plans.h"
#include "tests/support_optimizers.h"

#define TRAINING_TENSORS    6
#define TRAINING_ELEMENTS   7090
#define TRAINING_ATTEMPTS   14 /* default number of steps, including skipped ones */
#define TRAINING_MOST       30
#define TRAINING_RANKS      4
#define TRAINING_MOST_RANKS 6 /* in tests with several hosts */

/* The streams of the steps: one stream; two streams alternately; the default stream; no stream; or
 * one stream, except for every third step, which has none. */
enum training_form {
  ONE_STREAM,
  TWO_STREAMS,
  DEFAULT_STREAM,
  NO_STREAM,
  SOME_WITHOUT,
  TRAINING_FORMS
};

/* Further properties of a training, as bits. */
enum {
  PLAIN_TENSOR = 1,    /* the third tensor stays uncompressed */
  TABLES = 64,         /* all tensors except the third are tables of embeddings */
  NO_GRADIENT = 2,     /* in every third attempt the fourth tensor has no gradient on odd ranks */
  SAVED_ANEW = 4,      /* after two thirds of the steps another optimizer loads the saved state */
  WITHOUT_SCALE = 8,   /* gradients are not multiplied by the loss scale */
  RATE_ON_DEVICE = 32, /* the learning rate is in device memory (test_graphs.c) */
  IN_PARTS = 16,       /* on a device most steps are made in parts, and report gradients as they
                        * become ready */
};

struct training_case {
  const char *name;
  struct any_case optimizer;
  enum training_form form;
  uint32_t poison; /* bit k: in attempt k a gradient of the last rank is NaN */
  unsigned traits;
  int attempts;
};

/* Defines a case. `steps` is the number of its attempts, or 0 for the default. */
#define TRAINING_CASE(kind, is_named, in_form, is_poisoned, with, steps, ...)                      \
  {                                                                                                \
    .name = (is_named), .optimizer = {ANY(kind, __VA_ARGS__)}, .form = (in_form),                  \
    .poison = (is_poisoned), .traits = (with), .attempts = (steps)                                 \
  }
#define ADAM(is_named, in_form, is_poisoned, ...)                                                  \
  TRAINING_CASE(adam, is_named, in_form, is_poisoned, 0, 0, __VA_ARGS__)

/* The state of the host's optimizers after each attempt. */
struct training_record {
  unsigned char parameters[TRAINING_MOST_RANKS][TRAINING_MOST][TRAINING_ELEMENTS * sizeof(float)];
  onebit_status_t status[TRAINING_MOST_RANKS][TRAINING_MOST];
  onebit_optimizer_info_t info[TRAINING_MOST_RANKS][TRAINING_MOST];
  double numbers[TRAINING_MOST_RANKS][TRAINING_TENSORS][2]; /* 1-bit LAMB's coefficient and factor
                                                             * of each tensor after the last step */
  char directory[GPU_PATH];                                 /* for checkpoints */
};

/* A rank's tensors and their optimizer. Tensor sizes are zero, or close to the size of a word or
 * block. On a device, parameters are not aligned to 16 bytes. */
struct learner {
  const struct training_case *what;
  onebit_comm_t comm;
  int rank, size;
  bool device;
  onebit_dtype_t gradient_dtype, parameter_dtype;
  char *memory, *parameters, *gradients; /* memory contains parameters and gradients */
  char *sent, *fetched;                  /* pinned: gradients and parameters of each attempt */
  cudaStream_t streams[2];
  onebit_tensor_t tensors[TRAINING_TENSORS];
  onebit_optimizer_t optimizer;
};

int training_attempts(const struct training_case *what);
float training_rate_of(int attempt);
const onebit_optimizer_options_t *training_options(const struct training_case *what);

/* --- A learner (training_runs.c) */

/* Creates the tensors and the optimizer, on the host if `device` is false. The call is collective.
 * If it fails, it reports a failure and returns false. */
bool learner_open(struct learner *learner, const struct training_case *what,
                  const struct gpu_rank *self, bool device);
void learner_close(struct learner *learner);

/* Saves the optimizer, and replaces it by a new one, which is created with other parameters and
 * loads the saved state. */
bool learner_replace(struct learner *learner, const char *directory);

size_t learner_parameter_bytes(const struct learner *learner);

/* Copies this rank's gradients of an attempt to the tensors' gradient memory, on the stream. */
void learner_send_gradients(struct learner *learner, int attempt, cudaStream_t stream);

/* Copies the learner's parameters after an attempt to learner->fetched. */
char *learner_fetched(const struct learner *learner, int attempt);
void learner_fetch(struct learner *learner, int attempt, cudaStream_t stream);

/* --- Cases (training.c) */

/* Run a case on one rank. The first function records the results, and the second compares them with
 * the record. */
void training_record_case(const struct training_case *what, const struct gpu_rank *self,
                          struct training_record *record);
void training_compare_case(const struct training_case *what, const struct gpu_rank *self,
                           const struct training_record *record);

/* Reports a failure if parameters do not have the recorded bits. */
void training_check_parameters(const void *got, const void *wanted, size_t count,
                               onebit_dtype_t dtype, int attempt);

/* Reports differences between the optimizer's info and `wanted`, except for the bytes sent. */
void training_check_info(onebit_optimizer_t optimizer, const onebit_optimizer_info_t *wanted);

/* --- Tables of cases (training_runs.c). Each case is recorded on the host for each number of
 * ranks, and compared with a run on devices. */
struct training_table {
  const void *cases;
  size_t count, record_bytes;
  /* Runs case k on one rank. A run on the host is recorded; a run on a device is compared with the
   * record. */
  void (*run)(const void *cases, size_t k, const struct gpu_rank *self, bool device, void *record);
  /* True if ranks on a device save a checkpoint in case k. Saving is collective, so such a case
   * cannot run on host and device together. */
  bool (*saves)(const void *cases, size_t k);
  /* Reports a failure if a rank on the host gets other parameters when some of the other ranks are
   * on devices. */
  void (*check_own)(const void *cases, size_t k, int rank, const void *own, const void *record);
};

void training_run_case(const void *cases, size_t k, const struct gpu_rank *self, bool device,
                       void *record);
bool training_saves_case(const void *cases, size_t k);
void training_check_own(const void *cases, size_t k, int rank, const void *own, const void *record);

/* Makes the table of an array of struct training_case. */
#define TRAINING_TABLE(cases)                                                                      \
  {                                                                                                \
    cases, sizeof cases / sizeof cases[0], sizeof(struct training_record), training_run_case,      \
        training_saves_case, training_check_own                                                    \
  }

/* Runs the cases on devices, over the transport of `ranks`, and compares them with the records. */
void training_run(const struct training_table *table, plan_ranks *ranks);

/* Runs the cases over loopback, with odd ranks on a device and even ranks on the host, and compares
 * them with the records. */
void training_run_mixed(const struct training_table *table);

#endif
