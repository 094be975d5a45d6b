/* Every program describes its command line by a table of options. One function reads the arguments
 * by the table, another prints --help. Nothing runs before the whole line is read. The first error
 * names the option, its value and what was expected: "--ranks=0: expected an integer from 1 to
 * 64". */
#ifndef TOOLS_OPTIONS_H
#define TOOLS_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>

enum tool_option_kind {
  TOOL_END,     /* the last row, all zeros */
  TOOL_HEADING, /* not an option: a paragraph of --help */
  TOOL_ROWS,    /* the last row: the rows of another table, `rows`, follow */
  TOOL_FLAG,    /* bool: sets true; takes no value */
  TOOL_INTEGER, /* int */
  TOOL_COUNT,   /* size_t: an integer */
  TOOL_SIZE,    /* size_t: an integer, with K, M or G for powers of 1024: 64K */
  TOOL_REAL,    /* double, with K, M, G or B for powers of 1000: 340M, 0.5 */
  TOOL_FLOAT,   /* float: 1e-4 */
  TOOL_RATE,    /* double, bytes a second: 300mbit, 1gbit */
  TOOL_SECONDS, /* double: 0.250, 250ms, 50us */
  TOOL_CHOICE,  /* int: the index of the word in `names` */
  TOOL_TEXT,    /* const char * */
  TOOL_CALL,    /* `read` reads the value; it gets NULL if the option has no `argument` */
};

/* A row has a designator for at least one field, so that other fields may be left out: {"ranks", 0,
 * TOOL_INTEGER, AT(ranks), "N", "how many", .low = 1, .high = 64}. */

/* Reads a value. Returns NULL, or what was expected: "expected N,N,..., each at least 1". */
typedef const char *tool_read(void *values, const char *value);

struct tool_option {
  const char *name; /* the long name; NULL: none */
  char letter;      /* the short name; 0: none */
  enum tool_option_kind kind;
  size_t at;                /* offset of the field in the program's struct of values */
  const char *argument;     /* the name of the value in --help */
  const char *help;         /* lines of at most 76 columns */
  double low, high;         /* the range of a number; high 0: up to what the field can hold */
  const char *const *names; /* the words of a choice, with a NULL at the end */
  tool_read *read;
  unsigned groups; /* bits of the subcommands that have the option; 0: all */
  const struct tool_option *rows;
};

struct tool {
  const char *name;    /* "onebit-tune", in errors and --version */
  const char *usage;   /* the text after "usage: " */
  const char *purpose; /* paragraphs before the options */
  const struct tool_option *options;
  const char *notes;    /* paragraphs after the options, or NULL */
  unsigned group;       /* the subcommand's bit, if rows have groups */
  bool operands;        /* accepts arguments that are not options */
  const void *defaults; /* a struct of values: --help prints those of TOOL_COUNT and TOOL_FLOAT that
                         * are in their range and not 0. NULL: none */
};

enum tool_asked { TOOL_RUN, TOOL_HELP, TOOL_VERSION, TOOL_WRONG };
enum { TOOL_ERROR = 320, TOOL_USAGE = 2 /* exit status of TOOL_WRONG */ };

/* Reads argv[1..] into the program's struct of values, which has the defaults. Operands are moved
 * to argv[1..*argc - 1]; if the tool takes no operands, arguments stay as they are. With
 * TOOL_WRONG, `error` is filled in. The reading ends at --help or --version. Long names can not be
 * abbreviated. */
enum tool_asked tool_parse(const struct tool *tool, int *argc, char **argv, void *values,
                           char error[TOOL_ERROR]);

/* Prints the help or the version on stdout, or the error on stderr; the caller then exits. Returns
 * the exit status. */
int tool_print_answer(const struct tool *tool, enum tool_asked asked, const char *error);

/* Prints "PROGRAM: " and a line to stderr. */
void tool_print_error(const char *program, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* --- Parts, for functions that read special values */

/* Reads the integer at the beginning of a text; if `suffix`, K, M or G may follow it. Returns the
 * end of the part that was read, or NULL if the text has no integer or a too large one. */
const char *tool_read_integer(const char *text, bool suffix, size_t *value);

/* Reads a number with its unit, in the form of TOOL_REAL, TOOL_RATE or TOOL_SECONDS. */
bool tool_read_quantity(const char *text, enum tool_option_kind kind, double *value);

/* Reads N,N,...: at most `capacity` integers in a range. Returns their number, or 0 if the text is
 * no such list. */
size_t tool_read_list(const char *text, size_t low, size_t high, size_t *values, size_t capacity);

/* Finds a word of `length` bytes among names that end with NULL. Returns its index, or -1. */
int tool_find_name(const char *word, size_t length, const char *const *names);

#endif
