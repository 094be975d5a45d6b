/* Serves the connections that other ranks open to this rank, and runs rank 0's part of the
 * rendezvous. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include "base/error.h"
#include "base/log.h"
#include "base/process.h"
#include "collectives/transports/sockets_rendezvous.h"

/* --- Visitors: accepted connections whose rank is not known yet --------------------------------*/

void ob_visitor_close(struct ob_visitor *visitor) {
  ob_own_close(visitor->file);
  visitor->file = -1;
}

/* Accepts new connections as visitors. If the list is full, a new visitor replaces the oldest. */
static onebit_status_t accept_connections(struct ob_rendezvous *state) {
  for (int file; (file = ob_net_accept(state->listener)) >= 0;) {
    struct ob_visitor *visitor = &state->visitors[state->next_visitor++ % OB_VISITORS];
    ob_visitor_close(visitor);
    *visitor = (struct ob_visitor){.file = file};
  }
  return ob_net_is_absence(errno) ? ONEBIT_OK : ob_rendezvous_failed(state, "accept");
}

static bool is_other_version(const struct ob_visitor *visitor) {
  return visitor->done >= 2 * sizeof(uint32_t) && visitor->greeting.version != OB_GREETING_VERSION;
}

/* Reads a visitor's greeting; returns true when it is complete. A greeting of another version is
 * complete as soon as its version is known. */
bool ob_visitor_read_greeting(struct ob_rendezvous *state, struct ob_visitor *visitor) {
  struct ob_greeting *greeting = &visitor->greeting;
  if (visitor->done == sizeof *greeting)
    return true;
  ssize_t got = ob_net_recv(visitor->file, (char *)greeting + visitor->done,
                            sizeof *greeting - visitor->done);
  if (got < 0 && !ob_net_is_absence(errno))
    state->refused = ob_rendezvous_failed(state, "recv");
  if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) {
    ob_visitor_close(visitor);
    return false;
  }
  visitor->done += got > 0 ? (size_t)got : 0;
  if (visitor->done >= sizeof greeting->magic && greeting->magic != OB_GREETING_MAGIC)
    ob_visitor_close(visitor);
  else if (visitor->done == sizeof *greeting && greeting->rank < 0)
    ob_visitor_close(visitor);
  return visitor->file >= 0 && (visitor->done == sizeof *greeting || is_other_version(visitor));
}

onebit_status_t ob_visitors_serve(struct ob_rendezvous *state, ob_visitor_accept *accept_one) {
  OB_TRY(accept_connections(state));
  for (int i = 0; i < OB_VISITORS; i++) {
    struct ob_visitor *visitor = &state->visitors[i];
    if (visitor->file < 0 || !ob_visitor_read_greeting(state, visitor))
      continue;
    if (!accept_one(state, visitor))
      ob_visitor_close(visitor);
  }
  return ONEBIT_OK;
}

/* --- Ranks that join ---------------------------------------------------------------------------*/

/* If two jobs without names use the same port, rank 0 notices that only when a second connection
 * claims the same rank. The ranks of a job without a name from a launcher are assumed to start
 * within this many seconds of each other. */
double ob_join_quiet = 2.0;
double ob_join_last = 2.0;

static void refuse_visitor(const struct ob_visitor *visitor, onebit_status_t status, int for_now,
                           const char *text) {
  struct ob_answer answer = {.magic = OB_GREETING_MAGIC,
                             .version = OB_GREETING_VERSION,
                             .status = status,
                             .streams = for_now};
  snprintf(answer.text, sizeof answer.text, "%s", text);
  (void)!ob_send_all(visitor->file, &answer, sizeof answer);
}

static const char *job_source_name(const char *named) {
  return *named ? named : "no environment variable";
}

static void refuse_other_job(const struct ob_rendezvous *state, const struct ob_visitor *visitor) {
  const char *named = visitor->greeting.named;
  char text[256];
  if (strncmp(named, state->job.named, sizeof state->job.named) == 0)
    snprintf(text, sizeof text,
             "rank 0 at %.100s belongs to another job: its %s differs from this rank's",
             state->options->rendezvous, job_source_name(named));
  else
    snprintf(text, sizeof text,
             "rank 0 at %.72s belongs to another job, or takes its job name from %s and this rank "
             "from %.31s: set ONEBIT_JOB on all ranks",
             state->options->rendezvous, job_source_name(state->job.named), job_source_name(named));
  refuse_visitor(visitor, ONEBIT_ERROR_TRANSPORT, OB_ANSWER_FOR_NOW, text);
}

