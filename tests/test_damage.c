/*
 * Tests messages that are damaged in transit, in any bit of any message of a call. Some rank must
 * refuse the damaged message, and the next call must fail on every rank. After onebit_plan_reset,
 * or after loading a checkpoint, calls must succeed on all ranks.
 */
#include "collectives/communicator.h"
#include "collectives/plan_private.h"
#include "tests/support_collectives.h"
#include "tests/support_transports.h"

enum { MAX_ELEMENTS = 3000, SENDER = 1 };

/* A rank's callbacks. `send` flips a bit of one message, or shortens it, or sends it twice. */
struct wire {
  onebit_transport_callbacks_t inner;
  const char *kind; /* the first 4 bytes of messages to count; NULL: those of collective calls */
  long sent, at;    /* sent: messages counted so far; at: number of the one to damage, from 1 on */
  enum { FLIP, SHORTEN, DOUBLE } how;
  size_t bit;
};

static int send_damaged(void *context, const void *data, size_t bytes, int peer, int tag,
                        void **operation) {
  struct wire *wire = context;
  if (bytes < 4 || memcmp(data, wire->kind ? wire->kind : "O1B1", 4) != 0)
    return wire->inner.send(wire->inner.context, data, bytes, peer, tag, operation);
  unsigned char *copy = allocate(bytes, 1);
  memcpy(copy, data, bytes);
  const bool damaged = ++wire->sent == wire->at;
  if (damaged && wire->how == FLIP)
    copy[wire->bit / 8 % bytes] ^= (unsigned char)(1u << wire->bit % 8);
  if (damaged && wire->how == SHORTEN)
    bytes -= 8;
  if (damaged && wire->how == DOUBLE)
    wire->inner.send(wire->inner.context, copy, bytes, peer, tag, operation);
  int code = wire->inner.send(wire->inner.context, copy, bytes, peer, tag, operation);
  free(copy);
  return code;
}

static int forward_receive(void *context, void *data, size_t bytes, int peer, int tag,
                           void **operation) {
  struct wire *wire = context;
  return wire->inner.receive(wire->inner.context, data, bytes, peer, tag, operation);
}

static int forward_test(void *context, void *operation, double seconds, size_t *bytes) {
  struct wire *wire = context;
  return wire->inner.test(wire->inner.context, operation, seconds, bytes);
}

static void forward_cancel(void *context, void *operation) {
  struct wire *wire = context;
  wire->inner.cancel(wire->inner.context, operation);
}

/* Creates a communicator over callbacks that damage messages. */
static onebit_comm_t connect_damaged(struct wire *wire,
                                     const onebit_transport_callbacks_t *callbacks, int rank,
                                     int size) {
  onebit_transport_callbacks_t own = *callbacks;
  onebit_comm_t comm = NULL;
  *wire = (struct wire){.inner = *callbacks};
  own.context = wire;
  own.send = send_damaged;
  own.receive = forward_receive;
  own.test = forward_test;
  own.cancel = forward_cancel;
  own.abort = NULL;
  own.message = NULL;
  own.release = NULL;
  CHECK_STATUS(onebit_comm_create_custom(&own, rank, size, &comm), ONEBIT_OK);
  return comm;
}

/* The outcome of a call on all ranks together. */
struct ends {
  bool all_well, none_well, refused;
};

static struct ends share_outcome(onebit_comm_t comm, onebit_status_t status) {
  struct ends ends = {true, true, false};
  CHECK_STATUS(ob_agree_noting(comm, ONEBIT_OK, NULL, 0, (uint64_t)(int64_t)status), ONEBIT_OK);
  for (int rank = 0; rank < comm->size; rank++) {
    onebit_status_t other = (onebit_status_t)(int64_t)ob_agree_note(comm, rank);
    ends.all_well &= other == ONEBIT_OK;
    ends.none_well &= other != ONEBIT_OK;
    ends.refused |= other == ONEBIT_ERROR_MESSAGE;
  }
  return ends;
}

struct damage_case {
  const char *name;
  int size, hosts;
  size_t count, stride; /* elements; every `stride`-th bit is damaged in turn */
  onebit_plan_options_t options;
};

static onebit_status_t call_plan(onebit_plan_t plan, const float *input, float *output) {
  return call_collective(plan->options.operation, input, output, plan);
}

/* True if the bit is padding. If a transfer has several messages, padding lies between them. */
static bool is_padding(const struct onebit_plan *plan, size_t bit) {
  struct ob_message_shape shape = ob_plan_message(plan, 0, 0);
  return plan->schedule == &ob_schedule_doubling &&
         bit / 8 % plan->geometry.stride >= ob_message_bytes(&shape);
}

