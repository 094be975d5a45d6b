/* Tests that samples of long tables of test cases have the promised pairs of values and sizes, for
 * any seed. */
#include "tests/support.h"
#include "tests/support_sample.h"

enum { SEEDS = 30 };

/* Sets the seed and the share. Excludes these samples from the counts that tests/run prints. */
static void set_seed_and_share(size_t seed, size_t share) {
  char text[24];
  unsetenv("ONEBIT_TEST_SAMPLES");
  snprintf(text, sizeof text, "%zu", seed);
  setenv("ONEBIT_TEST_SEED", text, 1);
  snprintf(text, sizeof text, "%zu", share);
  setenv("ONEBIT_TEST_SHARE", text, 1);
}

static const size_t sizes[] = {7, 5, 4, 3, 2};
enum { LISTS = 5, ROWS = 7 * 5 * 4 * 3 * 2, PAIRS = 35 + 28 + 21 + 14 + 20 + 15 + 10 + 12 + 8 + 6 };

static size_t row_choice(size_t row, size_t list) {
  for (size_t k = 0; k < list; k++)
    row /= sizes[k];
  return row % sizes[list];
}

/* Counts the pairs of values that occur in the sample, independently of how the sample was
 * drawn. */
static size_t count_pairs(const struct sample *sample) {
  size_t met = 0;
  for (size_t a = 0; a < LISTS; a++)
    for (size_t b = a + 1; b < LISTS; b++) {
      bool seen[7][7] = {{false}};
      for (size_t k = 0; k < sample->count; k++) {
        bool *flag = &seen[row_choice(sample->rows[k], a)][row_choice(sample->rows[k], b)];
        met += !*flag;
        *flag = true;
      }
    }
  return met;
}

Test(sample, a_fifth_meets_every_pair) {
  for (size_t seed = 1; seed <= SEEDS; seed++) {
    set_seed_and_share(seed, 5);
    struct sample sample = sample_product("sample", 1, sizes, LISTS);
    cr_expect_eq(sample.count, ROWS / 5, "%zu rows", sample.count);
    cr_expect_eq(count_pairs(&sample), PAIRS, "seed %zu: %zu pairs of %d", seed,
                 count_pairs(&sample), PAIRS);
    free(sample.rows);
    sample = sample_product("sample", 100, sizes, LISTS); /* the sample exceeds that share */
    cr_expect(sample.count >= 35 && sample.count < 70, "%zu rows", sample.count);
    cr_expect_eq(count_pairs(&sample), PAIRS);
    free(sample.rows);
  }
}

Test(sample, small_shares_meet_what_fits) {
  set_seed_and_share(1, 53);
  struct sample sample = sample_product("sample", 1, sizes, LISTS);
  cr_expect_eq(sample.count, (ROWS + 52) / 53);
  cr_expect_gt(count_pairs(&sample), 7 * sample.count); /* a row can add at most 10 pairs */
  free(sample.rows);
}

Test(sample, all_of_it_where_all_is_asked_for) {
  set_seed_and_share(1, 1);
  struct sample sample = sample_product("sample", 1, sizes, LISTS);
  cr_expect_eq(sample.count, ROWS);
  for (size_t k = 0; k < sample.count; k++)
    cr_expect_eq(sample.rows[k], k);
  free(sample.rows);
}

Test(sample, a_seed_is_a_sample) {
  struct sample samples[3];
  for (size_t k = 0; k < 3; k++) {
    set_seed_and_share(k == 2 ? 8 : 7, 5);
    samples[k] = sample_product("sample", 1, sizes, LISTS);
  }
  const size_t bytes = samples[0].count * sizeof *samples[0].rows;
  cr_expect_eq(memcmp(samples[0].rows, samples[1].rows, bytes), 0);
  cr_expect_neq(memcmp(samples[0].rows, samples[2].rows, bytes), 0);
  for (size_t k = 0; k < 3; k++)
    free(samples[k].rows);
}

Test(sample, one_of_each_so_many_in_a_row) {
  size_t met[5] = {0};
  for (size_t seed = 0; seed < SEEDS; seed++) {
    set_seed_and_share(seed, 5);
    for (size_t k = 0; k < 20; k++) {
      cr_expect_eq(sample_entry(k) / 5, k);
      met[sample_entry(k) % 5]++;
    }
  }
  for (size_t k = 0; k < 5; k++)
    cr_expect(met[k] > SEEDS * 2, "entry %zu of 5 is met %zu times of %d", k, met[k], SEEDS * 20);
}

Test(sample, some_of_any_list) {
  for (size_t seed = 0; seed < SEEDS; seed++)
    for (size_t count = 1; count < 20; count++) {
      set_seed_and_share(seed, 7);
      size_t met = 0;
      for (size_t k = 0; k < count; k++)
        met += sample_has(k, count);
      cr_expect_eq(met, (count + 6) / 7, "%zu of %zu", met, count);
    }
}
