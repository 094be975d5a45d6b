/* Tests the option table of the programs: every kind of value, every way to write it, and every
 * error. */
#include <criterion/criterion.h>
#include <criterion/redirect.h>

#include "tests/support.h"
#include "tools/options.h"

struct values {
  bool fast;
  int ranks, wire;
  size_t count, size;
  double real, rate, seconds;
  float small;
  const char *path;
  size_t list[3], listed, called;
};

static const char *read_list(void *values, const char *value) {
  struct values *to = values;
  to->listed = tool_read_list(value, 1, 9, to->list, 3);
  return to->listed ? NULL : "expected N,N,..., each 1 to 9, at most 3 of them";
}

static const char *count_calls(void *values, const char *value) {
  cr_expect_null(value);
  ((struct values *)values)->called++;
  return NULL;
}

#define AT(field) offsetof(struct values, field)
static const char *const wires[] = {"bits", "dense", "half", NULL};

static const struct tool_option further[] = {
    {"small", 0, TOOL_FLOAT, AT(small), "X", "how small", .low = 1e-9, .high = 2},
    {"output", 'o', TOOL_TEXT, AT(path), .argument = "PATH", .help = "where"},
    {"streams", 0, TOOL_CALL, 0, "N,N,...", "which", .read = read_list, .groups = 2},
    {"call", 'c', TOOL_CALL, .help = "counts", .read = count_calls, .groups = 1},
    {0}};

static const struct tool_option rows[] = {
    {"fast", 'f', TOOL_FLAG, AT(fast), .help = "not slow"},
    {"ranks", 'r', TOOL_INTEGER, AT(ranks), "N", "how many", .low = 1, .high = 64},
    {"count", 0, TOOL_COUNT, AT(count), "N", "how many", .low = 1},
    {NULL, 'm', TOOL_SIZE, AT(size), "BYTES", "how large\nand more of that", .low = 4},
    {.kind = TOOL_HEADING, .help = "Quantities:"},
    {"real", 0, TOOL_REAL, AT(real), "X", "how much", .low = 0.5, .high = 1e10},
    {"rate", 0, TOOL_RATE, AT(rate), "RATE", "how fast", .low = 1e3, .high = 1e13},
    {"seconds", 0, TOOL_SECONDS, AT(seconds), "SECONDS", "how long", .high = 10},
    {"wire", 'w', TOOL_CHOICE, AT(wire), "NAME", "which", .names = wires},
    {.kind = TOOL_ROWS, .rows = further}};

static const struct values defaults = {.count = 12, .size = 5, .small = 1e-4f};
static const struct tool tool = {.name = "onebit-test sub",
                                 .usage = "onebit-test sub [OPTION]... FILE...",
                                 .purpose = "Tests options.",
                                 .options = rows,
                                 .notes = "That is all.",
                                 .group = 2,
                                 .operands = true,
                                 .defaults = &defaults};

static char error[TOOL_ERROR];
static char *arguments[20];
static int count;

/* Parses a line of arguments that are separated by single spaces. */
static enum tool_asked parse_with_tool(const struct tool *by, const char *line,
                                       struct values *values) {
  count = split_line(arguments, "program %s", line);
  memset(values, 0, sizeof *values);
  return tool_parse(by, &count, arguments, values, error);
}

static enum tool_asked parse_line(const char *line, struct values *values) {
  return parse_with_tool(&tool, line, values);
}

Test(options, each_way_to_write_a_value_is_read_alike) {
  static const char *const lines[] = {"--ranks=7", "--ranks 7", "-r7", "-r 7", "-fr7"};
  struct values values;
  for (size_t k = 0; k < sizeof lines / sizeof lines[0]; k++) {
    cr_assert_eq(parse_line(lines[k], &values), TOOL_RUN, "%s: %s", lines[k], error);
    cr_expect_eq(values.ranks, 7, "%s", lines[k]);
    cr_expect_eq(values.fast, k == 4);
  }
  cr_assert_eq(parse_line("-o- --ranks 1 --ranks 2", &values), TOOL_RUN);
  cr_expect_str_eq(values.path, "-");
  cr_expect_eq(values.ranks, 2, "the last one counts");
}

