/*
 * An exchange among sites. Rank 0 of a site receives what there is, for as long as it is worth
 * waiting, and passes on to the other ranks of its site, message by message, what they all apply in
 * the same order. In the steps between it only moves what it is sending: mostly nothing.
 */
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "collectives/watch.h"
#include "optimizers/outer/sites.h"

/* How long a look at one of several messages may wait. */
#define SLICE_SECONDS 0.002

/* --- A message ---------------------------------------------------------------------------------*/

onebit_status_t ob_site_send(struct ob_batch *batch, unsigned char *data, size_t bytes, int peer,
                             int tag) {
  batch->receives = 0;
  batch->sends = 1;
  batch->send[0] = (struct ob_endpoint){data, bytes, peer};
  return ob_comm_begin(batch, tag);
}

onebit_status_t ob_site_receive(struct ob_batch *batch, unsigned char *data, size_t bytes, int peer,
                                int tag) {
  batch->sends = 0;
  batch->receives = 1;
  batch->receive[0] = (struct ob_endpoint){data, bytes, peer};
  return ob_comm_begin(batch, tag);
}

onebit_status_t ob_site_test(struct ob_batch *batch, double seconds, bool *complete) {
  onebit_status_t status = batch->comm->transport->test(batch, seconds);
  *complete = status == ONEBIT_OK;
  return status == ONEBIT_IN_PROGRESS ? ONEBIT_OK : status;
}

/* --- What rank 0 tells the other ranks of its site ---------------------------------------------*/

static onebit_status_t tell(struct ob_sites *sites, unsigned char *message, size_t bytes) {
  struct ob_batch *batch = sites->tell;
  if (sites->site->size == 1)
    return ONEBIT_OK;
  batch->receives = batch->sends = 0;
  for (int rank = 1; rank < sites->site->size; rank++)
    batch->send[batch->sends++] = (struct ob_endpoint){message, bytes, rank};
  OB_TRY(ob_comm_begin(batch, sites->command_tag));
  return ob_watch_batch(batch, "outer step: what rank 0 tells the other ranks of its site");
}

static onebit_status_t tell_end(struct ob_sites *sites, onebit_status_t status) {
  struct ob_site_header *header = (void *)sites->command;
  *header = (struct ob_site_header){.kind = OB_SITE_END, .status = status, .sites = sites->late};
  ob_site_seal(sites->command);
  return tell(sites, sites->command, sizeof *header);
}

/* On the other ranks. */
static onebit_status_t follow(struct ob_sites *sites) {
  const struct ob_site_header *header = (const void *)sites->command;
  const struct ob_batch *batch = sites->tell;
  for (;;) {
    OB_TRY(ob_site_receive(sites->tell, sites->command, sites->bytes, 0, sites->command_tag));
    OB_TRY(ob_watch_batch(sites->tell, "outer step: what rank 0 of the site says"));
    if (batch->receive[0].bytes == sizeof *header && header->kind == OB_SITE_END)
      break;
    if (batch->receive[0].bytes < sizeof *header || header->shard >= (uint32_t)sites->count)
      return ob_error(ONEBIT_ERROR_MESSAGE, "rank 0 of the site sent %zu bytes of something else",
                      batch->receive[0].bytes);
    struct ob_shard *shard = ob_shard_of(sites, (int)header->shard);
    OB_TRY(ob_site_check(sites->command, batch->receive[0].bytes, OB_SITE_PIECE, shard));
    OB_TRY(ob_shard_apply(shard, sites, sites->command));
  }
  sites->late = header->sites;
  if (header->status == ONEBIT_OK)
    return ONEBIT_OK;
  sites->outer->stopped = true;
  return ob_error(ONEBIT_ERROR_PEER, "rank 0 of the site reports %s",
                  onebit_status_string((onebit_status_t)header->status));
}

/* --- What rank 0 receives ----------------------------------------------------------------------*/