static bool send_challenge(struct ob_rendezvous *state, struct ob_visitor *visitor) {
  struct ob_answer answer = {
      .magic = OB_GREETING_MAGIC, .version = OB_GREETING_VERSION, .status = ONEBIT_IN_PROGRESS};
  if (ob_net_getrandom(visitor->nonce, sizeof visitor->nonce) != 0) {
    state->refused = ob_net_failed("getrandom");
    return false;
  }
  memcpy(answer.key, visitor->nonce, sizeof answer.key);
  visitor->challenged = true;
  return ob_send_all(visitor->file, &answer, sizeof answer);
}

/* Reads the proof that a visitor sends. Returns false if more of it has to arrive, or the
 * connection has ended. */
static bool read_proof(struct ob_visitor *visitor) {
  ssize_t got = ob_net_recv(visitor->file, (char *)visitor->proof + visitor->proof_done,
                            sizeof visitor->proof - visitor->proof_done);
  if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR))
    ob_visitor_close(visitor);
  visitor->proof_done += got > 0 ? (size_t)got : 0;
  return visitor->proof_done == sizeof visitor->proof;
}

static bool is_of_this_job(const struct ob_rendezvous *state, const struct ob_visitor *visitor) {
  uint64_t proof[2];
  ob_job_make_proof(&state->job, visitor->nonce, proof);
  return memcmp(proof, visitor->proof, sizeof proof) == 0;
}

/* Refuses a second rank with the same number. If the job has no exact name, either of the two ranks
 * may belong to it: then the communicator fails. */
static void refuse_second_rank(struct ob_rendezvous *state, const struct ob_visitor *visitor) {
  int rank = visitor->greeting.rank;
  char text[256];
  snprintf(text, sizeof text, "a rank %d has already joined", rank);
  if (!state->job.exact) {
    snprintf(text, sizeof text,
             "two processes joined as rank %d at %.60s: two jobs use this port, or a rank was "
             "started twice. Give each job its own port, or its own name (ONEBIT_JOB)",
             rank, state->options->rendezvous);
    state->refused = ob_error(ONEBIT_ERROR_TRANSPORT, "sockets: %s", text);
  }
  refuse_visitor(visitor, ONEBIT_ERROR_TRANSPORT, 0, text);
}

static void refuse_other_size(struct ob_rendezvous *state, const struct ob_visitor *visitor) {
  char text[128];
  snprintf(text, sizeof text, "the number of ranks differs: %d on rank 0, %d on rank %d",
           state->size, visitor->greeting.size, visitor->greeting.rank);
  if (state->job.exact)
    state->refused = ob_error(ONEBIT_ERROR_MISMATCH, "sockets: %s", text);
  refuse_visitor(visitor, ONEBIT_ERROR_MISMATCH, 0, text);
}

static void gather_add_member(struct ob_rendezvous *state, struct ob_visitor *visitor) {
  int rank = visitor->greeting.rank;
  memcpy(state->addresses[rank], visitor->greeting.address, OB_ADDRESS_BYTES);
  state->members[rank] = (struct ob_member){.file = visitor->file};
  visitor->file = -1;
}

/* Serves a visitor that wants to join. If rank 0 has failed, the visitor gets the error. */
bool ob_join_accept(struct ob_rendezvous *state, struct ob_visitor *visitor) {
  struct ob_greeting *greeting = &visitor->greeting;
  if (greeting->version != OB_GREETING_VERSION)
    refuse_visitor(visitor, ONEBIT_ERROR_TRANSPORT, 0,
                   "rank 0 has another version of the library: install one version on all hosts");
  if (greeting->version != OB_GREETING_VERSION || greeting->kind != OB_JOIN)
    return false;
  greeting->named[sizeof greeting->named - 1] = '\0';
  if (!visitor->challenged)
    return send_challenge(state, visitor);
  if (!read_proof(visitor))
    return visitor->file >= 0;
  if (!is_of_this_job(state, visitor))
    refuse_other_job(state, visitor);
  else if (state->verdict.status != ONEBIT_OK)
    (void)!ob_send_all(visitor->file, &state->verdict, sizeof state->verdict);
  else if (greeting->size != state->size || greeting->rank >= state->size)
    refuse_other_size(state, visitor);
  else if (greeting->rank == 0 || state->members[greeting->rank].file >= 0)
    refuse_second_rank(state, visitor);
  else
    gather_add_member(state, visitor);
  if (state->verdict.status != ONEBIT_OK && greeting->rank < state->size)
    state->members[greeting->rank].connected = true; /* the member has received the error */
  return false;
}

/* --- Reports to rank 0 -------------------------------------------------------------------------*/

/* Closes a member's connection that has ended. A member that did not receive the list of addresses,
 * or has not reported since then, connects again to get the verdict. */
