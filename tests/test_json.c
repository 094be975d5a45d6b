/*
 * JSON: numbers keep nine digits; values are divided and escaped.
 */
#include "base/json.h"
#include "tests/support.h"
#include "tests/support_json.h"

Test(json, numbers_keep_nine_digits_or_are_null) {
  char text[OB_JSON_NUMBER];
  cr_expect_str_eq(ob_json_number(text, 0), "0");
  cr_expect_str_eq(ob_json_number(text, -1.25e-300), "-1.25e-300");
  cr_expect_str_eq(ob_json_number(text, 123456789.4), "123456789");
  cr_expect_str_eq(ob_json_number(text, -1.23456789e-308), "-1.23456789e-308");
  cr_expect_str_eq(ob_json_number(text, NAN), "null");
  cr_expect_str_eq(ob_json_number(text, -INFINITY), "null");
}

/* The output of a writer for some values. */
static const char *written(bool spaced) {
  static char text[512];
  memset(text, 0, sizeof text);
  struct ob_json json = {.file = fmemopen(text, sizeof text - 1, "w"), .spaced = spaced};
  ob_json_begin(&json, NULL, '{');
  ob_json_string(&json, "text", "a \"b\" \\ \n\x01");
  ob_json_string(&json, "none", NULL);
  ob_json_begin(&json, "list", '[');
  ob_json_real(&json, NULL, 0.5);
  ob_json_begin(&json, NULL, '{');
  ob_json_end(&json, '}');
  ob_json_begin(&json, NULL, '{');
  ob_json_bool(&json, "yes", true);
  ob_json_end(&json, '}');
  ob_json_end(&json, ']');
  ob_json_integer(&json, "largest", UINT64_MAX);
  ob_json_end(&json, '}');
  fclose(json.file);
  cr_expect(spaced || json_is_valid(text), "%s", text);
  return text;
}

Test(json, values_are_divided_and_escaped) {
  cr_expect_str_eq(written(false),
                   "{\"text\":\"a \\\"b\\\" \\\\ \\u000a\\u0001\",\"none\":null,"
                   "\"list\":[0.5,{},{\"yes\":true}],\"largest\":18446744073709551615}");
  cr_expect_str_eq(written(true), "{\"text\": \"a \\\"b\\\" \\\\ \\u000a\\u0001\", \"none\": null, "
                                  "\"list\": [0.5,\n  {},\n  {\"yes\": true}], "
                                  "\"largest\": 18446744073709551615}");
}
