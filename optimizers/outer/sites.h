/*
 * The outer step among sites (onebit/outer.h, onebit_outer_create_sites), inside:
 *
 *   sites.c           made, asked, and ended
 *   sites_message.c   a shard, and what a message of it has
 *   sites_round.c     the arithmetic of drifts and rounds
 *   sites_serve.c     when drifts are sent and rounds applied; the shards that this site serves:
 *                     their rounds, and what others get of them
 *   sites_wait.c      what rank 0 of a site waits for, and what its ranks apply
 *
 * Each of the caller's fragments is cut into as many shards as there are sites; they are a group,
 * which is exchanged together. Shard s of a group is served by site s, which alone decides which
 * drifts are in a round of it, and numbers its rounds: so sites need not agree on who takes part,
 * and the consensus of a shard is the same wherever as many rounds of it were applied. A site has
 * at most one drift of a shard under way, and it counts in the first round that its server closes
 * with it there, however late that is. What a server sends to a site arrives in order: rounds, each
 * of which the site applies, or where it is behind by more of them than the server has kept, the
 * consensus as it is, in pieces.
 *
 * With a delay a server closes a round in any step in which all drifts are there; but every site,
 * the server too, applies it in the step in which the delay is over, where sites wait for each
 * other as long as it is worth it. Until then the drift that was sent is fragment->drift, and the
 * server's residual is that of before the round: so it can be sent again, to the bit, after a
 * checkpoint or a move.
 */
#ifndef OB_OPTIMIZERS_OUTER_SITES_H
#define OB_OPTIMIZERS_OUTER_SITES_H

#include "collectives/communicator.h"
#include "optimizers/outer/outer.h"

#define OB_SITES_MAX 64 /* a bit of ob_site_header.included each */

enum ob_site_kind { OB_SITE_DRIFT = 1, OB_SITE_ROUND, OB_SITE_PIECE, OB_SITE_END };

enum ob_site_flag {
  OB_SITE_EMPTY = 1, /* a drift or a round without values: nothing is added */
  OB_SITE_FINAL = 2, /* a drift: the site's last one before onebit_outer_synchronize returns */
  OB_SITE_ENDED = 4, /* a round: with it all sites' final drifts are in */
  OB_SITE_LAST = 8   /* a piece */
};

/* The header of every message, followed by the messages of the parts or a piece's values. */
struct ob_site_header {
  uint32_t magic;
  uint16_t kind, flags;
  uint32_t shard;
  int32_t status;  /* an end: how it went on rank 0 of the site */
  uint64_t number; /* a drift: of those to this shard, from 1 on; else the round */
  uint64_t newest; /* the server's latest round; a drift: its weight, a double */
  uint64_t sites;  /* a round or piece: whose drifts are in it, a bit each; an end: who is late */
  /* A piece: its first value; the consensus comes first, then momentum. A drift: of how many rounds
   * it is, in steps, times 65536; a round: the mean of these. */
  uint64_t first;
  uint32_t count;     /* and how many */
  uint32_t consensus; /* checksum of the consensus, before a round or after the last piece */
  uint64_t check;     /* hash of the header, and of a piece's values */
};

/* Elements of a shard that are compressed alike. */
struct ob_site_part {
  bool dense;
  size_t pieces, *counts, at; /* at: where its message begins in one of the shard */
  float **aheads, **means;    /* in sites->ahead, and in sites->mean */
  struct ob_layout layout;
  struct ob_message_shape shape;
  struct ob_work work;
  struct ob_residual server; /* on rank 0 of the site that serves the shard */
};

enum { OB_SITE_COMPRESSED, OB_SITE_DENSE, OB_SITE_PARTS };

/* fragment->state. What is received, and sent but for the drift, is on rank 0 of a site only.
 *
 * What a site has not got into the consensus stays in its parameters: fragment->drift is that of
 * when they were set, p = x - drift, and local steps add to it. A drift is all of it, compressed;
 * when a round has it, what the message says is taken off. So there is no residual of what is sent,
 * and a drift that gets lost is in the next one. */
struct ob_shard {
  struct ob_fragment *fragment;
  struct ob_site_group *group;
  struct ob_site_part part[OB_SITE_PARTS];
  size_t bytes;           /* of a message, at most */
  bool in_flight;         /* a drift was sent, and no round yet has it */
  bool final, ended;      /* onebit_outer_synchronize: it was the last one; all sites' are in */
  bool torn;              /* some pieces of a consensus have arrived, but not all */
  uint64_t number, round; /* of the latest drift; rounds that were applied */
  uint64_t sent_at;       /* the local step after which the latest drift was sent */
  uint64_t sent_steps;    /* the number of local steps in that drift */

