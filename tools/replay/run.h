/*
 * Runs a recorded case on ranks and says what came of it.
 */
#ifndef TOOLS_REPLAY_RUN_H
#define TOOLS_REPLAY_RUN_H

#include "onebit/plan.h"
#include "tools/replay/case.h"
#include "tools/replay/compare.h"
#include "tools/replay/ranks.h"

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
  char words[REPLAY_WORDS]; /* why, when it failed */
  struct replay_drift drifts[2];
};

/* Collective over the ranks; all of them get the same result. Each rank has opened the case for
 * itself; `opened` false and `words` when it could not. `device`: where the library's buffers are,
 * and so what computes. Never leaves a rank waiting. */
void replay_run(const struct replay_rank *rank, const struct replay_case *recorded, bool opened,
                const char *words, onebit_device_t device, struct replay_result *result);

/* Opens the case and runs it on ranks that are threads, as many as the case was recorded with. */
void replay_with_threads(const char *directory, onebit_device_t device,
                         struct replay_result *result);

/* Opens the case and runs it on the ranks of MPI_COMM_WORLD. Collective over it. */
void replay_with_mpi(const char *directory, onebit_device_t device, struct replay_result *result);

#endif
