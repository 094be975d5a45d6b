/*
 * Periods in sequences of calls: found with any interleaving of signatures, in buffers that change
 * and return, followed and left, at moments that depend on signatures alone.
 */
#include <criterion/criterion.h>
#include <string.h>

#include "base/memory.h"
#include "dropin/sequence.h"

TestSuite(sequence, .timeout = 60);

static const char memory[1 << 16];

static struct ob_sequence *make(unsigned repeats) {
  struct ob_sequence *sequence = NULL;
  cr_assert_eq(ob_sequence_create(repeats, &sequence), ONEBIT_OK);
  return sequence;
}

/* The call with this signature on buffers of this number. */
static bool learn(struct ob_sequence *sequence, uint64_t signature, size_t buffer) {
  return ob_sequence_learn(sequence, signature, memory + buffer, memory + buffer + 1);
}

static ptrdiff_t follow(struct ob_sequence *sequence, uint64_t signature, size_t buffer,
                        bool *same) {
  return ob_sequence_phase(sequence, signature, memory + buffer, memory + buffer + 1, same);
}

/* Learns so many calls of a period of letters: a letter is a signature and a buffer. */
static void learn_text(struct ob_sequence *sequence, const char *text, size_t calls) {
  for (size_t i = 0, length = strlen(text); i < calls; i++)
    learn(sequence, (uint64_t)text[i % length], (size_t)text[i % length]);
}

static size_t period_of(const char *text, size_t calls, unsigned repeats, size_t at_least) {
  struct ob_sequence *sequence = make(repeats);
  learn_text(sequence, text, calls);
  size_t period = ob_sequence_period(sequence, at_least);
  ob_sequence_destroy(sequence);
  return period;
}

Test(sequence, periods_are_the_smallest_that_have_repeated) {
  static const struct {
    const char *text;
    size_t calls;
    unsigned repeats;
    size_t at_least, period;
  } cases[] = {{"a", 1, 2, 1, 0},       {"a", 2, 2, 1, 1},       {"a", 2, 3, 1, 0},
               {"ab", 3, 2, 1, 0},      {"ab", 4, 2, 1, 2},      {"ab", 5, 2, 1, 2},
               {"aab", 6, 2, 1, 3},     {"aba", 6, 2, 1, 3},     {"baa", 6, 2, 1, 1},
               {"baa", 6, 2, 2, 3},     {"baa", 6, 3, 1, 0},     {"baa", 9, 3, 1, 3},
               {"abcabd", 12, 2, 1, 6}, {"abcabd", 11, 2, 1, 0}, {"abcabd", 18, 3, 1, 6},
               {"abac", 8, 2, 1, 4},    {"abac", 16, 2, 5, 8},   {"abac", 16, 2, 9, 0},
               {"abcdefg", 14, 2, 1, 7}};
  for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++)
    cr_expect_eq(period_of(cases[k].text, cases[k].calls, cases[k].repeats, cases[k].at_least),
                 cases[k].period, "%zu calls of %s, %u times, from %zu on: %zu", cases[k].calls,
                 cases[k].text, cases[k].repeats, cases[k].at_least,
                 period_of(cases[k].text, cases[k].calls, cases[k].repeats, cases[k].at_least));
}

/* What the algorithm finds is what looking at every pair of calls finds. */
Test(sequence, every_short_text_has_the_period_that_it_has) {
  enum { LENGTH = 12 };
  for (unsigned bits = 0; bits < 1u << LENGTH; bits++) {
    struct ob_sequence *sequence = make(2);
    for (int i = 0; i < LENGTH; i++)
      learn(sequence, bits >> i & 1, 0);
    size_t wanted = 0;
    for (size_t period = 1; !wanted && 2 * period <= LENGTH; period++) {
      unsigned mask = (1u << period) - 1, last = bits >> (LENGTH - period);
      if ((bits >> (LENGTH - 2 * period) & mask) == last)
        wanted = period;
    }
    cr_assert_eq(ob_sequence_period(sequence, 1), wanted, "calls %03x: %zu, not %zu", bits,
                 ob_sequence_period(sequence, 1), wanted);
    ob_sequence_destroy(sequence);
  }
}

Test(sequence, buffers_belong_to_the_period_of_a_rank) {
  struct ob_sequence *still = make(2), *turning = make(2), *moving = make(2);
  for (size_t i = 0; i < 12; i++) {
    learn(still, 7, 0);
    learn(turning, 7, i % 3);
    learn(moving, 7, i);
  }
  cr_expect_eq(ob_sequence_period(still, 1), 1);
  cr_expect_eq(ob_sequence_period(still, 3), 3, "every multiple of a period is one");
  cr_expect_eq(ob_sequence_period(turning, 1), 3);
  cr_expect_eq(ob_sequence_period(moving, 1), 0);
  ob_sequence_destroy(still);
  ob_sequence_destroy(turning);
  ob_sequence_destroy(moving);
}

Test(sequence, the_beginning_does_not_matter) {
  struct ob_sequence *sequence = make(3);
  for (size_t i = 0; i < 100; i++)
    learn(sequence, i, i);
  learn_text(sequence, "abcd", 11);
  cr_expect_eq(ob_sequence_period(sequence, 1), 0);
  learn_text(sequence, "dabc", 1);
  cr_expect_eq(ob_sequence_period(sequence, 1), 4);
  ob_sequence_destroy(sequence);
}

