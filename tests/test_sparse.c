/* Tests sparse messages. They must equal the formulas in every bit on every build. Also tests which
 * messages are refused, and that error feedback sends later what was not sent. */
#include "base/hash.h"
#include "compression/sparse.h"
#include "tests/support.h"

static const size_t counts[] = {0, 1, 2, 63, 64, 65, 4095, 4096, 4097, 8192 + 63, 100003};
enum { COUNTS = sizeof counts / sizeof counts[0] };

struct sent {
  float *values; /* before: values to send; after: values that were not sent */
  float *input;
  float *decoded;
  uint32_t *message;
  size_t count, bytes;
};

static struct sent sent_create(size_t count, int step) {
  struct sent sent = {.count = count, .bytes = ob_sparse_bytes(count)};
  sent.values = malloc(count * sizeof(float) + 1);
  sent.input = malloc(count * sizeof(float) + 1);
  sent.decoded = calloc(count + 1, sizeof(float));
  sent.message = malloc(sent.bytes + 1);
  fill_input(sent.values, ONEBIT_FLOAT32, count, 0, step);
  memcpy(sent.input, sent.values, count * sizeof(float));
  return sent;
}

static void sent_destroy(struct sent *sent) {
  free(sent->values);
  free(sent->input);
  free(sent->decoded);
  free(sent->message);
}

/* --- The oracle: encodes a chunk as sparse.h describes it, one bit at a time */

static const float *sorted_values;

static int compare_magnitudes(const void *a, const void *b) {
  const size_t i = *(const size_t *)a, j = *(const size_t *)b;
  const float x = fabsf(sorted_values[i]), y = fabsf(sorted_values[j]);
  return x != y ? (x < y) - (x > y) : (i > j) - (i < j);
}

static int compare_places(const void *a, const void *b) {
  const size_t i = *(const size_t *)a, j = *(const size_t *)b;
  return (i > j) - (i < j);
}

static float round_to_bfloat16(double value) {
  int exponent;
  const double mantissa = frexp((double)(float)value, &exponent); /* 8 bits of the mantissa are
                                                                   * kept */
  return value == 0 ? 0 : (float)ldexp(nearbyint(ldexp(mantissa, 8)), exponent - 8);
}

static void set_bit(uint32_t *words, size_t bit) { words[bit / 32] |= 1u << bit % 32; }

static void oracle_chunk(const float *values, size_t count, uint32_t *words, float *decoded) {
  static size_t order[OB_SPARSE_CHUNK];
  const size_t kept = count < 64 ? count : 64;
  double mean = 0, sums[2] = {0, 0}, of[2] = {0, 0};
  for (size_t i = 0; i < count; i++)
    order[i] = i;
  sorted_values = values;
  qsort(order, count, sizeof *order, compare_magnitudes);
  qsort(order, kept, sizeof *order, compare_places);
  for (size_t i = 0; i < kept; i++)
    mean += fabs((double)values[order[i]]);
  mean /= (double)kept;
  for (size_t i = 0; i < kept; i++) {
    const double magnitude = fabs((double)values[order[i]]);
    sums[magnitude >= mean] += magnitude, of[magnitude >= mean]++;
  }
  memset(words, 0, 84);
  for (int upper = 0; upper < 2; upper++) {
    const float level = of[upper] > 0 ? round_to_bfloat16(sums[upper] / of[upper]) : 0;
    uint32_t bits;
    memcpy(&bits, &level, sizeof bits);
    words[0] |= (bits >> 16) << 16 * upper;
    sums[upper] = level;
  }
  for (size_t i = 0; i < kept; i++) {
    const size_t at = order[i];
    const bool upper = fabs((double)values[at]) >= mean, negative = signbit(values[at]);
    set_bit(words + 1, i + at / 64);
    for (size_t bit = 0; bit < 6; bit++)
      if (at >> bit & 1)
        set_bit(words + 5, 6 * i + bit);
    if (negative)
      set_bit(words + 17, 2 * i);
    if (upper)
      set_bit(words + 17, 2 * i + 1);
    decoded[at] = (float)(negative ? -sums[upper] : sums[upper]);
  }
}

