/*
 * The fault harness: a table of faults, each run in its own job, with the outcome that
 * docs/reliability.md promises for it. A job is a case process that starts the ranks as processes
 * or threads; a file that all of them map records the result of each rank.
 *
 * Three outcomes fail every row: a rank that waits for ever (hung), one that ends well with another
 * result than without the fault (wrong), and resources left behind (leaked).
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
#include <cuda_runtime_api.h> /* says whether the device is emulated */
#endif

enum { RANKS = 4, CALLS = 10, MIDDLE = CALLS / 2 };

/* Seconds: ONEBIT_TIMEOUT of the jobs; the absence of a rank in faults that are survived, and in
 * those that are not; the limit after which a job counts as hung. mpirun may start ranks a second
 * apart on a busy machine, and several rows run at a time. */
#define TIMEOUT     3.0
#define SHORT_PAUSE 0.4
#define LONG_PAUSE  7.0
#define LIMIT       60.0

enum transport {
  TCP,       /* processes: onebit_comm_create_sockets, the library's own connections */
  TWO_HOSTS, /* the same as two hosts, whose ranks share memory */
  THREADS,   /* onebit_comm_create_loopback */
  MPI,       /* mpirun */
  NCCL,      /* on the emulated device: threads */
  TRANSPORTS
};

enum work {
  EXCHANGE,
  ALLGATHER,
  HIERARCHICAL,
  DENSE,       /* full precision, cut into shares */
  DOUBLING,    /* full precision, small */
  SCATTER,     /* reduce-scatter, then allgather, both compressed */
  TRAINING,    /* 1-bit Adam through its freeze */
  LOCAL_STEPS, /* 0/1 Adam */
  SAVING,      /* a training that saves to files every third step */
  WORKS
};

enum fault {
  NONE,
  KILLED,     /* SIGKILL */
  PAUSED,     /* the rank stops for SHORT_PAUSE */
  STOPPED,    /* for LONG_PAUSE, which is beyond the timeout */
  LEFT,       /* it ends without an error, its communicator destroyed or its process exited */
  SILENT,     /* it stays, and makes no further call */
  ABORTED,    /* onebit_comm_abort */
  OTHER_PLAN, /* it calls another plan than the others */
  REFUSED,    /* a wrong argument; then it makes the call again, as all do */
  INFINITE,   /* an input that is not finite, likewise */
  FULL_DISK,  /* no file can grow */
  FORKED,     /* SIGKILL, while a child that it has forked lives on */
  NO_FILES,   /* it may open no more files */
  STRANGER,   /* before it joins, strangers connect to rank 0 and send other bytes */
  /* To its messages: */
  LATE,      /* each comes some milliseconds late */
  HELD,      /* none is sent for SHORT_PAUSE, then all are: as after an outage of the link */
  CUT,       /* none is sent from some point on */
  FLIPPED,   /* one bit of one is flipped */
  TRUNCATED, /* one is shorter, */
  LONGER,    /* or longer */
  TWICE,     /* one arrives twice */
  LOST,      /* one never arrives */
  RESET,     /* the connection is reset in place of one */
  FAULTS
};

enum moment {
  BEFORE_COMM,
  JOINING, /* before a system call with which it connects */
  BEFORE_PLAN,
  FIRST_CALL, /* before it */
  MIDDLE_CALL,
  BEGUN,   /* between beginning the middle call and waiting for it */
  MESSAGE, /* when a message of the middle call, or of a later one, is about to leave */
  LAST,    /* after the last call */
  MOMENTS
};

enum promise {
  SURVIVES, /* all ranks end well, with the results of a job without a fault */
  TELLS,    /* every rank that lives gets an error that names a rank */
  EITHER    /* or both, chosen by each rank: the fault may come too late to be noticed */
};

struct row {
  enum transport transport;
  enum work work;
  enum fault fault;
  enum moment moment;
  enum promise promise;
  unsigned seed; /* the victim, and which message, bit, delay */
};

enum state { AWAY, RUNNING, ENDED };

/* A rank's notes of itself. */
struct record {
  _Atomic int state;
  _Atomic int paused; /* it has stopped itself, and is to be continued after that many ms */
  pid_t process;
  int status, calls; /* the status that it has ended with, calls that ended well */
  double ended;      /* when that was known */
  uint64_t hash;     /* of all results */
  char message[256];
};

/* The memory that the ranks of a job share. */
struct scene {
  struct row row;
  bool progress_thread;
  char directory[64]; /* for files */
  int port;           /* rank 0's */
  double struck;      /* when a rank was killed */
  struct record records[RANKS];
  unsigned char unique_id[256]; /* NCCL's */
};

/* A rank's own state in the job. */
struct participant {
  struct scene *scene;
  int rank;
  onebit_comm_t comm;
  bool messages_fail; /* it is time for a fault of messages */
  bool struck;        /* and it was done */
  int skip;           /* messages that pass unharmed first */
  double held_until;
};

const char *transport_name(enum transport transport);
void row_name(const struct row *row, char *text, size_t bytes);

/* table.c: rows are numbered from 0; returns false past the last. */
bool table_row(size_t number, struct row *row);
int row_victim(const struct row *row);
bool fault_is_of_messages(enum fault fault);

/* work.c: does the rank's work and fills its record. `connect` makes its communicator. */
typedef onebit_status_t connect_function(struct participant *participant, onebit_comm_t *comm);
void participant_run(struct participant *participant, connect_function *connect);

/* strike.c: commits the row's fault if this is its rank and moment. Returns false if the rank must
 * stop there. */
bool strike(struct participant *participant, enum moment moment);

/* The fate of a message that is about to be sent: see the faults. */
enum fate { GOES, GOES_TWICE, IS_LOST, IS_HELD };
/* `data` has room for 8 bytes more than *bytes and may be changed. */
enum fate strike_message(struct participant *participant, unsigned char *data, size_t *bytes);

void participant_sleep(double seconds);
double participant_clock(void);

/* ranks.c and ranks_*.c: run the ranks of a job until all have ended. */
void run_processes(struct scene *scene);
void run_threads(struct scene *scene);
connect_function connect_tcp, connect_threads;
void tcp_choose_port(struct scene *scene);
void tcp_come_as_stranger(const struct scene *scene, int rank);
/* Each is NULL where its transport is not in this build. */
void run_mpi(struct scene *scene, const char *program, const char *path);
int participant_mpi(struct scene *scene);
void run_nccl(struct scene *scene);

/* Runs `body` in one thread per rank, with the rank's struct participant, until all have ended. */
void run_in_threads(struct scene *scene, void *(*body)(void *participant));

#endif
