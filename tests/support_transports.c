/* Communicators over a custom transport, whose ranks are threads, and over sockets. */
#include "tests/support_transports.h"

#include <sys/socket.h>

#include "tests/support_ports.h"

/* ---- A custom transport ---- */

#define FAULT_CODE (-77)
#define DEAD_CODE  (-78)

/* A message in flight, or a pending receive. A receive matches a message with the same sender,
 * receiver and tag. */
struct letter {
  struct letter *next;
  int from, to, tag;
  size_t bytes;
  unsigned char *data; /* for a message, a copy of its bytes; for a receive, the library's buffer */
};

struct hub {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  struct letter *letters; /* messages, in the order in which they were sent */
  struct letter *wanted;  /* receives that are not complete, in the order in which they were
                           * started */
  struct custom_fault fault;
  long calls; /* the number of calls of the fault's kind on the fault's rank */
  long open;  /* the number of receives that are neither complete nor cancelled */
  long aborts, releases;
  bool dead;
};

struct member {
  struct hub *hub;
  int rank, size;
  custom_attempt *attempt;
  void *argument;
  onebit_transport_callbacks_t callbacks;
};

static void append_letter(struct letter **list, struct letter *letter) {
  while (*list)
    list = &(*list)->next;
  *list = letter;
}

static void unlink_letter(struct letter **list, struct letter *letter) {
  while (*list != letter)
    list = &(*list)->next;
  *list = letter->next;
}

static struct letter *letter_create(int from, int to, int tag, size_t bytes) {
  struct letter *letter = allocate(1, sizeof *letter);
  *letter = (struct letter){.from = from, .to = to, .tag = tag, .bytes = bytes};
  return letter;
}

static bool letters_match(const struct letter *a, const struct letter *b) {
  return a->from == b->from && a->to == b->to && a->tag == b->tag;
}

/* True if this is the call that must fail. The caller holds the lock. */
static bool is_faulty_call(const struct member *member, enum custom_call call) {
  struct hub *hub = member->hub;
  if (hub->fault.call != call || hub->fault.rank != member->rank)
    return false;
  return ++hub->calls == hub->fault.at && hub->fault.at > 0;
}

static int send_letter(void *context, const void *data, size_t bytes, int peer, int tag,
                       void **operation) {
  struct member *member = context;
  struct hub *hub = member->hub;
  pthread_mutex_lock(&hub->lock);
  bool fails = is_faulty_call(member, CUSTOM_SEND), longer = fails && hub->fault.longer;
  int code = hub->dead ? DEAD_CODE : fails && !longer ? FAULT_CODE : 0;
  if (code == 0) {
    struct letter *letter = letter_create(member->rank, peer, tag, bytes + longer);
    letter->data = allocate(bytes + 1, 1);
    memcpy(letter->data, data, bytes);
    append_letter(&hub->letters, letter);
    pthread_cond_broadcast(&hub->changed);
  }
  pthread_mutex_unlock(&hub->lock);
  *operation = NULL;
  return code;
}

static int receive_letter(void *context, void *data, size_t bytes, int peer, int tag,
                          void **operation) {
  struct member *member = context;
  struct hub *hub = member->hub;
  pthread_mutex_lock(&hub->lock);
  int code = hub->dead ? DEAD_CODE : is_faulty_call(member, CUSTOM_RECEIVE) ? FAULT_CODE : 0;
  if (code == 0) {
    struct letter *wanted = letter_create(peer, member->rank, tag, bytes);
    wanted->data = data;
    append_letter(&hub->wanted, wanted);
    hub->open++;
    *operation = wanted;
  }
  pthread_mutex_unlock(&hub->lock);
  return code;
}

/* Returns the message for a receive: the first message that it matches. If an older receive has the
 * same sender, receiver and tag, returns NULL. */
static struct letter *find_message(struct hub *hub, struct letter *wanted) {
  for (struct letter *older = hub->wanted; older != wanted; older = older->next)
    if (letters_match(older, wanted))
      return NULL;
  struct letter *letter = hub->letters;
  while (letter && !letters_match(letter, wanted))
    letter = letter->next;
  return letter;
}

static void wait_for_change(struct hub *hub, double seconds) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  long nanoseconds = until.tv_nsec + (long)(seconds * 1e9);
  until.tv_sec += nanoseconds / 1000000000;
  until.tv_nsec = nanoseconds % 1000000000;
  pthread_cond_timedwait(&hub->changed, &hub->lock, &until);
}

static void close_receive(struct hub *hub, struct letter *wanted) {
  unlink_letter(&hub->wanted, wanted);
  hub->open--;
  free(wanted);
}

static int test_letter(void *context, void *operation, double seconds, size_t *bytes) {
  struct member *member = context;
  struct hub *hub = member->hub;
  struct letter *wanted = operation, *letter = NULL;
  pthread_mutex_lock(&hub->lock);
  int code = is_faulty_call(member, CUSTOM_TEST) ? FAULT_CODE : 0;
  if (code == 0 && !hub->dead && !(letter = find_message(hub, wanted)) && seconds > 0) {
    wait_for_change(hub, seconds);
    letter = find_message(hub, wanted);
  }
  if (code == 0 && !letter)
    code = hub->dead ? DEAD_CODE : ONEBIT_IN_PROGRESS;
  if (code == 0) {
    *bytes = letter->bytes;
    memcpy(wanted->data, letter->data,
           letter->bytes < wanted->bytes ? letter->bytes : wanted->bytes);
    unlink_letter(&hub->letters, letter);
    free(letter->data);
    free(letter);
    close_receive(hub, wanted);
    pthread_cond_broadcast(&hub->changed);
  }
  pthread_mutex_unlock(&hub->lock);
  return code;
}

