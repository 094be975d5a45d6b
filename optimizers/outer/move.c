/*
 * Moves an outer step to another communicator: after a rank was lost, or when ranks have joined.
 *
 *   detach      exchanges in flight are applied if they have ended, else their drifts count in the
 *               next exchange; residuals are exported, and plans on the old communicator destroyed
 *   agree       all outer steps are of one kind; a rank with the most exchanges is the source
 *   align       ranks that differ get the source's consensus and outer momentum, by fragments
 *   attach      plans are created on the new communicator, and residuals imported
 *
 * Between detach and attach the outer step is detached. After a failure it stays detached, and the
 * next call continues from that state. Ranks with equal state exchange only checksums.
 *
 * Among sites, the sites' rank 0s do this first. Then the ranks of each site do it, and copy the
 * state of the site's rank 0.
 */
#include <string.h>

#include "base/call_scope.h"
#include "base/error.h"
#include "base/memory.h"
#include "collectives/communicator.h"
#include "optimizers/moving.h"
#include "optimizers/outer/sites.h"

/* --- Align: all ranks get the source's state ---------------------------------------------------*/

struct rejoining {
  struct onebit_outer *outer;
  struct ob_moving ranks; /* ranks.comm is NULL if this rank is not among them */
  float *message;
};

enum { MESSAGE = 1 << 20 }; /* the largest number of floats in a message */

/* Sends values from the source to all ranks whose number in the latest agreement differs from the
 * source's. */
static onebit_status_t send_from_source(struct rejoining *moving, float *values, size_t count) {
  struct ob_moving *ranks = &moving->ranks;
  for (int rank = 0; rank < ranks->comm->size; rank++)
    ranks->wants[rank] = ranks->noted[rank] != ranks->noted[ranks->source];
  for (size_t some; count; values += some, count -= some) {
    some = count < MESSAGE ? count : MESSAGE;
    memcpy(moving->message, values, some * sizeof *values);
    OB_TRY(ob_moving_broadcast(ranks, ranks->source, moving->message, some * sizeof *values));
    if (ranks->wants[ranks->comm->rank])
      memcpy(values, moving->message, some * sizeof *values);
  }
  return ONEBIT_OK;
}

/* Returns a fingerprint of the fragment's arrays that are equal on all ranks: those before
 * OB_OUTER_DRIFT. */
static uint64_t fragment_fingerprint(const struct ob_fragment *fragment) {
  const struct ob_codec *codec = fragment->outer->codec;
  uint64_t sums = 0;
  for (int k = 0; k < OB_OUTER_DRIFT; k++)
    if (fragment->array[k])
      sums = sums << 32 | codec->checksum(fragment->array[k], fragment->count);
  return sums;
}

/* A rank that was behind begins at the consensus: its drift so far was in the exchange whose end it
 * did not see. */
static onebit_status_t align_fragment(struct rejoining *moving, struct ob_fragment *fragment) {
  struct ob_moving *ranks = &moving->ranks;
  OB_TRY(ob_moving_gather_numbers(ranks, ONEBIT_OK, fragment_fingerprint(fragment)));
  const uint64_t wanted = ranks->noted[ranks->source];
  const bool behind = ranks->noted[ranks->comm->rank] != wanted;
  onebit_status_t status = ONEBIT_OK;
  for (int k = 0; status == ONEBIT_OK && k < OB_OUTER_DRIFT; k++)
    if (fragment->array[k])
      status = send_from_source(moving, fragment->array[k], fragment->count);
  if (status != ONEBIT_OK) {
    ob_comm_give_up(ranks->comm, onebit_last_error());
    return status;
  }
  if (fragment_fingerprint(fragment) != wanted)
    status = ob_error(
        ONEBIT_ERROR_MESSAGE,
        "from rank %d: fragment %zu arrived damaged: its hash differs from the sender's hash",
        ranks->source, fragment->number);
  if (!behind || status != ONEBIT_OK)
    return ob_agree(ranks->comm, status, NULL, 0);
  fragment->keeps = false;
  fragment->stage = OB_FRAGMENT_IDLE;
  ob_fragment_set_parameters(fragment, 1);
  fragment->weight = 0;
  for (int k = 0; k < 2; k++)
    memset(fragment->held[k], 0, fragment->count * sizeof(float));
  return ob_agree(ranks->comm, ONEBIT_OK, NULL, 0);
}

