/* Batches over functions that the caller supplies (onebit/custom.h). */
#include <stdatomic.h>
#include <stdint.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/memory.h"
#include "collectives/communicator.h"
#include "onebit/custom.h"

#define MIN_LARGEST_TAG 32767 /* the same as in MPI */

struct custom {
  onebit_transport_callbacks_t call;
  atomic_bool failed;
};

struct custom_batch {
  struct ob_batch base;
  void **operations; /* first those of receives, then of sends; NULL: complete or not begun */
};

/* The requests of all communicators of a process advance together, as over MPI, since they may
 * depend on each other. */
static struct ob_engine process_engine = OB_ENGINE_INIT;

static size_t custom_message_count(const struct ob_batch *base) {
  return base->receives + base->sends;
}

static void custom_cancel_all(struct custom_batch *batch) {
  struct custom *custom = batch->base.comm->state;
  for (size_t i = 0; i < 2 * batch->base.capacity; i++) {
    if (batch->operations[i])
      custom->call.cancel(custom->call.context, batch->operations[i]);
    batch->operations[i] = NULL;
  }
}

static bool custom_cancel(struct ob_batch *base) {
  struct custom_batch *batch = (struct custom_batch *)base;
  if (batch->operations && base->comm->state)
    custom_cancel_all(batch); /* the plan failed for another reason */
  return true;
}

/* Ends the communicator with this message. Another plan of this rank may notice the end first, and
 * then reports the same message. */
static void custom_give_up(onebit_comm_t comm, const char *text) {
  struct custom *custom = comm->state;
  ob_comm_receive_end(comm, text);
  if (!atomic_exchange(&custom->failed, true) && custom->call.abort)
    custom->call.abort(custom->call.context);
}

/* Ends a batch that has failed, and the communicator, with this thread's error message. */
static onebit_status_t end_failed_batch(struct custom_batch *batch, onebit_status_t status) {
  custom_give_up(batch->base.comm, onebit_last_error());
  custom_cancel_all(batch);
  return status;
}

/* Fails with the callbacks' error message, which is read before any other callback is called. */
static onebit_status_t fail_operation(struct custom_batch *batch, const char *what, int peer,
                                      int code) {
  const struct custom *custom = batch->base.comm->state;
  const char *message =
      custom->call.message ? custom->call.message(custom->call.context, code) : NULL;
  onebit_status_t status =
      message
          ? ob_error(ONEBIT_ERROR_TRANSPORT, "custom: %s rank %d failed: %s", what, peer, message)
          : ob_error(ONEBIT_ERROR_TRANSPORT, "custom: %s rank %d failed: the callback returned %d",
                     what, peer, code);
  return end_failed_batch(batch, status);
}

static onebit_status_t begin_receive(struct custom_batch *batch, size_t number, int tag) {
  const struct custom *custom = batch->base.comm->state;
  const struct ob_endpoint *in = &batch->base.receive[number];
  void **operation = &batch->operations[number];
  int code =
      custom->call.receive(custom->call.context, in->data, in->bytes, in->peer, tag, operation);
  if (code)
    return fail_operation(batch, "receive from", in->peer, code);
  if (!*operation)
    return end_failed_batch(
        batch,
        ob_error(ONEBIT_ERROR_TRANSPORT,
                 "custom: the receive callback for rank %d has not set *operation", in->peer));
  return ONEBIT_OK;
}

static onebit_status_t begin_send(struct custom_batch *batch, size_t number, int tag) {
  const struct custom *custom = batch->base.comm->state;
  const struct ob_endpoint *out = &batch->base.send[number];
  void **operation = &batch->operations[batch->base.receives + number];
  int code =
      custom->call.send(custom->call.context, out->data, out->bytes, out->peer, tag, operation);
  return code ? fail_operation(batch, "send to", out->peer, code) : ONEBIT_OK;
}

static onebit_status_t check_not_failed(struct custom_batch *batch) {
  const onebit_status_t status = ob_comm_check(batch->base.comm);
  return status == ONEBIT_OK ? ONEBIT_OK : end_failed_batch(batch, status);
}

