/* The manifest: written, and read with care. */
#include "optimizers/checkpoint/manifest.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"

/* No line is longer, with its end. */
enum { LINE = 80 };

void ob_part_name(char name[OB_PART_NAME], uint64_t generation, int rank) {
  snprintf(name, OB_PART_NAME, "part-%" PRIu64 "-%d", generation, rank);
}

int ob_part_named(const char *name, uint64_t *generation) {
  char again[OB_PART_NAME];
  int rank;
  if (sscanf(name, "part-%20" SCNu64 "-%9d", generation, &rank) != 2)
    return 0;
  ob_part_name(again, *generation, rank);
  return strcmp(name, again) == 0;
}

/* 64-bit FNV-1a: a manifest is short. */
static uint64_t checksum_of(const char *text, size_t bytes) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t i = 0; i < bytes; i++)
    hash = (hash ^ (unsigned char)text[i]) * 0x100000001b3u;
  return hash;
}

char *ob_manifest_text(const struct ob_manifest *manifest) {
  size_t room = ((size_t)manifest->ranks + 6) * LINE, used;
  char *text = ob_allocate(1, room);
  if (!text)
    return NULL;
  used = (size_t)snprintf(text, room,
                          "onebit checkpoint 1\nkind %.15s\nsteps %" PRIu64 "\ngeneration %" PRIu64
                          "\nranks %d\n",
                          manifest->kind, manifest->steps, manifest->generation, manifest->ranks);
  for (int k = 0; k < manifest->ranks; k++)
    used += (size_t)snprintf(text + used, room - used, "part %d %" PRIu64 " %016" PRIx64 "\n", k,
                             manifest->parts[k].bytes, manifest->parts[k].checksum);
  snprintf(text + used, room - used, "checksum %016" PRIx64 "\n", checksum_of(text, used));
  return text;
}

/* The text that is left, and the number of the line that was read last. */
struct reading {
  const char *text, *at;
  size_t left;
  int number;
  char line[LINE];
};

static onebit_status_t damaged(const struct reading *reading, const char *why) {
  return ob_error(ONEBIT_ERROR_CHECKPOINT, "line %d: %s", reading->number, why);
}

static onebit_status_t next_line(struct reading *reading) {
  const char *end = reading->left ? memchr(reading->at, '\n', reading->left) : NULL;
  size_t length = end ? (size_t)(end - reading->at) : 0;
  reading->number++;
  if (!end)
    return damaged(reading, "the manifest is truncated");
  if (length >= LINE)
    return damaged(reading, "too long");
  memcpy(reading->line, reading->at, length);
  reading->line[length] = 0;
  reading->at += length + 1;
  reading->left -= length + 1;
  return ONEBIT_OK;
}

/* The next line, which is NAME NUMBER. */
static onebit_status_t next_number(struct reading *reading, const char *name, uint64_t *number) {
  char again[LINE];
  OB_TRY(next_line(reading));
  size_t length = strlen(name);
  *number = 0;
  if (strncmp(reading->line, name, length) == 0 && reading->line[length] == ' ')
    *number = strtoull(reading->line + length + 1, NULL, 10);
  snprintf(again, sizeof again, "%s %" PRIu64, name, *number);
  return strcmp(again, reading->line) == 0 ? ONEBIT_OK : damaged(reading, "not what belongs there");
}

static onebit_status_t next_part(struct reading *reading, int k, struct ob_manifest_part *part) {
  char again[LINE];
  int number;
  OB_TRY(next_line(reading));
  if (sscanf(reading->line, "part %9d %20" SCNu64 " %16" SCNx64, &number, &part->bytes,
             &part->checksum) != 3)
    return damaged(reading, "no part");
  snprintf(again, sizeof again, "part %d %" PRIu64 " %016" PRIx64, k, part->bytes, part->checksum);
  return strcmp(again, reading->line) == 0 ? ONEBIT_OK : damaged(reading, "not the part's");
}

static onebit_status_t check_sum(struct reading *reading) {
  char wanted[LINE];
  snprintf(wanted, sizeof wanted, "checksum %016" PRIx64,
           checksum_of(reading->text, (size_t)(reading->at - reading->text)));
  OB_TRY(next_line(reading));
  if (strcmp(reading->line, wanted) != 0)
    return damaged(reading, "the manifest's checksum is another");
  return reading->left ? damaged(reading, "more follows") : ONEBIT_OK;
}

static onebit_status_t next_ranks(struct reading *reading, struct ob_manifest *manifest) {
  uint64_t ranks;
  OB_TRY(next_number(reading, "ranks", &ranks));
  if (ranks < 1 || ranks > INT_MAX || ranks > reading->left / 8) /* each has a line */
    return damaged(reading, "more ranks than lines");
  manifest->ranks = (int)ranks;
  manifest->parts = ob_allocate((size_t)ranks, sizeof *manifest->parts);
  return manifest->parts ? ONEBIT_OK
                         : ob_error(ONEBIT_ERROR_MEMORY, "no memory for a list of parts");
}

onebit_status_t ob_manifest_parse(struct ob_manifest *manifest, const char *text, size_t bytes) {
  struct reading reading = {.text = text, .at = text, .left = bytes};
  uint64_t version;
  *manifest = (struct ob_manifest){0};
  OB_TRY(next_number(&reading, "onebit checkpoint", &version));
  if (version != 1)
    return ob_error(ONEBIT_ERROR_CHECKPOINT,
                    "written by manifest version %" PRIu64 ", this library reads 1", version);
  OB_TRY(next_line(&reading));
  if (sscanf(reading.line, "kind %15s", manifest->kind) != 1)
    return damaged(&reading, "no kind");
  OB_TRY(next_number(&reading, "steps", &manifest->steps));
  OB_TRY(next_number(&reading, "generation", &manifest->generation));
  OB_TRY(next_ranks(&reading, manifest));
  for (int k = 0; k < manifest->ranks; k++)
    OB_TRY(next_part(&reading, k, &manifest->parts[k]));
  return check_sum(&reading);
}
