/* The network of onebit-relay, on a clock that the tests move: rates, delay, losses, queues. */
#include "tests/support.h"
#include "tools/relay/network.h"

/* With its header a packet is 1000 bytes, which a link of 1 MB/s sends in 1 ms. */
enum { BYTES = 1000 - RELAY_HEADER };
#define MS ((uint64_t)1000000)

static struct relay_network network;
static const unsigned char data[BYTES] = {1, 2, 3};

static void make(int hosts, double rate) {
  cr_assert(relay_network_create(&network, hosts));
  for (int i = 0; i < hosts; i++)
    network.links[i].bytes_per_second = rate;
}

static void send(int from, int to, uint64_t time) {
  relay_network_send(&network, from, to, data, BYTES, time);
}

/* The next one comes at this moment and not a nanosecond before. */
static void expect(uint64_t time, int from, int to) {
  uint64_t next;
  while ((next = relay_network_next(&network)) < time)
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

static void expect_none(void) {
  cr_expect_null(relay_network_receive(&network, (uint64_t)1 << 62));
  cr_expect_eq(relay_network_next(&network), RELAY_NEVER);
}

static size_t received_of(int packets) {
  size_t received = 0;
  for (int i = 0; i < packets; i++)
    send(0, 1, (uint64_t)i);
  for (struct relay_packet *packet; (packet = relay_network_receive(&network, 1000 * MS));) {
    received++;
    free(packet);
  }
  return received;
}

static void destroy(void) { relay_network_destroy(&network); }

TestSuite(relay, .fini = destroy);

Test(relay, packets_follow_each_other_at_the_rate_and_after_the_delay) {
  make(2, 1e6);
  network.delay = 40 * MS;
  send(0, 1, 5 * MS);
  send(0, 1, 5 * MS);
  send(0, 1, 50 * MS);
  expect(47 * MS, 0, 1); /* 1 up, 40, 1 down */
  expect(48 * MS, 0, 1);
  expect(92 * MS, 0, 1);
  expect_none();
}

Test(relay, the_link_of_the_receiver_is_shared_and_each_way_is_its_own) {
  make(3, 1e6);
  send(0, 2, 0);
  send(1, 2, 0);
  send(2, 0, 0);
  expect(2 * MS, 2, 0);
  expect(2 * MS, 0, 2);
  expect(3 * MS, 1, 2);
  expect_none();
}

Test(relay, a_slow_link_holds_up_its_own_packets_only) {
  make(3, 1e6);
  network.links[1].bytes_per_second = 1e5;
  send(0, 1, 0);
  send(0, 2, 0);
  expect(3 * MS, 0, 2);
  expect(11 * MS, 0, 1);
}

Test(relay, without_a_rate_only_the_delay_counts) {
  make(2, 0);
  network.delay = 7 * MS;
  network.queue = 1;
  send(0, 1, 0);
  send(0, 1, 0);
  expect(7 * MS, 0, 1);
  expect(7 * MS, 0, 1);
}

Test(relay, a_full_queue_loses_what_comes) {
  make(2, 1e6);
  network.queue = 2000;
  cr_expect_eq(received_of(10), 3); /* one leaves, two wait */
}

Test(relay, losses_are_as_many_as_asked_for_and_the_same_with_the_same_seed) {
  size_t received[3];
  for (int i = 0; i < 3; i++) {
    make(2, 0);
    network.loss = 0.1;
    network.seed = i < 2 ? 7 : 8;
    received[i] = received_of(10000);
    relay_network_destroy(&network);
  }
  cr_expect_eq(received[0], received[1]);
  cr_expect_neq(received[0], received[2]);
  for (int i = 0; i < 3; i++) /* within 4 standard deviations, of 30 */
    cr_expect(received[i] > 8880 && received[i] < 9120, "%zu", received[i]);
}

Test(relay, a_host_that_has_vanished_sends_and_receives_nothing) {
  make(3, 1e6);
  network.delay = 10 * MS;
  send(0, 1, 0); /* under way when the host goes */
  network.links[1].vanished = true;
  send(1, 0, 1 * MS);
  send(2, 1, 1 * MS);
  send(0, 2, 1 * MS);
  expect(13 * MS, 0, 2);
  expect_none();
  network.links[1].vanished = false;
  send(0, 1, 20 * MS);
  expect(32 * MS, 0, 1);
}

Test(relay, what_is_under_way_is_given_back) {
  make(2, 1e6);
  send(0, 1, 0);
  send(1, 0, 0);
}
