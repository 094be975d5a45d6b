/*
 * Wrong calls of the public functions, with the status of each and a part of its message. The file
 * needs no Criterion, so that a plain program can make these calls too.
 */
#ifndef ONEBIT_TESTS_SUPPORT_WRONG_CALLS_H
#define ONEBIT_TESTS_SUPPORT_WRONG_CALLS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "onebit/counters.h"
#include "onebit/onebit.h"

/* Makes a call, which must return `status` with a message that contains `part`. */
#define WRONG(function, arguments, status, part)                                                   \
  (wrong_begin(), wrong_end(#function, #arguments, function arguments, (status), (part)))

/* Makes a call of a function that returns a value instead of a status. `good` is true if the value
 * is as documented. */
#define WRONG_VALUE(function, arguments, good, part)                                               \
  (wrong_begin(), wrong_value(#function, #arguments, (good), (part)))

void wrong_begin(void);
void wrong_end(const char *function, const char *arguments, onebit_status_t got,
               onebit_status_t wanted, const char *part);
void wrong_value(const char *function, const char *arguments, bool good, const char *part);

/* Return the number of wrong calls so far, the number of those that failed the check, and true if
 * `function` was called. */
size_t wrong_calls_made(void);
size_t wrong_calls_failed(void);
bool wrong_calls_cover(const char *function);

/* Checks that every function in include/onebit/HEADER.h that has arguments was called. Returns the
 * number of these functions. */
size_t wrong_check_header(const char *header);

/* Valid arguments, and handles of destroyed objects (no_...). These objects are destroyed last, so
 * that no new object gets their address. `foreign` is memory of the program, not of the library. */
struct wrong_scene {
  onebit_comm_t comm, no_comm;
  onebit_plan_t plan, gathers, scatters, busy, no_plan;
  onebit_request_t request, no_request; /* request is in flight on `busy`; no_request is finished */
  onebit_optimizer_t optimizer, open, no_optimizer;
  onebit_tensor_t tensor;
  void *foreign;
  float *send, *receive; /* WRONG_COUNT elements each */
};
enum { WRONG_COUNT = 64 };

/* Creates these arguments on one rank. Returns false if this fails. */
bool wrong_scene_make(struct wrong_scene *scene);
void wrong_scene_end(struct wrong_scene *scene);

/* Make all wrong calls on one rank. Each function tests one group of public functions. */
void wrong_communicators(const struct wrong_scene *scene);
void wrong_plans(const struct wrong_scene *scene);
void wrong_collectives(const struct wrong_scene *scene);
void wrong_creations(const struct wrong_scene *scene);
void wrong_steps(const struct wrong_scene *scene);
void wrong_queries(const struct wrong_scene *scene);
void wrong_checkpoints(const struct wrong_scene *scene);
void wrong_outers(const struct wrong_scene *scene);

#endif
