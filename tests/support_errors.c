/* Scenarios in which one of several ranks makes an error: in a collective call, in a creation, or
 * in a step. */
#include "tests/support_errors.h"

#define COUNT 500
static const onebit_operation_t operations[] = {ONEBIT_ALLREDUCE, ONEBIT_ALLGATHER,
                                                ONEBIT_REDUCE_SCATTER};

void check_blame(onebit_status_t status, onebit_comm_t comm, int culprit, const char *name) {
  char words[32];
  snprintf(words, sizeof words, "rank %d", culprit);
  if (onebit_comm_rank(comm) == culprit) {
    CHECK_STATUS(status, ONEBIT_ERROR_ARGUMENT);
    CHECK_WORDS(name);
  } else {
    CHECK_STATUS(status, ONEBIT_ERROR_PEER);
    if (!strstr(onebit_last_error(), "(or a rank whose status it passed on)"))
      CHECK_WORDS(words);
  }
}

/* Wrong buffers. OTHERS_PLACE: in an in-place call, a rank passes the address of another rank's
 * part of the longer buffer, which counts as an overlap. */
enum mistake { NO_SENDBUF, NO_RECVBUF, ODD_SENDBUF, ODD_RECVBUF, OVERLAP, OTHERS_PLACE, MISTAKES };

static onebit_status_t call_with_mistake(const struct collective_case *what, enum mistake mistake,
                                         char *send, char *receive, onebit_plan_t plan,
                                         bool nonblocking, int rank) {
  const onebit_operation_t operation = what->options.operation;
  const size_t element = dtype_size(what->options.dtype);
  size_t other = (size_t)((rank + 1) % what->size) * what->count * element;
  if (mistake == NO_SENDBUF)
    send = NULL;
  if (mistake == NO_RECVBUF)
    receive = NULL;
  if (mistake == ODD_SENDBUF)
    send += element / 2;
  if (mistake == ODD_RECVBUF)
    receive += 1;
  if (mistake == OVERLAP)
    receive = send + element;
  if (mistake == OTHERS_PLACE && operation == ONEBIT_ALLGATHER)
    send = receive + other;
  else if (mistake == OTHERS_PLACE)
    receive = send + (operation == ONEBIT_REDUCE_SCATTER ? other : element);
  if (!nonblocking)
    return call_collective(operation, send, receive, plan);
  onebit_request_t request = NULL;
  CHECK_STATUS(start_collective(operation, send, receive, plan, &request), ONEBIT_OK);
  onebit_status_t status = onebit_wait(&request);
  CHECK(request == NULL, "a finished request is not NULL");
  return status;
}

/* Makes a call with each wrong buffer, with correct calls before and after it. */
static void check_mistakes(onebit_comm_t comm, int culprit, struct collective_run *run) {
  static const char *const names[] = {"sendbuf", "recvbuf", "sendbuf",
                                      "recvbuf", "overlap", "overlap"};
  const struct collective_case *what = &run->what;
  const size_t element = dtype_size(what->options.dtype);
  struct rank_plan rank_plan;
  rank_plan_create(&rank_plan, comm, run);
  char *room = allocate(rank_plan.sent + rank_plan.received + 16, element);
  rank_plan.send = room;
  rank_plan.receive = room + (rank_plan.sent + 8) * element;
  for (int step = 0; step < what->steps; step++) {
    enum mistake mistake = (enum mistake)(step % MISTAKES);
    check_case("%s of %s, mistake %d of rank %d", operation_name(what->options.operation),
               dtype_name(what->options.dtype), (int)mistake, culprit);
    rank_plan_fill(&rank_plan, step);
    fill_pattern(rank_plan.receive, rank_plan.received * element);
    onebit_status_t status =
        call_with_mistake(what, rank_plan.rank == culprit ? mistake : MISTAKES, rank_plan.send,
                          rank_plan.receive, rank_plan.plan, step >= MISTAKES, rank_plan.rank);
    check_blame(status, comm, culprit, names[mistake]);
    CHECK(pattern_holds(rank_plan.receive, rank_plan.received * element),
          "a failed call changed recvbuf");
    rank_plan_call(&rank_plan, step);
  }
  rank_plan_finish(&rank_plan);
  free(room);
}

