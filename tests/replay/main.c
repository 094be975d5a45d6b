/* onebit-replay [--loopback] [--codec NAME] DIR...: runs the recorded cases DIR and prints one line
 * per case. The exit status is 0 if all cases are ok, 1 if some are not, 2 for a wrong command
 * line. */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/replay/replay.h"

static bool run_case(char *directory) {
  struct replay_result result;
  for (size_t end = strlen(directory); end > 1 && directory[end - 1] == '/'; end--)
    directory[end - 1] = '\0';
  const char *slash = strrchr(directory, '/'), *name = slash ? slash + 1 : directory;
  replay_run(directory, &result);
  printf("replay %s: %llu values, %llu exceptions, worst %.3g, %s\n", name,
         (unsigned long long)result.values, (unsigned long long)result.exceptions, result.worst,
         result.failed ? "FAILED" : "ok");
  fflush(stdout);
  if (result.failed)
    fprintf(stderr, "onebit-replay: %s: %s\n", name, result.error);
  return !result.failed;
}

int main(int argc, char **argv) {
  bool good = true;
  int first = 1;
  for (; first < argc && argv[first][0] == '-'; first++)
    if (strcmp(argv[first], "--codec") == 0 && first + 1 < argc)
      setenv("ONEBIT_CODEC", argv[++first], 1);
    else if (strcmp(argv[first], "--loopback") !=
             0) /* accepted without effect: every run is over loopback */
      first = argc;
  if (first >= argc) {
    fprintf(stderr, "usage: onebit-replay [--loopback] [--codec NAME] DIR...\n");
    return 2;
  }
  for (; first < argc; first++)
    good &= run_case(argv[first]);
  return good ? 0 : 1;
}
