/*
 * Statuses and the messages that go with them.
 *
 * Every call of the library that can fail returns an onebit_status_t: zero is done, positive is
 * "not yet" or a hint, negative is a result that the caller must look at. The message of the latest
 * negative status, or warning, of the calling thread are kept until the next one: ask
 * onebit_last_error() right after the call.
 *
 * Handles (communicators, plans, optimizers, requests). One that is NULL, was destroyed or
 * finished, is of another kind, or never was a handle is an ONEBIT_ERROR_ARGUMENT: the message says
 * which, and nothing is done. A function that returns no status returns what its header names
 * instead, and leaves the message. The check costs about 3 ns. Two errors it cannot find, and they
 * are the caller's to avoid:
 *   - using a copy of a destroyed handle after another of the same kind was made, which may have
 *     the address of the first and is then meant. A copy of a request that is finished stays an
 *     error for the next 62 calls on its plan
 *   - destroying or finishing a handle in one thread while another is in a call with it
 */
#ifndef ONEBIT_STATUS_H
#define ONEBIT_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

/* The version that a program is compiled against; onebit_version() is the one it runs with. */
#define ONEBIT_VERSION_MAJOR 0
#define ONEBIT_VERSION_MINOR 2
#define ONEBIT_VERSION_PATCH 0

/* The results of calls. */
typedef enum onebit_status {
  ONEBIT_OK = 0,          /* done */
  ONEBIT_IN_PROGRESS = 1, /* the request is not finished: test it again, or wait */
  /* all is well done, but something wants to be looked at; the message says what, and what to do */
  ONEBIT_WARNING = 2,
  /* some rank's input was not finite: every rank skipped the call, nothing changed */
  ONEBIT_SKIPPED = -1,
  /* an argument of this rank is wrong; the message names it and its value */
  ONEBIT_ERROR_ARGUMENT = -2,
  ONEBIT_ERROR_MISMATCH = -3, /* the ranks do not agree on an argument; all of them get this */
  ONEBIT_ERROR_MEMORY = -4,   /* out of memory, on this rank or, at creation, on any */
  ONEBIT_ERROR_BUSY = -5,     /* the plan has a request in flight */
  ONEBIT_ERROR_MESSAGE = -6,  /* a damaged or foreign message arrived */
  /* another rank reported an error in this call; the message names the rank */
  ONEBIT_ERROR_PEER = -7,
  /* MPI, or another transport, failed; the message is the transport's */
  ONEBIT_ERROR_TRANSPORT = -8,
  ONEBIT_ERROR_UNSUPPORTED = -9, /* this build or this machine cannot do that */
  ONEBIT_ERROR_DEVICE = -10,     /* CUDA failed; the message is CUDA's */
  /* a checkpoint is damaged, incomplete, of another optimizer or model, or newer than this library;
   * the message says which, and where */
  ONEBIT_ERROR_CHECKPOINT = -11,
  ONEBIT_ERROR_FILE = -12 /* the system could not read or write a file; the message is its */
} onebit_status_t;

/* The name of a status, "ONEBIT_OK" for example. Local.
 *   status   any value; for one that is no status the name is "unknown status"
 * Never NULL; owned by the library. Thread-safe. */
const char *onebit_status_string(onebit_status_t status);

/* The message of the latest call of this thread that returned a negative status, or the text of an
 * ONEBIT_WARNING: one line that names the argument and its value where one is at fault; "" when no
 * call has failed.
 * Local.
 * Owned by the library, valid until this thread's next failing call. */
const char *onebit_last_error(void);

/* The version of the library that is linked, as "major.minor.patch"; compare with the
 * ONEBIT_VERSION_ macros, which say what was compiled against. Local.
 * Owned by the library. Thread-safe. */
const char *onebit_version(void);

#ifdef __cplusplus
}
#endif
#endif
