/*
 * The counters as MPI_T performance variables, which any tool in the program finds and reads.
 *
 * MPI has no way to add variables to another library's, so its calls are wrapped. Indices are to be
 * dense and never to change, while an MPI library may get more variables at any time: where ours
 * begin is settled by the first call that could show it, behind all that MPI has then, and those
 * that MPI gets later have their indices behind ours. Sessions are MPI's own, and so is all that
 * these calls are not asked of ours.
 */
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "base/call_scope.h"
#include "base/memory.h"
#include "dropin/mpi/preload.h"
#include "onebit/counters.h"

#ifndef MPI_T_ERR_INVALID /* new in MPI 3.1 */
#define MPI_T_ERR_INVALID MPI_ERR_ARG
#endif

/* ---- The variables ---- */

struct variable {
  const char *name;
  int class;
  size_t offset; /* in onebit_counters_t: an uint64_t of a COUNTER, a double of all others */
  const char *text;
  enum ob_reason passed; /* whose text it has, where there is one */
};

#define OFFSET(member) offsetof(onebit_counters_t, member)
#define PASSED(name, reason)                                                                       \
  { "onebit_passed_" name, MPI_T_PVAR_CLASS_COUNTER, OFFSET(passed[reason]), NULL, reason }

/* Seconds saved may fall, and below zero, where compression costs more than it saves. Values of
 * TIMER and AGGREGATE must not fall, and those of LEVEL not be negative: what fits no class is
 * GENERIC. */
static const struct variable variables[] = {
    {"onebit_calls", MPI_T_PVAR_CLASS_COUNTER, OFFSET(calls),
     "allreduces since MPI_Init, and the other collectives that rules name", OB_REASON_NONE},
    {"onebit_compressed", MPI_T_PVAR_CLASS_COUNTER, OFFSET(compressed),
     "those of onebit_calls that were compressed; all others were passed on to MPI",
     OB_REASON_NONE},
    {"onebit_bytes_sent", MPI_T_PVAR_CLASS_COUNTER, OFFSET(bytes_sent),
     "bytes that the compressed calls of this rank have sent", OB_REASON_NONE},
    {"onebit_bytes_dense", MPI_T_PVAR_CLASS_COUNTER, OFFSET(bytes_dense),
     "bytes that the compressed calls of this rank had sent in full precision", OB_REASON_NONE},
    {"onebit_seconds_saved", MPI_T_PVAR_CLASS_GENERIC, OFFSET(seconds_saved),
     "seconds that compressed blocking calls have saved; below zero where they cost more",
     OB_REASON_NONE},
    {"onebit_seconds_compressed", MPI_T_PVAR_CLASS_TIMER, OFFSET(seconds_compressed),
     "seconds in compressed blocking calls", OB_REASON_NONE},
    {"onebit_seconds_dense", MPI_T_PVAR_CLASS_TIMER, OFFSET(seconds_dense),
     "seconds in dense blocking calls, of the tensors that have been compressed", OB_REASON_NONE},
    PASSED("type", OB_REASON_TYPE),
    PASSED("operation", OB_REASON_OPERATION),
    PASSED("small", OB_REASON_SMALL),
    PASSED("alone", OB_REASON_ALONE),
    PASSED("rule", OB_REASON_RULE),
    PASSED("learning", OB_REASON_LEARNING),
    PASSED("unstable", OB_REASON_UNSTABLE),
    PASSED("withdrawn", OB_REASON_WITHDRAWN),
    PASSED("memory", OB_REASON_MEMORY),
    PASSED("watching", OB_REASON_WATCHING),
    PASSED("unlike", OB_REASON_UNLIKE),
    PASSED("slower", OB_REASON_SLOWER),
    PASSED("refused", OB_REASON_REFUSED),
};
/* The last is NCCL's. */
enum { VARIABLES = sizeof variables / sizeof variables[0], REASONS = OB_REASON_CAPTURED - 1 };
_Static_assert(VARIABLES == 7 + REASONS, "each reason has a variable");

