/*
 * The cost model: how long a collective takes, from what links and cores can do. Plans choose their
 * schedule by it, onebit-tune fits it to a cluster, onebit-tune --predict extrapolates with it.
 *
 * A phase sends K messages to each peer. Its parts overlap, except that the first message passes
 * through all of them:
 *
 *   seconds = call + latencies + (sum of all parts) / K + apply
 *             + (1 - 1/K) * (max(wire, cores) + unhidden * min(wire, cores))
 *
 * wire: the time of the bytes that leave the busiest host; cores: the time of compressing,
 * reducing, sending and receiving, longer where ranks share a core. The model uses only + - * / on
 * doubles, so that all ranks with the same costs make the same choice.
 *
 * If whole calls were measured on the same number of hosts and ranks, the model's times are
 * multiplied by the quotient measured/model of the nearest sizes.
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

/* A candidate of the choice; the array has the order in which they are tried. */
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

/* Curves for the number of hosts, and of ranks on each, that was measured. */
struct ob_cost_measured {
  struct ob_cost_curve factor[OB_COST_CANDIDATES];
  struct ob_cost_curve chunk; /* of the compressed exchange */
};

/* The costs. The struct has no pointers: rank 0 may send its bytes to the others. Seconds are those
 * of a core that ranks do not share. */
struct ob_costs {
  struct ob_link between, inside; /* between hosts; between the ranks of a host */
  /* Seconds an element: compress; reduce, and reduce one message more; decode to the caller's
   * buffer; read dense input into a message or shared memory; add a dense message; write dense
   * output. */
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
  double hosts, ranks_per_host; /* the cluster that was measured; 0: none was */
  double residual; /* root mean square of log(predicted / measured) of the fit; 0: no fit */
  struct ob_cost_measured measured;
  char codec[OB_COST_CODEC_CAPACITY];
  char source[OB_COST_SOURCE_CAPACITY]; /* the origin of these costs */
};

/* The call whose schedule is chosen, and the limits of the choice. */
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

/* Sets the costs to those of a gigabit Ethernet between hosts, of shared memory inside, and of this
 * codec on one core of a server. NULL or an unknown codec: the scalar one's. */
void ob_costs_default(const char *codec, struct ob_costs *costs);

/* Sets cores_shared for hosts that are all on one machine, as containers and emulated hosts may be,
 * and adds that to `source`. Measured costs include it already and are not changed. */
void ob_costs_of_one_machine(struct ob_costs *costs);

/* Returns by which factor shared cores make a rank's work slower than alone: 1 or more. */
double ob_cost_sharing_factor(const struct ob_costs *costs, const struct ob_cost_task *task);

/* True if the ranks of the task can use this schedule. */
bool ob_cost_possible(const struct ob_cost_task *task, onebit_schedule_t schedule,
                      onebit_wire_t wire);

/* Returns the seconds of one call, on the slowest rank, by the model alone. */
double ob_cost_seconds(const struct ob_costs *costs, const struct ob_cost_task *task,
                       onebit_schedule_t schedule, onebit_wire_t wire, size_t chunk);

/* Returns the seconds of MPI_Allreduce of task->elements elements of `element_bytes` bytes each. */
double ob_cost_mpi_seconds(const struct ob_costs *costs, const struct ob_cost_task *task,
                           size_t element_bytes);

/* Returns the bytes that one call sends out of the host with the most ranks. */
double ob_cost_host_bytes(const struct ob_cost_task *task, onebit_schedule_t schedule,
                          onebit_wire_t wire);

/* Returns the factor that corrects the model's time of a candidate: the quotient measured/model,
 * interpolated linearly in the logarithm of the size; 1 if no such call was measured. */
double ob_cost_factor(const struct ob_costs *costs, const struct ob_cost_task *task,
                      size_t candidate, bool *measured);

/* Returns the elements of the messages that were fastest at the nearest size; 0: none was
 * measured. */
size_t ob_cost_measured_chunk(const struct ob_costs *costs, const struct ob_cost_task *task,
                              size_t candidate);

/* Adds a point to a curve. False when the curve is full, or the size does not ascend. */
bool ob_cost_add_point(struct ob_cost_curve *curve, double bytes, double value);

/* Chooses the fastest possible candidate. */
void ob_cost_choose(const struct ob_costs *costs, const struct ob_cost_task *task,
                    struct ob_cost_choice *choice);

const char *ob_cost_schedule_name(onebit_schedule_t schedule);

#endif