void wrong_buffers_on_one_rank(onebit_comm_t comm, void *context) {
  const struct culprit *culprit = context;
  for (int k = 0; k < 3; k++) {
    struct collective_case what = {.size = onebit_comm_size(comm),
                                   .steps = 2 * MISTAKES,
                                   .count = COUNT,
                                   .options = EXCHANGE_OPTIONS_INIT};
    what.options.operation = operations[k];
    what.options.dtype = (onebit_dtype_t)((k + culprit->rank) % 3);
    what.hosts = onebit_comm_hosts(comm);
    if (culprit->schedule && operations[k] == ONEBIT_ALLREDUCE)
      what.options.schedule = culprit->schedule;
    struct collective_run run = collective_prepare(&what);
    check_mistakes(comm, culprit->rank, &run);
    collective_release(&run);
  }
}

void wrong_operation_on_one_rank(onebit_comm_t comm, void *context) {
  const struct culprit *culprit = context;
  int rank = onebit_comm_rank(comm), size = onebit_comm_size(comm);
  float *send = allocate((size_t)size * COUNT, sizeof(float));
  float *receive = allocate((size_t)size * COUNT, sizeof(float));
  for (int k = 0; k < 3; k++) {
    onebit_plan_options_t options = EXCHANGE_OPTIONS_INIT;
    onebit_plan_t plan = NULL;
    options.operation = operations[k];
    check_case("%s, rank %d calls another", operation_name(options.operation), culprit->rank);
    CHECK_STATUS(onebit_plan_create(comm, COUNT, &options, &plan), ONEBIT_OK);
    fill_pattern(receive, COUNT * sizeof(float));
    onebit_operation_t called = operations[rank == culprit->rank ? (k + 1) % 3 : k];
    check_blame(call_collective(called, send, receive, plan), comm, culprit->rank, "plan");
    CHECK(pattern_holds(receive, COUNT * sizeof(float)), "a failed call changed recvbuf");
    CHECK_STATUS(call_collective(operations[k], send, receive, plan), ONEBIT_OK);
    CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
  }
  free(send);
  free(receive);
}

void wrong_plan_on_one_rank(onebit_comm_t comm, void *context) {
  const struct culprit *culprit = context;
  bool guilty = onebit_comm_rank(comm) == culprit->rank;
  for (int k = 0; k < 4; k++) {
    static const char *const names[] = {"block_size", "size", "plan", "count"};
    onebit_plan_options_t options = EXCHANGE_OPTIONS_INIT;
    onebit_plan_t plan = NULL;
    check_case("rank %d gives a wrong %s", culprit->rank, names[k]);
    options.block_size = guilty && k == 0 ? 33 : 64;
    options.size = guilty && k == 1 ? 1 : sizeof options;
    onebit_status_t status = onebit_plan_create(comm, guilty && k == 3 ? SIZE_MAX : COUNT, &options,
                                                guilty && k == 2 ? NULL : &plan);
    check_blame(status, comm, culprit->rank, names[k]);
    CHECK(plan == NULL, "a failed creation left a plan");
    synchronize_ranks(comm);
  }
}

static float parameters[2 * COUNT], gradients[2 * COUNT]; /* never written, so all threads share
                                                           * them */

