/* Tests the drop-ins' rules, and their arithmetic on the element types. */
#include "dropin/elements.h"
#include "dropin/rules.h"
#include "tests/support.h"
#include "tests/support_disk.h"

/* Tests the rules that decide which calls of an unmodified program are compressed. No text of rules
 * may do harm. */

static struct ob_rules parse_rules(const char *text) {
  struct ob_rules rules;
  cr_assert_eq(ob_rules_parse("text", text, strlen(text), &rules), ONEBIT_OK, "%s: %s", text,
               onebit_last_error());
  return rules;
}

static bool is_compressed(const struct ob_rules *rules, onebit_operation_t operation,
                          onebit_dtype_t dtype, size_t count, int ranks) {
  return ob_rules_judge(rules, operation, dtype, count, ranks) == OB_REASON_NONE;
}

static bool is_float_sum_compressed(const struct ob_rules *rules, size_t count) {
  return is_compressed(rules, ONEBIT_ALLREDUCE, ONEBIT_FLOAT32, count, 4);
}

Test(rules, without_any_what_is_said_to_be_gradients_is_compressed) {
  struct ob_rules rules = parse_rules("");
  const size_t count = OB_RULES_MIN_BYTES / 4;
  cr_assert(!ob_rules_can_compress(&rules));
  cr_assert_eq(ob_rules_judge(&rules, ONEBIT_ALLREDUCE, ONEBIT_FLOAT32, count, 4),
               OB_REASON_WATCHED);
  rules.gradients = true;
  cr_assert(ob_rules_can_compress(&rules));
  cr_assert_eq(ob_rules_judge(&rules, ONEBIT_ALLREDUCE, ONEBIT_FLOAT32, count - 1, 4),
               OB_REASON_SMALL);
  cr_assert(is_compressed(&rules, ONEBIT_ALLREDUCE, OB_DOUBLE, count / 2, 4));
  cr_assert_eq(rules.min_bytes, OB_RULES_MIN_BYTES);
  cr_assert_eq(rules.warmup, OB_RULES_WARMUP);
  cr_assert(!is_float_sum_compressed(&rules, OB_RULES_MIN_BYTES / 4 - 1));
  cr_assert(is_float_sum_compressed(&rules, OB_RULES_MIN_BYTES / 4));
  cr_assert(!is_compressed(&rules, ONEBIT_ALLREDUCE, ONEBIT_FLOAT16, OB_RULES_MIN_BYTES / 4, 4));
  cr_assert(!is_compressed(&rules, ONEBIT_ALLGATHER, ONEBIT_FLOAT32, 1 << 30, 4));
  cr_assert(!is_compressed(&rules, ONEBIT_REDUCE_SCATTER, ONEBIT_FLOAT32, 1 << 30, 4));
}

Test(rules, the_first_that_fits_decides) {
  struct ob_rules rules = parse_rules("# gradients\n"
                                      "pass allreduce count=1000000 # the loss's histogram\n"
                                      "\n"
                                      "compress allreduce float bytes>=1M comm-size>=2\r\n"
                                      "pass all;warmup 25;least 1G\n");
  cr_assert_eq(rules.rules, 3);
  cr_assert_eq(rules.warmup, 25);
  cr_assert_eq(rules.min_bytes, (size_t)1 << 30);
  cr_assert(is_float_sum_compressed(&rules, 262144));
  cr_assert(!is_float_sum_compressed(&rules, 262143));
  cr_assert(!is_float_sum_compressed(&rules, 1000000));
  cr_assert(is_float_sum_compressed(&rules, 1000001));
  cr_assert(!is_compressed(&rules, ONEBIT_ALLREDUCE, ONEBIT_BFLOAT16, 1 << 29, 4));
  cr_assert(!is_compressed(&rules, ONEBIT_ALLREDUCE, ONEBIT_FLOAT32, 1 << 28, 1));
}

