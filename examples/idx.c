/* The files of idx.h. */
#include "examples/idx.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef EXAMPLES_HAVE_ZLIB
#include <zlib.h>
#endif

/* A file that is read from beginning to end. `gone_wrong`: the reader's message if bytes are
 * missing; "" if the file just ends. */
typedef struct stream {
#ifdef EXAMPLES_HAVE_ZLIB
  gzFile file;
#else
  FILE *file;
#endif
  const char *path;
  char *words;
  char gone_wrong[100];
} stream_t;

static int refuse(const stream_t *stream, const char *why) {
  snprintf(stream->words, IDX_WORDS, "%.300s: %.200s", stream->path, why);
  return -1;
}

/* --- Bytes: zlib reads plain files too ---------------------------------------------------------*/

#ifdef EXAMPLES_HAVE_ZLIB
static int open_stream(stream_t *stream) {
  errno = 0;
  stream->file = gzopen(stream->path, "rb");
  return stream->file ? 0 : refuse(stream, errno ? strerror(errno) : "out of memory");
}

static void close_stream(stream_t *stream) { gzclose_r(stream->file); }

/* Reads up to `count` bytes, and returns the number that came. */
static size_t take(stream_t *stream, unsigned char *bytes, size_t count) {
  size_t taken = 0;
  int status = Z_OK;
  while (taken < count) {
    const size_t left = count - taken, part = left < 1u << 20 ? left : 1u << 20;
    const int came = gzread(stream->file, bytes + taken, (unsigned)part);
    if (came <= 0)
      break;
    taken += (size_t)came;
  }
  const char *said = gzerror(stream->file, &status);
  if (status != Z_OK)
    snprintf(stream->gone_wrong, sizeof stream->gone_wrong, "%s",
             status == Z_ERRNO       ? strerror(errno)
             : status == Z_BUF_ERROR ? "the compressed file is cut short"
             : *said                 ? said
                                     : "the compressed file is damaged");
  return taken;
}
#else
static int open_stream(stream_t *stream) {
  unsigned char magic[2] = {0};
  stream->file = fopen(stream->path, "rb");
  if (!stream->file)
    return refuse(stream, strerror(errno));
  const size_t count = fread(magic, 1, 2, stream->file);
  rewind(stream->file);
  if (count < 2 || magic[0] != 0x1f || magic[1] != 0x8b)
    return 0;
  fclose(stream->file);
  return refuse(stream, "is compressed, and this program was built without zlib; gunzip it");
}

static void close_stream(stream_t *stream) { fclose(stream->file); }

static size_t take(stream_t *stream, unsigned char *bytes, size_t count) {
  const size_t taken = fread(bytes, 1, count, stream->file);
  if (ferror(stream->file))
    snprintf(stream->gone_wrong, sizeof stream->gone_wrong, "%s", strerror(errno));
  return taken;
}
#endif

/* --- The format --------------------------------------------------------------------------------*/

enum { MOST_BYTES = 1 << 30 }; /* MNIST has 47 million */

/* Refuses a file that ends before the elements `wanted`. */
static int refuse_end(const stream_t *stream, size_t came, size_t wanted) {
  char why[200];
  if (stream->gone_wrong[0])
    return refuse(stream, stream->gone_wrong);
  snprintf(why, sizeof why, "is cut short: its header announces %zu bytes, %zu are there", wanted,
           came);
  return refuse(stream, why);
}

static int read_header(stream_t *stream, idx_t *idx, size_t dimensions, size_t *bytes) {
  unsigned char header[4 + 4 * IDX_DIMENSIONS] = {0};
  char why[200];
  const size_t wanted = 4 + 4 * dimensions, came = take(stream, header, wanted);
  if (stream->gone_wrong[0])
    return refuse(stream, stream->gone_wrong);
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
  unsigned char more;
  if (bytes > 0) {
    idx->data = malloc(bytes);
    if (!idx->data)
      return refuse(stream, "out of memory");
    const size_t came = take(stream, idx->data, bytes);
    if (came < bytes)
      return refuse_end(stream, came, bytes);
  }
  /* the checksum of a compressed file is looked at when its end is read */
  if (take(stream, &more, 1) > 0)
    return refuse(stream, "has more bytes than its header announces");
  return stream->gone_wrong[0] ? refuse(stream, stream->gone_wrong) : 0;
}

int idx_read(idx_t *idx, const char *path, size_t dimensions, char words[IDX_WORDS]) {
  stream_t stream = {.path = path, .words = words};
  size_t bytes = 0;
  *idx = (idx_t){{0}, NULL};
  if (open_stream(&stream) != 0)
    return -1;
  int result = read_header(&stream, idx, dimensions, &bytes);
  if (result == 0)
    result = read_elements(&stream, idx, bytes);
  close_stream(&stream);
  if (result != 0)
    idx_free(idx);
  return result;
}

void idx_free(idx_t *idx) {
  free(idx->data);
  *idx = (idx_t){{0}, NULL};
}
