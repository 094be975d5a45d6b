/* The transport of a single rank: every batch is empty and complete. */
#include "base/call_scope.h"
#include "base/error.h"
#include "collectives/communicator.h"

static onebit_status_t self_begin(struct ob_batch *batch, int tag) {
  (void)batch, (void)tag;
  return ONEBIT_OK;
}

static onebit_status_t self_test(struct ob_batch *batch, double seconds) {
  (void)batch, (void)seconds;
  return ONEBIT_OK;
}

static onebit_status_t self_put(struct ob_batch *batch, void *stream) {
  (void)batch, (void)stream;
  return ONEBIT_OK;
}

static onebit_status_t self_shrink(onebit_comm_t comm, onebit_comm_t *survivors) {
  (void)comm;
  return onebit_comm_create_self(survivors);
}

const struct ob_transport ob_transport_self = {
    .name = "self",
    .host_messages = true,
    .batch_bytes = sizeof(struct ob_batch),
    .begin = self_begin,
    .test = self_test,
    .put = self_put,
    .shrink = self_shrink,
};

onebit_status_t onebit_comm_create_self(onebit_comm_t *comm) {
  OB_CALL_SCOPE;
  if (!comm)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "comm is NULL");
  OB_TRY(ob_comm_create(&ob_transport_self, 0, 1, NULL, NULL, NULL, comm));
  ob_comm_log(*comm);
  return ONEBIT_OK;
}
