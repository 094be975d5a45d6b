/* Chooses samples of long tables. Rows that cover pairs of values are chosen greedily from a
 * shuffled table; the other rows are random. */
#include "tests/support_sample.h"

#include <stdio.h>
#include <stdlib.h>

/* The largest N for which a sample of one Nth of the rows is enlarged until it covers all pairs. */
#define WIDENED 5

static size_t read_number(const char *variable, size_t otherwise) {
  const char *text = getenv(variable);
  long long number = text ? strtoll(text, NULL, 10) : 0;
  return number > 0 ? (size_t)number : otherwise;
}

size_t test_share(void) { return read_number("ONEBIT_TEST_SHARE", 1); }

static size_t sample_seed(void) { return read_number("ONEBIT_TEST_SEED", 0); }

bool test_thins(void) { return test_share() > WIDENED; }

bool test_wanted(size_t number) {
  return !test_thins() || number % test_share() == 1 + sample_seed() % 3;
}

bool test_wanted_of(size_t row, size_t column) {
  return test_thins() ? test_wanted(column) : (row + column + sample_seed()) % test_share() == 0;
}

/* --- Random numbers: splitmix64 */

static uint64_t mix_bits(uint64_t word) {
  word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9u;
  word = (word ^ word >> 27) * 0x94d049bb133111ebu;
  return word ^ word >> 31;
}

static size_t draw_number(uint64_t *state, size_t limit) {
  *state += 0x9e3779b97f4a7c15u;
  return (size_t)(mix_bits(*state) % limit);
}

static size_t draw_from_group(size_t k, size_t limit) {
  uint64_t state = mix_bits(sample_seed() + 1) + k;
  return k * test_share() + draw_number(&state, limit);
}

size_t sample_entry(size_t k) { return draw_from_group(k, test_share()); }

bool sample_has(size_t number, size_t count) {
  const size_t turn = number / test_share(), left = count - turn * test_share();
  return number == draw_from_group(turn, left < test_share() ? left : test_share());
}

/* --- A table that is being sampled */

/* Flags of two dimensions: one flag for each pair of values. If both are the same dimension, one
 * flag for each value. */
struct pairing {
  size_t first, second, width;
  unsigned char *flags;
};

enum { ABSENT, PRESENT, MET };

struct work {
  const struct sample_table *table;
  size_t each, pairings_count, chosen_count;
  size_t *levels; /* [rows][each] */
  size_t *order;  /* the rows, shuffled */
  size_t *gains;  /* [rows]: upper bounds of the number of pairs that a row would add */
  bool *chosen;
  struct pairing *pairings;
};

static void *allocate_zeros(size_t count, size_t size) {
  void *memory = calloc(count ? count : 1, size);
  if (!memory)
    abort();
  return memory;
}

static unsigned char *pair_flag(const struct work *work, const struct pairing *pairing,
                                size_t row) {
  const size_t *levels = work->levels + row * work->each;
  return &pairing->flags[levels[pairing->first] * pairing->width + levels[pairing->second]];
}

static size_t count_values(const struct work *work, size_t dimension) {
  size_t most = 0;
  for (size_t row = 0; row < work->table->rows; row++)
    if (work->levels[row * work->each + dimension] > most)
      most = work->levels[row * work->each + dimension];
  return most + 1;
}

static void add_pairing(struct work *work, size_t first, size_t second) {
  struct pairing *pairing = &work->pairings[work->pairings_count++];
  *pairing =
      (struct pairing){.first = first, .second = second, .width = count_values(work, second)};
  pairing->flags = allocate_zeros(count_values(work, first) * pairing->width, 1);
  for (size_t row = 0; row < work->table->rows; row++)
    *pair_flag(work, pairing, row) = PRESENT;
}

static void add_pairings(struct work *work) {
  work->pairings = allocate_zeros(work->each * work->each, sizeof *work->pairings);
  for (size_t a = 0; a < work->table->dimensions; a++)
    for (size_t b = a + 1; b < work->table->dimensions; b++)
      add_pairing(work, a, b);
  for (size_t a = work->table->dimensions; a < work->each; a++)
    add_pairing(work, a, a);
}

static void shuffle_rows(struct work *work) {
  uint64_t state = sample_seed();
  for (const char *letter = work->table->name; *letter; letter++)
    state = mix_bits(state + (unsigned char)*letter + 1);
  for (size_t k = 0; k < work->table->rows; k++) {
    size_t other = draw_number(&state, k + 1);
    work->order[k] = work->order[other];
    work->order[other] = k;
  }
}

static struct work create_work(const struct sample_table *table) {
  struct work work = {.table = table, .each = table->dimensions + table->combinations};
  work.levels = allocate_zeros(table->rows * work.each, sizeof *work.levels);
  work.order = allocate_zeros(table->rows, sizeof *work.order);
  work.gains = allocate_zeros(table->rows, sizeof *work.gains);
  work.chosen = allocate_zeros(table->rows, sizeof *work.chosen);
  for (size_t row = 0; row < table->rows; row++)
    table->levels(table->table, row, work.levels + row * work.each);
  add_pairings(&work);
  shuffle_rows(&work);
  return work;
}

