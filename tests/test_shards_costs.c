/*
 * Sharded 1-bit Adam sends and allocates as its info and statistics say, and less than without
 * shards. That replicas are equal is in test_optimizers.c.
 */
#include "tests/support_adam.h"

static onebit_adam_options_t options_of(onebit_shards_t shards) {
  onebit_adam_options_t options = {.size = sizeof options, .shards = shards};
  return options;
}

/* --- Bytes */

struct costs {
  onebit_adam_options_t options;
  size_t count;                    /* of elements */
  onebit_optimizer_info_t info[8]; /* one a rank */
};

/* An optimizer of one tensor and one of odd size; its steps send what its info says. */
static void measure(onebit_comm_t comm, void *context) {
  struct costs *costs = context;
  int rank = onebit_comm_rank(comm);
  size_t element = dtype_size(costs->options.common.parameter_dtype), count = costs->count;
  char *parameter = allocate(count, element);
  float *gradient = allocate(count, sizeof(float));
  onebit_tensor_t tensors[] = {
      {parameter, gradient, 1001, 0, 0, 0},
      {parameter + 1001 * element, gradient + 1001, count - 1001, 0, 0, 0}};
  onebit_optimizer_t optimizer = NULL;
  onebit_optimizer_info_t info = {.size = sizeof info};
  check_case("shards %d on %d ranks", (int)costs->options.shards, onebit_comm_size(comm));
  fill_input(gradient, ONEBIT_FLOAT32, count, rank, 0);
  CHECK_STATUS(onebit_adam_create(comm, tensors, 2, &costs->options, &optimizer), ONEBIT_OK);
  for (int step = 0; step < 12; step++) {
    CHECK_STATUS(onebit_optimizer_get_info(optimizer, &info), ONEBIT_OK);
    uint64_t before = onebit_comm_bytes_sent(comm);
    CHECK_STATUS(onebit_optimizer_step(optimizer, 1e-3f), ONEBIT_OK);
    uint64_t sent = onebit_comm_bytes_sent(comm) - before;
    uint64_t told = info.stage == ONEBIT_STAGE_WARMUP ? info.warmup_bytes : info.compressed_bytes;
    CHECK(sent == told, "step %d sent %llu bytes, info says %llu", step, (unsigned long long)sent,
          (unsigned long long)told);
  }
  CHECK(info.stage == ONEBIT_STAGE_COMPRESSED, "still in warm-up");
  costs->info[rank] = info;
  onebit_optimizer_destroy(optimizer);
  free(parameter);
  free(gradient);
}

static struct costs costs_of(int size, onebit_shards_t shards, onebit_dtype_t parameters,
                             size_t freeze_step, size_t count) {
  struct costs costs = {.options = options_of(shards), .count = count};
  costs.options.freeze_step = freeze_step;
  costs.options.beta2 = 0.875; /* an automatic freeze comes at the ninth step */
  costs.options.common.parameter_dtype = parameters;
  costs.options.common.chunk_size = 4096; /* few bytes of dense messages in windows */
  on_ranks(size, measure, &costs);
  return costs;
}

Test(shards_costs, steps_send_what_is_said) {
  const size_t count = 1 << 18;
  for (int size = 2; size <= 4; size++) {
    struct costs whole = costs_of(size, ONEBIT_SHARDS_NONE, ONEBIT_FLOAT32, 3, count);
    struct costs step = costs_of(size, ONEBIT_SHARDS_STEP, ONEBIT_FLOAT32, 3, count);
    struct costs parameters = costs_of(size, ONEBIT_SHARDS_PARAMETERS, ONEBIT_BFLOAT16, 3, count);
    costs_of(size, ONEBIT_SHARDS_STEP, ONEBIT_FLOAT32, ONEBIT_FREEZE_AUTOMATIC, count);
    for (int r = 0; r < size; r++) {
      double peers = (double)(size - 1) / size * (double)count;
      uint64_t bits = step.info[r].compressed_bytes, sum = parameters.info[r].compressed_bytes;
      CHECK(bits == whole.info[r].compressed_bytes, "%llu bytes a compressed step, unsharded %llu",
            (unsigned long long)bits, (unsigned long long)whole.info[r].compressed_bytes);
      CHECK(step.info[r].warmup_bytes == whole.info[r].warmup_bytes, "%llu bytes in the warm-up",
            (unsigned long long)step.info[r].warmup_bytes);
      CHECK(fabs((double)sum - 2.0 * peers - (double)bits / 2.0) < 0.04 * (double)sum,
            "%llu bytes a step, parameters of 16 bits back", (unsigned long long)sum);
    }
  }
}

/* Bytes a parameter, besides half a byte for messages and what the dense plans' windows take. */
static void check_memory(int size, onebit_shards_t shards, onebit_dtype_t dtype, double whole,
                         double shared) {
  const size_t count = 1 << 20;
  struct costs costs = costs_of(size, shards, dtype, 3, count);
  for (int r = 0; r < size; r++) {
    double each = (double)costs.info[r].memory_bytes / (double)count,
           wanted = whole + shared / size;
    CHECK(each >= wanted && each <= wanted + 0.8 + 0.12 * size,
          "%d ranks, shards %d: %.2f bytes, not %.2f", size, (int)shards, each, wanted);
  }
}

