/* Runs ranks that are threads over a custom transport, and over sockets. */
#ifndef ONEBIT_TESTS_SUPPORT_TRANSPORTS_H
#define ONEBIT_TESTS_SUPPORT_TRANSPORTS_H

#include "onebit/sockets.h"
#include "tests/support.h"

/*
 * A transport for onebit/custom.h whose ranks are threads. A send copies its message to a mailbox,
 * where receives find it by rank and tag. A test can make the transport's functions fail.
 */

enum custom_call { CUSTOM_SEND, CUSTOM_RECEIVE, CUSTOM_TEST, CUSTOM_CALLS };

/* Makes the `at`-th call (counted from 1) of one kind on one rank fail. If `at` is 0, no call
 * fails. */
struct custom_fault {
  enum custom_call call;
  int rank;
  long at;
  bool quiet;  /* the transport has no `abort` and sets no message */
  bool longer; /* the message is longer than expected; the call does not fail */
};

/* Runs the body on `size` threads as ranks, on `hosts` hosts, with a communicator over this
 * transport. Afterwards checks that every operation was completed or cancelled, and calls
 * checks_must_hold(). */
void on_custom(int size, int hosts, rank_body *body, void *context);

/* For tests in which creating the communicator may fail: runs `attempt` on all ranks, which gets
 * the callbacks and creates the communicator itself. Returns the number of calls of the fault's
 * kind on the fault's rank. */
typedef void custom_attempt(const onebit_transport_callbacks_t *callbacks, int rank, int size,
                            void *context);
long try_on_custom(int size, int hosts, struct custom_fault fault, custom_attempt *attempt,
                   void *context);

/* Runs `body` on up to SOCKETS_RANKS threads as ranks and waits for all. The body of each rank gets
 * options that it may change: its number, a free port, a secret, and which of `hosts` hosts it is
 * on. */
enum { SOCKETS_RANKS = 4 };
typedef void sockets_body(onebit_sockets_options_t *options, void *context);
void sockets_attempt(int size, int hosts, int streams, sockets_body *body, void *context);

#endif
