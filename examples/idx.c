/* The files of idx.h. */
#include "examples/idx.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct stream {
  FILE *file;
  const char *path;
  char *words;
} stream_t;

static int refuse(const stream_t *stream, const char *why) {
  snprintf(stream->words, IDX_WORDS, "%.300s: %.200s", stream->path, why);
  return -1;
}

/* --- The format --------------------------------------------------------------------------------*/

enum { MOST_BYTES = 1 << 30 }; /* MNIST has 47 million */

/* Refuses a file that ends before the elements `wanted`. */
static int refuse_end(const stream_t *stream, size_t came, size_t wanted) {
  char why[200];
  if (ferror(stream->file))
    return refuse(stream, strerror(errno));
  snprintf(why, sizeof why, "is cut short: its header announces %zu bytes, %zu are there", wanted,
           came);
  return refuse(stream, why);
}

static int read_header(stream_t *stream, idx_t *idx, size_t dimensions, size_t *bytes) {
  unsigned char header[4 + 4 * IDX_DIMENSIONS] = {0};
  char why[200];
  const size_t wanted = 4 + 4 * dimensions, came = fread(header, 1, wanted, stream->file);
  if (ferror(stream->file))
    return refuse(stream, strerror(errno));
  if (header[0] == 0x1f && header[1] == 0x8b)
    return refuse(stream, "is compressed; gunzip it");
  if (header[0] != 0 || header[1] != 0 || header[2] != 8 || header[3] != dimensions) {
    snprintf(why, sizeof why,
             "begins with %02x %02x %02x %02x, not 00 00 08 %02zx as unsigned bytes of %zu "
             "dimensions do in IDX",
             header[0], header[1], header[2], header[3], dimensions, dimensions);
    return refuse(stream, why);
  }
  if (came < wanted)
    return refuse(stream, "is cut short within its header");
  *bytes = 1;
  for (size_t d = 0; d < dimensions; d++) {
    const unsigned char *at = header + 4 + 4 * d;
    idx->size[d] = (size_t)at[0] << 24 | (size_t)at[1] << 16 | (size_t)at[2] << 8 | at[3];
    if (idx->size[d] > 0 && *bytes > MOST_BYTES / idx->size[d])
      return refuse(stream, "its header announces more than a gigabyte");
    *bytes *= idx->size[d];
  }
  return 0;
}

static int read_elements(stream_t *stream, idx_t *idx, size_t bytes) {
  if (bytes > 0) {
    idx->data = malloc(bytes);
    if (!idx->data)
      return refuse(stream, "out of memory");
    const size_t came = fread(idx->data, 1, bytes, stream->file);
    if (came < bytes)
      return refuse_end(stream, came, bytes);
  }
  return fgetc(stream->file) == EOF ? 0
                                    : refuse(stream, "has more bytes than its header announces");
}

int idx_read(idx_t *idx, const char *path, size_t dimensions, char words[IDX_WORDS]) {
  stream_t stream = {.path = path, .words = words};
  size_t bytes = 0;
  *idx = (idx_t){{0}, NULL};
  if (!(stream.file = fopen(path, "rb")))
    return refuse(&stream, strerror(errno));
  int result = read_header(&stream, idx, dimensions, &bytes);
  if (result == 0)
    result = read_elements(&stream, idx, bytes);
  fclose(stream.file);
  if (result != 0)
    idx_free(idx);
  return result;
}

void idx_free(idx_t *idx) {
  free(idx->data);
  *idx = (idx_t){{0}, NULL};
}