static onebit_status_t receive_result(struct ob_sites *sites, int server, double seconds) {
  struct ob_shard *shard = ob_shard_of(sites, server);
  if (shard->here)
    return ONEBIT_OK;
  OB_TRY(ob_site_test(shard->receive, seconds, &shard->here));
  if (!shard->here)
    return ONEBIT_OK;
  shard->arrived = ob_seconds();
  const size_t bytes = shard->receive->receive[0].bytes;
  if (ob_site_check(shard->result, bytes, OB_SITE_PIECE, shard) == ONEBIT_OK)
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_MESSAGE, "from site %d: %.200s", server, onebit_last_error());
}

static onebit_status_t move_sends(struct ob_sites *sites) {
  for (int s = 0; s < sites->count; s++) {
    struct ob_shard *shard = ob_shard_of(sites, s);
    bool done = true;
    if (shard->sending)
      OB_TRY(ob_site_test(shard->send, 0, &done));
    shard->sending = !done;
  }
  return ob_sites_move_sends(sites);
}

/* Nothing waits. With `all`, a site that has ended the synchronisation is not looked at any more:
 * it may be gone. */
static onebit_status_t move(struct ob_sites *sites, bool all) {
  const bool ended = all && ob_shard_of(sites, sites->own)->ended;
  OB_TRY(ob_comm_health(sites->between));
  for (int s = 0; s < sites->count; s++) {
    if (s == sites->own)
      continue;
    if (!all || !ob_shard_of(sites, s)->ended)
      OB_TRY(receive_result(sites, s, 0));
    if (!ended && !(sites->finals >> s & 1))
      OB_TRY(ob_sites_receive(sites, s, 0));
  }
  return move_sends(sites);
}

static onebit_status_t apply(struct ob_sites *sites, struct ob_shard *shard, unsigned char *message,
                             size_t bytes) {
  OB_TRY(tell(sites, message, bytes));
  OB_TRY(ob_shard_apply(shard, sites, message));
  if (shard->newest < shard->round)
    shard->newest = shard->round;
  return ONEBIT_OK;
}

/* With `all`, what follows the end of the synchronisation belongs to the time after it. */
static onebit_status_t apply_results(struct ob_sites *sites, bool all) {
  for (int s = 0; s < sites->count; s++) {
    struct ob_shard *shard = ob_shard_of(sites, s);
    const struct ob_site_header *header = (const void *)shard->result;
    if (s == sites->own || !shard->here || (all && shard->ended))
      continue;
    shard->newest = header->newest;
    OB_TRY(apply(sites, shard, shard->result, shard->receive->receive[0].bytes));
    shard->here = false;
    OB_TRY(ob_site_receive(shard->receive, shard->result, shard->bytes, s, sites->result_tag));
  }
  return ONEBIT_OK;
}

static onebit_status_t serve(struct ob_sites *sites, bool all, bool late) {
  struct ob_shard *shard = ob_shard_of(sites, sites->own);
  unsigned char *message;
  if ((all ? shard->ended : sites->closed) || !ob_sites_may_close(sites, all, late))
    return ONEBIT_OK;
  sites->closed = true;
  OB_TRY(ob_sites_close(sites, &message));
  return apply(sites, shard, message, shard->bytes);
}

/* --- How long it waits -------------------------------------------------------------------------*/

struct exchange {
  bool all;
  double start;
  struct ob_watch watch;
  uint64_t moved; /* what has been applied so far, to see that something has moved */
};

static bool is_settled(const struct ob_shard *shard) {
  return !shard->in_flight && shard->round >= shard->newest;
}

/* A server may itself wait that long for others, so it is given twice as long; and as long as
 * something comes there is more to wait for. */
static bool awaits_shard(const struct ob_sites *sites, const struct ob_shard *shard, double start,
                         double now) {
  if (is_settled(shard))
    return false;
  return (!shard->late && now < start + 2 * sites->patience) ||
         (shard->arrived >= start && now < shard->arrived + sites->patience);
}

static bool server_waits(const struct ob_sites *sites, double start, double now) {
  if (sites->closed || now >= start + sites->patience)
    return false;
  for (int s = 0; s < sites->count; s++)
    if (!sites->peers[s].here && !sites->peers[s].late && !(sites->finals >> s & 1))
      return true;
  return false;
}