static void expect_as_oracle(struct sent *sent) {
  const size_t chunks = ob_sparse_chunks(sent->count);
  uint32_t words[OB_SPARSE_STRIDE];
  float *wanted = calloc(sent->count + 1, sizeof(float));
  for (size_t chunk = 0; chunk < chunks; chunk++) {
    const size_t first = chunk * OB_SPARSE_CHUNK, rest = sent->count - first;
    oracle_chunk(sent->input + first, rest < OB_SPARSE_CHUNK ? rest : OB_SPARSE_CHUNK, words,
                 wanted + first);
    cr_expect_eq(memcmp(words, sent->message + chunk * OB_SPARSE_STRIDE, 84), 0, "chunk %zu of %zu",
                 chunk, sent->count);
  }
  for (size_t i = 0; i < sent->count; i++) {
    cr_expect_eq(sent->decoded[i], wanted[i], "element %zu of %zu", i, sent->count);
    cr_expect_eq(sent->values[i], sent->input[i] - wanted[i], "residual %zu of %zu", i,
                 sent->count);
  }
  free(wanted);
}

static void send_sparse(struct sent *sent) {
  cr_expect(ob_sparse_compress(sent->values, sent->count, sent->message));
  cr_expect_eq(ob_sparse_check(sent->message, sent->bytes, sent->count), ONEBIT_OK, "%s",
               onebit_last_error());
  ob_sparse_add(sent->message, sent->count, 1, sent->decoded);
}

Test(sparse, is_what_the_format_says) {
  for (size_t k = 0; k < COUNTS; k++) {
    struct sent sent = sent_create(counts[k], (int)k);
    send_sparse(&sent);
    expect_as_oracle(&sent);
    sent_destroy(&sent);
  }
}

/* Chunks have only zeros, one magnitude, or few magnitudes. Of elements with equal magnitudes, the
 * first ones must be sent. */
Test(sparse, ties_go_to_the_first) {
  for (int magnitudes = 0; magnitudes < 4; magnitudes++) {
    struct sent sent = sent_create(2 * 4096 + 100, 0);
    for (size_t i = 0; i < sent.count; i++)
      sent.input[i] = sent.values[i] =
          magnitudes == 0 ? 0 : (float)(i * 7919 % (size_t)magnitudes + 1) * (i % 3 ? 0.5f : -0.5f);
    send_sparse(&sent);
    expect_as_oracle(&sent);
    sent_destroy(&sent);
  }
}

/* The expected bits are constants, so a build that gives other bits fails this test. */
Test(sparse, has_the_same_bits_on_every_build) {
  struct sent sent = sent_create(100003, 5);
  send_sparse(&sent);
  uint64_t digest = ob_hash(OB_HASH_START, sent.message, sent.bytes);
  digest = ob_hash(digest, sent.values, sent.count * sizeof(float));
  cr_expect_eq(sent.bytes, 25 * 84);
  cr_expect_eq(digest, UINT64_C(0xc9e48c9561ae0b33), "%016llx", (unsigned long long)digest);
  sent_destroy(&sent);
}

Test(sparse, adds_with_a_weight) {
  struct sent sent = sent_create(5000, 1);
  send_sparse(&sent);
  float *sums = malloc(sent.count * sizeof(float));
  for (size_t i = 0; i < sent.count; i++)
    sums[i] = (float)i;
  ob_sparse_add(sent.message, sent.count, 0.25f, sums);
  for (size_t i = 0; i < sent.count; i++)
    cr_expect_eq(sums[i], (float)i + 0.25f * sent.decoded[i]);
  free(sums);
  sent_destroy(&sent);
}

/* Sends a constant input. After many rounds, the sum of all sent values is the sum of the input,
 * except for the residual. */
Test(sparse, residual_has_all_that_was_not_sent) {
  enum { count = 4096, rounds = 400 };
  static float residual[count], input[count], total[count];
  uint32_t message[OB_SPARSE_STRIDE];
  fill_input(input, ONEBIT_FLOAT32, count, 0, 3);
  double worst = 0, largest = 0;
  for (int round = 0; round < rounds; round++) {
    for (size_t i = 0; i < count; i++)
      residual[i] += input[i];
    cr_assert(ob_sparse_compress(residual, count, message));
    ob_sparse_add(message, count, 1, total);
  }
  for (size_t i = 0; i < count; i++) {
    worst = fmax(worst, fabs(total[i] + residual[i] - (double)rounds * input[i]));
    largest = fmax(largest, fabs((double)input[i]));
  }
  cr_expect_lt(worst, 1e-3 * rounds * largest, "%g of %g", worst, largest);
}

