/* Tests onebit-info, onebit status, and the network of onebit-relay. */
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "base/knobs.h"
#include "compression/codec.h"
#include "tests/support.h"
#include "tests/support_transports.h"
#include "tools/relay/network.h"

/* onebit-info prints what is available and what is chosen, and refuses the values that the library
 * refuses. */

static void clear_environment(void) {
  unsetenv("ONEBIT_CODEC");
  unsetenv("ONEBIT_THREADS");
}
TestSuite(info, .init = clear_environment, .timeout = 60);

Test(info, says_what_is_there) {
  const char *said = program(0, "onebit-info");
  expect_output(said, onebit_version());
  for (size_t i = 0; ob_codec_row(i); i++)
    expect_output(said, ob_codec_row(i)->name);
  for (size_t k = 0; k < OB_KNOB_COUNT; k++) {
    expect_output(said, ob_knobs[k].name);
    expect_output(said, ob_knobs[k].meaning);
    expect_output(said, ob_knobs[k].fallback);
  }
  expect_output(said, "usable, chosen\n");
  cr_expect(!strstr(said, "environment"), "%s", said);
}

/* A build with CUDA may run on a machine without a GPU. onebit-info then says so, and does not
 * fail. */
Test(info, says_whether_there_is_a_device) {
  const char *said = program(0, "onebit-info");
#ifndef ONEBIT_HAVE_CUDA
  expect_output(said, "CUDA              built without CUDA\n");
#else
  expect_output(said, "CUDA              runtime ");
  cr_expect(strstr(said, "; no device: ") || strstr(said, "  device 0"), "%s", said);
#ifdef ONEBIT_HAVE_NCCL
  expect_output(said, "NCCL              2.");
#else
  expect_output(said, "NCCL              built without NCCL\n");
#endif
#endif
}

Test(info, says_where_a_value_comes_from) {
  setenv("ONEBIT_CODEC", "scalar", 1);
  const char *said = program(0, "onebit-info");
  expect_output(said, "scalar          usable, chosen\n");
  expect_output(said, "ONEBIT_CODEC    scalar   environment");
  expect_output(said, "ONEBIT_THREADS  1        default");
  setenv("ONEBIT_THREADS", "3", 1);
  said = program(0, "onebit-info");
  expect_output(said, "ONEBIT_THREADS  3        environment");
  cr_expect(!strstr(said, "ONEBIT_THREADS: "), "%s", said);
  setenv("ONEBIT_THREAD", "3", 1);
  expect_output(program(0, "onebit-info"), "  ONEBIT_THREAD: the C library does not read it\n");
}

Test(info, refuses_a_wrong_value_in_place) {
  setenv("ONEBIT_CODEC", "abacus", 1);
  const char *said = program(1, "onebit-info");
  expect_output(said, "ONEBIT_CODEC    abacus   environment");
  expect_output(said, "wrong: ONEBIT_CODEC=abacus: codec abacus is unknown");
  expect_output(said, "ONEBIT_THREADS  1        default");
  cr_expect(!strstr(said, "chosen\n"), "%s", said);
  unsetenv("ONEBIT_CODEC");
  setenv("ONEBIT_THREADS", "many", 1);
  said = program(1, "onebit-info");
  expect_output(said, "usable, chosen\n");
  expect_output(said, "wrong: ONEBIT_THREADS=many: not a whole number");
}

Test(info, takes_no_arguments) {
  expect_output(program(0, "onebit-info --help"), "usage: onebit-info");
  expect_output(program(2, "onebit-info --all"), "--all");
}

/* `onebit status` lists ranks while they wait, with the rank for which they wait. */

/* Reads the lines that `onebit status` prints about this process. */
static void read_status(char text[4096]) {
  char line[1024], own[32];
  FILE *pipe = popen("tools/onebit status", "r");
  size_t length = 0;
  cr_assert(pipe);
  *text = '\0';
  snprintf(own, sizeof own, "%ld ", (long)getpid());
  while (fgets(line, sizeof line, pipe))
    if (strncmp(line, own, strlen(own)) == 0)
      length += (size_t)snprintf(text + length, 4096 - length, "%s", line);
  cr_assert(pclose(pipe) == 0);
}

