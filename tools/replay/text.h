/*
 * The text of a recorded case: "key = value" lines, and the values of several types.
 */
#ifndef TOOLS_REPLAY_TEXT_H
#define TOOLS_REPLAY_TEXT_H

#include <stdbool.h>
#include <stddef.h>

struct replay_text {
  size_t count;
  struct replay_line {
    const char *key, *value;
    size_t number; /* in the file, from 1 on */
  } lines[128];    /* several times the lines that any kind of case has */
  char words[256]; /* what is wrong, after a call that returned false */
};

/* Cuts the text into lines, in place; the keys and values point into it. False for a line that is
 * not "key = value" with something on both sides, for a key that is there twice, for too many
 * lines. */
bool replay_text_cut(struct replay_text *text, char *memory);

/* The value of a key, as it is written. */
bool replay_text_string(struct replay_text *text, const char *key, const char **value);

/* As a whole number from `least` to `most`. */
bool replay_text_whole(struct replay_text *text, const char *key, size_t least, size_t most,
                       size_t *value);

/* As `count` finite numbers with blanks between. */
bool replay_text_reals(struct replay_text *text, const char *key, size_t count, double *values);

/* As shapes with blanks between, such as "513 37x3 1": how many elements each has. *counts is
 * allocated, and the caller's to free in any event. */
bool replay_text_shapes(struct replay_text *text, const char *key, size_t **counts, size_t *count);

#endif
