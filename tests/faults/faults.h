/*
 * The fault harness. Its table has one row per fault, with the outcome that docs/reliability.md
 * promises. Each row runs as a job of its own: a process that starts the ranks as processes or
 * threads. All of them map one file, in which each rank records its result.
 *
 * A row always fails if a rank waits for ever (hung), if a rank succeeds but its result differs
 * from the result without the fault (wrong), or if resources are left behind (leaked).
 */
#ifndef ONEBIT_TESTS_FAULTS_H
#define ONEBIT_TESTS_FAULTS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "onebit/onebit.h"
#ifdef ONEBIT_HAVE_NCCL
#include <cuda_runtime_api.h> /* defines a macro if the device is emulated */
#endif

enum { RANKS = 4, CALLS = 10, MIDDLE = CALLS / 2 };

/* Times in seconds. ONEBIT_TIMEOUT of the jobs is TIMEOUT. A job must survive if a rank pauses for
 * SHORT_PAUSE, and must fail if one pauses for LONG_PAUSE. A job that takes longer than the limit
 * counts as hung. The timeout is long because mpirun may start ranks a second apart on a busy
 * machine, and several rows run at a time. */
#define TIMEOUT     3.0
#define SHORT_PAUSE 0.4
#define LONG_PAUSE  7.0
#define LIMIT       60.0

enum transport {
  TCP,       /* processes: onebit_comm_create_sockets, the library's own connections */
  TWO_HOSTS, /* like TCP, but the ranks form two hosts; ranks of a host share memory */
  THREADS,   /* onebit_comm_create_loopback */
  MPI,       /* mpirun */
  NCCL,      /* on the emulated device, with threads as ranks */
  TRANSPORTS
};

enum work {
  EXCHANGE,
  ALLGATHER,
  HIERARCHICAL,
  DENSE,       /* full precision, each rank reduces a segment */
  DOUBLING,    /* full precision, with recursive doubling: the buffer is small */
  SCATTER,     /* reduce-scatter, then allgather, both compressed */
  TRAINING,    /* 1-bit Adam, including the end of its warm-up */
  LOCAL_STEPS, /* 0/1 Adam */
  SAVING,      /* a training that saves a checkpoint to files every third step */
  WORKS
};

enum fault {
  NONE,
  /* Faults of the victim, which is one rank: */
  KILLED,     /* the process gets SIGKILL */
  PAUSED,     /* the rank stops for SHORT_PAUSE */
  STOPPED,    /* the rank stops for LONG_PAUSE, which is longer than the timeout */
  LEFT,       /* the rank ends without an error: it destroys its communicator or exits */
  SILENT,     /* the rank makes no further call, but does not end */
  ABORTED,    /* the rank calls onebit_comm_abort */
  OTHER_PLAN, /* the rank calls a different plan from the other ranks */
  REFUSED,    /* the rank passes a wrong argument; then all ranks repeat the call */
  INFINITE,   /* the rank's input is not finite; then all ranks repeat the call */
  FULL_DISK,  /* no file can grow, as on a full disk */
  FORKED,     /* the process gets SIGKILL, but its forked child continues */
  NO_FILES,   /* the process may open no more files */
  STRANGER,   /* before the rank joins, it opens foreign connections to rank 0 */
  /* Faults of the victim's messages: */
  LATE,      /* each message is delayed by some milliseconds */
  HELD,      /* messages are held back for SHORT_PAUSE and then sent, as after a link outage */
  CUT,       /* no message is sent after some point */
  FLIPPED,   /* one bit of a message is flipped */
  TRUNCATED, /* a message is cut short */
  LONGER,    /* a message has extra bytes */
  TWICE,     /* a message arrives twice */
  LOST,      /* a message never arrives */
  RESET,     /* the connection is reset instead of sending a message */
  FAULTS
};

enum moment {
  BEFORE_COMM,
  JOINING, /* before one of the system calls that connect the rank */
  BEFORE_PLAN,
  FIRST_CALL, /* before the first call */
  MIDDLE_CALL,
  BEGUN,   /* between the start of the middle call and the wait for it */
  MESSAGE, /* when a message of the middle call, or of a later one, is about to be sent */
  LAST,    /* after the last call */
  MOMENTS
};

enum promise {
  SURVIVES, /* every rank succeeds, with the results of a job without a fault */
  TELLS,    /* every remaining rank gets an error, and the error names a rank */
  EITHER    /* each rank may succeed or get an error: the fault may come too late to be noticed */
};

struct row {
  enum transport transport;
  enum work work;
  enum fault fault;
  enum moment moment;
  enum promise promise;
  unsigned seed; /* determines the victim rank, and the message, bit or delay */
};

enum state { AWAY, RUNNING, ENDED };

/* The results of one rank, written by that rank. */
struct record {
  _Atomic int state;
  _Atomic int paused; /* if not 0, the rank has stopped itself, and the harness continues it after
                       * this many ms */
  pid_t process;
  int status, calls; /* the last status, and the number of calls that succeeded */
  double ended;      /* the time of the last status */
  uint64_t hash;     /* hash of all results */
  char message[256];
};

/* The memory that the ranks of a job share. */
struct shared {
  struct row row;
  bool progress_thread;
  char directory[64]; /* directory for files */
  int port;           /* the port of rank 0 */
  double killed_at;   /* when a rank was killed */
  struct record records[RANKS];
  unsigned char unique_id[256]; /* the id of NCCL's communicator */
};

/* A rank's own state in the job. */
struct participant {
  struct shared *shared;
  int rank;
  onebit_comm_t comm;
  bool messages_fail; /* messages are damaged or held from now on */
  bool committed;     /* the fault has happened */
  int skip;           /* number of messages to send unharmed before the fault */
  double held_until;
};

const char *transport_name(enum transport transport);
void row_name(const struct row *row, char *text, size_t bytes);

/* Functions of table.c. Rows are numbered from 0. table_row returns false if the table has no row
 * `number`. */
bool table_row(size_t number, struct row *row);
int row_victim(const struct row *row);
bool fault_is_of_messages(enum fault fault);

/* work.c: does the rank's work and fills its record. `connect` creates its communicator. */
typedef onebit_status_t connect_function(struct participant *participant, onebit_comm_t *comm);
void participant_run(struct participant *participant, connect_function *connect);

/* fault.c: commits the row's fault if the rank is the victim and this is the moment of the fault.
 * Returns false if the rank must stop at this point. */
bool commit_fault(struct participant *participant, enum moment moment);

/* The fate of a message that is about to be sent: sent, sent twice, lost, or held back. */
enum fate { GOES, GOES_TWICE, IS_LOST, IS_HELD };
/* Decides the message's fate. May change the data and *bytes; `data` has space for *bytes + 8
 * bytes. */
enum fate commit_message_fault(struct participant *participant, unsigned char *data, size_t *bytes);

void participant_sleep(double seconds);
double participant_clock(void);

/* ranks.c and ranks_*.c: run the ranks of a job until all have ended. */
void run_processes(struct shared *shared);
void run_threads(struct shared *shared);
connect_function connect_tcp, connect_threads;
void tcp_connect_as_stranger(const struct shared *shared, int rank);
/* These functions do nothing if their transport is not in this build. */
void run_mpi(struct shared *shared, const char *program, const char *path);
int participant_mpi(struct shared *shared);
void run_nccl(struct shared *shared);

/* Runs `body` in one thread per rank, with the rank's struct participant, until all have ended. */
void run_in_threads(struct shared *shared, void *(*body)(void *participant));

#endif