void wrong_tensors_on_one_rank(onebit_comm_t comm, void *context) {
  const struct culprit *culprit = context;
  bool guilty = onebit_comm_rank(comm) == culprit->rank;
  for (int k = 0; k < 5; k++) {
    static const char *const names[] = {"beta1", "parameter", "overlap", "optimizer", "tensors"};
    onebit_optimizer_t optimizer = NULL;
    onebit_tensor_t tensors[] = {{parameters, gradients, COUNT, 0, 0, 0},
                                 {parameters + COUNT, gradients + COUNT, COUNT, 0, 0, 0}};
    check_case("rank %d gives a wrong %s", culprit->rank, names[k]);
    onebit_adam_options_t options = {.size = sizeof options, .beta1 = guilty && k == 0 ? 2 : 0.5};
    if (guilty && k == 1)
      tensors[1].parameter = NULL;
    if (guilty && k == 2)
      tensors[1].parameter = parameters;
    onebit_status_t status = onebit_adam_create(comm, guilty && k == 4 ? NULL : tensors, 2,
                                                &options, guilty && k == 3 ? NULL : &optimizer);
    check_blame(status, comm, culprit->rank, names[k]);
    CHECK(optimizer == NULL, "a failed creation left an optimizer");
    synchronize_ranks(comm);
  }
}

void wrong_learning_rate_on_one_rank(onebit_comm_t comm, void *context) {
  const struct culprit *culprit = context;
  int rank = onebit_comm_rank(comm);
  /* `other` is true if profile deepspeed refuses these options */
  bool other = culprit->schedule == ONEBIT_SCHEDULE_HIERARCHICAL || culprit->shards;
  for (int profile = ONEBIT_PROFILE_DEFAULT; profile <= !other; profile++) {
    float parameter[COUNT], gradient[COUNT], before[COUNT];
    onebit_tensor_t tensors[] = {{parameter, gradient, 200, 0, 0, 0},
                                 {parameter + 200, gradient + 200, COUNT - 200, 0, 0, 0}};
    onebit_adam_options_t options = ONEBIT_ADAM_OPTIONS_INIT;
    onebit_optimizer_t optimizer = NULL;
    options.freeze_step = 3;
    options.shards = culprit->shards;
    options.common.clip_norm = culprit->clip_norm;
    options.common.profile = (onebit_profile_t)profile;
    options.common.schedule = culprit->schedule;
    check_case("rank %d gives a wrong learning rate, profile %d", culprit->rank, profile);
    fill_input(parameter, ONEBIT_FLOAT32, COUNT, 99, 0);
    CHECK_STATUS(onebit_adam_create(comm, tensors, 2, &options, &optimizer), ONEBIT_OK);
    for (int step = 0; step < 6; step++) { /* in the warm-up and compressed */
      fill_input(gradient, ONEBIT_FLOAT32, COUNT, rank, step);
      memcpy(before, parameter, sizeof before);
      onebit_status_t status =
          onebit_optimizer_step(optimizer, rank == culprit->rank ? NAN : 0.01f);
      check_blame(status, comm, culprit->rank, "learning_rate");
      status = onebit_optimizer_step(optimizer, rank == culprit->rank ? 0.02f : 0.01f);
      CHECK_STATUS(status, ONEBIT_ERROR_MISMATCH);
      CHECK_WORDS("learning_rate");
      CHECK_BITS("parameters", parameter, before, COUNT, ONEBIT_FLOAT32);
      CHECK(optimizer_info(optimizer).steps == (uint64_t)step, "step %d was made", step);
      CHECK_STATUS(onebit_optimizer_step(optimizer, 0.01f), ONEBIT_OK);
    }
    onebit_optimizer_destroy(optimizer);
  }
}

/* Plans that differ in a single option from the other ranks' plan, and the name by which the
 * message must name the option. */
#define PLAN(...)                                                                                  \
  { .size = sizeof(onebit_plan_options_t), __VA_ARGS__ }
