/*
 * Handles: which addresses are live objects that callers were given, and of which kind. Every
 * public function checks its handle here, so that one which was destroyed, or is of another kind,
 * is an error and not an access to memory that is gone.
 *
 * A check takes no lock and does not look at the object: about 3 ns. An address that a new object
 * of the same kind has since been given cannot be told from the old one.
 */
#ifndef OB_BASE_HANDLES_H
#define OB_BASE_HANDLES_H

#include <stdbool.h>
#include <stddef.h>

#include "base/call_scope.h"
#include "base/error.h"

/* Requests of plans are part of their plan, and never registered. */
enum ob_handle_kind {
  OB_HANDLE_COMM = 1,
  OB_HANDLE_PLAN,
  OB_HANDLE_OPTIMIZER,
  OB_HANDLE_REQUEST,
  OB_HANDLE_MPI_REQUEST,
  OB_HANDLE_OUTER
};

/* Creates an object of `bytes` bytes, set to zero as by ob_allocate, and registers it; NULL when
 * there is no memory for the one or the other. */
void *ob_handle_create(enum ob_handle_kind kind, size_t bytes);

/* Ends the registration: the address is no handle any more; the memory stays. */
void ob_handle_retire(const void *handle);

/* Ends the registration, where that was not done, and frees the memory. NULL is fine. */
void ob_handle_release(void *handle);

bool ob_handle_is(const void *handle, enum ob_handle_kind kind);

/* Fails with ONEBIT_ERROR_ARGUMENT, and the argument's name and value, unless it is a live handle
 * of that kind. */
onebit_status_t ob_handle_check(const void *handle, enum ob_handle_kind kind, const char *name);

/* A public function that is about a handle begins with it. */
#define OB_CALL_SCOPE_OF(handle, kind)                                                             \
  OB_CALL_SCOPE;                                                                                   \
  OB_TRY(ob_handle_check(handle, kind, #handle))

#endif