static size_t find_next_fragment(const struct onebit_outer *outer) {
  size_t next = 0;
  while (outer->fragments[next].begin_step <= outer->position % outer->options.local_steps)
    next++;
  return next;
}

/* Aligns the counts, and the fragment that is exchanged next. */
static onebit_status_t align_counts(struct rejoining *moving) {
  struct onebit_outer *outer = moving->outer;
  struct ob_moving *ranks = &moving->ranks;
  const bool holder = ranks->holder[ranks->comm->rank];
  uint64_t *counts[] = {&outer->started, &outer->exchanges, &outer->skipped, &outer->steps};
  OB_TRY(ob_moving_gather_numbers(ranks, ONEBIT_OK, find_next_fragment(outer)));
  const size_t next = (size_t)ranks->noted[ranks->source];
  OB_TRY(ob_moving_gather_numbers(ranks, ONEBIT_OK, outer->options.local_steps));
  const size_t round = (size_t)ranks->noted[ranks->source];
  OB_TRY(ob_moving_gather_numbers(ranks, ONEBIT_OK, outer->position % outer->options.local_steps));
  const size_t position = (size_t)ranks->noted[ranks->source];
  if (!outer->options.weighted || !holder || find_next_fragment(outer) != next)
    outer->position = ob_outer_position(outer, position, round);
  for (size_t k = 0; k < 4; k++) {
    OB_TRY(ob_moving_gather_numbers(ranks, ONEBIT_OK, *counts[k]));
    if (counts[k] != &outer->steps || !outer->options.weighted || !holder)
      *counts[k] = ranks->noted[ranks->source];
  }
  return ONEBIT_OK;
}

/* Chooses the source; ranks that differ from it get its consensus, outer momentum and counts. A
 * rank of the same run is behind by at most the fragments whose exchange was interrupted. */
static onebit_status_t align_ranks(struct rejoining *moving) {
  struct onebit_outer *outer = moving->outer;
  struct ob_moving *ranks = &moving->ranks;
  onebit_status_t status = ob_moving_create(ranks, ranks->comm, "onebit_outer_move");
  moving->message = ob_allocate(outer->count < MESSAGE ? outer->count : MESSAGE, sizeof(float));
  if (status == ONEBIT_OK && !moving->message)
    status = ob_error(ONEBIT_ERROR_MEMORY, "out of memory for moving an outer step");
  if (status == ONEBIT_OK)
    status = ob_outer_to_host(outer);
  OB_TRY(ob_moving_gather_numbers(ranks, status, outer->exchanges));
  ob_moving_choose_source(ranks, outer->options.fragments);
  for (size_t f = 0; f < outer->options.fragments; f++)
    OB_TRY(align_fragment(moving, &outer->fragments[f]));
  return align_counts(moving);
}

enum { WORKER, SERVER };

/* --- Detach ------------------------------------------------------------------------------------*/

onebit_status_t ob_outer_hold_residuals(struct onebit_outer *outer) {
  for (int k = OB_OUTER_HELD_WORKER; k <= OB_OUTER_HELD_SERVER; k++)
    if (!outer->array[k])
      outer->array[k] = ob_allocate(outer->count, sizeof(float));
  if (!outer->array[OB_OUTER_HELD_WORKER] || !outer->array[OB_OUTER_HELD_SERVER])
    return ob_error(ONEBIT_ERROR_MEMORY, "out of memory for the residuals of an outer step");
  ob_fragments_set_arrays(outer);
  for (size_t f = 0; f < outer->options.fragments; f++) {
    const struct ob_fragment *fragment = &outer->fragments[f];
    OB_TRY(ob_outer_export_residual(fragment, OB_SAVED_WORKER, fragment->held[WORKER]));
    OB_TRY(ob_outer_export_residual(fragment, OB_SAVED_SERVER, fragment->held[SERVER]));
  }
  return ONEBIT_OK;
}

