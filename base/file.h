/*
 * Files that another user may have replaced by something else. A FIFO, a device, a socket or a
 * directory in place of a file to read is refused without waiting. A file that becomes shorter
 * while it is read is an error, not a signal.
 */
#ifndef OB_BASE_FILE_H
#define OB_BASE_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

/* An open file. */
struct ob_input {
  int number;
  uint64_t bytes; /* the file's size when it was opened */
};

/* The functions below return 0, the system's errno, or one of these. */
enum { OB_INPUT_IRREGULAR = -1, OB_INPUT_CHANGED = -2 };

/* Opens a regular file, or a link to one, for reading.
 *   directory   an open directory to which the path is relative; AT_FDCWD: the current one
 * On failure no file is open. */
int ob_input_open(struct ob_input *input, int directory, const char *path);

/* Reads exactly `bytes` bytes, or fails. */
int ob_input_read(const struct ob_input *input, uint64_t offset, void *to, size_t bytes);

void ob_input_close(struct ob_input *input);

/* Writes to `text` the meaning of a code that these functions returned. Returns `text`. */
enum { OB_INPUT_REASON = 96 };
const char *ob_input_reason(int code, char text[OB_INPUT_REASON]);

/* Opens a file for writing: with `append` at its end, otherwise emptied. A FIFO without a reader is
 * refused, since opening it would block. If a FIFO's reader is too slow, writes fail and lines are
 * lost; the program does not wait. */
int ob_output_open(FILE **file, const char *path, bool append);

/* The system calls that these functions use; a test may replace them. */
struct ob_input_calls {
  int (*open)(int directory, const char *path, int flags);
  ssize_t (*read)(int file, void *to, size_t bytes, off_t offset);
};
extern struct ob_input_calls ob_input_calls;

#endif
