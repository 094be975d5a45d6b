/*
 * The checksum of a payload: the part of codec_template.h that computes it, in the compiler's own
 * vectors. A lane is a chain of multiplications, with which those of the other lanes overlap.
 */
#include <string.h>

#define CHECK_VL (VL < 4 ? 4 : VL)
#define CHECKS   (OB_CHECK_LANES / CHECK_VL)

typedef uint32_t check_vector __attribute__((vector_size(CHECK_VL * sizeof(uint32_t))));

FIXED void check_begin(check_vector lanes[CHECKS], uint32_t first) {
  for (uint32_t k = 0; k < CHECKS; k++) {
    check_vector lane = {0};
    for (uint32_t i = 0; i < CHECK_VL; i++)
      lane[i] = ob_check_begin(first + k * CHECK_VL + i);
    lanes[k] = lane;
  }
}

FIXED void check_round(check_vector lanes[CHECKS], const unsigned char *words) {
  for (size_t k = 0; k < CHECKS; k++) {
    check_vector word;
    memcpy(&word, words + k * sizeof word, sizeof word);
    lanes[k] = (lanes[k] ^ word) * OB_CHECK_WORD;
    lanes[k] ^= lanes[k] >> 15;
  }
}

FIXED void check_end(check_vector *sum, const check_vector lanes[CHECKS]) {
  for (size_t k = 0; k < CHECKS; k++) {
    check_vector lane = (lanes[k] ^ lanes[k] >> 16) * OB_CHECK_WORD;
    lane = (lane ^ lane >> 13) * OB_CHECK_WORD2;
    *sum += lane ^ lane >> 16;
  }
}

/* Adds one run, or less: missing words of its last round are zeros. */
FIXED void check_run(check_vector *sum, const unsigned char *words, size_t first, size_t count) {
  const size_t whole = count / OB_CHECK_LANES * OB_CHECK_LANES;
  check_vector lanes[CHECKS];
  check_begin(lanes, (uint32_t)(first / (OB_CHECK_RUN / OB_CHECK_LANES)));
  for (size_t i = 0; i < whole; i += OB_CHECK_LANES)
    check_round(lanes, words + i * sizeof(uint32_t));
  if (whole < count) {
    unsigned char last[OB_CHECK_LANES * sizeof(uint32_t)] = {0};
    memcpy(last, words + whole * sizeof(uint32_t), (count - whole) * sizeof(uint32_t));
    check_round(lanes, last);
  }
  check_end(sum, lanes);
}

static uint32_t checksum(const void *payload, size_t count) {
  const unsigned char *words = payload;
  check_vector sum = {0};
  uint32_t total = 0;
  for (size_t i = 0; i < count; i += OB_CHECK_RUN)
    check_run(&sum, words + i * sizeof(uint32_t), i, smaller(count - i, OB_CHECK_RUN));
  for (size_t k = 0; k < CHECK_VL; k++)
    total += sum[k];
  return total;
}