void ob_outer_release_held(struct onebit_outer *outer) {
  for (int k = OB_OUTER_HELD_WORKER; k <= OB_OUTER_HELD_SERVER; k++) {
    ob_release(outer->array[k]);
    outer->array[k] = NULL;
  }
  ob_fragments_set_arrays(outer);
}

static void destroy_exchange(struct ob_fragment *fragment) {
  if (fragment->state)
    fragment->outer->exchange->destroy(fragment);
  onebit_plan_destroy(fragment->weigh);
  fragment->weigh = NULL;
}

/* If memory runs out, nothing is freed, and the next call tries again. */
onebit_status_t ob_outer_detach(struct onebit_outer *outer) {
  const size_t parts = outer->options.fragments;
  for (size_t f = 0; f < parts; f++)
    ob_fragment_abandon(&outer->fragments[f]);
  outer->refused = false;
  if (!outer->detached)
    OB_TRY(ob_outer_hold_residuals(outer));
  outer->detached = true;
  for (size_t f = 0; f < parts; f++)
    destroy_exchange(&outer->fragments[f]);
  if (outer->sites)
    ob_sites_detach(outer);
  return ONEBIT_OK;
}

/* --- Attach ------------------------------------------------------------------------------------*/

/* Adds the server's residual of elements that this rank no longer serves to its worker's residual,
 * times the number of ranks, since it was part of their mean. If new ranks without residuals have
 * joined, the others' residuals get a larger weight, so that the mean does not change. Afterwards
 * the array of the server's residual contains the growth of the worker's residual. */
static void merge_held_residuals(const struct rejoining *moving, struct ob_fragment *fragment) {
  const float ranks = (float)moving->ranks.comm->size;
  const float factor = ranks / (float)moving->ranks.holders;
  float *worker = fragment->held[WORKER], *server = fragment->held[SERVER];
  for (size_t i = 0; i < fragment->count; i++)
    if (factor != 1 || server[i] != 0) { /* else the value stays, even if it is -0 */
      const float joined = factor * worker[i] + ranks * server[i];
      server[i] = joined - worker[i];
      worker[i] = joined;
    }
}

/* Imports this rank's elements of a held residual, and sets them to zero in the held array. The
 * array of the drift is used as scratch, since no exchange is in flight. */
static onebit_status_t import_held_residual(struct ob_fragment *fragment, enum ob_saved what) {
  float *held = ob_fragment_array(fragment, what);
  OB_TRY(ob_outer_import_residual(fragment, what, held, fragment->drift));
  for (size_t k = 0; k < fragment->pieces; k++) {
    const struct ob_run run = fragment->outer->exchange->extent(fragment, what, k);
    memset(held + fragment->piece[k].at + run.offset, 0, run.count * sizeof *held);
  }
  return ONEBIT_OK;
}

static onebit_status_t import_residuals(const struct rejoining *moving,
                                        struct ob_fragment *fragment) {
  OB_TRY(import_held_residual(fragment, OB_SAVED_SERVER));
  merge_held_residuals(moving, fragment);
  OB_TRY(import_held_residual(fragment, OB_SAVED_WORKER));
  if (fragment->keeps)
    OB_TRY(ob_outer_export_residual(fragment, OB_SAVED_WORKER, fragment->drift));
  return ONEBIT_OK;
}

/* Moves parameters that contain a residual by the growth of the residual: otherwise the next drift
 * would lack that growth. */
static void shift_by_growth(struct ob_fragment *fragment) {
  if (fragment->keeps)
    ob_fragment_shift(fragment, fragment->held[SERVER]);
  memset(fragment->held[SERVER], 0, fragment->count * sizeof(float));
}

