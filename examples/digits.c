/* The digits of digits.h. */
#include "examples/digits.h"

#include <math.h>

#include "examples/random.h"

enum { MOST_LINES = 16, GRID = 8 };

typedef struct point {
  float x, y; /* from 0 to 1, to the right and down */
} point_t;

typedef struct line {
  point_t from, to;
} line_t;

/* The points of one stroke each, on a grid: to the right and down. */
static const char *const glyphs[DIGITS] = {
    "40 21 13 15 27 48 67 75 73 61 40", "32 40 48",    "12 21 40 61 63 45 18 68",
    "11 40 61 63 44 65 67 48 17",       "58 50 15 75", "60 20 24 43 65 67 48 17",
    "60 31 14 16 38 57 66 55 34 15",    "10 60 38",    "44 23 21 40 61 63 44 25 27 48 67 65 44",
    "63 44 23 21 40 61 63 55 48",
};

static float between(float least, float most, uint64_t *random) {
  return least + (most - least) * random_uniform(random);
}

/* Any linear map near a smaller copy in the middle: size, slant, a turn, a move. */
typedef struct map {
  float xx, xy, yx, yy, x, y;
} map_t;

static map_t draw_map(uint64_t *random) {
  return (map_t){.xx = between(0.5f, 0.8f, random),
                 .xy = between(-0.25f, 0.25f, random),
                 .yx = between(-0.2f, 0.2f, random),
                 .yy = between(0.55f, 0.8f, random),
                 .x = between(0.4f, 0.6f, random),
                 .y = between(0.4f, 0.6f, random)};
}

/* Maps a point of the grid, not quite to its place. */
static point_t place(const map_t *map, const char *at, uint64_t *random) {
  const float x = (float)(at[0] - '0') / GRID - 0.5f + between(-0.08f, 0.08f, random);
  const float y = (float)(at[1] - '0') / GRID - 0.5f + between(-0.08f, 0.08f, random);
  return (point_t){map->x + map->xx * x + map->xy * y, map->y + map->yx * x + map->yy * y};
}

/* Draws the digit's lines, and a stray one. */
static size_t draw_lines(line_t lines[MOST_LINES], const char *glyph, uint64_t *random) {
  const map_t map = draw_map(random);
  size_t count = 0;
  point_t from = place(&map, glyph, random);
  for (const char *at = glyph + 2; *at == ' '; at += 3, count++) {
    const point_t to = place(&map, at + 1, random);
    lines[count] = (line_t){from, to};
    from = to;
  }
  const point_t start = {random_uniform(random), random_uniform(random)};
  const point_t end = {start.x + between(-0.25f, 0.25f, random),
                       start.y + between(-0.25f, 0.25f, random)};
  lines[count++] = (line_t){start, end};
  return count;
}

static float squared_distance(const line_t *line, float x, float y) {
  const float dx = line->to.x - line->from.x, dy = line->to.y - line->from.y;
  const float px = x - line->from.x, py = y - line->from.y;
  float along = (px * dx + py * dy) / (dx * dx + dy * dy + 1e-12f);
  along = along < 0.0f ? 0.0f : along > 1.0f ? 1.0f : along;
  const float ex = px - along * dx, ey = py - along * dy;
  return ex * ex + ey * ey;
}

/* The ink at a point: full within the pen's radius, and fading over another pixel. */
static float ink(const line_t *lines, size_t count, float x, float y, float radius, float pixel) {
  float nearest = 4.0f;
  for (size_t i = 0; i < count; i++) {
    const float squared = squared_distance(&lines[i], x, y);
    nearest = squared < nearest ? squared : nearest;
  }
  const float beyond = (sqrtf(nearest) - radius) / pixel;
  return beyond < 0.0f ? 1.0f : beyond > 1.0f ? 0.0f : 1.0f - beyond;
}

void digit_draw(unsigned char *pixel, size_t side, unsigned digit, uint64_t *random) {
  line_t lines[MOST_LINES];
  const size_t count = draw_lines(lines, glyphs[digit], random);
  const float radius = between(0.02f, 0.06f, random), strength = between(0.5f, 0.9f, random);
  const float noise = between(0.05f, 0.4f, random), step = 1.0f / (float)side;
  const float hidden_x = random_uniform(random), hidden_y = random_uniform(random);
  for (size_t i = 0; i < side * side; i++) {
    const float x = ((float)(i % side) + 0.5f) * step, y = ((float)(i / side) + 0.5f) * step;
    const int hidden = fabsf(x - hidden_x) < 0.12f && fabsf(y - hidden_y) < 0.12f;
    float value = hidden ? 0.0f : strength * ink(lines, count, x, y, radius, step);
    value += noise * between(-1.0f, 1.0f, random);
    value = value < 0.0f ? 0.0f : value > 1.0f ? 1.0f : value;
    pixel[i] = (unsigned char)(255.0f * value);
  }
}
