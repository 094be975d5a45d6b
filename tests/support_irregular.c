/* The objects that may stand where a file should be. */
#include "tests/support_irregular.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "tests/support.h"

const char *const irregular_names[IRREGULARS] = {"FIFO", "socket", "directory", "device",
                                                 "link to a FIFO"};

static int bind_socket(const char *path) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  int made = socket(AF_UNIX, SOCK_STREAM, 0), result = -1;
  if (strlen(path) < sizeof address.sun_path) {
    memcpy(address.sun_path, path, strlen(path) + 1);
    result = bind(made, (const void *)&address, sizeof address);
  }
  close(made);
  return result;
}

static void target_of(char target[512], const char *path) {
  snprintf(target, 512, "%s.target", path);
}

void irregular_make(enum irregular kind, const char *path) {
  char target[512];
  int result = -1;
  target_of(target, path);
  switch (kind) {
  case A_FIFO:
    result = mkfifo(path, 0600);
    break;
  case A_SOCKET:
    result = bind_socket(path);
    break;
  case A_DIRECTORY:
    result = mkdir(path, 0700);
    break;
  case A_DEVICE:
    result = symlink("/dev/zero", path);
    break;
  default:
    result = mkfifo(target, 0600) || symlink(target, path);
  }
  CHECK(result == 0, "no %s could be made at %s", irregular_names[kind], path);
}

void irregular_remove(enum irregular kind, const char *path) {
  char target[512];
  target_of(target, path);
  if (kind == A_LINK_TO_A_FIFO)
    unlink(target);
  CHECK((kind == A_DIRECTORY ? rmdir(path) : unlink(path)) == 0, "%s is not there", path);
}
