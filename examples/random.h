/*
 * Random numbers that are the same everywhere: SplitMix64 (Steele, Lea and Flood, "Fast splittable
 * pseudorandom number generators", OOPSLA 2014). The generator is its own state: one 64-bit number,
 * which may be any.
 */
#ifndef EXAMPLES_RANDOM_H
#define EXAMPLES_RANDOM_H

#include <stdint.h>

/* The next 64 random bits. */
static inline uint64_t random_bits(uint64_t *state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

/* Uniform in [0, 1), with the 24 bits that a float holds. */
static inline float random_uniform(uint64_t *state) {
  return (float)(random_bits(state) >> 40) * 0x1p-24f;
}

/* A generator of its own for each (seed, rank, step): each number goes through the mixer. */
static inline uint64_t random_stream(uint64_t seed, uint64_t rank, uint64_t step) {
  uint64_t state = seed;
  state = random_bits(&state) + rank;
  state = random_bits(&state) + step;
  return random_bits(&state);
}

#endif