/* All final drifts are in, or some shard wants this site's. */
static bool is_synchronised(const struct ob_sites *sites) {
  bool ended = true;
  for (int s = 0; s < sites->count; s++) {
    const struct ob_shard *shard = ob_shard_of(sites, s);
    if (!shard->in_flight && !shard->final)
      return true;
    ended &= shard->ended;
  }
  return ended && ob_sites_flushed(sites);
}

static bool goes_on(const struct ob_sites *sites, const struct exchange *exchange) {
  const double now = ob_seconds();
  if (exchange->all)
    return !is_synchronised(sites);
  if (server_waits(sites, exchange->start, now))
    return true;
  for (int s = 0; s < sites->count; s++)
    if (s != sites->own && awaits_shard(sites, ob_shard_of(sites, s), exchange->start, now))
      return true;
  return false;
}

static void describe(const void *waiter, struct ob_wait *wait) {
  const struct ob_sites *sites = waiter;
  snprintf(wait->what, sizeof wait->what, "outer step: synchronisation of %d sites", sites->count);
  for (int s = sites->count - 1; s >= 0; s--)
    if (s != sites->own && !ob_shard_of(sites, s)->ended)
      wait->peer = s;
}

/* A moment for the first message that is wanted, or in a synchronisation for one that has to go. */
static onebit_status_t wait_a_moment(struct ob_sites *sites, bool all) {
  const bool ended = all && ob_shard_of(sites, sites->own)->ended;
  for (int s = 0; s < sites->count; s++) {
    const struct ob_shard *shard = ob_shard_of(sites, s);
    const struct ob_site_peer *peer = &sites->peers[s];
    bool complete;
    if (s == sites->own)
      continue;
    if (!shard->here && !(all ? shard->ended : is_settled(shard)))
      return receive_result(sites, s, SLICE_SECONDS);
    if (!ended && !peer->here && !peer->late && !(sites->finals >> s & 1))
      return ob_sites_receive(sites, s, SLICE_SECONDS);
    if (all && peer->sending)
      return ob_site_test(peer->send, SLICE_SECONDS, &complete);
  }
  return ONEBIT_OK;
}

/* What was waited for in vain is not waited for again. */
static void note_late(struct ob_sites *sites) {
  sites->late = 0;
  for (int s = 0; s < sites->count; s++) {
    struct ob_shard *shard = ob_shard_of(sites, s);
    struct ob_site_peer *peer = &sites->peers[s];
    if (s == sites->own)
      continue;
    shard->late = !is_settled(shard);
    if (!sites->closed && !peer->here && !(sites->finals >> s & 1))
      peer->late = true;
    sites->late |= (uint64_t)(shard->late || peer->late) << s;
  }
}

static onebit_status_t look(struct ob_sites *sites, struct exchange *exchange) {
  uint64_t moved = 0;
  for (int s = 0; s < sites->count; s++)
    moved += ob_shard_of(sites, s)->round;
  if (moved != exchange->moved)
    exchange->watch = (struct ob_watch){0};
  exchange->moved = moved;
  return exchange->all ? ob_watch_look(&exchange->watch, sites->between, 0, describe, sites)
                       : ONEBIT_OK;
}

static onebit_status_t lead(struct ob_sites *sites, bool all) {
  struct exchange exchange = {.all = all, .start = ob_seconds()};
  sites->closed = false;
  for (;;) {
    OB_TRY(move(sites, all));
    OB_TRY(serve(sites, all, ob_seconds() >= exchange.start + sites->patience));
    OB_TRY(apply_results(sites, all));
    if (!goes_on(sites, &exchange))
      break;
    OB_TRY(wait_a_moment(sites, all));
    OB_TRY(look(sites, &exchange));
  }
  OB_TRY(move(sites, all)); /* what has just been closed goes out */
  if (!all)
    note_late(sites);
  return ONEBIT_OK;
}

/* --- An exchange -------------------------------------------------------------------------------*/

/* After this some rank may lack what others have: nothing can follow. */
static onebit_status_t give_up(struct ob_sites *sites, onebit_comm_t comm, onebit_status_t status) {
  char text[256];
  snprintf(text, sizeof text, "%s", onebit_last_error());
  sites->outer->stopped = true;
  ob_comm_give_up(comm, text);
  return ob_error(status, "%s", text);
}

