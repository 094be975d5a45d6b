/*
 * How ranks find each other. Ranks 1 and up tell rank 0 where they listen (JOIN), and get a table
 * of all; then each connects to those below it (STREAM). Every connection begins with a greeting;
 * what sends another one, or none, is closed.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/error.h"
#include "base/hash.h"
#include "base/memory.h"
#include "collectives/transports/sockets_address.h"
#include "collectives/transports/sockets_state.h"
#include "collectives/watch.h"

#define GREETING_MAGIC   0x4742314fu /* the bytes "O1BG" */
#define GREETING_VERSION 1
/* Connections that have not said yet who they are; the oldest makes space. */
#define VISITORS 128
#define PAUSE_NS 1000000

enum greeting_kind { JOIN = 1, STREAM = 2 };

struct greeting {
  uint32_t magic, version;
  int32_t kind, rank, size, stream;
  uint64_t key[2];
  char address[OB_ADDRESS_BYTES];
};

/* Rank 0's answer to JOIN: then follow, where the status is ONEBIT_OK, the addresses of all. */
struct answer {
  uint32_t magic, version;
  int32_t status, streams;
  uint64_t key[2];
  char text[128];
};

struct visitor {
  int file; /* -1: none */
  size_t done;
  struct greeting greeting;
};

struct rendezvous {
  const onebit_sockets_options_t *options;
  int rank, size, streams, listener;
  double timeout;
  struct ob_watch watch;
  struct ob_address own; /* as it reaches rank 0 */
  uint64_t secret[2], key[2];
  char (*addresses)[OB_ADDRESS_BYTES];
  int *joined; /* files of the ranks that have joined, at rank 0; -1: not yet */
  struct ob_sockets *sockets;
  struct visitor visitors[VISITORS];
  unsigned next_visitor;
};

/* --- Small things ------------------------------------------------------------------------------*/

static onebit_status_t pause_in(struct rendezvous *state, const char *what) {
  nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
  return ob_watch_alone(&state->watch, state->timeout, what);
}

static struct greeting greet(const struct rendezvous *state, enum greeting_kind kind, int stream) {
  return (struct greeting){.magic = GREETING_MAGIC,
                           .version = GREETING_VERSION,
                           .kind = (int32_t)kind,
                           .rank = state->rank,
                           .size = state->size,
                           .stream = stream,
                           .key = {state->key[0], state->key[1]}};
}

/* Little enough for a new connection to take at once. */
static bool send_all(int file, const void *data, size_t bytes) {
  return send(file, data, bytes, MSG_NOSIGNAL) == (ssize_t)bytes;
}

/* Waits for all bytes. ONEBIT_IN_PROGRESS: the connection has ended before. */
static onebit_status_t receive_all(struct rendezvous *state, int file, void *data, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    ssize_t got = recv(file, (char *)data + done, bytes - done, MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR))
      return ONEBIT_IN_PROGRESS;
    if (got < 0)
      OB_TRY(pause_in(state, "sockets: rank 0's list of ranks"));
    done += got > 0 ? (size_t)got : 0;
  }
  return ONEBIT_OK;
}

/* --- Visitors ----------------------------------------------------------------------------------*/

static void send_away(struct visitor *visitor) {
  if (visitor->file >= 0)
    close(visitor->file);
  visitor->file = -1;
}

static void let_in(struct rendezvous *state) {
  for (int file; (file = accept4(state->listener, NULL, NULL, SOCK_CLOEXEC)) >= 0;) {
    struct visitor *visitor = &state->visitors[state->next_visitor++ % VISITORS];
    send_away(visitor);
    *visitor = (struct visitor){.file = file};
  }
}

/* Whether its greeting is complete; whoever sends something else is sent away. */
static bool has_greeted(struct visitor *visitor) {
  struct greeting *greeting = &visitor->greeting;
  ssize_t got = recv(visitor->file, (char *)greeting + visitor->done,
                     sizeof *greeting - visitor->done, MSG_DONTWAIT);
  if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR))
    send_away(visitor);
  visitor->done += got > 0 ? (size_t)got : 0;
  if (visitor->done < sizeof *greeting)
    return false;
  if (greeting->magic == GREETING_MAGIC && greeting->rank >= 0)
    return true;
  send_away(visitor);
  return false;
}

/* Calls `accept_one` with each that has greeted; it takes the file, or sends it away. */
static void look_at_door(struct rendezvous *state,
                         void (*accept_one)(struct rendezvous *state, struct visitor *visitor)) {
  let_in(state);
  for (int i = 0; i < VISITORS; i++) {
    struct visitor *visitor = &state->visitors[i];
    if (visitor->file < 0 || !has_greeted(visitor))
      continue;
    accept_one(state, visitor);
    send_away(visitor);
  }
}