static void destroy_work(struct work *work) {
  for (size_t k = 0; k < work->pairings_count; k++)
    free(work->pairings[k].flags);
  free(work->pairings);
  free(work->levels);
  free(work->order);
  free(work->gains);
  free(work->chosen);
}

/* --- Choosing */

static size_t count_gain(const struct work *work, size_t row) {
  size_t gain = 0;
  for (size_t k = 0; k < work->pairings_count; k++)
    gain += *pair_flag(work, &work->pairings[k], row) == PRESENT;
  return gain;
}

static void choose_row(struct work *work, size_t row) {
  for (size_t k = 0; k < work->pairings_count; k++)
    *pair_flag(work, &work->pairings[k], row) = MET;
  work->chosen[row] = true;
  work->chosen_count++;
}

/* Chooses rows one by one, always the row that adds the most pairs. The number of pairs that a row
 * would add never increases, so older numbers are upper bounds. */
static void choose_covering_rows(struct work *work, size_t limit) {
  for (size_t row = 0; row < work->table->rows; row++)
    work->gains[row] = work->pairings_count;
  for (size_t gain = work->pairings_count; gain > 0; gain--)
    for (size_t k = 0; k < work->table->rows && work->chosen_count < limit; k++) {
      size_t row = work->order[k];
      if (work->chosen[row] || work->gains[row] < gain)
        continue;
      work->gains[row] = count_gain(work, row);
      if (work->gains[row] == gain)
        choose_row(work, row);
    }
}

static void choose_further_rows(struct work *work, size_t limit) {
  for (size_t k = 0; k < work->table->rows && work->chosen_count < limit; k++)
    if (!work->chosen[work->order[k]])
      choose_row(work, work->order[k]);
}

static struct sample collect_sample(const struct work *work) {
  struct sample sample = {0, allocate_zeros(work->chosen_count, sizeof *sample.rows)};
  for (size_t row = 0; row < work->table->rows; row++)
    if (work->chosen[row])
      sample.rows[sample.count++] = row;
  return sample;
}

/* --- The record of a run's samples: one line for each table, which tests/run adds up */

static void append_account(const struct work *work) {
  const char *path = getenv("ONEBIT_TEST_SAMPLES");
  FILE *file = path ? fopen(path, "a") : NULL;
  size_t there = 0, met = 0;
  if (!file)
    return;
  for (size_t k = 0; k < work->pairings_count; k++) {
    const struct pairing *pairing = &work->pairings[k];
    size_t all = count_values(work, pairing->first) * pairing->width;
    for (size_t at = 0; at < all; at++) {
      there += pairing->flags[at] != ABSENT;
      met += pairing->flags[at] == MET;
    }
  }
  fprintf(file, "%s %zu %zu %zu %zu\n", work->table->name, work->chosen_count, work->table->rows,
          met, there);
  fclose(file);
}

struct sample sample_of(const struct sample_table *table) {
  struct work work = create_work(table);
  size_t share = test_share() * (table->thinner ? table->thinner : 1);
  size_t limit = (table->rows + share - 1) / share;
  choose_covering_rows(&work, test_thins() ? limit : table->rows);
  choose_further_rows(&work, limit);
  struct sample sample = collect_sample(&work);
  append_account(&work);
  destroy_work(&work);
  return sample;
}

struct product {
  const size_t *sizes;
  size_t lists;
};

static void product_levels(const void *table, size_t row, size_t *levels) {
  const struct product *product = table;
  for (size_t k = 0; k < product->lists; k++) {
    levels[k] = row % product->sizes[k];
    row /= product->sizes[k];
  }
}

struct sample sample_product(const char *name, size_t thinner, const size_t *sizes, size_t lists) {
  const struct product product = {sizes, lists};
  struct sample_table table = {
      .name = name, .rows = 1, .thinner = thinner, .levels = product_levels, .table = &product};
  *(lists > 2 ? &table.dimensions : &table.combinations) = lists;
  for (size_t k = 0; k < lists; k++)
    table.rows *= sizes[k];
  return sample_of(&table);
}

void sample_choices(const size_t *sizes, size_t lists, size_t row, size_t *choices) {
  uint64_t state = mix_bits(row + 1);
  for (size_t k = 0; k < lists; k++)
    choices[k] = draw_number(&state, sizes[k]);
}

static void combination_levels(const void *table, size_t row, size_t *levels) {
  const struct product *product = table;
  sample_choices(product->sizes, product->lists, row, levels);
}

struct sample sample_combinations(const char *name, size_t thinner, const size_t *sizes,
                                  size_t lists) {
  const struct product product = {sizes, lists};
  const struct sample_table table = {.name = name,
                                     .rows = 4000,
                                     .dimensions = lists,
                                     .thinner = thinner,
                                     .levels = combination_levels,
                                     .table = &product};
  return sample_of(&table);
}
