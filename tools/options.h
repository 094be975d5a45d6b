/* Every program describes its command line by a table of options: one function reads the arguments,
 * another prints --help. Nothing runs before the whole line is read; the first error names the
 * option, its value and what was expected: "--ranks=0: expected an integer from 1 to 64". */
#ifndef TOOLS_OPTIONS_H
#define TOOLS_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>

enum tool_option_kind {
  TOOL_END,     /* the last row, all zeros */
  TOOL_HEADING, /* no option: a paragraph of --help */
  TOOL_ROWS,    /* the last row: the rows of another table, `rows`, follow */
  TOOL_FLAG,    /* bool: sets true; takes no value */
  TOOL_INTEGER, /* int */
  TOOL_COUNT,   /* size_t: an integer */
  TOOL_SIZE,    /* size_t: an integer, with K, M or G for powers of 1024: 64K */
  TOOL_REAL,    /* double, with K, M, G or B for powers of 1000: 340M, 0.5 */
  TOOL_FLOAT,   /* float: 1e-4 */
  TOOL_RATE,    /* double, bytes a second: 300mbit, 1gbit */
  TOOL_SECONDS, /* double: 0.250, 250ms, 50us */
  TOOL_CHOICE,  /* int: the place of the word in `names` */
  TOOL_TEXT,    /* const char * */
  TOOL_CALL,    /* `read` reads the value; without `argument` there is none, and it gets NULL */
};

/* Rows are written with a designator for at least one field, so that the others may be left out:
 * {"ranks", 0, TOOL_INTEGER, AT(ranks), "N", "how many", .low = 1, .high = 64}. */

/* Reads a value. Returns NULL, or the fault: "expected N,N,..., each at least 1". */
typedef const char *tool_read(void *values, const char *value);

struct tool_option {
  const char *name; /* the long one, NULL: none */
  char letter;      /* the short one, 0: none */
  enum tool_option_kind kind;
  size_t at;                /* offset of the field in the program's struct of values */
  const char *argument;     /* the name of the value in --help */
  const char *help;         /* lines of at most 76 columns */
  double low, high;         /* the range of a number; high 0: up to what the field can hold */
  const char *const *names; /* the words of a choice, with a NULL at the end */
  tool_read *read;
  unsigned groups; /* the subcommands that have it, as bits; 0: all */
  const struct tool_option *rows;
};

struct tool {
  const char *name;    /* "onebit-tune", in errors and --version */
  const char *usage;   /* the text after "usage: " */
  const char *purpose; /* paragraphs before the options */
  const struct tool_option *options;
  const char *notes;    /* paragraphs after the options, or NULL */
  unsigned group;       /* the subcommand's bit, where rows have groups */
  bool operands;        /* accepts arguments that are not options */
  const void *defaults; /* a struct of values: --help prints those of TOOL_COUNT and TOOL_FLOAT that
                           are in their range and not 0. NULL: none */
};

enum tool_asked { TOOL_RUN, TOOL_HELP, TOOL_VERSION, TOOL_WRONG };
enum { TOOL_ERROR = 320, TOOL_USAGE = 2 /* exit status of TOOL_WRONG */ };

/* Reads argv[1..] into the program's struct of values, which has the defaults. Operands are moved
 * to argv[1..*argc - 1]; arguments of a tool without operands stay as they are. `error` is filled
 * in with TOOL_WRONG. --help and --version end the reading. Long names are not abbreviated. */
enum tool_asked tool_parse(const struct tool *tool, int *argc, char **argv, void *values,
                           char error[TOOL_ERROR]);

/* Prints help or version on stdout, or the error on stderr, instead of running. Returns the exit
 * status. */
int tool_print_answer(const struct tool *tool, enum tool_asked asked, const char *error);

/* Prints "PROGRAM: " and a line to stderr. */
void tool_print_error(const char *program, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* --- Parts, for functions that read a value of their own */

/* Reads the integer that a text begins with, with K, M or G behind it where `suffix` allows;
 * returns the end of what was read, or NULL: there is none, or it is too large. */
const char *tool_read_integer(const char *text, bool suffix, size_t *value);

/* Reads a number with its unit, as the kinds TOOL_REAL, TOOL_RATE and TOOL_SECONDS have it. */
bool tool_read_quantity(const char *text, enum tool_option_kind kind, double *value);

/* Reads N,N,...: at most `capacity` integers in a range; returns their number, 0: the text is not
 * that. */
size_t tool_read_list(const char *text, size_t low, size_t high, size_t *values, size_t capacity);

/* Finds a word of `length` bytes among names that end with NULL; returns its place, -1: it is not
 * there. */
int tool_find_name(const char *word, size_t length, const char *const *names);

#endif