/* --- Rank 0 ------------------------------------------------------------------------------------*/

static void refuse(const struct visitor *visitor, onebit_status_t status, const char *text) {
  struct answer answer = {.magic = GREETING_MAGIC, .version = GREETING_VERSION, .status = status};
  snprintf(answer.text, sizeof answer.text, "%s", text);
  (void)!send_all(visitor->file, &answer, sizeof answer);
}

static void accept_join(struct rendezvous *state, struct visitor *visitor) {
  struct greeting *greeting = &visitor->greeting;
  char text[128];
  if (greeting->kind != JOIN || memcmp(greeting->key, state->secret, sizeof greeting->key) != 0)
    return; /* nobody of this job */
  if (greeting->version != GREETING_VERSION) {
    refuse(visitor, ONEBIT_ERROR_TRANSPORT, "rank 0 has another version of the library");
  } else if (greeting->size != state->size || greeting->rank >= state->size) {
    snprintf(text, sizeof text, "the number of ranks differs: %d on rank 0, %d on rank %d",
             state->size, greeting->size, greeting->rank);
    refuse(visitor, ONEBIT_ERROR_MISMATCH, text);
  } else if (greeting->rank == 0 || state->joined[greeting->rank] >= 0) {
    snprintf(text, sizeof text, "there is a rank %d already", greeting->rank);
    refuse(visitor, ONEBIT_ERROR_TRANSPORT, text);
  } else {
    memcpy(state->addresses[greeting->rank], greeting->address, OB_ADDRESS_BYTES);
    state->joined[greeting->rank] = visitor->file;
    visitor->file = -1;
  }
}

static int first_missing(const struct rendezvous *state) {
  for (int rank = 1; rank < state->size; rank++)
    if (state->joined[rank] < 0)
      return rank;
  return -1;
}

/* The secret stands for the key until there is one. */
static onebit_status_t draw_key(struct rendezvous *state) {
  if (getrandom(state->key, sizeof state->key, 0) == (ssize_t)sizeof state->key)
    return ONEBIT_OK;
  return ob_error(ONEBIT_ERROR_TRANSPORT, "sockets: getrandom: %s", strerror(errno));
}

static onebit_status_t send_table(struct rendezvous *state) {
  const struct answer answer = {.magic = GREETING_MAGIC,
                                .version = GREETING_VERSION,
                                .streams = state->streams,
                                .key = {state->key[0], state->key[1]}};
  size_t bytes = (size_t)state->size * OB_ADDRESS_BYTES;
  for (int rank = 1; rank < state->size; rank++)
    if (!send_all(state->joined[rank], &answer, sizeof answer) ||
        !send_all(state->joined[rank], state->addresses, bytes))
      return ob_error(ONEBIT_ERROR_TRANSPORT, "sockets: rank %d has left again: %s", rank,
                      strerror(errno));
  return ONEBIT_OK;
}

static onebit_status_t gather_ranks(struct rendezvous *state, const struct ob_address *at) {
  state->listener = ob_address_listen(at);
  if (state->listener < 0)
    return ob_error(ONEBIT_ERROR_TRANSPORT, "sockets: rank 0 cannot listen at %s: %s",
                    state->options->rendezvous, strerror(errno));
  for (int missing; (missing = first_missing(state)) > 0;) {
    look_at_door(state, accept_join);
    if (pause_in(state, "sockets: ranks that have not joined") != ONEBIT_OK)
      return ob_error(ONEBIT_ERROR_TRANSPORT, "sockets: waited %.3g s for rank %d to join",
                      state->timeout, missing);
  }
  OB_TRY(draw_key(state));
  return send_table(state);
}

/* --- The others --------------------------------------------------------------------------------*/

