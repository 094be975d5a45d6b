/* Samples of long tables: greedy covering of pairs on a seeded shuffle, then a random rest. */
#include "tests/support_sample.h"

#include <stdio.h>
#include <stdlib.h>

/* The largest N of which a share 1/N is widened until all pairs are met. */
#define WIDENED 5

static size_t number_of(const char *variable, size_t otherwise) {
  const char *text = getenv(variable);
  long long number = text ? strtoll(text, NULL, 10) : 0;
  return number > 0 ? (size_t)number : otherwise;
}

size_t test_share(void) { return number_of("ONEBIT_TEST_SHARE", 1); }

static size_t seed(void) { return number_of("ONEBIT_TEST_SEED", 0); }

bool test_thins(void) { return test_share() > WIDENED; }

bool test_wanted(size_t number) { return !test_thins() || number % test_share() == 1 + seed() % 3; }

bool test_wanted_of(size_t row, size_t column) {
  return test_thins() ? test_wanted(column) : (row + column + seed()) % test_share() == 0;
}

/* --- Random numbers: splitmix64 */

static uint64_t mixed(uint64_t word) {
  word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9u;
  word = (word ^ word >> 27) * 0x94d049bb133111ebu;
  return word ^ word >> 31;
}

static size_t drawn(uint64_t *state, size_t limit) {
  *state += 0x9e3779b97f4a7c15u;
  return (size_t)(mixed(*state) % limit);
}

static size_t turn_of(size_t k, size_t limit) {
  uint64_t state = mixed(seed() + 1) + k;
  return k * test_share() + drawn(&state, limit);
}

size_t sample_turn(size_t k) { return turn_of(k, test_share()); }

bool sample_has(size_t number, size_t count) {
  const size_t turn = number / test_share(), left = count - turn * test_share();
  return number == turn_of(turn, left < test_share() ? left : test_share());
}

/* --- A table that is being sampled */

/* Two dimensions, or one twice, with a flag for each pair of their values. */
struct pairing {
  size_t first, second, width;
  unsigned char *flags;
};

enum { ABSENT, PRESENT, MET };

struct work {
  const struct sample_table *table;
  size_t each, pairings_count, chosen_count;
  size_t *levels; /* `each` a row */
  size_t *order;  /* the rows, shuffled */
  size_t *gains;  /* of each row: pairs that it would add, at most */
  bool *chosen;
  struct pairing *pairings;
};

static void *zeros(size_t count, size_t size) {
  void *memory = calloc(count ? count : 1, size);
  if (!memory)
    abort();
  return memory;
}

static unsigned char *flag_of(const struct work *work, const struct pairing *pairing, size_t row) {
  const size_t *levels = work->levels + row * work->each;
  return &pairing->flags[levels[pairing->first] * pairing->width + levels[pairing->second]];
}

static size_t values_of(const struct work *work, size_t dimension) {
  size_t most = 0;
  for (size_t row = 0; row < work->table->rows; row++)
    if (work->levels[row * work->each + dimension] > most)
      most = work->levels[row * work->each + dimension];
  return most + 1;
}

static void pair(struct work *work, size_t first, size_t second) {
  struct pairing *pairing = &work->pairings[work->pairings_count++];
  *pairing = (struct pairing){.first = first, .second = second, .width = values_of(work, second)};
  pairing->flags = zeros(values_of(work, first) * pairing->width, 1);
  for (size_t row = 0; row < work->table->rows; row++)
    *flag_of(work, pairing, row) = PRESENT;
}

static void pair_all(struct work *work) {
  work->pairings = zeros(work->each * work->each, sizeof *work->pairings);
  for (size_t a = 0; a < work->table->dimensions; a++)
    for (size_t b = a + 1; b < work->table->dimensions; b++)
      pair(work, a, b);
  for (size_t a = work->table->dimensions; a < work->each; a++)
    pair(work, a, a);
}

static void shuffle(struct work *work) {
  uint64_t state = seed();
  for (const char *letter = work->table->name; *letter; letter++)
    state = mixed(state + (unsigned char)*letter + 1);
  for (size_t k = 0; k < work->table->rows; k++) {
    size_t other = drawn(&state, k + 1);
    work->order[k] = work->order[other];
    work->order[other] = k;
  }
}

