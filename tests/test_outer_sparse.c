/* The outer step with sparse messages: equal to the codec, rank by rank, and what is skipped. */
#include "compression/sparse.h"
#include "tests/support.h"

enum { SIZE = 5000, SMALL = 33, COUNT = SIZE + SMALL, ROUNDS = 6, MAX_RANKS = 4 };

struct oracle {
  float consensus[COUNT], residual[MAX_RANKS][COUNT];
};

static float moved(size_t i, int rank, int round) { return input_value(i, rank, round); }

/* One round: what each rank sends, added up in order of ranks. Tensor 1 is uncompressed. */
static void oracle_round(struct oracle *oracle, int ranks, int round) {
  static _Thread_local float mean[COUNT], drift[COUNT];
  static _Thread_local uint32_t message[2 * OB_SPARSE_STRIDE];
  const float weight = 1 / (float)ranks;
  memset(mean, 0, sizeof mean);
  for (int rank = 0; rank < ranks; rank++) {
    float *residual = oracle->residual[rank];
    for (size_t i = 0; i < COUNT; i++) {
      const float parameter = oracle->consensus[i] - moved(i, rank, round);
      drift[i] = oracle->consensus[i] - parameter;
      residual[i] = 0.95f * residual[i] + drift[i];
    }
    ob_sparse_compress(residual, SIZE, message);
    ob_sparse_add(message, SIZE, weight, mean);
    for (size_t i = SIZE; i < COUNT; i++) {
      mean[i] += weight * residual[i];
      residual[i] = 0;
    }
  }
  for (size_t i = 0; i < COUNT; i++)
    oracle->consensus[i] -= mean[i];
}

static void trains(onebit_comm_t comm, void *context) {
  const int rank = onebit_comm_rank(comm), ranks = onebit_comm_size(comm);
  float *parameters = calloc(COUNT, sizeof *parameters);
  struct oracle *oracle = calloc(1, sizeof *oracle);
  onebit_tensor_t tensors[2] = {
      {.parameter = parameters, .count = SIZE},
      {.parameter = parameters + SIZE, .count = SMALL, .uncompressed = 1}};
  onebit_outer_t outer;
  (void)context;
  onebit_outer_options_t options = {
      .size = sizeof options, .local_steps = 2, .bits = ONEBIT_OUTER_SPARSE};
  if (CHECK_STATUS(onebit_outer_create(comm, tensors, 2, &options, &outer), ONEBIT_OK))
    for (int round = 0; round < ROUNDS; round++) {
      const bool skips = round == 3;
      CHECK_STATUS(onebit_outer_step(outer, 1), ONEBIT_OK);
      for (size_t i = 0; i < COUNT; i++)
        parameters[i] -= moved(i, rank, round);
      if (skips)
        parameters[4097] = rank == ranks - 1 ? NAN : parameters[4097];
      CHECK_STATUS(onebit_outer_step(outer, 1), skips ? ONEBIT_SKIPPED : ONEBIT_OK);
      if (!skips)
        oracle_round(oracle, ranks, round);
      else
        memcpy(parameters, oracle->consensus, sizeof oracle->consensus);
      CHECK_BITS("the consensus", parameters, oracle->consensus, COUNT, ONEBIT_FLOAT32);
    }
  onebit_outer_destroy(outer);
  free(parameters);
  free(oracle);
}

Test(outer_sparse, is_the_codec_rank_by_rank) {
  for (int ranks = 1; ranks <= MAX_RANKS; ranks++)
    on_ranks(ranks, trains, NULL);
}
