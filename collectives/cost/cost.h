/*
 * The cost model: how long a collective takes, from what links and cores can do. Plans choose their
 * schedule by it, onebit-tune fits it to a cluster, onebit-tune --predict extrapolates with it.
 *
 * A phase is cut in K messages a peer, and its parts overlap but for the first message's way
 * through all of them:
 *
 *   seconds = call + latencies + (sum of all parts) / K + apply
 *             + (1 - 1/K) * (max(wire, cores) + unhidden * min(wire, cores))
 *
 * wire: bytes that leave the busiest host, at the bandwidth both ways; cores: compressing, reducing
 * and messages, on a core that as many ranks share as there are too many of them. Only + - * / on
 * doubles, so that all ranks that have the same costs come to the same choice.
 *
 * Where whole calls were measured on as many hosts and ranks, the choice corrects the model: its
 * times are multiplied by measured/model of the sizes around.
 */
#ifndef OB_COLLECTIVES_COST_H
#define OB_COLLECTIVES_COST_H

#include <stdbool.h>
#include <stddef.h>

#include "onebit/plan.h"

struct ob_link {
  double latency;   /* seconds from a rank's send to another's receive, software included */
  double bandwidth; /* bytes a second each way: of a host, or inside of a rank */
  double message;   /* seconds of a core that sending, or receiving, a message takes */
  double byte;      /* seconds of a core that a byte sent, or received, takes */
};

#define OB_COST_CODEC_CAPACITY  16
#define OB_COST_SOURCE_CAPACITY 256

/* A candidate of the choice, in the order in which they are tried. */
struct ob_cost_candidate {
  onebit_schedule_t schedule;
  onebit_wire_t wire;
};
enum { OB_COST_CANDIDATES = 5, OB_COST_POINTS = 16 };
extern const struct ob_cost_candidate ob_cost_candidates[OB_COST_CANDIDATES];

/* A curve over the bytes (as float32) of allreduce buffers, ascending: either a factor measured /
 * model, or the chunk size (elements) that was fastest. */
struct ob_cost_curve {
  double count; /* of points */
  struct {
    double bytes, value;
  } point[OB_COST_POINTS];
};

#define OB_COST_MIN_FACTOR 0.05
#define OB_COST_MAX_FACTOR 20.0

/* Curves of the measured number of hosts and ranks on each, and no others. */
struct ob_cost_measured {
  struct ob_cost_curve factor[OB_COST_CANDIDATES];
  struct ob_cost_curve chunk; /* of the compressed exchange */
};

/* Plain bytes: rank 0 may send them to the others as they are. Seconds of one core where a core is
 * not shared. */
struct ob_costs {
  struct ob_link between, inside; /* hosts; ranks of a host */
  /* Seconds an element: compress; reduce and one stream more of it; decode to the caller's buffer;
   * read dense input into a message or shared memory; add a dense stream; write dense output. */
  double compress, reduce, reduce_stream, apply, load, add, convert;
  double call; /* seconds that a call takes on each rank, whatever its size */
  /* The part of between.bandwidth that a compressed exchange reaches; the codec's times within an
   * exchange over those alone; of the smaller of wire and cores, the part that does not hide behind
   * the larger, since MPI moves messages only when it is called. All are fitted. */
  double exchange_efficiency, codec_factor, unhidden;
  /* MPI_Allreduce: seconds a call, seconds of each of its rounds, part of the bandwidth, seconds of
   * a core a byte. */
  double mpi_call, mpi_round, mpi_efficiency, mpi_byte;
  /* Seconds that a wait for another rank takes longer for each rank that shares its core. */
  double oversubscribed;
  double cores_per_host; /* 0: as many as ranks */
  double cores_shared;   /* cores that all hosts share, being one machine; 0: each has its own */
  double hosts, ranks_per_host; /* the cluster that was measured; 0: nothing was */
  double residual; /* root mean square of log(predicted / measured) of the fit; 0: no fit */
  struct ob_cost_measured measured;
  char codec[OB_COST_CODEC_CAPACITY];
  char source[OB_COST_SOURCE_CAPACITY]; /* the origin of these costs */
};

/* The call to be made, and the choices that it leaves. */
struct ob_cost_task {
  onebit_operation_t operation;
  size_t elements; /* the plan's count */
  size_t block;    /* elements a scale; 0: the default; ONEBIT_BLOCK_BUFFER: no overlap */
  onebit_wire_t wire;
  int bits;                   /* of an element, with ONEBIT_WIRE_BITS; 0 is 1 */
  int hosts, ranks_per_host;  /* ranks_per_host 0: not the same on all */
  int ranks, max_ranks;       /* in all, and on the fullest host; 0: by the two above */
  int threads;                /* of each rank; 0 is 1 */
  onebit_schedule_t schedule; /* AUTOMATIC: any that is possible */
  bool dense_allowed;         /* wire is bits, but dense may be chosen where it is faster */
  size_t chunk;               /* elements in a message; 0: any */
};

/* With at most three ranks the allgather sends no more messages than doubling has rounds. */
#define OB_COST_DOUBLING_RANKS 4

struct ob_cost_choice {
  onebit_schedule_t schedule;
  onebit_wire_t wire;
  size_t chunk;
  double seconds;
  char text[1024]; /* a line for each candidate, with the time predicted for it */
};

/* A gigabit Ethernet between hosts, shared memory inside, and what that codec does on one core of a
 * server. NULL or an unknown codec: the portable one's. */
void ob_costs_default(const char *codec, struct ob_costs *costs);

/* All hosts are one machine, as containers and emulated hosts may be: sets cores_shared, and says
 * so in `source`. Costs that were measured have it already, and stay as they are. */
void ob_costs_of_one_machine(struct ob_costs *costs);

/* Returns by which factor shared cores make a rank's work slower than alone: 1 or more. */
double ob_cost_sharing_factor(const struct ob_costs *costs, const struct ob_cost_task *task);

/* True if these ranks can make such a call at all. */
bool ob_cost_possible(const struct ob_cost_task *task, onebit_schedule_t schedule,
                      onebit_wire_t wire);

/* Seconds of one call, on the slowest rank, by the model alone. */
double ob_cost_seconds(const struct ob_costs *costs, const struct ob_cost_task *task,
                       onebit_schedule_t schedule, onebit_wire_t wire, size_t chunk);

/* Seconds of MPI_Allreduce of task->elements elements of `element_bytes` bytes each. */
double ob_cost_mpi_seconds(const struct ob_costs *costs, const struct ob_cost_task *task,
                           size_t element_bytes);

/* Returns the bytes that one call sends out of the host with the most ranks. */
double ob_cost_host_bytes(const struct ob_cost_task *task, onebit_schedule_t schedule,
                          onebit_wire_t wire);

/* The factor of the model's time of a candidate: measured/model of the sizes around, in between
 * linear in the logarithm of the size; 1 where nothing of the kind was measured. */
double ob_cost_factor(const struct ob_costs *costs, const struct ob_cost_task *task,
                      size_t candidate, bool *measured);

/* Elements of the messages that were fastest at the nearest size; 0: none was measured. */
size_t ob_cost_measured_chunk(const struct ob_costs *costs, const struct ob_cost_task *task,
                              size_t candidate);

/* Adds a point to a curve. False when the curve is full, or the size does not ascend. */
bool ob_cost_add_point(struct ob_cost_curve *curve, double bytes, double value);

/* Chooses the fastest possible candidate. */
void ob_cost_choose(const struct ob_costs *costs, const struct ob_cost_task *task,
                    struct ob_cost_choice *choice);

const char *ob_cost_schedule_name(onebit_schedule_t schedule);

#endif
