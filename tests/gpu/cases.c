/* The cases of the kernels' tests. */
#include "tests/gpu/cases.h"

#include <stdio.h>
#include <string.h>

/* Element counts on the edges of words, of warps' turns and of blocks; and tensors of odd sizes,
 * some of them empty. */
static const struct {
  size_t pieces, counts[SCENE_PIECES];
} layouts[] = {
    {1, {0}},
    {1, {1}},
    {1, {31}},
    {1, {32}},
    {1, {33}},
    {1, {63}},
    {1, {64}},
    {1, {65}},
    {1, {511}},
    {1, {512}},
    {1, {513}},
    {1, {2047}},
    {1, {2048}},
    {1, {2049}},
    {1, {4095}},
    {1, {4096}},
    {1, {4097}},
    {1, {100003}},
    {3, {0, 0, 5}},
    {6, {1, 7, 33, 2049, 0, 5000}},
    {8, {64, 0, 31, 0, 0, 4096, 2047, 1}},
};
static const size_t blocks[] = {32, 64, 2048, 65536, 2048};
/* 33: more than a warp has lanes. */
static const size_t members[] = {1, 2, 3, 4, 7, 8, 33};
static const size_t chunks[] = {1, 1, 2, 3, 5};

#define COUNT(list)   (sizeof(list) / sizeof(list)[0])
#define ONE_SCALE     4 /* of the blocks: what is summed in turn where one scale serves all */
#define ROUNDS        3 /* of the product, each with other options */
#define LONG_ELEMENTS 10000

struct sample kernel_cases_sample(const struct kernel_cases *of) {
  const size_t sizes[] = {COUNT(layouts), COUNT(blocks), COUNT(members), ROUNDS};
  char name[32];
  snprintf(name, sizeof name, "kernels-%x", of->modes);
  return sample_product(name, 1, sizes, COUNT(sizes));
}

/* A number below `limit`, the same in every run (Knuth's multiplicative hash). */
static size_t drawn(size_t number, size_t what, size_t limit) {
  return scramble((uint32_t)(number * 32 + what) * 2654435761u) % limit;
}

static enum scene_mode drawn_mode(const struct kernel_cases *of, size_t number) {
  enum scene_mode allowed[SCENE_MODES];
  size_t count = 0;
  for (int mode = 0; mode < SCENE_MODES; mode++)
    if (of->modes & MODE(mode))
      allowed[count++] = (enum scene_mode)mode;
  return allowed[drawn(number, 0, count)];
}

static void draw_options(const struct kernel_cases *of, size_t number, struct scene_case *what) {
  what->place = drawn(number, 1, what->members);
  what->chunks = chunks[drawn(number, 2, COUNT(chunks))];
  what->slots = what->chunks > 2 && drawn(number, 3, 2) ? 2 : what->chunks;
  what->skew = drawn(number, 4, 4);
  what->values = (enum codec_values)drawn(number, 5, VALUES_KINDS);
  what->dtype = (onebit_dtype_t)drawn(number, 6, 3);
  what->rule = (onebit_scale_t)drawn(number, 7, 2);
  what->momentum = of->momentum && drawn(number, 8, 2);
  what->each = drawn(number, 9, 2);
  what->from_values = of->from_values && drawn(number, 10, 4) == 0;
  what->now = (uint32_t)drawn(number, 11, 2);
  what->stop = of->stop && drawn(number, 12, 6) == 0;
  what->dense = of->dense;
  what->weighed = of->weighed && drawn(number, 13, 3) == 0;
  what->moments = of->weighed && what->values != VALUES_NAN && what->values != VALUES_OVERFLOW &&
                  drawn(number, 26, 2);
  what->weighed &= !what->moments;
  what->counted = drawn(number, 20, 2);
  what->output_dtype = (onebit_dtype_t)drawn(number, 21, 3);
  what->float32 = drawn(number, 22, 4) == 0;
  what->lion = of->served && drawn(number, 27, 2);
}

/* Fits the case to the mode: a piece for each member, rounds that pass on single messages, a
 * momentum only in an allreduce by exchange, padded or not. */
static void fit_mode(struct scene_case *what) {
  if (what->mode == SCENE_PADDED || what->mode == SCENE_SCATTER) {
    what->pieces = what->members;
    if (what->counts[0] > LONG_ELEMENTS)
      what->counts[0] /= what->members;
    for (size_t k = 1; k < what->pieces; k++)
      what->counts[k] = what->counts[0];
  }
  if (what->mode >= SCENE_GATHERED)
    what->pieces = 1;
  if (what->mode == SCENE_ROTATED || what->mode == SCENE_GATHERED_ROTATED)
    what->chunks = what->slots = 1;
  if (what->mode != SCENE_EXCHANGE && what->mode != SCENE_PADDED)
    what->momentum = what->moments = false;
  if (what->mode != SCENE_EXCHANGE && what->mode != SCENE_SHIFTED)
    what->from_values = false;
}

bool kernel_case(const struct kernel_cases *of, size_t index, struct scene_case *what) {
  size_t layout = index % COUNT(layouts), rest = index / COUNT(layouts);
  size_t block = rest % COUNT(blocks), group = rest / COUNT(blocks) % COUNT(members);
  *what = (struct scene_case){.mode = drawn_mode(of, index),
                              .pieces = layouts[layout].pieces,
                              .block = blocks[block],
                              .one_scale = block == ONE_SCALE || of->only_one_scale,
                              .members = members[group]};
  memcpy(what->counts, layouts[layout].counts, sizeof what->counts);
  draw_options(of, index, what);
  fit_mode(what);
  return of->one_scale || of->only_one_scale || !what->one_scale;
}
