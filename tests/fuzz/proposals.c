/* The proposals of an agreement (collectives/agree.h): those of all ranks but this one are the
 * input. Whatever they hold, all of it is compared within its slots. */
#include "base/error.h"
#include "collectives/agree.h"
#include "tests/fuzz/fuzz.h"

enum { RANKS = 4, TERMS = 3 };

/* What this rank proposes: an agreement with itself alone leaves it in the slot. */
static void propose(struct onebit_comm *comm, const struct ob_term *terms) {
  comm->size = 1;
  comm->rank = 0;
  FUZZ_CHECK(ob_agree(comm, ONEBIT_OK, terms, TERMS) == ONEBIT_OK);
}

/* data[0]: the rank that this is, and which proposals are mended; data[1]: how. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const struct ob_term terms[TERMS] = {{"count", 4096}, {"dtype", 1}, {"chunk_size", 7}};
  unsigned char own[OB_AGREE_BYTES] = {0}, *slots;
  struct onebit_comm comm = {.control_memory = own};
  if (size < 2)
    return 0;
  propose(&comm, terms);
  slots = fuzz_copy(data + 2, size - 2 < RANKS * OB_AGREE_BYTES ? size - 2 : RANKS * OB_AGREE_BYTES,
                    size - 2 < RANKS * OB_AGREE_BYTES ? RANKS * OB_AGREE_BYTES - (size - 2) : 0);
  comm.size = RANKS;
  comm.rank = data[0] % RANKS;
  comm.control_memory = slots;
  for (int rank = 0; rank < RANKS; rank++) {
    unsigned char *slot = slots + (size_t)rank * OB_AGREE_BYTES;
    size_t right = (size_t)(data[1] & 3) * 8; /* magic and status, count, note */
    if (rank == comm.rank)
      memcpy(slot, own, OB_AGREE_BYTES);
    else if (data[0] >> (4 + rank) & 1)
      memcpy(slot, own, right);
  }
  onebit_status_t status = ob_agree_check(&comm, terms, TERMS);
  FUZZ_CHECK(status != ONEBIT_OK || data[1] >> 7 || ob_agree_note(&comm, comm.rank) == 0);
  FUZZ_CHECK(status <= ONEBIT_OK && (status == ONEBIT_OK || *onebit_last_error()));
  free(slots);
  return 0;
}
