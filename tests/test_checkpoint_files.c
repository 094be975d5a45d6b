/*
 * Tests checkpoints in files. Whatever happens during a save, a later load gives either the
 * complete previous checkpoint or the complete new one. The next save removes files that are left
 * over.
 */
#define TEST_SECONDS 600
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "base/file.h"
#include "tests/support_files.h"

/* Checkpoints are saved after BEFORE steps, and again after AFTER steps. */
enum { RANKS = 3, BEFORE = 4, AFTER = 6 };

static const struct checkpoint_case three = {.name = "three ranks",
                                             .method = &ob_method_adam,
                                             .size = RANKS,
                                             .steps = 8,
                                             .freeze_step = 3,
                                             .common = {.threads = 1}};

static void check_names(const struct names *wanted) {
  struct names names = list_names(directories.saved);
  CHECK(names.count == wanted->count && memcmp(names.name, wanted->name, sizeof names.name) == 0,
        "%d files, the first %s, not %d, the first %s", names.count, names.name[0], wanted->count,
        wanted->name[0]);
}

/* --- Saving and loading */

/* The parts of the two checkpoints, for comparison. */
static struct saved_parts before, after;

static bool parts_are_equal(const struct saved_parts *a, const struct saved_parts *b) {
  for (int k = 0; k < RANKS; k++)
    if (a->bytes[k] != b->bytes[k] || memcmp(a->memory[k], b->memory[k], a->bytes[k]) != 0)
      return false;
  return true;
}

/* Loads the checkpoint. Returns 0 if it is the previous one, 1 if it is the new one, and -1 if it
 * is neither. */
static int find_checkpoint(void) {
  struct saved_parts parts = {0};
  struct files_run run = {.what = &three, .parts = &parts};
  int which = -1;
  run_files(&run);
  if (run.status[0] == ONEBIT_OK)
    which = parts_are_equal(&parts, &before) ? 0 : parts_are_equal(&parts, &after) ? 1 : -1;
  if (which < 0)
    CHECK(false, "neither checkpoint is there: %s", run.words[0]);
  free_parts(&parts);
  return which;
}

static void create_checkpoints(void) {
  files_begin();
  save_after(&three, BEFORE, &before);
  save_after(&three, AFTER, &after);
}

static void remove_checkpoints(void) {
  free_parts(&before);
  free_parts(&after);
  files_end();
}

/* Restores the directory to one that contains only the first checkpoint. */
static struct names restore_first_checkpoint(void) {
  directory_empty(directories.saved);
  directory_empty(directories.shadow);
  save_checkpoint(&three, BEFORE);
  return list_names(directories.saved);
}

Test(checkpoint_files, saved_and_loaded) {
  create_checkpoints();
  save_checkpoint(&three, BEFORE);
  CHECK(find_checkpoint() == 0, "the wrong checkpoint is there");
  save_checkpoint(&three, AFTER);
  CHECK(find_checkpoint() == 1, "the wrong checkpoint is there");
  struct names names = list_names(directories.saved);
  CHECK(names.count == RANKS + 1 && strcmp(names.name[0], "manifest") == 0 &&
            strcmp(names.name[1], "part-2-0") == 0 && strcmp(names.name[3], "part-2-2") == 0,
        "%d files, %s and %s", names.count, names.name[0], names.name[1]);
  remove_checkpoints();
}

/* ThreadSanitizer cannot follow ranks that are started in a child. */
#if defined(__SANITIZE_THREAD__)
#define FORKS .disabled = true
#else
#define FORKS .disabled = false
#endif

/* --- Crashes: a child process ends in the middle of a save */

/* Forks a child. A failed fork ends the test, because kill(-1) would end every process. */
static pid_t make_child(void) {
  pid_t child = fork();
  cr_assert(child >= 0, "no process could be made");
  return child;
}

