/*
 * The scope of a public call. The program may have set a floating-point environment that changes
 * results, or a locale whose decimal point is a comma. A public call sets the library's own
 * environment and locale, checks the handles that it is given, and restores the program's
 * environment and locale when it ends.
 */
#ifndef OB_BASE_CALL_SCOPE_H
#define OB_BASE_CALL_SCOPE_H

#include <stdbool.h>
#include <stddef.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <stdint.h>
#else
#include <fenv.h>
#endif

#include "base/error.h"

/* --- The floating-point environment ------------------------------------------------------------*/

/* The environment consists of rounding, traps, flush-to-zero, and exception flags. The library
 * computes in the default environment, whatever the program has set, so that its results have the
 * same bits on every rank and its arithmetic raises no exception that the program traps or tests
 * for.
 *
 * The x87 state is not changed: the library computes in float and double, which use SSE. */
struct ob_float_environment {
#if defined(__x86_64__)
  unsigned mxcsr;
#elif defined(__aarch64__)
  uint64_t control, flags;
#else
  fenv_t all;
#endif
};

/* Sets the library's environment, and returns the environment that was set before. */
static inline struct ob_float_environment ob_float_enter(void) {
  struct ob_float_environment found;
#if defined(__x86_64__)
  found.mxcsr = _mm_getcsr();
  _mm_setcsr(0x1f80); /* exceptions masked, no flags, round to nearest, subnormals kept */
#elif defined(__aarch64__)
  __asm__ volatile("mrs %0, fpcr\n\tmrs %1, fpsr" : "=r"(found.control), "=r"(found.flags));
  __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0) : "memory");
#else
  fegetenv(&found.all);
  fesetenv(FE_DFL_ENV);
#endif
  return found;
}

static inline void ob_float_leave(const struct ob_float_environment *found) {
#if defined(__x86_64__)
  _mm_setcsr(found->mxcsr);
#elif defined(__aarch64__)
  __asm__ volatile("msr fpsr, %1\n\tmsr fpcr, %0"
                   :
                   : "r"(found->control), "r"(found->flags)
                   : "memory");
#else
  fesetenv(&found->all);
#endif
}

/* --- The scope ---------------------------------------------------------------------------------*/

struct ob_call_scope {
  struct ob_float_environment floats;
  void *locale;
};

struct ob_call_scope ob_call_enter(void);
void ob_call_leave(const struct ob_call_scope *found);

/* Enters the scope, which lasts until the end of the block, even if the block ends by a return.
 * Public functions begin with it, except those that only return a member of a handle. The functions
 * that the library's own threads run begin with it, too. */
#define OB_CALL_SCOPE                                                                              \
  struct ob_call_scope ob_call_found __attribute__((cleanup(ob_call_leave), unused)) =             \
      ob_call_enter()

/* Runs a statement in the program's environment and locale, within a block that has
 * OB_CALL_SCOPE. */
#define OB_CALL_OF_PROGRAM(statement)                                                              \
  do {                                                                                             \
    ob_call_leave(&ob_call_found);                                                                 \
    statement;                                                                                     \
    ob_call_found = ob_call_enter();                                                               \
  } while (0)

/* --- Handles -----------------------------------------------------------------------------------*/

/* A handle is the address of a live object of one kind, which the library has returned to a caller.
 * Every public function checks its handle here, so that a handle that was destroyed, or is of
 * another kind, is an error rather than an access to freed memory.
 *
 * A check takes no lock and does not read the object: it takes about 3 ns. A check cannot detect a
 * destroyed handle if a new object of the same kind has the same address. */

/* Requests are not registered: each is part of its plan. */
enum ob_handle_kind {
  OB_HANDLE_COMM = 1,
  OB_HANDLE_PLAN,
  OB_HANDLE_OPTIMIZER,
  OB_HANDLE_REQUEST,
  OB_HANDLE_MPI_REQUEST,
  OB_HANDLE_OUTER
};

/* Creates an object of `bytes` bytes, set to zero as by ob_allocate, and registers it. Returns NULL
 * if memory for the object or its table entry is exhausted. */
void *ob_handle_create(enum ob_handle_kind kind, size_t bytes);

/* Ends the registration: the address is no longer a handle, but the memory is not freed. */
void ob_handle_retire(const void *handle);

/* Ends the registration, unless ob_handle_retire has done so, and frees the memory. NULL is
 * fine. */
void ob_handle_release(void *handle);

bool ob_handle_is(const void *handle, enum ob_handle_kind kind);

/* Fails with ONEBIT_ERROR_ARGUMENT unless `handle` is a live handle of that kind. The error message
 * has the argument's name and value. */
onebit_status_t ob_handle_check(const void *handle, enum ob_handle_kind kind, const char *name);

/* Enters the scope and checks the handle: public functions that take a handle begin with it. */
#define OB_CALL_SCOPE_OF(handle, kind)                                                             \
  OB_CALL_SCOPE;                                                                                   \
  OB_TRY(ob_handle_check(handle, kind, #handle))

#endif
