/*
 * Models a network of hosts. Each host has its own link to a common centre, as sites have to the
 * internet. The model reads no clock: callers pass the time, so that tests can choose it.
 *
 *   host --> queue --> rate, up --> delay --> loss --> queue --> rate, down --> host
 *
 * A packet waits until earlier packets have left the sender's link at the link's rate, takes the
 * delay, and may be lost by chance. It then waits again for the link of the receiving host. A
 * packet is also lost if it arrives at a full queue. All packets have the same delay and the same
 * probability of loss. There is no jitter, packets stay in order, losses are independent, and the
 * network between the links has no limit.
 */
#ifndef TOOLS_RELAY_NETWORK_H
#define TOOLS_RELAY_NETWORK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes that a link carries in addition to each packet: those of the Ethernet header, which tc's
 * token bucket filter counts too. */
#define RELAY_HEADER 14

#define RELAY_NEVER UINT64_MAX

/* A packet under way. Times are in nanoseconds. */
struct relay_packet {
  struct relay_packet *next;
  uint64_t time;
  int from, to;
  size_t bytes;
  unsigned char data[];
};

struct relay_queue {
  struct relay_packet *first, **end;
};

struct relay_link {
  double bytes_per_second;     /* 0: no limit */
  uint64_t up_free, down_free; /* when the latest packet will have left the link */
  struct relay_queue flying;   /* packets from this host, in the order of arrival */
  struct relay_queue leaving;  /* packets to this host, in the order of arrival */
  bool vanished;               /* no packet leaves or reaches the host */
};

struct relay_network {
  struct relay_link *links;
  int hosts;
  uint64_t delay;
  double loss;   /* the probability that a packet is lost, 0 to 1 */
  size_t queue;  /* the largest number of bytes that wait in one direction of a link */
  uint64_t seed; /* the seed of the losses */
};

/* Allocates the links, whose properties the caller then sets. Returns false if out of memory. */
bool relay_network_create(struct relay_network *network, int hosts);
void relay_network_destroy(struct relay_network *network);

/* Copies a packet and sends it from one host to another. `now` must never decrease. */
void relay_network_send(struct relay_network *network, int from, int to, const void *data,
                        size_t bytes, uint64_t now);

/* Returns the next packet that has arrived, which the caller frees, or NULL if there is none. */
struct relay_packet *relay_network_receive(struct relay_network *network, uint64_t now);

/* Returns the time of the next event, or RELAY_NEVER if no packet is under way. */
uint64_t relay_network_next_time(const struct relay_network *network);

#endif
