/* Shared memory by a name: blocks that a killed process leaves, and names of other objects. */
#include "collectives/hosts.h"

#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "base/error.h"
#include "tests/support.h"

enum { BYTES = 8192 };

static const char *path_of(uint64_t name) {
  static char path[64];
  snprintf(path, sizeof path, "/dev/shm/onebit-%016" PRIx64, name);
  return path;
}

static bool exists(uint64_t name) { return access(path_of(name), F_OK) == 0; }

/* A process that is killed while its block has a name. */
static uint64_t leave_behind(void) {
  uint64_t name = 0;
  int ends[2];
  cr_assert_eq(pipe(ends), 0);
  pid_t child = fork();
  if (child == 0) {
    struct ob_shared shared;
    if (ob_shared_create(&shared, BYTES, 2, 0) == ONEBIT_OK &&
        write(ends[1], &shared.name, sizeof shared.name) == sizeof shared.name)
      raise(SIGKILL);
    _exit(1);
  }
  int status = 0;
  cr_assert_eq(waitpid(child, &status, 0), child);
  cr_assert(WIFSIGNALED(status));
  cr_assert_eq(read(ends[0], &name, sizeof name), (ssize_t)sizeof name);
  return name;
}

Test(shared, what_a_killed_process_left_is_taken_away) {
  struct ob_shared first, second;
  cr_assert_eq(ob_shared_create(&first, BYTES, 2, 0), ONEBIT_OK, "%s", onebit_last_error());
  uint64_t left = leave_behind();
  cr_expect(exists(left));
  cr_assert_eq(ob_shared_create(&second, BYTES, 2, 1), ONEBIT_OK, "%s", onebit_last_error());
  cr_expect_not(exists(left), "%s is still there", path_of(left));
  cr_expect(exists(first.name) && exists(second.name), "a block in use was taken away");
  cr_expect_eq(ob_shared_attach(&second, 0, first.name), ONEBIT_OK, "%s", onebit_last_error());
  first.base[0][0] = 7;
  cr_expect_eq(second.base[0][0], 7);
  uint64_t names[] = {first.name, second.name};
  ob_shared_destroy(&first);
  ob_shared_destroy(&second);
  cr_expect(!exists(names[0]) && !exists(names[1]));
}

static void refused(uint64_t name, const char *words) {
  struct ob_shared shared;
  cr_assert_eq(ob_shared_create(&shared, BYTES, 2, 1), ONEBIT_OK);
  cr_expect_eq(ob_shared_attach(&shared, 0, name), ONEBIT_ERROR_MEMORY, "%s", words);
  cr_expect(strstr(onebit_last_error(), words), "'%s', not '%s'", onebit_last_error(), words);
  ob_shared_destroy(&shared);
}

Test(shared, only_a_block_of_this_user_and_size_is_attached) {
  struct ob_shared other;
  refused(0x1234567, "No such file");
  cr_assert_eq(ob_shared_create(&other, BYTES / 2, 2, 0), ONEBIT_OK);
  refused(other.name, "has 4096 bytes, not 8192");
  ob_shared_destroy(&other);
  cr_assert_eq(mkfifo(path_of(0x7654321), 0600), 0);
  refused(0x7654321, "is not memory of user");
  unlink(path_of(0x7654321));
}

Test(shared, a_block_of_another_user_is_not_attached) {
  struct ob_shared other;
  if (geteuid() != 0)
    cr_skip_test("only root can give a file away");
  cr_assert_eq(ob_shared_create(&other, BYTES, 2, 0), ONEBIT_OK);
  cr_assert_eq(chown(path_of(other.name), 65534, 65534), 0);
  refused(other.name, "is not memory of user 0");
  ob_shared_destroy(&other);
}
