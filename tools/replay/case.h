/*
 * A recorded case: a directory with case.txt, which says what was computed, and arrays of
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
#ifndef TOOLS_REPLAY_CASE_H
#define TOOLS_REPLAY_CASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Room for the words of what is wrong. */
#define REPLAY_WORDS 512

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
  double learning_rate, beta1, beta2, epsilon, weight_decay;
  size_t params_ranks;
  const char *dense_steps; /* one digit a step: 1, the gradient is averaged in full precision */
  size_t freeze_step;      /* adam, lamb */
  double max_coefficient, min_coefficient, coefficient_beta; /* lamb */
  double max_factor, min_factor, factor_change;
  size_t variance_freeze_step, variance_update_scaler; /* zoadam */
  size_t local_step_scaler, local_step_clipper;

  uint64_t fingerprint; /* of case.txt: ranks that read different ones must not go on */
  char *text;           /* case.txt, cut into lines */
  int files[REPLAY_FILES];
};

/* Opens the case and checks all of it but the values: what case.txt says, and that each file is
 * there and as long as that asks for. False, with words that name the file, when something is
 * wrong. The directory's name is kept, not copied. Close it in any event. */
bool replay_case_open(struct replay_case *recorded, const char *directory,
                      char words[REPLAY_WORDS]);
void replay_case_close(struct replay_case *recorded);

/* Reads `count` values from value `first` of the file on. Thread-safe. False, with words, and
 * nothing but zeros, when the file cannot be read. */
bool replay_case_read(const struct replay_case *recorded, enum replay_file file, size_t first,
                      size_t count, float *values, char words[REPLAY_WORDS]);

#endif
