/*
 * onebit-bench: the speed of the collectives, the codecs and the optimizer's local work.
 *
 * The harness is written once: options (bench_options.c), ranks that are MPI processes
 * (bench_mpi.c) or threads (bench_team.c), timed rounds and their statistics (bench_measure.c). A
 * benchmark is a row of bench_table that says what to time. A benchmark reports, it does not
 * assert: only -c, which looks at results and not at times, can make it fail.
 */
#ifndef BENCH_BENCH_H
#define BENCH_BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "onebit/onebit.h"

/* Exit statuses: all well; a check or a call failed; the command line is wrong. */
enum { BENCH_OK = 0, BENCH_FAILED = 1, BENCH_USAGE = 2 };

/* --- Options. Sizes are bytes of the elements as float32, whatever the dtype. */

#define BENCH_BY_SIZE    ((size_t)-1) /* iterations, warmups: chosen by the size */
#define BENCH_BY_TIME    ((size_t)-1) /* tests: chosen by the length of the computation */
#define BENCH_STREAMS    16           /* numbers of streams in one --streams */
#define BENCH_VARIANTS   12           /* names in one --compare */
#define BENCH_ALGORITHMS 16           /* numbers in one --mpi-algorithms */

/* The size on a device where -m does not say: several times what a GPU's caches have. */
#define BENCH_CUDA_BYTES ((size_t)256 << 20)

/* What is asked of a plan. */
struct bench_variant {
  onebit_schedule_t schedule;
  onebit_wire_t wire;
};

struct bench_options {
  size_t smallest, largest;
  size_t iterations, warmups, checked_warmups;
  size_t tests; /* in the computation beside a nonblocking collective */
  bool full, tails, check, no_dense, json, timeline;
  size_t block_size, chunk_size; /* 0: the library's default */
  onebit_scale_t scale;
  onebit_dtype_t dtype;
  int threads;
  int ranks;         /* threads of this process; 0: MPI */
  const char *link;  /* NULL: do not look; the interface whose bytes are counted */
  const char *codec; /* NULL: all of them, or the library's choice */
  size_t streams[BENCH_STREAMS], stream_count;
  bool sized;                   /* -m was given */
  onebit_device_t device;       /* where the buffers are */
  bool nccl;                    /* the ranks talk over NCCL */
  int nccl_ranks;               /* processes, to be started; 0: the ranks are there */
  struct bench_variant variant; /* where there is nothing to compare */
  struct bench_variant compare[BENCH_VARIANTS]; /* compare_count of them */
  size_t compare_count;
  bool all_algorithms; /* of the MPI library's; none: only its own choice */
  int algorithms[BENCH_ALGORITHMS];
  size_t algorithm_count;
};

struct bench_team;

/* Which benchmarks an option belongs to, as bits. */
enum {
  BENCH_COLLECTIVES = 1,
  BENCH_CODEC = 2,
  BENCH_ADAM = 4,
  BENCH_NONBLOCKING = 8,
  BENCH_RANKED = BENCH_COLLECTIVES | BENCH_NONBLOCKING,
  BENCH_ALL = 15
};

struct bench_benchmark;

/* Returns an exit status, the same on all ranks. team is NULL for the kinds that have no ranks. */
typedef int bench_run(const struct bench_benchmark *benchmark, const struct bench_options *options,
                      struct bench_team *team);

struct bench_benchmark {
  const char *name, *summary;
  unsigned kind;
  size_t smallest, largest; /* when -m does not say; smallest 0: only the largest */
  bench_run *run;
  bench_run *run_cuda; /* with buffers on a device; NULL: there is no such thing here */
};

extern const struct bench_benchmark bench_table[];
const struct bench_benchmark *bench_find(const char *name); /* NULL: there is none */
bench_run bench_run_on;                                     /* on the options' device */

/* Reads argv[2..]. False with words in `error` when they make no sense; *help when help is asked
 * for. */
bool bench_options_parse(int argc, char **argv, const struct bench_benchmark *benchmark,
                         struct bench_options *options, bool *help, char error[256]);
