/* The table of faults: one row for each combination of transport, work, fault and moment, with the
 * promised outcome. */
#include "tests/faults/faults.h"

#include <stdio.h>

static const char *const transports[] = {"tcp", "two-hosts", "threads", "mpi", "nccl"};
static const char *const works[] = {"exchange", "allgather", "hierarchical", "dense", "doubling",
                                    "scatter",  "training",  "local-steps",  "saving"};
static const char *const faults[] = {
    "none",    "killed",   "paused",    "stopped", "left",     "silent",   "aborted", "other-plan",
    "refused", "infinite", "full-disk", "forked",  "no-files", "stranger", "late",    "held",
    "cut",     "flipped",  "truncated", "longer",  "twice",    "lost",     "reset"};
static const char *const moments[] = {"before-comm", "joining", "before-plan", "first-call",
                                      "middle-call", "begun",   "message",     "last"};

const char *transport_name(enum transport transport) { return transports[transport]; }

void row_name(const struct row *row, char *text, size_t bytes) {
  snprintf(text, bytes, "%s/%s/%s/%s/%u", transports[row->transport], works[row->work],
           faults[row->fault], moments[row->moment], row->seed);
}

int row_victim(const struct row *row) { return (int)(row->seed % RANKS); }

bool fault_is_of_messages(enum fault fault) { return fault >= LATE; }

/* True if the fault is possible with the transport. A single thread cannot be killed, and threads
 * exchange messages by copying memory. Over NCCL the harness has no access to messages. */
static bool is_possible(enum transport transport, enum fault fault) {
  bool processes = transport != THREADS && transport != NCCL;
  if (fault == FORKED || fault == NO_FILES || fault == STRANGER || fault == RESET)
    return transport == TCP;
  if (fault == KILLED || fault == FULL_DISK || fault_is_of_messages(fault))
    return processes;
  return transport != NCCL || (fault != REFUSED && fault != OTHER_PLAN);
}

static bool has_work(enum transport transport, enum work work) {
  if (transport == TWO_HOSTS)
    return work == HIERARCHICAL || work == TRAINING;
  if (transport == NCCL)
    return work == EXCHANGE || work == ALLGATHER || work == DOUBLING;
  return work != HIERARCHICAL;
}

static bool is_training(enum work work) {
  return work == TRAINING || work == LOCAL_STEPS || work == SAVING;
}

/* True if the fault can happen at the moment. Faults in a call's arguments or input happen only at
 * that call. A full disk needs a training that saves. */
static bool is_the_moment(enum work work, enum fault fault, enum moment moment) {
  switch (fault) {
  case NONE:
    return moment == FIRST_CALL;
  case REFUSED:
  case INFINITE:
  case OTHER_PLAN:
    return (moment == FIRST_CALL || moment == MIDDLE_CALL) &&
           !(fault == OTHER_PLAN && is_training(work));
  case NO_FILES:
  case STRANGER:
    return moment == BEFORE_COMM && work == EXCHANGE;
  case RESET:
    return moment == MESSAGE || moment == BEFORE_PLAN;
  case FULL_DISK:
    return work == SAVING && (moment == FIRST_CALL || moment == MIDDLE_CALL);
  case FLIPPED:
  case TRUNCATED:
  case LONGER:
  case TWICE:
  case LOST:
    return moment == MESSAGE || moment == BEFORE_PLAN;
  case LATE:
  case HELD:
  case CUT:
    return moment == MESSAGE || moment == BEFORE_COMM;
  case ABORTED:
    return moment != BEFORE_COMM && moment != JOINING && moment != MESSAGE &&
           (moment != BEGUN || (!is_training(work) && work != SCATTER));
  default:
    return moment != BEGUN || (!is_training(work) && work != SCATTER);
  }
}

static enum promise find_promise(const struct row *row) {
  switch (row->fault) {
  case NONE:
  case PAUSED:
  case REFUSED:
  case INFINITE:
  case FULL_DISK:
  case STRANGER:
  case LATE:
  case HELD:
    return SURVIVES;
  case TWICE: /* no rank reads the second copy of the last message */
  case LOST:
  case FLIPPED:
  case TRUNCATED:
  case LONGER:
  case CUT: /* if the message is one of the last, only its receiver notices the fault */
    return EITHER;
  default:
    return row->moment == LAST || (row->fault == STOPPED && row->work == LOCAL_STEPS) ? EITHER
                                                                                      : TELLS;
  }
}

/* Returns the number of seeds of a fault. Each seed chooses another victim, message and bit. */
static unsigned count_seeds(enum transport transport, enum fault fault, enum moment moment) {
  if (fault == NONE)
    return 1;
  if (moment == JOINING) /* each seed also chooses another system call */
    return 12;
  if (transport == MPI)
    return fault == FLIPPED ? 2 : 1;
  return fault == FLIPPED ? 6 : 2;
}

bool table_row(size_t number, struct row *row) {
  size_t at = 0;
  for (int transport = 0; transport < TRANSPORTS; transport++)
    for (int work = 0; work < WORKS; work++)
      for (int fault = 0; fault < FAULTS; fault++)
        for (int moment = 0; moment < MOMENTS; moment++) {
          bool hooked = transport != THREADS && transport != NCCL;
          /* NCCL itself waits until all ranks have created its communicator. */
          if ((moment == MESSAGE && !hooked) ||
              (moment == JOINING && (transport != TCP || work != EXCHANGE)) ||
              (moment == BEFORE_COMM && transport == NCCL) ||
              !has_work((enum transport)transport, (enum work)work) ||
              !is_possible((enum transport)transport, (enum fault)fault) ||
              !is_the_moment((enum work)work, (enum fault)fault, (enum moment)moment))
            continue;
          unsigned seeds =
              count_seeds((enum transport)transport, (enum fault)fault, (enum moment)moment);
          if (number < at + seeds) {
            *row = (struct row){(enum transport)transport,
                                (enum work)work,
                                (enum fault)fault,
                                (enum moment)moment,
                                SURVIVES,
                                (unsigned)(number - at) * 3 + (unsigned)(work + moment)};
            row->promise = find_promise(row);
            return true;
          }
          at += seeds;
        }
  return false;
}
