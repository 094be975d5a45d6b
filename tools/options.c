/* Reads the command line of every program, and prints --help and errors. */
#define _GNU_SOURCE /* getopt_long */
#include "tools/options.h"

#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "onebit/onebit.h"

/* --- Values ------------------------------------------------------------------------------------*/

const char *tool_read_integer(const char *text, bool suffix, size_t *value) {
  static const char letters[] = "KMG";
  char *end;
  if (!isdigit((unsigned char)*text))
    return NULL;
  errno = 0;
  unsigned long long number = strtoull(text, &end, 10);
  const char *letter = *end && suffix ? strchr(letters, toupper((unsigned char)*end)) : NULL;
  unsigned shift = letter ? 10 * (unsigned)(letter - letters + 1) : 0;
  if (errno || number > (SIZE_MAX >> shift))
    return NULL;
  *value = (size_t)number << shift;
  return end + (letter != NULL);
}

/* True if a word is the unit. After the unit of a rate, "/s" is accepted. */
static bool is_unit(const char *word, const char *unit, enum tool_option_kind kind) {
  const size_t length = strlen(unit);
  return strncasecmp(word, unit, length) == 0 &&
         (!word[length] || (kind == TOOL_RATE && strcmp(word + length, "/s") == 0));
}

bool tool_read_quantity(const char *text, enum tool_option_kind kind, double *value) {
  static const struct {
    enum tool_option_kind kind;
    const char *name;
    double factor;
  } units[] = {
      {TOOL_REAL, "", 1},           {TOOL_REAL, "K", 1e3},        {TOOL_REAL, "M", 1e6},
      {TOOL_REAL, "G", 1e9},        {TOOL_REAL, "B", 1e9},        {TOOL_RATE, "kbit", 1e3 / 8},
      {TOOL_RATE, "mbit", 1e6 / 8}, {TOOL_RATE, "gbit", 1e9 / 8}, {TOOL_SECONDS, "", 1},
      {TOOL_SECONDS, "s", 1},       {TOOL_SECONDS, "ms", 1e-3},   {TOOL_SECONDS, "us", 1e-6}};
  char number[32], *end;
  size_t length = strspn(text, "0123456789.");
  if (length == 0 || length >= sizeof number)
    return false;
  memcpy(number, text, length);
  number[length] = '\0';
  *value = strtod(number, &end);
  for (size_t k = 0; k < sizeof units / sizeof units[0] && end > number && !*end; k++)
    if (units[k].kind == kind && is_unit(text + length, units[k].name, kind)) {
      *value *= units[k].factor;
      return true;
    }
  return false;
}

size_t tool_read_list(const char *text, size_t low, size_t high, size_t *values, size_t capacity) {
  for (size_t count = 0; count < capacity; text++) {
    text = tool_read_integer(text, false, &values[count]);
    if (!text || (*text && *text != ',') || values[count] < low || values[count] > high)
      return 0;
    count++;
    if (!*text)
      return count;
  }
  return 0;
}

int tool_find_name(const char *word, size_t length, const char *const *names) {
  for (int i = 0; names[i]; i++)
    if (strlen(names[i]) == length && strncmp(word, names[i], length) == 0)
      return i;
  return -1;
}

/* --- Fields ------------------------------------------------------------------------------------*/

/* Returns the largest value that an option accepts. For a size_t this is far below SIZE_MAX, which
 * a double cannot represent. */
static double get_max_value(const struct tool_option *option) {
  return option->high > 0               ? option->high
         : option->kind == TOOL_INTEGER ? INT_MAX
                                        : (double)(SIZE_MAX >> 11);
}

static bool is_in_range(const struct tool_option *option, double value) {
  return value >= option->low && value <= get_max_value(option);
}

static bool set_integer(const struct tool_option *option, const char *text, void *field) {
  size_t value;
  const char *end = tool_read_integer(text, option->kind == TOOL_SIZE, &value);
  if (!end || *end || !is_in_range(option, (double)value))
    return false;
  if (option->kind == TOOL_INTEGER)
    *(int *)field = (int)value;
  else
    *(size_t *)field = value;
  return true;
}

static bool set_quantity(const struct tool_option *option, const char *text, double *field) {
  double value;
  if (!tool_read_quantity(text, option->kind, &value) || !is_in_range(option, value))
    return false;
  *field = value;
  return true;
}

static bool set_float(const struct tool_option *option, const char *text, float *field) {
  char *end;
  double value = strtod(text, &end);
  if (end == text || *end || !is_in_range(option, value))
    return false;
  *field = (float)value;
  return true;
}

static bool set_choice(const struct tool_option *option, const char *text, int *field) {
  int found = tool_find_name(text, strlen(text), option->names);
  if (found >= 0)
    *field = found;
  return found >= 0;
}

/* Sets the field of an option without a `read` function. */
static bool set_field(const struct tool_option *option, const char *text, void *field) {
  switch (option->kind) {
  case TOOL_FLAG:
    return *(bool *)field = true;
  case TOOL_TEXT:
    *(const char **)field = text;
    return true;
  case TOOL_CHOICE:
    return set_choice(option, text, field);
  case TOOL_FLOAT:
    return set_float(option, text, field);
  case TOOL_REAL:
  case TOOL_RATE:
  case TOOL_SECONDS:
    return set_quantity(option, text, field);
  default:
    return set_integer(option, text, field);
  }
}