Test(options, each_kind_is_read) {
  struct values values;
  cr_assert_eq(parse_line("-f --count 99 -m64k --real 340M --rate 300mbit --seconds 250ms -w dense "
                          "--streams 3,9",
                          &values),
               TOOL_RUN, "%s", error);
  cr_expect(values.fast && values.count == 99 && values.size == 64 << 10 && values.wire == 1);
  cr_expect(values.real == 340e6 && values.rate == 37.5e6 && values.seconds == 0.25);
  cr_expect(values.listed == 2 && values.list[0] == 3 && values.list[1] == 9);
  cr_assert_eq(parse_line("--real 1.5g --rate 1gbit --seconds 0.5 -m 2G", &values), TOOL_RUN);
  cr_expect(values.real == 1.5e9 && values.rate == 125e6 && values.seconds == 0.5);
  cr_expect_eq(values.size, (size_t)2 << 30);
  cr_assert_eq(parse_line("--seconds 50us --small 2.5e-4", &values), TOOL_RUN);
  cr_expect_eq(values.small, 2.5e-4f);
  cr_expect_float_eq(values.seconds, 50e-6, 1e-12);
}

Test(options, operands_are_gathered) {
  struct values values;
  cr_assert_eq(parse_line("a -f b --ranks 2 - -- -c --what", &values), TOOL_RUN, "%s", error);
  cr_assert_eq(count, 6);
  for (int k = 1; k < count; k++)
    cr_expect_str_eq(arguments[k], ((const char *[]){"a", "b", "-", "-c", "--what"})[k - 1]);
  cr_expect_null(arguments[count]);
  struct tool none = tool;
  none.operands = false;
  cr_expect_eq(parse_with_tool(&none, "-f a", &values), TOOL_WRONG);
  cr_expect_str_eq(error, "a: unexpected argument");
  cr_expect_eq(parse_with_tool(&none, "-- a", &values), TOOL_WRONG);
}

Test(options, help_and_version_end_the_reading) {
  struct values values;
  cr_expect_eq(parse_line("-f --help --what", &values), TOOL_HELP);
  cr_expect_eq(parse_line("-h", &values), TOOL_HELP);
  cr_expect_eq(parse_line("--version", &values), TOOL_VERSION);
  cr_expect_eq(parse_line("-v", &values), TOOL_VERSION);
  cr_expect_eq(parse_line("--ranks 0 --help", &values), TOOL_WRONG);
}

Test(options, quantities_are_a_number_and_a_unit) {
  static const char *const wrong[] = {"",      "M",   "-3",   "3 M",   "1e3", "3X",
                                      "1gbit", "nan", "0x10", "1.2.3", "."};
  double value;
  cr_expect(tool_read_quantity("340M", TOOL_REAL, &value) && value == 340e6);
  for (size_t k = 0; k < sizeof wrong / sizeof wrong[0]; k++)
    cr_expect(!tool_read_quantity(wrong[k], TOOL_REAL, &value), "%s", wrong[k]);
  cr_expect(!tool_read_quantity("1", TOOL_RATE, &value), "a rate needs its unit");
  cr_expect(tool_read_quantity("2Gbit/s", TOOL_RATE, &value) && value == 2.5e8);
  cr_expect(!tool_read_quantity("2Gbit/", TOOL_RATE, &value));
  cr_expect(!tool_read_quantity("2s/s", TOOL_SECONDS, &value));
}

