/*
 * A text as words: a word is a run of letters, digits, underscores and bytes beyond ASCII, so that
 * any UTF-8 text and any source code will do; other bytes that are no blanks are words of their
 * own.
 */
#ifndef EXAMPLES_WORDS_H
#define EXAMPLES_WORDS_H

#include <stdint.h>

#include "examples/text.h"

typedef struct words {
  uint32_t *word; /* each below the vocabulary; 0: any word that is not in it */
  size_t bytes;   /* of the text; the reader's to fill in */
  size_t length;
  size_t training; /* word[0 .. training) are to learn from: nine tenths */
  size_t vocabulary;
} words_t;

/* Splits the text. The vocabulary is the `most` - 1 words that are met most often in what there is
 * to learn from, numbered from 1 in that order, and 0. Returns 0, or -1 when memory is out. */
int words_split(words_t *words, const text_t *text, size_t most);
void words_free(words_t *words);

#endif
