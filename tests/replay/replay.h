/*
 * onebit-replay is a test program. It runs recorded cases on threads as ranks, and compares the
 * library's results with the recorded ones.
 *
 * A recorded case is a directory with case.txt and arrays of little-endian float32. case.txt has a
 * line "key = value" for each number and option, with DeepSpeed's option names.
 *
 *   allreduce            in.f32 [steps][world][count], out.f32 [steps][count]
 *   adam, lamb, zoadam   params0.f32 [total], grads.f32 [steps][world][total],
 *                        params.f32 [steps][params_ranks][total]
 */
#ifndef TESTS_REPLAY_REPLAY_H
#define TESTS_REPLAY_REPLAY_H

#include <stdbool.h>
#include <stdint.h>

enum { REPLAY_ERROR = 512, REPLAY_TENSORS = 64 };

enum replay_kind { REPLAY_ALLREDUCE, REPLAY_ADAM, REPLAY_LAMB, REPLAY_ZERO_ONE_ADAM, REPLAY_KINDS };

struct replay_case {
  const char *directory;
  enum replay_kind kind;
  size_t world, steps, params_ranks;
  size_t count; /* elements of one rank's buffer: `count` of an allreduce, or `total` of an
                 * optimizer */
  size_t tensors, tensor_counts[REPLAY_TENSORS];
  double learning_rate, betas[2], epsilon, weight_decay;
  double max_coefficient, min_coefficient, coefficient_beta, max_factor, min_factor, factor_change;
  size_t freeze_step, variance_update_scaler, local_step_scaler, local_step_clipper;
  const char *dense_steps;       /* one digit per step: 1 if the step averages gradients in full
                            * precision */
  char *text;                    /* case.txt, cut into lines */
  float *input, *output, *start; /* in.f32 or grads.f32, out.f32 or params.f32, params0.f32 */
};

struct replay_result {
  bool failed;
  char error[REPLAY_ERROR]; /* the reason of the failure */
  uint64_t values, exceptions;
  uint64_t wild; /* the number of exceptions that rounding cannot explain */
  double worst;  /* the largest relative difference; infinite for a NaN */
  uint64_t hash; /* hash of a rank's results */
};

/* Stores the error if it is the first one. Returns false. */
__attribute__((format(printf, 2, 3))) bool replay_fail(struct replay_result *result,
                                                       const char *format, ...);

/* Reads a case. The caller closes it even if reading has failed. */
bool replay_case_open(struct replay_case *recorded, const char *directory,
                      struct replay_result *result);
void replay_case_close(struct replay_case *recorded);

void replay_run(const char *directory, struct replay_result *result);

#endif