void bench_print_help(const struct bench_benchmark *benchmark);
void bench_print_notes(const struct bench_benchmark *benchmark); /* behind the options */

/* --- Ranks */

/* A way of the MPI library's to do a dense collective. */
struct bench_algorithm {
  int number; /* 0: the library's own choice */
  char name[32];
};

struct bench_team_kind {
  void (*barrier)(struct bench_team *team);
  /* values[i] = the maximum, or the sum, over the ranks of values[i]. */
  void (*combine)(struct bench_team *team, double *values, size_t count, bool sum);
  /* The rest is of the dense collectives of this kind, on float32; NULL: there are none to compare
   * with. */
  /* Collective: fills in the team's algorithms, of this operation. An exit status. */
  int (*choose)(struct bench_team *team, const struct bench_options *options,
                onebit_operation_t operation);
  /* With the team's algorithm of that index. */
  void (*dense)(struct bench_team *team, size_t algorithm, onebit_operation_t operation,
                const float *send, float *receive, size_t count);
  /* Nonblocking, one at a time; finish_dense says whether it is finished, or waits until it is. */
  void (*start_dense)(struct bench_team *team, onebit_operation_t operation, const float *send,
                      float *receive, size_t count);
  bool (*finish_dense)(struct bench_team *team, bool wait);
};

struct bench_team {
  const struct bench_team_kind *kind;
  int rank, size;
  onebit_comm_t comm;
  void *state;
  const struct bench_algorithm *algorithms;
  size_t algorithm_count; /* 0 where there is no dense collective */
};

typedef int bench_body(struct bench_team *team, const void *context);

/* True on all ranks if `well` is true on all of them. */
bool bench_team_agree(struct bench_team *team, bool well);

/* Runs the body on `ranks` threads with a loopback communicator; returns the largest exit status.
 */
int bench_team_run_threads(int ranks, bench_body *body, const void *context);

/* The same on processes that this one starts and waits for. Their communicators are their own, with
 * one rank. Nothing of CUDA may have been called before. */
int bench_team_run_processes(int ranks, bench_body *body, const void *context);

#ifdef ONEBIT_HAVE_MPI
/* Before MPI_Init: lets algorithms be chosen, in libraries that want to be told so. */
void bench_mpi_allow_algorithms(void);
/* MPI_Init, and the number of ranks that mpirun gave; then the body on these; then MPI_Finalize. */
void bench_mpi_begin(int *argc, char ***argv, int *rank, int *size);
int bench_mpi_run(bench_body *body, const void *context);
void bench_mpi_end(void);
const char *bench_mpi_library(void);
#endif

/* --- Measuring */

double bench_now(void); /* seconds */

struct bench_statistics {
  double minimum, median, mean, percentile90, percentile99, maximum;
};

/* Sorts the samples. */
struct bench_statistics bench_statistics(double *samples, size_t count);

/* Of a[i] / b[i], which belong to the same round. `scratch` has room for count numbers. */
struct bench_statistics bench_ratio(const double *a, const double *b, size_t count,
                                    double *scratch);

/* Fills with numbers like those of a gradient: normal, in regions of different magnitude, never all
 * the same and never zeros. Other seeds give other numbers. */
void bench_fill(float *values, size_t count, uint64_t seed);

/* Keeps one core busy with `units` pieces of arithmetic, each about a microsecond long. */
void bench_compute(size_t units);

/* Prints "onebit-bench: " and the words to stderr. */
void bench_complain(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Prints what failed and the library's words; the exit status that goes with it. */
int bench_status(onebit_status_t status, const char *what);

/* A field of a JSON object, behind others. NULL, and what is no finite number, is null. */
void bench_json_text(FILE *stream, const char *name, const char *text);
void bench_json_number(FILE *stream, const char *name, double number);
void bench_json_whole(FILE *stream, const char *name, size_t number);

const char *bench_dtype_name(onebit_dtype_t dtype);
const char *bench_scale_name(onebit_scale_t scale);
const char *bench_schedule_name(onebit_schedule_t schedule);
const char *bench_wire_name(onebit_wire_t wire);

#endif
