/*
 * Tests statistics of optimizers. Norms and residuals of every tensor must be the oracle's. Totals
 * must be the sums over all tensors, and the bytes must be those that were sent.
 */
#include "tests/support_adam.h"
#include "tests/support_collectives.h"
#include "tests/support_statistics.h"

/* --- Statistics of each tensor, compared with the oracle's 1-bit Adam */

/* Adds the residual and the result of `count` elements, starting with element `first` of an
 * exchange, as far as this rank has them. `momentum` is the momentum of these elements. */
static void add_residual_squares(const struct oracle *oracle, int rank, const float *momentum,
                                 size_t first, size_t count, double *error, double *signal) {
  size_t kept = oracle_worker_first(oracle, rank), end = first + count, from = first;
  size_t kept_end = kept + oracle_worker_count(oracle, rank);
  from = from > kept ? from : kept;
  end = end < kept_end ? end : kept_end;
  if (from >= end)
    return;
  *error = square_sum(oracle_worker_error(oracle, rank) + (from - kept), end - from);
  *signal = square_sum(momentum + (from - first), end - from);
}

/* Checks the statistics of a tensor, which begins at element `place` of the exchange. */
static void check_tensor(const struct oracle_adam *adam, const struct oracle *oracle, size_t place,
                         onebit_optimizer_t optimizer, size_t tensor, int rank) {
  size_t first = adam->first[tensor], count = adam->count[tensor];
  double error = 0, signal = 0, momentum = square_sum(adam->momentum + first, count);
  onebit_tensor_statistics_t told = tensor_statistics(optimizer, tensor);
  if (adam->compressed && adam->steps > adam->freeze_step)
    add_residual_squares(oracle, rank, adam->momentum + first, place, count, &error, &signal);
  double ratio = error > 0 ? sqrt(error / signal) : 0;
  CHECK(told.count == count && !told.uncompressed, "tensor %zu has %zu elements", tensor,
        told.count);
  CHECK(is_close(told.parameter_norm, sqrt(square_sum(adam->parameter + first, count))),
        "tensor %zu: parameters of %g", tensor, told.parameter_norm);
  CHECK(is_close(told.momentum_norm, sqrt(momentum)), "tensor %zu: momentum of %g, not %g", tensor,
        told.momentum_norm, sqrt(momentum));
  CHECK(is_close(told.residual_norm, sqrt(error)), "tensor %zu: error of %g, not %g", tensor,
        told.residual_norm, sqrt(error));
  CHECK(is_close(told.residual_ratio, ratio), "tensor %zu: ratio %g, not %g", tensor,
        told.residual_ratio, ratio);
  CHECK(told.coefficient == 0 && told.factor == 0, "1-bit Adam has no coefficients");
}

static void check_tensors(const struct oracle_adam *adam, onebit_optimizer_t optimizer, int rank) {
  for (size_t k = 0; k < adam->exchange_count; k++) {
    const struct oracle_exchange *exchange = &adam->exchanges[k];
    size_t place = 0;
    for (size_t t = 0; t < exchange->tensors; t++) {
      check_tensor(adam, exchange->oracle, place, optimizer, exchange->tensor[t], rank);
      place += adam->count[exchange->tensor[t]];
    }
  }
}

static void step_oracle(struct oracle_adam *adam, int size, int step) {
  const void **gradients = all_inputs(size, adam->total, ONEBIT_FLOAT32, step);
  oracle_adam_step(adam, (const float *const *)gradients, adam_learning_rate(step));
  free_inputs(gradients, size);
}

/* Compares a rank's statistics with the rank's own oracle, which simulates all ranks. */
static void compare_with_oracle(onebit_comm_t comm, void *context) {
  enum { STEPS = 8 };
  const struct adam_case *what = context;
  const int rank = onebit_comm_rank(comm);
  const size_t count = what->tensors->count;
  struct adam_learner learner = learner_make(what);
  struct oracle_adam *adam = oracle_adam_create(what->size, what->hosts ? what->hosts : 1,
                                                learner.tensors, count, &what->options);
  onebit_optimizer_t optimizer;
  check_case("statistics of %zu tensors on %d ranks, %d hosts, profile %d, buckets of %zu", count,
             what->size, what->hosts, (int)what->options.common.profile,
             what->options.common.bucket_size);
  if (CHECK_STATUS(onebit_adam_create(comm, learner.tensors, count, &what->options, &optimizer),
                   ONEBIT_OK)) {
    for (int step = 0; step < STEPS; step++) {
      check_tensors(adam, optimizer, rank);
      learner_set_gradients(what, &learner, optimizer, rank, step);
      CHECK_STATUS(adam_make_step(what, optimizer, rank, step), ONEBIT_OK);
      step_oracle(adam, what->size, step);
    }
    check_tensors(adam, optimizer, rank);
    onebit_optimizer_destroy(optimizer);
  }
  oracle_adam_destroy(adam);
  learner_free(&learner);
}

