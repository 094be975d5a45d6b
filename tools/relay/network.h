/*
 * The model of a network between hosts, each at a link of its own to the same far place, as sites
 * are at the internet. It has no clock but the times that it is given, so that it can be tested.
 *
 *   host --> queue --> rate, up --> delay --> loss --> queue --> rate, down --> host
 *
 * A packet waits until those before it have left the link at its rate, needs the delay, is lost by
 * chance, and waits once more for the link of the host that it goes to. What finds a queue full is
 * lost. Delay and loss are the same for all packets: there is no jitter, nothing comes out of
 * order, losses do not come in bursts, and between the links all is wide enough.
 */
#ifndef TOOLS_RELAY_NETWORK_H
#define TOOLS_RELAY_NETWORK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes that a link carries besides each packet: the header of Ethernet, which tc's token bucket
 * counts, too. */
#define RELAY_HEADER 14

#define RELAY_NEVER UINT64_MAX

/* Times are nanoseconds. */
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
  double bytes_per_second;     /* 0: not limited */
  uint64_t up_free, down_free; /* when the last packet so far will have left */
  struct relay_queue flying;   /* sent by this host, in the order of their arrival */
  struct relay_queue leaving;  /* to this host, in the order of their arrival */
  bool vanished;               /* nothing goes out or comes in */
};

struct relay_network {
  struct relay_link *links;
  int hosts;
  uint64_t delay;
  double loss;   /* a packet's chance, 0 to 1 */
  size_t queue;  /* bytes that wait for each way of a link, at most */
  uint64_t seed; /* of the losses */
};

/* Makes memory for the links; the caller fills in their properties. False: there is none. */
bool relay_network_create(struct relay_network *network, int hosts);
void relay_network_destroy(struct relay_network *network);

/* Sends a host's packet, which is copied. `now` never goes back. */
void relay_network_send(struct relay_network *network, int from, int to, const void *data,
                        size_t bytes, uint64_t now);

/* Returns a packet that has arrived, which the caller gives to free(); NULL: there is none yet. */
struct relay_packet *relay_network_receive(struct relay_network *network, uint64_t now);

/* The time of the next look: RELAY_NEVER when nothing is under way. */
uint64_t relay_network_next(const struct relay_network *network);

#endif