Test(sequence, phases_follow_and_tell_of_other_buffers) {
  struct ob_sequence *sequence = make(2);
  bool same;
  learn_text(sequence, "aab", 8); /* aabaabaa: baabaa is what repeats */
  cr_assert_eq(ob_sequence_period(sequence, 2), 3);
  ob_sequence_follow(sequence, 3);
  for (int turn = 0; turn < 5; turn++)
    for (ptrdiff_t i = 0; i < 3; i++) {
      int letter = "baa"[i];
      size_t buffer = (size_t)letter + (turn >= 2 && i == 1 ? 10 : 0);
      cr_expect_eq(follow(sequence, (uint64_t)letter, buffer, &same), i);
      cr_expect_eq(same, !(turn == 2 && i == 1), "turn %d, phase %td", turn, i);
    }
  ob_sequence_destroy(sequence);
}

Test(sequence, either_buffer_is_seen) {
  struct ob_sequence *sequence = make(2);
  bool same;
  learn_text(sequence, "a", 2);
  ob_sequence_follow(sequence, 1);
  cr_expect_eq(ob_sequence_phase(sequence, 'a', memory, &memory['a' + 1], &same), 0);
  cr_expect_not(same, "another send buffer");
  cr_expect_eq(ob_sequence_phase(sequence, 'a', memory, memory, &same), 0);
  cr_expect_not(same, "another receive buffer");
  ob_sequence_destroy(sequence);
}

Test(sequence, a_deviation_is_the_first_call_that_is_learned_anew) {
  struct ob_sequence *sequence = make(5);
  bool same;
  learn_text(sequence, "abc", 15);
  ob_sequence_follow(sequence, ob_sequence_period(sequence, 1));
  cr_expect_eq(follow(sequence, 'a', 'a', &same), 0);
  cr_expect_eq(follow(sequence, 'c', 'c', &same), -1);
  cr_expect_not(same);
  cr_expect(learn(sequence, 'c', 'c'), "two repeats are enough after a period that was lost");
  cr_expect_eq(ob_sequence_period(sequence, 1), 1);
  ob_sequence_forget(sequence);
  cr_expect_eq(ob_sequence_period(sequence, 1), 0);
  cr_expect_eq(follow(sequence, 'a', 'a', &same), -1, "nothing is followed");
  ob_sequence_destroy(sequence);
}

static uint64_t agreements(unsigned repeats, size_t calls, bool noise) {
  struct ob_sequence *sequence = make(repeats);
  uint64_t at = 0;
  for (size_t i = 1; i <= calls; i++)
    if (learn(sequence, i % 5, noise ? i * 7919 % 60000 : i % 5))
      at = at * 31 + i;
  ob_sequence_destroy(sequence);
  return at;
}

Test(sequence, ranks_agree_at_moments_that_no_buffer_moves) {
  struct ob_sequence *sequence = make(3);
  size_t times = 0, wanted = 3;
  for (size_t i = 1; i <= 6 * 3 * OB_SEQUENCE_MAX_PERIOD; i++)
    if (learn(sequence, i, 0)) {
      cr_expect_eq(i, wanted);
      wanted += wanted < 3 * OB_SEQUENCE_MAX_PERIOD ? wanted : 3 * OB_SEQUENCE_MAX_PERIOD;
      times++;
    }
  cr_expect_eq(times, 13 + 5, "%zu times", times);
  ob_sequence_destroy(sequence);
  cr_expect_eq(agreements(2, 100000, false), agreements(2, 100000, true));
}

/* As long as a period may be, after more calls than are remembered; and one call longer. */
static size_t longest(size_t period, unsigned repeats) {
  struct ob_sequence *sequence = make(repeats);
  const size_t calls = 5 * (size_t)repeats * OB_SEQUENCE_MAX_PERIOD + 100;
  for (size_t i = 0; i < calls; i++)
    learn(sequence, i % period, i % period);
  size_t found = ob_sequence_period(sequence, 1);
  if (found) {
    bool same;
    ob_sequence_follow(sequence, found);
    for (size_t i = 0; i < 2 * found; i++) {
      size_t call = (calls + i) % period;
      cr_assert_eq(follow(sequence, call, call, &same), (ptrdiff_t)(i % found));
      cr_assert(same);
    }
  }
  ob_sequence_destroy(sequence);
  return found;
}

Test(sequence, long_periods_are_found) {
  cr_expect_eq(longest(OB_SEQUENCE_MAX_PERIOD, 2), OB_SEQUENCE_MAX_PERIOD);
  cr_expect_eq(longest(OB_SEQUENCE_MAX_PERIOD - 1, 2), OB_SEQUENCE_MAX_PERIOD - 1);
  cr_expect_eq(longest(1000, 3), 1000);
  cr_expect_eq(longest(OB_SEQUENCE_MAX_PERIOD + 1, 2), 0);
}

Test(sequence, without_memory_no_period_is_found_and_the_moments_stay) {
  struct ob_sequence *sequence = NULL;
  ob_memory_fail_at(1);
  cr_expect_eq(ob_sequence_create(2, &sequence), ONEBIT_ERROR_MEMORY);
  cr_expect_null(sequence);
  sequence = make(2);
  uint64_t at = 0;
  for (size_t i = 1; i <= 1000; i++) {
    ob_memory_fail_at(i == 1 || i == 66 || i == 500 ? 1 : 0);
    if (learn(sequence, i % 5, i % 5))
      at = at * 31 + i;
    cr_expect(i != 66 || ob_sequence_period(sequence, 1) == 0, "period after %zu calls", i);
  }
  ob_memory_fail_at(0);
  cr_expect_eq(at, agreements(2, 1000, false));
  cr_expect_eq(ob_sequence_period(sequence, 1), 5, "what came after is remembered");
  ob_sequence_destroy(sequence);
  cr_expect_eq(ob_sequence_create(1, &sequence), ONEBIT_ERROR_ARGUMENT);
  cr_expect_null(sequence);
  ob_sequence_destroy(NULL);
}