static const struct {
  const char *name;
  size_t count;
  onebit_plan_options_t options;
} other_plans[] = {
    {"count", COUNT + 1, PLAN(.block_size = 64)},
    {"count", 0, PLAN(.block_size = 64)},
    {"operation", COUNT, PLAN(.block_size = 64, .operation = ONEBIT_ALLGATHER)},
    {"operation", COUNT, PLAN(.block_size = 64, .operation = ONEBIT_REDUCE_SCATTER)},
    {"dtype", COUNT, PLAN(.block_size = 64, .dtype = ONEBIT_BFLOAT16)},
    {"wire", COUNT, PLAN(.block_size = 64, .wire = ONEBIT_WIRE_DENSE)},
    {"profile", COUNT, PLAN(.profile = ONEBIT_PROFILE_DEEPSPEED)},
    {"scale", COUNT, PLAN(.block_size = 64, .scale = ONEBIT_SCALE_MEAN_ABSOLUTE)},
    {"block_size", COUNT, PLAN(.block_size = 96)},
    {"block_size", COUNT, PLAN(.block_size = ONEBIT_BLOCK_BUFFER)},
    {"chunk_size", COUNT, PLAN(.block_size = 64, .chunk_size = 64)},
    {"no_error_feedback", COUNT, PLAN(.block_size = 64, .no_error_feedback = 1)},
    {"schedule", COUNT, PLAN(.block_size = 64, .schedule = ONEBIT_SCHEDULE_ALLGATHER)},
    {"schedule", COUNT, PLAN(.block_size = 64, .schedule = ONEBIT_SCHEDULE_HIERARCHICAL)},
};

void other_plan_on_one_rank(onebit_comm_t comm, void *context) {
  const struct culprit *culprit = context;
  bool guilty = onebit_comm_rank(comm) == culprit->rank;
  for (size_t k = 0; k < sizeof other_plans / sizeof other_plans[0]; k++) {
    onebit_plan_options_t options = EXCHANGE_OPTIONS_INIT;
    onebit_plan_t plan = NULL;
    options.block_size = 64;
    check_case("rank %d has another %s", culprit->rank, other_plans[k].name);
    CHECK_STATUS(onebit_plan_create(comm, guilty ? other_plans[k].count : COUNT,
                                    guilty ? &other_plans[k].options : &options, &plan),
                 ONEBIT_ERROR_MISMATCH);
    CHECK_WORDS(other_plans[k].name);
    CHECK(plan == NULL, "a failed creation left a plan");
    synchronize_ranks(comm);
  }
}

#define ADAM(...)                                                                                  \
  { .size = sizeof(onebit_adam_options_t), __VA_ARGS__ }
static const struct {
  const char *name;
  size_t tensors, count;
  float weight_decay, factor;
  onebit_adam_options_t options;
} other_adams[] = {
    {"ntensors", 1, COUNT, 0, 0, ADAM(.common.threads = 0)},
    {"count", 2, COUNT - 1, 0, 0, ADAM(.common.threads = 0)},
    {"weight_decay", 2, COUNT, 0.5f, 0, ADAM(.common.threads = 0)},
    {"factor", 2, COUNT, 0, 0.5f, ADAM(.common.threads = 0)},
    {"scale", 2, COUNT, 0, 0, ADAM(.common.scale = ONEBIT_SCALE_MEAN_ABSOLUTE)},
    {"block_size", 2, COUNT, 0, 0, ADAM(.common.block_size = 32)},
    {"chunk_size", 2, COUNT, 0, 0, ADAM(.common.chunk_size = 32)},
    {"no_error_feedback", 2, COUNT, 0, 0, ADAM(.common.no_error_feedback = 1)},
    {"bucket_size", 2, COUNT, 0, 0, ADAM(.common.bucket_size = 10)},
    {"schedule", 2, COUNT, 0, 0, ADAM(.common.schedule = ONEBIT_SCHEDULE_HIERARCHICAL)},
    {"gradient_dtype", 2, COUNT, 0, 0, ADAM(.common.gradient_dtype = ONEBIT_BFLOAT16)},
    {"parameter_dtype", 2, COUNT, 0, 0, ADAM(.common.parameter_dtype = ONEBIT_FLOAT16)},
    {"gradient_factor", 2, COUNT, 0, 0, ADAM(.common.gradient_factor = 0.5)},
    {"0.5 on rank", 2, COUNT, 0, 0, ADAM(.common.gradient_factor = 0.5)}, /* the message contains
                                                                           * the number, not its
                                                                           * bits */
    {"clip_norm", 2, COUNT, 0, 0, ADAM(.common.clip_norm = 1)},
    {"initial_loss_scale", 2, COUNT, 0, 0, ADAM(.common.initial_loss_scale = 8)},
    {"loss_scale_interval", 2, COUNT, 0, 0, ADAM(.common.loss_scale_interval = 8)},
    {"min_loss_scale", 2, COUNT, 0, 0, ADAM(.common.min_loss_scale = 0.5)},
    {"dense_below", 2, COUNT, 0, 0, ADAM(.common.dense_below = 10)},
    {"warmup_bits", 2, COUNT, 0, 0, ADAM(.common.warmup_bits = 4)},
    {"bits", 2, COUNT, 0, 0, ADAM(.common.bits = 4)},
    {"max_bits", 2, COUNT, 0, 0, ADAM(.common.max_bits = 8)},
    {"residual_copies", 2, COUNT, 0, 0, ADAM(.common.residual_copies = 1)},
    {"profile", 2, COUNT, 0, 0,
     ADAM(.common.profile = ONEBIT_PROFILE_DEEPSPEED, .no_bias_correction = 1)},
};

