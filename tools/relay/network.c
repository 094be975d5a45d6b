/* Implements the model of network.h: links, queues, delay and losses. */
#include "tools/relay/network.h"

#include <stdlib.h>
#include <string.h>

static void push_packet(struct relay_queue *queue, struct relay_packet *packet) {
  packet->next = NULL;
  *queue->end = packet;
  queue->end = &packet->next;
}

static struct relay_packet *pop_packet(struct relay_queue *queue) {
  struct relay_packet *packet = queue->first;
  queue->first = packet->next;
  if (!queue->first)
    queue->end = &queue->first;
  return packet;
}

bool relay_network_create(struct relay_network *network, int hosts) {
  *network = (struct relay_network){.hosts = hosts, .queue = SIZE_MAX};
  network->links = calloc((size_t)hosts, sizeof *network->links);
  for (int i = 0; network->links && i < hosts; i++) {
    struct relay_link *link = &network->links[i];
    link->flying.end = &link->flying.first;
    link->leaving.end = &link->leaving.first;
  }
  return network->links != NULL;
}

void relay_network_destroy(struct relay_network *network) {
  for (int i = 0; network->links && i < network->hosts; i++) {
    struct relay_link *link = &network->links[i];
    while (link->flying.first)
      free(pop_packet(&link->flying));
    while (link->leaving.first)
      free(pop_packet(&link->leaving));
  }
  free(network->links);
  network->links = NULL;
}

/* Draws a number from 0 to 1 with SplitMix64 (Steele, Lea, Flood 2014). */
static double draw_random(struct relay_network *network) {
  uint64_t z = network->seed += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

/* Passes a packet through one direction of a link, which has sent all earlier packets at time
 * *free. packet->time becomes the time when the packet has left the link. Returns false if the
 * queue is full. */
static bool pass_through_link(const struct relay_network *network, double rate, uint64_t *free,
                              struct relay_packet *packet) {
  if (rate <= 0)
    return true;
  uint64_t waiting = *free > packet->time ? *free - packet->time : 0;
  if ((double)waiting * 1e-9 * rate > (double)network->queue)
    return false;
  packet->time += waiting + (uint64_t)((double)(packet->bytes + RELAY_HEADER) / rate * 1e9);
  *free = packet->time;
  return true;
}

void relay_network_send(struct relay_network *network, int from, int to, const void *data,
                        size_t bytes, uint64_t now) {
  struct relay_link *source = &network->links[from];
  struct relay_packet *packet = source->vanished ? NULL : malloc(sizeof *packet + bytes);
  if (!packet)
    return;
  *packet = (struct relay_packet){.time = now, .from = from, .to = to, .bytes = bytes};
  memcpy(packet->data, data, bytes);
  if (!pass_through_link(network, source->bytes_per_second, &source->up_free, packet)) {
    free(packet);
    return;
  }
  packet->time += network->delay;
  push_packet(&source->flying, packet);
}

/* Returns the host whose queue (`leaving` or `flying`) has the packet with the earliest time, or -1
 * if all these queues are empty. */
static int find_earliest(const struct relay_network *network, bool leaving) {
  uint64_t best = RELAY_NEVER;
  int at = -1;
  for (int i = 0; i < network->hosts; i++) {
    const struct relay_link *link = &network->links[i];
    const struct relay_packet *packet = leaving ? link->leaving.first : link->flying.first;
    if (packet && packet->time < best) {
      best = packet->time;
      at = i;
    }
  }
  return at;
}

/* Passes a packet to the queue of the receiving host's link, unless the packet is lost. */
static void deliver_packet(struct relay_network *network, struct relay_packet *packet) {
  struct relay_link *target = &network->links[packet->to];
  if (draw_random(network) >= network->loss &&
      pass_through_link(network, target->bytes_per_second, &target->down_free, packet))
    push_packet(&target->leaving, packet);
  else
    free(packet);
}

struct relay_packet *relay_network_receive(struct relay_network *network, uint64_t now) {
  for (int i; (i = find_earliest(network, false)) >= 0;) {
    struct relay_link *source = &network->links[i];
    if (source->flying.first->time > now)
      break;
    deliver_packet(network, pop_packet(&source->flying));
  }
  for (int i; (i = find_earliest(network, true)) >= 0;) {
    struct relay_link *target = &network->links[i];
    if (target->leaving.first->time > now)
      break;
    struct relay_packet *packet = pop_packet(&target->leaving);
    if (!target->vanished)
      return packet;
    free(packet);
  }
  return NULL;
}

uint64_t relay_network_next_time(const struct relay_network *network) {
  int flying = find_earliest(network, false), leaving = find_earliest(network, true);
  uint64_t next = flying < 0 ? RELAY_NEVER : network->links[flying].flying.first->time;
  if (leaving >= 0 && network->links[leaving].leaving.first->time < next)
    next = network->links[leaving].leaving.first->time;
  return next;
}
