/*
 * The outer step among sites (onebit/outer.h, onebit_outer_create_sites).
 *
 * Each of the caller's fragments is cut into as many shards as there are sites; they are a group,
 * which is exchanged together. Site s serves shard s of a group: it alone decides which drifts a
 * round includes, and numbers the rounds. So sites need not agree on which sites take part, and the
 * consensus of a shard is the same on all sites that have applied the same number of its rounds. A
 * site has at most one drift of a shard under way; the drift counts in the first round that the
 * server closes after the drift has arrived, however late that is. The messages of a server to a
 * site arrive in order: rounds, each of which the site applies, or, if it is behind by more rounds
 * than the server keeps, the consensus itself, in pieces.
 *
 * With a delay a server closes a round in any step in which all drifts have arrived; but every
 * site, also the server's, applies it in the step in which the delay ends, where sites wait for
 * each other for a limited time. Until then fragment->drift is the drift that was sent, and the
 * server's residual is the residual before the round. So the drift can be sent again, with the same
 * bits, after a checkpoint or a move.
 */
#ifndef OB_OPTIMIZERS_OUTER_SITES_H
#define OB_OPTIMIZERS_OUTER_SITES_H

#include "collectives/communicator.h"
#include "optimizers/outer/outer.h"

#define OB_SITES_MAX 64 /* each site has a bit in ob_site_header.sites */

enum ob_site_kind { OB_SITE_DRIFT = 1, OB_SITE_ROUND, OB_SITE_PIECE, OB_SITE_END };

enum ob_site_flag {
  OB_SITE_EMPTY = 1, /* a drift or a round without values: nothing is added */
  OB_SITE_FINAL = 2, /* a drift: the site's last one before onebit_outer_synchronize returns */
  OB_SITE_ENDED = 4, /* a round: with this one, all sites' final drifts are included */
  OB_SITE_LAST = 8   /* the last piece of a snapshot */
};

/* The header of every message, followed by the messages of the parts or a piece's values. */
struct ob_site_header {
  uint32_t magic;
  uint16_t kind, flags;
  uint32_t shard;
  int32_t status;  /* an end: the status of rank 0 of the site */
  uint64_t number; /* a drift: its number among the shard's drifts, from 1 on; else the round's */
  uint64_t newest; /* the server's latest round; a drift: its weight, a double */
  /* A bit for each site. A round or piece: its drift is included; an end: the site is late. */
  uint64_t sites;
  /* A piece: the index of its first value; the consensus comes first, then the momentum. A drift:
   * its local steps as a number of rounds, times 65536; a round: the mean of these. */
  uint64_t first;
  uint32_t count;     /* a piece: the number of its values */
  uint32_t consensus; /* checksum of the consensus, before a round or after the last piece */
  uint64_t check;     /* hash of the header, and of a piece's values */
};

/* The elements of a shard that are compressed, or those that are not. */
struct ob_site_part {
  bool dense;
  size_t pieces, *counts, at; /* at: the offset of its message in the shard's message */
  float **aheads, **means;    /* addresses in sites->ahead and in sites->mean */
  struct ob_layout layout;
  struct ob_message_shape shape;
  struct ob_work work;
  struct ob_residual server; /* on rank 0 of the site that serves the shard */
};

enum { OB_SITE_COMPRESSED, OB_SITE_DENSE, OB_SITE_PARTS };

/* A shard, which is fragment->state. Its messages, except the drift that is sent, are on rank 0 of
 * a site only.
 *
 * Changes of a site that are not in the consensus x stay in the site's parameters p. When the
 * parameters were last set, to p = x - drift, fragment->drift was the sum of these changes; local
 * steps add to it. The drift that is sent is the sum of these changes, compressed; when a round
 * includes this drift, its decoded message is subtracted. So a site needs no residual of its own
 * messages, and a drift that gets lost is part of the next one. */
struct ob_shard {
  struct ob_fragment *fragment;
  struct ob_site_group *group;
  struct ob_site_part part[OB_SITE_PARTS];
  size_t bytes;   /* the size of the largest message */
  bool in_flight; /* a drift was sent, and no round includes it yet */
  /* In onebit_outer_synchronize: final: the drift is the last one; ended: the final drifts of all
   * sites are in rounds. */
  bool final, ended;
  bool torn;              /* some pieces of a consensus have arrived, but not all */
  uint64_t number, round; /* number: of the latest drift; round: the latest round applied */
  uint64_t sent_at;       /* the local step after which the latest drift was sent */
  uint64_t sent_steps;    /* the number of local steps in that drift */

