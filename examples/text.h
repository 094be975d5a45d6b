/*
 * Text to train on. Files become one array of small numbers. The first nine tenths are the training
 * part, the rest is held out. A character is a byte, so any UTF-8 text is possible. The vocabulary
 * consists of the bytes, or the words, that occur.
 */
#ifndef EXAMPLES_TEXT_H
#define EXAMPLES_TEXT_H

#include <stddef.h>
#include <stdint.h>

typedef struct text {
  unsigned char *tokens; /* each below the vocabulary */
  size_t length;
  size_t training; /* tokens[0 .. training) are the training part */
  size_t vocabulary;
  unsigned char bytes[256]; /* the byte that a token stands for */
  size_t files;
} text_t;

enum { TEXT_ERROR = 512 };

/* Reads files, in the given order. A directory stands for the regular files in it, in the order of
 * their names. A file that is given again, also by another name, counts once. Returns 0, or -1 with
 * an error message that names the path. */
int text_load(text_t *text, const char *const *paths, size_t npaths, char error[TEXT_ERROR]);
void text_free(text_t *text);

/* Copies `sequences` windows of `length` tokens each, from random places of the training part,
 * which is longer than `length`. */
void text_sample(const text_t *text, size_t sequences, size_t length, uint64_t *random,
                 unsigned char *tokens);

/* Returns the number of windows of context + 1 tokens in the held-out part. Each window starts at
 * the last token of the window before, so that every token except the first is predicted once. */
size_t text_held_out(const text_t *text, size_t context);
void text_held_out_window(const text_t *text, size_t context, size_t index, unsigned char *tokens);

/* A word is a run of letters, digits, underscores and bytes beyond ASCII, so that source code is
 * possible too. Each other byte that is not a blank is a word by itself. */

typedef struct words {
  uint32_t *word; /* each below the vocabulary; 0 stands for all words that are not in it */
  size_t bytes;   /* bytes of the text; the caller fills it in */
  size_t length;
  size_t training; /* word[0 .. training) is the training part: nine tenths */
  size_t vocabulary;
} words_t;

/* Splits the text into words. The vocabulary is 0 and the `most` - 1 most frequent words of the
 * training part, numbered from 1 by falling frequency. Returns 0, or -1 when out of memory. */
int words_split(words_t *words, const text_t *text, size_t most);
void words_free(words_t *words);

#endif
