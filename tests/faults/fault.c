/* Commits the faults of the table's rows. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "tests/faults/faults.h"

double participant_clock(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void participant_sleep(double seconds) {
  struct timespec nap = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
  nanosleep(&nap, NULL);
}

/* Returns a number less than `below`, which depends only on the row's seed and on `what`, the
 * purpose of the number. */
static unsigned choose_number(const struct participant *participant, unsigned what,
                              unsigned below) {
  uint64_t x = participant->shared->row.seed * 0x9e3779b97f4a7c15u + what * 0xbf58476d1ce4e5b9u;
  x ^= x >> 31;
  x *= 0x94d049bb133111ebu;
  return (unsigned)((x >> 33) % below);
}

static bool has_threads(const struct participant *participant) {
  return participant->shared->row.transport == THREADS ||
         participant->shared->row.transport == NCCL;
}

/* Pauses the rank. A rank that is a process stops itself with all its threads, and the harness
 * continues it. */
static void pause_for(struct participant *participant, double seconds) {
  if (has_threads(participant)) {
    participant_sleep(seconds);
    return;
  }
  atomic_store(&participant->shared->records[participant->rank].paused, (int)(seconds * 1000));
  raise(SIGSTOP);
}

/* Sleeps until every other rank has ended, or until the harness ends the job. */
static void stay_silent(const struct participant *participant) {
  for (int others = 1; others;) {
    others = 0;
    for (int rank = 0; rank < RANKS; rank++)
      others += rank != participant->rank &&
                atomic_load(&participant->shared->records[rank].state) != ENDED;
    participant_sleep(0.01);
  }
}

static void forbid_files(void) {
  struct rlimit limit = {10, 10};
  setrlimit(RLIMIT_NOFILE, &limit);
}

/* Kills this process. For the fault FORKED, forks a child first, which the harness ends with the
 * job's other processes. */
static void fork_and_end(struct participant *participant) {
  if (participant->shared->row.fault == FORKED && fork() == 0)
    for (;;)
      pause();
  participant->shared->killed_at = participant_clock();
  raise(SIGKILL);
}

static void fill_disk(bool full) {
  struct rlimit limit = {full ? 64 : RLIM_INFINITY, RLIM_INFINITY};
  signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &limit);
}

/* Starts a message fault. Up to five messages are first sent unharmed, so that each seed damages
 * another message. */
static void begin_messages(struct participant *participant) {
  participant->messages_fail = true;
  participant->skip = (int)choose_number(participant, 1, 6);
  if (participant->shared->row.fault == HELD)
    participant->held_until = participant_clock() + SHORT_PAUSE;
}

bool commit_fault(struct participant *participant, enum moment moment) {
  const struct row *row = &participant->shared->row;
  bool is_message = row->moment == MESSAGE && moment == MIDDLE_CALL;
  if (participant->rank != row_victim(row) || (moment != row->moment && !is_message))
    return true;
  if (fault_is_of_messages(row->fault))
    begin_messages(participant);
  else if (is_message)
    participant->messages_fail = true, participant->skip = (int)choose_number(participant, 1, 6);
  else
    switch (row->fault) {
    case KILLED:
    case FORKED:
      fork_and_end(participant);
      break;
    case NO_FILES:
      forbid_files();
      break;
    case STRANGER:
      tcp_connect_as_stranger(participant->shared, participant->rank);
      break;
    case PAUSED:
      pause_for(participant, SHORT_PAUSE);
      break;
    case STOPPED:
      pause_for(participant, LONG_PAUSE);
      break;
    case LEFT:
      return false;
    case SILENT:
      stay_silent(participant);
      return false;
    case ABORTED:
      if (participant->comm)
        onebit_comm_abort(participant->comm);
      break;
    case FULL_DISK:
      fill_disk(true);
      break;
    default: /* work.c commits the other faults */
      break;
    }
  return true;
}

static void change_message(const struct participant *participant, unsigned char *data,
                           size_t *bytes) {
  switch (participant->shared->row.fault) {
  case FLIPPED: {
    size_t bit = choose_number(participant, 2, 1u << 30) % (*bytes * 8);
    data[bit / 8] = (unsigned char)(data[bit / 8] ^ 1u << bit % 8);
    break;
  }
  case TRUNCATED:
    *bytes -= 1 + choose_number(participant, 2, (unsigned)*bytes);
    break;
  case LONGER:
    memset(data + *bytes, 0, 8);
    *bytes += 8;
    break;
  default:
    break;
  }
}

enum fate commit_message_fault(struct participant *participant, unsigned char *data,
                               size_t *bytes) {
  enum fault fault = participant->shared->row.fault;
  if (!participant->messages_fail)
    return GOES;
  if (fault == LATE)
    participant_sleep(0.001 * choose_number(participant, 3, 8));
  if (fault == LATE)
    return GOES;
  if (fault == HELD)
    return participant_clock() < participant->held_until ? IS_HELD : GOES;
  if (fault == CUT)
    return IS_LOST;
  if (participant->committed || participant->skip-- > 0)
    return GOES;
  participant->committed = true;
  if (!fault_is_of_messages(fault)) { /* the fault is one of the rank, not of its messages, and is
                                       * due now */
    if (fault == KILLED || fault == FORKED)
      fork_and_end(participant);
    if (fault == PAUSED || fault == STOPPED)
      pause_for(participant, fault == PAUSED ? SHORT_PAUSE : LONG_PAUSE);
    if (fault == LEFT)
      _exit(0);
    if (fault == SILENT)
      stay_silent(participant), _exit(0);
    return GOES;
  }
  change_message(participant, data, bytes);
  return fault == TWICE ? GOES_TWICE : fault == LOST ? IS_LOST : GOES;
}
