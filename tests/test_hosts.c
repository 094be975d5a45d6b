/* Tests of hosts, and of the memory that ranks of a host share. */
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "base/error.h"
#include "collectives/hosts.h"
#include "tests/support.h"

/* Tests how hosts are numbered for any placement of ranks by the launcher, and how ranks that are
 * threads are distributed over emulated hosts. */

enum { RANKS = 6 };

/* A placement of ranks: each rank's host, as the launcher numbers hosts; the number of hosts; the
 * ranks per host (0 if hosts differ), and the smallest and largest number on a host; and strings
 * with a digit for each rank. */
struct placement {
  int host_of[RANKS];
  int count, each, fewest, most;
  const char *host, *place, *here; /* digits per rank: its host, its local rank, the ranks on its
                                    * host */
  const char *ranks;               /* if `each` is not 0: all ranks, host by host */
};

/* Hosts are numbered in the order of their first rank, whatever the launcher's numbers are. */
static const struct placement placements[] = {
    {{5, 5, 5, 5, 5, 5}, 1, 6, 6, 6, "000000", "012345", "666666", "012345"},
    {{0, 0, 0, 1, 1, 1}, 2, 3, 3, 3, "000111", "012012", "333333", "012345"},
    /* ranks alternate between hosts */
    {{9, 4, 9, 4, 9, 4}, 2, 3, 3, 3, "010101", "001122", "333333", "024135"},
    {{2, 0, 1, 1, 0, 2}, 3, 2, 2, 2, "012210", "000111", "222222", "051423"},
    {{-3, 7, 0, 100, 2, 1}, 6, 1, 1, 1, "012345", "000000", "111111", "012345"},
    /* hosts with unequal numbers of ranks */
    {{1, 0, 1, 1, 0, 1}, 2, 0, 2, 4, "010010", "001213", "424424", NULL},
    {{3, 2, 1, 3, 2, 3}, 3, 0, 1, 3, "012010", "000112", "321323", NULL},
};

/* Returns a rank's digit as a number. */
static int digit_at(const char *digits, int rank) { return digits[rank] - '0'; }

static void check_rank_placement(const struct placement *wanted, const struct ob_hosts *hosts,
                                 int rank) {
  CHECK(hosts->count == wanted->count && hosts->each == wanted->each, "%d hosts with %d ranks",
        hosts->count, hosts->each);
  CHECK(hosts->fewest == wanted->fewest && hosts->max == wanted->most, "%d to %d ranks",
        hosts->fewest, hosts->max);
  CHECK(hosts->host == digit_at(wanted->host, rank) &&
            hosts->local_rank == digit_at(wanted->place, rank),
        "local_rank %d of host %d", hosts->local_rank, hosts->host);
  CHECK(hosts->here == digit_at(wanted->here, rank), "%d ranks here", hosts->here);
  for (int k = 0; wanted->each && k < RANKS; k++)
    CHECK(hosts->ranks[k] == digit_at(wanted->ranks, k), "rank %d at %d", hosts->ranks[k], k);
}

Test(hosts, are_numbered_by_their_first_rank) {
  for (size_t k = 0; k < sizeof placements / sizeof placements[0]; k++)
    for (int rank = 0; rank < RANKS; rank++) {
      struct ob_hosts hosts;
      check_case("placement %zu, rank %d", k, rank);
      CHECK_STATUS(ob_hosts_create(&hosts, placements[k].host_of, rank, RANKS), ONEBIT_OK);
      check_rank_placement(&placements[k], &hosts, rank);
      ob_hosts_destroy(&hosts);
    }
}

Test(hosts, none_given_is_one) {
  for (int rank = 0; rank < RANKS; rank++) {
    struct ob_hosts hosts;
    CHECK_STATUS(ob_hosts_create(&hosts, NULL, rank, RANKS), ONEBIT_OK);
    check_rank_placement(&placements[0], &hosts, rank);
    ob_hosts_destroy(&hosts);
  }
}

static void check_split(int size, int hosts) {
  onebit_comm_t comms[16];
  check_case("%d ranks on %d hosts", size, hosts);
  CHECK_STATUS(onebit_comm_create_loopback_hosts(size, hosts, comms), ONEBIT_OK);
  for (int r = 0; r < size; r++) {
    CHECK(onebit_comm_hosts(comms[r]) == hosts, "%d hosts", onebit_comm_hosts(comms[r]));
    CHECK(onebit_comm_rank(comms[r]) == r && onebit_comm_size(comms[r]) == size, "rank %d of %d",
          onebit_comm_rank(comms[r]), onebit_comm_size(comms[r]));
    onebit_comm_destroy(comms[r]);
  }
}

