/*
 * The parts of the cost model (cost.h): a task in numbers, phases of messages, and the overlap of
 * parts. Each schedule's file computes its cost with these.
 */
#ifndef OB_COLLECTIVES_COST_MODEL_H
#define OB_COLLECTIVES_COST_MODEL_H

#include "collectives/cost/cost.h"

/* The largest message that MPI libraries send over TCP without a rendezvous; a rendezvous costs a
 * round trip. */
#define OB_COST_EAGER_BYTES 65536.0

/* A task in numbers. */
struct ob_cost_model {
  const struct ob_costs *costs;
  const struct ob_cost_task *task;
  double ranks, on_host, away; /* all; on the host with the most; on all other hosts */
  double hosts;
  double core;    /* factor by which shared cores slow down a rank's work */
  double flow;    /* `core` for a rank that is alone on its host */
  double threads; /* factor by which threads speed up the codec: at most the cores of a rank */
  double codec;   /* factor for the seconds of the codec */
};

struct ob_cost_model ob_cost_model(const struct ob_costs *costs, const struct ob_cost_task *task);

/* Returns the number of rounds of doubling until one rank's data has reached `ranks` ranks. */
double ob_cost_rounds(double ranks);

/* Returns the bytes of an element in messages, without headers. */
double ob_cost_element_bytes(const struct ob_cost_task *task, onebit_wire_t wire);

/* A phase in which every rank sends `elements` elements to each of its peers: `near` peers on its
 * own host and `far` peers on other hosts. */
struct ob_phase {
  double near, far, elements, bytes; /* bytes: to each peer */
  double messages;                   /* to each peer */
  double near_sends, far_sends;      /* messages to all near peers, and to all far peers */
};

struct ob_phase ob_phase_of(const struct ob_cost_model *model, onebit_wire_t wire, double near,
                            double far, double elements, size_t chunk);

/* Returns the phase in which all other ranks are peers. */
struct ob_phase ob_phase_among_all(const struct ob_cost_model *model, onebit_wire_t wire,
                                   double elements, size_t chunk);

/* Return seconds of a phase. ob_phase_wire: on the wire. ob_phase_dense_wire: on the wire for dense
 * messages, at the speed of MPI_Allreduce if they are too large for the eager protocol.
 * ob_phase_work: of a core, for sending and receiving. ob_phase_latency: until the first message
 * has arrived. */
double ob_phase_wire(const struct ob_cost_model *model, const struct ob_phase *phase,
                     bool compressed);
double ob_phase_dense_wire(const struct ob_cost_model *model, const struct ob_phase *phase);
double ob_phase_work(const struct ob_cost_model *model, const struct ob_phase *phase);
double ob_phase_latency(const struct ob_cost_model *model, const struct ob_phase *phase);

/* Returns the number of messages whose work overlaps; 1 if one scale serves all blocks, since it is
 * known only at the end. */
double ob_phase_pieces(const struct ob_cost_model *model, const struct ob_phase *phase);

/* Parts of a call, in seconds. cores: work before and between messages; wire: the messages; after:
 * work that needs all messages. */
struct ob_call_parts {
  double wire, cores, after, pieces;
};

double ob_cost_overlap(const struct ob_costs *costs, const struct ob_call_parts *parts);

/* Returns the seconds per element in which each rank computes the mean of all ranks' messages: the
 * larger of the time to decode one message and the time to read all of them. (Measured, 4 MiB on 2,
 * 4, 8 and 16 ranks that are threads, AVX-512: 0.13, 0.14, 0.32 and 0.57 ns.) */
double ob_cost_of_mean(const struct ob_cost_model *model);

/* Returns the time of compressing and decoding a segment of which `peers` ranks each reduce a part.
 * `peers` is the number of ranks in an exchange, and of hosts in a hierarchical call. */
double ob_cost_of_exchange(const struct ob_cost_model *model, const struct ob_phase *phase,
                           double segment, double peers, double before, double after);

/* Returns the seconds of `phases` phases of dense messages through a window of two chunks. A rank
 * sends a chunk only after the result of the chunk two before it has arrived. So nothing overlaps,
 * and each chunk costs one latency, or three with a rendezvous. */
double ob_cost_of_window(const struct ob_cost_model *model, size_t chunk, double elements,
                         double phases);

/* True if rounds of doubling are faster for an allgather of one message. Doubling has fewer
 * messages but more waits, so on one host it is faster only for many ranks. */
bool ob_cost_rounds_pay(const struct ob_costs *costs, const struct ob_cost_task *task);

/* ob_cost_doubles returns true if this phase uses doubling. ob_phase_double sets the phase's
 * messages to those of doubling, and returns its latency. Ranks of a host have adjacent numbers, so
 * the first rounds are inside the host. Each round sends all that a rank has so far; a message that
 * is too large for the eager protocol takes one more round trip. */
bool ob_cost_doubles(const struct ob_cost_model *model, const struct ob_phase *phase);
double ob_phase_double(const struct ob_cost_model *model, struct ob_phase *phase);

/* --- A step of training: the computation, and the exchange that hides behind it ----------------*/

/* The part of a step's computation that can overlap with an exchange (the backward pass is two
 * thirds), and the number of buckets of a large model. */
#define OB_STEP_HIDING  (2.0 / 3)
#define OB_STEP_BUCKETS 25.0

/* The smallest speed-up that justifies a change to a compressed exchange, which adds rounding
 * errors, and to a dense exchange, which does not. */
#define OB_STEP_WORTH       1.05
#define OB_STEP_WORTH_DENSE 1.02

/* Returns the seconds for which a step of training waits for an exchange that overlaps with the
 * computation: a bucket's exchange begins when the bucket's gradients are computed, so that the
 * exchange of the last bucket never overlaps, and the computation of the first one neither. */
static inline double ob_step_waiting(double exchange, double compute, double buckets) {
  const double hidden = OB_STEP_HIDING * compute * (1 - 1 / buckets);
  return exchange - hidden > exchange / buckets ? exchange - hidden : exchange / buckets;
}

#endif