/* Writes what an option expects: "expected an integer from 1 to 64". */
static void describe_expected(const struct tool_option *option, char *text, size_t capacity) {
  static const struct {
    const char *what, *unit;
    double factor; /* converts the range to that unit */
  } kinds[] = {
      [TOOL_INTEGER] = {"an integer", "", 1},
      [TOOL_COUNT] = {"an integer", "", 1},
      [TOOL_SIZE] = {"a size such as 64K or 256M", "", 1},
      [TOOL_REAL] = {"a number such as 16 or 340M", "", 1},
      [TOOL_FLOAT] = {"a number such as 0.5 or 1e-4", "", 1},
      [TOOL_RATE] = {"a rate such as 300mbit or 1gbit", "mbit", 8e-6},
      [TOOL_SECONDS] = {"a time such as 0.250, 250ms or 50us", "s", 1},
  };
  size_t at = (size_t)snprintf(text, capacity, "expected ");
  if (option->kind == TOOL_CHOICE) {
    for (const char *const *name = option->names; *name && at < capacity; name++)
      at += (size_t)snprintf(text + at, capacity - at, "%s%s", *name,
                             !name[1]   ? ""
                             : !name[2] ? " or "
                                        : ", ");
    return;
  }
  double factor = kinds[option->kind].factor, low = factor * option->low;
  at += (size_t)snprintf(text + at, capacity - at, "%s", kinds[option->kind].what);
  if (option->high > 0)
    snprintf(text + at, capacity - at, " from %.15g to %.15g%s", low, factor * option->high,
             kinds[option->kind].unit);
  else if (option->low > 0)
    snprintf(text + at, capacity - at, " of at least %.15g%s", low, kinds[option->kind].unit);
}

/* --- Reading -----------------------------------------------------------------------------------*/

enum { HELP = 1 << 10, VERSION, LONG }; /* getopt returns a letter, one of these, or LONG + row */

static bool has_value(const struct tool_option *option) {
  return option->kind != TOOL_FLAG && (option->kind != TOOL_CALL || option->argument);
}

static bool is_available(const struct tool *tool, const struct tool_option *option) {
  return option->kind != TOOL_HEADING && (!option->groups || option->groups & tool->group);
}

/* The size of getopt's tables, which is enough for the rows of every program here. */
enum { ROWS = 96 };

static const struct tool_option *get_next_row(const struct tool_option *option) {
  return option[1].kind == TOOL_ROWS ? option[1].rows : option + 1;
}

static void make_tables(const struct tool *tool, struct option longs[ROWS],
                        char letters[2 * ROWS + 4]) {
  size_t count = 2;
  int row = 0;
  longs[0] = (struct option){"help", no_argument, NULL, HELP};
  longs[1] = (struct option){"version", no_argument, NULL, VERSION};
  letters += sprintf(letters, "-:hv"); /* -: keeps operands in order; :: reports missing values */
  for (const struct tool_option *option = tool->options; option->kind && count < ROWS - 1;
       option = get_next_row(option), row++) {
    if (!is_available(tool, option))
      continue;
    int value = has_value(option) ? required_argument : no_argument;
    if (option->name)
      longs[count++] = (struct option){option->name, value, NULL, LONG + row};
    if (option->letter)
      letters += sprintf(letters, "%c%s", option->letter, value ? ":" : "");
  }
  longs[count] = (struct option){0};
}

static const struct tool_option *find_option(const struct tool *tool, int got) {
  const struct tool_option *option = tool->options;
  for (int row = LONG; got >= LONG && row < got; row++)
    option = get_next_row(option);
  while (got < LONG && option->kind && (!is_available(tool, option) || option->letter != got))
    option = get_next_row(option);
  return option;
}

/* Sets an option's field to a value. On failure returns false and writes a message into `error`. */
static bool set_option(const struct tool_option *option, bool is_long, const char *value,
                       void *values, char error[TOOL_ERROR]) {
  char expected[TOOL_ERROR / 2];
  const char *wrong = NULL;
  if (option->kind == TOOL_CALL)
    wrong = option->read(values, value);
  else if (!set_field(option, value, (char *)values + option->at)) {
    describe_expected(option, expected, sizeof expected);
    wrong = expected;
  }
  if (!wrong)
    return true;
  if (is_long)
    snprintf(error, TOOL_ERROR, "--%s=%.60s: %s", option->name, value ? value : "", wrong);
  else
    snprintf(error, TOOL_ERROR, "-%c %.60s: %s", option->letter, value ? value : "", wrong);
  return false;
}

/* Writes the error for an argument that getopt_long rejects. found: optopt, which is 0 for an
 * unknown long option. */
