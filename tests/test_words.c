/*
 * The words of examples/train_words: a text becomes numbers, by how often each word is met.
 */
#include "examples/text.h"
#include "tests/support.h"

/* The bytes are their own tokens. */
static words_t split(const char *bytes, size_t most) {
  static text_t text;
  words_t words;
  text.tokens = (unsigned char *)(uintptr_t)bytes;
  text.length = strlen(bytes);
  for (size_t i = 0; i < 256; i++)
    text.bytes[i] = (unsigned char)i;
  cr_assert_eq(words_split(&words, &text, most), 0);
  return words;
}

static void expect_words(const char *bytes, size_t most, size_t vocabulary, size_t count,
                         const uint32_t *expected) {
  words_t words = split(bytes, most);
  cr_expect_eq(words.vocabulary, vocabulary, "\"%s\": %zu kinds", bytes, words.vocabulary);
  cr_assert_eq(words.length, count, "\"%s\": %zu words", bytes, words.length);
  for (size_t i = 0; i < count; i++)
    cr_expect_eq(words.word[i], expected[i], "\"%s\": word %zu is %u", bytes, i, words.word[i]);
  words_free(&words);
}

Test(words, are_numbered_by_how_often_they_are_met) {
  expect_words("b a b c a b", 10, 4, 6, (uint32_t[]){1, 2, 1, 3, 2, 1});
  expect_words("b a b c a b", 3, 3, 6, (uint32_t[]){1, 2, 1, 0, 2, 1});
  expect_words("  x_1+=x_1;\n\xc3\xa4 \xc3\xa4x ", 10, 7, 7, (uint32_t[]){1, 2, 3, 1, 4, 5, 6});
  expect_words("", 10, 1, 0, NULL);
}

/* A word that only the held-out tenth has is not in the vocabulary. */
Test(words, come_from_what_there_is_to_learn) {
  words_t words = split("a b a b a b a b a new", 10);
  cr_expect_eq(words.training, 9);
  cr_expect_eq(words.vocabulary, 3);
  cr_expect_eq(words.word[9], 0);
  words_free(&words);
}

/* Many words: the hash table's collisions. */
Test(words, that_differ_have_numbers_that_differ) {
  enum { KINDS = 3000 };
  static char bytes[2 * KINDS * 6 + 1];
  for (int i = 0; i < 2 * KINDS; i++)
    snprintf(bytes + (size_t)i * 6, 7, "%05d ", i % KINDS);
  words_t words = split(bytes, 2 * KINDS);
  cr_assert_eq(words.length, 2 * KINDS);
  cr_expect_eq(words.vocabulary, KINDS + 1);
  for (size_t i = 1; i < KINDS; i++) {
    cr_expect_eq(words.word[i], words.word[i + KINDS]);
    cr_expect_neq(words.word[i], words.word[i - 1]);
  }
  words_free(&words);
}