  unsigned char *drift, *result; /* sent (on all ranks); received */
  struct ob_batch *send, *receive;
  bool sending, here; /* result is */
  uint64_t newest;    /* rounds that the server has closed, as far as is known */
  double arrived;     /* when something last came */
};

/* Another site, to the server of a shard; or itself. */
struct ob_site_peer {
  unsigned char *drift, *out;
  struct ob_batch *receive, *send;
  bool here, sending;
  uint64_t number;      /* of its latest drift */
  uint64_t included_in; /* the round that its latest drift is in */
  uint64_t sent;        /* rounds that it was sent */
  size_t sent_values;   /* of the snapshot */
};

/* The shards of one of the caller's fragments. But for the first three on rank 0 of a site. */
struct ob_site_group {
  struct ob_sites *sites;
  size_t first;   /* the number of its first shard */
  bool in_flight; /* drifts were sent, and the step that applies rounds of them is still to come */

  /* The shard that this site serves. */
  int drift_tag, result_tag;
  struct ob_site_peer *peers;
  unsigned char *history; /* messages of the latest sites->depth rounds */
  uint64_t round, finals; /* finals: sites whose final drift is in */
  uint64_t ended_in;      /* the latest round that ended a synchronisation */
  bool closed;            /* a round was closed since drifts were last sent */
  float *snapshot;        /* consensus, momentum */
  uint64_t snapshot_round;
  uint32_t snapshot_sum;
  int snapshot_of;      /* the site that is being sent the snapshot; -1: none */
  unsigned char *zeros; /* a drift of nothing */
};

struct ob_sites {
  struct onebit_outer *outer;
  onebit_comm_t site, between; /* between: NULL but on rank 0 of a site */
  int count, own;              /* sites, and which is this one */
  int asked, quorum;           /* asked: 0, by default */
  double patience;
  uint64_t built_bytes;
  struct ob_site_group *groups; /* an entry for each of outer->groups */
  size_t depth;                 /* rounds that a server keeps */
  size_t bytes;                 /* of the longest message */
  float *mean, *ahead;          /* scratch of the longest shard */
  struct ob_residual none;
  struct ob_view *views; /* scratch: one for each site */
  /* Sites that were waited for in vain, a bit each: for rounds, until something has come from one
   * and it is up to date, and for drifts, until one comes. On rank 0; `late`: both, the same on all
   * ranks. */
  uint64_t late_rounds, late_drifts, late;
  double late_since;  /* when the latest was added to late_rounds */
  uint64_t left_out;  /* rounds of the own shards without some site */
  uint64_t caught_up; /* snapshots that were applied */
  /* The failure of a step in which the ranks of the site exchange nothing: their next exchange
   * reports it. */
  struct ob_outcome failed;

  /* To the other ranks of the site; there, from rank 0. */
  int command_tag;
  unsigned char *command;
  struct ob_batch *tell;
};

_Static_assert(sizeof(struct ob_site_header) == 64, "docs/wire-format.md");

/* --- sites.c */

extern const struct ob_outer_exchange ob_outer_sites;

/* Collective over the site: outer->sites, with which site this is and how many there are. `outer`
 * may be NULL where `status` is not ONEBIT_OK. */
onebit_status_t ob_sites_find(struct onebit_outer *outer, onebit_comm_t site, onebit_comm_t between,
                              onebit_status_t status);
/* Checks, and fills in the defaults, after ob_outer_resolve. */
onebit_status_t ob_sites_resolve(struct onebit_outer *outer, const onebit_sites_options_t *given);
/* ob_agree over all ranks of all sites. */
onebit_status_t ob_sites_agree(onebit_comm_t site, onebit_comm_t between, onebit_status_t status,
                               const struct ob_term *terms, size_t count);
/* Creates the state of exchanges between sites. Collective over all sites. */
onebit_status_t ob_sites_build(struct onebit_outer *outer);
/* Undoes that, after the exchange's `destroy` of each fragment. */
void ob_sites_detach(struct onebit_outer *outer);
/* Sets the sites that the outer step is among from now on, while it is detached. Collective over
 * the site. */
onebit_status_t ob_sites_regroup(struct onebit_outer *outer, onebit_comm_t between,
                                 onebit_status_t status);
void ob_sites_destroy(struct onebit_outer *outer);

