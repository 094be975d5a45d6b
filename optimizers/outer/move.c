/*
 * An outer step on another communicator: after a rank was lost, or with ranks that have come.
 *
 *   detach      what is in flight is applied if it is here, else it counts in the next exchange;
 *               residuals are exported, and what was made on the old communicator is given back
 *   agree       the outer steps are of one kind; who has made most exchanges is the source
 *   align       who differs gets consensus and outer momentum of the source, fragment by fragment
 *   attach      fragments are made on the new communicator, residuals imported
 *
 * Between detach and attach the outer step is detached: what fails leaves it so, and the next call
 * goes on from there. Between ranks that have the same nothing but checksums travels.
 *
 * Among sites the same, between their rank 0s; and then in each site, whose other ranks follow its
 * rank 0.
 */
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/handles.h"
#include "base/memory.h"
#include "collectives/agree.h"
#include "collectives/watch.h"
#include "optimizers/outer/sites.h"
#include "optimizers/outer/state.h"

enum { WORKER, SERVER, MESSAGE = 1 << 20 }; /* MESSAGE: floats at a time */

struct moving {
  struct onebit_outer *outer;
  onebit_comm_t comm;
  struct ob_batch *batch;
  float *message;  /* MESSAGE of them */
  uint64_t *noted; /* of each rank, in the latest agreement */
  int source, holders;
  bool holder;
};

/* --- Detached ----------------------------------------------------------------------------------*/

static onebit_status_t no_memory(void) {
  return ob_error(ONEBIT_ERROR_MEMORY, "no memory to move an outer step");
}

static onebit_status_t hold(struct ob_fragment *fragment) {
  for (int k = 0; k < 2; k++)
    if (!fragment->held[k])
      fragment->held[k] = ob_allocate(fragment->count, sizeof(float));
  if (!fragment->held[WORKER] || !fragment->held[SERVER])
    return no_memory();
  OB_TRY(ob_outer_export_residual(fragment, OB_SAVED_WORKER, fragment->held[WORKER]));
  return ob_outer_export_residual(fragment, OB_SAVED_SERVER, fragment->held[SERVER]);
}

static void release_held(struct ob_fragment *fragment) {
  for (int k = 0; k < 2; k++) {
    ob_release(fragment->held[k]);
    fragment->held[k] = NULL;
  }
}

static void destroy_exchange(struct ob_fragment *fragment) {
  if (fragment->state)
    fragment->outer->exchange->destroy(fragment);
  onebit_plan_destroy(fragment->weigh);
  fragment->weigh = NULL;
}

/* Without memory nothing is given back, and the next call begins here again. */
onebit_status_t ob_outer_detach(struct onebit_outer *outer) {
  const size_t parts = outer->options.fragments;
  for (size_t f = 0; f < parts; f++)
    ob_fragment_abandon(&outer->fragments[f]);
  outer->refused = false;
  for (size_t f = 0; !outer->detached && f < parts; f++)
    OB_TRY(hold(&outer->fragments[f]));
  outer->detached = true;
  for (size_t f = 0; f < parts; f++)
    destroy_exchange(&outer->fragments[f]);
  if (outer->sites)
    ob_sites_detach(outer);
  return ONEBIT_OK;
}

/* --- Who has what ------------------------------------------------------------------------------*/

/* Collective: everyone's number. */
static onebit_status_t learn(struct moving *moving, onebit_status_t status, uint64_t number) {
  OB_TRY(ob_agree_noting(moving->comm, status, NULL, 0, number));
  for (int rank = 0; rank < moving->comm->size; rank++)
    moving->noted[rank] = ob_agree_note(moving->comm, rank);
  return ONEBIT_OK;
}

/* A rank of the same run is behind by no more than the fragments whose exchange was cut short. */
static void choose_source(struct moving *moving) {
  const uint64_t slack = moving->outer->options.fragments;
  uint64_t max = 0;
  for (int rank = 0; rank < moving->comm->size; rank++)
    if (moving->noted[rank] > max) {
      max = moving->noted[rank];
      moving->source = rank;
    }
  for (int rank = 0; rank < moving->comm->size; rank++) {
    const uint64_t made = moving->noted[rank];
    const bool holder = made + slack >= max && (made > 0 || max == 0);
    moving->holders += holder;
    if (rank == moving->comm->rank)
      moving->holder = holder;
  }
}