static onebit_status_t lose_member(struct ob_rendezvous *state, int rank, bool joining) {
  bool connected = state->members[rank].connected;
  ob_own_close(state->members[rank].file);
  state->members[rank] = (struct ob_member){.file = -1, .connected = connected};
  if (joining)
    return ONEBIT_OK; /* the member may be started again */
  return ob_error(ONEBIT_ERROR_TRANSPORT,
                  "sockets: rank %d at %.63s ended before all ranks were connected", rank,
                  state->addresses[rank]);
}

static onebit_status_t read_member(struct ob_rendezvous *state, int rank, bool joining) {
  struct ob_member *member = &state->members[rank];
  size_t left = sizeof member->report - member->done;
  if (member->file < 0 || left == 0)
    return ONEBIT_OK;
  ssize_t got = ob_net_recv(member->file, (char *)&member->report + member->done, left);
  if (got < 0 && (errno == EAGAIN || errno == EINTR))
    return ONEBIT_OK;
  if (got < 0 && !ob_net_is_absence(errno))
    return ob_rendezvous_failed(state, "recv");
  if (got <= 0)
    return lose_member(state, rank, joining);
  member->done += (size_t)got;
  if (member->done < sizeof member->report)
    return ONEBIT_OK;
  member->connected = member->report.status == ONEBIT_OK;
  return member->connected ? ONEBIT_OK : ob_rendezvous_repeat_error(state, &member->report);
}

onebit_status_t ob_members_read(struct ob_rendezvous *state, bool joining) {
  for (int rank = 1; rank < state->size; rank++)
    OB_TRY(read_member(state, rank, joining));
  return ONEBIT_OK;
}

int ob_members_find_unconnected(const struct ob_rendezvous *state) {
  for (int rank = 1; rank < state->size; rank++)
    if (!state->members[rank].connected)
      return rank;
  return -1;
}

/* --- Answers of rank 0 -------------------------------------------------------------------------*/

/* Sends the verdict to the members and closes their connections, so that file descriptors are free
 * for ranks that still join. */
static void send_verdict(struct ob_rendezvous *state) {
  for (int rank = 1; rank < state->size; rank++) {
    struct ob_member *member = &state->members[rank];
    if (member->file < 0)
      continue;
    if (!ob_send_all(member->file, &state->verdict, sizeof state->verdict) &&
        !ob_net_is_absence(errno) && state->verdict.status == ONEBIT_OK)
      state->refused = ob_rendezvous_failed(state, "send");
    ob_own_close(member->file);
    *member = (struct ob_member){.file = -1, .connected = true};
  }
}

void ob_members_send_verdict(struct ob_rendezvous *state, const struct ob_answer *verdict) {
  double until = ob_seconds() + ob_join_last;
  bool late = state->watch.waited >= state->timeout;
  bool two_jobs = !state->job.exact && state->refused != ONEBIT_OK; /* more ranks may come */
  state->verdict = *verdict;
  send_verdict(state);
  while (verdict->status != ONEBIT_OK && !late && state->listener >= 0 &&
         (two_jobs || ob_members_find_unconnected(state) > 0) && ob_seconds() < until) {
    (void)ob_visitors_serve(state, ob_join_accept);
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
  }
}

/* --- The whole rendezvous of rank 0 ------------------------------------------------------------*/

/* Writes a text such as "rank 2, rank 5, rank 6 and 12 more"; returns false if all ranks have
 * joined. */
static bool list_missing_ranks(const struct ob_rendezvous *state, char *text, size_t bytes) {
  int missing = 0;
  size_t length = 0;
  for (int rank = 1; rank < state->size; rank++)
    missing += state->members[rank].file < 0;
  for (int rank = 1, listed = 0; rank < state->size && listed < 3; rank++)
    if (state->members[rank].file < 0)
      length +=
          (size_t)snprintf(text + length, bytes - length, "%srank %d", listed++ ? ", " : "", rank);
  if (missing > 3)
    snprintf(text + length, bytes - length, " and %d more", missing - 3);
  return missing > 0;
}

/* Listens at the rendezvous address. If a communicator of this process already listens there, its
 * listener is used. If rank 0 of another job listens there, that rank is told, so that both jobs
 * fail. */
static onebit_status_t listen_at_rendezvous(struct ob_rendezvous *state) {
  char reason[OB_NET_REASON];
  state->listener = ob_address_listen(&state->at);
  int code = errno;
  if (state->listener < 0 && code == EADDRINUSE)
    state->listener = ob_sockets_claim_listener(&state->at);
  if (state->listener >= 0)
    return ONEBIT_OK;
  if (code == EADDRINUSE)
    ob_join_as_second_root(state);
  return ob_error(ONEBIT_ERROR_TRANSPORT, "sockets: rank 0 cannot listen at %.100s: %s",
                  state->options->rendezvous, ob_net_reason(code, reason));
}

