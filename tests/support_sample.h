/*
 * Chooses the rows of a long table that a run walks: a share of them (ONEBIT_TEST_SHARE=5: a fifth)
 * that a seed shuffles (ONEBIT_TEST_SEED; tests/run has another each day). Every pair of values of
 * two dimensions that the table has is in it, as far as the share reaches; shares of a fifth and
 * more are widened until it is. The rest of the share is random. Needs no test framework.
 */
#ifndef ONEBIT_TESTS_SUPPORT_SAMPLE_H
#define ONEBIT_TESTS_SUPPORT_SAMPLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The values of a row: as many numbers as the table has dimensions and combinations, each small. */
typedef void sample_levels(const void *table, size_t row, size_t *levels);

struct sample_table {
  const char *name; /* one word; tables of different names have different samples */
  size_t rows;
  size_t dimensions;   /* of which each pair of values is met */
  size_t combinations; /* behind these: of which each value is met */
  size_t thinner;      /* one of so many rows even where all are asked for; 0: of all */
  sample_levels *levels;
  const void *table;
};

/* The rows to walk, in ascending order. The caller frees `rows`. */
struct sample {
  size_t count, *rows;
};
struct sample sample_of(const struct sample_table *table);

/* The same of a product of lists: row = v0 + size0 * (v1 + size1 * ...). Of fewer than three lists
 * each value is met. */
struct sample sample_product(const char *name, size_t thinner, const size_t *sizes, size_t lists);

/* Of a product that is too long to be listed, 4,000 rows that are drawn from it; and which entry of
 * each list a row has. */
struct sample sample_combinations(const char *name, size_t thinner, const size_t *sizes,
                                  size_t lists);
void sample_choices(const size_t *sizes, size_t lists, size_t row, size_t *choices);

/* The k-th entry to walk of a plain list, however long: one of each so many in a row. */
size_t sample_turn(size_t k);

/* True if entry `number` of a list of `count` is to be walked: one of each so many in a row, the
 * last of which may be fewer. */
bool sample_has(size_t number, size_t count);

/* One of how many cases is walked: ONEBIT_TEST_SHARE, or 1. */
size_t test_share(void);

/* True if short lists are thinned, too: not with a share of a fifth or more, as plain runs have. */
bool test_thins(void);

/* True if entry `number` of a short list is to be walked. However small the share, one of the
 * entries 1, 2 and 3 is walked, which in lists of group sizes are several ranks. */
bool test_wanted(size_t number);

/* The same of a table with rows: along its diagonals, so that every row and every column has its
 * turn; test_thins leaves a column of it. */
bool test_wanted_of(size_t row, size_t column);

#endif
