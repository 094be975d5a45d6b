/*
 * The positions of a plan's elements in messages, and of messages in memory. The functions are
 * inline, since both the host's steps and a device's kernels call them.
 *
 * The layout is cut into segments; one member of the group reduces each segment. A segment is cut
 * into chunks; each chunk is one message. Chunk i of segment k consists of the blocks from bounds[k
 * * chunks + i] up to the next bound.
 */
#ifndef OB_COLLECTIVES_GEOMETRY_H
#define OB_COLLECTIVES_GEOMETRY_H

#include "compression/message.h"

#ifdef __cplusplus
extern "C" {
#endif

struct ob_geometry {
  struct ob_layout layout;
  size_t *bounds; /* segments * chunks + 1 */
  size_t segments, chunks;
  /* The number of ranks that exchange messages with each other (the members), and this rank's
   * number among them. Members are all ranks, or in a hierarchical plan the ranks that have the
   * same local number on their hosts. Member m reduces segment first_segment + m. */
  size_t members, member, first_segment;
  bool whole;   /* every message has all elements: there is one segment */
  bool rotated; /* member m's result lies at (m - member) mod members (schedules/doubling.c) */
  /* Properties of messages (struct ob_message_shape). Kernels read them together, and need up to a
   * third more instructions if they lie one byte further (make kernels). */
  bool one_scale, dense, half;
  bool replicated; /* every member reduces every segment (schedules/replicas.c) */
  /* Bits per element in the messages that ranks send, and in the messages that servers send back
   * (ob_serve_width). */
  unsigned width, result_width;
  /* The message of member m about chunk i is at base + m * peer_stride + i % slots * stride. `base`
   * is `outgoing` (messages to that member), `incoming` (from that member), or `results` (that
   * member's result, for all). If servers are replicated, `outgoing` has a message for each server,
   * which goes to all members, and `incoming` has the messages of member m from m * members on.
   * Results have two copies, or one copy to which both pointers point. */
  size_t slots, stride, peer_stride;
  unsigned char *outgoing, *incoming, *results[2];
};

/* Returns the segment that a member reduces. */
OB_INLINE size_t ob_segment_of(const struct ob_geometry *geometry, size_t member) {
  return geometry->whole ? 0 : geometry->first_segment + member;
}

/* Returns the member whose number is larger by `distance`, modulo the number of members. Every rank
 * sends in this order, so that they do not all send to the same member at once. */
OB_INLINE size_t ob_neighbour(const struct ob_geometry *geometry, size_t distance) {
  return (geometry->member + distance) % geometry->members;
}

/* Returns the shape of a message without its number of words. ob_plan_message adds that number, for
 * which it has to search the layout. */
OB_INLINE struct ob_message_shape ob_message_blocks(const struct ob_geometry *geometry,
                                                    size_t segment, size_t chunk) {
  const size_t *bound = geometry->bounds + segment * geometry->chunks + chunk;
  struct ob_message_shape shape;
  shape.first = bound[0];
  shape.blocks = bound[1] - bound[0];
  shape.words = 0;
  shape.one_scale = geometry->one_scale;
  shape.dense = geometry->dense;
  shape.half = geometry->half;
  shape.width = geometry->width;
  return shape;
}

/* Returns the address of the message to or from a member; `base` is outgoing or incoming. */
OB_INLINE unsigned char *ob_message_at(const struct ob_geometry *geometry, unsigned char *base,
                                       size_t member, size_t chunk) {
  return base + member * geometry->peer_stride + chunk % geometry->slots * geometry->stride;
}

/* Returns the number of messages about a chunk that a rank sends to each other one. */
OB_INLINE size_t ob_messages_each(const struct ob_geometry *geometry) {
  return geometry->replicated ? geometry->members : 1;
}

/* Returns the server, as a member's number, that message number `k` to this member is for. */
OB_INLINE size_t ob_server_of(const struct ob_geometry *geometry, size_t member, size_t k) {
  return geometry->replicated ? k : member;
}

/* Returns the address of message number `k` from a member. */
OB_INLINE unsigned char *ob_incoming_at(const struct ob_geometry *geometry, size_t member, size_t k,
                                        size_t chunk) {
  return ob_message_at(geometry, geometry->incoming, member * ob_messages_each(geometry) + k,
                       chunk);
}

/* Returns the address of a member's result in one copy of the results. */
OB_INLINE unsigned char *ob_result_at(const struct ob_geometry *geometry, int copy, size_t member,
                                      size_t chunk) {
  const size_t behind = member < geometry->member ? geometry->members : 0;
  const size_t position = geometry->rotated ? member + behind - geometry->member : member;
  return ob_message_at(geometry, geometry->results[copy], position, chunk);
}

#ifdef __cplusplus
}
#endif
#endif