static onebit_status_t custom_begin(struct ob_batch *base, int tag) {
  struct custom_batch *batch = (struct custom_batch *)base;
  batch->operations = base->messages;
  OB_TRY(check_not_failed(batch));
  for (size_t i = 0; i < base->receives; i++)
    OB_TRY(begin_receive(batch, i, tag));
  for (size_t i = 0; i < base->sends; i++)
    OB_TRY(begin_send(batch, i, tag));
  return ONEBIT_OK;
}

/* Sets the endpoint's `bytes` to the number of bytes that have arrived. */
static onebit_status_t set_received_size(struct custom_batch *batch, size_t number, size_t bytes) {
  if (number >= batch->base.receives)
    return ONEBIT_OK;
  struct ob_endpoint *in = &batch->base.receive[number];
  if (bytes > in->bytes)
    return end_failed_batch(batch, ob_error(ONEBIT_ERROR_TRANSPORT,
                                            "custom: a message of %zu bytes arrived from rank %d, "
                                            "which is longer than expected, %zu",
                                            bytes, in->peer, in->bytes));
  in->bytes = bytes;
  return ONEBIT_OK;
}

static onebit_status_t test_operation(struct custom_batch *batch, size_t number, double seconds) {
  const struct custom *custom = batch->base.comm->state;
  size_t bytes = 0;
  int code = custom->call.test(custom->call.context, batch->operations[number], seconds, &bytes);
  if (code == ONEBIT_IN_PROGRESS)
    return ONEBIT_IN_PROGRESS;
  if (code)
    return fail_operation(batch, number < batch->base.receives ? "message from" : "message to",
                          ob_batch_peer(&batch->base, number), code);
  batch->operations[number] = NULL;
  return set_received_size(batch, number, bytes);
}

/* Tests all incomplete operations. Then, if waiting is allowed, waits for the first of them. */
static onebit_status_t test_operations(struct custom_batch *batch, double seconds) {
  size_t count = custom_message_count(&batch->base), open = count;
  for (size_t i = count; i-- > 0;) {
    if (!batch->operations[i])
      continue;
    onebit_status_t status = test_operation(batch, i, 0);
    if (status < 0)
      return status;
    if (status == ONEBIT_IN_PROGRESS)
      open = i;
  }
  if (open == count)
    return ONEBIT_OK;
  onebit_status_t status = seconds > 0 ? test_operation(batch, open, seconds) : ONEBIT_IN_PROGRESS;
  return status < 0 ? status : ONEBIT_IN_PROGRESS;
}

static onebit_status_t custom_test(struct ob_batch *base, double seconds) {
  struct custom_batch *batch = (struct custom_batch *)base;
  OB_TRY(check_not_failed(batch));
  return test_operations(batch, seconds);
}

static int custom_peer_awaited(struct ob_batch *base) {
  const struct custom_batch *batch = (struct custom_batch *)base;
  for (size_t i = 0; i < custom_message_count(base); i++)
    if (batch->operations[i])
      return ob_batch_peer(base, i);
  return -1;
}

static void custom_abort_for_all(onebit_comm_t comm, const char *text) {
  custom_give_up(comm, text); /* the caller's functions get no text */
}

static void custom_progress(onebit_comm_t comm) {
  const struct custom *custom = comm->state;
  if (custom->call.progress)
    custom->call.progress(custom->call.context);
}

/* Frees the state without calling the caller's `release`. */
static void custom_release_state(onebit_comm_t comm) {
  if (comm->control)
    custom_cancel_all((struct custom_batch *)comm->control);
  ob_release(comm->state);
  comm->state = NULL;
}

static void custom_destroy(onebit_comm_t comm) {
  const struct custom *custom = comm->state;
  onebit_transport_callbacks_t call = custom->call;
  custom_release_state(comm);
  if (call.release)
    call.release(call.context);
}

