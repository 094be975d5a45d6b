/*
 * Connects ranks that have found each other: each rank connects to all ranks with lower numbers.
 * Every connection begins with a greeting; a connection that sends something else, or nothing, is
 * closed.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/process.h"
#include "collectives/transports/sockets_rendezvous.h"

#define PAUSE_NS 1000000
/* The time in seconds by which the other ranks' timeout is longer than that of rank 0, whose error
 * message names the missing ranks. */
#define GRACE 1.0
/* The age in seconds from which on a refusal is ignored: the rank 0 that sent it has exited, and a
 * new rank 0 would have answered by now. */
#define RECENT_SECONDS 2.0

/* --- Errors, sends and receives ----------------------------------------------------------------*/

/* True if rank 0 of another job has refused this rank recently. The timeout may expire while this
 * rank tries to connect again. */
static bool is_refused_by_other_job(const struct ob_rendezvous *state) {
  return state->refused_since > 0 && ob_seconds() - state->refused_last < RECENT_SECONDS;
}

onebit_status_t ob_rendezvous_pause(struct ob_rendezvous *state, const char *what,
                                    const char *whom) {
  char text[224];
  nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
  snprintf(text, sizeof text, "sockets: %s", what);
  onebit_status_t status =
      ob_watch_for(&state->watch, state->timeout + (state->joined ? GRACE : 0), text, whom);
  return status != ONEBIT_OK && is_refused_by_other_job(state)
             ? ob_rendezvous_repeat_error(state, &state->verdict)
             : status;
}

/* Returns the thread's latest error message without "sockets: ". */
static const char *plain_error_message(void) {
  static const char begins[] = "sockets: ";
  const char *text = onebit_last_error();
  return strncmp(text, begins, sizeof begins - 1) == 0 ? text + sizeof begins - 1 : text;
}

onebit_status_t ob_rendezvous_failed(const struct ob_rendezvous *state, const char *call) {
  int code = errno;
  onebit_status_t status = ob_net_failed(call);
  if (code == EMFILE)
    return ob_error(status, "%s; each connected rank needs %d open files", onebit_last_error(),
                    state->streams + 1);
  return status;
}

onebit_status_t ob_rendezvous_repeat_error(struct ob_rendezvous *state, struct ob_answer *answer) {
  answer->text[sizeof answer->text - 1] = '\0';
  state->told = true;
  return ob_error(answer->status == ONEBIT_ERROR_MISMATCH ? ONEBIT_ERROR_MISMATCH
                                                          : ONEBIT_ERROR_TRANSPORT,
                  "sockets: %s", answer->text);
}

bool ob_send_all(int file, const void *data, size_t bytes) {
  return ob_net_send(file, data, bytes) == (ssize_t)bytes;
}

/* Returns the status of a send or receive that has transferred `moved` bytes, or has failed. */
static onebit_status_t check_transfer(struct ob_rendezvous *state, const char *call,
                                      ssize_t moved) {
  if (moved > 0)
    return ONEBIT_OK;
  if (moved < 0 && (errno == EAGAIN || errno == EINTR))
    return ob_rendezvous_pause(state, state->options->rendezvous, "rank 0's list of all ranks");
  return moved == 0 || ob_net_is_absence(errno) ? ONEBIT_IN_PROGRESS
                                                : ob_rendezvous_failed(state, call);
}

onebit_status_t ob_rendezvous_send(struct ob_rendezvous *state, int file, const void *data,
                                   size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    ssize_t sent = ob_net_send(file, (const char *)data + done, bytes - done);
    OB_TRY(check_transfer(state, "send", sent));
    done += sent > 0 ? (size_t)sent : 0;
  }
  return ONEBIT_OK;
}

onebit_status_t ob_rendezvous_receive(struct ob_rendezvous *state, int file, void *data,
                                      size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    ssize_t got = ob_net_recv(file, (char *)data + done, bytes - done);
    OB_TRY(check_transfer(state, "recv", got));
    done += got > 0 ? (size_t)got : 0;
  }
  return ONEBIT_OK;
}

