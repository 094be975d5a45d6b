/* A replay of a case in a directory, from nothing. */
#include <stdio.h>

#include "tools/replay/run.h"

struct opened {
  struct replay_case recorded;
  bool good;
  char words[REPLAY_WORDS];
  onebit_device_t device;
  struct replay_result *result;
};

static void run_rank(const struct replay_rank *rank, void *context) {
  struct opened *opened = context;
  struct replay_result own;
  replay_run(rank, &opened->recorded, opened->good, opened->words, opened->device, &own);
  if (rank->rank == 0 || !rank->meeting) /* threads share the place */
    *opened->result = own;
}

static void run_opened(const char *directory, onebit_device_t device, struct replay_result *result,
                       bool threads) {
  struct opened opened = {.device = device, .result = result};
  char words[REPLAY_WORDS];
  opened.good = replay_case_open(&opened.recorded, directory, opened.words);
  int size = opened.good ? (int)opened.recorded.world : 1; /* one rank can say what is wrong */
  if (threads ? !replay_on_threads(size, run_rank, &opened, words)
              : !replay_on_mpi(run_rank, &opened, words)) {
    *result = (struct replay_result){.verdict = REPLAY_FAILED};
    snprintf(result->words, REPLAY_WORDS, "%s", words);
  }
  replay_case_close(&opened.recorded);
}

void replay_with_threads(const char *directory, onebit_device_t device,
                         struct replay_result *result) {
  run_opened(directory, device, result, true);
}

void replay_with_mpi(const char *directory, onebit_device_t device, struct replay_result *result) {
  run_opened(directory, device, result, false);
}