Test(rules, every_sign_means_itself) {
  static const struct {
    const char *text;
    bool below, at, above; /* for counts below, at and above 1000 */
  } cases[] = {
      {"compress allreduce count=1000; pass all", false, true, false},
      {"compress allreduce count!=1000; pass all", true, false, true},
      {"compress allreduce count<1000; pass all", true, false, false},
      {"compress allreduce count<=1000; pass all", true, true, false},
      {"compress allreduce count>1000; pass all", false, false, true},
      {"compress allreduce count>=1000; pass all", false, true, true},
      {"compress allreduce count>=1000 count<1001; pass all", false, true, false},
      {"compress allreduce count<0; pass all", false, false, false},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    struct ob_rules rules = parse_rules(cases[i].text);
    cr_assert_eq(is_float_sum_compressed(&rules, 999), cases[i].below, "%s", cases[i].text);
    cr_assert_eq(is_float_sum_compressed(&rules, 1000), cases[i].at, "%s", cases[i].text);
    cr_assert_eq(is_float_sum_compressed(&rules, 1001), cases[i].above, "%s", cases[i].text);
  }
}

Test(rules, operations_and_types_are_lists) {
  struct ob_rules rules = parse_rules("compress allgather,reduce-scatter half,bfloat16\npass all");
  cr_assert(ob_rules_can_compress(&rules));
  cr_assert(is_compressed(&rules, ONEBIT_ALLGATHER, ONEBIT_FLOAT16, 1, 2));
  cr_assert(is_compressed(&rules, ONEBIT_REDUCE_SCATTER, ONEBIT_BFLOAT16, 1, 2));
  cr_assert(!is_compressed(&rules, ONEBIT_REDUCE_SCATTER, ONEBIT_FLOAT32, 1, 2));
  cr_assert(!is_compressed(&rules, ONEBIT_ALLREDUCE, ONEBIT_FLOAT16, 1 << 30, 2));
}

Test(rules, bytes_are_what_a_rank_gives) {
  struct ob_rules rules = parse_rules("compress all bytes>=4K");
  cr_assert(!is_compressed(&rules, ONEBIT_ALLGATHER, ONEBIT_FLOAT32, 1023, 4));
  cr_assert(is_compressed(&rules, ONEBIT_ALLGATHER, ONEBIT_FLOAT32, 1024, 4));
  cr_assert(!is_compressed(&rules, ONEBIT_REDUCE_SCATTER, ONEBIT_FLOAT32, 255, 4));
  cr_assert(is_compressed(&rules, ONEBIT_REDUCE_SCATTER, ONEBIT_FLOAT32, 256, 4));
}

/* Calls with fewer elements than the rules' least count are never compressed, so the least count
 * must not exceed the count of any call that the rules compress. */
Test(rules, nothing_below_the_least_count_is_compressed) {
  static const char *const texts[] = {
      "",
      "least 0",
      "least 100",
      "compress all bytes>=4000",
      "compress allreduce half count>=77 bytes<1M;least 1G",
      "compress reduce-scatter bytes>=1M; compress allgather count=5",
      "pass allreduce; compress allreduce count>3"};
  for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
    struct ob_rules rules = parse_rules(texts[i]);
    for (int operation = ONEBIT_ALLREDUCE; operation <= ONEBIT_REDUCE_SCATTER; operation++) {
      size_t least = ob_rules_min_count(&rules, (onebit_operation_t)operation);
      cr_assert_geq(least, 1);
      for (size_t count = 1; count < least && count < 3000; count++)
        for (int dtype = ONEBIT_FLOAT32; dtype <= ONEBIT_FLOAT16; dtype++)
          cr_assert(!is_compressed(&rules, (onebit_operation_t)operation, (onebit_dtype_t)dtype,
                                   count, 2),
                    "%s: %zu", texts[i], count);
    }
  }
  struct ob_rules rules = parse_rules("");
  cr_assert_eq(ob_rules_min_count(&rules, ONEBIT_ALLREDUCE), OB_RULES_MIN_BYTES / 8);
  cr_assert_eq(ob_rules_min_count(&rules, ONEBIT_ALLGATHER), SIZE_MAX);
}

static int bits_of_floats(const struct ob_rules *rules, size_t count) {
  struct ob_bits bits = ob_rules_bits(rules, ONEBIT_ALLREDUCE, ONEBIT_FLOAT32, count, 4);
  return bits.min == bits.max ? bits.min : 10 * bits.min + bits.max;
}