static int read_variable(const struct variable *variable, void *buffer) {
  onebit_counters_t counters = {.size = sizeof counters};
  if (!buffer || onebit_counters_get(&counters) != ONEBIT_OK)
    return MPI_T_ERR_INVALID;
  bool count = variable->class == MPI_T_PVAR_CLASS_COUNTER;
  memcpy(buffer, (const char *)&counters + variable->offset,
         count ? sizeof(uint64_t) : sizeof(double));
  return MPI_SUCCESS;
}
_Static_assert(sizeof(unsigned long long) == sizeof(uint64_t), "a count is MPI_UNSIGNED_LONG_LONG");

/* ---- Indices ---- */

struct range {
  int first, end; /* indices of ours; none where the program runs with another MPI library */
  int mpi;        /* how many MPI has now */
};

/* An MPI error code: that of a program that has not initialised MPI_T, mostly. */
static int find_range(struct range *range) {
  static atomic_int settled = -1;
  int first = -1;
  int code = PMPI_T_pvar_get_num(&range->mpi);
  if (code != MPI_SUCCESS)
    return code;
  if (atomic_compare_exchange_strong(&settled, &first, range->mpi))
    first = range->mpi;
  range->first = first;
  range->end = first + (ob_mpi_is_foreign() ? 0 : VARIABLES);
  return MPI_SUCCESS;
}

static const struct variable *at(const struct range *range, int index) {
  return index >= range->first && index < range->end ? &variables[index - range->first] : NULL;
}

static int from_mpi(const struct range *range, int index) {
  return index < range->first ? index : index + (range->end - range->first);
}

/* One of ours, or *index becomes MPI's; an MPI error code. An index of neither is refused here:
 * some MPI libraries break down on it. */
static int look_up(int *index, const struct variable **variable) {
  struct range range;
  int code = find_range(&range);
  if (code != MPI_SUCCESS)
    return code;
  *variable = at(&range, *index);
  if (*variable || ob_mpi_is_foreign())
    return MPI_SUCCESS;
  if (*index >= range.end)
    *index -= range.end - range.first;
  return *index >= 0 && *index < range.mpi ? MPI_SUCCESS : MPI_T_ERR_INVALID_INDEX;
}

OB_PRELOAD_VISIBLE int MPI_T_pvar_get_num(int *num_pvar) {
  struct range range;
  int code = num_pvar ? find_range(&range) : PMPI_T_pvar_get_num(num_pvar);
  if (code == MPI_SUCCESS && num_pvar) /* never fewer than before */
    *num_pvar = range.mpi < range.first ? range.end : from_mpi(&range, range.mpi);
  return code;
}

/* Ours are in no category. Those of MPI's that are, and came later, have other indices here. */
OB_PRELOAD_VISIBLE int MPI_T_category_get_pvars(int cat_index, int len, int indices[]) {
  struct range range;
  int within = 0;
  int code = PMPI_T_category_get_pvars(cat_index, len, indices);
  if (code != MPI_SUCCESS || !indices || find_range(&range) != MPI_SUCCESS ||
      PMPI_T_category_get_info(cat_index, NULL, NULL, NULL, NULL, NULL, &within, NULL) !=
          MPI_SUCCESS)
    return code;
  for (int i = 0; i < len && i < within; i++)
    indices[i] = from_mpi(&range, indices[i]);
  return code;
}

#if MPI_VERSION > 3 || MPI_SUBVERSION >= 1
OB_PRELOAD_VISIBLE int MPI_T_pvar_get_index(const char *name, int var_class, int *pvar_index) {
  struct range range;
  int code = find_range(&range);
  if (code != MPI_SUCCESS)
    return code;
  for (int index = range.first; name && pvar_index && index < range.end; index++) {
    if (strcmp(name, at(&range, index)->name) != 0)
      continue;
    if (var_class != at(&range, index)->class)
      return MPI_T_ERR_INVALID_NAME;
    *pvar_index = index;
    return MPI_SUCCESS;
  }
  code = PMPI_T_pvar_get_index(name, var_class, pvar_index);
  if (code == MPI_SUCCESS)
    *pvar_index = from_mpi(&range, *pvar_index);
  return code;
}
#endif

/* ---- What one is ---- */

/* As MPI_T gives strings: as much as there is room for, and the room that all of it wants. */
static void put_string(const char *from, char *to, int *length) {
  if (!length)
    return;
  if (to && *length > 0)
    snprintf(to, (size_t)*length, "%s", from);
  *length = (int)strlen(from) + 1;
}