static void check_damaged_call(onebit_plan_t plan, struct wire *wire, const float *input,
                               float *output, const char *name) {
  onebit_comm_t comm = plan->comm;
  struct ends ends = share_outcome(comm, call_plan(plan, input, output));
  CHECK(ends.refused && !ends.all_well, "%s: message %ld, bit %zu is accepted", name, wire->at,
        wire->bit);
  wire->at = 0;
  ends = share_outcome(comm, call_plan(plan, input, output));
  CHECK(ends.none_well, "%s: a rank goes on after a refusal", name);
  CHECK_STATUS(onebit_plan_reset(plan), ONEBIT_OK);
  share_outcome(comm, ONEBIT_OK); /* waits until all ranks have reset the plan */
  ends = share_outcome(comm, call_plan(plan, input, output));
  CHECK(ends.all_well, "%s: after the reset: %s", name, onebit_last_error());
}

static void damage_every_message(const onebit_transport_callbacks_t *callbacks, int rank, int size,
                                 void *context) {
  const struct damage_case *what = context;
  struct wire wire;
  float *input = allocate(4 * MAX_ELEMENTS, sizeof *input);
  float *output = allocate(4 * MAX_ELEMENTS, sizeof *output);
  onebit_plan_t plan = NULL;
  onebit_comm_t comm = connect_damaged(&wire, callbacks, rank, size);
  for (size_t i = 0; i < 4 * what->count; i++)
    input[i] = uniform_value(i + (size_t)rank * 999983);
  if (what->options.dtype != ONEBIT_FLOAT32)
    memset(input, 0x3c + rank, what->count * sizeof(uint16_t));
  if (CHECK_STATUS(onebit_plan_create(comm, what->count, &what->options, &plan), ONEBIT_OK)) {
    wire.sent = 0;
    CHECK_STATUS(call_plan(plan, input, output), ONEBIT_OK);
    ob_agree_noting(comm, ONEBIT_OK, NULL, 0, (uint64_t)wire.sent);
    const long sent = (long)ob_agree_note(comm, SENDER);
    CHECK(sent > 0, "%s: nothing is sent", what->name);
    const size_t bits = 8 * plan->geometry.stride;
    for (long at = 1; at <= sent; at++)
      for (size_t bit = (size_t)at % what->stride; bit < bits; bit += what->stride) {
        if (is_padding(plan, bit))
          continue;
        wire.sent = 0;
        wire.at = rank == SENDER ? at : 0;
        wire.bit = bit;
        check_damaged_call(plan, &wire, input, output, what->name);
      }
  }
  onebit_plan_destroy(plan);
  onebit_comm_destroy(comm);
  free(input);
  free(output);
}

#define EXCHANGE     .schedule = ONEBIT_SCHEDULE_EXCHANGE
#define ALLGATHER    .schedule = ONEBIT_SCHEDULE_ALLGATHER
#define HIERARCHICAL .schedule = ONEBIT_SCHEDULE_HIERARCHICAL
#define DENSE        .wire = ONEBIT_WIRE_DENSE
/* Defines a test with a number of ranks, hosts and elements. It damages every `every`-th bit of
 * each message in turn. */
