/* Codecs: equal bits in every case of the table, correct arithmetic against plain formulas, and the
 * choice of one. */
#include "compression/codec.h"
#include "compression/levels.h"
#include "tests/codec_cases.h"
#include "tests/oracle.h"
#include "tests/support.h"

static void compare(const struct ob_codec *codec, size_t index) {
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
      compare(codec, sample.rows[i]);
  }
  free(sample.rows);
  if (!any)
    cr_skip_test("no codec but scalar is usable on this processor");
}

/* A vector from the definition: c = e + x, e = k - s * sign(k); a sum of lanes; bit 1 for a
 * negative c. */
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

/* Lanes are zeros where there are fewer sums, and in their order where there are more. Of values so
 * far apart any other order gives other bits. */
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

/* Every value of 16 bits to float32 and back. */
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

/* Halfway between two neighbours the even one wins; what is too large becomes infinity. */
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

/* Numbers that double holds have one sum in any order. */
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

/* Values beyond the largest float16 become that, in the last word too. */
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
