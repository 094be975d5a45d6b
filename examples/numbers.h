/*
 * Numbers for the example trainings: random numbers that are the same on every machine, 16-bit
 * floats, and a macro for loops that compilers vectorise.
 */
#ifndef EXAMPLES_NUMBERS_H
#define EXAMPLES_NUMBERS_H

#include <stdint.h>
#include <string.h>

/* Random numbers by SplitMix64. The state of a generator is one 64-bit number, which may have any
 * value. (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). */

/* Returns the next 64 random bits. */
static inline uint64_t random_bits(uint64_t *state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

/* Returns a uniform number in [0, 1) with 24 random bits, as many as a float's mantissa holds. */
static inline float random_uniform(uint64_t *state) {
  return (float)(random_bits(state) >> 40) * 0x1p-24f;
}

/* Returns the initial state of a generator for (seed, rank, step). It depends on all three
 * numbers. */
static inline uint64_t random_stream(uint64_t seed, uint64_t rank, uint64_t step) {
  uint64_t state = seed;
  state = random_bits(&state) + rank;
  state = random_bits(&state) + step;
  return random_bits(&state);
}

/* Conversion of float32 to 16 bits, rounded to nearest, ties to even. A number that is too large
 * becomes infinity. A NaN stays a NaN. */

static inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

static inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* Rounds to bfloat16, which is the upper half of a float32. */
static inline uint16_t to_bfloat16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return (uint16_t)(x != x ? bits >> 16 | 0x40u : rounded);
}

static inline float from_bfloat16(uint16_t half) { return float_of((uint32_t)half << 16); }

/* Rounds to float16 (IEEE binary16), with 5 exponent bits and 10 fraction bits. Below 2^-14,
 * float16 values are 2^-24 apart, like float32 values from 0.5 to 1, so adding 0.5 rounds to
 * them. */
static inline uint16_t to_float16(float x) {
  const uint32_t sign = bits_of(x) >> 16 & 0x8000u, size = bits_of(x) & 0x7fffffffu;
  const uint32_t small = bits_of(float_of(size) + 0.5f) - bits_of(0.5f);
  const uint32_t normal = (size - (112u << 23) + 0xfffu + (size >> 13 & 1u)) >> 13;
  const uint32_t large = size > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t half = size < 0x38800000u ? small : size < 0x47800000u ? normal : large;
  return (uint16_t)(sign | half);
}

static inline float from_float16(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000u) << 16, size = half & 0x7fffu;
  const float small = (float)size * 0x1p-24f;
  const uint32_t exponent = size < 0x7c00u ? 112u << 23 : 224u << 23;
  const uint32_t bits = size < 0x0400u ? bits_of(small) : (size << 13) + exponent;
  return float_of(sign | bits);
}

/* A function marked VECTORISED is compiled for several instruction sets. At its start the program
 * selects the best one that the machine has, so that one portable program reaches full speed. All
 * versions have the same results, to the bit. The macro has no effect with sanitizers, which are
 * not ready that early, and with clang, since clang 14 hides such functions from other files. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) &&       \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define VECTORISED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTORISED
#endif

#endif
