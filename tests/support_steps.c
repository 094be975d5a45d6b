/* The scenarios of mistakes that one rank makes between begin and step of an optimizer. */
#include "tests/support_errors.h"

enum { TENSORS = 5, EACH = 300, COUNT = TENSORS * EACH, STEPS = 8 };

/* An optimizer of TENSORS tensors, a bucket each; a second one that makes the same good steps, and
 * no other, says what the parameters must be. */
struct pair {
  float parameter[2][COUNT], gradient[2][COUNT];
  onebit_optimizer_t optimizer[2];
};

static struct pair *make_pair(onebit_comm_t comm, const struct culprit *culprit) {
  struct pair *pair = allocate(1, sizeof *pair);
  for (int k = 0; k < 2; k++) {
    onebit_adam_options_t options = ONEBIT_ADAM_OPTIONS_INIT;
    onebit_tensor_t tensors[TENSORS];
    options.freeze_step = STEPS / 2;
    options.shards = culprit->shards;
    options.common.schedule = culprit->schedule;
    options.common.clip_norm = culprit->clip_norm;
    options.common.bucket_size = k == 0 ? EACH : 0;
    for (int t = 0; t < TENSORS; t++)
      tensors[t] = (onebit_tensor_t){
          pair->parameter[k] + t * EACH, pair->gradient[k] + t * EACH, EACH, 0, 0, 0};
    fill_input(pair->parameter[k], ONEBIT_FLOAT32, COUNT, 99, 0);
    CHECK_STATUS(onebit_adam_create(comm, tensors, TENSORS, &options, &pair->optimizer[k]),
                 ONEBIT_OK);
  }
  return pair;
}

static void free_pair(struct pair *pair) {
  onebit_optimizer_destroy(pair->optimizer[0]);
  onebit_optimizer_destroy(pair->optimizer[1]);
  free(pair);
}

/* The first half of a step, which starts exchanges. */
static void open_step(onebit_optimizer_t optimizer, float rate) {
  CHECK_STATUS(onebit_optimizer_begin(optimizer, rate), ONEBIT_OK);
  for (size_t t = TENSORS; t-- > 2;)
    CHECK_STATUS(onebit_optimizer_ready(optimizer, t), ONEBIT_OK);
}

/* The mistakes, and a part of the message of each. All but the last two are made in an open
 * step. */
enum mistake { NO_TENSOR, TWICE, BEGUN, OTHER_RATE, NAN_RATE, NAN_BEGIN, NOT_BEGUN, MISTAKES };
static const char *const names[] = {"tensor is 5", "second", "open", "begin", "begin", "rate", ""};

static onebit_status_t mistaken_step(onebit_optimizer_t optimizer, enum mistake mistake) {
  float rate = mistake == OTHER_RATE ? 0.02f : mistake == NAN_RATE ? NAN : 0.01f;
  if (mistake == NOT_BEGUN)
    CHECK_STATUS(onebit_optimizer_ready(optimizer, 0), ONEBIT_ERROR_ARGUMENT);
  if (mistake == NAN_BEGIN) {
    CHECK_STATUS(onebit_optimizer_begin(optimizer, NAN), ONEBIT_ERROR_ARGUMENT);
    CHECK_WORDS("learning_rate");
    return onebit_optimizer_step(optimizer, NAN);
  }
  open_step(optimizer, 0.01f);
  if (mistake == NO_TENSOR)
    CHECK_STATUS(onebit_optimizer_ready(optimizer, TENSORS), ONEBIT_ERROR_ARGUMENT);
  if (mistake == TWICE)
    CHECK_STATUS(onebit_optimizer_ready(optimizer, 3), ONEBIT_ERROR_ARGUMENT);
  if (mistake == BEGUN)
    CHECK_STATUS(onebit_optimizer_begin(optimizer, 0.01f), ONEBIT_ERROR_ARGUMENT);
  if (mistake < OTHER_RATE)
    CHECK_WORDS(names[mistake]);
  CHECK_STATUS(onebit_optimizer_ready(optimizer, 1), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_ready(optimizer, 0), ONEBIT_OK);
  return onebit_optimizer_step(optimizer, rate);
}

static void check_mistake(struct pair *pair, onebit_comm_t comm, int culprit, enum mistake mistake,
                          float *before) {
  bool guilty = onebit_comm_rank(comm) == culprit;
  memcpy(before, pair->parameter[0], sizeof pair->parameter[0]);
  onebit_status_t status = mistaken_step(pair->optimizer[0], guilty ? mistake : MISTAKES);
  if (mistake == NOT_BEGUN) { /* no other rank gets an error: no step was open */
    CHECK_STATUS(status, ONEBIT_OK);
    CHECK_STATUS(onebit_optimizer_step(pair->optimizer[1], 0.01f), ONEBIT_OK);
    return;
  }
  check_blame(status, comm, culprit, names[mistake]);
  CHECK_BITS("parameters after a mistake", pair->parameter[0], before, COUNT, ONEBIT_FLOAT32);
}

void mistakes_in_an_open_step(onebit_comm_t comm, void *context) {
  const struct culprit *culprit = context;
  struct pair *pair = make_pair(comm, culprit);
  float *before = allocate(COUNT, sizeof *before);
  for (int step = 0; step < STEPS; step++)
    for (int mistake = 0; mistake < MISTAKES; mistake++) {
      check_case("step %d, mistake %d of rank %d", step, mistake, culprit->rank);
      for (int k = 0; k < 2; k++)
        fill_input(pair->gradient[k], ONEBIT_FLOAT32, COUNT, onebit_comm_rank(comm), step);
      check_mistake(pair, comm, culprit->rank, (enum mistake)mistake, before);
      open_step(pair->optimizer[0], 0.01f);
      CHECK_STATUS(onebit_optimizer_step(pair->optimizer[0], 0.01f), ONEBIT_OK);
      CHECK_STATUS(onebit_optimizer_step(pair->optimizer[1], 0.01f), ONEBIT_OK);
      CHECK_BITS("parameters", pair->parameter[0], pair->parameter[1], COUNT, ONEBIT_FLOAT32);
    }
  free(before);
  free_pair(pair);
}

void destroyed_in_an_open_step(onebit_comm_t comm, void *context) {
  const struct culprit *culprit = context;
  for (int steps = 0; steps <= STEPS; steps += STEPS) { /* in warm-up, and compressed */
    struct pair *pair = make_pair(comm, culprit);
    check_case("rank %d destroys after %d steps", culprit->rank, steps);
    for (int step = 0; step < steps; step++) {
      fill_input(pair->gradient[0], ONEBIT_FLOAT32, COUNT, onebit_comm_rank(comm), step);
      CHECK_STATUS(onebit_optimizer_step(pair->optimizer[0], 0.01f), ONEBIT_OK);
    }
    open_step(pair->optimizer[0], 0.01f);
    if (onebit_comm_rank(comm) == culprit->rank) {
      onebit_optimizer_destroy(pair->optimizer[0]);
      pair->optimizer[0] = NULL;
    } else {
      check_blame(onebit_optimizer_step(pair->optimizer[0], 0.01f), comm, culprit->rank, "");
    }
    free_pair(pair);
  }
}
