/* The manifest: written, and read with care. */
#include "optimizers/checkpoint/manifest.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/hash.h"
#include "base/memory.h"

enum { LINE = 80 }; /* no line is longer, with its end */

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

char *ob_manifest_text(const struct ob_manifest *manifest) {
  size_t capacity = ((size_t)manifest->ranks + 6) * LINE, used;
  char *text = ob_allocate(1, capacity);
  if (!text)
    return NULL;
  used = (size_t)snprintf(text, capacity,
                          "onebit checkpoint 1\nkind %.15s\nsteps %" PRIu64 "\ngeneration %" PRIu64
                          "\nranks %d\n",
                          manifest->kind, manifest->steps, manifest->generation, manifest->ranks);
  for (int k = 0; k < manifest->ranks; k++)
    used += (size_t)snprintf(text + used, capacity - used, "part %d %" PRIu64 " %016" PRIx64 "\n",
                             k, manifest->parts[k].bytes, manifest->parts[k].checksum);
  snprintf(text + used, capacity - used, "checksum %016" PRIx64 "\n",
           ob_hash(OB_HASH_START, text, used));
  return text;
}

/* Returns the number that follows this text, and moves behind it; 0 if the text or the number is
 * missing. */
static uint64_t number_after(const char **text, const char *expected, int base) {
  size_t length = strlen(expected);
  if (strncmp(*text, expected, length) != 0)
    return 0;
  char *end;
  uint64_t number = strtoull(*text + length, &end, base);
  *text = end;
  return number;
}

/* Reads the fields that are there; writing them again shows whether the text has nothing else. */
static onebit_status_t manifest_read_text(struct ob_manifest *manifest, const char *text,
                                          size_t bytes) {
  uint64_t version = number_after(&text, "onebit checkpoint ", 10);
  if (version > 1)
    return ob_error(ONEBIT_ERROR_CHECKPOINT,
                    "written by manifest version %" PRIu64 ", this library reads 1", version);
  int end = 0;
  if (sscanf(text, "\nkind %15s%n", manifest->kind, &end) == 1)
    text += end;
  manifest->steps = number_after(&text, "\nsteps ", 10);
  manifest->generation = number_after(&text, "\ngeneration ", 10);
  uint64_t ranks = number_after(&text, "\nranks ", 10);
  if (ranks > INT_MAX || ranks > bytes / 8) /* each has a line */
    return ob_error(ONEBIT_ERROR_CHECKPOINT, "line 5: more ranks than lines");
  manifest->ranks = (int)ranks;
  manifest->parts = ob_allocate((size_t)ranks, sizeof *manifest->parts);
  if (!manifest->parts)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for a list of parts");
  for (uint64_t k = 0; k < ranks; k++) {
    number_after(&text, "\npart ", 10);
    manifest->parts[k].bytes = number_after(&text, " ", 10);
    manifest->parts[k].checksum = number_after(&text, " ", 16);
  }
  return ONEBIT_OK;
}

/* Fails unless the text equals the one that would be written; the message names the first line that
 * differs. */
static onebit_status_t manifest_compare(const char *text, size_t bytes, const char *wanted) {
  size_t at = 0;
  int line = 1;
  while (at < bytes && text[at] == wanted[at] && wanted[at])
    line += text[at++] == '\n';
  if (at == bytes && !wanted[at])
    return ONEBIT_OK;
  const char *why = at == bytes                 ? "the manifest is truncated"
                    : !wanted[at]               ? "more follows"
                    : strlen(wanted + at) <= 17 ? "the manifest's checksum is another"
                                                : "not what belongs there";
  return ob_error(ONEBIT_ERROR_CHECKPOINT, "line %d: %s", line, why);
}

onebit_status_t ob_manifest_parse(struct ob_manifest *manifest, const char *text, size_t bytes) {
  *manifest = (struct ob_manifest){0};
  char *copy = ob_allocate(1, bytes + 1), *again = NULL;
  onebit_status_t status = ob_error(ONEBIT_ERROR_MEMORY, "no memory for a manifest");
  if (copy) {
    memcpy(copy, text, bytes);
    status = manifest_read_text(manifest, copy, bytes);
  }
  if (status == ONEBIT_OK) {
    again = ob_manifest_text(manifest);
    status = again ? manifest_compare(text, bytes, again)
                   : ob_error(ONEBIT_ERROR_MEMORY, "no memory for a manifest");
  }
  if (status == ONEBIT_OK && manifest->ranks < 1)
    status = ob_error(ONEBIT_ERROR_CHECKPOINT, "line 5: no rank has saved");
  ob_release(copy);
  ob_release(again);
  return status;
}
