/*
 * The cost model predicts how long a collective takes, from the speed of links and cores. Plans
 * choose their schedule by it. The program onebit-tune fits the model to a cluster, and onebit-tune
 * --predict extrapolates with it.
 *
 * A phase of a call sends K messages to each peer. Work and transfer of different messages overlap,
 * except for the first message:
 *
 *   seconds = call + latencies + (sum of all parts) / K + apply
 *             + (1 - 1/K) * (max(wire, cores) + unhidden * min(wire, cores))
 *
 * wire: the time of the bytes that leave the busiest host; cores: the time of compressing,
 * reducing, sending and receiving, longer if ranks share a core. The model uses only + - * / on
 * doubles, so that all ranks with the same costs make the same choice.
 *
 * If a tuning file has measurements of whole calls on the same number of hosts and ranks, the
 * model's times are multiplied by the quotient measured/model of the nearest sizes.
 */
#ifndef OB_COLLECTIVES_COST_H
#define OB_COLLECTIVES_COST_H

#include <stdbool.h>
#include <stddef.h>

#include "onebit/plan.h"

struct ob_link {
  double latency;   /* seconds from a rank's send to another's receive, software included */
  double bandwidth; /* bytes per second in each direction, of a host; `inside`: of a rank */
  double message;   /* seconds of a core to send, or to receive, one message */
  double byte;      /* seconds of a core to send, or to receive, one byte */
};

#define OB_COST_CODEC_CAPACITY  16
#define OB_COST_SOURCE_CAPACITY 256

/* A candidate of the choice: a schedule and a wire format. The array has the order in which the
 * candidates are tried. */
struct ob_cost_candidate {
  onebit_schedule_t schedule;
  onebit_wire_t wire;
};
enum { OB_COST_CANDIDATES = 5, OB_COST_POINTS = 16 };
extern const struct ob_cost_candidate ob_cost_candidates[OB_COST_CANDIDATES];

/* A curve over the size of allreduce buffers, in bytes as float32, ascending. Its values are
 * factors measured/model, or the fastest chunk sizes in elements. */
struct ob_cost_curve {
  double count; /* number of points */
  struct {
    double bytes, value;
  } point[OB_COST_POINTS];
};

#define OB_COST_MIN_FACTOR 0.05
#define OB_COST_MAX_FACTOR 20.0

/* Curves that were measured with this number of hosts and of ranks per host. */
struct ob_cost_measured {
  struct ob_cost_curve factor[OB_COST_CANDIDATES];
  struct ob_cost_curve chunk; /* the fastest chunks of the compressed exchange */
};

/* The numbers of the cost model. The struct has no pointers, so that rank 0 can send its bytes to
 * the other ranks. Seconds are those on a core that only one rank uses. */
struct ob_costs {
  struct ob_link between, inside; /* between hosts; between the ranks of a host */
  /* Seconds per element. compress: a rank's values; reducing P messages takes reduce + P *
   * reduce_stream; apply: decode to the caller's buffer; load: read dense input into a message or
   * shared memory; add: add a dense message; convert: write dense output. */
  double compress, reduce, reduce_stream, apply, load, add, convert;
  double call; /* seconds that a call takes on each rank, whatever its size */
  /* exchange_efficiency: the part of between.bandwidth that a compressed exchange reaches.
   * codec_factor: the time of the codec within an exchange, divided by its time alone. unhidden:
   * the part of the smaller of wire and cores that does not overlap with the larger, since MPI
   * moves messages only when it is called. All three are fitted. */
  double exchange_efficiency, codec_factor, unhidden;
  /* MPI_Allreduce: seconds of a call, seconds of each of its rounds, the part of the bandwidth that
   * it reaches, and seconds of a core for each byte. */
  double mpi_call, mpi_round, mpi_efficiency, mpi_byte;
  /* Seconds by which a wait for another rank becomes longer for each further rank on its core. */
  double oversubscribed;
  double cores_per_host; /* 0: as many as ranks */
  double cores_shared;   /* cores of all hosts, if they are one machine; 0: each has its own */
  double hosts, ranks_per_host; /* size of the measured cluster; 0: none was measured */
  double residual; /* root mean square of log(predicted / measured) of the fit; 0: no fit */
  struct ob_cost_measured measured;
  char codec[OB_COST_CODEC_CAPACITY];
  char source[OB_COST_SOURCE_CAPACITY]; /* the origin of these costs */
};

