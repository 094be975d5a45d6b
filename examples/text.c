/*
 * Implements text.h: finds the files, reads them, and numbers the bytes or words that occur.
 */
#define _POSIX_C_SOURCE 200809L
#include "examples/text.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "examples/numbers.h"

/* Identifies a file that was read. Two names of the same file have the same numbers. */
typedef struct identity {
  dev_t device;
  ino_t inode;
} identity_t;

typedef struct reader {
  text_t *text;
  identity_t *seen; /* an entry for each of text->files */
  char *error;
} reader_t;

static int text_refuse(const reader_t *reader, const char *path, const char *why) {
  snprintf(reader->error, TEXT_ERROR, "%.400s: %.100s", path, why);
  return -1;
}

static int was_read(const reader_t *reader, const struct stat *status) {
  for (size_t i = 0; i < reader->text->files; i++)
    if (reader->seen[i].device == status->st_dev && reader->seen[i].inode == status->st_ino)
      return 1;
  return 0;
}

static int text_append(reader_t *reader, const char *path, FILE *file, size_t size) {
  text_t *text = reader->text;
  unsigned char *tokens = realloc(text->tokens, text->length + size);
  if (!tokens)
    return text_refuse(reader, path, "out of memory");
  text->tokens = tokens;
  if (fread(tokens + text->length, 1, size, file) != size)
    return text_refuse(reader, path,
                       ferror(file) ? strerror(errno) : "became shorter while it was read");
  text->length += size;
  return 0;
}

static int text_read_file(reader_t *reader, const char *path, const struct stat *status) {
  if (was_read(reader, status))
    return 0;
  if (status->st_size == 0)
    return text_refuse(reader, path, "the file is empty");
  identity_t *seen = realloc(reader->seen, (reader->text->files + 1) * sizeof *seen);
  if (!seen)
    return text_refuse(reader, path, "out of memory");
  reader->seen = seen;
  seen[reader->text->files++] = (identity_t){status->st_dev, status->st_ino};
  FILE *file = fopen(path, "rb");
  if (!file)
    return text_refuse(reader, path, strerror(errno));
  const int result = text_append(reader, path, file, (size_t)status->st_size);
  fclose(file);
  return result;
}

/* Compares file names by their bytes. The order of alphasort depends on the locale. */
static int text_by_name(const struct dirent **a, const struct dirent **b) {
  return strcmp((*a)->d_name, (*b)->d_name);
}

static int read_entry(reader_t *reader, const char *directory, const char *name) {
  struct stat status;
  const size_t size = strlen(directory) + strlen(name) + 2;
  char *path = malloc(size);
  if (!path)
    return text_refuse(reader, directory, "out of memory");
  snprintf(path, size, "%s/%s", directory, name);
  int result = 0;
  if (stat(path, &status) == 0 && S_ISREG(status.st_mode) && status.st_size > 0)
    result = text_read_file(reader, path, &status);
  free(path);
  return result;
}

static int read_directory(reader_t *reader, const char *path) {
  struct dirent **entries;
  const size_t files = reader->text->files;
  const int count = scandir(path, &entries, NULL, text_by_name);
  int result = 0;
  if (count < 0)
    return text_refuse(reader, path, strerror(errno));
  for (int i = 0; i < count; i++) {
    if (result == 0)
      result = read_entry(reader, path, entries[i]->d_name);
    free(entries[i]);
  }
  free(entries);
  if (result == 0 && reader->text->files == files)
    return text_refuse(reader, path,
                       "no file with text in this directory that was not read before");
  return result;
}

static int read_path(reader_t *reader, const char *path) {
  struct stat status;
  if (stat(path, &status) != 0)
    return text_refuse(reader, path, strerror(errno));
  if (S_ISDIR(status.st_mode))
    return read_directory(reader, path);
  if (S_ISREG(status.st_mode))
    return text_read_file(reader, path, &status);
  return text_refuse(reader, path, "neither a file nor a directory");
}

/* Replaces bytes by tokens. Tokens are numbered in the order of the bytes. */
static void number_bytes(text_t *text) {
  unsigned char token[256] = {0}, occurs[256] = {0};
  for (size_t i = 0; i < text->length; i++)
    occurs[text->tokens[i]] = 1;
  for (size_t byte = 0; byte < 256; byte++)
    if (occurs[byte]) {
      token[byte] = (unsigned char)text->vocabulary;
      text->bytes[text->vocabulary++] = (unsigned char)byte;
    }
  for (size_t i = 0; i < text->length; i++)
    text->tokens[i] = token[text->tokens[i]];
}

int text_load(text_t *text, const char *const *paths, size_t npaths, char error[TEXT_ERROR]) {
  reader_t reader = {text, NULL, error};
  int result = 0;
  *text = (text_t){0};
  for (size_t i = 0; i < npaths && result == 0; i++)
    result = read_path(&reader, paths[i]);
  free(reader.seen);
  if (result == 0) {
    number_bytes(text);
    text->training = text->length - text->length / 10;
  } else
    text_free(text);
  return result;
}

void text_free(text_t *text) {
  free(text->tokens);
  *text = (text_t){0};
}

void text_sample(const text_t *text, size_t sequences, size_t length, uint64_t *random,
                 unsigned char *tokens) {
  for (size_t s = 0; s < sequences; s++) {
    const size_t start = (size_t)(random_bits(random) % (text->training - length + 1));
    memcpy(tokens + s * length, text->tokens + start, length);
  }
}

size_t text_held_out(const text_t *text, size_t context) {
  const size_t length = text->length - text->training;
  return length > 0 ? (length - 1) / context : 0;
}

void text_held_out_window(const text_t *text, size_t context, size_t index, unsigned char *tokens) {
  memcpy(tokens, text->tokens + text->training + index * context, context + 1);
}

/* --- Words: a hash table counts them; they are numbered by decreasing count --------------------*/

/* An entry for each different word: its first position, and its count in the training part. */
typedef struct entry {
  size_t start, length, count;
  size_t number; /* its index in the order of first occurrence */
} entry_t;

typedef struct index {
  const text_t *text;
  entry_t *entries;
  size_t count;
  size_t *slots; /* indices of entries, plus 1; 0: free */
  size_t mask;   /* the number of slots minus 1 */
} index_t;

static int is_letter(const text_t *text, size_t at) {
  const unsigned char byte = text->bytes[text->tokens[at]];
  return byte >= 128 || byte == '_' || isalnum(byte);
}

static int words_is_blank(const text_t *text, size_t at) {
  return text->bytes[text->tokens[at]] <= ' ';
}

/* Finds the next word from *start on. Returns its length, or 0 if there is no more word. */
static size_t words_next(const text_t *text, size_t *start) {
  size_t end;
  while (*start < text->length && words_is_blank(text, *start))
    ++*start;
  for (end = *start; end < text->length && is_letter(text, end);)
    end++;
  return end > *start ? end - *start : end < text->length;
}

static size_t count_words(const text_t *text) {
  size_t count = 0, start = 0;
  for (size_t length; (length = words_next(text, &start)) > 0; start += length)
    count++;
  return count;
}

/* Returns the slot of a word in the index. If the word is new, this is the slot where the caller
 * must add it. */
static size_t words_find(index_t *index, size_t start, size_t length) {
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

/* Replaces each word's number in the order of first occurrence by its number in the vocabulary. */
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

static void words_split_text(words_t *words, index_t *index) {
  size_t start = 0, count = 0;
  for (size_t length; (length = words_next(index->text, &start)) > 0; start += length)
    words->word[count++] = (uint32_t)words_find(index, start, length);
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
    words_split_text(words, &index);
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
