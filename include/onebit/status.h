/*
 * Statuses and the messages that go with them.
 *
 * Every function of the library that can fail returns an onebit_status_t. Zero means done, a
 * positive status "not yet" or a hint, and a negative status must be handled by the caller.
 * onebit_last_error() returns the message of the calling thread's latest negative status or
 * warning.
 *
 * Handles (communicators, plans, optimizers, requests). A handle that is NULL, was destroyed or
 * finished, is of another kind, or never was a handle is an ONEBIT_ERROR_ARGUMENT: the message says
 * which, and nothing else is done. A function that returns no status returns the value that its
 * header documents, and sets the message. The check costs about 3 ns. It cannot find two errors:
 *   - a copy of a destroyed handle is used after another handle of the same kind was made, which
 *     may have the same address. A copy of a finished request stays an error for the next 62 calls
 *     on its plan
 *   - a thread destroys or finishes a handle while another is in a call with it
 */
#ifndef ONEBIT_STATUS_H
#define ONEBIT_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

/* The version that a program is compiled against; onebit_version() returns the version that it runs
 * with. */
#define ONEBIT_VERSION_MAJOR 0
#define ONEBIT_VERSION_MINOR 2
#define ONEBIT_VERSION_PATCH 0

/* The results of calls. */
typedef enum onebit_status {
  ONEBIT_OK = 0,          /* done */
  ONEBIT_IN_PROGRESS = 1, /* the request is not finished: test it again, or wait */
  /* the call succeeded, but something needs attention; the message names the problem and a
   * remedy */
  ONEBIT_WARNING = 2,
  /* some rank's input was not finite: every rank skipped the call, and nothing changed */
  ONEBIT_SKIPPED = -1,
  /* an argument of this rank is wrong; the message names it and its value */
  ONEBIT_ERROR_ARGUMENT = -2,
  ONEBIT_ERROR_MISMATCH = -3, /* the ranks do not agree on an argument; all of them get this */
  ONEBIT_ERROR_MEMORY = -4,   /* out of memory, on this rank or, at creation, on any */
  ONEBIT_ERROR_BUSY = -5,     /* the plan has a request in flight */
  ONEBIT_ERROR_MESSAGE = -6,  /* a message arrived damaged, or belongs to something else */
  /* another rank reported an error in this call; the message names the rank */
  ONEBIT_ERROR_PEER = -7,
  /* MPI, or another transport, failed; the message is the transport's */
  ONEBIT_ERROR_TRANSPORT = -8,
  ONEBIT_ERROR_UNSUPPORTED = -9, /* this build or this machine cannot do that */
  ONEBIT_ERROR_DEVICE = -10,     /* CUDA failed; the message is CUDA's */
  /* a checkpoint is damaged, incomplete, of another optimizer or model, or newer than this library;
   * the message says which, and where */
  ONEBIT_ERROR_CHECKPOINT = -11,
  ONEBIT_ERROR_FILE = -12 /* a file could not be read or written; the message is the system's */
} onebit_status_t;

/* The name of a status, "ONEBIT_OK" for example. Local.
 *   status   any value; for one that is no status the name is "unknown status"
 * Never NULL; owned by the library. Thread-safe. */
const char *onebit_status_string(onebit_status_t status);

/* The message of this thread's latest call that returned a negative status or ONEBIT_WARNING: one
 * line, which names the wrong argument and its value, if there is one; "" if no call has failed.
 * Local. Owned by the library, valid until this thread's next failing call. */
const char *onebit_last_error(void);

/* The version of the library that is linked, as "major.minor.patch"; the ONEBIT_VERSION_ macros
 * give the version of the headers. Local.
 * Owned by the library. Thread-safe. */
const char *onebit_version(void);

#ifdef __cplusplus
}
#endif
#endif
