/* Tests ONEBIT_CONFIG. A value in its file applies unless the environment sets the variable, and an
 * error in the file is reported with its line. A process reads the file only once, so each case is
 * a test of its own. */
#include <sys/wait.h>

#include "base/json.h"
#include "base/knobs.h"
#include "tests/support.h"

static const char template[] = "/tmp/onebit-config-XXXXXX";
static char path[] = "/tmp/onebit-config-XXXXXX";

static void write_file(const char *text) {
  int file = mkstemp(path);
  cr_assert(file >= 0 && write(file, text, strlen(text)) == (ssize_t)strlen(text));
  close(file);
  setenv("ONEBIT_CONFIG", path, 1);
}

/* --- JSON */

static onebit_status_t read_json(const char *text, struct ob_json_value *values, size_t *count) {
  static char copy[4096];
  snprintf(copy, sizeof copy, "%s", text);
  return ob_json_read("f", copy, values, 16, count);
}

static void check_text(const char *what, size_t number, const char *found, const char *wanted) {
  bool equal = !found || !wanted ? found == wanted : strcmp(found, wanted) == 0;
  CHECK(equal, "value %zu has %s %s", number, what, found ? found : "none");
}

Test(config, json_is_read) {
  struct ob_json_value values[16];
  size_t count;
  CHECK_STATUS(read_json("\n{\"a\": [1, -0.5e+3 ,true],\n \"b\\n\\u00e9\\u20ac\":{ }, \"c\": \"\", "
                         "\"d\":null}\r\n",
                         values, &count),
               ONEBIT_OK);
  static const struct ob_json_value wanted[] = {
      {NULL, NULL, OB_JSON_OBJECT, -1, 2}, {"a", NULL, OB_JSON_ARRAY, 0, 2},
      {NULL, "1", OB_JSON_REAL, 1, 2},     {NULL, "-0.5e+3", OB_JSON_REAL, 1, 2},
      {NULL, NULL, OB_JSON_TRUE, 1, 2},    {"b\n\303\251\342\202\254", NULL, OB_JSON_OBJECT, 0, 3},
      {"c", "", OB_JSON_STRING, 0, 3},     {"d", NULL, OB_JSON_NULL, 0, 3},
  };
  cr_assert_eq(count, sizeof wanted / sizeof wanted[0]);
  for (size_t k = 0; k < count; k++) {
    CHECK(values[k].kind == wanted[k].kind && values[k].parent == wanted[k].parent &&
              values[k].line == wanted[k].line,
          "value %zu: kind %d, parent %d, line %d", k, (int)values[k].kind, values[k].parent,
          values[k].line);
    check_text("key", k, values[k].key, wanted[k].key);
    check_text("text", k, values[k].text, wanted[k].text);
  }
}

Test(config, what_is_no_json_is_refused_with_its_line) {
  static const char *const texts[][2] = {
      {"", "f:1: expected '{', not the end of the file"},
      {"[1]", "f:1: expected '{', not '['"},
      {"{", "f:1: expected a string in \"\", not the end"},
      {"{\n\"a\" 1}", "f:2: expected ':', not '1'"},
      {"{\"a\":1\n\"b\":2}", "f:2: expected ',' or '}', not '\"'"},
      {"{\"a\":1,}", "f:1: expected a string in \"\", not '}'"},
      {"{\"a\":[1,]}", "f:1: expected a value, not ']'"},
      {"{\"a\":[1 2]}", "f:1: expected ',' or ']', not '2'"},
      {"{\"a\":01}", "expected ',' or '}', not '1'"},
      {"{\"a\":-}", "expected a value, not '}'"},
      {"{\"a\":1.}", "expected a value, not '}'"},
      {"{\"a\":1e}", "expected a value, not '}'"},
      {"{\"a\":\n0.123456789012345678901234567890123456789012345678901234567890e-1}",
       "f:2: 0.123456789012345678...: a number of more than 60 characters"},
      {"{\"a\":tru}", "expected a value, not 't'"},
      {"{\"a\":\"x\n\"}", "expected \" at the end of a string, not an unprintable"},
      {"{\"a\":\"x", "expected \" at the end of a string, not the end of the file"},
      {"{\"a\":\"\\x\"}", "after \\, not 'x'"},
      {"{\"a\":\"\\", "after \\, not the end"},
      {"{\"a\":\"\\u12g4\"}", "four hexadecimal digits"},
      {"{\"a\":\"\\u0000\"}", "four hexadecimal digits"},
      {"{\"a\":\"\\ud83d\\ude00\"}", "four hexadecimal digits"},
      {"{\"a\":1}\n\n}", "f:3: expected nothing after the last '}', not '}'"},
      {"{\"a\":1,\n\"a\":2}", "f:2: key a was already given in line 1"},
      {"{\"a\":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15]}", "f:1: more than 16 values"},
  };
  struct ob_json_value values[16];
  size_t count;
  for (size_t k = 0; k < sizeof texts / sizeof texts[0]; k++) {
    check_case("%s", texts[k][0]);
    CHECK_STATUS(read_json(texts[k][0], values, &count), ONEBIT_ERROR_ARGUMENT);
    CHECK_WORDS(texts[k][1]);
  }
  static struct ob_json_value many[64];
  char deep[128] = "{\"a\":";
  memset(deep + 5, '[', 40);
  CHECK_STATUS(ob_json_read("f", deep, many, 64, &count), ONEBIT_ERROR_ARGUMENT);
  CHECK_WORDS("more than 32 nested arrays and objects");
}

