/*
 * Command lines: tables of options, which parsing and --help share.
 */
#ifndef EXAMPLES_OPTIONS_H
#define EXAMPLES_OPTIONS_H

#include <stddef.h>

enum { MOST_PATHS = 64, OPTION_WORDS = 512 };

typedef struct paths {
  const char *path[MOST_PATHS];
  size_t count;
} paths_t;

typedef enum option_kind {
  OPTION_PATHS,  /* a paths_t: may be given several times */
  OPTION_PATH,   /* a const char * */
  OPTION_COUNT,  /* a size_t from `least` to `most`, or the word in `choices`: `special` */
  OPTION_REAL,   /* a float from `least` to `most` */
  OPTION_CHOICE, /* an int: the place of the word in `choices` */
  OPTION_FLAG    /* an int: 1 when the option is there; takes no value */
} option_kind_t;

typedef struct option {
  const char *name;
  option_kind_t kind;
  size_t offset; /* of the field in the struct of options */
  double least, most;
  const char *choices; /* words with | between; of a path what --help calls it */
  size_t special;
  const char *help; /* names the default where that is not a plain number */
} option_t;

/* COUNT_UNSET and REAL_UNSET as defaults: the default is found later, from the other options. */
#define COUNT_UNSET ((size_t)-2)
#define REAL_UNSET  (-1.0f)

typedef struct option_table {
  const char *title; /* for --help */
  const option_t *options;
  size_t count;
} option_table_t;

#define OPTION_TABLE(title, options)                                                               \
  { title, options, sizeof options / sizeof options[0] }

typedef struct command_line {
  const char *program, *purpose;
  const option_table_t *const *tables; /* ends with NULL */
  const void *defaults;                /* a struct of options */
} command_line_t;

/* Fills in the struct of options, which has the defaults already. Returns 0, or -1 with words that
 * name the option at fault and its value. */
int command_line_parse(const command_line_t *line, void *options, int argc, char **argv,
                       char words[OPTION_WORDS]);

void command_line_print_help(const command_line_t *line);

#endif