static onebit_status_t gather_send_addresses(struct ob_rendezvous *state) {
  const struct ob_answer answer = {.magic = OB_GREETING_MAGIC,
                                   .version = OB_GREETING_VERSION,
                                   .streams = state->streams,
                                   .key = {state->key[0], state->key[1]}};
  size_t bytes = (size_t)state->size * OB_ADDRESS_BYTES;
  for (int rank = 1; rank < state->size; rank++) {
    int file = state->members[rank].file;
    onebit_status_t status = ob_rendezvous_send(state, file, &answer, sizeof answer);
    if (status == ONEBIT_OK)
      status = ob_rendezvous_send(state, file, state->addresses, bytes);
    if (status == ONEBIT_IN_PROGRESS) {
      OB_TRY(read_member(state, rank, false)); /* the rank may have sent its error */
      return lose_member(state, rank, false);
    }
    OB_TRY(status);
  }
  return ONEBIT_OK;
}

/* Waits until all ranks have joined. Until the list of addresses is sent, a rank's process may end
 * and another may take its place. */
static onebit_status_t wait_for_members(struct ob_rendezvous *state) {
  char missing[96];
  for (;;) {
    OB_TRY(ob_members_read(state, true));
    OB_TRY(ob_visitors_serve(state, ob_join_accept));
    OB_TRY(state->refused);
    if (!list_missing_ranks(state, missing, sizeof missing))
      break;
    strncat(missing, " to join", sizeof missing - strlen(missing) - 1);
    OB_TRY(ob_rendezvous_pause(state, state->options->rendezvous, missing));
  }
  state->watch = (struct ob_watch){.presence = &state->presence};
  state->complete = ob_seconds();
  return ONEBIT_OK;
}

bool ob_join_is_quiet(const struct ob_rendezvous *state) {
  double quiet = state->timeout / 2 < ob_join_quiet ? state->timeout / 2 : ob_join_quiet;
  return state->job.exact || ob_seconds() >= state->complete + quiet;
}

onebit_status_t ob_join_gather(struct ob_rendezvous *state) {
  OB_TRY(listen_at_rendezvous(state));
  OB_TRY(wait_for_members(state));
  if (ob_net_getrandom(state->key, sizeof state->key) != 0)
    return ob_net_failed("getrandom");
  return gather_send_addresses(state);
}

/* --- Late ranks --------------------------------------------------------------------------------*/

/*
 * Rank 0 goes on listening after all ranks have joined. A job without an exact name
 * (sockets_join.c) cannot distinguish its ranks from those of another job at the same port. If rank
 * 0 closed the port, late ranks of the other job could join each other there. So rank 0 listens and
 * refuses late ranks.
 */

/* Warns of a rank that came too late, since a rank of another job may have taken its place. */
static void warn_of_late_rank(struct ob_sockets *sockets) {
  if (!sockets->warned)
    ob_log(OB_LOG_WARN, sockets->rank,
           "sockets: another rank tried to join after all %d ranks had joined. If another job uses "
           "this port, some of its ranks may have joined this job: give each job its own port or "
           "its own ONEBIT_JOB",
           sockets->size);
  sockets->warned = true;
}

/* Refuses a late rank. The greeting is read first: if a connection is closed with unread bytes, the
 * system discards the answer. */
static void refuse_late_rank(struct ob_sockets *sockets, int file) {
  struct ob_answer answer = {.magic = OB_GREETING_MAGIC,
                             .version = OB_GREETING_VERSION,
                             .status = ONEBIT_ERROR_TRANSPORT,
                             .streams = OB_ANSWER_FOR_NOW,
                             .key = {sockets->key[0], sockets->key[1]}};
  struct ob_greeting greeting = {0};
  snprintf(
      answer.text, sizeof answer.text,
      "all %d ranks of the job at this port are already connected: another job uses the port, or "
      "this rank was started again. Give each job its own port, or its own name (ONEBIT_JOB)",
      sockets->size);
  (void)!ob_net_recv(file, &greeting, sizeof greeting);
  (void)!ob_send_all(file, &answer, sizeof answer);
  ob_own_close(file);
  /* A rank whose greeting has this key comes for the next communicator of this job. */
  if (greeting.magic == OB_GREETING_MAGIC &&
      memcmp(greeting.key, sockets->key, sizeof sockets->key) != 0)
    warn_of_late_rank(sockets);
}

void ob_sockets_refuse(struct ob_sockets *sockets) {
  int file;
  while ((file = ob_net_accept(sockets->listener)) >= 0)
    refuse_late_rank(sockets, file);
}

void ob_sockets_keep_listener(struct ob_sockets *sockets, int listener) {
  struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.ptr = sockets};
  if (ob_net_epoll_add(sockets->events, listener, &event) == 0)
    sockets->listener = listener;
  else
    ob_own_close(listener);
}