  unsigned char *drift, *result; /* the drift that is sent, on all ranks; the message received */
  struct ob_batch *send, *receive;
  bool sending, here; /* here: `result` has arrived */
  uint64_t newest;    /* rounds that the server has closed, as far as is known */
  double arrived;     /* the time at which a message last arrived */
};

/* A site as the server of a shard sees it; the server's own site, too. */
struct ob_site_peer {
  unsigned char *drift, *out;
  struct ob_batch *receive, *send;
  bool here, sending;
  uint64_t number;      /* the number of its latest drift */
  uint64_t included_in; /* the round that its latest drift is in */
  uint64_t sent;        /* the latest round that was sent to it */
  size_t sent_values;   /* number of the snapshot's values that were sent to it */
};

/* The shards of one of the caller's fragments. Fields after the first three are used on rank 0 of a
 * site. */
struct ob_site_group {
  struct ob_sites *sites;
  size_t first;   /* the number of its first shard */
  bool in_flight; /* drifts were sent, and no step has applied the result yet */

  /* The shard that this site serves. */
  int drift_tag, result_tag;
  struct ob_site_peer *peers;
  unsigned char *history; /* messages of the latest sites->depth rounds */
  uint64_t round, finals; /* finals: bits of the sites whose final drift is included */
  uint64_t ended_in;      /* the latest round that ended a synchronisation */
  bool closed;            /* a round was closed since drifts were last sent */
  float *snapshot;        /* consensus, momentum */
  uint64_t snapshot_round;
  uint32_t snapshot_sum;
  int snapshot_of;      /* the site that is being sent the snapshot; -1: none */
  unsigned char *zeros; /* the message of a drift of zeros */
};

struct ob_sites {
  struct onebit_outer *outer;
  onebit_comm_t site, between; /* between: NULL but on rank 0 of a site */
  int count, own;              /* the number of sites, and this one's number */
  int asked, quorum;           /* asked: the quorum in the options; 0: default */
  double patience;
  uint64_t built_bytes;
  struct ob_site_group *groups; /* an entry for each of outer->groups */
  size_t depth;                 /* rounds that a server keeps */
  size_t bytes;                 /* of the longest message */
  float *mean, *ahead;          /* scratch of the longest shard */
  struct ob_residual none;
  struct ob_view *views; /* scratch: one for each site */
  /* A bit for each site for which a wait ended without its message. late_rounds: for its rounds,
   * until a message from it arrives and the shard is up to date; late_drifts: for its drift, until
   * one arrives; both on rank 0. late: their union, the same on all ranks. */
  uint64_t late_rounds, late_drifts, late;
  double late_since;  /* the time at which a site was last added to late_rounds */
  uint64_t left_out;  /* rounds of this site's shards without some site's drift */
  uint64_t caught_up; /* snapshots that were applied */
  /* The failure of a step in which the ranks of the site exchange nothing: their next exchange
   * reports it. */
  struct ob_outcome failed;

  /* The commands from rank 0 to the other ranks of the site. */
  int command_tag;
  unsigned char *command;
  struct ob_batch *command_batch;
};

_Static_assert(sizeof(struct ob_site_header) == 64, "docs/wire-format.md");

/* --- sites.c */

extern const struct ob_outer_exchange ob_outer_sites;

/* Creates outer->sites, and finds the number of this site and the number of sites. Collective over
 * the site. `outer` may be NULL if `status` is not ONEBIT_OK. */
onebit_status_t ob_sites_find(struct onebit_outer *outer, onebit_comm_t site, onebit_comm_t between,
                              onebit_status_t status);
/* Checks the sites' options, and fills in the defaults, after ob_outer_resolve. */
onebit_status_t ob_sites_resolve(struct onebit_outer *outer, const onebit_sites_options_t *given);
/* Works as ob_agree, over all ranks of all sites. */
onebit_status_t ob_sites_agree(onebit_comm_t site, onebit_comm_t between, onebit_status_t status,
                               const struct ob_term *terms, size_t count);
/* Creates the state of exchanges between sites. Collective over all sites. */
onebit_status_t ob_sites_build(struct onebit_outer *outer);
/* Destroys the state that ob_sites_build created, after the exchange's `destroy` of each
 * fragment. */