/* --- All with all ------------------------------------------------------------------------------*/

static struct ob_greeting make_greeting(const struct ob_rendezvous *state, int stream) {
  return (struct ob_greeting){.magic = OB_GREETING_MAGIC,
                              .version = OB_GREETING_VERSION,
                              .kind = OB_STREAM,
                              .rank = state->rank,
                              .size = state->size,
                              .stream = stream,
                              .key = {state->key[0], state->key[1]}};
}

static bool has_communicator_key(const struct ob_rendezvous *state,
                                 const struct ob_greeting *greeting) {
  return greeting->version == OB_GREETING_VERSION && greeting->kind == OB_STREAM &&
         memcmp(greeting->key, state->key, sizeof state->key) == 0;
}

/* Accepts a stream from a rank with a higher number and answers its greeting. */
static bool accept_stream(struct ob_rendezvous *state, struct ob_visitor *visitor) {
  const struct ob_greeting *greeting = &visitor->greeting;
  struct ob_greeting answer = make_greeting(state, greeting->stream);
  if (state->rank == 0 && greeting->kind != OB_STREAM)
    return ob_join_accept(state, visitor);
  if (!has_communicator_key(state, greeting) || greeting->rank <= state->rank ||
      greeting->rank >= state->size || greeting->stream < 0 || greeting->stream > state->streams ||
      !ob_send_all(visitor->file, &answer, sizeof answer))
    return false;
  /* An earlier connection with the same number is replaced: the sender has given it up, and no
   * message was sent over it. */
  ob_own_close(state->sockets->links[greeting->rank].streams[greeting->stream].file);
  onebit_status_t status =
      ob_sockets_adopt(state->sockets, greeting->rank, greeting->stream, visitor->file);
  if (status == ONEBIT_OK)
    visitor->file = -1;
  else
    state->refused = status;
  return false;
}

/* An attempt to connect to a rank with a lower number: this rank connects, sends a greeting, and
 * waits for the answer. */
struct attempt {
  struct ob_visitor visitor;
  bool greeted, over;
};

static void fail_attempt(struct attempt *attempt) {
  ob_visitor_close(&attempt->visitor);
  *attempt = (struct attempt){.visitor = {.file = -1}};
}

/* Continues an attempt: connects, and sends the greeting. If the other side is not ready, the
 * attempt is repeated. */
static onebit_status_t open_attempt(struct ob_rendezvous *state, struct attempt *attempt, int rank,
                                    int stream) {
  struct ob_visitor *visitor = &attempt->visitor;
  const struct ob_greeting greeting = make_greeting(state, stream);
  struct ob_address to;
  if (!ob_address_scan(state->addresses[rank], &to))
    return ob_error(ONEBIT_ERROR_TRANSPORT, "sockets: rank 0's list of addresses lacks rank %d",
                    rank);
  ob_address_set_scope(&to, &state->own);
  if (visitor->file < 0)
    visitor->file = ob_net_socket(to.storage.ss_family);
  if (visitor->file < 0)
    return ob_rendezvous_failed(state, "socket");
  if (ob_net_connect(visitor->file, &to) < 0 && errno != EISCONN) {
    if (!ob_net_is_absence(errno))
      return ob_rendezvous_failed(state, "connect");
    if (errno != EINPROGRESS && errno != EALREADY)
      fail_attempt(attempt);
    return ONEBIT_OK;
  }
  attempt->greeted = ob_send_all(visitor->file, &greeting, sizeof greeting);
  if (!attempt->greeted)
    fail_attempt(attempt);
  return ONEBIT_OK;
}

static onebit_status_t continue_attempt(struct ob_rendezvous *state, struct attempt *attempt,
                                        int rank, int stream) {
  struct ob_visitor *visitor = &attempt->visitor;
  if (!attempt->greeted)
    return open_attempt(state, attempt, rank, stream);
  if (!ob_visitor_read_greeting(state, visitor)) {
    if (visitor->file < 0)
      fail_attempt(attempt);
    return ONEBIT_OK;
  }
  if (visitor->greeting.rank != rank || !has_communicator_key(state, &visitor->greeting)) {
    fail_attempt(attempt);
    return ONEBIT_OK;
  }
  OB_TRY(ob_sockets_adopt(state->sockets, rank, stream, visitor->file));
  attempt->over = true;
  visitor->file = -1;
  return ONEBIT_OK;
}

