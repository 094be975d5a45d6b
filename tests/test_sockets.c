/*
 * Tests communicators over the library's own connections. Results have the same bits as those of
 * loopback communicators. If a rank is lost or never comes, or if another program connects to the
 * port, every rank must get a status and an error message, and none may hang.
 */
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "collectives/transports/sockets_state.h"
#include "tests/support_collectives.h"
#include "tests/support_errors.h"
#include "tests/support_ports.h"
#include "tests/support_requests.h"
#include "tests/support_transports.h"

struct whole {
  rank_body *body;
  void *context;
};

static void create_and_run(onebit_sockets_options_t *options, void *context) {
  const struct whole *whole = context;
  onebit_comm_t comm = NULL;
  if (!CHECK_STATUS(onebit_comm_create_sockets(options, &comm), ONEBIT_OK))
    return;
  whole->body(comm, whole->context);
  onebit_comm_destroy(comm);
}

static void run_on_streams(int size, int hosts, int streams, rank_body *body, void *context) {
  struct whole whole = {body, context};
  sockets_attempt(size, hosts, streams, create_and_run, &whole);
  checks_must_hold();
}

static void run_on_sockets(int size, int hosts, rank_body *body, void *context) {
  run_on_streams(size, hosts, hosts > 1 ? 8 : 1 + size % 3, body, context);
}

/* --- Tests that also run over loopback
 * --------------------------------------------------------- */

Test(sockets, collectives_equal_the_oracle) {
  collectives_over("sockets", run_on_sockets, SIZE_MAX);
}

static void do_nothing(onebit_comm_t comm, void *context) { (void)comm, (void)context; }

Test(sockets, info_counts_the_hosts) {
  char text[1024] = "", path[] = "/tmp/onebit-log-XXXXXX";
  int file = mkstemp(path);
  setenv("ONEBIT_DEBUG", "INFO", 1);
  setenv("ONEBIT_DEBUG_FILE", path, 1);
  run_on_streams(3, 3, 1, do_nothing, NULL);
  cr_assert(pread(file, text, sizeof text - 1, 0) > 0);
  unlink(path);
  for (int rank = 0; rank < 3; rank++) {
    char wanted[80];
    snprintf(wanted, sizeof wanted, " rank %d: communicator of 3 ranks on 3 hosts over sockets\n",
             rank);
    cr_expect(strstr(text, wanted), "%s", text);
  }
}

Test(sockets, requests_in_flight) { flights_over(run_on_sockets); }

Test(sockets, mistakes_are_told_to_all) {
  struct culprit culprit = {.rank = 2};
  run_on_sockets(3, 1, wrong_buffers_on_one_rank, &culprit);
  run_on_sockets(3, 1, wrong_plan_on_one_rank, &culprit);
  run_on_sockets(3, 1, other_plan_on_one_rank, &culprit);
}

static void connect_over_ipv6(onebit_sockets_options_t *options, void *context) {
  onebit_comm_t comm = NULL;
  options->rendezvous = context;
  CHECK_STATUS(onebit_comm_create_sockets(options, &comm), ONEBIT_OK);
  CHECK(onebit_comm_size(comm) == 2 && onebit_comm_hosts(comm) == 2, "%d ranks on %d hosts",
        onebit_comm_size(comm), onebit_comm_hosts(comm));
  onebit_comm_destroy(comm);
}

/* Finds a link-local address of this machine, with its interface. */
static bool find_link_local(char host[128]) {
  struct ifaddrs *all, *entry = NULL;
  if (getifaddrs(&all) != 0)
    return false;
  for (entry = all; entry; entry = entry->ifa_next) {
    const struct sockaddr_in6 *six = (const struct sockaddr_in6 *)entry->ifa_addr;
    if (six && six->sin6_family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&six->sin6_addr) &&
        entry->ifa_flags & IFF_UP &&
        getnameinfo(entry->ifa_addr, sizeof *six, host, 128, NULL, 0, NI_NUMERICHOST) == 0)
      break;
  }
  freeifaddrs(all);
  return entry != NULL;
}

Test(sockets, over_ipv6) {
  char where[160], host[128];
  int file = socket(AF_INET6, SOCK_STREAM, 0);
  struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_addr = in6addr_loopback};
  bool there = file >= 0 && bind(file, (struct sockaddr *)&any, sizeof any) == 0;
  close(file);
  if (!there)
    cr_skip_test("no IPv6 here");
  snprintf(where, sizeof where, "[::1]:%d", port_reserve(AF_INET6, NULL));
  sockets_attempt(2, 2, 2, connect_over_ipv6, where);
  if (find_link_local(host)) {
    snprintf(where, sizeof where, "[%s]:%d", host, port_reserve(AF_INET6, NULL));
    sockets_attempt(2, 2, 2, connect_over_ipv6, where);
  }
}

