/*
 * Wrong calls of the public functions: what each must give, and what its message must say. Knows
 * nothing of Criterion, so that a plain program can make them too.
 */
#ifndef ONEBIT_TESTS_SUPPORT_WRONG_CALLS_H
#define ONEBIT_TESTS_SUPPORT_WRONG_CALLS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "onebit/counters.h"
#include "onebit/onebit.h"

/* Makes the call, which must give the status with a message that has `part` in it. */
#define WRONG(function, arguments, status, part)                                                   \
  (wrong_begin(), wrong_end(#function, #arguments, function arguments, (status), (part)))

/* The same of a function that returns a value: `good` says whether it is the documented one. */
#define WRONG_VALUE(function, arguments, good, part)                                               \
  (wrong_begin(), wrong_value(#function, #arguments, (good), (part)))

void wrong_begin(void);
void wrong_end(const char *function, const char *arguments, onebit_status_t got,
               onebit_status_t wanted, const char *part);
void wrong_value(const char *function, const char *arguments, bool good, const char *part);

/* Calls made so far, those that did not go as they must, and whether some were of this function. */
size_t wrong_made(void);
size_t wrong_failed(void);
bool wrong_covers(const char *function);

/* Checks that calls were made of all functions that include/onebit/HEADER.h declares and that take
 * arguments; how many it found. */
size_t wrong_check_header(const char *header);

/* Valid arguments of calls. Destroyed handles are destroyed last, so that no other has their
 * address; `foreign` is memory of the program's. */
struct wrong_scene {
  onebit_comm_t comm, no_comm;
  onebit_plan_t plan, gathers, scatters, busy, no_plan;
  onebit_request_t request, no_request; /* of `busy`; finished */
  onebit_optimizer_t optimizer, open, no_optimizer;
  onebit_tensor_t tensor;
  void *foreign;
  float *send, *receive; /* WRONG_COUNT elements each */
};
enum { WRONG_COUNT = 64 };

/* One rank's. False when it cannot be made. */
bool wrong_scene_make(struct wrong_scene *scene);
void wrong_scene_end(struct wrong_scene *scene);

/* All calls on one rank, by header. */
void wrong_communicators(const struct wrong_scene *scene);
void wrong_plans(const struct wrong_scene *scene);
void wrong_collectives(const struct wrong_scene *scene);
void wrong_creations(const struct wrong_scene *scene);
void wrong_steps(const struct wrong_scene *scene);
void wrong_looks(const struct wrong_scene *scene);
void wrong_checkpoints(const struct wrong_scene *scene);
void wrong_outers(const struct wrong_scene *scene);

#endif