/* --- The source's ------------------------------------------------------------------------------*/

static onebit_status_t exchange(struct moving *moving) {
  struct ob_batch *batch = moving->batch;
  if (batch->sends + batch->receives == 0)
    return ONEBIT_OK;
  OB_TRY(ob_comm_check(moving->comm));
  OB_TRY(ob_comm_begin(batch, ob_comm_tag(moving->comm)));
  OB_TRY(ob_watch_batch(batch, "onebit_outer_move"));
  batch->sends = batch->receives = 0;
  return ONEBIT_OK;
}

/* From the source to all whose number differs from its own. */
static onebit_status_t pass_on(struct moving *moving, float *values, size_t count) {
  const int me = moving->comm->rank, source = moving->source;
  const bool behind = moving->noted[me] != moving->noted[source];
  for (size_t some; count; values += some, count -= some) {
    struct ob_batch *batch = moving->batch;
    some = count < MESSAGE ? count : MESSAGE;
    const size_t bytes = some * sizeof *values;
    memcpy(moving->message, values, bytes);
    for (int rank = 0; rank < moving->comm->size; rank++) {
      if (moving->noted[rank] == moving->noted[source])
        continue;
      if (me == source)
        batch->send[batch->sends++] = (struct ob_endpoint){moving->message, bytes, rank};
      if (me == rank)
        batch->receive[batch->receives++] = (struct ob_endpoint){moving->message, bytes, source};
    }
    OB_TRY(exchange(moving));
    if (behind)
      memcpy(values, moving->message, bytes);
  }
  return ONEBIT_OK;
}

static uint64_t fingerprint(const struct ob_fragment *fragment) {
  const struct ob_codec *codec = fragment->outer->codec;
  const uint64_t x = ob_fragment_checksum(fragment);
  return fragment->momentum ? x << 32 | codec->checksum(fragment->momentum, fragment->count) : x;
}

/* A rank that was behind begins at the consensus: what it has done since was in the exchange that
 * it did not see the end of. */
static onebit_status_t align_fragment(struct moving *moving, struct ob_fragment *fragment) {
  OB_TRY(learn(moving, ONEBIT_OK, fingerprint(fragment)));
  const uint64_t wanted = moving->noted[moving->source];
  const bool behind = moving->noted[moving->comm->rank] != wanted;
  onebit_status_t status = pass_on(moving, fragment->consensus, fragment->count);
  if (status == ONEBIT_OK && fragment->momentum)
    status = pass_on(moving, fragment->momentum, fragment->count);
  if (status != ONEBIT_OK) {
    ob_comm_give_up(moving->comm, onebit_last_error());
    return status;
  }
  if (fingerprint(fragment) != wanted)
    status = ob_error(ONEBIT_ERROR_MESSAGE, "from rank %d: fragment %zu is not what it has",
                      moving->source, fragment->number);
  if (!behind || status != ONEBIT_OK)
    return ob_agree(moving->comm, status, NULL, 0);
  fragment->keeps = false;
  fragment->stage = OB_FRAGMENT_IDLE;
  ob_fragment_set(fragment, 1);
  fragment->weight = 0;
  for (int k = 0; k < 2; k++)
    memset(fragment->held[k], 0, fragment->count * sizeof(float));
  return ob_agree(moving->comm, ONEBIT_OK, NULL, 0);
}

static size_t next_fragment(const struct onebit_outer *outer) {
  size_t next = 0;
  while (outer->fragments[next].begin_step <= outer->position % outer->options.local_steps)
    next++;
  return next;
}

