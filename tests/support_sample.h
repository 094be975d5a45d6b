/*
 * Chooses the rows of a long table that a run tests: a share of them (ONEBIT_TEST_SHARE=5: a fifth)
 * that a seed shuffles (ONEBIT_TEST_SEED; tests/run changes it daily). The share contains every
 * pair of values of two dimensions that the table has, as far as it reaches; shares of a fifth and
 * more are widened until it does. The rest of the share is random. Needs no test framework.
 */
#ifndef ONEBIT_TESTS_SUPPORT_SAMPLE_H
#define ONEBIT_TESTS_SUPPORT_SAMPLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Writes the values of a row: one small number for each dimension and combination of the table. */
typedef void sample_levels(const void *table, size_t row, size_t *levels);

struct sample_table {
  const char *name; /* one word; tables of different names have different samples */
  size_t rows;
  size_t dimensions;   /* every pair of values of two dimensions is in the sample */
  size_t combinations; /* dimensions after these, each value of which is in the sample */
  size_t thinner;      /* divides the share, also that of a full run; 0: 1 */
  sample_levels *levels;
  const void *table;
};

/* The rows to test, in ascending order. The caller frees `rows`. */
struct sample {
  size_t count, *rows;
};
struct sample sample_of(const struct sample_table *table);

/* Samples a product of lists: row = v0 + size0 * (v1 + size1 * ...). With one or two lists, the
 * sample has each of their values, but not each pair. */
struct sample sample_product(const char *name, size_t thinner, const size_t *sizes, size_t lists);

/* Draws 4,000 rows from a product that is too long to be listed; sample_choices says which entry of
 * each list a row has. */
struct sample sample_combinations(const char *name, size_t thinner, const size_t *sizes,
                                  size_t lists);
void sample_choices(const size_t *sizes, size_t lists, size_t row, size_t *choices);

/* Returns the k-th entry of a plain list of any length: each run takes an equal share of the list
 * in turn. */
size_t sample_entry(size_t k);

/* True if entry `number` of a list of `count` is to be tested: one of every test_share() in a row,
 * of which the last group may be shorter. */
bool sample_has(size_t number, size_t count);

/* Returns the share: one of so many cases is tested (ONEBIT_TEST_SHARE, or 1). */
size_t test_share(void);

/* True if short lists are thinned too; a share of a fifth or more, as in plain runs, does not thin
 * them. */
bool test_thins(void);

/* True if entry `number` of a short list is to be tested. One of the entries 1, 2 and 3 always is:
 * they are groups of several ranks in lists of group sizes. */
bool test_wanted(size_t number);

/* True for entries of a table with rows, along its diagonals, so that every row and every column is
 * tested; with test_thins, for the entries of one column. */
bool test_wanted_of(size_t row, size_t column);

#endif
