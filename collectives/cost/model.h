/*
 * The parts of the cost model (cost.h): a task in numbers, phases of messages, and how parts
 * overlap. A schedule's cost is written with these, in its own file.
 */
#ifndef OB_COLLECTIVES_COST_MODEL_H
#define OB_COLLECTIVES_COST_MODEL_H

#include "collectives/cost/cost.h"

/* The largest message that MPI libraries send over TCP without a rendezvous, which costs a round
 * trip. */
#define OB_COST_EAGER_BYTES 65536.0

/* A task in numbers. */
struct ob_cost_model {
  const struct ob_costs *costs;
  const struct ob_cost_task *task;
  double ranks, on_host, away; /* all ranks; those of the host with the most; those elsewhere */
  double hosts;
  double core;    /* shared cores make a rank's work slower by this factor */
  double flow;    /* the same for a rank that is alone on its host */
  double threads; /* the codec is faster by this factor: at most the cores of a rank */
  double codec;   /* the seconds of a codec are multiplied by this factor */
};

struct ob_cost_model ob_cost_model(const struct ob_costs *costs, const struct ob_cost_task *task);

/* Returns the rounds of doubling after which one rank's data has reached `ranks` ranks. */
double ob_cost_rounds(double ranks);

/* Returns the bytes of an element in messages, without headers. */
double ob_cost_element_bytes(const struct ob_cost_task *task, onebit_wire_t wire);

/* A phase in which every rank sends `elements` to each of its peers, `near` of them on its host and
 * `far` on others. */
struct ob_phase {
  double near, far, elements, bytes; /* bytes: to each peer */
  double messages;                   /* to each peer */
  double near_sends, far_sends;      /* messages to each of them */
};

struct ob_phase ob_phase_of(const struct ob_cost_model *model, onebit_wire_t wire, double near,
                            double far, double elements, size_t chunk);

/* Returns the phase in which all other ranks are peers. */
struct ob_phase ob_phase_among_all(const struct ob_cost_model *model, onebit_wire_t wire,
                                   double elements, size_t chunk);

/* Return the seconds on the wire (dense: those of messages too large for the eager protocol are as
 * in MPI_Allreduce); of a core, for sending and receiving; until the first message has arrived. */
double ob_phase_wire(const struct ob_cost_model *model, const struct ob_phase *phase,
                     bool compressed);
double ob_phase_dense_wire(const struct ob_cost_model *model, const struct ob_phase *phase);
double ob_phase_work(const struct ob_cost_model *model, const struct ob_phase *phase);
double ob_phase_latency(const struct ob_cost_model *model, const struct ob_phase *phase);

/* Returns the number of parts that overlap: one, if the scale is known only at the end. */
double ob_phase_pieces(const struct ob_cost_model *model, const struct ob_phase *phase);

/* Parts of a call, in seconds: work before and between messages (cores), the messages (wire), and
 * work that needs all messages (after). */
struct ob_call_parts {
  double wire, cores, after, pieces;
};

double ob_cost_overlap(const struct ob_costs *costs, const struct ob_call_parts *parts);

/* Returns the seconds of an element of the mean of all ranks' messages, which each rank computes:
 * the larger of decoding one message and reading all of them. (Measured, 4 MiB on 2, 4, 8 and 16
 * ranks that are threads, AVX-512: 0.13, 0.14, 0.32 and 0.57 ns.) */
double ob_cost_of_mean(const struct ob_cost_model *model);

/* Returns the time of compressing and decoding a segment among `peers`, each of which reduces a
 * part: in an exchange, or between the hosts of a hierarchical call. */
double ob_cost_of_exchange(const struct ob_cost_model *model, const struct ob_phase *phase,
                           double segment, double peers, double before, double after);

/* Returns the seconds of dense messages in `phases` phases, through a window of two chunks: a chunk
 * is sent only after the result of the chunk two before it has arrived, so nothing overlaps, and
 * each chunk costs one latency, or three with a rendezvous. */
double ob_cost_of_window(const struct ob_cost_model *model, size_t chunk, double elements,
                         double phases);

/* True if rounds of doubling are faster for an allgather of one message. They have fewer messages
 * but more waits, so on one host they are faster only for many ranks. */
bool ob_cost_rounds_pay(const struct ob_costs *costs, const struct ob_cost_task *task);

/* True if this phase uses doubling. ob_phase_double sets the phase's messages to those of doubling,
 * and returns its latency: ranks of a host have adjacent numbers, so the first rounds are inside
 * the host; a round sends all that a rank has, and a message too large for the eager protocol takes
 * a round trip more. */
bool ob_cost_doubles(const struct ob_cost_model *model, const struct ob_phase *phase);
double ob_phase_double(const struct ob_cost_model *model, struct ob_phase *phase);

/* --- A step of training: the computation, and the exchange that hides behind it ----------------*/

/* The part of the computation that an exchange can hide behind (backward is two thirds), and the
 * part of the exchange that cannot be hidden (the last of 25 buckets). */
#define OB_STEP_HIDING  (2.0 / 3)
#define OB_STEP_EXPOSED (1.0 / 25)

/* The least speed-up that is worth the rounding to bits, and that is worth a change to a dense
 * exchange, which costs no rounding. */
#define OB_STEP_WORTH       1.05
#define OB_STEP_WORTH_DENSE 1.02

/* Returns the seconds that a step waits for an exchange which overlaps with the computation. */
static inline double ob_step_waiting(double exchange, double compute) {
  const double behind = exchange - OB_STEP_HIDING * compute, exposed = OB_STEP_EXPOSED * exchange;
  return behind > exposed ? behind : exposed;
}

#endif