void ob_sites_detach(struct onebit_outer *outer);
/* Changes the sites of an outer step while it is detached. Collective over the site. */
onebit_status_t ob_sites_regroup(struct onebit_outer *outer, onebit_comm_t between,
                                 onebit_status_t status);
void ob_sites_destroy(struct onebit_outer *outer);

static inline struct ob_shard *ob_shard_of(const struct ob_site_group *group, int site) {
  return group->sites->outer->fragments[group->first + (size_t)site].state;
}

/* Returns the site that serves the shard. */
static inline int ob_shard_server(const struct ob_shard *shard) {
  return (int)(shard->fragment->number - shard->group->first);
}

static inline bool ob_shard_is_own(const struct ob_shard *shard) {
  return ob_shard_server(shard) == shard->group->sites->own;
}

/* --- sites_message.c */

/* Creates the layout, messages and residuals of a shard. Local. */
onebit_status_t ob_shard_create(struct ob_shard *shard, struct ob_sites *sites);
void ob_shard_destroy(struct ob_shard *shard);

/* Fills in magic and check. */
void ob_site_seal(unsigned char *message);
/* Fails unless the `bytes` bytes are a message of that kind, for that shard, with a sound header.
 * OB_SITE_PIECE allows a round too. */
onebit_status_t ob_site_check(const unsigned char *message, size_t bytes, enum ob_site_kind kind,
                              const struct ob_shard *shard);

/* Fails unless the parts of a drift or a round are sound. */
onebit_status_t ob_shard_check_parts(struct ob_shard *shard, const unsigned char *message);
void ob_shard_seal_part(const struct ob_site_part *part, unsigned char *message);

/* --- sites_round.c */

/* Writes the difference from the consensus to shard->drift, with these flags; or, if the fragment
 * is OB_FRAGMENT_SENDING, repeats the last message. Returns false if the difference is not finite;
 * the site has then gone back to the consensus. */
bool ob_shard_compress(struct ob_shard *shard, struct ob_sites *sites, unsigned flags);
/* Returns the weight of a site's latest drift. */
double ob_site_weight(const struct ob_site_peer *peer);
/* Writes the mean of the received drifts to `message`, which has the next round's header. Returns
 * false if there is no mean. */
bool ob_shard_reduce(struct ob_shard *shard, struct ob_site_group *group, unsigned char *message);
/* Applies a round, or a piece, to consensus and parameters; the server also commits its
 * residual. */
onebit_status_t ob_shard_apply(struct ob_shard *shard, struct ob_sites *sites,
                               const unsigned char *message);

/* --- sites_serve.c */

/* Notes which messages have left, and begins to send the rounds and pieces of snapshots that are
 * due. Does not wait. */
onebit_status_t ob_sites_move_sends(struct ob_site_group *group);
/* Returns true if a round may be closed now: all expected drifts have arrived or, with `late`, a
 * quorum of them. With `all` the round needs the drifts of all sites. */
bool ob_sites_may_close(const struct ob_site_group *group, bool all, bool late);
onebit_status_t ob_sites_close(struct ob_site_group *group);
/* Returns the round that was closed and is not applied yet, or NULL. */
unsigned char *ob_sites_find_closed(const struct ob_site_group *group);
/* Returns true if the synchronisation of every shard has ended. */
bool ob_sites_have_ended(const struct ob_sites *sites);
/* Returns true if every round was sent to all other sites. */
bool ob_sites_are_flushed(const struct ob_site_group *group);
/* Waits for a peer's drift, for `seconds` at most. */
onebit_status_t ob_sites_receive(struct ob_site_group *group, int peer, double seconds);
/* Begins to receive the peer's next drift. */
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
/* Sends the drifts of a group. Drifts that were under way when the outer step was saved or moved
 * are sent again. */
void ob_sites_begin(struct ob_site_group *group, unsigned flags, bool *skipped);

/* Begin a batch of one message. */
onebit_status_t ob_site_send(struct ob_batch *batch, unsigned char *data, size_t bytes, int peer,
                             int tag);
onebit_status_t ob_site_receive(struct ob_batch *batch, unsigned char *data, size_t bytes, int peer,
                                int tag);
/* Sets complete if the batch is complete within `seconds`. */
onebit_status_t ob_site_test(struct ob_batch *batch, double seconds, bool *complete);

#endif