Test(rules, bits_are_the_rule_s_or_the_lines_or_the_variable_s) {
  struct ob_rules rules =
      parse_rules("compress allreduce count=100 bits=2; compress allreduce count=200");
  cr_assert_eq(ob_rules_apply_environment(8, &rules), ONEBIT_OK);
  cr_assert_eq(bits_of_floats(&rules, 100), 2);
  cr_assert_eq(bits_of_floats(&rules, 200), 8);
  cr_assert_eq(bits_of_floats(&rules, 1 << 20), 8);
  rules = parse_rules("bits 4; compress allreduce count=100 bits=1");
  setenv("ONEBIT_BITS", "2", 1);
  cr_assert_eq(ob_rules_apply_environment(8, &rules), ONEBIT_OK);
  cr_assert_eq(bits_of_floats(&rules, 100), 1);
  cr_assert_eq(bits_of_floats(&rules, 1 << 20), 4);
  rules = parse_rules("");
  cr_assert_eq(ob_rules_apply_environment(8, &rules), ONEBIT_OK);
  cr_assert_eq(bits_of_floats(&rules, 1 << 20), 2);
  cr_assert(!ob_rules_have_bit_range(&rules));
  rules =
      parse_rules("compress allreduce count=100 bits=2..4; compress allreduce count=200 bits=auto");
  setenv("ONEBIT_BITS", "4..8", 1);
  cr_assert_eq(ob_rules_apply_environment(8, &rules), ONEBIT_OK);
  cr_assert_eq(bits_of_floats(&rules, 100), 24);
  cr_assert_eq(bits_of_floats(&rules, 200), 18);
  cr_assert_eq(bits_of_floats(&rules, 1 << 20), 48);
  cr_assert(ob_rules_have_bit_range(&rules));
  unsetenv("ONEBIT_BITS");
  setenv("ONEBIT_BUDGET", "1/20", 1);
  rules = parse_rules("");
  cr_assert_eq(ob_rules_apply_environment(8, &rules), ONEBIT_OK);
  cr_assert_eq(rules.budget, 1.0 / 20);
  cr_assert_eq(bits_of_floats(&rules, 100), 18);
  static const char *const bad_budgets[] = {"0", "1/40", "2", "1/", "/20", "1/20x", "nan", "-0.1"};
  for (size_t i = 0; i < sizeof bad_budgets / sizeof bad_budgets[0]; i++) {
    setenv("ONEBIT_BUDGET", bad_budgets[i], 1);
    rules = parse_rules("");
    cr_assert_eq(ob_rules_apply_environment(8, &rules), ONEBIT_ERROR_ARGUMENT, "%s",
                 bad_budgets[i]);
  }
  unsetenv("ONEBIT_BUDGET");
  static const char *const bad[] = {"0",   "3",   "5",     "16",  "eight", "8..1", "1..3",
                                    "1..", "..8", "1..16", "1-8", "autos", "0..8"};
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    setenv("ONEBIT_BITS", bad[i], 1);
    rules = parse_rules("");
    cr_assert_eq(ob_rules_apply_environment(8, &rules), ONEBIT_ERROR_ARGUMENT, "%s", bad[i]);
    cr_assert(strstr(onebit_last_error(), "ONEBIT_BITS="), "%s", onebit_last_error());
  }
}

