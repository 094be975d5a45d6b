/* The codec for sparse messages. It is in plain C in all builds, since it runs only once in many
 * steps. */
#include "compression/sparse.h"

#include "base/error.h"
#include "compression/numerics.h"

enum { WORD_HIGH = 1, WORD_LOW = 5, WORD_VALUE = 17, LOW_BITS = 6 };

/* --- Fields ------------------------------------------------------------------------------------*/

/* Writes a field, which may be split across two words. */
static void put_field(uint32_t *words, unsigned bit, uint32_t field) {
  const uint64_t both = (uint64_t)field << bit % 32;
  words[bit / 32] |= (uint32_t)both;
  if (both >> 32)
    words[bit / 32 + 1] |= (uint32_t)(both >> 32);
}

static uint32_t read_low_bits(const uint32_t *words, unsigned element) {
  const unsigned bit = LOW_BITS * element, word = bit / 32;
  uint64_t both = words[WORD_LOW + word];
  if (bit % 32 > 32 - LOW_BITS)
    both |= (uint64_t)words[WORD_LOW + word + 1] << 32;
  return (uint32_t)(both >> bit % 32) & ((1u << LOW_BITS) - 1);
}

static uint32_t read_value_bits(const uint32_t *words, unsigned element) {
  return words[WORD_VALUE + element / 16] >> 2 * (element % 16) & 3;
}

static float read_level(const uint32_t *words, uint32_t upper) {
  return ob_from_bfloat16((uint16_t)(words[0] >> 16 * upper));
}

/* Reads the positions of a chunk. Returns the number of bits that are set; only the first 64
 * positions are written. */
static unsigned read_positions(const uint32_t *words, uint16_t positions[OB_SPARSE_SENT]) {
  unsigned found = 0;
  for (unsigned word = 0; word < WORD_LOW - WORD_HIGH; word++)
    for (uint32_t bits = words[WORD_HIGH + word]; bits; bits &= bits - 1, found++)
      if (found < OB_SPARSE_SENT) {
        const unsigned high = 32 * word + (unsigned)__builtin_ctz(bits) - found;
        positions[found] = (uint16_t)(high << LOW_BITS | read_low_bits(words, found));
      }
  return found;
}

/* --- Compressing -------------------------------------------------------------------------------*/

static unsigned sent_count(size_t count) {
  return count < OB_SPARSE_SENT ? (unsigned)count : OB_SPARSE_SENT;
}

/* Counts the magnitudes that are at least the threshold. It always counts a whole chunk, since
 * compilers can vectorise a loop whose length is constant. */
static unsigned count_reaching(const uint32_t magnitudes[OB_SPARSE_CHUNK], uint32_t threshold) {
  unsigned found = 0;
  for (size_t i = 0; i < OB_SPARSE_CHUNK; i++)
    found += magnitudes[i] >= threshold;
  return found;
}

/* Returns a threshold that at least `sent` magnitudes reach. It is the largest such threshold, or
 * one that exactly `sent` magnitudes reach. The threshold is found bit by bit: the magnitudes'
 * bits, read as integers, have the order of the floats. */
static uint32_t find_threshold(const uint32_t *magnitudes, unsigned sent) {
  uint32_t threshold = 0;
  unsigned reach = OB_SPARSE_CHUNK;
  for (uint32_t bit = 1u << 30; bit && reach > sent; bit >>= 1) {
    const unsigned found = count_reaching(magnitudes, threshold | bit);
    if (found >= sent)
      threshold |= bit, reach = found;
  }
  return threshold;
}

/* The bits of a magnitude from which on a level would be rounded to infinity. */
#define TOO_LARGE 0x7f7f8000u

/* Computes the magnitudes of a chunk. After the end of a short chunk they are 0, which only a
 * threshold of 0 includes. Returns false if a magnitude is not finite or too large. */
static bool compute_magnitudes(const float *values, size_t count,
                               uint32_t magnitudes[OB_SPARSE_CHUNK]) {
  uint32_t too_large = 0;
  for (size_t i = 0; i < count; i++) {
    magnitudes[i] = ob_bits_of(values[i]) & ~OB_SIGN_BIT;
    too_large |= magnitudes[i] >= TOO_LARGE;
  }
  memset(magnitudes + count, 0, (OB_SPARSE_CHUNK - count) * sizeof *magnitudes);
  return !too_large;
}

/* Chooses `sent` elements: those whose magnitudes are above the threshold, and then the first ones
 * whose magnitudes equal it. */
static void choose_elements(const uint32_t *magnitudes, size_t count, unsigned sent,
                            uint16_t positions[OB_SPARSE_SENT]) {
  const uint32_t threshold = find_threshold(magnitudes, sent);
  unsigned equal = sent - count_reaching(magnitudes, threshold + 1), found = 0;
  for (size_t i = 0; i < count && found < sent; i++)
    if (magnitudes[i] > threshold || (magnitudes[i] == threshold && equal > 0)) {
      equal -= magnitudes[i] == threshold;
      positions[found++] = (uint16_t)i;
    }
}