/* Saves in a child process. Returns the child's exit status: 0, or 9 if the fault happened. */
static int save_in_child(enum disk_fault fault, long at) {
  pid_t child = make_child();
  if (child == 0) {
    disk_begin(fault, at, directories.shadow);
    save_files(&three, AFTER);
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void crash_everywhere(enum disk_fault fault) {
  int seen[2] = {0, 0}, status = 9;
  create_checkpoints();
  for (size_t k = 0; status == 9; k++) {
    /* Each system call is a test case. All of them are tested, unless short lists of cases are
     * sampled, too. */
    const long at = 1 + (long)(test_thins() ? sample_entry(k) : k);
    struct names first = restore_first_checkpoint();
    status = save_in_child(fault, at);
    check_case("fault %d at call %ld", (int)fault, at);
    CHECK(status == 9 || status == 0, "the process ended with %d", status);
    int which = find_checkpoint();
    if (which >= 0)
      seen[which]++;
    save_checkpoint(&three, AFTER); /* the next save repairs the directory */
    CHECK(find_checkpoint() == 1, "the wrong checkpoint is there");
    CHECK(list_names(directories.saved).count == first.count, "%d files",
          list_names(directories.saved).count);
    checks_must_hold();
  }
  cr_log_info("%d points with the checkpoint before, %d with the new one", seen[0], seen[1]);
  int share = test_thins() ? (int)test_share() : 1;
  CHECK(seen[0] * share > 20 && seen[1] * share > 3, "only %d and %d points", seen[0], seen[1]);
  remove_checkpoints();
}

Test(checkpoint_files, killed_at_any_call, FORKS) { crash_everywhere(DISK_KILLED); }
Test(checkpoint_files, power_cut_at_any_call, FORKS) { crash_everywhere(DISK_CUT); }
Test(checkpoint_files, power_cut_after_names_were_removed, FORKS) {
  crash_everywhere(DISK_CUT_EARLY);
}
Test(checkpoint_files, power_cut_after_a_name_has_changed, FORKS) {
  crash_everywhere(DISK_CUT_LATE);
}

/* --- Calls that fail */

static void check_failure(const struct files_run *run, long at) {
  bool failed = false;
  for (int k = 0; k < RANKS; k++) {
    CHECK(run->status[k] == ONEBIT_ERROR_FILE || run->status[k] == ONEBIT_ERROR_PEER,
          "call %ld: rank %d has %d", at, k, (int)run->status[k]);
    failed |= run->status[k] == ONEBIT_ERROR_FILE;
    if (run->status[k] == ONEBIT_ERROR_FILE)
      CHECK(strstr(run->words[k], directories.root), "the message has no path: %s", run->words[k]);
  }
  CHECK(failed, "call %ld: no rank knows why", at);
}

/* Makes every system call of a save fail once. The ranks must get an error, or the failure must
 * have no effect. */
static void fail_everywhere(enum disk_fault fault, const char *reason) {
  int failures = 0;
  bool passed = false;
  create_checkpoints();
  for (size_t k = 0; !passed; k++) {
    const long at = 1 + (long)sample_entry(k);
    struct names first = restore_first_checkpoint();
    disk_begin(fault, at, directories.shadow);
    struct files_run run = save_files(&three, AFTER);
    passed = disk_calls() < at;
    disk_end();
    check_case("fault %d at call %ld", (int)fault, at);
    int which = find_checkpoint();
    if (run.status[0] != ONEBIT_OK) {
      failures++;
      check_failure(&run, at);
      if (which == 0 && fault == DISK_FULL)
        check_names(&first);
      CHECK(run.status[0] != ONEBIT_ERROR_FILE || strstr(run.words[0], reason), "%s", run.words[0]);
    } else {
      CHECK(which == 1, "it was not saved");
    }
    checks_must_hold();
  }
  CHECK(failures * (int)test_share() > 20, "only %d calls have failed", failures);
  remove_checkpoints();
}

Test(checkpoint_files, disk_full_at_any_call) {
  fail_everywhere(DISK_FULL, "No space left on device");
}
Test(checkpoint_files, disk_broken_from_any_call_on) {
  fail_everywhere(DISK_BROKEN, "Input/output error");
}

Test(checkpoint_files, calls_that_do_not_do_all_at_once) {
  create_checkpoints();
  restore_first_checkpoint();
  disk_begin(DISK_SLOW, 0, directories.shadow);
  save_checkpoint(&three, AFTER);
  disk_end();
  CHECK(find_checkpoint() == 1, "the wrong checkpoint is there");
  remove_checkpoints();
}

/* The kernel limits the size of files to less than the size of a part. */
Test(checkpoint_files, file_too_large, FORKS) {
  create_checkpoints();
  struct names first = restore_first_checkpoint();
  pid_t child = make_child();
  if (child == 0) {
    struct rlimit limit = {10000, 10000};
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    struct files_run run = save_files(&three, AFTER);
    bool told = run.status[0] == ONEBIT_ERROR_FILE && run.status[1] == ONEBIT_ERROR_FILE &&
                strstr(run.words[2], "part-2-2: File too large");
    _exit(told ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "nobody was told: %d", status);
  check_names(&first);
  CHECK(find_checkpoint() == 0, "the wrong checkpoint is there");
  remove_checkpoints();
}

/* --- Other processes at the same time */

Test(checkpoint_files, one_of_two_savers_is_told) {
  create_checkpoints();
  struct names first = restore_first_checkpoint();
  int lock = open(directories.saved, O_RDONLY | O_DIRECTORY);
  cr_assert(lock >= 0 && flock(lock, LOCK_EX | LOCK_NB) == 0);
  struct files_run run = save_files(&three, AFTER);
  expect_rank(&run, 0, ONEBIT_ERROR_FILE, "another process is saving a checkpoint here");
  expect_rank(&run, 1, ONEBIT_ERROR_PEER, "");
  close(lock);
  check_names(&first);
  CHECK(find_checkpoint() == 0, "the wrong checkpoint is there");
  save_checkpoint(&three, AFTER);
  CHECK(find_checkpoint() == 1, "the wrong checkpoint is there");
  remove_checkpoints();
}

static struct ob_input_calls real_calls;
static atomic_int turn;
static const char *replaced_at; /* another checkpoint is saved just before this file is first
                                 * opened */

static int open_after_save(int directory, const char *path, int flags) {
  if (strcmp(path, replaced_at) == 0 && atomic_fetch_add(&turn, 1) == 0) {
    ob_input_calls = real_calls;
    save_checkpoint(&three, AFTER);
  }
  return real_calls.open(directory, path, flags);
}

/* Simulates another process that saves a checkpoint after one rank has read the manifest, or has
 * opened some parts. The other ranks read and open them before that save or after it. */
Test(checkpoint_files, a_load_beside_a_save) {
  static const char *const files[] = {"part-1-0", "part-1-1", "part-1-2", "manifest"};
  create_checkpoints();
  for (size_t k = 0; k < sizeof files / sizeof files[0]; k++) {
    restore_first_checkpoint();
    real_calls = ob_input_calls;
    replaced_at = files[k];
    atomic_store(&turn, 0);
    ob_input_calls.open = open_after_save;
    CHECK(find_checkpoint() == 1, "%s: the wrong checkpoint is there", files[k]);
    ob_input_calls = real_calls;
    checks_must_hold();
  }
  remove_checkpoints();
}
