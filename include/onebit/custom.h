/*
 * Communicators over a transport that the caller supplies: a few functions that send, receive and
 * test messages. They are for networks and frameworks that the library does not support itself
 * (Gloo, libfabric, sockets): every schedule, plan and optimizer works on such a communicator as it
 * does over MPI.
 */
#ifndef ONEBIT_CUSTOM_H
#define ONEBIT_CUSTOM_H

#include <stddef.h>

#include "onebit/communicator.h"
#include "onebit/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The functions of a transport, which send and receive point-to-point messages. Start from
 * ONEBIT_TRANSPORT_CALLBACKS_INIT; `send`, `receive`, `test` and `cancel` are required, the rest
 * may stay zero.
 *
 * Requirements:
 *  - Only `test` may wait, for at most `seconds`.
 *  - Between two ranks, messages with the same tag arrive in the order in which they were sent, and
 *    match receives in the order in which these were begun. Messages with different tags, or of
 *    different ranks, do not wait for each other: a message for which no receive has begun must not
 *    delay later messages.
 *  - The functions are called by the threads that use the communicator or objects made on it; by
 *    several threads at once if several use them at once. With ONEBIT_PROGRESS=thread a thread of
 *    the library calls them too. The functions must not call the library for this communicator.
 *    They run with the default floating-point environment and locale.
 *  - The functions return 0, or for a failure a negative code of the transport's own. The first
 *    failure on a rank ends the communicator there: the current call and all later ones return
 *    ONEBIT_ERROR_TRANSPORT, incomplete operations are cancelled, and `abort` is called, once. */
typedef struct onebit_transport_callbacks {
  size_t size;   /* sizeof(onebit_transport_callbacks_t): lets the struct grow */
  void *context; /* the caller's; the first argument of every function */
  /* Begins to send `bytes` bytes at `data` to rank `peer`. They stay unchanged until the operation
   * is complete or cancelled. *operation: the handle for `test` and `cancel`; NULL if the message
   * is on its way already and `data` is no longer needed. */
  int (*send)(void *context, const void *data, size_t bytes, int peer, int tag, void **operation);
  /* Begins to receive a message of at most `bytes` bytes from rank `peer`. *operation: the handle;
   * NULL counts as a failure. */
  int (*receive)(void *context, void *data, size_t bytes, int peer, int tag, void **operation);
  /* Tests whether the operation is complete. It returns 0 if so; for a receive *bytes is then the
   * length of the message, and the operation is not tested again. It returns ONEBIT_IN_PROGRESS if
   * not, after a wait of at most `seconds` (0: none). After a failure `cancel` is still called. */
  int (*test)(void *context, void *operation, double seconds, size_t *bytes);
  /* Gives up an operation that is not complete. The transport does not access the operation's
   * memory after this returns. */
  void (*cancel)(void *context, void *operation);
  /* May be NULL. Called when this rank has failed, or could not make the communicator. It makes
   * other ranks' operations that wait for this rank fail at once instead of after `timeout`. */
  void (*abort)(void *context);
  /* May be NULL. The text for onebit_last_error: one line about a code that another function has
   * just returned to this thread, valid until this thread's next call. */
  const char *(*message)(void *context, int code);
  /* May be NULL. Called now and then while a rank waits for something else, so that a transport
   * without threads of its own can make progress. */
  void (*progress)(void *context);
  /* May be NULL. Called last, when the communicator is destroyed. */
  void (*release)(void *context);
  /* Ranks that give the same name share a host, and its /dev/shm. NULL: the name that gethostname
   * returns. The string is not kept. */
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
 *   callbacks   copied; context must outlive the communicator and the objects made on it
 *   rank        this rank's number, 0 to size - 1
 *   size        number of ranks, at least 1
 *   comm        out: the communicator; NULL when the call fails, and `release` is then not called
 * Errors: ONEBIT_ERROR_ARGUMENT (NULL, a function that is needed is missing, a number out of range;
 * the other ranks get ONEBIT_ERROR_PEER, or, if this rank cannot send to them with its callbacks or
 * number, ONEBIT_ERROR_TRANSPORT after their timeout), ONEBIT_ERROR_PEER, ONEBIT_ERROR_MISMATCH
 * (size or largest_tag differs between ranks), ONEBIT_ERROR_MEMORY, ONEBIT_ERROR_TRANSPORT (a
 * callback failed; the message is the callback's). */
onebit_status_t onebit_comm_create_custom(const onebit_transport_callbacks_t *callbacks, int rank,
                                          int size, onebit_comm_t *comm);

#ifdef __cplusplus
}
#endif
#endif
