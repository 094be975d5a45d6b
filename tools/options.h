/* Every program describes its command line by a table of options. One function reads the arguments
 * by this table, another prints --help from it. A program reads all arguments before it does
 * anything else. Only the first error is reported, with the option, its value and what was
 * expected: "--ranks=0: expected an integer from 1 to 64". */
#ifndef TOOLS_OPTIONS_H
#define TOOLS_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>

enum tool_option_kind {
  TOOL_END,     /* ends the table; a row of zeros */
  TOOL_HEADING, /* not an option: `help` is a paragraph of --help */
  TOOL_ROWS,    /* ends the table, which continues with the table `rows` */
  TOOL_FLAG,    /* bool: set to true; the option takes no value */
  TOOL_INTEGER, /* int */
  TOOL_COUNT,   /* size_t: an integer */
  TOOL_SIZE,    /* size_t: an integer, with K, M or G for powers of 1024: 64K */
  TOOL_REAL,    /* double, with K, M, G or B for powers of 1000: 340M, 0.5 */
  TOOL_FLOAT,   /* float: 1e-4 */
  TOOL_RATE,    /* double, in bytes per second: 300mbit, 1gbit */
  TOOL_SECONDS, /* double, in seconds: 0.250, 250ms, 50us */
  TOOL_CHOICE,  /* int: the index of the word in `names` */
  TOOL_TEXT,    /* const char * */
  TOOL_CALL,    /* `read` reads the value, which is NULL if the option has no `argument` */
};

/* A row names at least one field, such as .low: without a designator, gcc warns of fields that are
 * left out. {"ranks", 0, TOOL_INTEGER, AT(ranks), "N", "how many", .low = 1, .high = 64}. */

/* Reads a value. Returns NULL if the value is valid, or else the end of the error message:
 * "expected N,N,..., each at least 1". */
typedef const char *tool_read(void *values, const char *value);

struct tool_option {
  const char *name; /* the long name; NULL: none */
  char letter;      /* the short name; 0: none */
  enum tool_option_kind kind;
  size_t at;                /* offset of the field in the program's struct of values */
  const char *argument;     /* the name of the value in --help */
  const char *help;         /* lines of at most 76 columns */
  double low, high;         /* the range of a number; high 0: the largest value of the field */
  const char *const *names; /* the names of a choice, with a NULL at the end */
  tool_read *read;
  unsigned groups; /* bits of the subcommands that have the option; 0: all have it */
  const struct tool_option *rows;
};

struct tool {
  const char *name;    /* "onebit-tune", in errors and --version */
  const char *usage;   /* the text after "usage: " */
  const char *purpose; /* paragraphs before the options */
  const struct tool_option *options;
  const char *notes;    /* paragraphs after the options, or NULL */
  unsigned group;       /* the bits of this subcommand, if rows have groups */
  bool operands;        /* accepts arguments that are not options */
  const void *defaults; /* a struct of values: --help prints the default of each TOOL_COUNT and
                         * TOOL_FLOAT, unless it is 0 or out of range. NULL: no defaults */
};

enum tool_asked { TOOL_RUN, TOOL_HELP, TOOL_VERSION, TOOL_WRONG };
enum { TOOL_ERROR = 320, TOOL_USAGE = 2 /* exit status of TOOL_WRONG */ };

/* Reads argv[1..] into the program's struct of values, in which the caller has stored the defaults.
 * If the tool takes operands, moves them to argv[1..*argc - 1]. If the result is TOOL_WRONG,
 * `error` has the message. Arguments after --help or --version are not read. Long names cannot be
 * abbreviated. */
enum tool_asked tool_parse(const struct tool *tool, int *argc, char **argv, void *values,
                           char error[TOOL_ERROR]);

/* Prints the help or the version on stdout, or the error on stderr. Returns the status with which
 * the caller then exits. */
int tool_print_answer(const struct tool *tool, enum tool_asked asked, const char *error);

/* Prints "PROGRAM: " and a message as one line on stderr. */
void tool_print_error(const char *program, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* --- Parts, for functions that read special values */

/* Reads the integer at the beginning of a text; if `suffix`, K, M or G may follow it. Returns the
 * end of the part that was read, or NULL if the text has no integer or a too large one. */
const char *tool_read_integer(const char *text, bool suffix, size_t *value);

/* Reads a number with its unit, in the form of TOOL_REAL, TOOL_RATE or TOOL_SECONDS. */
bool tool_read_quantity(const char *text, enum tool_option_kind kind, double *value);

/* Reads a list N,N,... of at most `capacity` integers from `low` to `high`. Returns the number of
 * integers, or 0 if the text is no such list. */
size_t tool_read_list(const char *text, size_t low, size_t high, size_t *values, size_t capacity);

/* Finds a word of `length` bytes in a list of names that ends with NULL. Returns its index, or
 * -1. */
int tool_find_name(const char *word, size_t length, const char *const *names);

#endif
