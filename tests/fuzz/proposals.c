/* Fuzzes the proposals that ranks compare in an agreement (collectives/communicator.h). The input
 * gives the proposals of all ranks except this one. The comparison must stay within the proposals'
 * slots. */
#include "base/error.h"
#include "base/hash.h"
#include "collectives/communicator.h"
#include "tests/fuzz/fuzz.h"

enum { RANKS = 4, TERMS = 3 };

/* Makes this rank's proposal: an agreement of a single rank writes the proposal to its slot. */
static void make_proposal(struct onebit_comm *comm, const struct ob_term *terms) {
  comm->size = 1;
  comm->rank = 0;
  FUZZ_CHECK(ob_agree(comm, ONEBIT_OK, terms, TERMS) == ONEBIT_OK);
}

/* The offsets of a proposal's checksum, and of the bytes that it covers. */
enum { CHECKSUM = 8, SUMMED = 16 };

static void correct_proposal(unsigned char *slot, const unsigned char *own, int what) {
  memcpy(slot, own, (size_t)(what & 3) * 8); /* copies the first fields: magic and version,
                                              * checksum, agreement number */
  uint64_t sum = ob_hash(OB_HASH_START, slot + SUMMED, OB_AGREE_BYTES - SUMMED);
  if (what & 4)
    memcpy(slot + CHECKSUM, &sum, sizeof sum);
}

/* data[0] chooses this rank and the proposals to correct. data[1] chooses the fields to correct,
 * and whether one proposal is too short. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const struct ob_term terms[TERMS] = {{"count", 4096}, {"dtype", 1}, {"chunk_size", 7}};
  unsigned char own[OB_AGREE_BYTES] = {0}, *slots;
  struct onebit_comm comm = {.control_memory = own};
  struct ob_endpoint in[RANKS];
  struct ob_batch batch = {.receive = in};
  if (size < 2)
    return 0;
  make_proposal(&comm, terms);
  size_t all = RANKS * OB_AGREE_BYTES, given = size - 2 < all ? size - 2 : all;
  slots = fuzz_copy(data + 2, given, all - given);
  comm.size = RANKS;
  comm.rank = data[0] % RANKS;
  comm.control_memory = slots;
  comm.control = &batch;
  for (int rank = 0; rank < RANKS; rank++) {
    unsigned char *slot = slots + (size_t)rank * OB_AGREE_BYTES;
    if (rank == comm.rank)
      memcpy(slot, own, OB_AGREE_BYTES);
    else if (data[0] >> (4 + rank) & 1)
      correct_proposal(slot, own, data[1]);
    if (rank != comm.rank)
      in[batch.receives++] = (struct ob_endpoint){slot, OB_AGREE_BYTES, rank};
  }
  in[0].bytes -= data[1] >> 7;
  onebit_status_t status = ob_agree_check(&comm, terms, TERMS);
  FUZZ_CHECK(status <= ONEBIT_OK && (status == ONEBIT_OK || *onebit_last_error()));
  for (int rank = 0; status == ONEBIT_OK && rank < RANKS; rank++) /* the compared bytes are equal */
    FUZZ_CHECK(memcmp(slots + (size_t)rank * OB_AGREE_BYTES, own, CHECKSUM) == 0);
  free(slots);
  return 0;
}
