/*
 * The scope of a public call: sets the floating-point environment and the locale of the thread,
 * restores both, and checks handles.
 */
#define _POSIX_C_SOURCE 200809L /* uselocale */
#include "base/call_scope.h"

#include <locale.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "base/error.h"
#include "base/lock.h"
#include "base/memory.h"

#ifdef __APPLE__
#include <xlocale.h>
#endif

/* The library's locale; 0 if it cannot be created: uselocale then changes nothing. */
static locale_t own_locale;
static void make_locale(void) { own_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0); }

struct ob_call_scope ob_call_enter(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, make_locale);
  return (struct ob_call_scope){ob_float_enter(), (void *)uselocale(own_locale)};
}

void ob_call_leave(const struct ob_call_scope *found) {
  uselocale((locale_t)found->locale);
  ob_float_leave(&found->floats);
}

/* --- Handles -----------------------------------------------------------------------------------*/
/*
 * The table of handles uses open addressing; an entry is an address with its kind in the bits that
 * alignment leaves zero. Entries change under a lock. Readers take no lock: an entry that they find
 * is valid. If they miss an entry, which may just be moving, they look it up again under the lock.
 * A table that became too small is never freed, since readers may still use it: all old tables
 * together are smaller than the one in use.
 */

#define KIND_BITS ((uintptr_t)OB_ALIGNMENT - 1)

struct table {
  struct table *before; /* the smaller table that this one has replaced */
  size_t slots;         /* number of slots, a power of two */
  _Atomic uintptr_t *slot;
};

/* The slots of the first table, which is static. They are enough for small programs, which then
 * allocate no table. */
#define FIRST_SLOTS 256
static _Atomic uintptr_t first_slots[FIRST_SLOTS];
static struct table first = {NULL, FIRST_SLOTS, first_slots};

static struct table *_Atomic current = &first;
static size_t used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t handles_index_of(const struct table *table, uintptr_t address) {
  uint64_t mixed = (uint64_t)(address / OB_ALIGNMENT) * UINT64_C(0x9e3779b97f4a7c15);
  return (size_t)(mixed >> 32) & (table->slots - 1);
}

/* Returns the slot that has the address, or the empty slot where the address belongs. The table
 * always has an empty slot. */
static _Atomic uintptr_t *handles_find(const struct table *table, uintptr_t address) {
  for (size_t i = handles_index_of(table, address);; i = (i + 1) & (table->slots - 1)) {
    uintptr_t entry = atomic_load_explicit(&table->slot[i], memory_order_acquire);
    if (!entry || (entry & ~KIND_BITS) == address)
      return &table->slot[i];
  }
}

static void handles_insert(const struct table *table, uintptr_t entry) {
  atomic_store_explicit(handles_find(table, entry & ~KIND_BITS), entry, memory_order_release);
}

static bool handles_grow(void) {
  struct table *old = atomic_load(&current), *table = ob_allocate(1, sizeof *table);
  if (!table)
    return false;
  *table = (struct table){old, 2 * old->slots, ob_allocate(2 * old->slots, sizeof *table->slot)};
  if (!table->slot) {
    ob_release(table);
    return false;
  }
  for (size_t i = 0; i < old->slots; i++)
    if (old->slot[i])
      handles_insert(table, old->slot[i]);
  atomic_store_explicit(&current, table, memory_order_release);
  return true;
}

static bool handles_add(uintptr_t entry) {
  OB_LOCKED(&lock);
  bool fits = 2 * used < atomic_load(&current)->slots || handles_grow();
  if (fits) {
    handles_insert(atomic_load(&current), entry);
    used++;
  }
  return fits;
}

void *ob_handle_create(enum ob_handle_kind kind, size_t bytes) {
  void *handle = ob_allocate(1, bytes);
  if (handle && handles_add((uintptr_t)handle | (uintptr_t)kind))
    return handle;
  ob_release(handle);
  return NULL;
}

/* Removes an entry, and inserts the entries behind it again, so that no empty slot separates an
 * entry from the slot where its search begins. */
static void handles_remove(const struct table *table, _Atomic uintptr_t *slot) {
  uintptr_t entry;
  atomic_store_explicit(slot, 0, memory_order_release);
  used--;
  for (size_t i = (size_t)(slot - table->slot);;) {
    i = (i + 1) & (table->slots - 1);
    if (!(entry = atomic_exchange(&table->slot[i], 0)))
      return;
    handles_insert(table, entry);
  }
}

void ob_handle_retire(const void *handle) {
  OB_LOCKED(&lock);
  const struct table *table = atomic_load(&current);
  _Atomic uintptr_t *slot = handles_find(table, (uintptr_t)handle);
  if (*slot)
    handles_remove(table, slot);
}

void ob_handle_release(void *handle) {
  ob_handle_retire(handle);
  ob_release(handle);
}

/* Returns the kind of a handle; 0: `handle` is no live handle. */
static uintptr_t handles_kind_of(const void *handle) {
  uintptr_t address = (uintptr_t)handle, entry;
  if (!address || address & KIND_BITS)
    return 0;
  const struct table *table = atomic_load_explicit(&current, memory_order_acquire);
  entry = atomic_load_explicit(handles_find(table, address), memory_order_acquire);
  if ((entry & ~KIND_BITS) == address)
    return entry & KIND_BITS;
  OB_LOCKED(&lock);
  entry = *handles_find(atomic_load(&current), address);
  return entry & KIND_BITS;
}

bool ob_handle_is(const void *handle, enum ob_handle_kind kind) {
  return handles_kind_of(handle) == (uintptr_t)kind;
}

onebit_status_t ob_handle_check(const void *handle, enum ob_handle_kind kind, const char *name) {
  static const struct {
    const char *article, *noun, *ended;
  } kinds[] = {[OB_HANDLE_COMM] = {"a", "communicator", "destroyed"},
               [OB_HANDLE_PLAN] = {"a", "plan", "destroyed"},
               [OB_HANDLE_OPTIMIZER] = {"an", "optimizer", "destroyed"},
               [OB_HANDLE_REQUEST] = {"a", "request", "finished"},
               [OB_HANDLE_MPI_REQUEST] = {"an", "ONEBIT_Request", "finished"},
               [OB_HANDLE_OUTER] = {"an", "outer step", "destroyed"}};
  uintptr_t is = handles_kind_of(handle);
  if (is == (uintptr_t)kind)
    return ONEBIT_OK;
  if (!handle)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s is NULL", name);
  if (is)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "%s is %p, which is %s %s", name, handle,
                    kinds[is].article, kinds[is].noun);
  return ob_error(ONEBIT_ERROR_ARGUMENT,
                  "%s is %p, not %s %s that exists (it is %s, or was never created)", name, handle,
                  kinds[kind].article, kinds[kind].noun, kinds[kind].ended);
}