void other_adam_on_one_rank(onebit_comm_t comm, void *context) {
  const struct culprit *culprit = context;
  bool guilty = onebit_comm_rank(comm) == culprit->rank;
  for (size_t k = 0; k < sizeof other_adams / sizeof other_adams[0]; k++) {
    onebit_adam_options_t common = ONEBIT_ADAM_OPTIONS_INIT;
    onebit_tensor_t tensors[] = {{parameters, gradients, COUNT, 0, 0, 0},
                                 {parameters + COUNT, gradients + COUNT, COUNT, 0, 0, 0}};
    onebit_optimizer_t optimizer = NULL;
    size_t count = 2;
    check_case("rank %d has another %s", culprit->rank, other_adams[k].name);
    if (guilty) {
      tensors[1] = (onebit_tensor_t){parameters + COUNT,    gradients + COUNT,
                                     other_adams[k].count,  other_adams[k].weight_decay,
                                     other_adams[k].factor, 0};
      common = other_adams[k].options;
      count = other_adams[k].tensors;
    } else {
      common.no_bias_correction = other_adams[k].options.common.profile == ONEBIT_PROFILE_DEEPSPEED;
    }
    CHECK_STATUS(onebit_adam_create(comm, tensors, count, &common, &optimizer),
                 ONEBIT_ERROR_MISMATCH);
    CHECK_WORDS(other_adams[k].name);
    CHECK(optimizer == NULL, "a failed creation left an optimizer");
    synchronize_ranks(comm);
  }
}

void plan_here_and_optimizer_there(onebit_comm_t comm, void *context) {
  const struct culprit *culprit = context;
  onebit_tensor_t tensor = {parameters, gradients, COUNT, 0, 0, 0};
  onebit_optimizer_t optimizer = NULL;
  onebit_plan_t plan = NULL;
  check_case("rank %d makes an optimizer", culprit->rank);
  if (onebit_comm_rank(comm) == culprit->rank)
    CHECK_STATUS(onebit_adam_create(comm, &tensor, 1, NULL, &optimizer), ONEBIT_ERROR_MISMATCH);
  else
    CHECK_STATUS(onebit_plan_create(comm, COUNT, NULL, &plan), ONEBIT_ERROR_MISMATCH);
  CHECK(!optimizer && !plan, "a failed creation left something");
  synchronize_ranks(comm);
}