/* Copies drift and residuals from rank 0 of the site. */
static onebit_status_t copy_rank_0(struct rejoining *inside, struct ob_fragment *fragment) {
  float *const arrays[] = {fragment->drift, fragment->held[SERVER]};
  const struct ob_codec *codec = fragment->outer->codec;
  for (int k = 0; k < 2; k++) {
    OB_TRY(ob_moving_gather_numbers(&inside->ranks, ONEBIT_OK,
                                    codec->checksum(arrays[k], fragment->count)));
    OB_TRY(send_from_source(inside, arrays[k], fragment->count));
  }
  return ONEBIT_OK;
}

/* Imports the residuals of all fragments. `inside`: the ranks of the site, if there are sites; then
 * the communicator of `moving` is NULL except on rank 0 of the site. */
static onebit_status_t import_fragments(const struct rejoining *moving, struct rejoining *inside) {
  struct onebit_outer *outer = moving->outer;
  for (size_t f = 0; f < outer->options.fragments; f++) {
    struct ob_fragment *fragment = &outer->fragments[f];
    if (moving->ranks.comm)
      OB_TRY(import_residuals(moving, fragment));
    if (inside)
      OB_TRY(copy_rank_0(inside, fragment));
    shift_by_growth(fragment);
  }
  return ONEBIT_OK;
}

/* Builds the outer step on the device on which it was created, whichever device is current now. */
static onebit_status_t outer_move_build(struct onebit_outer *outer) {
  const struct ob_outer_executor *executor = outer->executor;
  const int before = executor->enter ? executor->enter(outer) : 0;
  const onebit_status_t status = ob_outer_build(outer);
  if (executor->leave)
    executor->leave(before);
  return status;
}

static onebit_status_t outer_move_attach(struct rejoining *moving) {
  struct onebit_outer *outer = moving->outer;
  onebit_comm_t before = outer->comm;
  outer->comm = ob_comm_add_user(moving->ranks.comm);
  ob_comm_remove_user(before);
  OB_TRY(outer_move_build(outer));
  onebit_status_t status = ob_outer_to_host(outer);
  if (status == ONEBIT_OK)
    status = import_fragments(moving, NULL);
  const onebit_status_t sent = ob_outer_from_host(outer, status == ONEBIT_OK);
  status = status == ONEBIT_OK ? sent : status;
  outer->detached = status != ONEBIT_OK;
  return ob_agree(outer->comm, status, NULL, 0);
}

/* Sends drifts again in each group in which a site has applied no round that includes its drift.
 * All sites send, since a server waits for all. */
static onebit_status_t resend_drifts(struct rejoining *moving, struct rejoining *inside) {
  struct onebit_outer *outer = moving->outer;
  bool skipped = false;
  for (size_t g = 0; g < outer->groups; g++) {
    struct ob_site_group *group = &outer->sites->groups[g];
    uint64_t sent = 0;
    for (int s = 0; s < outer->sites->count; s++)
      sent |= ob_shard_of(group, s)->fragment->stage == OB_FRAGMENT_SENDING;
    if (moving->ranks.comm) {
      OB_TRY(ob_moving_gather_numbers(&moving->ranks, ONEBIT_OK, sent));
      for (int s = 0; s < outer->sites->count; s++)
        sent |= moving->ranks.noted[s];
    }
    OB_TRY(ob_moving_gather_numbers(&inside->ranks, ONEBIT_OK, sent));
    if (inside->ranks.noted[0])
      ob_sites_begin(group, 0, &skipped);
  }
  outer->skipped += skipped;
  return ONEBIT_OK;
}

static onebit_status_t attach_site(struct rejoining *moving, struct rejoining *inside) {
  struct onebit_outer *outer = moving->outer;
  onebit_status_t status = moving->ranks.comm ? align_ranks(moving) : ONEBIT_OK;
  status = ob_agree(outer->comm, status, NULL, 0);
  if (status == ONEBIT_OK)
    status = align_ranks(inside);
  OB_TRY(ob_sites_agree(outer->comm, moving->ranks.comm, status, NULL, 0));
  OB_TRY(ob_outer_build(outer));
  status = import_fragments(moving, inside);
  outer->detached = status != ONEBIT_OK;
  OB_TRY(ob_sites_agree(outer->comm, moving->ranks.comm, status, NULL, 0));
  return resend_drifts(moving, inside);
}

