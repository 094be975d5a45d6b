/* Bounds the time that ranks wait for each other, publishes their waits, and ends communicators. */
#define _DEFAULT_SOURCE /* flock */
#define _POSIX_C_SOURCE 200809L
#include "collectives/watch.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/knobs.h"
#include "base/lock.h"
#include "base/log.h"
#include "base/process.h"
#include "collectives/communicator.h"

/* --- Files that say what ranks are waiting for -------------------------------------------------*/

/* The shortest wait that is written to the file, and the shortest time between two writes, in
 * seconds. */
#define SHORTEST 1.0

struct path {
  char text[64];
};

static struct path user_directory(void) {
  struct path path;
  snprintf(path.text, sizeof path.text, "/tmp/onebit-%lu", (unsigned long)geteuid());
  return path;
}

static struct path presence_path_of(const struct ob_presence *presence) {
  struct path path;
  snprintf(path.text, sizeof path.text, "/tmp/onebit-%lu/%ld-%u", (unsigned long)geteuid(),
           (long)getpid(), presence->number);
  return path;
}

/* Makes the directory, and accepts it only if it belongs to this user, since all users can write to
 * /tmp. */
static int is_own_directory(const char *path) {
  struct stat is;
  return (mkdir(path, 0700), lstat(path, &is) == 0) && S_ISDIR(is.st_mode) &&
         is.st_uid == geteuid() && (is.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

/* True if it is time to write the wait to the file. `waited`, `now`: seconds. */
static int presence_is_due(const struct ob_presence *presence, double waited, double now) {
  return presence->file && waited >= SHORTEST && now - presence->written >= SHORTEST;
}

static void write_presence(struct ob_presence *presence, double now, const char *text) {
  char line[512];
  presence->written = now;
  int length = snprintf(line, sizeof line, "rank %d of %d over %s\n%s\n", presence->rank,
                        presence->size, presence->over, text);
  if (length >= (int)sizeof line)
    length = sizeof line - 1;
  if (pwrite(presence->file, line, (size_t)length, 0) == length)
    (void)!ftruncate(presence->file, length);
}

void ob_presence_begin(struct ob_presence *presence, int rank, int size, const char *over) {
  static atomic_uint numbers;
  const int flags = O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
  *presence = (struct ob_presence){.rank = rank, .size = size, .over = over};
  int file;
  for (;;) { /* `onebit status` may lock a new file for a moment, and remove it */
    presence->number = ++numbers;
    if (!is_own_directory(user_directory().text)) /* again: the last process removes it */
      return;
    file = ob_own_file(open(presence_path_of(presence).text, flags, 0600));
    if (file < 0 && errno == ENOENT)
      continue;
    if (file <= 0)
      return;
    struct stat is = {0};
    const int refused = flock(file, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
    if (!refused && fstat(file, &is) == 0 && is.st_nlink > 0)
      break;
    ob_own_close(file);
    if (refused && refused != EWOULDBLOCK)
      return;
  }
  presence->file = file;
  write_presence(presence, 0, "");
}

void ob_presence_end(struct ob_presence *presence) {
  if (!presence->file)
    return;
  unlink(presence_path_of(presence).text);
  rmdir(user_directory().text); /* fails while it has other files */
  ob_own_close(presence->file);
  presence->file = 0;
}

/* --- Waits -------------------------------------------------------------------------------------*/

/* The default timeout, in seconds, which is also that of PyTorch's NCCL watchdog. It is longer than
 * a checkpoint or an evaluation on one rank takes, and short enough that a job does not seem to
 * wait for ever. */
#define DEFAULT_TIMEOUT 600.0
/* The time between two checks of a wait. A check reads the clock and the communicator's state: a
 * thousand checks a second have no noticeable cost, and no timeout is shorter. */
#define LOOK_SECONDS 0.001
/* The largest time between two checks that counts as waited; the process may have been stopped in
 * between (struct ob_watch). */
#define LONGEST_GAP 1.0

double ob_watch_notice = 10.0;

onebit_status_t ob_watch_timeout(double *seconds) {
  return ob_knob_seconds(OB_KNOB_TIMEOUT, DEFAULT_TIMEOUT, seconds);
}

bool ob_watch_count(struct ob_watch *watch) {
  double now = ob_seconds(), gap = now - watch->seen;
  if (watch->seen > 0 && gap < LOOK_SECONDS)
    return false;
  if (watch->seen > 0)
    watch->waited += gap < LONGEST_GAP ? gap : LONGEST_GAP;
  watch->seen = now;
  return true;
}

/* Writes a text such as "allreduce call 3 of plan 1 (16 MiB): waited 5 s for rank 3 on host h2
 * (receive, chunk 5)". */
static void write_wait_text(onebit_comm_t comm, const char *verb, double seconds,
                            const struct ob_wait *wait, char *text, size_t bytes) {
  char whom[OB_HOST_NAME_BYTES + 32], detail[sizeof wait->detail + 4] = "";
  const char *host = wait->peer >= 0 ? ob_comm_host_name(comm, wait->peer) : "";
  if (wait->peer < 0)
    snprintf(whom, sizeof whom, "%s", wait->others);
  else
    snprintf(whom, sizeof whom, "rank %d%s%s", wait->peer, *host ? " on host " : "", host);
  if (*wait->detail)
    snprintf(detail, sizeof detail, " (%s)", wait->detail);
  snprintf(text, bytes, "%s: %s %.3g s for %s%s", wait->what, verb, seconds, whom, detail);
}

/* True if it is time for the next notice: after 10 s, one minute and five minutes. */
static bool is_notice_due(const struct ob_watch *watch) {
  static const double times[] = {1, 6, 30};
  return watch->notices < 3 && watch->waited >= times[watch->notices] * ob_watch_notice;
}

/* Prints a notice of a wait, but at most one for each communicator in 10 s, however many calls are
 * in flight. */
static void print_notice(struct ob_watch *watch, onebit_comm_t comm, const struct ob_wait *wait) {
  char text[OB_END_BYTES];
  watch->notices++;
  if (comm->noticed > 0 && watch->seen - comm->noticed < ob_watch_notice)
    return;
  comm->noticed = watch->seen;
  write_wait_text(comm, "waiting", watch->waited, wait, text, sizeof text);
  ob_log(OB_LOG_WARN, comm->rank, "%s", text);
}

static void publish_wait(struct ob_watch *watch, onebit_comm_t comm, const struct ob_wait *wait) {
  char text[OB_END_BYTES];
  write_wait_text(comm, "waiting", watch->waited, wait, text, sizeof text);
  write_presence(&comm->presence, watch->seen, text);
}

static onebit_status_t give_up_wait(onebit_comm_t comm, double seconds,
                                    const struct ob_wait *wait) {
  char text[OB_END_BYTES];
  write_wait_text(comm, "waited", seconds, wait, text, sizeof text);
  ob_comm_give_up(comm, text);
  return ob_error(ONEBIT_ERROR_TRANSPORT, "%s", text);
}

/* Adds to the error message the rank that this rank waited for. The communicator has failed, and
 * the rank that gave up may itself have waited for another rank, so the messages of all ranks lead
 * to the missing rank. */
static onebit_status_t add_awaited_rank(onebit_status_t status, ob_wait_describe *describe,
                                        const void *waiter) {
  struct ob_wait wait = {.peer = -1};
  char message[2 * OB_END_BYTES];
  snprintf(message, sizeof message, "%s", onebit_last_error());
  describe(waiter, &wait);
  return wait.peer < 0 ? ob_error(status, "%s", message)
                       : ob_error(status, "%s; this rank waited for rank %d", message, wait.peer);
}

onebit_status_t ob_watch_look(struct ob_watch *watch, onebit_comm_t comm, double grace,
                              ob_wait_describe *describe, const void *waiter) {
  if (!ob_watch_count(watch))
    return ONEBIT_OK;
  onebit_status_t health = ob_comm_health(comm);
  if (health != ONEBIT_OK)
    return add_awaited_rank(health, describe, waiter);
  bool late = watch->waited >= comm->timeout + grace;
  bool shown = presence_is_due(&comm->presence, watch->waited, watch->seen);
  if (!late && !shown && !is_notice_due(watch))
    return ONEBIT_OK;
  struct ob_wait wait = {.peer = -1, .others = "other ranks"};
  describe(waiter, &wait);
  if (late)
    return give_up_wait(comm, comm->timeout, &wait);
  if (shown)
    publish_wait(watch, comm, &wait);
  if (is_notice_due(watch))
    print_notice(watch, comm, &wait);
  return ONEBIT_OK;
}

onebit_status_t ob_watch_alone(struct ob_watch *watch, double timeout, const char *what) {
  return ob_watch_for(watch, timeout, what, "other ranks");
}

onebit_status_t ob_watch_for(struct ob_watch *watch, double timeout, const char *what,
                             const char *whom) {
  if (!ob_watch_count(watch))
    return ONEBIT_OK;
  if (watch->waited >= timeout)
    return ob_error(ONEBIT_ERROR_TRANSPORT, "%s: waited %.3g s for %s", what, timeout, whom);
  if (watch->presence && presence_is_due(watch->presence, watch->waited, watch->seen)) {
    char text[OB_END_BYTES];
    snprintf(text, sizeof text, "%s: waiting %.3g s for %s", what, watch->waited, whom);
    write_presence(watch->presence, watch->seen, text);
  }
  if (!is_notice_due(watch))
    return ONEBIT_OK;
  watch->notices++;
  ob_log(OB_LOG_WARN, -1, "%s: waiting %.3g s for %s", what, watch->waited, whom);
  return ONEBIT_OK;
}

struct batch_wait {
  struct ob_batch *batch;
  const char *what;
};

static void describe_batch(const void *waiter, struct ob_wait *wait) {
  const struct batch_wait *own = waiter;
  const struct ob_transport *transport = own->batch->comm->transport;
  snprintf(wait->what, sizeof wait->what, "%s", own->what);
  if (transport->peer_awaited)
    wait->peer = transport->peer_awaited(own->batch);
}

void ob_backoff(unsigned idle) {
  static const struct timespec nap = {.tv_nsec = 20000};
  if (idle < 100)
    sched_yield();
  else
    nanosleep(&nap, NULL);
}

onebit_status_t ob_watch_batch(struct ob_batch *batch, const char *what) {
  const struct batch_wait own = {batch, what};
  struct ob_watch watch = {0};
  for (unsigned idle = 0;; idle++) {
    onebit_status_t status = batch->comm->transport->test(batch, OB_WAIT_SLICE);
    if (status != ONEBIT_IN_PROGRESS)
      return status;
    OB_TRY(ob_watch_look(&watch, batch->comm, 0, describe_batch, &own));
    ob_backoff(idle);
  }
}

/* --- The end of a communicator -----------------------------------------------------------------*/

bool ob_comm_is_foreign(onebit_comm_t comm) {
  return comm->forks != ob_forks() && comm->transport->network;
}

static bool set_comm_end(onebit_comm_t comm, const char *text) {
  OB_LOCKED(&comm->end.lock);
  bool first = !comm->end.set;
  if (first)
    snprintf(comm->end.text, sizeof comm->end.text, "%s", text);
  comm->end.set = true;
  return first;
}

void ob_comm_receive_end(onebit_comm_t comm, const char *text) { set_comm_end(comm, text); }

static void end_comm_for_all(onebit_comm_t comm, const char *text) {
  if (set_comm_end(comm, text) && comm->transport->abort)
    comm->transport->abort(comm, comm->end.text);
}

void ob_comm_give_up(onebit_comm_t comm, const char *text) {
  char whole[OB_END_BYTES];
  snprintf(whole, sizeof whole, "rank %d gave up: %.220s", comm->rank, text);
  end_comm_for_all(comm, whole);
}

static onebit_status_t check_not_foreign(onebit_comm_t comm) {
  if (!ob_comm_is_foreign(comm))
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_TRANSPORT,
                  "the communicator belongs to the process that this one was forked from: create "
                  "another one in the child");
}

onebit_status_t ob_comm_check(onebit_comm_t comm) {
  OB_TRY(check_not_foreign(comm));
  if (!atomic_load(&comm->end.set))
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_TRANSPORT, "the communicator has failed before: %s", comm->end.text);
}

onebit_status_t ob_comm_health(onebit_comm_t comm) {
  onebit_status_t status = check_not_foreign(comm);
  if (status == ONEBIT_OK && comm->transport->health && !atomic_load(&comm->end.set))
    status = comm->transport->health(comm);
  if (atomic_load(&comm->end.set))
    return ob_error(ONEBIT_ERROR_TRANSPORT, "%s", comm->end.text);
  return status;
}

onebit_status_t onebit_comm_abort(onebit_comm_t comm) {
  OB_CALL_SCOPE;
  char text[64];
  OB_TRY(ob_handle_check(comm, OB_HANDLE_COMM, "comm"));
  OB_TRY(check_not_foreign(comm));
  snprintf(text, sizeof text, "rank %d called onebit_comm_abort", comm->rank);
  end_comm_for_all(comm, text);
  return ONEBIT_OK;
}

onebit_status_t onebit_comm_shrink(onebit_comm_t comm, onebit_comm_t *survivors) {
  OB_CALL_SCOPE;
  char text[64];
  if (survivors)
    *survivors = NULL;
  OB_TRY(ob_handle_check(comm, OB_HANDLE_COMM, "comm"));
  if (!survivors)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "survivors is NULL");
  OB_TRY(check_not_foreign(comm));
  if (!comm->transport->shrink)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "over %s a communicator cannot continue after it lost a rank: end the job, and "
                    "start it again from the last checkpoint",
                    comm->transport->name);
  snprintf(text, sizeof text, "rank %d called onebit_comm_shrink", comm->rank);
  end_comm_for_all(comm, text);
  return comm->transport->shrink(comm, survivors);
}