static struct work open_work(const struct sample_table *table) {
  struct work work = {.table = table, .each = table->dimensions + table->combinations};
  work.levels = zeros(table->rows * work.each, sizeof *work.levels);
  work.order = zeros(table->rows, sizeof *work.order);
  work.gains = zeros(table->rows, sizeof *work.gains);
  work.chosen = zeros(table->rows, sizeof *work.chosen);
  for (size_t row = 0; row < table->rows; row++)
    table->levels(table->table, row, work.levels + row * work.each);
  pair_all(&work);
  shuffle(&work);
  return work;
}

static void close_work(struct work *work) {
  for (size_t k = 0; k < work->pairings_count; k++)
    free(work->pairings[k].flags);
  free(work->pairings);
  free(work->levels);
  free(work->order);
  free(work->gains);
  free(work->chosen);
}

/* --- Choosing */

static size_t gain_of(const struct work *work, size_t row) {
  size_t gain = 0;
  for (size_t k = 0; k < work->pairings_count; k++)
    gain += *flag_of(work, &work->pairings[k], row) == PRESENT;
  return gain;
}

static void choose(struct work *work, size_t row) {
  for (size_t k = 0; k < work->pairings_count; k++)
    *flag_of(work, &work->pairings[k], row) = MET;
  work->chosen[row] = true;
  work->chosen_count++;
}

/* Adds the rows that cover the most first. What a row covers only becomes less. */
static void cover(struct work *work, size_t limit) {
  for (size_t row = 0; row < work->table->rows; row++)
    work->gains[row] = work->pairings_count;
  for (size_t gain = work->pairings_count; gain > 0; gain--)
    for (size_t k = 0; k < work->table->rows && work->chosen_count < limit; k++) {
      size_t row = work->order[k];
      if (work->chosen[row] || work->gains[row] < gain)
        continue;
      work->gains[row] = gain_of(work, row);
      if (work->gains[row] == gain)
        choose(work, row);
    }
}

static void fill(struct work *work, size_t limit) {
  for (size_t k = 0; k < work->table->rows && work->chosen_count < limit; k++)
    if (!work->chosen[work->order[k]])
      choose(work, work->order[k]);
}

static struct sample taken(const struct work *work) {
  struct sample sample = {0, zeros(work->chosen_count, sizeof *sample.rows)};
  for (size_t row = 0; row < work->table->rows; row++)
    if (work->chosen[row])
      sample.rows[sample.count++] = row;
  return sample;
}

/* --- The account: a line a table for tests/run, which adds them up */

static void tell(const struct work *work) {
  const char *path = getenv("ONEBIT_TEST_SAMPLES");
  FILE *file = path ? fopen(path, "a") : NULL;
  size_t there = 0, met = 0;
  if (!file)
    return;
  for (size_t k = 0; k < work->pairings_count; k++) {
    const struct pairing *pairing = &work->pairings[k];
    size_t all = values_of(work, pairing->first) * pairing->width;
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
  struct work work = open_work(table);
  size_t share = test_share() * (table->thinner ? table->thinner : 1);
  size_t limit = (table->rows + share - 1) / share;
  cover(&work, test_thins() ? limit : table->rows);
  fill(&work, limit);
  struct sample sample = taken(&work);
  tell(&work);
  close_work(&work);
  return sample;
}

struct product {
  const size_t *sizes;
  size_t lists;
};

static void digits(const void *table, size_t row, size_t *levels) {
  const struct product *product = table;
  for (size_t k = 0; k < product->lists; k++) {
    levels[k] = row % product->sizes[k];
    row /= product->sizes[k];
  }
}

struct sample sample_product(const char *name, size_t thinner, const size_t *sizes, size_t lists) {
  const struct product product = {sizes, lists};
  struct sample_table table = {
      .name = name, .rows = 1, .thinner = thinner, .levels = digits, .table = &product};
  *(lists > 2 ? &table.dimensions : &table.combinations) = lists;
  for (size_t k = 0; k < lists; k++)
    table.rows *= sizes[k];
  return sample_of(&table);
}

void sample_choices(const size_t *sizes, size_t lists, size_t row, size_t *choices) {
  uint64_t state = mixed(row + 1);
  for (size_t k = 0; k < lists; k++)
    choices[k] = drawn(&state, sizes[k]);
}

static void draw(const void *table, size_t row, size_t *levels) {
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
                                     .levels = draw,
                                     .table = &product};
  return sample_of(&table);
}
