/*
 * The scope of a public call. A program's thread may have set a floating-point environment that
 * changes results, and a locale whose decimal point is a comma. A call has the library's own of
 * both, and gives back what it found.
 */
#ifndef OB_BASE_CALL_SCOPE_H
#define OB_BASE_CALL_SCOPE_H

#include "base/float_environment.h"

struct ob_call_scope {
  struct ob_float_environment floats;
  void *locale;
};

struct ob_call_scope ob_call_enter(void);
void ob_call_leave(const struct ob_call_scope *found);

/* Enters the scope until the end of the block, however it is left. Public functions begin with it,
 * except those that only return what a handle holds; and so does what a thread of the library's own
 * runs. */
#define OB_CALL_SCOPE                                                                              \
  struct ob_call_scope ob_call_found __attribute__((cleanup(ob_call_leave), unused)) =             \
      ob_call_enter()

/* Runs a statement within such a block as the program would run it. */
#define OB_CALL_OF_PROGRAM(statement)                                                              \
  do {                                                                                             \
    ob_call_leave(&ob_call_found);                                                                 \
    statement;                                                                                     \
    ob_call_found = ob_call_enter();                                                               \
  } while (0)

#endif