/* Returns the lowest rank that is not connected yet, or -1. */
static int find_unconnected_rank(const struct ob_rendezvous *state) {
  for (int rank = 0; rank < state->size; rank++)
    for (int i = 0; i <= state->streams && rank != state->rank; i++)
      if (state->sockets->links[rank].streams[i].file < 0)
        return rank;
  return -1;
}

static struct ob_answer make_report(const struct ob_rendezvous *state, onebit_status_t status) {
  struct ob_answer answer = {
      .magic = OB_GREETING_MAGIC, .version = OB_GREETING_VERSION, .status = status};
  if (status != ONEBIT_OK && state->told)
    snprintf(answer.text, sizeof answer.text, "%.255s", plain_error_message());
  else if (status != ONEBIT_OK)
    snprintf(answer.text, sizeof answer.text, "rank %d: %.230s", state->rank,
             plain_error_message());
  return answer;
}

/* Reports to rank 0 that this rank is connected with all others. ONEBIT_OK: all ranks are
 * connected. */
static onebit_status_t report_connected(struct ob_rendezvous *state, bool *reported) {
  const struct ob_answer answer = make_report(state, ONEBIT_OK);
  if (state->rank == 0 && (ob_members_find_unconnected(state) >= 0 || !ob_join_is_quiet(state)))
    return ONEBIT_IN_PROGRESS;
  if (state->rank == 0)
    ob_members_send_verdict(state, &answer);
  else if (!*reported)
    *reported = ob_rendezvous_send(state, state->root, &answer, sizeof answer) == ONEBIT_OK;
  return state->rank == 0 ? state->refused : ONEBIT_IN_PROGRESS;
}

/* Reads messages: on rank 0 the other ranks' reports, on another rank the verdict.
 * ONEBIT_IN_PROGRESS: no message ends the rendezvous yet. */
static onebit_status_t read_reports_or_verdict(struct ob_rendezvous *state) {
  if (state->rank > 0)
    return ob_verdict_read(state);
  OB_TRY(ob_members_read(state, false));
  return ONEBIT_IN_PROGRESS;
}

static onebit_status_t pause_for_connections(struct ob_rendezvous *state, int apart) {
  char whom[128];
  if (apart < 0)
    snprintf(whom, sizeof whom, "the connections between other ranks");
  else
    snprintf(whom, sizeof whom, "the connections with rank %d at %.63s", apart,
             state->addresses[apart]);
  return ob_rendezvous_pause(state, state->options->rendezvous, whom);
}

static onebit_status_t connect_all(struct ob_rendezvous *state, struct attempt *attempts) {
  const int each = state->streams + 1, count = state->rank * each;
  bool reported = false;
  for (;;) {
    int apart = find_unconnected_rank(state);
    onebit_status_t status = apart < 0 ? report_connected(state, &reported) : ONEBIT_IN_PROGRESS;
    if (status == ONEBIT_IN_PROGRESS)
      status = read_reports_or_verdict(state);
    if (status != ONEBIT_IN_PROGRESS)
      return status;
    OB_TRY(ob_visitors_serve(state, accept_stream));
    OB_TRY(state->refused);
    for (int i = 0; i < count; i++)
      if (!attempts[i].over)
        OB_TRY(continue_attempt(state, &attempts[i], i / each, i % each));
    OB_TRY(pause_for_connections(state, apart));
  }
}

