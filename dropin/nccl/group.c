/*
 * Handles the program's groups. NCCL puts the calls of a group on their streams when the group
 * ends. A compressed call consists of many NCCL calls, so the library makes it after the group has
 * ended, in the program's order.
 */
#include <string.h>

#include "base/call_scope.h"
#include "base/memory.h"
#include "dropin/nccl/preload.h"

enum { MAX_MADE = 64, USUAL_CAPACITY = 16 };

struct entry {
  struct ob_nccl_call call;
  struct ob_nccl_decision decision;
};

/* The open group of a thread. Its memory is freed when the group ends, since the library does not
 * notice when a thread ends. */
struct group {
  int depth;
  struct entry usual[USUAL_CAPACITY];
  struct entry *more; /* all entries, if there are more than `usual` holds */
  size_t count, capacity;
  struct ob_nccl_made made[MAX_MADE];
  size_t made_count;
};
static _Thread_local struct group group;

bool ob_nccl_in_group(void) { return group.depth > 0; }

static struct entry *get_entries(void) { return group.more ? group.more : group.usual; }

static bool grow_group(void) {
  size_t capacity = group.more ? 2 * group.capacity : 2 * USUAL_CAPACITY;
  struct entry *more = ob_allocate(capacity, sizeof *more);
  if (!more)
    return false;
  memcpy(more, get_entries(), group.count * sizeof *more);
  ob_release(group.more);
  group.more = more;
  group.capacity = capacity;
  return true;
}

bool ob_nccl_group_add(const struct ob_nccl_call *call, const struct ob_nccl_decision *decision) {
  if (group.count == (group.more ? group.capacity : USUAL_CAPACITY) && !grow_group())
    return false;
  get_entries()[group.count++] = (struct entry){.call = *call, .decision = *decision};
  return true;
}

bool ob_nccl_group_add_comm(const struct ob_nccl_made *made) {
  if (group.made_count == MAX_MADE)
    return false;
  group.made[group.made_count++] = *made;
  return true;
}

/* ---- The end of a group ---- */

/* Times the call of a group that has only one call. If NCCL runs several calls together, the time
 * of each call is not known. */
static struct ob_nccl_timer *time_only_call(void) {
  const struct entry *only = get_entries();
  if (group.count != 1 || only->decision.reason == OB_REASON_NONE)
    return NULL;
  return ob_nccl_timer_begin(only->decision.comm, NULL, only->decision.record, only->call.stream);
}

/* Runs the postponed calls. Returns the first result that is not ncclSuccess. */
static ncclResult_t run_entries(void) {
  ncclResult_t result = ncclSuccess;
  for (size_t i = 0; i < group.count; i++) {
    const struct entry *entry = &get_entries()[i];
    if (entry->decision.reason != OB_REASON_NONE)
      continue;
    ncclResult_t one = ob_nccl_run(&entry->call, &entry->decision);
    result = result == ncclSuccess ? one : result;
  }
  return result;
}

static void release_comms(void) {
  for (size_t i = 0; i < group.count; i++) {
    struct ob_nccl_comm *comm = get_entries()[i].decision.comm;
    if (comm->look)
      ob_nccl_find_loop(comm);
    ob_nccl_comm_release(comm);
  }
  ob_release(group.more);
  group.more = NULL;
  group.count = 0;
}

static ncclResult_t end_group(void) {
  OB_CALL_SCOPE;
  struct ob_nccl_timer *timer = time_only_call();
  ncclResult_t result = ob_next_ncclGroupEnd();
  if (timer)
    ob_nccl_timer_end(timer, get_entries()[0].call.stream);
  if (group.made_count && (result == ncclSuccess || result == ncclInProgress)) {
    for (size_t i = 0; i < group.made_count; i++)
      group.made[i].blocking &= result == ncclSuccess;
    ncclResult_t made = ob_nccl_add_comms(group.made, group.made_count);
    result = made == ncclSuccess ? result : made;
  }
  group.made_count = 0;
  ncclResult_t run = run_entries();
  release_comms();
  return result == ncclSuccess ? run : result;
}

/* ---- Functions that replace NCCL's ---- */

OB_PRELOAD_VISIBLE ncclResult_t ncclGroupStart(void) {
  ncclResult_t result = ob_next_ncclGroupStart();
  if (result == ncclSuccess)
    group.depth++;
  return result;
}

OB_PRELOAD_VISIBLE ncclResult_t ncclGroupEnd(void) {
  if (group.depth > 0)
    group.depth--;
  return group.depth > 0 || (group.count == 0 && group.made_count == 0) ? ob_next_ncclGroupEnd()
                                                                        : end_group();
}