/* The call for which a schedule is chosen, and the limits of the choice. */
struct ob_cost_task {
  onebit_operation_t operation;
  size_t elements; /* the plan's count */
  size_t block;    /* elements per scale; 0: default; ONEBIT_BLOCK_BUFFER: one scale, no overlap */
  onebit_wire_t wire;
  int bits;                   /* bits per element, with ONEBIT_WIRE_BITS; 0 means 1 */
  int hosts, ranks_per_host;  /* ranks_per_host 0: hosts have different numbers of ranks */
  int ranks, max_ranks;       /* in all; on the host with the most; 0: from the two above */
  int threads;                /* threads per rank; 0 means 1 */
  onebit_schedule_t schedule; /* AUTOMATIC: any schedule that is possible */
  bool dense_allowed;         /* wire is bits, but dense may be chosen where it is faster */
  size_t chunk;               /* elements in a message; 0: any */
};

/* The fewest ranks that use doubling. With three ranks or fewer the allgather sends no more
 * messages than doubling has rounds. */
#define OB_COST_DOUBLING_RANKS 4

struct ob_cost_choice {
  onebit_schedule_t schedule;
  onebit_wire_t wire;
  size_t chunk;
  double seconds;
  char text[1024]; /* a line for each candidate, with the time predicted for it */
};

/* Sets the default costs: a gigabit Ethernet between hosts, shared memory inside a host, and this
 * codec on one core of a server. NULL or an unknown codec: the scalar codec. */
void ob_costs_default(const char *codec, struct ob_costs *costs);

/* Sets cores_shared if all hosts are on one machine, as containers and emulated hosts may be, and
 * notes that in `source`. Measured costs already include the effect of shared cores and are not
 * changed. */
void ob_costs_of_one_machine(struct ob_costs *costs);

/* Returns the factor by which shared cores slow down a rank's work: 1 or more. */
double ob_cost_sharing_factor(const struct ob_costs *costs, const struct ob_cost_task *task);

/* True if the ranks of the task can use this schedule. */
bool ob_cost_possible(const struct ob_cost_task *task, onebit_schedule_t schedule,
                      onebit_wire_t wire);

/* Returns the seconds of one call on the slowest rank, without corrections by measurements. */
double ob_cost_seconds(const struct ob_costs *costs, const struct ob_cost_task *task,
                       onebit_schedule_t schedule, onebit_wire_t wire, size_t chunk);

/* Returns the seconds of MPI_Allreduce of task->elements elements of `element_bytes` bytes each. */
double ob_cost_mpi_seconds(const struct ob_costs *costs, const struct ob_cost_task *task,
                           size_t element_bytes);

/* Returns the bytes that one call sends out of the host with the most ranks. */
double ob_cost_host_bytes(const struct ob_cost_task *task, onebit_schedule_t schedule,
                          onebit_wire_t wire);

/* Returns the factor that corrects the model's time of a candidate. It is the quotient
 * measured/model, interpolated linearly in the logarithm of the size; 1 if no such call was
 * measured. */
double ob_cost_factor(const struct ob_costs *costs, const struct ob_cost_task *task,
                      size_t candidate, bool *measured);

/* Returns the chunk size, in elements, that was fastest at the nearest measured size; 0: none was
 * measured. */
size_t ob_cost_measured_chunk(const struct ob_costs *costs, const struct ob_cost_task *task,
                              size_t candidate);

/* Adds a point to a curve. Returns false if the curve is full, or `bytes` is not larger than in the
 * point before. */
bool ob_cost_add_point(struct ob_cost_curve *curve, double bytes, double value);

/* Chooses the fastest possible candidate. */
void ob_cost_choose(const struct ob_costs *costs, const struct ob_cost_task *task,
                    struct ob_cost_choice *choice);

const char *ob_cost_schedule_name(onebit_schedule_t schedule);

#endif