Test(options, errors_name_option_value_and_what_was_expected) {
  static const char *const wrong[][2] = {
      {"--ranks=0", "--ranks=0: expected an integer from 1 to 64"},
      {"--ranks 65", "--ranks=65: expected an integer from 1 to 64"},
      {"-r 2.5", "-r 2.5: expected an integer from 1 to 64"},
      {"-r1k", "-r 1k: expected an integer from 1 to 64"},
      {"--ranks=", "--ranks=: expected an integer from 1 to 64"},
      {"--count 99999999999999999999", "--count=99999999999999999999: expected an integer of at "
                                       "least 1"},
      {"--count -1", "--count=-1: expected an integer of at least 1"},
      {"-m 3", "-m 3: expected a size such as 64K or 256M of at least 4"},
      {"-m 1T", "-m 1T: expected a size such as 64K or 256M of at least 4"},
      {"--real 0.25", "--real=0.25: expected a number such as 16 or 340M from 0.5 to 10000000000"},
      {"--real 1e3", "--real=1e3: expected a number such as 16 or 340M from 0.5 to 10000000000"},
      {"--rate 5", "--rate=5: expected a rate such as 300mbit or 1gbit from 0.008 to "
                   "80000000mbit"},
      {"--seconds soon", "--seconds=soon: expected a time such as 0.250, 250ms or 50us from 0 to "
                         "10s"},
      {"--small 3", "--small=3: expected a number such as 0.5 or 1e-4 from 1e-09 to 2"},
      {"--small x", "--small=x: expected a number such as 0.5 or 1e-4 from 1e-09 to 2"},
      {"--wire=", "--wire=: expected bits, dense or half"},
      {"-wdens", "-w dens: expected bits, dense or half"},
      {"--streams 1,10", "--streams=1,10: expected N,N,..., each 1 to 9, at most 3 of them"},
      {"--streams 1,", "--streams=1,: expected N,N,..., each 1 to 9, at most 3 of them"},
      {"--streams 1,2,3,4", "--streams=1,2,3,4: expected N,N,..., each 1 to 9, at most 3 of them"},
      {"--ranks", "--ranks: needs a value"},
      {"-r", "-r: needs a value"},
      {"--fast=1", "--fast=1: takes no value"},
      {"--version=1", "--version=1: takes no value"},
      {"-f5", "-5: unknown option"},
      {"--what=1", "--what=1: unknown option"},
      {"--rank 1", "--rank: unknown option"},
      {"--hel", "--hel: unknown option"},
      {"--call", "--call: unknown option"},
      {"-c", "-c: unknown option"},
  };
  struct values values;
  for (size_t k = 0; k < sizeof wrong / sizeof wrong[0]; k++) {
    cr_expect_eq(parse_line(wrong[k][0], &values), TOOL_WRONG, "%s", wrong[k][0]);
    cr_expect_str_eq(error, wrong[k][1]);
  }
  char longest[251] = "--";
  memset(longest + 2, 'x', sizeof longest - 3);
  cr_expect_eq(parse_line(longest, &values), TOOL_WRONG);
}

Test(options, subcommands_have_options_of_their_own) {
  struct values values;
  struct tool other = tool;
  other.group = 1;
  cr_expect_eq(parse_with_tool(&other, "-cc --call", &values), TOOL_RUN, "%s", error);
  cr_expect_eq(values.called, 3);
  cr_expect_eq(parse_with_tool(&other, "--streams 1", &values), TOOL_WRONG);
}

Test(options, answers) {
  static char text[4096];
  cr_redirect_stdout();
  cr_redirect_stderr();
  cr_expect_eq(tool_print_answer(&tool, TOOL_WRONG, "-q: unknown option"), TOOL_USAGE);
  cr_expect_eq(tool_print_answer(&tool, TOOL_VERSION, ""), 0);
  cr_expect_eq(tool_print_answer(&tool, TOOL_HELP, ""), 0);
  fflush(stdout);
  fclose(stdout);
  text[fread(text, 1, sizeof text - 1, cr_get_redirected_stdout())] = '\0';
  const char *help = strchr(text, '\n') + 1;
  cr_expect(strncmp(text, "onebit-test 0.", 14) == 0, "%s", text);
  cr_expect_str_eq(help, "usage: onebit-test sub [OPTION]... FILE...\n"
                         "\n"
                         "Tests options.\n"
                         "\n"
                         "  -f, --fast            not slow\n"
                         "  -r, --ranks N         how many\n"
                         "  --count N             how many; default 12\n"
                         "  -m BYTES              how large\n"
                         "                        and more of that\n"
                         "\n"
                         "Quantities:\n"
                         "\n"
                         "  --real X              how much\n"
                         "  --rate RATE           how fast\n"
                         "  --seconds SECONDS     how long\n"
                         "  -w, --wire NAME       which\n"
                         "  --small X             how small; default 0.0001\n"
                         "  -o, --output PATH     where\n"
                         "  --streams N,N,...     which\n"
                         "  -h, --help            print this text\n"
                         "  -v, --version         print the version of the library\n"
                         "\n"
                         "That is all.\n");
}
