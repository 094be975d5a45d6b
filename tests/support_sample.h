/*
 * Chooses which rows of a long table of test cases a run tests. It tests one Nth of the rows
 * (ONEBIT_TEST_SHARE=N), in an order shuffled by a seed (ONEBIT_TEST_SEED; tests/run changes it
 * daily). If the sample is large enough, it covers every pair of values of two dimensions that
 * occurs in the table. A sample of a fifth of the rows or more is enlarged until it does. Its other
 * rows are random. The file needs no test framework.
 */
#ifndef ONEBIT_TESTS_SUPPORT_SAMPLE_H
#define ONEBIT_TESTS_SUPPORT_SAMPLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Writes the values of a row: one small number for each dimension and combination of the table. */
typedef void sample_levels(const void *table, size_t row, size_t *levels);

struct sample_table {
  const char *name; /* one word; tables with different names have different samples */
  size_t rows;
  size_t dimensions;   /* the sample covers every pair of values of two dimensions */
  size_t combinations; /* further dimensions; the sample covers only each of their values */
  size_t thinner;      /* one row in N * thinner is tested; 0 means 1 */
  sample_levels *levels;
  const void *table;
};

/* The rows to test, in ascending order. The caller frees `rows`. */
struct sample {
  size_t count, *rows;
};
struct sample sample_of(const struct sample_table *table);

/* Samples a product of lists: row = v0 + size0 * (v1 + size1 * ...). With one or two lists, the
 * sample covers each of their values, but not each pair. */
struct sample sample_product(const char *name, size_t thinner, const size_t *sizes, size_t lists);

/* Samples a product of lists that is too long to be listed, from 4,000 random rows of it.
 * sample_choices gets the index of a row's entry in each list. */
struct sample sample_combinations(const char *name, size_t thinner, const size_t *sizes,
                                  size_t lists);
void sample_choices(const size_t *sizes, size_t lists, size_t row, size_t *choices);

/* Returns the index of the entry to test in the k-th group of test_share() consecutive entries of a
 * list. The seed determines the entry. */
size_t sample_entry(size_t k);

/* True if entry `number` of a list of `count` entries is to be tested. In each group of
 * test_share() consecutive entries one is tested; the last group may be shorter. */
bool sample_has(size_t number, size_t count);

/* Returns ONEBIT_TEST_SHARE, or 1 if it is not set: one case in this many is tested. */
size_t test_share(void);

/* True if short lists are thinned, too. If a fifth of the cases or more is tested, as in plain
 * runs, short lists are tested in full. */
bool test_thins(void);

/* True if entry `number` of a short list is to be tested. Of the entries 1, 2 and 3 at least one
 * always is, because in lists of group sizes these are groups of several ranks. */
bool test_wanted(size_t number);

/* True if this entry of a table is to be tested. The entries to test are on diagonals, so that
 * every row and every column is tested. If test_thins() is true, they are the entries of one
 * column. */
bool test_wanted_of(size_t row, size_t column);

#endif