static void check_adam(struct adam_case what) {
  on_hosts(what.size, what.hosts ? what.hosts : 1, compare_with_oracle, &what);
}

Test(statistics, of_every_tensor_are_the_oracles) {
  static const struct adam_tensors *const lists[] = {&adam_tensors_odd, &adam_tensors_tiny,
                                                     &adam_tensors_many_words, &adam_tensors_none};
  for (size_t k = 0; k < 4; k++)
    for (int size = 1; size <= 4; size++) {
      struct adam_case what = {
          .size = size, .options = ONEBIT_ADAM_OPTIONS_INIT, .tensors = lists[k]};
      what.options.freeze_step = 3;
      what.options.common.bucket_size = size == 3 ? 1000 : 0;
      what.options.common.block_size = size == 4 ? ONEBIT_BLOCK_BUFFER : 0;
      what.options.exchange = (onebit_adam_exchange_t)(1 + size % 2);
      check_adam(what);
    }
}

Test(statistics, of_every_tensor_in_profile_deepspeed) {
  for (int size = 1; size <= 3; size++) {
    struct adam_case what = {
        .size = size, .options = ONEBIT_ADAM_OPTIONS_INIT, .tensors = &adam_tensors_odd};
    what.options.freeze_step = 4;
    what.options.common.profile = ONEBIT_PROFILE_DEEPSPEED;
    check_adam(what);
  }
}

/* Each rank has residuals only of its own part. That part contains no elements of some tensors. */
Test(statistics, of_every_tensor_on_hosts) {
  static const int splits[][2] = {{4, 2}, {6, 3}, {4, 1}};
  for (size_t k = 0; k < 3; k++) {
    struct adam_case what = {.size = splits[k][0],
                             .hosts = splits[k][1],
                             .options = ONEBIT_ADAM_OPTIONS_INIT,
                             .tensors = &adam_tensors_odd};
    what.options.freeze_step = 3;
    what.options.common.schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
    what.options.common.bucket_size = k == 1 ? 1000 : 0;
    check_adam(what);
  }
}

/* --- Tests of the statistics over all tensors, for every optimizer, and of mixed precision */

static void check_totals(const struct subject *subject, onebit_optimizer_t optimizer,
                         const void *parameters, uint64_t sent) {
  onebit_optimizer_statistics_t told = statistics_of(optimizer);
  const onebit_optimizer_info_t info = optimizer_info(optimizer);
  double momentum = 0, error = 0;
  CHECK(memcmp(&info, &told.info, sizeof info) == 0, "the statistics have another info");
  CHECK(told.dense_bytes + told.bits_bytes == sent, "%llu + %llu bytes, and %llu were sent",
        (unsigned long long)told.dense_bytes, (unsigned long long)told.bits_bytes,
        (unsigned long long)sent);
  CHECK(told.bits_bytes == 0 || info.exchanges[1] > 0, "bits without an exchange of bits");
  double parts = told.compress_seconds + told.network_seconds + told.update_seconds;
  CHECK(told.compress_seconds >= 0 && told.network_seconds >= 0 && told.update_seconds >= 0 &&
            parts <= told.seconds * (1 + 1e-9) && (told.seconds > 0) == (info.steps > 0),
        "%g s: %g + %g + %g", told.seconds, told.compress_seconds, told.network_seconds,
        told.update_seconds);
  for (size_t t = 0; t < SUBJECT_TENSORS; t++) {
    onebit_tensor_statistics_t one = tensor_statistics(optimizer, t);
    float values[SUBJECT_LENGTH];
    for (size_t i = 0; i < SUBJECT_LENGTH; i++)
      values[i] = oracle_load(parameters, t * SUBJECT_LENGTH + i, subject->dtype);
    double norm = sqrt(square_sum(values, SUBJECT_LENGTH)), slack = subject->dtype ? 1e-2 : 1e-6;
    CHECK(fabs(one.parameter_norm - norm) <= slack * norm, "parameters of %g, not %g",
          one.parameter_norm, norm);
    CHECK(one.uncompressed == (t == 1) && (t != 1 || one.residual_norm == 0), "tensor %zu", t);
    momentum += one.momentum_norm * one.momentum_norm;
    error += one.residual_norm * one.residual_norm;
  }
  CHECK(is_close(sqrt(momentum), info.momentum_norm), "momenta of %g, in all %g", sqrt(momentum),
        info.momentum_norm);
  /* in profile deepspeed padding has residuals too */
  CHECK(subject->profile ? sqrt(error) <= info.residual_norm * (1 + 1e-9)
                         : is_close(sqrt(error), info.residual_norm),
        "errors of %g, in all %g", sqrt(error), info.residual_norm);
}