/* Counts, and which fragment is next. */
static onebit_status_t align_counts(struct moving *moving) {
  struct onebit_outer *outer = moving->outer;
  uint64_t *counts[] = {&outer->started, &outer->exchanges, &outer->skipped, &outer->steps};
  OB_TRY(learn(moving, ONEBIT_OK, next_fragment(outer)));
  const size_t next = (size_t)moving->noted[moving->source];
  OB_TRY(learn(moving, ONEBIT_OK, outer->options.local_steps));
  const size_t round = (size_t)moving->noted[moving->source];
  OB_TRY(learn(moving, ONEBIT_OK, outer->position % outer->options.local_steps));
  const size_t position = (size_t)moving->noted[moving->source];
  if (!outer->options.weighted || !moving->holder || next_fragment(outer) != next)
    outer->position = ob_outer_position(outer, position, round);
  for (size_t k = 0; k < 4; k++) {
    OB_TRY(learn(moving, ONEBIT_OK, *counts[k]));
    if (counts[k] != &outer->steps || !outer->options.weighted || !moving->holder)
      *counts[k] = moving->noted[moving->source];
  }
  return ONEBIT_OK;
}

static onebit_status_t align(struct moving *moving) {
  struct onebit_outer *outer = moving->outer;
  const size_t others = (size_t)moving->comm->size - 1;
  moving->noted = ob_allocate(others + 1, sizeof *moving->noted);
  moving->message = ob_allocate(outer->count < MESSAGE ? outer->count : MESSAGE, sizeof(float));
  onebit_status_t status = moving->noted && moving->message ? ONEBIT_OK : no_memory();
  if (status == ONEBIT_OK)
    status = moving->comm->transport->batch_create(moving->comm, others, &moving->batch);
  if (status == ONEBIT_OK)
    status = ob_outer_to_host(outer);
  OB_TRY(learn(moving, status, outer->exchanges));
  choose_source(moving);
  for (size_t f = 0; f < outer->options.fragments; f++)
    OB_TRY(align_fragment(moving, &outer->fragments[f]));
  return align_counts(moving);
}

/* --- Attached ----------------------------------------------------------------------------------*/

/* Takes the elements of the runs out of an array, into another one run after run. */
static void extract_runs(float *from, const struct ob_outer_run *runs, size_t count, float *to) {
  for (size_t k = 0; k < count; to += runs[k].count, k++) {
    memcpy(to, from + runs[k].at, runs[k].count * sizeof *to);
    memset(from + runs[k].at, 0, runs[k].count * sizeof *from);
  }
}

/* What a rank held back as a server of elements that it no longer serves becomes part of what it
 * sends, times the ranks, since it was held back of their mean. Where ranks have come who hold
 * nothing back, the others' counts for more: so the mean stays. In the place of the server's is
 * then by how much what it sends has grown. */
static void join_held(const struct moving *moving, struct ob_fragment *fragment) {
  const float ranks = (float)moving->comm->size;
  const float factor = ranks / (float)moving->holders;
  float *worker = fragment->held[WORKER], *server = fragment->held[SERVER];
  for (size_t i = 0; i < fragment->count; i++)
    if (factor != 1 || server[i] != 0) { /* else it stays, to the sign of a zero */
      const float joined = factor * worker[i] + ranks * server[i];
      server[i] = joined - worker[i];
      worker[i] = joined;
    }
}

/* The drift is scratch: nothing is in flight. */
static onebit_status_t import_held(const struct moving *moving, struct ob_fragment *fragment) {
  const struct ob_outer_exchange *exchange = fragment->outer->exchange;
  struct ob_outer_run *runs = fragment->outer->runs;
  size_t count = exchange->runs(fragment, OB_SAVED_SERVER, runs);
  if (count) {
    extract_runs(fragment->held[SERVER], runs, count, fragment->drift);
    OB_TRY(exchange->import_residual(fragment, OB_SAVED_SERVER, fragment->drift));
  }
  join_held(moving, fragment);
  count = exchange->runs(fragment, OB_SAVED_WORKER, runs);
  if (count) {
    extract_runs(fragment->held[WORKER], runs, count, fragment->drift);
    OB_TRY(exchange->import_residual(fragment, OB_SAVED_WORKER, fragment->drift));
  }
  if (fragment->keeps)
    OB_TRY(ob_outer_export_residual(fragment, OB_SAVED_WORKER, fragment->drift));
  return ONEBIT_OK;
}

/* Parameters that were set to the consensus less the residual follow it, or the next drift would be
 * less by what it has grown. */
