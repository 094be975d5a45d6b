/* Arithmetic on the element types: of every value of 16 bits, as exact arithmetic rounds it. */
#include "dropin/elements.h"
#include "tests/support.h"

enum { ALL = 0x10000 };

/* The value of the bits: exponent bits, then fraction bits. */
static double value_of(uint16_t bits, onebit_dtype_t dtype) {
  const int width = dtype == ONEBIT_BFLOAT16 ? 7 : 10, most = (1 << (15 - width)) - 1;
  const int exponent = bits >> width & most, fraction = bits & ((1 << width) - 1);
  double value =
      ldexp(fraction + (exponent ? 1 << width : 0), (exponent ? exponent : 1) - most / 2 - width);
  if (exponent == most)
    value = fraction ? NAN : INFINITY;
  return bits & 0x8000 ? -value : value;
}

/* To the nearest, ties to even, in the type's grid at that magnitude. */
static double rounded(double value, onebit_dtype_t dtype) {
  const int width = dtype == ONEBIT_BFLOAT16 ? 7 : 10, most = (1 << (15 - width)) - 1;
  int exponent;
  if (!isfinite(value) || value == 0)
    return value;
  frexp(value, &exponent);
  if (exponent < 2 - most / 2)
    exponent = 2 - most / 2;
  double unit = ldexp(1, exponent - 1 - width), largest = ldexp(1, most / 2 + 1);
  double result = rint(value / unit) * unit;
  return fabs(result) >= largest ? copysign(INFINITY, value) : result;
}

static void check(const uint16_t *got, onebit_dtype_t dtype, const double *wanted,
                  const char *what) {
  for (int i = 0; i < ALL; i++) {
    double mine = value_of(got[i], dtype), right = rounded(wanted[i], dtype);
    bool equal = isnan(right) ? isnan(mine) : mine == right && !signbit(mine) == !signbit(right);
    cr_assert(equal, "%s %s of %04x: %g, not %g", dtype_name(dtype), what, i, mine, right);
  }
}

static void fill(uint16_t *bits) {
  for (int i = 0; i < ALL; i++)
    bits[i] = (uint16_t)i;
}

static void check_type(onebit_dtype_t dtype) {
  static const float factors[] = {1, 3, 4, 1000, 0.1f, 0.0078125f};
  static uint16_t bits[ALL], got[ALL], other[ALL];
  static double wanted[ALL];
  cr_assert_eq(ob_elements_size(dtype), 2);
  for (size_t k = 0; k < sizeof factors / sizeof factors[0]; k++) {
    fill(bits);
    ob_elements_multiply(dtype, got, bits, ALL, factors[k]);
    for (int i = 0; i < ALL; i++)
      wanted[i] = (double)((float)value_of(bits[i], dtype) * factors[k]);
    check(got, dtype, wanted, "product");
    ob_elements_divide(dtype, bits, ALL, factors[k]);
    for (int i = 0; i < ALL; i++)
      wanted[i] = (double)((float)value_of((uint16_t)i, dtype) / factors[k]);
    check(bits, dtype, wanted, "quotient");
  }
  fill(bits);
  for (int i = 0; i < ALL; i++) {
    other[i] = (uint16_t)((unsigned)i * 40503u >> 3);
    wanted[i] = (double)((float)value_of(bits[i], dtype) + (float)value_of(other[i], dtype));
  }
  ob_elements_add(dtype, bits, other, ALL);
  check(bits, dtype, wanted, "sum");
}

Test(elements, of_sixteen_bits_are_rounded_to_the_nearest) {
  check_type(ONEBIT_BFLOAT16);
  check_type(ONEBIT_FLOAT16);
}

Test(elements, of_float_are_float) {
  float a[] = {1, -2, 0.1f, 3e38f}, b[] = {2, 5, 0.2f, 3e38f}, product[4];
  ob_elements_multiply(ONEBIT_FLOAT32, product, a, 4, 3);
  for (int i = 0; i < 4; i++)
    cr_expect_eq(product[i], a[i] * 3);
  ob_elements_add(ONEBIT_FLOAT32, b, a, 4);
  cr_expect(b[0] == 3 && b[1] == 3 && b[2] == 0.1f + 0.2f && isinf(b[3]));
  ob_elements_divide(ONEBIT_FLOAT32, a, 4, 3);
  cr_expect(a[0] == 1.0f / 3 && a[1] == -2.0f / 3 && a[2] == 0.1f / 3 && a[3] == 3e38f / 3);
  const float sides[] = {3, -4, 0, 12};
  cr_expect_eq(ob_elements_norm(sides, 4), 13);
  cr_expect_eq(ob_elements_norm(sides, 0), 0);
}

Test(elements, doubles_travel_as_floats_where_those_hold_them) {
  const double good[] = {1.5, -0.25, 0, 1e-300}, bad[][2] = {{1, 1e300}, {NAN, 1}, {1, INFINITY}};
  float narrow[4];
  double wide[4];
  cr_assert(ob_elements_narrow(narrow, good, 4));
  ob_elements_widen(wide, narrow, 4, 3);
  cr_expect(wide[0] == 4.5 && wide[1] == -0.75 && wide[2] == 0 && wide[3] == 0);
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
    cr_expect(!ob_elements_narrow(narrow, bad[i], 2), "%zu", i);
  cr_expect(!ob_elements_narrow(narrow, good + 3, 1)); /* nothing but what floats lose */
  cr_expect(ob_elements_narrow(narrow, good + 2, 1) && ob_elements_narrow(narrow, good, 0));
  cr_expect_eq(ob_elements_size(OB_DOUBLE), sizeof(double));
  ob_elements_read(OB_DOUBLE, narrow, good, 2);
  cr_expect(narrow[0] == 1.5F && narrow[1] == -0.25F);
  ob_elements_divide(OB_DOUBLE, wide, 2, 2);
  cr_expect(wide[0] == 2.25 && wide[1] == -0.375);
}