#define DAMAGE(name, ranks, on, elements, every, ...)                                              \
  Test(damage, of_##name) {                                                                        \
    struct damage_case what = {                                                                    \
        #name, ranks, on, elements, every, {.size = sizeof(onebit_plan_options_t), __VA_ARGS__}};  \
    try_on_custom(ranks, on, (struct custom_fault){0}, damage_every_message, &what);               \
  }
DAMAGE(every_bit_of_an_exchange, 3, 1, 70, 1, EXCHANGE)
DAMAGE(several_chunks, 2, 1, 300, 29, EXCHANGE, .chunk_size = 64, .block_size = 32)
DAMAGE(dense_values, 2, 1, 90, 13, EXCHANGE, DENSE)
DAMAGE(dense_values_of_all, 3, 1, 90, 37, ALLGATHER, DENSE)
DAMAGE(sixteen_bits, 2, 1, 90, 13, DENSE, .operation = ONEBIT_ALLGATHER, .dtype = ONEBIT_BFLOAT16)
DAMAGE(doubling, 4, 1, 70, 5, ALLGATHER)
DAMAGE(rounds, 5, 1, 70, 37, ALLGATHER)
DAMAGE(hosts, 4, 2, 200, 11, HIERARCHICAL)
DAMAGE(a_reduce_scatter, 2, 1, 70, 7, .operation = ONEBIT_REDUCE_SCATTER)
DAMAGE(an_allgather, 2, 1, 70, 7, .operation = ONEBIT_ALLGATHER)
DAMAGE(a_long_message, 2, 1, MAX_ELEMENTS, 331, EXCHANGE, DENSE)

/* --- An optimizer ------------------------------------------------------------------------------*/

enum { TENSOR = 500, STEPS = 6, LEARNERS = 3, CAPACITY = 1 << 16 };

static void *saved[LEARNERS];
static size_t saved_bytes[LEARNERS];

/* Damages a message from the server to one rank only. The other ranks make the step. */
static void damage_step(const onebit_transport_callbacks_t *callbacks, int rank, int size,
                        void *context) {
  const bool warm = *(const bool *)context;
  struct wire wire;
  float parameters[TENSOR] = {0}, gradients[TENSOR];
  onebit_comm_t comm = connect_damaged(&wire, callbacks, rank, size);
  onebit_tensor_t tensor = {.parameter = parameters, .gradient = gradients, .count = TENSOR};
  onebit_adam_options_t options = {.size = sizeof options, .freeze_step = warm ? 100 : 2};
  onebit_optimizer_t optimizer = NULL;
  CHECK_STATUS(onebit_adam_create(comm, &tensor, 1, &options, &optimizer), ONEBIT_OK);
  for (size_t i = 0; i < TENSOR; i++)
    gradients[i] = uniform_value(i + (size_t)rank * 7919);
  for (int step = 0; step < STEPS; step++)
    CHECK_STATUS(onebit_optimizer_step(optimizer, 0.01f), ONEBIT_OK);
  saved[rank] = allocate(CAPACITY, 1);
  CHECK_STATUS(onebit_optimizer_save(optimizer, saved[rank], CAPACITY, &saved_bytes[rank]),
               ONEBIT_OK);
  wire.sent = 0;
  wire.at = rank == SENDER ? size : 0; /* the first message after the messages to servers */
  wire.bit = 8 * 45;
  struct ends ends = share_outcome(comm, onebit_optimizer_step(optimizer, 0.01f));
  CHECK(ends.refused && !ends.none_well, "the message is accepted, or all have refused it");
  wire.at = 0;
  for (int step = 0; step < 3; step++) {
    ends = share_outcome(comm, onebit_optimizer_step(optimizer, 0.01f));
    CHECK(ends.none_well, "a rank makes a step after a refusal");
  }
  CHECK_STATUS(onebit_optimizer_load(optimizer, (const void *const *)saved, saved_bytes, size),
               ONEBIT_OK);
  ends = share_outcome(comm, onebit_optimizer_step(optimizer, 0.01f));
  CHECK(ends.all_well, "after the checkpoint was loaded: %s", onebit_last_error());
  onebit_optimizer_destroy(optimizer);
  onebit_comm_destroy(comm);
  free(saved[rank]);
}

Test(damage, of_a_step) {
  for (int warm = 0; warm < 2; warm++) {
    bool stage = warm;
    try_on_custom(LEARNERS, 1, (struct custom_fault){0}, damage_step, &stage);
    checks_must_hold();
  }
}

/* --- Agreements --------------------------------------------------------------------------------*/

/* Damages the message with which one rank tells another its arguments when a plan is created. */
static void damage_terms(const onebit_transport_callbacks_t *callbacks, int rank, int size,
                         void *context) {
  struct wire wire;
  (void)context;
  onebit_comm_t comm = connect_damaged(&wire, callbacks, rank, size);
  for (size_t bit = 0; bit < 8 * OB_AGREE_BYTES; bit += bit < 640 ? 1 : 17) {
    onebit_plan_t plan = NULL;
    wire.kind = "O1BA";
    wire.sent = 0;
    wire.at = rank == SENDER ? 1 : 0;
    wire.bit = bit;
    onebit_status_t status = onebit_plan_create(comm, 70, NULL, &plan);
    wire.at = 0;
    CHECK(share_outcome(comm, status).refused, "bit %zu is accepted", bit);
    CHECK(status == ONEBIT_OK || strstr(onebit_last_error(), "rank 1"), "of bit %zu: %s", bit,
          onebit_last_error());
    onebit_plan_destroy(plan);
  }
  onebit_comm_destroy(comm);
}

Test(damage, of_terms) { try_on_custom(3, 1, (struct custom_fault){0}, damage_terms, NULL); }

/* Sends the message with the arguments twice, or eight bytes too short. */
static void send_wrong_terms(const onebit_transport_callbacks_t *callbacks, int rank, int size,
                             void *context) {
  struct wire wire;
  onebit_comm_t comm = connect_damaged(&wire, callbacks, rank, size);
  wire.kind = "O1BA";
  wire.how = *(const bool *)context ? DOUBLE : SHORTEN;
  wire.at = rank == SENDER ? 1 : 0;
  onebit_status_t first = ob_agree(comm, ONEBIT_OK, NULL, 0), second = first;
  if (wire.how == DOUBLE)
    second = ob_agree(comm, ONEBIT_OK, NULL, 0);
  CHECK_STATUS(second, rank == SENDER ? ONEBIT_OK : ONEBIT_ERROR_MESSAGE);
  CHECK(rank == SENDER ||
            strstr(onebit_last_error(),
                   wire.how == DOUBLE ? "rank 1 is at its call number" : "rank 1 sent"),
        "%s", onebit_last_error());
  onebit_comm_destroy(comm);
}

Test(damage, of_terms_doubled_and_shortened) {
  for (int doubled = 0; doubled < 2; doubled++) {
    bool how = doubled;
    try_on_custom(2, 1, (struct custom_fault){0}, send_wrong_terms, &how);
    checks_must_hold();
  }
}