/* Returns the mean of the chosen magnitudes that are at least the bound, or if `upper` is false,
 * the mean of those below the bound; 0 if there are none. */
static double compute_mean(const float *values, const uint16_t *positions, unsigned sent,
                           double bound, bool upper) {
  double sum = 0;
  unsigned count = 0;
  for (unsigned i = 0; i < sent; i++) {
    const double magnitude = fabs((double)values[positions[i]]);
    if ((magnitude >= bound) == upper)
      sum += magnitude, count++;
  }
  return count ? sum / count : 0;
}

/* Writes the chosen values, and subtracts the decoded values from `values`. */
static void write_chunk(float *values, const uint16_t *positions, unsigned sent, uint32_t *words) {
  const double mean = compute_mean(values, positions, sent, 0, true);
  for (uint32_t upper = 0; upper < 2; upper++)
    words[0] |=
        (uint32_t)ob_to_bfloat16((float)compute_mean(values, positions, sent, mean, upper != 0))
        << 16 * upper;
  for (unsigned i = 0; i < sent; i++) {
    float *value = &values[positions[i]];
    const uint32_t sign = ob_bits_of(*value) >> 31, upper = fabs((double)*value) >= mean;
    put_field(words + WORD_HIGH, i + (positions[i] >> LOW_BITS), 1);
    put_field(words + WORD_LOW, LOW_BITS * i, positions[i] & ((1u << LOW_BITS) - 1));
    put_field(words + WORD_VALUE, 2 * i, sign | upper << 1);
    *value -= ob_decode(sign, read_level(words, upper));
  }
}

bool ob_sparse_compress(float *values, size_t elements, uint32_t *message) {
  uint32_t magnitudes[OB_SPARSE_CHUNK];
  uint16_t positions[OB_SPARSE_SENT];
  for (size_t first = 0; first < elements; first += OB_SPARSE_CHUNK) {
    const size_t left = elements - first, count = left < OB_SPARSE_CHUNK ? left : OB_SPARSE_CHUNK;
    if (!compute_magnitudes(values + first, count, magnitudes))
      return false;
    choose_elements(magnitudes, count, sent_count(count), positions);
    memset(message, 0, OB_SPARSE_STRIDE * sizeof *message);
    write_chunk(values + first, positions, sent_count(count), message);
    message += OB_SPARSE_STRIDE;
  }
  return true;
}

/* --- Received messages -------------------------------------------------------------------------*/

/* Returns the fault of a chunk of `count` elements as text; NULL: it has none. */
static const char *chunk_error(const uint32_t *words, size_t count) {
  uint16_t positions[OB_SPARSE_SENT];
  if (!(ob_is_finite(read_level(words, 0)) && ob_is_finite(read_level(words, 1)) &&
        !(words[0] & 0x80008000u)))
    return "a level that is not finite, or negative";
  if (read_positions(words, positions) != sent_count(count))
    return "too few or too many positions";
  for (unsigned i = 0; i < sent_count(count); i++)
    if (positions[i] >= count || (i > 0 && positions[i] <= positions[i - 1]))
      return "positions that do not ascend, or are out of range";
  return NULL;
}

onebit_status_t ob_sparse_check(const uint32_t *message, size_t bytes, size_t elements) {
  if (bytes != ob_sparse_bytes(elements))
    return ob_error(ONEBIT_ERROR_MESSAGE, "sparse message has %zu bytes, expected %zu", bytes,
                    ob_sparse_bytes(elements));
  for (size_t first = 0; first < elements; first += OB_SPARSE_CHUNK) {
    const size_t left = elements - first, count = left < OB_SPARSE_CHUNK ? left : OB_SPARSE_CHUNK;
    const char *error = chunk_error(message + first / OB_SPARSE_CHUNK * OB_SPARSE_STRIDE, count);
    if (error)
      return ob_error(ONEBIT_ERROR_MESSAGE, "sparse message has %s in chunk %zu", error,
                      first / OB_SPARSE_CHUNK);
  }
  return ONEBIT_OK;
}

void ob_sparse_add(const uint32_t *message, size_t elements, float weight, float *sums) {
  uint16_t positions[OB_SPARSE_SENT];
  for (size_t first = 0; first < elements; first += OB_SPARSE_CHUNK, message += OB_SPARSE_STRIDE) {
    const size_t left = elements - first;
    const unsigned sent = sent_count(left);
    read_positions(message, positions);
    for (unsigned i = 0; i < sent; i++) {
      const uint32_t field = read_value_bits(message, i);
      sums[first + positions[i]] += weight * ob_decode(field & 1, read_level(message, field >> 1));
    }
  }
}