Test(sparse, is_not_sent_when_not_finite) {
  static const float wrong[] = {NAN, INFINITY, -INFINITY, 3.4e38f};
  for (size_t k = 0; k < sizeof wrong / sizeof wrong[0]; k++) {
    struct sent sent = sent_create(5000, 0);
    sent.values[4099] = wrong[k];
    cr_expect(!ob_sparse_compress(sent.values, sent.count, sent.message), "%g", (double)wrong[k]);
    sent_destroy(&sent);
  }
  struct sent largest = sent_create(100, 0);
  for (size_t i = 0; i < largest.count; i++)
    largest.values[i] = largest.input[i] = i % 2 ? 3.389e38f : -3.389e38f;
  send_sparse(&largest);
  expect_as_oracle(&largest);
  sent_destroy(&largest);
}

/* --- Arbitrary messages */

static void check_refused(const struct sent *sent, size_t bytes, const char *part) {
  cr_expect_eq(ob_sparse_check(sent->message, bytes, sent->count), ONEBIT_ERROR_MESSAGE, "%s",
               part);
  cr_expect(strstr(onebit_last_error(), part), "'%s' does not speak of %s", onebit_last_error(),
            part);
}

Test(sparse, refuses_what_is_not_a_message) {
  struct sent sent = sent_create(4096 + 100, 0);
  send_sparse(&sent);
  uint32_t *chunk = sent.message + OB_SPARSE_STRIDE, first = chunk[0];
  check_refused(&sent, sent.bytes - 4, "164 bytes, expected 168");
  check_refused(&sent, 0, "0 bytes");
  for (uint32_t half = 0; half < 32; half += 16) {
    chunk[0] = 0x7f80u << half;
    check_refused(&sent, sent.bytes, "a level that is not finite, or negative in chunk 1");
    chunk[0] = 0x8000u << half;
    check_refused(&sent, sent.bytes, "a level that is not finite, or negative in chunk 1");
  }
  chunk[0] = first;
  uint32_t high = chunk[1];
  chunk[1] &= chunk[1] - 1;
  check_refused(&sent, sent.bytes, "too few or too many positions in chunk 1");
  chunk[1] = high;
  chunk[4] |= 1u << 31; /* high part 127 - 64: beyond the chunk's 100 elements */
  chunk[1] &= chunk[1] - 1;
  check_refused(&sent, sent.bytes, "out of range in chunk 1");
  sent_destroy(&sent);
}

/* Flips every bit, and afterwards sends random words. Decoding a message that is not refused must
 * not write outside its elements. */
Test(sparse, decodes_within_its_elements) {
  static const size_t lengths[] = {1, 63, 100, 4095, 4096};
  for (size_t k = 0; k < sizeof lengths / sizeof lengths[0]; k++) {
    struct sent sent = sent_create(lengths[k], 2);
    struct guarded sums = guarded_create(lengths[k] * sizeof(float), GUARD_ABOVE);
    size_t passed = 0;
    send_sparse(&sent);
    for (size_t trial = 0; trial < 21 * 32 + 2000; trial++) {
      uint32_t message[OB_SPARSE_STRIDE];
      memcpy(message, sent.message, sizeof message);
      if (trial < 21 * 32)
        message[trial / 32] ^= 1u << trial % 32;
      else
        for (size_t flips = trial % 7; flips < 8; flips++) {
          const float place = uniform_value(trial * 8 + flips);
          message[(size_t)((place + 1) * 10.4f)] ^= (uint32_t)((place + 1) * 0x1p30f);
        }
      if (ob_sparse_check(message, sizeof message, sent.count) != ONEBIT_OK)
        continue;
      ob_sparse_add(message, sent.count, 1, sums.data);
      passed++;
    }
    cr_expect_gt(passed, 0);
    guarded_destroy(&sums);
    sent_destroy(&sent);
  }
}
