/*
 * A transport for onebit/custom.h whose ranks are threads: a mailbox holds copies of the messages,
 * found by rank and tag. It fails as a test orders.
 */
#ifndef ONEBIT_TESTS_SUPPORT_CUSTOM_H
#define ONEBIT_TESTS_SUPPORT_CUSTOM_H

#include "tests/support.h"

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

/* Does the same where making the communicator may fail: `attempt` gets the callbacks and makes it.
 * Returns how often that rank made the call that the fault names. */
typedef void custom_attempt(const onebit_transport_callbacks_t *callbacks, int rank, int size,
                            void *context);
long attempt_custom(int size, int hosts, struct custom_fault fault, custom_attempt *attempt,
                    void *context);

#endif
