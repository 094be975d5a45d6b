/* Who moves the requests in flight: the library's callers, or a thread of its own. */
#ifndef OB_COLLECTIVES_PROGRESS_H
#define OB_COLLECTIVES_PROGRESS_H

#include <stdbool.h>

#include "onebit/status.h"

struct ob_engine;

/* Reads whether the environment asks for a thread. ONEBIT_ERROR_ARGUMENT for an unknown value. */
onebit_status_t ob_progress_wanted(bool *wanted);

/* Counts one more communicator that wants a thread to move the engine's requests; below, one less.
 * The first starts the thread, the last ends it. ONEBIT_ERROR_MEMORY. */
onebit_status_t ob_progress_begin(struct ob_engine *engine);
void ob_progress_end(struct ob_engine *engine);

/* Backs off when nothing moved, `idle` times in a row. Yielding is quick to see a message, but
 * where ranks outnumber cores those that wait would take turns with each other; so soon they sleep,
 * a small part of a message's time over a network. */
void ob_backoff(unsigned idle);

#endif
