/*
 * Every system call of connecting fails once, on each of three ranks: with what this process or
 * host lacks, and as when the other side has gone. Each time all ranks end in time, well, or with
 * an error that names the call on the one and the rank on the others.
 */
#include <stdatomic.h>

#include "base/process.h"
#include "collectives/transports/sockets_rendezvous.h"
#include "tests/support.h"
#include "tests/support_sample.h"
#include "tests/support_sockets.h"

enum { RANKS = 3 };

struct fault {
  const char *call;
  int lack, absence;
};

static const struct fault faults[] = {{"socket", EMFILE, ENFILE},
                                      {"bind", EADDRINUSE, EACCES},
                                      {"listen", ENOBUFS, EADDRINUSE},
                                      {"accept", EMFILE, ECONNABORTED},
                                      {"connect", EADDRNOTAVAIL, ECONNREFUSED},
                                      {"getsockname", ENOBUFS, ENOMEM},
                                      {"send", ENOBUFS, EPIPE},
                                      {"recv", ENOMEM, ECONNRESET},
                                      {"epoll_create", EMFILE, ENOMEM},
                                      {"epoll_ctl", ENOSPC, ENOMEM},
                                      {"getrandom", ENOSYS, EIO}};

static _Thread_local bool victim;
static struct {
  int rank;
  bool absent;
  long at, calls;
  const struct fault *struck;
} now;

/* One thread counts: the victim's. */
static int fail_one(const char *call) {
  if (!victim || ++now.calls != now.at)
    return 0;
  for (size_t k = 0; k < sizeof faults / sizeof faults[0]; k++)
    if (strcmp(faults[k].call, call) == 0)
      now.struck = &faults[k];
  if (!now.struck)
    abort();
  return now.absent ? now.struck->absence : now.struck->lack;
}

struct outcome {
  onebit_status_t status[RANKS];
  char message[RANKS][512];
};

static void connect_one(onebit_sockets_options_t *options, void *context) {
  struct outcome *outcome = context;
  onebit_comm_t comm = NULL;
  victim = options->rank == now.rank;
  if (now.rank == 0 && now.at <= 3)
    options->timeout = 1; /* without rank 0's listener nobody can be told */
  outcome->status[options->rank] = onebit_comm_create_sockets(options, &comm);
  snprintf(outcome->message[options->rank], sizeof outcome->message[0], "%s", onebit_last_error());
  onebit_comm_destroy(comm);
}

/* The victim names the missing resource as the system does; the others name the victim, or a rank
 * that has heard of it before them and has closed its connections. */
static void check(const struct outcome *outcome, double seconds) {
  const char *words = strerror(now.absent ? now.struck->absence : now.struck->lack);
  char name[16];
  snprintf(name, sizeof name, "rank %d", now.rank);
  CHECK(seconds < 10, "rank %d, call %ld (%s: %s): %g s", now.rank, now.at, now.struck->call, words,
        seconds);
  for (int rank = 0; rank < RANKS; rank++) {
    const char *message = outcome->message[rank];
    bool failed = outcome->status[rank] != ONEBIT_OK;
    bool named = strstr(message, rank == now.rank ? words : name) || strstr(message, words) ||
                 (rank != now.rank && strstr(message, "or has given up"));
    CHECK(!failed || named || now.absent, "rank %d, call %ld (%s: %s): rank %d says: %s", now.rank,
          now.at, now.struck->call, words, rank, message);
    CHECK(failed == (outcome->status[0] != ONEBIT_OK), "rank %d, call %ld (%s: %s): rank %d: %s",
          now.rank, now.at, now.struck->call, words, rank, message);
  }
}

static void walk(int rank, bool absent) {
  for (long at = 1;; at += test_share() > 1 ? 1 + at / 16 : 1) {
    struct outcome outcome = {0};
    now.rank = rank, now.absent = absent, now.at = at, now.calls = 0, now.struck = NULL;
    double begin = ob_seconds();
    sockets_attempt(RANKS, 1, 1, connect_one, &outcome);
    if (!now.struck)
      break;
    check(&outcome, ob_seconds() - begin);
  }
  checks_must_hold();
}

static void walk_all(int rank) {
  ob_net_fault = fail_one;
  ob_join_last = 0.3;
  walk(rank, false);
  walk(rank, true);
}

Test(sockets_faults, on_rank_0) { walk_all(0); }
Test(sockets_faults, on_rank_1) { walk_all(1); }
Test(sockets_faults, on_rank_2) { walk_all(2); }
