/*
 * onebit-replay: runs recorded cases and compares what the library computes with the record.
 *
 * A recorded case is a directory with case.txt, which says what was computed, and arrays of
 * little-endian float32 that hold what went in and what came out.
 *
 *   allreduce   in.f32 [steps][world][count], out.f32 [steps][count], and after the last step
 *               worker_error.f32 [world][padded], server_error.f32 [world][padded / world]
 *   adam, lamb, zoadam
 *               params0.f32 [total], grads.f32 [steps][world][total],
 *               params.f32 [steps][params_ranks][total], and of rank 0 after the last step
 *               exp_avg.f32 and exp_avg_sq.f32 [total]
 *
 * case.txt has a line "key = value" for each number and option, by DeepSpeed's names.
 */
#ifndef TOOLS_REPLAY_H
#define TOOLS_REPLAY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/file.h"
#include "onebit/plan.h"

enum { REPLAY_ERROR = 512 }; /* bytes of an error message */

enum replay_kind { REPLAY_ALLREDUCE, REPLAY_ADAM, REPLAY_LAMB, REPLAY_ZERO_ONE_ADAM, REPLAY_KINDS };

enum replay_file {
  REPLAY_INPUT,        /* in.f32 or grads.f32 */
  REPLAY_OUTPUT,       /* out.f32 or params.f32 */
  REPLAY_START,        /* params0.f32 */
  REPLAY_WORKER_ERROR, /* worker_error.f32 */
  REPLAY_SERVER_ERROR, /* server_error.f32 */
  REPLAY_MOMENTUM,     /* exp_avg.f32 */
  REPLAY_VARIANCE,     /* exp_avg_sq.f32 */
  REPLAY_FILES
};

struct replay_case {
  const char *directory;
  enum replay_kind kind;
  size_t world, steps;
  size_t count;  /* values in a buffer of one rank: allreduce's count, or the optimizers' total */
  size_t padded; /* allreduce */

  /* adam, lamb, zoadam */
  size_t tensors, *tensor_counts;
  double learning_rate, betas[2], epsilon, weight_decay;
  size_t params_ranks;
  const char *dense_steps; /* one digit a step: 1, the gradient is averaged in full precision */
  size_t freeze_step;      /* of the variance */
  double max_coefficient, min_coefficient, coefficient_beta; /* lamb */
  double max_factor, min_factor, factor_change;
  size_t variance_update_scaler, local_step_scaler, local_step_clipper; /* zoadam */

  uint64_t fingerprint; /* of case.txt: ranks that read different ones must not go on */
  char *text;           /* case.txt, cut into lines */
  struct ob_input files[REPLAY_FILES];
};

/* Opens the case and checks all of it but the values: what case.txt says, and that each file is
 * there and as long as that asks for. False, with an error that names the file, when something is
 * wrong. The directory's name is kept, not copied. Close it in any event. */
bool replay_case_open(struct replay_case *recorded, const char *directory,
                      char error[REPLAY_ERROR]);
void replay_case_close(struct replay_case *recorded);

/* What recorded->text says, which it cuts into lines; opens no file. `recorded` begins with zeros
 * but for the text and the directory's name. */
bool replay_case_parse(struct replay_case *recorded, char error[REPLAY_ERROR]);

/* Reads `count` values from value `first` of the file on. Thread-safe. False, with an error, and
 * nothing but zeros, when the file cannot be read. */
bool replay_case_read(const struct replay_case *recorded, enum replay_file file, size_t first,
                      size_t count, float *values, char error[REPLAY_ERROR]);

/* --- How equal is equal
 *
 * The norm's order of summation differs between implementations, so a value within rounding of zero
 * can fall on the other side and move by two scales; error feedback brings it back. Such exceptions
 * are counted, and a few of them are allowed:
 *
 *   allreduce   relative difference 1e-5; at most one value in 10,000 is an exception, and it
 *               differs in sign alone
 *   optimizers  relative difference 1e-5 + absolute 1e-6; at most one in 1,000 is an exception, and
 *               it differs by no more than a few lengths of that parameter's update
 */
struct replay_tally {
  uint64_t values, exceptions;
  uint64_t wild; /* exceptions that rounding does not explain */
  double worst;  /* the largest |difference| / (|recorded| + absolute / relative tolerance): a value
                    is an exception when this is above the relative tolerance; infinite for a value
                    that is not a number */
  /* The first exception. */
  uint64_t first_step, first_index;
  float first_got, first_recorded;
};

/* Adds one step's values. length: of each parameter's longest update so far; NULL for results of
 * an allreduce. */
void replay_compare(struct replay_tally *tally, size_t step, const float *got,
                    const float *recorded, const float *length, size_t count);

/* Adds the values of another rank. */
void replay_tally_add(struct replay_tally *sum, const struct replay_tally *more);

/* Whether the exceptions stay within what is allowed; the error says how they do not. */
bool replay_allowed(enum replay_kind kind, const struct replay_tally *tally,
                    char error[REPLAY_ERROR]);

/* --- A case on its ranks */

enum replay_verdict { REPLAY_OK, REPLAY_FAILED };

/* How far the state after the last step is from the recorded one, for the curious: no tolerance is
 * stated for it. Residuals of all ranks: the norm of the difference by the norm of the last
 * result. Optimizers: the momentum's norm, its relative difference. */
struct replay_drift {
  const char *name; /* NULL: nothing of the kind */
  double value;
};

struct replay_result {
  enum replay_verdict verdict;
  struct replay_tally tally;
  char error[REPLAY_ERROR]; /* why, when it failed */
  struct replay_drift drifts[2];
};

/* What a rank tells the others. */
struct replay_report {
  bool failed;
  char error[REPLAY_ERROR]; /* the first thing that went wrong */
  uint64_t fingerprint;     /* of case.txt */
  uint64_t digest;          /* of all results' bits */
  struct replay_tally tally;
  struct {
    double difference, norm; /* squares */
  } drift[2];
};

struct replay_rank {
  int rank, size;
  onebit_comm_t comm;
  struct replay_team *team; /* of threads; NULL: MPI */
};

/* Collective: the report of each rank in turn, from 0 on, is given to `visit` on every rank. It is
 * not the library under test that carries them. Allocates nothing. */
void replay_share(const struct replay_rank *rank, const struct replay_report *mine,
                  void (*visit)(void *context, int rank, const struct replay_report *report),
                  void *context);

/* Collective over the ranks; all of them get the same result. Each rank has opened the case for
 * itself; `opened` false and `error` when it could not. `device`: where the library's buffers are,
 * and so what computes. Never leaves a rank waiting. */
void replay_run(const struct replay_rank *rank, const struct replay_case *recorded, bool opened,
                const char *error, onebit_device_t device, struct replay_result *result);

/* Opens the case and runs it on ranks that are threads, as many as the case was recorded with; or
 * on those of MPI_COMM_WORLD, collective over it. */
void replay_with_threads(const char *directory, onebit_device_t device,
                         struct replay_result *result);
void replay_with_mpi(const char *directory, onebit_device_t device, struct replay_result *result);

#endif
