/* Trains the same case on the host and on a device, and compares the results of each step. */
#define _GNU_SOURCE
#include "tests/gpu/training.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "compression/numerics.h"
#include "onebit/checkpoint.h"
#include "onebit/statistics.h"

float training_rate_of(int attempt) { return 1e-3f * (float)(1 + attempt % 3); }

int training_attempts(const struct training_case *what) {
  return what->attempts ? what->attempts : TRAINING_ATTEMPTS;
}

const onebit_optimizer_options_t *training_options(const struct training_case *what) {
  return any_case_common(&what->optimizer);
}

/* --- Comparing */

void training_check_parameters(const void *got, const void *wanted, size_t count,
                               onebit_dtype_t dtype, int attempt) {
  const size_t size = ob_dtype_size(dtype);
  size_t differing = 0, first = 0;
  for (size_t i = count; i-- > 0;)
    if (memcmp((const char *)got + i * size, (const char *)wanted + i * size, size) != 0) {
      first = i;
      differing++;
    }
  CHECK(!differing, "attempt %d: parameter %zu is %.9g and should be %.9g; %zu differ", attempt,
        first, (double)ob_load(got, first, dtype), (double)ob_load(wanted, first, dtype),
        differing);
}

#define CHECK_FACT(name, format, type)                                                             \
  CHECK(info.name == wanted->name, #name " is " format ", and should be " format, (type)info.name, \
        (type)wanted->name)

void training_check_info(onebit_optimizer_t optimizer, const onebit_optimizer_info_t *wanted) {
  onebit_optimizer_info_t info = {.size = sizeof info};
  if (!CHECK_STATUS(onebit_optimizer_get_info(optimizer, &info), ONEBIT_OK))
    return;
  CHECK_FACT(stage, "%d", int);
  CHECK_FACT(steps, "%llu", unsigned long long);
  CHECK_FACT(skipped, "%llu", unsigned long long);
  CHECK_FACT(freeze_step, "%llu", unsigned long long);
  CHECK_FACT(variance_ratio, "%.17g", double);
  CHECK_FACT(momentum_norm, "%.17g", double);
  CHECK_FACT(residual_norm, "%.17g", double);
  CHECK_FACT(loss_scale, "%.17g", double);
  CHECK_FACT(gradient_norm, "%.17g", double);
  CHECK_FACT(synchronized, "%d", int);
  onebit_stage_t stage = ONEBIT_STAGE_WARMUP;
  uint64_t steps = 0;
  CHECK_STATUS(onebit_optimizer_get_stage(optimizer, &stage, &steps), ONEBIT_OK);
  CHECK(stage == wanted->stage && steps == wanted->steps, "the stage is %d after %llu steps",
        (int)stage, (unsigned long long)steps);
}

static void check_exchanges(onebit_optimizer_t optimizer, const onebit_optimizer_info_t *wanted) {
  onebit_optimizer_info_t info = {.size = sizeof info};
  CHECK_STATUS(onebit_optimizer_get_info(optimizer, &info), ONEBIT_OK);
  for (int k = 0; k < 3; k++)
    CHECK_FACT(exchanges[k], "%llu", unsigned long long);
}

static void read_tensor_statistics(onebit_optimizer_t optimizer,
                                   double numbers[TRAINING_TENSORS][2]) {
  for (size_t t = 0; t < TRAINING_TENSORS; t++) {
    onebit_tensor_statistics_t statistics = {.size = sizeof statistics};
    CHECK_STATUS(onebit_optimizer_get_tensor_statistics(optimizer, t, &statistics), ONEBIT_OK);
    numbers[t][0] = statistics.coefficient;
    numbers[t][1] = statistics.factor;
  }
}

/* --- A case */

static bool is_without_stream(const struct learner *learner, int attempt) {
  enum training_form form = learner->what->form;
  return !learner->device || form == NO_STREAM || (form == SOME_WITHOUT && attempt % 3 == 2);
}

static cudaStream_t find_stream(const struct learner *learner, int attempt) {
  enum training_form form = learner->what->form;
  return form == DEFAULT_STREAM ? NULL : learner->streams[form == TWO_STREAMS ? attempt % 2 : 0];
}