static bool await_text(const char *wanted) {
  char text[4096] = "";
  for (int k = 0; k < 300; k++) {
    read_status(text);
    if (strstr(text, wanted))
      return true;
    nanosleep(&(struct timespec){0, 100000000}, NULL);
  }
  return cr_log_error("\"%s\" is not in: %s", wanted, text), false;
}

static pthread_barrier_t barrier;

/* Rank 1 starts late, and makes its call late. */
static void start_and_call_late(onebit_sockets_options_t *options, void *context) {
  float value = 1;
  onebit_comm_t comm = NULL;
  onebit_plan_t plan = NULL;
  (void)context;
  options->timeout = 100;
  if (options->rank == 1)
    CHECK(await_text("rank 0 of 2 over sockets: sockets: 127.0.0.1:"), "no rank 0");
  if (options->rank == 1)
    CHECK(await_text(" s for rank 1 to join"), "it does not wait");
  CHECK_STATUS(onebit_comm_create_sockets(options, &comm), ONEBIT_OK);
  CHECK_STATUS(onebit_plan_create(comm, 1, NULL, &plan), ONEBIT_OK);
  if (options->rank == 1)
    CHECK(await_text("rank 0 of 2 over sockets: allreduce call 1 of plan 1 (4 bytes): waiting "),
          "rank 0 does not wait");
  CHECK_STATUS(onebit_allreduce(&value, &value, plan), ONEBIT_OK);
  pthread_barrier_wait(&barrier);
  if (options->rank == 1)
    CHECK(await_text("rank 1 of 2 over sockets: it has not waited for a rank in the last "),
          "it waits");
  pthread_barrier_wait(&barrier);
  onebit_plan_destroy(plan);
  onebit_comm_destroy(comm);
}

/* Simulates another `onebit status` that holds the first file that a rank would use. */
Test(presence, ranks_that_wait_are_listed) {
  char text[4096];
  snprintf(text, sizeof text, "/tmp/onebit-%lu", (unsigned long)geteuid());
  mkdir(text, 0700);
  snprintf(text, sizeof text, "/tmp/onebit-%lu/%ld-1", (unsigned long)geteuid(), (long)getpid());
  int locked = open(text, O_WRONLY | O_CREAT, 0600);
  cr_assert(flock(locked, LOCK_EX | LOCK_NB) == 0);
  pthread_barrier_init(&barrier, NULL, 2);
  sockets_attempt(2, 1, 1, start_and_call_late, NULL);
  checks_must_hold();
  close(locked);
  read_status(text);
  cr_expect_str_eq(text, "");
}

/* The file of a process that was killed is removed. */
Test(presence, a_dead_process_is_not_listed) {
  char path[64], command[128];
  snprintf(path, sizeof path, "/tmp/onebit-%lu/%ld-999", (unsigned long)geteuid(), (long)getpid());
  snprintf(command, sizeof command, "mkdir -p -m 700 /tmp/onebit-%lu && echo rank >%s",
           (unsigned long)geteuid(), path);
  cr_assert(system(command) == 0);
  char text[4096];
  read_status(text);
  cr_expect_str_eq(text, "");
  cr_expect(access(path, F_OK) != 0);
}

/* Tests the network of onebit-relay, with a clock that the tests advance: rates, delay, losses and
 * queues. */

/* With its header a packet has 1000 bytes, which a link of 1 MB/s sends in 1 ms. */
enum { BYTES = 1000 - RELAY_HEADER };
#define MS ((uint64_t)1000000)

static struct relay_network network;
static const unsigned char data[BYTES] = {1, 2, 3};

static void make_network(int hosts, double rate) {
  cr_assert(relay_network_create(&network, hosts));
  for (int i = 0; i < hosts; i++)
    network.links[i].bytes_per_second = rate;
}

static void send_packet(int from, int to, uint64_t time) {
  relay_network_send(&network, from, to, data, BYTES, time);
}

/* Expects that the next packet arrives exactly at this time, and not a nanosecond earlier. */
static void expect_packet(uint64_t time, int from, int to) {
  uint64_t next;
  while ((next = relay_network_next_time(&network)) < time)
    cr_assert_null(relay_network_receive(&network, next));
  struct relay_packet *packet = relay_network_receive(&network, time - 1);
  cr_assert_null(packet, "a packet came before %g ms", (double)time / MS);
  packet = relay_network_receive(&network, time);
  cr_assert_not_null(packet, "no packet at %g ms", (double)time / MS);
  cr_expect_eq(packet->from, from);
  cr_expect_eq(packet->to, to);
  cr_expect_arr_eq(packet->data, data, BYTES);
  free(packet);
}