Test(hosts, any_split_can_be_had) {
  for (int size = 1; size <= 16; size++)
    for (int hosts = 1; hosts <= size; hosts++)
      check_split(size, hosts);
  onebit_comm_t self = self_comm();
  CHECK(onebit_comm_hosts(self) == 1, "a rank alone is on %d hosts", onebit_comm_hosts(self));
  onebit_comm_destroy(self);
}

/* Emulated hosts have consecutive ranks, and their numbers of ranks differ by at most one. A
 * hierarchical plan is refused unless all hosts have the same number. */
static void create_hierarchical_plan(onebit_comm_t comm, void *context) {
  const int *hosts = context;
  int size = onebit_comm_size(comm);
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  onebit_plan_t plan = NULL;
  char words[32];
  check_case("%d ranks on %d hosts", size, *hosts);
  options.schedule = ONEBIT_SCHEDULE_HIERARCHICAL;
  snprintf(words, sizeof words, "%d to %d ranks", size / *hosts, size / *hosts + 1);
  onebit_status_t status = onebit_plan_create(comm, 10, &options, &plan);
  if (size % *hosts == 0) {
    CHECK_STATUS(status, ONEBIT_OK);
  } else {
    CHECK_STATUS(status, ONEBIT_ERROR_UNSUPPORTED);
    CHECK_WORDS(words);
  }
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
}

Test(hosts, ranks_are_spread_evenly) {
  for (int size = 1; size <= 9; size++)
    for (int hosts = 1; hosts <= size; hosts++)
      on_hosts(size, hosts, create_hierarchical_plan, &hosts);
}

/* Tests named shared memory: blocks that a killed process leaves behind, and names that belong to
 * other objects. */

enum { BYTES = 8192 };

static const char *shared_block_path(uint64_t name) {
  static char path[64];
  snprintf(path, sizeof path, "/dev/shm/onebit-%016" PRIx64, name);
  return path;
}

static bool shared_block_exists(uint64_t name) {
  return access(shared_block_path(name), F_OK) == 0;
}

/* Runs a process that is killed while its block has a name. Afterwards any process of this user may
 * remove the block, even one of another test. */
static uint64_t leave_killed_process_block(void) {
  uint64_t name = 0;
  int ends[2];
  cr_assert_eq(pipe(ends), 0);
  pid_t child = fork();
  if (child == 0) {
    struct ob_shared shared;
    if (ob_shared_create(&shared, BYTES, 2, 0) == ONEBIT_OK && shared_block_exists(shared.name) &&
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
  uint64_t left = leave_killed_process_block();
  cr_assert_eq(ob_shared_create(&second, BYTES, 2, 1), ONEBIT_OK, "%s", onebit_last_error());
  cr_expect_not(shared_block_exists(left), "%s is still there", shared_block_path(left));
  cr_expect(shared_block_exists(first.name) && shared_block_exists(second.name),
            "a block in use was taken away");
  cr_expect_eq(ob_shared_attach(&second, 0, first.name), ONEBIT_OK, "%s", onebit_last_error());
  first.base[0][0] = 7;
  cr_expect_eq(second.base[0][0], 7);
  uint64_t names[] = {first.name, second.name};
  ob_shared_destroy(&first);
  ob_shared_destroy(&second);
  cr_expect(!shared_block_exists(names[0]) && !shared_block_exists(names[1]));
}

static void check_attach_refused(uint64_t name, const char *words) {
  struct ob_shared shared;
  cr_assert_eq(ob_shared_create(&shared, BYTES, 2, 1), ONEBIT_OK);
  cr_expect_eq(ob_shared_attach(&shared, 0, name), ONEBIT_ERROR_MEMORY, "%s", words);
  cr_expect(strstr(onebit_last_error(), words), "'%s', not '%s'", onebit_last_error(), words);
  ob_shared_destroy(&shared);
}

Test(shared, only_a_block_of_this_user_and_size_is_attached) {
  struct ob_shared other;
  check_attach_refused(0x1234567, "No such file");
  cr_assert_eq(ob_shared_create(&other, BYTES / 2, 2, 0), ONEBIT_OK);
  check_attach_refused(other.name, "has 4096 bytes, not 8192");
  ob_shared_destroy(&other);
  const uint64_t no_memory = UINT64_C(0x7654321000000000) | (uint64_t)getpid();
  cr_assert_eq(mkfifo(shared_block_path(no_memory), 0600), 0);
  check_attach_refused(no_memory, "is not shared memory of user");
  unlink(shared_block_path(no_memory));
}

Test(shared, a_block_of_another_user_is_not_attached) {
  struct ob_shared other;
  if (geteuid() != 0)
    cr_skip_test("only root can give a file away");
  cr_assert_eq(ob_shared_create(&other, BYTES, 2, 0), ONEBIT_OK);
  cr_assert_eq(chown(shared_block_path(other.name), 65534, 65534), 0);
  check_attach_refused(other.name, "is not shared memory of user 0");
  ob_shared_destroy(&other);
}