/* What fails between sites leaves a site's ranks together. */
static onebit_status_t exchange(struct ob_sites *sites, onebit_status_t status, bool all) {
  if (!sites->between) {
    status = follow(sites);
    return status == ONEBIT_OK || sites->outer->stopped ? status
                                                        : give_up(sites, sites->site, status);
  }
  if (status == ONEBIT_OK)
    status = lead(sites, all);
  if (status != ONEBIT_OK)
    status = give_up(sites, sites->between, status);
  if (sites->site->size == 1)
    return status;
  char text[256];
  snprintf(text, sizeof text, "%s", status == ONEBIT_OK ? "" : onebit_last_error());
  const onebit_status_t told = tell_end(sites, status);
  if (told != ONEBIT_OK)
    return give_up(sites, sites->site, told);
  return status == ONEBIT_OK ? status : ob_error(status, "%s", text);
}

static onebit_status_t send_drift(struct ob_shard *shard, struct ob_sites *sites) {
  const int server = (int)shard->fragment->number;
  if (!sites->between)
    return ONEBIT_OK;
  if (server != sites->own) {
    shard->sending = true;
    return ob_site_send(shard->send, shard->drift, shard->bytes, server, sites->drift_tag);
  }
  memcpy(sites->peers[server].drift, shard->drift, shard->bytes);
  sites->peers[server].here = true;
  sites->peers[server].number++;
  return ONEBIT_OK;
}

/* The drift of each shard whose last one is in a round. One that is not finite is none: this site
 * goes back to the consensus. */
static onebit_status_t begin(struct ob_sites *sites, unsigned flags, bool *skipped) {
  for (int s = 0; s < sites->count; s++) {
    struct ob_shard *shard = ob_shard_of(sites, s);
    struct ob_fragment *fragment = shard->fragment;
    if (shard->in_flight || shard->final)
      continue;
    shard->in_flight = true;
    shard->final = flags & OB_SITE_FINAL;
    shard->number++;
    shard->sent_steps = sites->outer->steps - shard->sent_at;
    shard->sent_at = sites->outer->steps;
    fragment->sent_weight = fragment->weight;
    fragment->weight = 0;
    *skipped |= !ob_shard_compress(shard, sites, flags);
    OB_TRY(send_drift(shard, sites));
  }
  return ONEBIT_OK;
}

static onebit_status_t run(struct ob_sites *sites, unsigned flags, bool *skipped) {
  const onebit_status_t status = begin(sites, flags, skipped);
  return exchange(sites, status, flags & OB_SITE_FINAL);
}

static onebit_status_t verdict(struct ob_sites *sites, bool skipped) {
  sites->outer->skipped += skipped;
  if (!skipped)
    return ONEBIT_OK;
  return ob_error(ONEBIT_SKIPPED, "the drift of this site is not finite: it has gone back to the "
                                  "consensus");
}

onebit_status_t ob_sites_step(struct ob_sites *sites) {
  struct onebit_outer *outer = sites->outer;
  bool skipped = false;
  if (outer->position == outer->options.local_steps) {
    OB_TRY(run(sites, 0, &skipped));
    return verdict(sites, skipped);
  }
  onebit_status_t status = sites->between ? move_sends(sites) : ONEBIT_OK;
  return status == ONEBIT_OK ? status : give_up(sites, sites->between, status);
}

static bool all_ended(const struct ob_sites *sites) {
  for (int s = 0; s < sites->count; s++)
    if (!ob_shard_of(sites, s)->ended)
      return false;
  return true;
}

onebit_status_t ob_sites_synchronize(struct ob_sites *sites) {
  bool skipped = false;
  while (!all_ended(sites))
    OB_TRY(run(sites, OB_SITE_FINAL, &skipped));
  for (int s = 0; s < sites->count; s++) {
    struct ob_shard *shard = ob_shard_of(sites, s);
    shard->final = shard->ended = shard->late = false;
    shard->fragment->keeps = false;
    ob_fragment_set(shard->fragment, 1);
  }
  for (int s = 0; sites->between && s < sites->count; s++)
    sites->peers[s].late = false;
  sites->late = 0;
  return verdict(sites, skipped);
}