void other_threads_on_one_rank(onebit_comm_t comm, void *context) {
  const struct culprit *culprit = context;
  onebit_plan_options_t options = EXCHANGE_OPTIONS_INIT;
  onebit_plan_t plan = NULL;
  float send[COUNT] = {1.0f}, receive[COUNT];
  options.threads = onebit_comm_rank(comm) == culprit->rank ? 2 : 1;
  CHECK_STATUS(onebit_plan_create(comm, COUNT, &options, &plan), ONEBIT_OK);
  CHECK_STATUS(onebit_allreduce(send, receive, plan), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
}

/* ---- Mistakes between begin and step of an optimizer ---- */

enum { TENSORS = PAIR_TENSORS, STEP_COUNT = PAIR_COUNT, STEPS = 8 };

struct adam_pair *pair_make(onebit_comm_t comm, const onebit_adam_options_t options[2]) {
  struct adam_pair *pair = allocate(1, sizeof *pair);
  for (int k = 0; k < 2; k++) {
    onebit_tensor_t tensors[TENSORS];
    for (size_t t = 0; t < TENSORS; t++)
      tensors[t] = (onebit_tensor_t){.parameter = pair->parameter[k] + t * PAIR_EACH,
                                     .gradient = pair->gradient[k] + t * PAIR_EACH,
                                     .count = PAIR_EACH,
                                     .weight_decay = 0.01f,
                                     .uncompressed = t == 0};
    fill_input(pair->parameter[k], ONEBIT_FLOAT32, PAIR_COUNT, 99, 0);
    CHECK_STATUS(onebit_adam_create(comm, tensors, TENSORS, &options[k], &pair->optimizer[k]),
                 ONEBIT_OK);
  }
  return pair;
}

void pair_free(struct adam_pair *pair) {
  onebit_optimizer_destroy(pair->optimizer[0]);
  onebit_optimizer_destroy(pair->optimizer[1]);
  free(pair);
}

/* Creates two optimizers. The first has a bucket for each tensor. The second makes only the correct
 * steps, so that its parameters are the expected ones. */
static struct adam_pair *make_pair(onebit_comm_t comm, const struct culprit *culprit) {
  onebit_adam_options_t options[2] = {ONEBIT_ADAM_OPTIONS_INIT, ONEBIT_ADAM_OPTIONS_INIT};
  options[0].freeze_step = STEPS / 2;
  options[0].shards = culprit->shards;
  options[0].common.schedule = culprit->schedule;
  options[0].common.clip_norm = culprit->clip_norm;
  options[1] = options[0];
  options[0].common.bucket_size = PAIR_EACH;
  return pair_make(comm, options);
}

/* Makes the first half of a step, which starts exchanges. */
static void open_step(onebit_optimizer_t optimizer, float rate) {
  CHECK_STATUS(onebit_optimizer_begin(optimizer, rate), ONEBIT_OK);
  for (size_t t = TENSORS; t-- > 2;)
    CHECK_STATUS(onebit_optimizer_ready(optimizer, t), ONEBIT_OK);
}

/* The mistakes, with a part of each one's message. All except the last two are made between begin
 * and step. */
enum step_mistake {
  NO_TENSOR,
  TWICE,
  BEGUN,
  OTHER_RATE,
  NAN_RATE,
  NAN_BEGIN,
  NOT_BEGUN,
  STEP_MISTAKES
};
static const char *const step_words[] = {"tensor is 5", "second", "open", "begin",
                                         "begin",       "rate",   ""};

static onebit_status_t make_mistaken_step(onebit_optimizer_t optimizer,
                                          enum step_mistake step_mistake) {
  float rate = step_mistake == OTHER_RATE ? 0.02f : step_mistake == NAN_RATE ? NAN : 0.01f;
  if (step_mistake == NOT_BEGUN)
    CHECK_STATUS(onebit_optimizer_ready(optimizer, 0), ONEBIT_ERROR_ARGUMENT);
  if (step_mistake == NAN_BEGIN) {
    CHECK_STATUS(onebit_optimizer_begin(optimizer, NAN), ONEBIT_ERROR_ARGUMENT);
    CHECK_WORDS("learning_rate");
    return onebit_optimizer_step(optimizer, NAN);
  }
  open_step(optimizer, 0.01f);
  if (step_mistake == NO_TENSOR)
    CHECK_STATUS(onebit_optimizer_ready(optimizer, TENSORS), ONEBIT_ERROR_ARGUMENT);
  if (step_mistake == TWICE)
    CHECK_STATUS(onebit_optimizer_ready(optimizer, 3), ONEBIT_ERROR_ARGUMENT);
  if (step_mistake == BEGUN)
    CHECK_STATUS(onebit_optimizer_begin(optimizer, 0.01f), ONEBIT_ERROR_ARGUMENT);
  if (step_mistake < OTHER_RATE)
    CHECK_WORDS(step_words[step_mistake]);
  CHECK_STATUS(onebit_optimizer_ready(optimizer, 1), ONEBIT_OK);
  CHECK_STATUS(onebit_optimizer_ready(optimizer, 0), ONEBIT_OK);
  return onebit_optimizer_step(optimizer, rate);
}

static void check_mistake(struct adam_pair *pair, onebit_comm_t comm, int culprit,
                          enum step_mistake step_mistake, float *before) {
  bool guilty = onebit_comm_rank(comm) == culprit;
  memcpy(before, pair->parameter[0], sizeof pair->parameter[0]);
  onebit_status_t status =
      make_mistaken_step(pair->optimizer[0], guilty ? step_mistake : STEP_MISTAKES);
  if (step_mistake == NOT_BEGUN) { /* no other rank gets an error: no step was open */
    CHECK_STATUS(status, ONEBIT_OK);
    CHECK_STATUS(onebit_optimizer_step(pair->optimizer[1], 0.01f), ONEBIT_OK);
    return;
  }
  check_blame(status, comm, culprit, step_words[step_mistake]);
  CHECK_BITS("parameters after a mistake", pair->parameter[0], before, STEP_COUNT, ONEBIT_FLOAT32);
}

void mistakes_in_an_open_step(onebit_comm_t comm, void *context) {
  const struct culprit *culprit = context;
  struct adam_pair *pair = make_pair(comm, culprit);
  float *before = allocate(STEP_COUNT, sizeof *before);
  for (int step = 0; step < STEPS; step++)
    for (int step_mistake = 0; step_mistake < STEP_MISTAKES; step_mistake++) {
      check_case("step %d, mistake %d of rank %d", step, step_mistake, culprit->rank);
      for (int k = 0; k < 2; k++)
        fill_input(pair->gradient[k], ONEBIT_FLOAT32, STEP_COUNT, onebit_comm_rank(comm), step);
      check_mistake(pair, comm, culprit->rank, (enum step_mistake)step_mistake, before);
      open_step(pair->optimizer[0], 0.01f);
      CHECK_STATUS(onebit_optimizer_step(pair->optimizer[0], 0.01f), ONEBIT_OK);
      CHECK_STATUS(onebit_optimizer_step(pair->optimizer[1], 0.01f), ONEBIT_OK);
      CHECK_BITS("parameters", pair->parameter[0], pair->parameter[1], STEP_COUNT, ONEBIT_FLOAT32);
    }
  free(before);
  pair_free(pair);
}

void destroyed_in_an_open_step(onebit_comm_t comm, void *context) {
  const struct culprit *culprit = context;
  for (int steps = 0; steps <= STEPS; steps += STEPS) { /* in warm-up, and compressed */
    struct adam_pair *pair = make_pair(comm, culprit);
    check_case("rank %d destroys after %d steps", culprit->rank, steps);
    for (int step = 0; step < steps; step++) {
      fill_input(pair->gradient[0], ONEBIT_FLOAT32, STEP_COUNT, onebit_comm_rank(comm), step);
      CHECK_STATUS(onebit_optimizer_step(pair->optimizer[0], 0.01f), ONEBIT_OK);
    }
    open_step(pair->optimizer[0], 0.01f);
    if (onebit_comm_rank(comm) == culprit->rank) {
      onebit_optimizer_destroy(pair->optimizer[0]);
      pair->optimizer[0] = NULL;
    } else {
      check_blame(onebit_optimizer_step(pair->optimizer[0], 0.01f), comm, culprit->rank, "");
    }
    pair_free(pair);
  }
}
