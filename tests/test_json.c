/*
 * Numbers in JSON: the same text in every locale, and one that JSON knows.
 */
#include <criterion/criterion.h>
#include <math.h>

#include "base/json.h"

static void expect_point(const char *local, const char *wanted) {
  char text[OB_JSON_NUMBER];
  strcpy(text, local);
  ob_json_set_point(text);
  cr_expect_str_eq(text, wanted, "%s became %s", local, text);
}

Test(json, decimal_points_of_locales_become_points) {
  expect_point("0,006", "0.006");
  expect_point("-1,5e-07", "-1.5e-07");
  expect_point("1\331\2535e+20", "1.5e+20"); /* the Arabic decimal separator, of two bytes */
  expect_point("12", "12");
  expect_point("-0.25", "-0.25");
}

Test(json, numbers_keep_nine_digits_or_are_null) {
  char text[OB_JSON_NUMBER];
  cr_expect_str_eq(ob_json_number(text, 0), "0");
  cr_expect_str_eq(ob_json_number(text, -1.25e-300), "-1.25e-300");
  cr_expect_str_eq(ob_json_number(text, 123456789.4), "123456789");
  cr_expect_str_eq(ob_json_number(text, -1.23456789e-308), "-1.23456789e-308");
  cr_expect_str_eq(ob_json_number(text, NAN), "null");
  cr_expect_str_eq(ob_json_number(text, -INFINITY), "null");
}
