/* Tests codecs: all give equal bits, follow the documented arithmetic, and reproduce recorded
 * results. Also tests the choice of a codec. */
#include <inttypes.h>

#include "compression/codec.h"
#include "compression/levels.h"
#include "tests/codec_cases.h"
#include "tests/golden_cases.h"
#include "tests/oracle.h"
#include "tests/support.h"

/* Tests that all codecs give equal bits in every case of the table, and agree with plain formulas.
 * Also tests the choice of a codec. */

static void compare_with_scalar(const struct ob_codec *codec, size_t index) {
  unsigned char *wanted, *got;
  char name[96];
  size_t size = codec_case_run(index, &ob_codec_scalar, &wanted);
  size_t same = codec_case_run(index, codec, &got);
  codec_case_name(index, name, sizeof name);
  cr_expect(size == same && memcmp(wanted, got, size) == 0, "%s: %s differs from scalar",
            codec->name, name);
  free(wanted);
  free(got);
}

Test(codec, all_give_the_bits_of_scalar) {
  const struct sample sample = codec_cases_sample();
  bool any = false;
  for (size_t row = 0; ob_codec_row(row); row++) {
    const struct ob_codec *codec = ob_codec_row(row);
    if (codec == &ob_codec_scalar)
      continue;
    if (!ob_codec_usable(codec)) {
      printf("codec %s: not usable on this processor, not tested\n", codec->name);
      continue;
    }
    any = true;
    for (size_t i = 0; i < sample.count; i++)
      compare_with_scalar(codec, sample.rows[i]);
  }
  free(sample.rows);
  if (!any)
    cr_skip_test("no codec but scalar is usable on this processor");
}

/* Compares compression with its definition: c = e + x, the new e is c - s * sign(c), each lane has
 * a sum of its own, and a negative c has bit 1. */
Test(codec, compresses_as_defined) {
  enum { count = 40 };
  float input[count], kept[64] = {0}, next[64], lanes[OB_LANES] = {0};
  uint32_t bits[2];
  for (int i = 0; i < count; i++) {
    input[i] = (float)(i * 7 % 11 - 5) / 8;
    kept[i] = (float)(i * 5 % 13 - 6) / 16;
  }
  for (size_t row = 0; ob_codec_row(row); row++) {
    if (!ob_codec_usable(ob_codec_row(row)))
      continue;
    struct ob_compress_run run = {.count = count,
                                  .valid = count,
                                  .input = input,
                                  .weight = 1,
                                  .scaling = 1,
                                  .residual = kept,
                                  .residual_scale = 0.25f,
                                  .residual_out = next,
                                  .bits = bits};
    float sum = ob_codec_row(row)->compress(&run);
    memset(lanes, 0, sizeof lanes);
    for (int i = 0; i < count; i++) {
      float error = kept[i] - (signbit(kept[i]) ? -0.25f : 0.25f), c = error + input[i];
      cr_expect(next[i] == c, "element %d: %g, not %g", i, (double)next[i], (double)c);
      cr_expect((bits[i / 32] >> i % 32 & 1) == (unsigned)!!signbit(c), "bit %d", i);
      lanes[i % OB_LANES] += c * c;
    }
    cr_expect_float_eq(sum, ob_sum_lanes(lanes), 0);
    for (int i = count; i < 64; i++)
      cr_expect(next[i] == 0, "lane %d past the end is %g", i, (double)next[i]);
    cr_expect(bits[1] >> (count - 32) == 0, "bits past the end are %x", bits[1]);
  }
}

/* Missing sums count as zeros, and further sums go to the lanes in their order. The values differ
 * so much in size that any other order of additions gives other bits. */
Test(codec, adds_sums_as_defined) {
  static const size_t counts[] = {0, 1, 2, 3, 5, 512, 1023, 1024, 1025, 1536, 2047, 5000};
  static double sums[5000];
  for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
    struct oracle_sum wanted = {0};
    double in_order = 0;
    for (size_t k = 0; k < counts[i]; k++) {
      const float sum = ldexpf(1 + (float)(k * 37 % 1009) / 1009, (int)(k * 53 % 61) - 30);
      sums[k] = (double)sum;
      oracle_add(&wanted, sum);
      in_order += sums[k];
    }
    const double sum = ob_add_sums(sums, counts[i]);
    cr_expect_eq(sum, oracle_total(&wanted), "%zu sums", counts[i]);
    cr_expect_float_eq(sum, in_order, 1e-12 * in_order, "%zu sums", counts[i]);
  }
}

/* Converts every value of 16 bits to float32 and back. */
Test(codec, half_types_round_trip) {
  for (uint32_t i = 0; i <= 0xffff; i++) {
    uint16_t value = (uint16_t)i;
    float wide = ob_from_bfloat16(value);
    cr_expect(isnan(wide) || ob_to_bfloat16(wide) == value, "bfloat16 %04x", i);
    wide = ob_from_float16(value);
    cr_expect(isnan(wide) || ob_to_float16(wide) == value, "float16 %04x", i);
  }
  cr_expect(isnan(ob_from_float16(0x7e00)) && isnan(ob_from_bfloat16(ob_to_bfloat16(NAN))));
}

