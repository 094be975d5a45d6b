/*
 * Steps in buckets and in parts: parameters equal the oracle's in every bit, whatever the bucket
 * size, the form of the step, and the order in which gradients are ready; skipped steps change no
 * bucket; mistakes on one rank reach all.
 */
#include "tests/support_adam.h"
#include "tests/support_errors.h"

static struct adam_case case_of(size_t bucket_size, enum adam_form form) {
  struct adam_case what = {.steps = 12,
                           .options = ONEBIT_ADAM_OPTIONS_INIT,
                           .tensors = &adam_tensors_odd,
                           .form = form,
                           .still = true};
  what.options.freeze_step = 4;
  what.options.common.bucket_size = bucket_size;
  return what;
}

static void check_on_groups(struct adam_case what) {
  static const int sizes[] = {1, 2, 3, 4};
  for (size_t p = 0; p < sizeof sizes / sizeof sizes[0]; p++) {
    what.size = sizes[p];
    if (test_wanted(p))
      adam_check(&what);
  }
}

/* A bucket a tensor, several tensors in one, all in one. */
static const size_t bucket_sizes[] = {1, 1000, 5200, 1000000};

Test(buckets, any_size_in_any_form) {
  for (size_t b = 0; b < sizeof bucket_sizes / sizeof bucket_sizes[0]; b++)
    for (int form = 0; form < ADAM_FORMS; form++)
      check_on_groups(case_of(bucket_sizes[b], (enum adam_form)form));
}

Test(buckets, one_bucket_in_any_form) {
  for (int form = 0; form < ADAM_FORMS; form++)
    check_on_groups(case_of(0, (enum adam_form)form));
}

/* There a bucket shows in the bits: it is the buffer that has one scale. */
Test(buckets, one_scale_a_bucket) {
  for (size_t b = 0; b < sizeof bucket_sizes / sizeof bucket_sizes[0]; b++) {
    struct adam_case what = case_of(bucket_sizes[b], SHUFFLED);
    what.options.common.block_size = ONEBIT_BLOCK_BUFFER;
    check_on_groups(what);
  }
}

Test(buckets, many_messages_in_flight) {
  struct adam_case what = case_of(600, SHUFFLED);
  what.options.common.block_size = 64;
  what.options.common.chunk_size = 128;
  check_on_groups(what);
}

Test(buckets, other_lists_of_tensors) {
  static const struct adam_tensors *const lists[] = {&adam_tensors_one, &adam_tensors_many_words,
                                                     &adam_tensors_tiny, &adam_tensors_none};
  for (size_t k = 0; k < sizeof lists / sizeof lists[0]; k++) {
    struct adam_case what = case_of(1, BACKWARD);
    what.tensors = lists[k];
    check_on_groups(what);
  }
}

Test(buckets, profile_deepspeed_has_a_bucket_a_tensor) {
  for (int form = 0; form < ADAM_FORMS; form++) {
    struct adam_case what = case_of(0, (enum adam_form)form);
    what.options.common.profile = ONEBIT_PROFILE_DEEPSPEED;
    check_on_groups(what);
  }
}

Test(buckets, automatic_freeze) {
  struct adam_case what = case_of(1000, BACKWARD);
  what.options.freeze_step = ONEBIT_FREEZE_AUTOMATIC;
  what.options.beta2 = 0.875;
  what.steps = 20;
  check_on_groups(what);
}

/* The poison is in another bucket each time: none of them may change. */
Test(buckets, a_skipped_step_changes_no_bucket) {
  static const float poisons[] = {1.0f / 0.0f, -3e38f};
  for (size_t b = 0; b < sizeof bucket_sizes / sizeof bucket_sizes[0]; b++)
    for (int form = 0; form < ADAM_FORMS; form++) {
      struct adam_case what = case_of(bucket_sizes[b], (enum adam_form)form);
      what.poison = poisons[form % 2];
      what.size = 1 + (int)b;
      what.poisoned_rank = form % what.size;
      adam_check(&what);
    }
}

/* A bucket leaves when its last gradient is ready; the last bucket with the step. */
static void check_departures(onebit_comm_t comm, void *context) {
  enum { EACH = 500, TENSORS = 6 }; /* two tensors a bucket */
  static const bool leaves[TENSORS] = {false, true, false, true, false, false};
  float parameters[TENSORS * EACH] = {0}, gradients[TENSORS * EACH];
  onebit_adam_options_t options = ONEBIT_ADAM_OPTIONS_INIT;
  onebit_tensor_t tensors[TENSORS];
  onebit_optimizer_t optimizer = NULL;
  (void)context;
  options.freeze_step = 2;
  options.common.bucket_size = 2 * EACH;
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

static void everyone_once(rank_body *scenario) {
  for (int size = 1; size <= 4; size++)
    for (int rank = 0; rank < size; rank++) {
      struct culprit culprit = {.rank = rank};
      on_ranks(size, scenario, &culprit);
    }
}

Test(buckets, mistakes_in_an_open_step) { everyone_once(mistakes_in_an_open_step); }
Test(buckets, destroyed_in_an_open_step) { everyone_once(destroyed_in_an_open_step); }
