/* The command lines of options.h. */
#include "examples/options.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int refuse(char *words, const option_t *option, const char *value, const char *why) {
  snprintf(words, OPTION_WORDS, "--%s %.100s: %.300s", option->name, value, why);
  return -1;
}

static int refuse_range(char *words, const option_t *option, const char *value) {
  char why[100];
  snprintf(why, sizeof why, "not a number from %.10g to %.10g%s%s", option->least, option->most,
           option->choices ? ", nor " : "", option->choices ? option->choices : "");
  return refuse(words, option, value, why);
}

/* The place of the word among the choices, or -1. */
static int place(const char *choices, const char *word) {
  const size_t length = strlen(word);
  for (int i = 0; choices; i++) {
    const char *end = strchr(choices, '|');
    if (length > 0 && strncmp(choices, word, length) == 0 && choices[length] == (end ? '|' : '\0'))
      return i;
    choices = end ? end + 1 : NULL;
  }
  return -1;
}

static int set_count(const option_t *option, size_t *field, const char *value, char *words) {
  char *end;
  if (place(option->choices, value) == 0) {
    *field = option->special;
    return 0;
  }
  errno = 0;
  const unsigned long long number = strtoull(value, &end, 10);
  if (*value < '0' || *value > '9' || *end || errno || (double)number < option->least ||
      (double)number > option->most)
    return refuse_range(words, option, value);
  *field = (size_t)number;
  return 0;
}

static int set_real(const option_t *option, float *field, const char *value, char *words) {
  char *end;
  const double number = strtod(value, &end);
  if (end == value || *end || !(number >= option->least && number <= option->most))
    return refuse_range(words, option, value);
  *field = (float)number;
  return 0;
}

static int set_choice(const option_t *option, int *field, const char *value, char *words) {
  const int choice = place(option->choices, value);
  if (choice < 0) {
    char why[100];
    snprintf(why, sizeof why, "not one of %s", option->choices);
    return refuse(words, option, value, why);
  }
  *field = choice;
  return 0;
}

static int add_path(const option_t *option, paths_t *paths, const char *value, char *words) {
  if (paths->count == MOST_PATHS)
    return refuse(words, option, value, "too many; give a directory");
  paths->path[paths->count++] = value;
  return 0;
}

static int set(const option_t *option, void *options, const char *value, char *words) {
  void *field = (char *)options + option->offset;
  switch (option->kind) {
  case OPTION_PATHS:
    return add_path(option, field, value, words);
  case OPTION_PATH:
    *(const char **)field = value;
    return 0;
  case OPTION_COUNT:
    return set_count(option, field, value, words);
  case OPTION_REAL:
    return set_real(option, field, value, words);
  case OPTION_CHOICE:
    return set_choice(option, field, value, words);
  case OPTION_FLAG:
    break;
  }
  *(int *)field = 1;
  return 0;
}

/* The option that --NAME or --NAME=VALUE names. */
static const option_t *find(const command_line_t *line, const char *argument) {
  const size_t length = strncmp(argument, "--", 2) == 0 ? strcspn(argument + 2, "=") : 0;
  for (const option_table_t *const *table = line->tables; *table; table++)
    for (size_t i = 0; i < (*table)->count; i++) {
      const option_t *option = &(*table)->options[i];
      if (length == strlen(option->name) && strncmp(argument + 2, option->name, length) == 0)
        return option;
    }
  return NULL;
}

int command_line_parse(const command_line_t *line, void *options, int argc, char **argv,
                       char words[OPTION_WORDS]) {
  for (int i = 1; i < argc; i++) {
    const option_t *option = find(line, argv[i]);
    const char *value = strchr(argv[i], '=');
    if (!option) {
      snprintf(words, OPTION_WORDS, "%.100s: unknown option; --help lists them", argv[i]);
      return -1;
    }
    if (option->kind == OPTION_FLAG ? value != NULL : !value && i + 1 == argc)
      return refuse(words, option, value ? value : "",
                    value ? "takes no value" : "a value is missing");
    if (option->kind != OPTION_FLAG)
      value = value ? value + 1 : argv[++i];
    if (set(option, options, value, words) != 0)
      return -1;
  }
  return 0;
}

/* --- Help --------------------------------------------------------------------------------------*/

static void print_default(const option_t *option, const void *defaults) {
  const void *field = (const char *)defaults + option->offset;
  if (option->kind == OPTION_REAL && *(const float *)field > 0.0f)
    printf("; default %g", (double)*(const float *)field);
  if (option->kind != OPTION_COUNT)
    return;
  const size_t count = *(const size_t *)field;
  if (count != 0 && count != COUNT_UNSET)
    printf("; default %zu", count);
}

static void print_option(const option_t *option, const void *defaults) {
  static const char *const values[] = {"", "", "N", "X", "", ""};
  char left[96];
  snprintf(left, sizeof left, "--%s %s%s%s", option->name, values[option->kind],
           option->kind == OPTION_COUNT && option->choices ? "|" : "",
           option->choices ? option->choices : "");
  printf("  %-30s %s", left, option->help);
  print_default(option, defaults);
  printf("\n");
}

void command_line_print_help(const command_line_t *line) {
  printf("%s: %s\n", line->program, line->purpose);
  for (const option_table_t *const *table = line->tables; *table; table++) {
    printf("\n%s\n", (*table)->title);
    for (size_t i = 0; i < (*table)->count; i++)
      print_option(&(*table)->options[i], line->defaults);
  }
}