/* --- Variables */

static void expect_text(enum ob_knob knob, const char *text, const char *origin) {
  const char *found = ob_knob_text(knob);
  cr_expect(found && strcmp(found, text) == 0, "%s is %s", ob_knobs[knob].name, found);
  cr_expect(strstr(ob_knob_origin(knob), origin), "from %s", ob_knob_origin(knob));
}

Test(config, the_environment_comes_first_then_the_file_then_the_default) {
  write_file("{\"threads\": 3,\n \"timeout\": \"never\", \"bits\": null,\n\"explain\": false,"
             "\"rules\": \"\", \"every_rank\": true}");
  setenv("ONEBIT_TIMEOUT", "7", 1);
  expect_text(OB_KNOB_THREADS, "3", ":1");
  expect_text(OB_KNOB_TIMEOUT, "7", "environment");
  expect_text(OB_KNOB_EXPLAIN, "0", ":3");
  expect_text(OB_KNOB_EVERY_RANK, "1", ":3");
  cr_expect_null(ob_knob_text(OB_KNOB_BITS));
  cr_expect_null(ob_knob_text(OB_KNOB_RULES));
  cr_expect_str_eq(ob_knob_origin(OB_KNOB_BITS), "default");
  setenv("ONEBIT_TIMEOUT", "", 1);
  expect_text(OB_KNOB_TIMEOUT, "never", ":2");
  unlink(path);
}

/* --- Wrong files */

struct wrong {
  const char *text, *message;
  onebit_status_t status;
};

static onebit_status_t make_comm(void) {
  onebit_comm_t made = NULL;
  onebit_status_t first = onebit_comm_create_self(&made), again = onebit_comm_create_self(&made);
  return first == again && !made ? first : ONEBIT_OK;
}

/* Runs each case in a process of its own, which sends its error message to the parent. */
static void check_wrong(const struct wrong *wrong, size_t count) {
  for (size_t k = 0; k < count; k++) {
    char message[512] = "";
    int ends[2], state = 0;
    if (*wrong[k].text == '/')
      setenv("ONEBIT_CONFIG", wrong[k].text, 1);
    else
      write_file(wrong[k].text);
    cr_assert(pipe(ends) == 0);
    pid_t child = fork();
    if (child == 0) {
      onebit_status_t status = make_comm();
      const char *text = onebit_last_error();
      _exit(write(ends[1], text, strlen(text)) < 0 ? 0 : -(int)status);
    }
    waitpid(child, &state, 0);
    close(ends[1]);
    check_case("%s", wrong[k].text);
    CHECK(WEXITSTATUS(state) == -(int)wrong[k].status, "status %d", -WEXITSTATUS(state));
    CHECK(read(ends[0], message, sizeof message - 1) > 0 && strstr(message, wrong[k].message),
          "\"%s\" is not \"%s\"", message, wrong[k].message);
    close(ends[0]);
    expect_output(program(1, "onebit-info"), wrong[k].message);
    if (*wrong[k].text != '/')
      unlink(path);
    strcpy(path, template);
  }
  checks_must_hold();
}

Test(config, all_that_is_wrong_is_said) {
  static const struct wrong cases[] = {
      {"{\"thread\": 1}", ":1: thread: unknown key", ONEBIT_ERROR_ARGUMENT},
      {"{\"THREADS\": 1}", ":1: THREADS: unknown key", ONEBIT_ERROR_ARGUMENT},
      {"{\"config\": \"a\"}", ":1: config: unknown key", ONEBIT_ERROR_ARGUMENT},
      {"{\n\"codec\": [\"avx2\"]}", ":2: codec is an array, not a string", ONEBIT_ERROR_ARGUMENT},
      {"{\n\"timeout\": \"soon\"}", ":2: timeout=soon: neither", ONEBIT_ERROR_ARGUMENT},
      {"{\n\"progress\": true}", ":2: progress=1: neither calls nor", ONEBIT_ERROR_ARGUMENT},
      {"{\"debug\": \"loud\"}", ":1: debug=loud: neither WARN, INFO nor", ONEBIT_ERROR_ARGUMENT},
      {"{\"optimizer\": {}}", ":1: optimizer: unknown key", ONEBIT_ERROR_ARGUMENT},
      {"{\"threads\": 1", ":1: expected ',' or '}'", ONEBIT_ERROR_ARGUMENT},
      {"/nowhere/at.all", "ONEBIT_CONFIG=/nowhere/at.all: No such file", ONEBIT_ERROR_FILE},
      {"/tmp", "ONEBIT_CONFIG=/tmp: not a regular file", ONEBIT_ERROR_FILE},
  };
  check_wrong(cases, sizeof cases / sizeof cases[0]);
}

Test(config, info_shows_where_each_value_is_from) {
  write_file("{\"threads\": 3,\n \"timeout\": \"never\"}");
  setenv("ONEBIT_THREADS", "2", 1);
  const char *said = program(0, "onebit-info");
  expect_output(said, "ONEBIT_THREADS  2        environment");
  expect_output(said, ":2 seconds");
  unlink(path);
}