static void put_description(const struct variable *variable, char *to, int *length) {
  char text[160];
  if (variable->passed == OB_REASON_NONE)
    snprintf(text, sizeof text, "%s", variable->text);
  else
    snprintf(text, sizeof text, "those of onebit_calls that were passed on to MPI: %s",
             onebit_counters_reason((size_t)variable->passed));
  put_string(text, to, length);
}

static void put(int *to, int value) {
  if (to)
    *to = value;
}

OB_PRELOAD_VISIBLE int MPI_T_pvar_get_info(int pvar_index, char *name, int *name_len,
                                           int *verbosity, int *var_class, MPI_Datatype *datatype,
                                           MPI_T_enum *enumtype, char *desc, int *desc_len,
                                           int *bind, int *readonly, int *continuous, int *atomic) {
  const struct variable *variable;
  int code = look_up(&pvar_index, &variable);
  if (code != MPI_SUCCESS)
    return code;
  if (!variable)
    return PMPI_T_pvar_get_info(pvar_index, name, name_len, verbosity, var_class, datatype,
                                enumtype, desc, desc_len, bind, readonly, continuous, atomic);
  put_string(variable->name, name, name_len);
  put_description(variable, desc, desc_len);
  put(verbosity, MPI_T_VERBOSITY_USER_BASIC);
  put(var_class, variable->class);
  put(bind, MPI_T_BIND_NO_OBJECT);
  put(readonly, 1);
  put(continuous, 1);
  put(atomic, 0);
  if (datatype)
    *datatype = variable->class == MPI_T_PVAR_CLASS_COUNTER ? MPI_UNSIGNED_LONG_LONG : MPI_DOUBLE;
  if (enumtype)
    *enumtype = MPI_T_ENUM_NULL;
  return MPI_SUCCESS;
}

/* ---- Handles ---- */

/* What a handle of ours points to. It is never given back to the system, but used again: so MPI
 * has no handle at its address, and one that was freed is known as such. */
struct handle {
  struct handle *next;
  MPI_T_pvar_session session; /* null: it is free */
  const struct variable *variable;
};

static struct handle *handles;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* A free one. The lock is held. */
static struct handle *free_handle(void) {
  for (struct handle *handle = handles; handle; handle = handle->next)
    if (handle->session == MPI_T_PVAR_SESSION_NULL)
      return handle;
  struct handle *handle = ob_allocate(1, sizeof *handle);
  if (!handle)
    return NULL;
  handle->next = handles;
  handles = handle;
  return handle;
}

/* NULL: it is none of ours. The lock is held. */
static struct handle *find(MPI_T_pvar_handle wanted) {
  struct handle *handle = handles;
  while (handle && (void *)handle != (void *)wanted)
    handle = handle->next;
  return handle;
}

/* An MPI error code unless the handle may be used in the session. The lock is held. */
static int check(const struct handle *handle, MPI_T_pvar_session session) {
  int num;
  int code = PMPI_T_pvar_get_num(&num);
  if (code != MPI_SUCCESS)
    return code;
  if (session == MPI_T_PVAR_SESSION_NULL)
    return MPI_T_ERR_INVALID_SESSION;
  return handle->session == session ? MPI_SUCCESS : MPI_T_ERR_INVALID_HANDLE;
}

/* The variable of a handle of ours, and whether it may be used; NULL where MPI is to be asked. So
 * it is for MPI_T_PVAR_ALL_HANDLES: ours, always continuous and only to be read, are left out. */
static const struct variable *of(MPI_T_pvar_session session, MPI_T_pvar_handle wanted, int *code) {
  pthread_mutex_lock(&lock);
  const struct handle *handle = find(wanted);
  const struct variable *variable = handle ? handle->variable : NULL;
  *code = handle ? check(handle, session) : MPI_SUCCESS;
  pthread_mutex_unlock(&lock);
  return variable;
}