static onebit_status_t connect_ranks(struct ob_rendezvous *state) {
  OB_TRY(ob_sockets_create(state->rank, state->size, state->streams, &state->sockets));
  size_t count = (size_t)state->rank * ((size_t)state->streams + 1);
  struct attempt *attempts = ob_allocate(count, sizeof *attempts);
  if (!attempts)
    return ob_error(ONEBIT_ERROR_MEMORY, "sockets: out of memory for %zu connections", count);
  for (size_t i = 0; i < count; i++)
    attempts[i].visitor.file = -1;
  onebit_status_t status = connect_all(state, attempts);
  for (size_t i = 0; i < count; i++)
    ob_visitor_close(&attempts[i].visitor);
  ob_release(attempts);
  return status;
}

/* --- Rendezvous --------------------------------------------------------------------------------*/

static void close_rendezvous(struct ob_rendezvous *state) {
  for (int i = 0; i < OB_VISITORS; i++)
    ob_visitor_close(&state->visitors[i]);
  for (int rank = 0; state->members && rank < state->size; rank++)
    ob_own_close(state->members[rank].file);
  ob_presence_end(&state->presence);
  ob_own_close(state->root);
  ob_own_close(state->listener);
  ob_release(state->members);
  ob_release(state->addresses);
}

/* Sends the outcome to the other ranks, and restores this rank's error message afterwards. */
static void send_outcome(struct ob_rendezvous *state, onebit_status_t status) {
  char text[512];
  const struct ob_answer answer = make_report(state, status);
  snprintf(text, sizeof text, "%s", onebit_last_error());
  if (state->rank == 0)
    ob_members_send_verdict(state, &answer);
  else if (!state->told && state->watch.waited < state->timeout)
    ob_join_report(state, &answer);
  ob_error(status, "%s", text);
}

static onebit_status_t join_and_connect(struct ob_rendezvous *state) {
  OB_TRY(state->rank == 0 ? ob_join_gather(state) : ob_join(state));
  return connect_ranks(state);
}

static onebit_status_t run_rendezvous(struct ob_rendezvous *state) {
  size_t size = (size_t)state->size;
  OB_TRY(ob_address_resolve(state->options->rendezvous, &state->at));
  ob_job_find(state->options->secret, &state->job);
  state->addresses = ob_allocate(size, sizeof *state->addresses);
  state->members = ob_allocate(size, sizeof *state->members);
  if (!state->members || !state->addresses) {
    ob_release(state->members);
    state->members = NULL;
    return ob_error(ONEBIT_ERROR_MEMORY, "sockets: out of memory for the addresses of %zu ranks",
                    size);
  }
  for (int rank = 0; rank < state->size; rank++)
    state->members[rank].file = -1;
  ob_presence_begin(&state->presence, state->rank, state->size, "sockets");
  state->watch.presence = &state->presence;
  onebit_status_t status = join_and_connect(state);
  if (status != ONEBIT_OK)
    send_outcome(state, status);
  return status;
}

onebit_status_t ob_sockets_connect(const onebit_sockets_options_t *options, double timeout,
                                   struct ob_sockets **sockets) {
  struct ob_rendezvous *state = ob_allocate(1, sizeof *state);
  *sockets = NULL;
  if (!state)
    return ob_error(ONEBIT_ERROR_MEMORY, "sockets: out of memory for a communicator");
  *state = (struct ob_rendezvous){.options = options,
                                  .rank = options->rank,
                                  .size = options->ranks,
                                  .streams = options->streams,
                                  .listener = -1,
                                  .root = -1,
                                  .timeout = timeout};
  for (int i = 0; i < OB_VISITORS; i++)
    state->visitors[i].file = -1;
  ob_net_raise_limit();
  onebit_status_t status = state->size > 1
                               ? run_rendezvous(state)
                               : ob_sockets_create(0, 1, options->streams, &state->sockets);
  if (status == ONEBIT_OK)
    memcpy(state->sockets->key, state->key, sizeof state->key);
  if (status == ONEBIT_OK && state->listener >= 0 && state->rank == 0 && !state->job.exact) {
    ob_sockets_keep_listener(state->sockets, state->listener);
    state->listener = -1;
  }
  close_rendezvous(state);
  if (status == ONEBIT_OK)
    *sockets = state->sockets;
  else
    ob_sockets_destroy(state->sockets);
  ob_release(state);
  return status;
}
