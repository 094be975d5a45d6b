/* Communicators over a custom transport, whose ranks are threads, and over sockets. */
#ifndef ONEBIT_TESTS_SUPPORT_TRANSPORTS_H
#define ONEBIT_TESTS_SUPPORT_TRANSPORTS_H

#include "onebit/sockets.h"
#include "tests/support.h"

/*
 * A transport for onebit/custom.h whose ranks are threads: a mailbox holds copies of the messages,
 * found by rank and tag. It fails as a test orders.
 */

enum custom_call { CUSTOM_SEND, CUSTOM_RECEIVE, CUSTOM_TEST, CUSTOM_CALLS };

/* Makes the `at`-th call (from 1 on) of one kind on one rank fail; 0: none. */
struct custom_fault {
  enum custom_call call;
  int rank;
  long at;
  bool quiet;  /* the transport has no `abort` and sets no message */
  bool longer; /* the message is longer than expected, in place of a failure */
};

/* Runs the body on `size` threads as ranks, on `hosts` hosts, over a communicator of callbacks;
 * then checks that no operation is left open, and checks_must_hold(). */
void on_custom(int size, int hosts, rank_body *body, void *context);

/* Does the same where creating the communicator may fail: `attempt` gets the callbacks and creates
 * it. Returns how often the rank of the fault made calls of its kind. */
typedef void custom_attempt(const onebit_transport_callbacks_t *callbacks, int rank, int size,
                            void *context);
long try_on_custom(int size, int hosts, struct custom_fault fault, custom_attempt *attempt,
                   void *context);

/* Runs `body` on up to SOCKETS_RANKS threads as ranks and waits for all. Each gets options that it
 * may change: its number, a free port, a secret, its host of `hosts`. */
enum { SOCKETS_RANKS = 4 };
typedef void sockets_body(onebit_sockets_options_t *options, void *context);
void sockets_attempt(int size, int hosts, int streams, sockets_body *body, void *context);

#endif