static int allocate(MPI_T_pvar_session session, const struct variable *variable,
                    MPI_T_pvar_handle *handle, int *count) {
  if (session == MPI_T_PVAR_SESSION_NULL)
    return MPI_T_ERR_INVALID_SESSION;
  if (!handle || !count)
    return MPI_T_ERR_INVALID;
  pthread_mutex_lock(&lock);
  struct handle *fresh = free_handle();
  if (fresh) {
    fresh->session = session;
    fresh->variable = variable;
    *handle = (MPI_T_pvar_handle)(void *)fresh;
    *count = 1;
  }
  pthread_mutex_unlock(&lock);
  return fresh ? MPI_SUCCESS : MPI_T_ERR_MEMORY;
}

OB_PRELOAD_VISIBLE int MPI_T_pvar_handle_alloc(MPI_T_pvar_session session, int pvar_index,
                                               void *obj_handle, MPI_T_pvar_handle *handle,
                                               int *count) {
  const struct variable *variable;
  int code = look_up(&pvar_index, &variable);
  if (code != MPI_SUCCESS)
    return code;
  return variable ? allocate(session, variable, handle, count)
                  : PMPI_T_pvar_handle_alloc(session, pvar_index, obj_handle, handle, count);
}

OB_PRELOAD_VISIBLE int MPI_T_pvar_handle_free(MPI_T_pvar_session session,
                                              MPI_T_pvar_handle *handle) {
  pthread_mutex_lock(&lock);
  struct handle *found = handle ? find(*handle) : NULL;
  int code = found ? check(found, session) : MPI_SUCCESS;
  if (found && code == MPI_SUCCESS) {
    found->session = MPI_T_PVAR_SESSION_NULL;
    *handle = MPI_T_PVAR_HANDLE_NULL;
  }
  pthread_mutex_unlock(&lock);
  return found ? code : PMPI_T_pvar_handle_free(session, handle);
}

/* Its handles go with it. The lock is held all the while: a new session may be at its address. */
OB_PRELOAD_VISIBLE int MPI_T_pvar_session_free(MPI_T_pvar_session *session) {
  MPI_T_pvar_session freed = session ? *session : MPI_T_PVAR_SESSION_NULL;
  pthread_mutex_lock(&lock);
  int code = PMPI_T_pvar_session_free(session);
  for (struct handle *handle = handles; code == MPI_SUCCESS && handle; handle = handle->next)
    if (handle->session == freed)
      handle->session = MPI_T_PVAR_SESSION_NULL;
  pthread_mutex_unlock(&lock);
  return code;
}

/* ---- What is done with one: ours can be read, and nothing else ---- */

OB_PRELOAD_VISIBLE int MPI_T_pvar_read(MPI_T_pvar_session session, MPI_T_pvar_handle handle,
                                       void *buf) {
  OB_CALL_SCOPE;
  int code;
  const struct variable *variable = of(session, handle, &code);
  if (!variable)
    return PMPI_T_pvar_read(session, handle, buf);
  return code == MPI_SUCCESS ? read_variable(variable, buf) : code;
}

/* Whether the handle is ours. Then *code, why it may not be done, stays, or becomes what is wrong
 * with the handle. */
static bool refuses(MPI_T_pvar_session session, MPI_T_pvar_handle handle, int *code) {
  int checked;
  if (!of(session, handle, &checked))
    return false;
  if (checked != MPI_SUCCESS)
    *code = checked;
  return true;
}

#define REFUSED(call, why, parameters, arguments)                                                  \
  OB_PRELOAD_VISIBLE int MPI_T_pvar_##call parameters {                                            \
    int code = MPI_T_ERR_PVAR_##why;                                                               \
    return refuses(session, handle, &code) ? code : PMPI_T_pvar_##call arguments;                  \
  }
#define PLAIN (MPI_T_pvar_session session, MPI_T_pvar_handle handle)
REFUSED(start, NO_STARTSTOP, PLAIN, (session, handle))
REFUSED(stop, NO_STARTSTOP, PLAIN, (session, handle))
REFUSED(reset, NO_WRITE, PLAIN, (session, handle))
REFUSED(write, NO_WRITE, (MPI_T_pvar_session session, MPI_T_pvar_handle handle, const void *buf),
        (session, handle, buf))
REFUSED(readreset, NO_ATOMIC, (MPI_T_pvar_session session, MPI_T_pvar_handle handle, void *buf),
        (session, handle, buf))