static void follow_growth(struct ob_fragment *fragment) {
  if (fragment->keeps)
    ob_fragment_shift(fragment, fragment->held[SERVER]);
  memset(fragment->held[SERVER], 0, fragment->count * sizeof(float));
}

/* What rank 0 of the site has come to. */
static onebit_status_t copy_rank_0(struct moving *inside, struct ob_fragment *fragment) {
  float *const arrays[] = {fragment->drift, fragment->held[SERVER]};
  const struct ob_codec *codec = fragment->outer->codec;
  for (int k = 0; k < 2; k++) {
    OB_TRY(learn(inside, ONEBIT_OK, codec->checksum(arrays[k], fragment->count)));
    OB_TRY(pass_on(inside, arrays[k], fragment->count));
  }
  return ONEBIT_OK;
}

/* `inside`: the site, where there are sites; then the moving's communicator is NULL but on rank 0
 * of it. */
static onebit_status_t import_all(const struct moving *moving, struct moving *inside) {
  struct onebit_outer *outer = moving->outer;
  for (size_t f = 0; f < outer->options.fragments; f++) {
    struct ob_fragment *fragment = &outer->fragments[f];
    if (moving->comm)
      OB_TRY(import_held(moving, fragment));
    if (inside)
      OB_TRY(copy_rank_0(inside, fragment));
    follow_growth(fragment);
  }
  return ONEBIT_OK;
}

/* On the device that it was made on, whichever is current now. */
static onebit_status_t build(struct onebit_outer *outer) {
  const struct ob_outer_executor *executor = outer->executor;
  const int before = executor->enter ? executor->enter(outer) : 0;
  const onebit_status_t status = ob_outer_build(outer);
  if (executor->leave)
    executor->leave(before);
  return status;
}

static onebit_status_t attach(struct moving *moving) {
  struct onebit_outer *outer = moving->outer;
  onebit_comm_t before = outer->comm;
  outer->comm = ob_comm_keep(moving->comm);
  ob_comm_drop(before);
  OB_TRY(build(outer));
  onebit_status_t status = ob_outer_to_host(outer);
  if (status == ONEBIT_OK)
    status = import_all(moving, NULL);
  const onebit_status_t sent = ob_outer_from_host(outer, status == ONEBIT_OK);
  status = status == ONEBIT_OK ? sent : status;
  outer->detached = status != ONEBIT_OK;
  return ob_agree(outer->comm, status, NULL, 0);
}

/* Groups of which some site had sent drifts that were in no round that it applied: they are sent
 * again, by all, since a server waits for all. */
static onebit_status_t resume(struct moving *moving, struct moving *inside) {
  struct onebit_outer *outer = moving->outer;
  bool skipped = false;
  for (size_t g = 0; g < outer->groups; g++) {
    struct ob_site_group *group = &outer->sites->groups[g];
    uint64_t sent = 0;
    for (int s = 0; s < outer->sites->count; s++)
      sent |= ob_shard_of(group, s)->fragment->stage == OB_FRAGMENT_SENDING;
    if (moving->comm) {
      OB_TRY(learn(moving, ONEBIT_OK, sent));
      for (int s = 0; s < outer->sites->count; s++)
        sent |= moving->noted[s];
    }
    OB_TRY(learn(inside, ONEBIT_OK, sent));
    if (inside->noted[0])
      ob_sites_begin(group, 0, &skipped);
  }
  outer->skipped += skipped;
  return ONEBIT_OK;
}

static onebit_status_t attach_site(struct moving *moving, struct moving *inside) {
  struct onebit_outer *outer = moving->outer;
  onebit_status_t status = moving->comm ? align(moving) : ONEBIT_OK;
  status = ob_agree(outer->comm, status, NULL, 0);
  if (status == ONEBIT_OK)
    status = align(inside);
  OB_TRY(ob_sites_agree(outer->comm, moving->comm, status, NULL, 0));
  OB_TRY(ob_outer_build(outer));
  status = import_all(moving, inside);
  outer->detached = status != ONEBIT_OK;
  OB_TRY(ob_sites_agree(outer->comm, moving->comm, status, NULL, 0));
  return resume(moving, inside);
}

