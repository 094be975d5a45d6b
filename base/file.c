/* Opens files that another user may have replaced by something else. */
#define _POSIX_C_SOURCE   200809L
#define _FILE_OFFSET_BITS 64
#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int file_open_file(int directory, const char *path, int flags) {
  return openat(directory, path, flags);
}

struct ob_input_calls ob_input_calls = {.open = file_open_file, .read = pread};

static int file_check(struct ob_input *input) {
  struct stat about;
  if (fstat(input->number, &about) != 0)
    return errno;
  input->bytes = (uint64_t)about.st_size;
  return S_ISREG(about.st_mode) ? 0 : OB_INPUT_IRREGULAR;
}

/* Opens with O_NONBLOCK, since opening a FIFO would otherwise wait for its writer. A socket cannot
 * be opened. */
int ob_input_open(struct ob_input *input, int directory, const char *path) {
  *input = (struct ob_input){.number = -1};
  do
    input->number =
        ob_input_calls.open(directory, path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  while (input->number < 0 && errno == EINTR);
  if (input->number < 0)
    return errno == ENXIO ? OB_INPUT_IRREGULAR : errno;
  int code = file_check(input);
  if (code != 0)
    ob_input_close(input);
  return code;
}

int ob_input_read(const struct ob_input *input, uint64_t offset, void *to, size_t bytes) {
  char *at = to;
  while (bytes) {
    ssize_t some = ob_input_calls.read(input->number, at, bytes, (off_t)offset);
    if (some < 0 && errno == EINTR)
      continue;
    if (some <= 0)
      return some == 0 ? OB_INPUT_CHANGED : errno;
    at += some;
    offset += (uint64_t)some;
    bytes -= (size_t)some;
  }
  return 0;
}

void ob_input_close(struct ob_input *input) {
  if (input->number >= 0)
    close(input->number);
  input->number = -1;
}

/* Checks what was opened, and makes writes block again unless it is a FIFO. */
static int check_output(int number) {
  struct stat about;
  if (fstat(number, &about) != 0)
    return errno;
  int flags = fcntl(number, F_GETFL);
  if (flags < 0 || (!S_ISFIFO(about.st_mode) && fcntl(number, F_SETFL, flags & ~O_NONBLOCK) < 0))
    return errno;
  return 0;
}

int ob_output_open(FILE **file, const char *path, bool append) {
  const int flags = O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
  int number;
  *file = NULL;
  do
    number = open(path, flags | (append ? O_APPEND : O_TRUNC), 0666);
  while (number < 0 && errno == EINTR);
  if (number < 0)
    return errno == ENXIO ? OB_INPUT_IRREGULAR : errno;
  int code = check_output(number);
  if (code == 0 && !(*file = fdopen(number, append ? "a" : "w")))
    code = errno;
  if (code != 0)
    close(number);
  return code;
}

const char *ob_input_reason(int code, char text[OB_INPUT_REASON]) {
  if (code == OB_INPUT_IRREGULAR)
    return strcpy(text, "not a regular file");
  if (code == OB_INPUT_CHANGED)
    return strcpy(text, "it was changed while it was read");
  if (strerror_r(code, text, OB_INPUT_REASON) != 0)
    snprintf(text, OB_INPUT_REASON, "error %d", code);
  return text;
}