Test(rules, a_mistake_is_named_with_its_line_and_word) {
  static const struct {
    const char *text, *words;
  } cases[] = {
      {"warmup 20\ncompres allreduce", "f:2: 'compres': a line begins with"},
      {"compress\n", "f:1: 'compress': names no operation"},
      {"pass float", "f:1: 'pass': names no operation"},
      {"\n\n pass allreduce,allgahter", "f:3: 'allreduce,allgahter': expected an operation"},
      {"pass allreduce,", "f:1: 'allreduce,': expected an operation"},
      {"pass all quad", "f:1: 'quad': expected an operation, a type"},
      {"pass all bites>=1M", "f:1: 'bites>=1M': expected an operation"},
      {"pass all bytes", "f:1: 'bytes': expected an operation"},
      {"pass all bytes>=", "f:1: 'bytes>=': a sign"},
      {"pass all bytes>=1T", "f:1: 'bytes>=1T': a sign"},
      {"pass all bytes>=1MB", "f:1: 'bytes>=1MB': a sign"},
      {"pass all bytes=>1", "f:1: 'bytes=>1': a sign"},
      {"pass all count>=-1", "f:1: 'count>=-1': a sign"},
      {"pass all count=99999999999999999999", "a sign"},
      {"pass all count!=1 count!=2", "f:1: 'count!=2': a rule can have one != for each key"},
      {"warmup", "f:1: 'warmup': needs a number"},
      {"warmup 1", "f:1: '1': expected an integer from 2 to 1000000"},
      {"warmup 20 30", "f:1: '30': only one number is expected"},
      {"least much", "f:1: 'much': expected an integer, e.g. 64K"},
      {"bits", "f:1: 'bits': needs a number"},
      {"bits 3", "f:1: '3': expected 1, 2, 4 or 8 bits, a range such as 1..8, or auto"},
      {"bits 16", "f:1: '16': expected 1, 2, 4 or 8 bits"},
      {"compress all bits=3", "f:1: 'bits=3': expected 1, 2, 4 or 8"},
      {"compress all bits=", "f:1: 'bits=': expected an operation"},
      {"pass all bits=1", "f:1: 'bits=1': a pass rule takes no bits"},
      {"\x01\xff", "f:1: '\?\?': a line"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    struct ob_rules rules;
    cr_assert_eq(ob_rules_parse("f", cases[i].text, strlen(cases[i].text), &rules),
                 ONEBIT_ERROR_ARGUMENT, "%s", cases[i].text);
    cr_assert(strstr(onebit_last_error(), cases[i].words), "%s", onebit_last_error());
  }
}

Test(rules, no_more_than_there_is_room_for) {
  static char text[(OB_MAX_RULES + 1) * 9 + 1];
  struct ob_rules rules;
  for (int i = 0; i <= OB_MAX_RULES; i++)
    memcpy(text + (size_t)i * 9, "pass all\n", 9);
  cr_assert_eq(ob_rules_parse("f", text, OB_MAX_RULES * 9, &rules), ONEBIT_OK);
  cr_assert_eq(ob_rules_parse("f", text, sizeof text - 1, &rules), ONEBIT_ERROR_ARGUMENT);
  cr_assert(strstr(onebit_last_error(), "f:65: 'pass': there are more than 64"), "%s",
            onebit_last_error());
}

Test(rules, equal_rules_have_equal_hashes) {
  static const char *const different[] = {"",
                                          "least 1",
                                          "warmup 3",
                                          "bits 2",
                                          "compress all bits=2",
                                          "pass all",
                                          "compress all",
                                          "pass allreduce",
                                          "pass all float",
                                          "pass all bytes>1",
                                          "pass all count>1",
                                          "pass all bytes<1",
                                          "pass all bytes!=0",
                                          "pass all\npass all"};
  enum { COUNT = sizeof different / sizeof different[0] };
  uint64_t hash[COUNT];
  for (size_t i = 0; i < COUNT; i++) {
    struct ob_rules rules = parse_rules(different[i]);
    hash[i] = ob_rules_hash(&rules);
    for (size_t k = 0; k < i; k++)
      cr_assert_neq(hash[i], hash[k], "%s and %s", different[i], different[k]);
  }
  struct ob_rules same = parse_rules("  pass\tall # the same\n\n");
  cr_assert_eq(ob_rules_hash(&same), hash[5]);
}

Test(rules, a_value_is_a_file_or_the_rules) {
  char path[] = "/tmp/onebit-rules-XXXXXX";
  static const char text[] = "warmup 33\n";
  struct ob_rules rules;
  int file = mkstemp(path);
  cr_assert(file >= 0 && write(file, text, sizeof text - 1) == sizeof text - 1);
  cr_assert_eq(ob_rules_load(path, &rules), ONEBIT_OK, "%s", onebit_last_error());
  cr_assert_eq(rules.warmup, 33);
  cr_assert_eq(ftruncate(file, 100000), 0);
  cr_assert_eq(ob_rules_load(path, &rules), ONEBIT_ERROR_FILE);
  close(file);
  unlink(path);
  cr_assert_eq(ob_rules_load(path, &rules), ONEBIT_ERROR_FILE);
  cr_assert(strstr(onebit_last_error(), path), "%s", onebit_last_error());
  cr_assert_eq(ob_rules_load("/", &rules), ONEBIT_ERROR_FILE);
  cr_assert_eq(ob_rules_load("warmup 7;pass all", &rules), ONEBIT_OK);
  cr_assert_eq(rules.warmup, 7);
  cr_assert_eq(ob_rules_load(NULL, &rules), ONEBIT_OK);
  cr_assert_eq(rules.warmup, OB_RULES_WARMUP);
  cr_assert_eq(ob_rules_load("warmup seven", &rules), ONEBIT_ERROR_ARGUMENT);
}

Test(rules, a_file_is_a_regular_one) {
  char directory[] = "/tmp/onebit-rules-XXXXXX", path[64];
  struct ob_rules rules;
  cr_assert(mkdtemp(directory));
  snprintf(path, sizeof path, "%s/rules", directory);
  for (enum irregular kind = A_FIFO; kind < IRREGULARS; kind++) {
    irregular_make(kind, path);
    CHECK_STATUS(ob_rules_load(path, &rules), ONEBIT_ERROR_FILE);
    CHECK_WORDS("not a regular file");
    irregular_remove(kind, path);
  }
  rmdir(directory);
}

/* Arithmetic on the element types is compared with exact arithmetic, for all values of 16 bits. */

enum { ALL = 0x10000 };

/* Returns the value of a 16-bit element, whose bits are a sign, exponent bits and fraction bits. */
static double value_of(uint16_t bits, onebit_dtype_t dtype) {
  const int width = dtype == ONEBIT_BFLOAT16 ? 7 : 10, most = (1 << (15 - width)) - 1;
  const int exponent = bits >> width & most, fraction = bits & ((1 << width) - 1);
  double value =
      ldexp(fraction + (exponent ? 1 << width : 0), (exponent ? exponent : 1) - most / 2 - width);
  if (exponent == most)
    value = fraction ? NAN : INFINITY;
  return bits & 0x8000 ? -value : value;
}

/* Rounds to the nearest value of the dtype, ties to even. */
static double rounded_element(double value, onebit_dtype_t dtype) {
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

static void check_elements(const uint16_t *got, onebit_dtype_t dtype, const double *wanted,
                           const char *what) {
  for (int i = 0; i < ALL; i++) {
    double mine = value_of(got[i], dtype), right = rounded_element(wanted[i], dtype);
    bool equal = isnan(right) ? isnan(mine) : mine == right && !signbit(mine) == !signbit(right);
    cr_assert(equal, "%s %s of %04x: %g, not %g", dtype_name(dtype), what, i, mine, right);
  }
}

static void fill_all_bits(uint16_t *bits) {
  for (int i = 0; i < ALL; i++)
    bits[i] = (uint16_t)i;
}

static void check_type(onebit_dtype_t dtype) {
  static const float factors[] = {1, 3, 4, 1000, 0.1f, 0.0078125f};
  static uint16_t bits[ALL], got[ALL], other[ALL];
  static double wanted[ALL];
  cr_assert_eq(ob_elements_size(dtype), 2);
  for (size_t k = 0; k < sizeof factors / sizeof factors[0]; k++) {
    fill_all_bits(bits);
    ob_elements_multiply(dtype, got, bits, ALL, factors[k]);
    for (int i = 0; i < ALL; i++)
      wanted[i] = (double)((float)value_of(bits[i], dtype) * factors[k]);
    check_elements(got, dtype, wanted, "product");
    ob_elements_divide(dtype, bits, ALL, factors[k]);
    for (int i = 0; i < ALL; i++)
      wanted[i] = (double)((float)value_of((uint16_t)i, dtype) / factors[k]);
    check_elements(bits, dtype, wanted, "quotient");
  }
  fill_all_bits(bits);
  for (int i = 0; i < ALL; i++) {
    other[i] = (uint16_t)((unsigned)i * 40503u >> 3);
    wanted[i] = (double)((float)value_of(bits[i], dtype) + (float)value_of(other[i], dtype));
  }
  ob_elements_add(dtype, bits, other, ALL);
  check_elements(bits, dtype, wanted, "sum");
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
  cr_expect(!ob_elements_narrow(narrow, good + 3, 1)); /* a float cannot represent this value */
  cr_expect(ob_elements_narrow(narrow, good + 2, 1) && ob_elements_narrow(narrow, good, 0));
  cr_expect_eq(ob_elements_size(OB_DOUBLE), sizeof(double));
  ob_elements_read(OB_DOUBLE, narrow, good, 2);
  cr_expect(narrow[0] == 1.5F && narrow[1] == -0.25F);
  ob_elements_divide(OB_DOUBLE, wide, 2, 2);
  cr_expect(wide[0] == 2.25 && wide[1] == -0.375);
}