static inline struct ob_shard *ob_shard_of(const struct ob_site_group *group, int site) {
  return group->sites->outer->fragments[group->first + (size_t)site].state;
}

/* The site that serves it. */
static inline int ob_shard_server(const struct ob_shard *shard) {
  return (int)(shard->fragment->number - shard->group->first);
}

static inline bool ob_shard_is_own(const struct ob_shard *shard) {
  return ob_shard_server(shard) == shard->group->sites->own;
}

/* --- sites_message.c */

/* Layout, message and residuals of a shard. Local. */
onebit_status_t ob_shard_create(struct ob_shard *shard, struct ob_sites *sites);
void ob_shard_destroy(struct ob_shard *shard);

/* Fills in magic and check. */
void ob_site_seal(unsigned char *message);
/* Fails unless `bytes` bytes are a message with a sound header, of that kind, about that shard.
 * OB_SITE_PIECE allows a round too. */
onebit_status_t ob_site_check(const unsigned char *message, size_t bytes, enum ob_site_kind kind,
                              const struct ob_shard *shard);

/* Fails unless the parts of a drift or a round are sound. */
onebit_status_t ob_shard_check_parts(struct ob_shard *shard, const unsigned char *message);
void ob_shard_seal_part(const struct ob_site_part *part, unsigned char *message);

/* --- sites_round.c */

/* Writes the difference from the consensus to shard->drift, with these flags; or, if the fragment
 * is OB_FRAGMENT_SENDING, repeats the last message. False: it is not finite, and the site has gone
 * back to the consensus. */
bool ob_shard_compress(struct ob_shard *shard, struct ob_sites *sites, unsigned flags);
double ob_site_weight(const struct ob_site_peer *peer); /* of its latest drift */
/* Writes the mean of the received drifts to `message`, which has the next round's header. False:
 * there is none. */
bool ob_shard_reduce(struct ob_shard *shard, struct ob_site_group *group, unsigned char *message);
/* Applies a round, or a piece, to consensus and parameters; on the server its residual. */
onebit_status_t ob_shard_apply(struct ob_shard *shard, struct ob_sites *sites,
                               const unsigned char *message);

/* --- sites_serve.c */

/* Sends what is due of rounds and snapshots. Nothing waits. */
onebit_status_t ob_sites_move_sends(struct ob_site_group *group);
/* may_close: true if a round may be closed now: all expected drifts are here; or with `late`,
 * enough. */
bool ob_sites_may_close(const struct ob_site_group *group, bool all, bool late);
onebit_status_t ob_sites_close(struct ob_site_group *group);
/* The round that was closed and is not applied yet, or NULL. */
unsigned char *ob_sites_find_closed(const struct ob_site_group *group);
/* True if all others have been sent every round. */
bool ob_sites_are_flushed(const struct ob_site_group *group);
/* Looks for a peer's drift, for so long. */
onebit_status_t ob_sites_receive(struct ob_site_group *group, int peer, double seconds);
/* Begins to receive its next one. */
onebit_status_t ob_sites_await(struct ob_site_group *group, int peer);

/* --- sites_wait.c */

/* Moves messages between sites, and ends rounds for which all drifts have arrived. Local, on rank 0
 * of a site. An error is kept for the next exchange. */
void ob_sites_move(struct ob_sites *sites);
void ob_sites_fail(struct ob_sites *sites, onebit_status_t status);
/* Waits for the rounds of one group, or with NULL for the end of a synchronisation, and applies
 * them. Collective over the site. */
onebit_status_t ob_sites_exchange(struct ob_sites *sites, struct ob_site_group *only);

/* --- When drifts are sent, and rounds applied (sites_serve.c) */

onebit_status_t ob_sites_step(struct ob_sites *sites);
onebit_status_t ob_sites_synchronize(struct ob_sites *sites);
/* Sends the drifts of a group, once more where they were under way when it was saved or moved. */
void ob_sites_begin(struct ob_site_group *group, unsigned flags, bool *skipped);

/* A batch of one message that is sent or received. */
onebit_status_t ob_site_send(struct ob_batch *batch, unsigned char *data, size_t bytes, int peer,
                             int tag);
onebit_status_t ob_site_receive(struct ob_batch *batch, unsigned char *data, size_t bytes, int peer,
                                int tag);
/* Sets complete if the batch is complete within `seconds`. */
onebit_status_t ob_site_test(struct ob_batch *batch, double seconds, bool *complete);

#endif