static enum tool_asked report_bad_argument(const char *argument, int got, int found,
                                           char error[TOOL_ERROR]) {
  if (got == 1)
    snprintf(error, TOOL_ERROR, "%.120s: unexpected argument", argument);
  else if (got == ':')
    snprintf(error, TOOL_ERROR, "%.120s: needs a value", argument);
  else if (found >= HELP)
    snprintf(error, TOOL_ERROR, "%.120s: takes no value", argument);
  else if (found)
    snprintf(error, TOOL_ERROR, "-%c: unknown option", found);
  else
    snprintf(error, TOOL_ERROR, "%.120s: unknown option", argument);
  return TOOL_WRONG;
}

/* True if an argument is an abbreviation of an option. getopt_long accepts abbreviations, but an
 * option that is added later can make them ambiguous. */
static bool is_abbreviated(const char *argument, const struct option *option) {
  size_t length = strlen(option->name);
  return strncmp(argument + 2, option->name, length) != 0 ||
         (argument[2 + length] && argument[2 + length] != '=');
}

enum tool_asked tool_parse(const struct tool *tool, int *argc, char **argv, void *values,
                           char error[TOOL_ERROR]) {
  struct option longs[ROWS];
  char letters[2 * ROWS + 4];
  int got, operands = 1;
  make_tables(tool, longs, letters);
  error[0] = '\0';
  opterr = optind = 0; /* getopt prints nothing, and starts at the first argument */
  for (;;) {
    int place = -1, from = optind > 0 ? optind : 1;
    got = getopt_long(*argc, argv, letters, longs, &place);
    if (got == -1)
      break;
    if (got == 'h' || got == 'v' || got == HELP || got == VERSION) {
      if (place < 0 || !is_abbreviated(argv[from], &longs[place]))
        return got == VERSION || got == 'v' ? TOOL_VERSION : TOOL_HELP;
      return report_bad_argument(argv[from], '?', 0, error);
    }
    if (got == 1 && tool->operands)
      argv[operands++] = optarg;
    else if (got == 1 || got == ':' || got == '?')
      return report_bad_argument(argv[from], got, optopt, error);
    else if (place >= 0 && is_abbreviated(argv[from], &longs[place]))
      return report_bad_argument(argv[from], '?', 0, error);
    else if (!set_option(find_option(tool, got), place >= 0, optarg, values, error))
      return TOOL_WRONG;
  }
  for (; optind < *argc; optind++) /* operands after -- */
    if (tool->operands)
      argv[operands++] = argv[optind];
    else
      return report_bad_argument(argv[optind], 1, 0, error);
  if (tool->operands)
    argv[ *argc = operands] = NULL;
  return TOOL_RUN;
}

/* --- Output ------------------------------------------------------------------------------------*/

enum { COLUMN = 24 }; /* the column in which an option's help text begins */

static void print_default(const struct tool_option *option, const void *values) {
  const void *field = (const char *)values + option->at;
  double value = option->kind == TOOL_COUNT   ? (double)*(const size_t *)field
                 : option->kind == TOOL_FLOAT ? (double)*(const float *)field
                                              : 0;
  if (value > 0 && is_in_range(option, value))
    printf("; default %g", value);
}

static void print_row(const struct tool_option *option, const void *defaults) {
  char left[64];
  int length = 0;
  if (option->letter)
    length += snprintf(left, sizeof left, "-%c%s", option->letter, option->name ? ", " : "");
  if (option->name)
    length += snprintf(left + length, sizeof left - (size_t)length, "--%s", option->name);
  if (option->argument)
    snprintf(left + length, sizeof left - (size_t)length, " %s", option->argument);
  printf("  %-*s ", COLUMN - 3, left);
  for (const char *line = option->help; line;) {
    int width = (int)strcspn(line, "\n");
    printf("%.*s", width, line);
    line = line[width] ? line + width + 1 : NULL;
    if (!line && defaults)
      print_default(option, defaults);
    printf("\n");
    if (line)
      printf("%*s", COLUMN, "");
  }
}

static void tool_print_help(const struct tool *tool) {
  static const struct tool_option own[] = {
      {.name = "help", .letter = 'h', .kind = TOOL_FLAG, .help = "print this text"},
      {.name = "version",
       .letter = 'v',
       .kind = TOOL_FLAG,
       .help = "print the version of the library"}};
  printf("usage: %s\n\n%s\n\n", tool->usage, tool->purpose);
  for (const struct tool_option *option = tool->options; option->kind;
       option = get_next_row(option))
    if (option->kind == TOOL_HEADING)
      printf("\n%s\n\n", option->help);
    else if (is_available(tool, option))
      print_row(option, tool->defaults);
  print_row(&own[0], NULL);
  print_row(&own[1], NULL);
  if (tool->notes)
    printf("\n%s\n", tool->notes);
}

void tool_print_error(const char *program, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fprintf(stderr, "%s: ", program);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
}

int tool_print_answer(const struct tool *tool, enum tool_asked asked, const char *error) {
  if (asked == TOOL_WRONG) {
    tool_print_error(tool->name, "%s; see %s --help", error, tool->name);
    return TOOL_USAGE;
  }
  if (asked == TOOL_HELP)
    tool_print_help(tool);
  else
    printf("%.*s %s\n", (int)strcspn(tool->name, " "), tool->name, onebit_version());
  return 0;
}
