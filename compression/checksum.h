/*
 * The checksum of a message: docs/wire-format.md says what it is, and what it detects.
 *
 * 64 lanes, so that vectors and warps compute it as they load: a run of the payload is 16 words a
 * lane, and the checksum is the sum over all lanes of all runs, in any order. Every step is a
 * bijection of the word and of what the lane has so far, so a change within one word always shows.
 */
#ifndef OB_COMPRESSION_CHECKSUM_H
#define OB_COMPRESSION_CHECKSUM_H

#include "compression/numerics.h"

/* Lanes, which are the words of one round; and words of one run. */
#define OB_CHECK_LANES 64
#define OB_CHECK_RUN   (16 * OB_CHECK_LANES)

#define OB_CHECK_SEED  0x9e3779b9u
#define OB_CHECK_WORD  0x85ebca6bu
#define OB_CHECK_WORD2 0xc2b2ae35u

/* Begins a lane: lane l of run r has the number 64 r + l. */
OB_INLINE uint32_t ob_check_begin(uint32_t number) { return (number + 1) * OB_CHECK_SEED; }

OB_INLINE uint32_t ob_check_word(uint32_t lane, uint32_t word) {
  lane = (lane ^ word) * OB_CHECK_WORD;
  return lane ^ lane >> 15;
}

/* The lane's contribution to the checksum: the last step of MurmurHash3. */
OB_INLINE uint32_t ob_check_end(uint32_t lane) {
  lane = (lane ^ lane >> 16) * OB_CHECK_WORD;
  lane = (lane ^ lane >> 13) * OB_CHECK_WORD2;
  return lane ^ lane >> 16;
}

#endif