const struct ob_transport ob_transport_custom = {
    .name = "custom",
    .host_messages = true,
    .network = true,
    .batch_bytes = sizeof(struct custom_batch),
    .message_bytes = 2 * sizeof(void *),
    .cancel = custom_cancel,
    .begin = custom_begin,
    .test = custom_test,
    .peer_awaited = custom_peer_awaited,
    .abort = custom_abort_for_all,
    .progress = custom_progress,
    .destroy = custom_destroy,
};

/* --- Creation ----------------------------------------------------------------------------------*/

static onebit_status_t check_function(const char *name, bool there) {
  return there ? ONEBIT_OK : ob_error(ONEBIT_ERROR_ARGUMENT, "callbacks->%s is NULL", name);
}

/* Checks the arguments without which this rank could not tell the other ranks of an error. */
static onebit_status_t custom_check_usable(const onebit_transport_callbacks_t *call, int rank,
                                           int size) {
  OB_TRY(ob_size_check("callbacks", call, sizeof *call));
  OB_TRY(check_function("send", call->send));
  OB_TRY(check_function("receive", call->receive));
  OB_TRY(check_function("test", call->test));
  OB_TRY(check_function("cancel", call->cancel));
  if (size < 1)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "size is %d, not 1 or more", size);
  if (rank < 0 || rank >= size)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "rank is %d, not 0 to size - 1, %d", rank, size - 1);
  return ONEBIT_OK;
}

static onebit_status_t check_optional_fields(const onebit_transport_callbacks_t *call,
                                             bool wanted) {
  if (!wanted)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "comm is NULL");
  if (call->largest_tag < 0)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "callbacks->largest_tag is %d, not 0 or more",
                    call->largest_tag);
  if (!(call->timeout >= 0))
    return ob_error(ONEBIT_ERROR_ARGUMENT,
                    "callbacks->timeout is %g seconds: it must be at least 0", call->timeout);
  return ONEBIT_OK;
}

static onebit_status_t custom_create_local(const onebit_transport_callbacks_t *call, int rank,
                                           int size, onebit_comm_t *comm) {
  struct custom *custom = ob_allocate(1, sizeof *custom);
  *comm = NULL;
  if (!custom)
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for a communicator");
  custom->call = *call;
  custom->call.host = NULL;
  onebit_status_t status =
      ob_comm_create(&ob_transport_custom, rank, size, NULL, custom, &process_engine, comm);
  if (status == ONEBIT_OK)
    status = ob_comm_make_names(*comm);
  if (status != ONEBIT_OK) {
    ob_comm_release(*comm);
    *comm = NULL;
    ob_release(custom);
    return status;
  }
  if (call->timeout > 0)
    (*comm)->timeout = call->timeout;
  (*comm)->largest_tag = call->largest_tag > 0 ? call->largest_tag : MIN_LARGEST_TAG;
  return ONEBIT_OK;
}

static onebit_status_t agree_on_custom(onebit_comm_t comm, onebit_status_t status,
                                       const char *host) {
  const struct ob_term terms[] = {{"size", (uint64_t)comm->size},
                                  {"largest_tag", (uint64_t)comm->largest_tag}};
  return ob_comm_exchange_setup(comm, status, terms, sizeof terms / sizeof terms[0], host);
}

onebit_status_t onebit_comm_create_custom(const onebit_transport_callbacks_t *callbacks, int rank,
                                          int size, onebit_comm_t *result) {
  OB_CALL_SCOPE;
  onebit_comm_t comm;
  if (result)
    *result = NULL;
  OB_TRY(custom_check_usable(callbacks, rank, size));
  onebit_status_t status = custom_create_local(callbacks, rank, size, &comm);
  if (status != ONEBIT_OK) {
    if (callbacks->abort)
      callbacks->abort(callbacks->context);
    return status;
  }
  status = agree_on_custom(comm, check_optional_fields(callbacks, result != NULL), callbacks->host);
  if (status == ONEBIT_OK) {
    *result = comm;
    return ONEBIT_OK;
  }
  custom_release_state(comm);
  ob_comm_release(comm);
  return status;
}
