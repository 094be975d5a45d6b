/* Agreement among ranks: one small message from each to each. */
#include "collectives/agree.h"

#include <inttypes.h>
#include <string.h>

#include "base/error.h"

struct proposal {
  uint32_t magic;
  int32_t status;
  uint64_t count, note;
  uint64_t values[OB_TERMS];
};

_Static_assert(sizeof(struct proposal) == OB_AGREE_BYTES, "a proposal fills its slot");

#define PROPOSAL_MAGIC 0x4142314fu /* the bytes "O1BA" */

static struct proposal *slot(onebit_comm_t comm, int rank) {
  return (struct proposal *)(void *)(comm->control_memory + (size_t)rank * OB_AGREE_BYTES);
}

static onebit_status_t exchange(onebit_comm_t comm) {
  struct ob_batch *batch = comm->control;
  batch->sends = batch->receives = 0;
  for (int step = 1; step < comm->size; step++) {
    int to = (comm->rank + step) % comm->size;
    struct ob_endpoint out = {slot(comm, comm->rank), OB_AGREE_BYTES, to};
    struct ob_endpoint in = {slot(comm, to), OB_AGREE_BYTES, to};
    batch->send[batch->sends++] = out;
    batch->receive[batch->receives++] = in;
  }
  OB_TRY(comm->transport->begin(batch, 0));
  return comm->transport->test(batch, true);
}

/* A peer that failed: its status is the news. */
static onebit_status_t check_peer(onebit_comm_t comm, int rank) {
  const struct proposal *theirs = slot(comm, rank);
  if (theirs->magic != PROPOSAL_MAGIC)
    return ob_error(ONEBIT_ERROR_MESSAGE, "rank %d sent something else than its terms", rank);
  if (theirs->status == ONEBIT_OK)
    return ONEBIT_OK;
  onebit_status_t status = (onebit_status_t)theirs->status;
  return ob_error(status == ONEBIT_ERROR_MEMORY ? status : ONEBIT_ERROR_PEER, "rank %d reports %s",
                  rank, onebit_status_string(status));
}

/* Every rank compares everyone with rank 0, so all come to the same words. */
static onebit_status_t compare(onebit_comm_t comm, int rank, const struct ob_term *terms,
                               size_t count) {
  const struct proposal *first = slot(comm, 0), *theirs = slot(comm, rank);
  if (first->count != theirs->count)
    return ob_error(ONEBIT_ERROR_MISMATCH, "rank 0 and rank %d do not make the same thing", rank);
  for (size_t i = 0; i < count && i < first->count; i++)
    if (first->values[i] != theirs->values[i])
      return ob_error(ONEBIT_ERROR_MISMATCH,
                      "%s differs between ranks: %" PRIu64 " on rank 0, %" PRIu64 " on rank %d",
                      terms[i].name, first->values[i], theirs->values[i], rank);
  return ONEBIT_OK;
}

onebit_status_t ob_agree_check(onebit_comm_t comm, const struct ob_term *terms, size_t count) {
  for (int rank = 0; rank < comm->size; rank++)
    OB_TRY(check_peer(comm, rank));
  for (int rank = 1; rank < comm->size; rank++)
    OB_TRY(compare(comm, rank, terms, count));
  return ONEBIT_OK;
}

onebit_status_t ob_agree(onebit_comm_t comm, onebit_status_t status, const struct ob_term *terms,
                         size_t count) {
  return ob_agree_noting(comm, status, terms, count, 0);
}

uint64_t ob_agree_note(onebit_comm_t comm, int rank) { return slot(comm, rank)->note; }

onebit_status_t ob_agree_noting(onebit_comm_t comm, onebit_status_t status,
                                const struct ob_term *terms, size_t count, uint64_t note) {
  struct proposal *mine = slot(comm, comm->rank);
  comm->agreements++;
  *mine =
      (struct proposal){.magic = PROPOSAL_MAGIC, .status = status, .count = count, .note = note};
  for (size_t i = 0; i < count; i++)
    mine->values[i] = terms[i].value;
  if (comm->size > 1)
    OB_TRY(exchange(comm));
  return status == ONEBIT_OK ? ob_agree_check(comm, terms, count) : status;
}