Test(sockets, from_the_environment) {
  onebit_comm_t comm = NULL;
  unsetenv("WORLD_SIZE");
  CHECK_STATUS(onebit_comm_create_sockets(NULL, &comm), ONEBIT_ERROR_ARGUMENT);
  CHECK_WORDS("WORLD_SIZE");
  setenv("WORLD_SIZE", "1", 1);
  setenv("RANK", "0", 1);
  CHECK_STATUS(onebit_comm_create_sockets(NULL, &comm), ONEBIT_OK);
  CHECK(onebit_comm_size(comm) == 1, "%d ranks", onebit_comm_size(comm));
  onebit_comm_destroy(comm);
  setenv("WORLD_SIZE", "2", 1);
  unsetenv("MASTER_ADDR");
  CHECK_STATUS(onebit_comm_create_sockets(NULL, &comm), ONEBIT_ERROR_ARGUMENT);
  CHECK_WORDS("MASTER_ADDR");
}

/* --- How ranks find each other
 * ----------------------------------------------------------------- */

Test(sockets, the_port_is_taken) {
  onebit_comm_t comm = NULL;
  char where[64];
  int keep;
  snprintf(where, sizeof where, "127.0.0.1:%d", port_reserve(AF_INET, &keep));
  cr_assert(listen(keep, 16) == 0);
  onebit_sockets_options_t options = {
      .size = sizeof options, .ranks = 2, .rendezvous = where, .timeout = 1};
  CHECK_STATUS(onebit_comm_create_sockets(&options, &comm), ONEBIT_ERROR_TRANSPORT);
  CHECK_WORDS("cannot listen at 127.0.0.1:");
  CHECK_WORDS("Address already in use: another program or job uses this port");
  options.rank = 1; /* the program that listens at the port does not answer */
  CHECK_STATUS(onebit_comm_create_sockets(&options, &comm), ONEBIT_ERROR_TRANSPORT);
  CHECK_WORDS("waited 1 s for rank 0's list of all ranks");
  close(keep);
  CHECK_STATUS(onebit_comm_create_sockets(&options, &comm), ONEBIT_ERROR_TRANSPORT);
  CHECK_WORDS("waited 1 s for rank 0, which does not listen there (127.0.0.1 ");
  CHECK_WORDS("Connection refused");
}

static void join_without_rank_2(onebit_sockets_options_t *options, void *context) {
  onebit_comm_t comm = NULL;
  (void)context;
  if (options->rank == 2)
    return;
  options->timeout = 2;
  CHECK_STATUS(onebit_comm_create_sockets(options, &comm), ONEBIT_ERROR_TRANSPORT);
  if (options->rank == 0)
    CHECK_WORDS("waited 2 s for rank 2 to join");
}

Test(sockets, a_rank_that_never_comes) { sockets_attempt(3, 1, 2, join_without_rank_2, NULL); }

static void join_with_other_size(onebit_sockets_options_t *options, void *context) {
  onebit_comm_t comm = NULL;
  (void)context;
  options->ranks += options->rank;
  CHECK_STATUS(onebit_comm_create_sockets(options, &comm), ONEBIT_ERROR_MISMATCH);
  CHECK_WORDS("2 on rank 0, 3 on rank 1");
}

static void join_with_other_secret(onebit_sockets_options_t *options, void *context) {
  onebit_comm_t comm = NULL;
  (void)context;
  options->timeout = options->rank == 0 ? 3 : 2.5; /* rank 0 waits in vain */
  options->secret = options->rank == 1 ? "guessed" : "chosen";
  CHECK_STATUS(onebit_comm_create_sockets(options, &comm), ONEBIT_ERROR_TRANSPORT);
  CHECK_WORDS(options->rank == 1 ? "another job: its options->secret differs from this rank's"
                                 : "for rank 1 to join");
}

Test(sockets, ranks_that_do_not_belong_together) {
  sockets_attempt(2, 1, 2, join_with_other_size, NULL);
  sockets_attempt(2, 1, 2, join_with_other_secret, NULL);
}

/* Rank 1 starts late. Before it starts, other programs connect to rank 0's port and send wrong
 * data, or nothing. */
static void join_among_strangers(onebit_sockets_options_t *options, void *context) {
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
  unsigned char bytes[300];
  int files[20];
  onebit_comm_t comm = NULL;
  (void)context;
  memset(bytes, 0x5a, sizeof bytes);
  if (options->rank == 1) {
    to.sin_port = htons((uint16_t)atoi(strchr(options->rendezvous, ':') + 1));
    for (int i = 0; i < 20; i++) {
      files[i] = socket(AF_INET, SOCK_STREAM, 0);
      while (connect(files[i], (struct sockaddr *)&to, sizeof to) != 0)
        usleep(1000);
      (void)!send(files[i], bytes, i % 2 ? sizeof bytes : (size_t)i, MSG_NOSIGNAL);
    }
  }
  CHECK_STATUS(onebit_comm_create_sockets(options, &comm), ONEBIT_OK);
  for (int i = 0; options->rank == 1 && i < 20; i++)
    close(files[i]);
  onebit_comm_destroy(comm);
}

Test(sockets, strangers_are_turned_away) { sockets_attempt(2, 1, 2, join_among_strangers, NULL); }

/* --- Failures ----------------------------------------------------------------------------------*/

/* Rank 1 destroys its communicator, or aborts, or is late. The others wait for it in a call. */
enum leaving { DESTROYS, ABORTS, STAYS_AWAY };