static void check_lamb(const struct subject *subject, onebit_optimizer_t optimizer) {
  const onebit_optimizer_info_t info = optimizer_info(optimizer);
  for (size_t t = 0; t < SUBJECT_TENSORS && info.steps > 0; t++) {
    onebit_tensor_statistics_t one = tensor_statistics(optimizer, t);
    if (!subject->method->lamb)
      CHECK(one.coefficient == 0 && one.factor == 0, "coefficients without LAMB");
    else
      CHECK(one.coefficient > 0 && one.coefficient <= 10 && one.factor >= 0.5 && one.factor <= 4 &&
                (info.stage == ONEBIT_STAGE_COMPRESSED || one.factor == 1),
            "step %llu: coefficient %g, factor %g", (unsigned long long)info.steps, one.coefficient,
            one.factor);
  }
}

/* Checks that a step that sent gradients sent as many bytes as the info predicted. */
static void check_bytes(onebit_optimizer_t optimizer, const onebit_optimizer_info_t *before,
                        uint64_t sent) {
  const onebit_optimizer_info_t after = optimizer_info(optimizer);
  bool dense = after.exchanges[0] > before->exchanges[0];
  if (dense || after.exchanges[1] > before->exchanges[1])
    CHECK(sent == (dense ? before->warmup_bytes : before->compressed_bytes),
          "step %llu sent %llu bytes, %s", (unsigned long long)after.steps,
          (unsigned long long)sent, dense ? "dense" : "bits");
}

static void check_step_bytes(onebit_optimizer_t optimizer, onebit_comm_t comm, bool skips) {
  const onebit_optimizer_info_t before = optimizer_info(optimizer);
  uint64_t sent = onebit_comm_bytes_sent(comm);
  onebit_status_t status = onebit_optimizer_step(optimizer, 1e-3f);
  CHECK(status == (skips ? ONEBIT_SKIPPED : ONEBIT_OK), "%s", onebit_last_error());
  check_bytes(optimizer, &before, onebit_comm_bytes_sent(comm) - sent);
}

static void check_accounts_on_rank(onebit_comm_t comm, void *context) {
  const struct subject *subject = context;
  void *parameters = allocate(SUBJECT_TOTAL, dtype_size(subject->dtype));
  float *gradients = allocate(SUBJECT_TOTAL, sizeof(float));
  onebit_tensor_t tensors[SUBJECT_TENSORS];
  onebit_optimizer_t optimizer;
  fill_input(parameters, subject->dtype, SUBJECT_TOTAL, 90, 0);
  subject_list(parameters, subject->dtype, gradients, tensors);
  check_case("%s, profile %d, dtype %d, clipping %g, shards %d", subject->method->name,
             (int)subject->profile, (int)subject->dtype, subject->clip_norm, (int)subject->shards);
  if (CHECK_STATUS(subject_create(subject, comm, tensors, &optimizer), ONEBIT_OK)) {
    uint64_t before = onebit_comm_bytes_sent(comm);
    for (int step = 0; step < 12; step++) {
      check_totals(subject, optimizer, parameters, onebit_comm_bytes_sent(comm) - before);
      check_lamb(subject, optimizer);
      fill_input(gradients, ONEBIT_FLOAT32, SUBJECT_TOTAL, onebit_comm_rank(comm), step);
      if (step == 5) /* this step is skipped, but must send as much */
        gradients[77] = NAN;
      check_step_bytes(optimizer, comm, step == 5);
    }
    check_totals(subject, optimizer, parameters, onebit_comm_bytes_sent(comm) - before);
    onebit_optimizer_destroy(optimizer);
  }
  free(parameters);
  free(gradients);
}

Test(statistics, account_for_shards) {
  for (int shards = ONEBIT_SHARDS_STEP; shards <= ONEBIT_SHARDS_PARAMETERS; shards++)
    for (int size = 1; size <= 4; size++) {
      struct subject subject = {.method = &ob_method_adam, .shards = (onebit_shards_t)shards};
      on_ranks(size, check_accounts_on_rank, &subject);
      subject.clip_norm = 10;
      on_ranks(size, check_accounts_on_rank, &subject);
    }
}

Test(statistics, account_for_every_optimizer) {
  for (const struct ob_method *const *method = ob_methods; *method; method++)
    for (int size = 1; size <= 3; size++) {
      struct subject subject = {.method = *method};
      on_ranks(size, check_accounts_on_rank, &subject);
      subject.dtype = ONEBIT_BFLOAT16;
      subject.clip_norm = 10;
      on_ranks(size, check_accounts_on_rank, &subject);
      subject = (struct subject){.method = *method, .profile = ONEBIT_PROFILE_DEEPSPEED};
      if (!(*method)->not_deepspeeds)
        on_ranks(size, check_accounts_on_rank, &subject);
    }
}