/* Copies an attempt's gradients to the tensors. With two streams all steps use the gradients that
 * are copied before the first step. */
static void prepare_gradients(struct learner *learner, int attempt) {
  cudaStream_t stream = find_stream(learner, attempt);
  const bool once = learner->what->form == TWO_STREAMS;
  if (!once || attempt == 0)
    learner_send_gradients(learner, attempt, stream);
  if (learner->device && (once ? attempt == 0 : is_without_stream(learner, attempt)))
    CHECK_CUDA(cudaStreamSynchronize(stream));
}

/* Reports gradients as ready, in a different order on each rank. In some attempts some gradients
 * are not reported. */
static void report_ready_tensors(struct learner *learner, int attempt) {
  const bool without = is_without_stream(learner, attempt);
  const size_t turn = attempt % 2 ? (size_t)(learner->rank + attempt) : 0;
  for (size_t k = attempt % 5 == 2; k < TRAINING_TENSORS; k++) {
    const size_t tensor = TRAINING_TENSORS - 1 - (k + turn) % TRAINING_TENSORS;
    CHECK_STATUS(without ? onebit_optimizer_ready(learner->optimizer, tensor)
                         : onebit_optimizer_ready_stream(learner->optimizer, tensor,
                                                         find_stream(learner, attempt + (int)k)),
                 ONEBIT_OK);
  }
}

/* Makes a step in parts (begin, ready, step). Other ranks may make the same step by a single
 * call. */
static void make_step_in_parts(struct learner *learner, int attempt) {
  const float rate = training_rate_of(attempt);
  if (!learner->device || !(learner->what->traits & IN_PARTS) || (attempt + learner->rank) % 5 == 3)
    return;
  CHECK_STATUS(
      is_without_stream(learner, attempt)
          ? onebit_optimizer_begin(learner->optimizer, rate)
          : onebit_optimizer_begin_stream(learner->optimizer, rate, find_stream(learner, attempt)),
      ONEBIT_OK);
  report_ready_tensors(learner, attempt);
}

static onebit_status_t make_step(struct learner *learner, int attempt) {
  const float rate = training_rate_of(attempt);
  make_step_in_parts(learner, attempt);
  return is_without_stream(learner, attempt)
             ? onebit_optimizer_step(learner->optimizer, rate)
             : onebit_optimizer_step_stream(learner->optimizer, rate,
                                            find_stream(learner, attempt));
}

/* Starts the copy of the parameters. The caller waits for the copy before it reads them. */
static void fetch_parameters(struct learner *learner, int attempt) {
  const int last = training_attempts(learner->what) - 1;
  if (learner->what->form != TWO_STREAMS || !learner->device || attempt == last)
    learner_fetch(learner, attempt, find_stream(learner, attempt));
}

void training_record_case(const struct training_case *what, const struct gpu_rank *self,
                          struct training_record *record) {
  const int rank = self->rank;
  struct learner learner;
  check_case("%s, rank %d of %d on the host", what->name, rank, self->size);
  if (rank == 0 && what->traits & SAVED_ANEW)
    gpu_make_directory(record->directory);
  if (!learner_open(&learner, what, self, false))
    return;
  for (int attempt = 0; attempt < training_attempts(what); attempt++) {
    onebit_optimizer_info_t *info = &record->info[rank][attempt];
    info->size = sizeof *info;
    prepare_gradients(&learner, attempt);
    record->status[rank][attempt] = make_step(&learner, attempt);
    CHECK_STATUS(onebit_optimizer_get_info(learner.optimizer, info), ONEBIT_OK);
    memcpy(record->parameters[rank][attempt], learner.parameters,
           learner_parameter_bytes(&learner));
  }
  read_tensor_statistics(learner.optimizer, record->numbers[rank]);
  learner_close(&learner);
}

/* Checks the status of a step. A step on a stream may return ONEBIT_OK before the library knows
 * that it is skipped. */
static void check_status_of(const struct learner *learner, int attempt, onebit_status_t got,
                            onebit_status_t wanted) {
  const bool early = !is_without_stream(learner, attempt) && got == ONEBIT_OK;
  CHECK(got == wanted || early, "attempt %d returned %d, not %d: %s", attempt, (int)got,
        (int)wanted, onebit_last_error());
}