static void close(struct moving *moving) {
  if (moving->batch && !moving->comm->transport->batch_destroy(moving->batch))
    ob_memory_keep(moving->message);
  else
    ob_release(moving->message);
  ob_release(moving->noted);
}

static onebit_status_t run(struct moving *moving) {
  struct onebit_outer *outer = moving->outer;
  onebit_status_t status = ob_outer_detach(outer);
  if (outer->sites)
    status = ob_sites_regroup(outer, moving->comm, status);
  OB_TRY(ob_outer_agree(outer, moving->comm, status));
  if (outer->sites) {
    struct moving inside = {.outer = outer, .comm = outer->comm};
    status = attach_site(moving, &inside);
    close(&inside);
    return status;
  }
  status = align(moving);
  const onebit_status_t sent = ob_outer_from_host(outer, true);
  OB_TRY(status);
  OB_TRY(ob_agree(moving->comm, sent, NULL, 0));
  return attach(moving);
}

onebit_status_t ob_outer_rejoin(struct onebit_outer *outer, onebit_comm_t comm) {
  struct moving moving = {.outer = outer, .comm = comm ? ob_comm_keep(comm) : NULL};
  if (outer->latest)
    ob_comm_drop(outer->latest);
  outer->latest = comm;
  outer->stopped = true;
  onebit_status_t status = run(&moving);
  if (status != ONEBIT_OK) {
    char error[256];
    snprintf(error, sizeof error, "%s", onebit_last_error());
    (void)ob_outer_detach(outer); /* a rank that has come through waits for the others, too */
    status = ob_error(status, "%s", error);
  }
  for (size_t f = 0; status == ONEBIT_OK && f < outer->options.fragments; f++)
    release_held(&outer->fragments[f]);
  outer->stopped = status != ONEBIT_OK;
  close(&moving);
  return status;
}

onebit_status_t onebit_outer_move(onebit_outer_t outer, onebit_comm_t comm) {
  OB_TRY(ob_handle_check(outer, OB_HANDLE_OUTER, "outer"));
  if (!outer->sites || comm)
    OB_TRY(ob_handle_check(comm, OB_HANDLE_COMM, "comm"));
  if (comm && !comm->transport->host_messages)
    return ob_error(ONEBIT_ERROR_UNSUPPORTED,
                    "comm moves messages between GPUs only, over %s, and an outer step is moved "
                    "through memory of the host: save it, and load it on the new communicator",
                    comm->transport->name);
  return ob_outer_rejoin(outer, comm);
}

static onebit_status_t move(void *outer, onebit_comm_t comm) {
  return onebit_outer_move(outer, comm);
}

/* Where another site is lost meanwhile the caller sees it, and calls this again. */
static onebit_status_t shrink_sites(struct onebit_outer *outer, onebit_comm_t *survivors) {
  const onebit_comm_t from = outer->latest ? outer->latest : outer->sites->between;
  const onebit_status_t status = from ? onebit_comm_shrink(from, survivors) : ONEBIT_OK;
  OB_TRY(ob_agree(outer->comm, status, NULL, 0));
  return ob_outer_rejoin(outer, *survivors);
}

/* As onebit_optimizer_shrink. */
onebit_status_t onebit_outer_shrink(onebit_outer_t outer, onebit_comm_t *survivors) {
  if (survivors)
    *survivors = NULL;
  OB_TRY(ob_handle_check(outer, OB_HANDLE_OUTER, "outer"));
  if (!survivors)
    return ob_error(ONEBIT_ERROR_ARGUMENT, "survivors is NULL");
  if (outer->sites)
    return shrink_sites(outer, survivors);
  onebit_comm_t from = outer->latest ? outer->latest : outer->comm;
  return ob_shrink_and_move(from, survivors, move, outer);
}

onebit_status_t ob_outer_check_attached(const struct onebit_outer *outer) {
  if (outer->stopped)
    return ob_error(ONEBIT_ERROR_TRANSPORT,
                    "the outer step has stopped, since an exchange of its sites or a move has "
                    "failed: call onebit_outer_move");
  return ONEBIT_OK;
}