static void finish_move(struct rejoining *moving) {
  if (ob_moving_destroy(&moving->ranks))
    ob_release(moving->message);
  else
    ob_memory_keep(moving->message);
}

static onebit_status_t run_move(struct rejoining *moving) {
  struct onebit_outer *outer = moving->outer;
  onebit_status_t status = ob_outer_detach(outer);
  if (outer->sites)
    status = ob_sites_regroup(outer, moving->ranks.comm, status);
  OB_TRY(ob_outer_agree(outer, moving->ranks.comm, status));
  if (outer->sites) {
    struct rejoining inside = {.outer = outer, .ranks.comm = outer->comm};
    status = attach_site(moving, &inside);
    finish_move(&inside);
    return status;
  }
  status = align_ranks(moving);
  const onebit_status_t sent = ob_outer_from_host(outer, true);
  OB_TRY(status);
  OB_TRY(ob_agree(moving->ranks.comm, sent, NULL, 0));
  return outer_move_attach(moving);
}

onebit_status_t ob_outer_rejoin(struct onebit_outer *outer, onebit_comm_t comm) {
  struct rejoining moving = {.outer = outer, .ranks.comm = comm ? ob_comm_add_user(comm) : NULL};
  if (outer->latest)
    ob_comm_remove_user(outer->latest);
  outer->latest = comm;
  outer->stopped = true;
  onebit_status_t status = run_move(&moving);
  if (status != ONEBIT_OK) {
    struct ob_outcome outcome = {.status = ONEBIT_OK};
    ob_outcome_add(&outcome, status);
    (void)ob_outer_detach(outer); /* a rank whose move succeeded waits for the others, too */
    status = ob_outcome_status(&outcome);
  }
  if (status == ONEBIT_OK)
    ob_outer_release_held(outer);
  outer->stopped = status != ONEBIT_OK;
  finish_move(&moving);
  return status;
}

onebit_status_t onebit_outer_move(onebit_outer_t outer, onebit_comm_t comm) {
  OB_CALL_SCOPE_OF(outer, OB_HANDLE_OUTER);
  if (!outer->sites || comm)
    OB_TRY(ob_handle_check(comm, OB_HANDLE_COMM, "comm"));
  if (comm && !comm->transport->host_messages)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "comm moves messages only between GPUs, over %s, but an outer step is moved "
                    "through host memory: save it, and load it on the new communicator",
                    comm->transport->name);
  return ob_outer_rejoin(outer, comm);
}

static onebit_status_t outer_move(void *outer, onebit_comm_t comm) {
  return onebit_outer_move(outer, comm);
}

/* Shrinks to the sites that are left. If another site is lost meanwhile, the caller gets an error
 * and must shrink again. */
static onebit_status_t shrink_sites(struct onebit_outer *outer, onebit_comm_t *survivors) {
  const onebit_comm_t from = outer->latest ? outer->latest : outer->sites->between;
  const onebit_status_t status = from ? onebit_comm_shrink(from, survivors) : ONEBIT_OK;
  OB_TRY(ob_agree(outer->comm, status, NULL, 0));
  return ob_outer_rejoin(outer, *survivors);
}

/* Works like onebit_optimizer_shrink. */
onebit_status_t onebit_outer_shrink(onebit_outer_t outer, onebit_comm_t *survivors) {
  OB_CALL_SCOPE;
  if (survivors)
    *survivors = NULL;
  OB_TRY(ob_handle_check(outer, OB_HANDLE_OUTER, "outer"));
  if (!survivors)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "survivors is NULL");
  if (outer->sites)
    return shrink_sites(outer, survivors);
  onebit_comm_t from = outer->latest ? outer->latest : outer->comm;
  return ob_shrink_and_move(from, survivors, outer_move, outer);
}