/* Checks that onebit_optimizer_synchronize returns the common status of this optimizer's steps on
 * streams. */
static void check_outcome(const struct learner *learner, const struct training_record *record,
                          int first, int end) {
  onebit_status_t wanted = ONEBIT_OK;
  for (int attempt = first; attempt < end; attempt++)
    if (record->status[learner->rank][attempt] != ONEBIT_OK && !is_without_stream(learner, attempt))
      wanted = record->status[learner->rank][attempt];
  CHECK_STATUS(onebit_optimizer_synchronize(learner->optimizer), wanted);
  CHECK_STATUS(onebit_optimizer_synchronize(learner->optimizer), ONEBIT_OK);
}

static void check_numbers(const struct learner *learner, const struct training_record *record) {
  double numbers[TRAINING_TENSORS][2];
  read_tensor_statistics(learner->optimizer, numbers);
  CHECK(!memcmp(numbers, record->numbers[learner->rank], sizeof numbers),
        "coefficient %.17g, factor %.17g of the largest tensor should be %.17g, %.17g",
        numbers[TRAINING_TENSORS - 1][0], numbers[TRAINING_TENSORS - 1][1],
        record->numbers[learner->rank][TRAINING_TENSORS - 1][0],
        record->numbers[learner->rank][TRAINING_TENSORS - 1][1]);
}

static void check_record(struct learner *learner, const struct training_record *record, int first) {
  const int attempts = training_attempts(learner->what), last = attempts - 1;
  check_outcome(learner, record, first, attempts);
  fetch_parameters(learner, last); /* the synchronisation above waits for the steps, but not for
                                    * these copies */
  CHECK_CUDA(cudaDeviceSynchronize());
  for (int attempt = 0; attempt <= last; attempt++)
    if (attempt == last || learner->what->form != TWO_STREAMS)
      training_check_parameters(learner_fetched(learner, attempt),
                                record->parameters[learner->rank][attempt], TRAINING_ELEMENTS,
                                learner->parameter_dtype, attempt);
  training_check_info(learner->optimizer, &record->info[learner->rank][last]);
  check_exchanges(learner->optimizer, &record->info[learner->rank][last]);
  check_numbers(learner, record);
}

/* Replaces the optimizer by a new one that loads its checkpoint. Parameters that were fetched
 * before stay unchanged. */
static bool replace_optimizer(struct learner *learner, const struct training_record *record,
                              int attempt) {
  const int last = training_attempts(learner->what) - 1;
  check_outcome(learner, record, 0, attempt);
  CHECK_CUDA(cudaDeviceSynchronize());
  char *kept = gpu_allocate(learner_parameter_bytes(learner), 1), *at = learner_fetched(learner, 0);
  memcpy(kept, at, learner_parameter_bytes(learner));
  const bool replaced = learner_replace(learner, record->directory);
  memcpy(at, kept, learner_parameter_bytes(learner));
  free(kept);
  return replaced && attempt <= last;
}

void training_compare_case(const struct training_case *what, const struct gpu_rank *self,
                           const struct training_record *record) {
  const int rank = self->rank;
  struct learner learner;
  const int attempts = training_attempts(what);
  const int anew = what->traits & SAVED_ANEW ? attempts * 2 / 3 : 0;
  check_case("%s, form %d, rank %d of %d", what->name, (int)what->form, rank, self->size);
  if (!learner_open(&learner, what, self, true))
    return;
  for (int attempt = 0; attempt < attempts; attempt++) {
    if (anew && attempt == anew && !replace_optimizer(&learner, record, attempt))
      return;
    prepare_gradients(&learner, attempt);
    onebit_status_t status = make_step(&learner, attempt);
    check_status_of(&learner, attempt, status, record->status[rank][attempt]);
    if (attempt < attempts - 1)
      fetch_parameters(&learner, attempt);
    if (is_without_stream(&learner, attempt))
      training_check_info(learner.optimizer, &record->info[rank][attempt]);
  }
  check_record(&learner, record, anew);
  learner_close(&learner);
}