static void cancel_letter(void *context, void *operation) {
  struct hub *hub = ((struct member *)context)->hub;
  pthread_mutex_lock(&hub->lock);
  close_receive(hub, operation);
  pthread_mutex_unlock(&hub->lock);
}

static void abort_all(void *context) {
  struct hub *hub = ((struct member *)context)->hub;
  pthread_mutex_lock(&hub->lock);
  hub->aborts++;
  hub->dead = true;
  pthread_cond_broadcast(&hub->changed);
  pthread_mutex_unlock(&hub->lock);
}

static const char *describe_code(void *context, int code) {
  (void)context;
  return code == FAULT_CODE ? "the wire was cut" : "the other end has gone";
}

static void release_member(void *context) {
  struct hub *hub = ((struct member *)context)->hub;
  pthread_mutex_lock(&hub->lock);
  hub->releases++;
  pthread_mutex_unlock(&hub->lock);
}

static void *member_main(void *argument) {
  struct member *member = argument;
  check_rank(member->rank);
  member->attempt(&member->callbacks, member->rank, member->size, member->argument);
  return NULL;
}

static onebit_transport_callbacks_t make_callbacks(struct member *member, const char *host) {
  onebit_transport_callbacks_t callbacks = ONEBIT_TRANSPORT_CALLBACKS_INIT;
  bool quiet = member->hub->fault.quiet;
  callbacks.context = member;
  callbacks.send = send_letter;
  callbacks.receive = receive_letter;
  callbacks.test = test_letter;
  callbacks.cancel = cancel_letter;
  callbacks.abort = quiet ? NULL : abort_all;
  callbacks.message = quiet ? NULL : describe_code;
  callbacks.release = release_member;
  callbacks.host = host;
  callbacks.timeout = quiet ? 1 : 0;
  return callbacks;
}

long try_on_custom(int size, int hosts, struct custom_fault fault, custom_attempt *attempt,
                   void *argument) {
  struct hub hub = {.fault = fault};
  struct member *members = allocate((size_t)size, sizeof *members);
  pthread_t *threads = allocate((size_t)size, sizeof *threads);
  pthread_mutex_init(&hub.lock, NULL);
  pthread_cond_init(&hub.changed, NULL);
  for (int rank = 0; rank < size; rank++) {
    char host[32];
    snprintf(host, sizeof host, "host %d", rank * hosts / size);
    members[rank] = (struct member){&hub, rank, size, attempt, argument, {0}};
    members[rank].callbacks = make_callbacks(&members[rank], strdup(host));
    cr_assert_eq(pthread_create(&threads[rank], NULL, member_main, &members[rank]), 0);
  }
  for (int rank = 0; rank < size; rank++) {
    pthread_join(threads[rank], NULL);
    free((void *)(uintptr_t)members[rank].callbacks.host);
  }
  CHECK(hub.open == 0, "%ld operations are neither complete nor cancelled", hub.open);
  CHECK(hub.aborts <= size, "%ld times aborted by %d ranks", hub.aborts, size);
  for (struct letter *letter = hub.letters, *next; letter; letter = next) {
    next = letter->next;
    free(letter->data);
    free(letter);
  }
  pthread_mutex_destroy(&hub.lock);
  pthread_cond_destroy(&hub.changed);
  free(threads);
  free(members);
  return hub.calls;
}

struct custom_body {
  rank_body *body;
  void *context;
};

static void create_and_run(const onebit_transport_callbacks_t *callbacks, int rank, int size,
                           void *argument) {
  const struct custom_body *what = argument;
  onebit_comm_t comm = NULL;
  if (!CHECK_STATUS(onebit_comm_create_custom(callbacks, rank, size, &comm), ONEBIT_OK))
    return;
  what->body(comm, what->context);
  onebit_comm_destroy(comm);
}

void on_custom(int size, int hosts, rank_body *body, void *context) {
  struct custom_body what = {body, context};
  try_on_custom(size, hosts, (struct custom_fault){0}, create_and_run, &what);
  checks_must_hold();
}

/* ---- Sockets ---- */

struct socket_rank {
  onebit_sockets_options_t options;
  sockets_body *body;
  void *context;
};

static void *run_socket_rank(void *argument) {
  struct socket_rank *socket_rank = argument;
  socket_rank->body(&socket_rank->options, socket_rank->context);
  return NULL;
}

void sockets_attempt(int size, int hosts, int streams, sockets_body *body, void *context) {
  static const char *const names[SOCKETS_RANKS] = {"h0", "h1", "h2", "h3"};
  struct socket_rank members[SOCKETS_RANKS];
  pthread_t threads[SOCKETS_RANKS];
  char where[64];
  snprintf(where, sizeof where, "127.0.0.1:%d", port_reserve(AF_INET, NULL));
  for (int rank = 0; rank < size; rank++) {
    members[rank] = (struct socket_rank){ONEBIT_SOCKETS_OPTIONS_INIT, body, context};
    members[rank].options.rank = rank;
    members[rank].options.ranks = size;
    members[rank].options.rendezvous = where;
    members[rank].options.streams = streams;
    members[rank].options.timeout = 20;
    members[rank].options.secret = "of this test";
    members[rank].options.host = names[rank * hosts / size];
    cr_assert(pthread_create(&threads[rank], NULL, run_socket_rank, &members[rank]) == 0);
  }
  for (int rank = 0; rank < size; rank++)
    pthread_join(threads[rank], NULL);
}
