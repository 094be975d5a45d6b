/* The built programs, run as a user runs them. */
#define _POSIX_C_SOURCE 200809L
#include "tests/support_program.h"

#include <criterion/criterion.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

const char *program(int wanted, const char *format, ...) {
  static char said[1 << 15];
  char command[4096];
  const char *build = getenv("BUILD");
  size_t used = (size_t)snprintf(command, 1024, "exec 2>&1; %s/", build ? build : "build");
  cr_assert(used < 1024, "BUILD is too long");
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(command + used, sizeof command - used, format, arguments);
  va_end(arguments);
  FILE *pipe = popen(command, "r");
  cr_assert(pipe);
  said[fread(said, 1, sizeof said - 1, pipe)] = '\0';
  int status = pclose(pipe);
  cr_expect(WIFEXITED(status) && WEXITSTATUS(status) == wanted, "%s: status %#x, not %d: %s",
            command, (unsigned)status, wanted, said);
  return said;
}

void expect_said(const char *said, const char *part) {
  cr_expect(strstr(said, part), "\"%s\" does not say \"%s\"", said, part);
}
