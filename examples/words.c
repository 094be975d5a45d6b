/* The words of words.h: each different word is found by a hash table, then numbered by how often it
 * is met. */
#include "examples/words.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

/* A different word: where it is met first, and how often in the part to learn from. */
typedef struct entry {
  size_t start, length, count;
  size_t number; /* in the order of first occurrence */
} entry_t;

typedef struct index {
  const text_t *text;
  entry_t *entries;
  size_t count;
  size_t *slots; /* places in entries, plus 1; 0: free */
  size_t mask;   /* slots, less 1 */
} index_t;

static int is_letter(const text_t *text, size_t at) {
  const unsigned char byte = text->bytes[text->tokens[at]];
  return byte >= 128 || byte == '_' || isalnum(byte);
}

static int is_blank(const text_t *text, size_t at) { return text->bytes[text->tokens[at]] <= ' '; }

/* The next word from *start on: its length, or 0 when there is none. */
static size_t next_word(const text_t *text, size_t *start) {
  size_t end;
  while (*start < text->length && is_blank(text, *start))
    ++*start;
  for (end = *start; end < text->length && is_letter(text, end);)
    end++;
  return end > *start ? end - *start : end < text->length;
}

static size_t count_words(const text_t *text) {
  size_t count = 0, start = 0;
  for (size_t length; (length = next_word(text, &start)) > 0; start += length)
    count++;
  return count;
}

/* The place of a word among the different ones, where it comes to be if it is new. */
static size_t find(index_t *index, size_t start, size_t length) {
  const unsigned char *word = index->text->tokens + start;
  uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a */
  for (size_t i = 0; i < length; i++)
    hash = (hash ^ word[i]) * 0x100000001b3u;
  size_t slot = (size_t)(hash ^ hash >> 32) & index->mask;
  for (; index->slots[slot]; slot = (slot + 1) & index->mask) {
    const entry_t *entry = &index->entries[index->slots[slot] - 1];
    if (entry->length == length && memcmp(index->text->tokens + entry->start, word, length) == 0)
      return index->slots[slot] - 1;
  }
  index->entries[index->count] =
      (entry_t){.start = start, .length = length, .number = index->count};
  index->slots[slot] = ++index->count;
  return index->count - 1;
}

static int by_count(const void *a, const void *b) {
  const entry_t *x = a, *y = b;
  if (x->count != y->count)
    return x->count < y->count ? 1 : -1;
  return x->number < y->number ? -1 : 1;
}

/* Numbers in the order of first occurrence become those of the vocabulary. */
static void number_words(words_t *words, index_t *index, size_t most, uint32_t *numbers) {
  for (size_t i = 0; i < words->training; i++)
    index->entries[words->word[i]].count++;
  qsort(index->entries, index->count, sizeof *index->entries, by_count);
  words->vocabulary = 1;
  for (size_t i = 0; i < index->count; i++) {
    const int is_in = words->vocabulary < most && index->entries[i].count > 0;
    numbers[index->entries[i].number] = is_in ? (uint32_t)words->vocabulary++ : 0;
  }
  for (size_t i = 0; i < words->length; i++)
    words->word[i] = numbers[words->word[i]];
}

static void split(words_t *words, index_t *index) {
  size_t start = 0, count = 0;
  for (size_t length; (length = next_word(index->text, &start)) > 0; start += length)
    words->word[count++] = (uint32_t)find(index, start, length);
}

int words_split(words_t *words, const text_t *text, size_t most) {
  const size_t length = count_words(text);
  index_t index = {.text = text, .mask = 1};
  *words = (words_t){.length = length, .training = length - length / 10};
  while (index.mask < 2 * length)
    index.mask = 2 * index.mask + 1;
  index.slots = calloc(index.mask + 1, sizeof *index.slots);
  index.entries = malloc((length + 1) * sizeof *index.entries);
  words->word = malloc((length + 1) * sizeof *words->word);
  uint32_t *numbers = malloc((length + 1) * sizeof *numbers);
  const int well = index.slots && index.entries && words->word && numbers;
  if (well) {
    split(words, &index);
    number_words(words, &index, most, numbers);
  } else
    words_free(words);
  free(numbers);
  free(index.entries);
  free(index.slots);
  return well ? 0 : -1;
}

void words_free(words_t *words) {
  free(words->word);
  *words = (words_t){0};
}