static pthread_barrier_t together; /* for all ranks; the communicator cannot synchronise them */

static void let_rank_1_leave(onebit_sockets_options_t *options, void *context) {
  static const char *const words[] = {"rank 1 on host h", "rank 1 called onebit_comm_abort",
                                      "waited 2 s for rank 1"};
  enum leaving how = *(enum leaving *)context;
  float values[4096] = {1.0f};
  onebit_comm_t comm = NULL;
  onebit_plan_t plan = NULL;
  CHECK_STATUS(onebit_comm_create_sockets(options, &comm), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_create(comm, 4096, NULL, &plan), ONEBIT_OK);
  pthread_barrier_wait(&together); /* otherwise an abort could end the plan creation of another
                                    * rank */
  if (how == STAYS_AWAY)
    comm->timeout = 2;
  if (options->rank == 1) {
    if (how == ABORTS)
      CHECK_STATUS(onebit_comm_abort(comm), ONEBIT_OK);
  } else {
    CHECK_STATUS(onebit_allreduce(values, values, plan), ONEBIT_ERROR_TRANSPORT);
    CHECK(strstr(onebit_last_error(), words[how]) || strstr(onebit_last_error(), "gave up"),
          "\"%s\"", onebit_last_error());
    CHECK_STATUS(onebit_allreduce(values, values, plan), ONEBIT_ERROR_TRANSPORT);
  }
  if (how == STAYS_AWAY)
    pthread_barrier_wait(&together);
  onebit_plan_destroy(plan);
  onebit_comm_destroy(comm);
}

Test(sockets, a_rank_that_leaves) {
  enum leaving all[] = {DESTROYS, ABORTS, STAYS_AWAY};
  pthread_barrier_init(&together, NULL, 3);
  for (int i = 0; i < 3; i++)
    sockets_attempt(3, 3, 3, let_rank_1_leave, &all[i]);
}

/* --- Segments ----------------------------------------------------------------------------------*/

/* Returns the smallest number of segments of a message. */
static uint64_t min_segments(uint64_t total, uint64_t streams, size_t min_share) {
  const uint64_t whole = total / min_share;
  return whole < streams ? whole : streams;
}

static void cut_message(uint64_t total, int streams, size_t min_share) {
  uint64_t given = 0, segments = 0;
  while (given < total) {
    size_t bytes = ob_segment_bytes(total, given, streams, min_share);
    struct ob_segment segment = {
        .total = total, .offset = given, .bytes = (uint32_t)bytes, .number = 7, .tag = 3};
    ob_segment_seal(&segment);
    cr_assert(bytes > 0 && bytes <= OB_SEGMENT_MAX && ob_segment_is_valid(&segment));
    given += bytes;
    segments++;
  }
  cr_assert(given == total);
  cr_assert(total < 1000000 || segments >= (uint64_t)(streams > 1 ? streams : 2));
  cr_assert(streams == 1 || segments >= min_segments(total, (uint64_t)streams, min_share));
  cr_assert(streams > 1 || total > OB_SEGMENT_MAX || segments <= 1);
}

Test(sockets, messages_are_cut_without_gaps) {
  const uint64_t totals[] = {
      0, 1, 4097, OB_SEGMENT_MIN, OB_SEGMENT_MIN + 1, 33000, 1000000, (UINT64_C(5) << 30) + 3};
  for (size_t k = 0; k < sizeof totals / sizeof totals[0]; k++)
    for (int streams = 1; streams <= ONEBIT_SOCKETS_STREAMS; streams *= 4) {
      cut_message(totals[k], streams, OB_SHARE_MIN);
      cut_message(totals[k], streams, OB_SEGMENT_MIN);
    }
}

Test(sockets, heads_that_lie_are_refused) {
  struct ob_segment good = {.total = UINT64_C(5) << 30, .offset = UINT64_C(4) << 30, .bytes = 100};
  ob_segment_seal(&good);
  cr_assert(ob_segment_is_valid(&good));
  for (size_t bit = 0; bit < 8 * sizeof good; bit++) {
    struct ob_segment wrong = good;
    ((unsigned char *)&wrong)[bit / 8] ^= (unsigned char)(1u << bit % 8);
    cr_assert(!ob_segment_is_valid(&wrong), "bit %zu", bit);
  }
  const struct ob_segment lies[] = {{.total = 10, .offset = 5, .bytes = 6},
                                    {.total = 10, .offset = 11, .bytes = 0},
                                    {.total = 10, .offset = 0, .bytes = 0},
                                    {.total = 10, .offset = UINT64_MAX, .bytes = 2},
                                    {.total = UINT64_MAX, .offset = 0, .bytes = 2},
                                    {.total = 2, .bytes = 2, .tag = -1},
                                    {.total = 1 << 30, .offset = 0, .bytes = OB_SEGMENT_MAX + 1}};
  for (size_t i = 0; i < sizeof lies / sizeof lies[0]; i++) {
    struct ob_segment lie = lies[i];
    ob_segment_seal(&lie);
    cr_assert(!ob_segment_is_valid(&lie), "lie %zu", i);
  }
}
