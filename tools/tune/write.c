/* Writes the tuning file: all of it or nothing. */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tools/tune/tune.h"

/* The directories above a path, as far as they are missing. What cannot be made is found by
 * whoever writes there. */
static void make_directories(const char *path) {
  char part[OB_TUNING_PATH_ROOM];
  snprintf(part, sizeof part, "%s", path);
  for (char *slash = strchr(part + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
    *slash = '\0';
    mkdir(part, 0777);
    *slash = '/';
  }
}

/* Beside the file, so that renaming replaces it at once; with the process in its name, so that two
 * do not write the same. */
bool tune_write(const char *path, const struct ob_costs *costs,
                const struct ob_tuning_origin *origin) {
  char fresh[OB_TUNING_PATH_ROOM + 32];
  if (*path)
    make_directories(path);
  snprintf(fresh, sizeof fresh, "%s.%ld", path, (long)getpid());
  FILE *file = fopen(fresh, "w");
  if (!file) {
    tune_complain("%s cannot be written: %s", path, strerror(errno));
    return false;
  }
  bool well = ob_tuning_write(file, costs, origin);
  well &= fclose(file) == 0;
  if (well && rename(fresh, path) == 0)
    return true;
  tune_complain("%s cannot be written: %s", path, strerror(errno));
  remove(fresh);
  return false;
}
