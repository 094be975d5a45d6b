/* Reads what the kernel says of the machine. */
#define _DEFAULT_SOURCE
#include "base/machine.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/hash.h"

uint64_t ob_machine_number(void) {
  char boot[64] = "";
  FILE *file = fopen("/proc/sys/kernel/random/boot_id", "r");
  bool known = file && fgets(boot, sizeof boot, file);
  if (file)
    fclose(file);
  return known ? ob_hash(OB_HASH_START, boot, strlen(boot)) : 0;
}

int ob_machine_processors(void) {
  long processors = sysconf(_SC_NPROCESSORS_ONLN);
  return processors > 0 ? (int)processors : 1;
}
