/*
 * The manifest of a checkpoint in files: a text that says which files are its parts.
 *
 *   onebit checkpoint 1
 *   kind adam
 *   steps 1200
 *   generation 17
 *   ranks 2
 *   part 0 81736 9f07c2e85a1b3d64        bytes, and the checksum of its front
 *   part 1 81720 0c3d5e6f708192a3
 *   checksum 5566778899aabbcc            of all lines before
 *
 * Part k of generation g is the file "part-g-k".
 */
#ifndef OB_OPTIMIZERS_CHECKPOINT_MANIFEST_H
#define OB_OPTIMIZERS_CHECKPOINT_MANIFEST_H

#include <stddef.h>
#include <stdint.h>

#include "onebit/status.h"
#include "optimizers/checkpoint/system.h"

#define OB_MANIFEST     "manifest"
#define OB_MANIFEST_NEW "manifest.new"

enum { OB_PART_NAME = OB_FILE_NAME };

/* A longer one is not read: it has no more than 80 bytes a rank. */
#define OB_MANIFEST_BYTES ((uint64_t)64 << 20)

struct ob_manifest_part {
  uint64_t bytes, checksum;
};

struct ob_manifest {
  char kind[16];
  uint64_t steps, generation;
  int ranks;
  struct ob_manifest_part *parts; /* ob_release */
};

void ob_part_name(char name[OB_PART_NAME], uint64_t generation, int rank);
/* True if this is the name of a part. */
int ob_part_named(const char *name, uint64_t *generation);

/* Returns the text, as a string to be released; NULL: no memory. */
char *ob_manifest_text(const struct ob_manifest *manifest);

/* Parses the text. ONEBIT_ERROR_CHECKPOINT, ONEBIT_ERROR_MEMORY; parts is then to be released,
 * too. */
onebit_status_t ob_manifest_parse(struct ob_manifest *manifest, const char *text, size_t bytes);

#endif
