/*
 * Steps in buckets and in parts, beside what test_optimizers.c has: a bucket leaves when it is
 * ready.
 */
#include "tests/support.h"

/* A bucket leaves when its last gradient is ready; the last bucket with the step. */
static void check_departures(onebit_comm_t comm, void *context) {
  enum { EACH = 500, TENSORS = 6 }; /* two tensors a bucket */
  static const bool leaves[TENSORS] = {false, true, false, true, false, false};
  float parameters[TENSORS * EACH] = {0}, gradients[TENSORS * EACH];
  onebit_tensor_t tensors[TENSORS];
  onebit_optimizer_t optimizer = NULL;
  (void)context;
  onebit_adam_options_t options = {
      .size = sizeof options, .freeze_step = 2, .common.bucket_size = 2 * EACH};
  for (int t = 0; t < TENSORS; t++)
    tensors[t] = (onebit_tensor_t){parameters + t * EACH, gradients + t * EACH, EACH, 0, 0, 0};
  fill_input(gradients, ONEBIT_FLOAT32, TENSORS * EACH, onebit_comm_rank(comm), 0);
  CHECK_STATUS(onebit_adam_create(comm, tensors, TENSORS, &options, &optimizer), ONEBIT_OK);
  for (int step = 0; step < 4; step++) {
    CHECK_STATUS(onebit_optimizer_begin(optimizer, 0.1f), ONEBIT_OK);
    for (size_t k = 0; k < TENSORS; k++) {
      uint64_t before = onebit_comm_bytes_sent(comm);
      CHECK_STATUS(onebit_optimizer_ready(optimizer, TENSORS - 1 - k), ONEBIT_OK);
      CHECK(!leaves[k] || onebit_comm_bytes_sent(comm) > before, "step %d: nothing left with %zu",
            step, k);
    }
    uint64_t before = onebit_comm_bytes_sent(comm);
    CHECK_STATUS(onebit_optimizer_step(optimizer, 0.1f), ONEBIT_OK);
    CHECK(onebit_comm_bytes_sent(comm) > before, "step %d: nothing left with the step", step);
  }
  onebit_optimizer_destroy(optimizer);
}

Test(buckets, leave_when_they_are_ready) {
  for (int size = 2; size <= 4; size++)
    on_ranks(size, check_departures, NULL);
}