static void expect_no_packet(void) {
  cr_expect_null(relay_network_receive(&network, (uint64_t)1 << 62));
  cr_expect_eq(relay_network_next_time(&network), RELAY_NEVER);
}

static size_t count_received(int packets) {
  size_t received = 0;
  for (int i = 0; i < packets; i++)
    send_packet(0, 1, (uint64_t)i);
  for (struct relay_packet *packet; (packet = relay_network_receive(&network, 1000 * MS));) {
    received++;
    free(packet);
  }
  return received;
}

static void destroy_network(void) { relay_network_destroy(&network); }

TestSuite(relay, .fini = destroy_network);

Test(relay, packets_follow_each_other_at_the_rate_and_after_the_delay) {
  make_network(2, 1e6);
  network.delay = 40 * MS;
  send_packet(0, 1, 5 * MS);
  send_packet(0, 1, 5 * MS);
  send_packet(0, 1, 50 * MS);
  expect_packet(47 * MS, 0, 1); /* in ms: 1 up, 40 delay, 1 down */
  expect_packet(48 * MS, 0, 1);
  expect_packet(92 * MS, 0, 1);
  expect_no_packet();
}

Test(relay, the_link_of_the_receiver_is_shared_and_each_way_is_its_own) {
  make_network(3, 1e6);
  send_packet(0, 2, 0);
  send_packet(1, 2, 0);
  send_packet(2, 0, 0);
  expect_packet(2 * MS, 2, 0);
  expect_packet(2 * MS, 0, 2);
  expect_packet(3 * MS, 1, 2);
  expect_no_packet();
}

Test(relay, a_slow_link_holds_up_its_own_packets_only) {
  make_network(3, 1e6);
  network.links[1].bytes_per_second = 1e5;
  send_packet(0, 1, 0);
  send_packet(0, 2, 0);
  expect_packet(3 * MS, 0, 2);
  expect_packet(11 * MS, 0, 1);
}

Test(relay, without_a_rate_only_the_delay_counts) {
  make_network(2, 0);
  network.delay = 7 * MS;
  network.queue = 1;
  send_packet(0, 1, 0);
  send_packet(0, 1, 0);
  expect_packet(7 * MS, 0, 1);
  expect_packet(7 * MS, 0, 1);
}

Test(relay, a_full_queue_loses_what_comes) {
  make_network(2, 1e6);
  network.queue = 2000;
  cr_expect_eq(count_received(10), 3); /* one packet is being sent, and two wait */
}

Test(relay, losses_are_as_many_as_asked_for_and_the_same_with_the_same_seed) {
  size_t received[3];
  for (int i = 0; i < 3; i++) {
    make_network(2, 0);
    network.loss = 0.1;
    network.seed = i < 2 ? 7 : 8;
    received[i] = count_received(10000);
    relay_network_destroy(&network);
  }
  cr_expect_eq(received[0], received[1]);
  cr_expect_neq(received[0], received[2]);
  for (int i = 0; i < 3; i++) /* within 4 standard deviations, each of 30 */
    cr_expect(received[i] > 8880 && received[i] < 9120, "%zu", received[i]);
}

Test(relay, a_host_that_has_vanished_sends_and_receives_nothing) {
  make_network(3, 1e6);
  network.delay = 10 * MS;
  send_packet(0, 1, 0); /* the packet is on its way when the host vanishes */
  network.links[1].vanished = true;
  send_packet(1, 0, 1 * MS);
  send_packet(2, 1, 1 * MS);
  send_packet(0, 2, 1 * MS);
  expect_packet(13 * MS, 0, 2);
  expect_no_packet();
  network.links[1].vanished = false;
  send_packet(0, 1, 20 * MS);
  expect_packet(32 * MS, 0, 1);
}

Test(relay, what_is_under_way_is_given_back) {
  make_network(2, 1e6);
  send_packet(0, 1, 0);
  send_packet(1, 0, 0);
}