Test(shards_costs, memory_is_what_the_header_says) {
  for (int size = 2; size <= 4; size *= 2) {
    check_memory(size, ONEBIT_SHARDS_NONE, ONEBIT_FLOAT32, 12, 8);
    check_memory(size, ONEBIT_SHARDS_STEP, ONEBIT_FLOAT32, 8, 20);
    check_memory(size, ONEBIT_SHARDS_PARAMETERS, ONEBIT_FLOAT32, 8, 12);
    check_memory(size, ONEBIT_SHARDS_NONE, ONEBIT_BFLOAT16, 16, 8);
    check_memory(size, ONEBIT_SHARDS_PARAMETERS, ONEBIT_BFLOAT16, 8, 16);
  }
}

/* --- Statistics: what the ranks tell of their shares adds up to all of it */

enum { TENSORS = 3, EACH = 2000 };

struct account {
  onebit_adam_options_t options;
  double momentum[4], all, parameters[4];
};

static void tell_statistics(onebit_comm_t comm, void *context) {
  struct account *account = context;
  int rank = onebit_comm_rank(comm);
  float gradients[TENSORS * EACH];
  uint16_t parameters[TENSORS * EACH] = {0};
  onebit_tensor_t tensors[TENSORS];
  onebit_optimizer_t optimizer = NULL;
  onebit_optimizer_statistics_t statistics = {.size = sizeof statistics};
  for (size_t t = 0; t < TENSORS; t++)
    tensors[t] = (onebit_tensor_t){parameters + t * EACH, gradients + t * EACH, EACH, 0, 0, t == 1};
  CHECK_STATUS(onebit_adam_create(comm, tensors, TENSORS, &account->options, &optimizer),
               ONEBIT_OK);
  uint64_t before = onebit_comm_bytes_sent(comm);
  for (int step = 0; step < 8; step++) {
    fill_input(gradients, ONEBIT_FLOAT32, TENSORS * EACH, rank, step);
    CHECK_STATUS(onebit_optimizer_step(optimizer, 0.01f), ONEBIT_OK);
  }
  CHECK_STATUS(onebit_optimizer_get_statistics(optimizer, &statistics), ONEBIT_OK);
  CHECK(statistics.dense_bytes + statistics.bits_bytes == onebit_comm_bytes_sent(comm) - before,
        "%llu bytes dense and %llu in bits", (unsigned long long)statistics.dense_bytes,
        (unsigned long long)statistics.bits_bytes);
  CHECK(statistics.residual_ratio > 0.2 && statistics.residual_ratio < 20, "residual ratio %g",
        statistics.residual_ratio);
  CHECK(statistics.update_seconds >= 0 && statistics.network_seconds >= 0, "times below zero");
  CHECK(onebit_optimizer_check(optimizer, NULL) >= ONEBIT_OK, "%s", onebit_last_error());
  double momentum = 0.0;
  for (size_t t = 0; t < TENSORS; t++) {
    onebit_tensor_statistics_t one = {.size = sizeof one};
    CHECK_STATUS(onebit_optimizer_get_tensor_statistics(optimizer, t, &one), ONEBIT_OK);
    momentum += one.momentum_norm * one.momentum_norm;
    account->parameters[rank] += one.parameter_norm * one.parameter_norm;
    CHECK((one.residual_norm > 0) == (t != 1), "tensor %zu keeps %g", t, one.residual_norm);
  }
  account->momentum[rank] = momentum;
  CHECK(fabs(momentum - statistics.info.momentum_norm * statistics.info.momentum_norm) <=
            1e-6 * momentum,
        "momentum %g of all tensors, %g in all", momentum, statistics.info.momentum_norm);
  if (rank == 0)
    for (size_t i = 0; i < TENSORS * EACH; i++)
      account->all += pow((double)oracle_load(parameters, i, ONEBIT_BFLOAT16), 2);
  onebit_optimizer_destroy(optimizer);
}

Test(shards_costs, statistics_are_of_shares) {
  double alone = 0.0;
  for (int size = 1; size <= 4; size++) {
    struct account account = {.options = options_of(ONEBIT_SHARDS_PARAMETERS)};
    account.options.freeze_step = 3;
    account.options.common.block_size = 128;
    account.options.common.parameter_dtype = ONEBIT_BFLOAT16;
    on_ranks(size, tell_statistics, &account);
    double parameters = 0.0;
    for (int r = 0; r < size; r++)
      parameters += account.parameters[r];
    for (int r = 0; r < size; r++)
      CHECK(account.momentum[r] > 0.0, "rank %d of %d has no momentum", r, size);
    CHECK(fabs(parameters - account.all) <= 0.01 * account.all, "masters %g, parameters %g",
          parameters, account.all);
    alone = size == 1 ? parameters : alone;
  }
  CHECK(alone > 0.0, "nothing has moved");
}