/* One attempt to connect. -1: not now. */
static int try_connect(struct rendezvous *state, const struct ob_address *to) {
  int file = socket(to->storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  while (file >= 0 && connect(file, (const struct sockaddr *)&to->storage, to->length) < 0) {
    bool pending = errno == EINPROGRESS || errno == EALREADY;
    if (errno == EISCONN)
      break;
    if (pending && pause_in(state, "sockets: rank 0") == ONEBIT_OK)
      continue;
    close(file);
    return -1;
  }
  return file;
}

/* Listens where the connection with rank 0 comes from. */
static onebit_status_t open_own(struct rendezvous *state, int file, char text[OB_ADDRESS_BYTES]) {
  struct ob_address own, bound;
  ob_address_local(file, &own);
  ob_address_set_port(&own, 0);
  state->own = own;
  if (state->listener < 0)
    state->listener = ob_address_listen(&own);
  if (state->listener < 0)
    return ob_error(ONEBIT_ERROR_TRANSPORT, "sockets: cannot listen: %s", strerror(errno));
  ob_address_local(state->listener, &bound);
  ob_address_set_port(&own, ob_address_port(&bound));
  ob_address_print(&own, text);
  return ONEBIT_OK;
}

static onebit_status_t read_table(struct rendezvous *state, int file) {
  struct answer answer;
  OB_TRY(receive_all(state, file, &answer, sizeof answer));
  if (answer.magic != GREETING_MAGIC)
    return ONEBIT_IN_PROGRESS;
  answer.text[sizeof answer.text - 1] = '\0';
  if (answer.status != ONEBIT_OK)
    return ob_error((onebit_status_t)answer.status, "sockets: %s", answer.text);
  if (answer.version != GREETING_VERSION || answer.streams < 1 ||
      answer.streams > ONEBIT_SOCKETS_STREAMS)
    return ob_error(ONEBIT_ERROR_TRANSPORT, "sockets: rank 0 has another version of the library");
  state->streams = answer.streams;
  memcpy(state->key, answer.key, sizeof state->key);
  return receive_all(state, file, state->addresses, (size_t)state->size * OB_ADDRESS_BYTES);
}

/* ONEBIT_IN_PROGRESS: rank 0 is not there yet, or something else is. */
static onebit_status_t try_join(struct rendezvous *state, const struct ob_address *at) {
  int file = try_connect(state, at);
  if (file < 0)
    return ONEBIT_IN_PROGRESS;
  struct greeting greeting = greet(state, JOIN, 0);
  memcpy(greeting.key, state->secret, sizeof greeting.key);
  onebit_status_t status = open_own(state, file, greeting.address);
  if (status == ONEBIT_OK)
    status =
        send_all(file, &greeting, sizeof greeting) ? read_table(state, file) : ONEBIT_IN_PROGRESS;
  close(file);
  return status;
}

static onebit_status_t join(struct rendezvous *state, const struct ob_address *at) {
  onebit_status_t status;
  while ((status = try_join(state, at)) == ONEBIT_IN_PROGRESS)
    if (pause_in(state, "sockets: rank 0 is not there") != ONEBIT_OK)
      return ob_error(ONEBIT_ERROR_TRANSPORT,
                      "sockets: waited %.3g s for rank 0 at %s: it does not listen there, or does "
                      "not have this secret",
                      state->timeout, state->options->rendezvous);
  ob_address_print(at, state->addresses[0]); /* as this rank reaches it */
  return status;
}

/* --- All with all ------------------------------------------------------------------------------*/

/* From a rank with a higher number. It hears that it was understood. */
static void accept_stream(struct rendezvous *state, struct visitor *visitor) {
  const struct greeting *greeting = &visitor->greeting;
  struct greeting answer = greet(state, STREAM, greeting->stream);
  if (greeting->kind != STREAM || memcmp(greeting->key, state->key, sizeof state->key) != 0 ||
      greeting->rank <= state->rank || greeting->rank >= state->size || greeting->stream < 0 ||
      greeting->stream > state->streams)
    return;
  if (send_all(visitor->file, &answer, sizeof answer) &&
      ob_sockets_adopt(state->sockets, greeting->rank, greeting->stream, visitor->file))
    visitor->file = -1;
}

/* A connection to a rank below: it connects, greets, and waits for the answer. */
struct attempt {
  struct visitor visitor;
  bool greeted, over;
};

static void fail_attempt(struct attempt *attempt) {
  send_away(&attempt->visitor);
  attempt->greeted = false;
  attempt->visitor.done = 0;
}

static void move_attempt(struct rendezvous *state, struct attempt *attempt, int rank, int stream) {
  struct visitor *visitor = &attempt->visitor;
  const struct greeting greeting = greet(state, STREAM, stream);
  struct ob_address to;
  if (!ob_address_scan(state->addresses[rank], &to))
    return; /* until the timeout, which names the rank */
  ob_address_set_scope(&to, &state->own);
  if (visitor->file < 0)
    visitor->file = socket(to.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (!attempt->greeted) {
    if (connect(visitor->file, (struct sockaddr *)&to.storage, to.length) < 0 && errno != EISCONN) {
      if (errno != EINPROGRESS && errno != EALREADY)
        fail_attempt(attempt);
      return;
    }
    attempt->greeted = send_all(visitor->file, &greeting, sizeof greeting);
    if (!attempt->greeted)
      fail_attempt(attempt);
    return;
  }
  if (has_greeted(visitor)) {
    if (visitor->greeting.rank == rank &&
        memcmp(visitor->greeting.key, state->key, sizeof state->key) == 0 &&
        ob_sockets_adopt(state->sockets, rank, stream, visitor->file)) {
      attempt->over = true;
      visitor->file = -1;
      return;
    }
    fail_attempt(attempt);
  } else if (visitor->file < 0) {
    fail_attempt(attempt);
  }
}

/* The first rank that is not connected yet; -1: none. */
static int first_apart(const struct rendezvous *state) {
  for (int rank = 0; rank < state->size; rank++)
    for (int i = 0; i <= state->streams && rank != state->rank; i++)
      if (state->sockets->links[rank].streams[i].file < 0)
        return rank;
  return -1;
}

static onebit_status_t connect_all(struct rendezvous *state, struct attempt *attempts) {
  int each = state->streams + 1, count = state->rank * each;
  for (int i = 0; i < count; i++)
    attempts[i].visitor.file = -1;
  onebit_status_t status = ONEBIT_OK;
  for (int apart; status == ONEBIT_OK && (apart = first_apart(state)) >= 0;) {
    look_at_door(state, accept_stream);
    for (int i = 0; i < count; i++)
      if (!attempts[i].over)
        move_attempt(state, &attempts[i], i / each, i % each);
    if (pause_in(state, "sockets: connections") != ONEBIT_OK)
      status = ob_error(ONEBIT_ERROR_TRANSPORT,
                        "sockets: waited %.3g s for the connections with rank %d at %.63s",
                        state->timeout, apart, state->addresses[apart]);
  }
  for (int i = 0; i < count; i++)
    send_away(&attempts[i].visitor);
  return status;
}

static onebit_status_t connect_ranks(struct rendezvous *state) {
  OB_TRY(ob_sockets_create(state->rank, state->size, state->streams, &state->sockets));
  size_t count = (size_t)state->rank * ((size_t)state->streams + 1);
  struct attempt *attempts = ob_allocate(count, sizeof *attempts);
  onebit_status_t status = ONEBIT_ERROR_MEMORY;
  if (attempts)
    status = connect_all(state, attempts);
  else
    ob_error(status, "no memory for %zu connections", count);
  ob_release(attempts);
  return status;
}

/* --- Rendezvous --------------------------------------------------------------------------------*/

static void leave(struct rendezvous *state) {
  for (int i = 0; i < VISITORS; i++)
    send_away(&state->visitors[i]);
  for (int rank = 0; state->joined && rank < state->size; rank++)
    if (state->joined[rank] >= 0)
      close(state->joined[rank]);
  if (state->listener >= 0)
    close(state->listener);
  ob_release(state->joined);
  ob_release(state->addresses);
}

static onebit_status_t run_rendezvous(struct rendezvous *state) {
  const char *secret = state->options->secret ? state->options->secret : "";
  struct ob_address at;
  size_t size = (size_t)state->size;
  OB_TRY(ob_address_resolve(state->options->rendezvous, &at));
  state->secret[0] = ob_hash(OB_HASH_START, secret, strlen(secret));
  state->secret[1] = ob_hash(~state->secret[0], secret, strlen(secret));
  state->joined = ob_allocate(size, sizeof *state->joined);
  state->addresses = ob_allocate(size, sizeof *state->addresses);
  if (!state->joined || !state->addresses) {
    ob_release(state->joined);
    state->joined = NULL;
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for the addresses of %zu ranks", size);
  }
  for (int rank = 0; rank < state->size; rank++)
    state->joined[rank] = -1;
  OB_TRY(state->rank == 0 ? gather_ranks(state, &at) : join(state, &at));
  return connect_ranks(state);
}

onebit_status_t ob_sockets_connect(const onebit_sockets_options_t *options, double timeout,
                                   struct ob_sockets **sockets) {
  struct rendezvous *state = ob_allocate(1, sizeof *state);
  *sockets = NULL;
  if (!state)
    return ob_error(ONEBIT_ERROR_MEMORY, "no memory for a communicator");
  *state = (struct rendezvous){.options = options,
                               .rank = options->rank,
                               .size = options->ranks,
                               .streams = options->streams,
                               .listener = -1,
                               .timeout = timeout};
  for (int i = 0; i < VISITORS; i++)
    state->visitors[i].file = -1;
  onebit_status_t status = state->size > 1
                               ? run_rendezvous(state)
                               : ob_sockets_create(0, 1, options->streams, &state->sockets);
  leave(state);
  if (status == ONEBIT_OK)
    *sockets = state->sockets;
  else
    ob_sockets_destroy(state->sockets);
  ob_release(state);
  return status;
}
