/*
 * A transport for onebit/custom.h whose ranks are threads: messages are copied into a mailbox, and
 * taken from there by rank and tag. What a test orders goes wrong in it.
 */
#ifndef ONEBIT_TESTS_SUPPORT_CUSTOM_H
#define ONEBIT_TESTS_SUPPORT_CUSTOM_H

#include "tests/support.h"

enum custom_call { CUSTOM_SEND, CUSTOM_RECEIVE, CUSTOM_TEST, CUSTOM_CALLS };

/* A failure: of the `at`-th call (from 1 on) of one kind on one rank; 0: none. */
struct custom_fault {
  enum custom_call call;
  int rank;
  long at;
  bool quiet;  /* the transport has no `abort`, and no words */
  bool longer; /* the message is longer than expected, in place of a failure */
};

/* Runs the body on `size` ranks, each a thread, on `hosts` hosts, over a communicator of callbacks;
 * then checks that nothing of an operation is left, and checks_must_hold(). */
void on_custom(int size, int hosts, rank_body *body, void *context);

/* The same where the communicator itself may fail: `attempt` gets callbacks, and makes it. Returns
 * how often the call that the fault names was made on that rank. */
typedef void custom_attempt(const onebit_transport_callbacks_t *callbacks, int rank, int size,
                            void *context);
long attempt_custom(int size, int hosts, struct custom_fault fault, custom_attempt *attempt,
                    void *context);

#endif
