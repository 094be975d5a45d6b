/*
 * The text of text.h: finding the files, reading them, and numbering the bytes that occur.
 */
#define _POSIX_C_SOURCE 200809L
#include "examples/text.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "examples/random.h"

/* A file that was read: two names of one file have the same numbers. */
typedef struct identity {
  dev_t device;
  ino_t inode;
} identity_t;

typedef struct reader {
  text_t *text;
  identity_t *seen; /* text->files of them */
  char *words;
} reader_t;

static int refuse(const reader_t *reader, const char *path, const char *why) {
  snprintf(reader->words, TEXT_WORDS, "%.400s: %.100s", path, why);
  return -1;
}

static int was_read(const reader_t *reader, const struct stat *status) {
  for (size_t i = 0; i < reader->text->files; i++)
    if (reader->seen[i].device == status->st_dev && reader->seen[i].inode == status->st_ino)
      return 1;
  return 0;
}

static int append(reader_t *reader, const char *path, FILE *file, size_t size) {
  text_t *text = reader->text;
  unsigned char *tokens = realloc(text->tokens, text->length + size);
  if (!tokens)
    return refuse(reader, path, "out of memory");
  text->tokens = tokens;
  if (fread(tokens + text->length, 1, size, file) != size)
    return refuse(reader, path,
                  ferror(file) ? strerror(errno) : "became shorter while it was read");
  text->length += size;
  return 0;
}

static int read_file(reader_t *reader, const char *path, const struct stat *status) {
  if (was_read(reader, status))
    return 0;
  if (status->st_size == 0)
    return refuse(reader, path, "the file is empty");
  identity_t *seen = realloc(reader->seen, (reader->text->files + 1) * sizeof *seen);
  if (!seen)
    return refuse(reader, path, "out of memory");
  reader->seen = seen;
  seen[reader->text->files++] = (identity_t){status->st_dev, status->st_ino};
  FILE *file = fopen(path, "rb");
  if (!file)
    return refuse(reader, path, strerror(errno));
  const int result = append(reader, path, file, (size_t)status->st_size);
  fclose(file);
  return result;
}

/* Compares names, not by alphasort: its order depends on the locale. */
static int by_name(const struct dirent **a, const struct dirent **b) {
  return strcmp((*a)->d_name, (*b)->d_name);
}

static int read_entry(reader_t *reader, const char *directory, const char *name) {
  struct stat status;
  const size_t size = strlen(directory) + strlen(name) + 2;
  char *path = malloc(size);
  if (!path)
    return refuse(reader, directory, "out of memory");
  snprintf(path, size, "%s/%s", directory, name);
  int result = 0;
  if (stat(path, &status) == 0 && S_ISREG(status.st_mode) && status.st_size > 0)
    result = read_file(reader, path, &status);
  free(path);
  return result;
}

static int read_directory(reader_t *reader, const char *path) {
  struct dirent **entries;
  const size_t files = reader->text->files;
  const int count = scandir(path, &entries, NULL, by_name);
  int result = 0;
  if (count < 0)
    return refuse(reader, path, strerror(errno));
  for (int i = 0; i < count; i++) {
    if (result == 0)
      result = read_entry(reader, path, entries[i]->d_name);
    free(entries[i]);
  }
  free(entries);
  if (result == 0 && reader->text->files == files)
    return refuse(reader, path, "no file with text in this directory that was not read before");
  return result;
}

static int read_path(reader_t *reader, const char *path) {
  struct stat status;
  if (stat(path, &status) != 0)
    return refuse(reader, path, strerror(errno));
  if (S_ISDIR(status.st_mode))
    return read_directory(reader, path);
  if (S_ISREG(status.st_mode))
    return read_file(reader, path, &status);
  return refuse(reader, path, "neither a file nor a directory");
}

/* Bytes become tokens, numbered in the order of the bytes. */
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

int text_load(text_t *text, const char *const *paths, size_t npaths, char words[TEXT_WORDS]) {
  reader_t reader = {text, NULL, words};
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
