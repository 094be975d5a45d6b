/*
 * Communicators over a transport of the caller's: what moves the bytes is a handful of functions
 * that send, receive and test. For networks and frameworks that the library does not know (Gloo,
 * libfabric, sockets): every schedule, plan and optimizer works on such a communicator as it does
 * over MPI.
 */
#ifndef ONEBIT_CUSTOM_H
#define ONEBIT_CUSTOM_H

#include <stddef.h>

#include "onebit/communicator.h"
#include "onebit/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How bytes move, by point-to-point messages. Start from ONEBIT_TRANSPORT_CALLBACKS_INIT; `send`,
 * `receive`, `test` and `cancel` are needed, the rest may stay zero.
 *
 * What is asked of them:
 *  - Nothing waits, but `test`, and that no longer than it is told.
 *  - Between two ranks, messages with the same tag arrive in the order in which they were sent, and
 *    meet receives in the order in which these were begun. Messages with different tags do not wait
 *    for each other, nor do messages of different ranks: one that nobody receives yet does not keep
 *    up those behind it.
 *  - They are called by the threads that use the communicator and what was made on it, also by
 *    several at once if the program does so, and with ONEBIT_PROGRESS=thread by one of the
 *    library's. They must not call the library for this communicator. Their floating-point
 *    environment and their locale are the library's, the default ones.
 *  - They return 0, or a code below 0 that is the transport's own: a failure. The first failure on
 *    a rank ends the communicator there: the call in hand and all later ones are an
 *    ONEBIT_ERROR_TRANSPORT, what is still under way is cancelled as it is met, and `abort` is
 *    called, once.
 */
typedef struct onebit_transport_callbacks {
  size_t size;   /* sizeof(onebit_transport_callbacks_t): lets the struct grow */
  void *context; /* the caller's; the first argument of every function */
  /* Begins to send `bytes` bytes at `data` to rank `peer`. They stay as they are until the
   * operation is complete, or cancelled. *operation: what `test` and `cancel` will be asked about;
   * NULL if the message is on its way, and `data` no longer needed, already. */
  int (*send)(void *context, const void *data, size_t bytes, int peer, int tag, void **operation);
  /* Begins to receive a message of at most `bytes` bytes from rank `peer`. *operation: as above,
   * never NULL (that is taken for a failure). */
  int (*receive)(void *context, void *data, size_t bytes, int peer, int tag, void **operation);
  /* Whether the operation is complete. 0: it is, and is not asked about again; for one that
   * receives, *bytes is then set to the length of the message. ONEBIT_IN_PROGRESS: not yet; `test`
   * may have waited for it up to `seconds` (0: not at all), or may return sooner. After a failure
   * `cancel` is still called. */
  int (*test)(void *context, void *operation, double seconds, size_t *bytes);
  /* Gives an operation up that is not complete. When this returns, its memory is not looked at any
   * more. */
  void (*cancel)(void *context, void *operation);
  /* May be NULL. This rank has failed, or could not make the communicator: makes all operations of
   * the other ranks fail that wait for it, so that they need not wait for `timeout`. */
  void (*abort)(void *context);
  /* May be NULL. What happened, for onebit_last_error: a line of text for a code that one of the
   * others has just returned to this thread, valid until this thread's next call. */
  const char *(*message)(void *context, int code);
  /* May be NULL. Called now and then while a rank waits for something else: a transport without
   * threads of its own can move what it has in hand. */
  void (*progress)(void *context);
  /* May be NULL. The communicator is destroyed; the last call. */
  void (*release)(void *context);
  /* Ranks that give the same name share a host, and its /dev/shm. NULL: what gethostname says. Not
   * kept. */
  const char *host;
  int largest_tag; /* tags are 0 to largest_tag, the same on all ranks; default 32767 */
  /* Seconds that a rank waits for a message before that is a failure; INFINITY: for ever. Default
   * ONEBIT_TIMEOUT, as onebit/communicator.h has it. */
  double timeout;
} onebit_transport_callbacks_t;

/* clang-format off */
#define ONEBIT_TRANSPORT_CALLBACKS_INIT \
  { sizeof(onebit_transport_callbacks_t), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
    NULL, 0, 0 }
/* clang-format on */

/* Makes a communicator over callbacks. Collective: all ranks call it, each with its number, and
 * tell each other their hosts.
 *   callbacks   copied; context must outlive the communicator, and what was made on it
 *   rank        this rank's number, 0 to size - 1
 *   size        number of ranks, at least 1
 *   comm        out: the communicator; NULL when the call fails, and `release` is then not called
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL, a function that is needed is missing, a number out of range;
 * the other ranks get ONEBIT_ERROR_PEER, or where this rank's callbacks or number are of no use,
 * ONEBIT_ERROR_TRANSPORT after their timeout), ONEBIT_ERROR_PEER, ONEBIT_ERROR_MISMATCH (size or
 * largest_tag differs between ranks), ONEBIT_ERROR_MEMORY, ONEBIT_ERROR_TRANSPORT (a callback
 * failed; the message is its). */
onebit_status_t onebit_comm_create_custom(const onebit_transport_callbacks_t *callbacks, int rank,
                                          int size, onebit_comm_t *comm);

#ifdef __cplusplus
}
#endif
#endif
