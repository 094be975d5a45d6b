/*
 * Text to train on. Files become one array of tokens, which are small numbers. The first nine
 * tenths are the training part, and the rest is held out. A character is a byte, so the text may be
 * any UTF-8 text. The vocabulary is the set of bytes, or of words, that occur.
 */
#ifndef EXAMPLES_TEXT_H
#define EXAMPLES_TEXT_H

#include <stddef.h>
#include <stdint.h>

typedef struct text {
  unsigned char *tokens; /* each less than `vocabulary` */
  size_t length;
  size_t training; /* tokens[0 .. training) are the training part */
  size_t vocabulary;
  unsigned char bytes[256]; /* the byte that a token stands for */
  size_t files;
} text_t;

enum { TEXT_ERROR = 512 };

/* Reads files, in the given order. A directory stands for the regular files in it, in the order of
 * their names. If a file is given twice, even by different names, it is read once. Returns 0, or -1
 * with an error message that names the path. */
int text_load(text_t *text, const char *const *paths, size_t npaths, char error[TEXT_ERROR]);
void text_free(text_t *text);

/* Copies `sequences` windows of `length` tokens each, from random positions of the training part,
 * which is longer than `length`. */
void text_sample(const text_t *text, size_t sequences, size_t length, uint64_t *random,
                 unsigned char *tokens);

/* Returns the number of windows of context + 1 tokens in the held-out part. Each window starts at
 * the last token of the window before, so that every token except the first is predicted once. */
size_t text_held_out(const text_t *text, size_t context);
void text_held_out_window(const text_t *text, size_t context, size_t index, unsigned char *tokens);

/* A word is a sequence of letters, digits, underscores and bytes beyond ASCII, so that source code
 * can be split too. Each other byte that is not a blank is a word by itself. */

typedef struct words {
  uint32_t *word; /* each less than `vocabulary`; 0 stands for all words outside the vocabulary */
  size_t bytes;   /* the size of the text; the caller sets it */
  size_t length;
  size_t training; /* word[0 .. training) is the training part: nine tenths */
  size_t vocabulary;
} words_t;

/* Splits the text into words. The vocabulary is the number 0 and the `most` - 1 most frequent words
 * of the training part, numbered from 1 by decreasing frequency. Returns 0, or -1 when out of
 * memory. */
int words_split(words_t *words, const text_t *text, size_t most);
void words_free(words_t *words);

#endif
