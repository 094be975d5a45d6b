/*
 * Drawn digits, for where there are no images: strokes of a pen, bent, moved and of any thickness,
 * with a stray line, a hidden patch and noise, so that a small network reads most of them but not
 * all. The same state gives the same image.
 */
#ifndef EXAMPLES_DIGITS_H
#define EXAMPLES_DIGITS_H

#include <stddef.h>
#include <stdint.h>

enum { DIGITS = 10 };

/* Draws a digit: side x side pixels, 0 is the background. random: a state of random.h. */
void digit_draw(unsigned char *pixel, size_t side, unsigned digit, uint64_t *random);

#endif