/* A value halfway between two neighbours is rounded to the even one. A value that is too large
 * becomes infinite. */
Test(codec, half_types_round_to_even) {
  static const struct {
    float value;
    uint16_t bfloat16, float16;
  } cases[] = {{1.0f, 0x3f80, 0x3c00},
               {1.0f + 0x1p-8f, 0x3f80, 0x3c04},
               {1.0f + 0x1.8p-7f, 0x3f82, 0x3c0c},
               {1.0f + 0x1p-11f, 0x3f80, 0x3c00},
               {1.0f + 0x1.8p-10f, 0x3f80, 0x3c02},
               {65519.0f, 0x4780, 0x7bff},
               {65520.0f, 0x4780, 0x7c00},
               {-0x1p-24f, 0xb380, 0x8001},
               {0x1p-25f, 0x3300, 0x0000},
               {0x1.8p-24f, 0x33c0, 0x0002},
               {-0.0f, 0x8000, 0x8000},
               {3.4e38f, 0x7f80, 0x7c00}};
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    cr_expect_eq(ob_to_bfloat16(cases[i].value), cases[i].bfloat16, "%a gives %04x",
                 (double)cases[i].value, ob_to_bfloat16(cases[i].value));
    cr_expect_eq(ob_to_float16(cases[i].value), cases[i].float16, "%a gives %04x",
                 (double)cases[i].value, ob_to_float16(cases[i].value));
  }
}

Test(codec, is_chosen_by_name_and_unknown_names_are_errors) {
  const struct ob_codec *codec = NULL;
  cr_expect_eq(ob_codec_find("scalar", &codec), ONEBIT_OK);
  cr_expect_eq(codec, &ob_codec_scalar);
  cr_expect_eq(ob_codec_find("mmx", &codec), ONEBIT_ERROR_ARGUMENT);
  cr_expect(strstr(onebit_last_error(), "mmx") && strstr(onebit_last_error(), "scalar"), "%s",
            onebit_last_error());
  setenv("ONEBIT_CODEC", "scalar", 1);
  cr_expect_eq(ob_codec_choose(&codec), ONEBIT_OK);
  cr_expect_eq(codec, &ob_codec_scalar);
  setenv("ONEBIT_CODEC", "", 1);
  cr_expect_eq(ob_codec_choose(&codec), ONEBIT_OK, "an empty variable is none");
}

/* Integers that double represents exactly have the same sum in any order. */
Test(codec, sums_of_blocks_leave_none_out) {
  static const size_t counts[] = {0, 1, 2, 3, 31, 1023, 1024, 1025, 2047, 2048, 3001};
  static double sums[3001];
  for (size_t i = 0; i < 3001; i++)
    sums[i] = (double)(i + 1);
  for (size_t k = 0; k < sizeof counts / sizeof counts[0]; k++) {
    const double n = (double)counts[k], got = ob_add_sums(sums, counts[k]);
    cr_expect_eq(got, n * (n + 1) / 2, "of %zu: %g", counts[k], got);
  }
}

Test(codec, scales_of_levels_can_be_inverted) {
  static const float largest[] = {0, 0x1p-149f, 0x1p-130f, 0x1p-120f};
  for (size_t k = 0; k < sizeof largest / sizeof largest[0]; k++)
    for (unsigned width = 2; width <= 8; width *= 2) {
      const float scale = ob_level_scale(0, 32, largest[k], ONEBIT_SCALE_LARGEST, width);
      cr_expect(k < 3 ? scale == 0 : scale > 0 && ob_is_finite(1 / scale), "%u bits: %g", width,
                (double)scale);
    }
}

/* Values beyond the largest float16 become the largest float16, also in the last word. */
Test(codec, conversions_to_float16_are_bounded) {
  enum { count = 75 };
  float input[count];
  uint16_t output[count];
  for (int i = 0; i < count; i++)
    input[i] = i % 2 ? 1e6f : -1e6f;
  for (size_t row = 0; ob_codec_row(row); row++) {
    const struct ob_codec *codec = ob_codec_row(row);
    if (!ob_codec_usable(codec))
      continue;
    codec->convert(input, count, output, ONEBIT_FLOAT16);
    for (int i = 0; i < count; i++)
      cr_expect_eq(output[i], i % 2 ? 0x7bff : 0xfbff, "%s: element %d is %04x", codec->name, i,
                   output[i]);
  }
}

/* Messages, residuals and results must be the recorded ones, to the bit, with every codec that this
 * machine can run. */

/* `codec_digest CODEC` prints these lines, with any codec. They were recorded with wire format
 * 3. */
/* clang-format off */
static const struct golden golden_digests[] = {
    {"1 bit, rms, float32", 0xeb827d8469c8f48c, 0xde60ed6c4b596986, 0x80719bca9f01d63d},
    {"1 bit, mean, float32", 0x8f2ecb7fa87f48a9, 0x97c0ce380e23fbe9, 0xb5c749cac282bd98},
    {"2 bits, rms, float32", 0x403b6d7400c9fbd8, 0x6d2a8ca98c791fb1, 0x68fe84b17c9ae2f9},
    {"2 bits, largest, float32", 0x3c8341c25a480f8c, 0xfa028625477acd44, 0x2718226abab4f0b3},
    {"4 bits, rms, float32", 0xb0426b0d67ab43a0, 0x7eb0f00d45ac10b5, 0x5f996717e794c0b0},
    {"4 bits, largest, float32", 0x109f118b6ecedc37, 0xba8795ccbc3ef41f, 0x0d2390c66386ed93},
    {"8 bits, rms, float32", 0x45570d418486d92f, 0x11a487878e8a12e0, 0x3fa1994c6ba09cd1},
    {"8 bits, largest, float32", 0x45570d418486d92f, 0x11a487878e8a12e0, 0x3fa1994c6ba09cd1},
    {"1 bit, rms, bfloat16", 0x491bf4391d5e5158, 0x3fa68a8fa6440df4, 0x36948d8e9cd47613},
    {"1 bit, mean, bfloat16", 0x2cf5a139a34e796e, 0x5edb634e51f7a66c, 0xddf7ea8d76d70057},
    {"2 bits, rms, bfloat16", 0x9a55436a50e18067, 0x8debd783f71079dc, 0xbeaf81b190056714},
    {"2 bits, largest, bfloat16", 0xc0def66dec68dfe5, 0xcbd13142bcfe44a6, 0xd8354cc50a65b74c},
    {"4 bits, rms, bfloat16", 0xcdb9ae224483c1b3, 0x63eed6a7c2715b33, 0x7e98a3e820b728b1},
    {"4 bits, largest, bfloat16", 0x7f573432947de0f2, 0x402232486509290d, 0xf69b8358cb4f675d},
    {"8 bits, rms, bfloat16", 0x46166ffde7b14fde, 0x9de1ba1db4f6a609, 0x2909c11d0ad21a32},
    {"8 bits, largest, bfloat16", 0x46166ffde7b14fde, 0x9de1ba1db4f6a609, 0x2909c11d0ad21a32},
    {"1 bit, rms, float16", 0xdd9bc46bfd572b0c, 0x1affb282b6a67e30, 0x7d15ae507cf970d1},
    {"1 bit, mean, float16", 0x4381a70193c90e30, 0x13a15194b5a7fefd, 0x4ccac6040ad99532},
    {"2 bits, rms, float16", 0x264dbd100919db08, 0xb4ad6f35a123f2b1, 0xbf79c7ee379e7ca9},
    {"2 bits, largest, float16", 0xb37a0b8c3afed01f, 0xea4388aceef999b2, 0x5113141823680199},
    {"4 bits, rms, float16", 0x475c36168f6f3d0b, 0xcddd2e805d8e826c, 0xd141c4c1264a5d2d},
    {"4 bits, largest, float16", 0x1bbad32c38ee9ad8, 0xa7154db49427d0ac, 0xfc54178b2fc59466},
    {"8 bits, rms, float16", 0x2272c64ac16e3c40, 0xd77096154ca75d22, 0x1367d4dbc583f4a4},
    {"8 bits, largest, float16", 0x2272c64ac16e3c40, 0xd77096154ca75d22, 0x1367d4dbc583f4a4},
};
/* clang-format on */

static void expect_recorded(const char *codec, const struct golden *wanted,
                            const struct golden *made, const char *what, uint64_t want,
                            uint64_t have) {
  cr_expect_str_eq(made->name, wanted->name, "%s", codec);
  cr_expect_eq(have, want, "%s: %s, %s: %016" PRIx64 ", recorded is %016" PRIx64, codec,
               wanted->name, what, have, want);
}

Test(golden, every_width_rule_and_type_is_as_recorded) {
  cr_assert_eq(golden_count(), sizeof golden_digests / sizeof golden_digests[0]);
  for (size_t row = 0; ob_codec_row(row); row++) {
    const struct ob_codec *codec = ob_codec_row(row);
    if (!ob_codec_usable(codec)) {
      printf("codec %s: not usable on this processor, not tested\n", codec->name);
      continue;
    }
    for (size_t i = 0; i < golden_count(); i++) {
      const struct golden *wanted = &golden_digests[i], made = golden_run(i, codec);
      cr_assert_not_null(made.name, "no memory");
      expect_recorded(codec->name, wanted, &made, "messages", wanted->messages, made.messages);
      expect_recorded(codec->name, wanted, &made, "residuals", wanted->residuals, made.residuals);
      expect_recorded(codec->name, wanted, &made, "results", wanted->results, made.results);
    }
  }
}

/* Checks that different cases have different hashes. With equal hashes, a codec that confused two
 * cases would pass. With 8 bits neither scale rule clips values, so their hashes may be equal. */
Test(golden, rows_differ) {
  for (size_t i = 0; i < golden_count(); i++)
    for (size_t k = 0; k < i; k++) {
      const struct golden *a = &golden_digests[i], *b = &golden_digests[k];
      cr_expect(a->messages != b->messages || (*a->name == '8' && i - k == 1), "%s and %s", a->name,
                b->name);
    }
}
