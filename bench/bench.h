/*
 * onebit-bench: measures the speed of the collectives, the codecs and the optimizers' steps.
 *
 * All benchmarks share one harness. bench_options.c reads the options. The ranks are MPI processes
 * (bench.c), or threads, processes, or a launcher's processes over sockets (bench_team.c). The loop
 * of bench_measure.c times entries by turns, in host memory or device memory. bench_table.c prints
 * rows as text, JSON or CSV. A benchmark is a row of bench_table that says what to time. A
 * benchmark does not judge its times; only -c, which checks results, can make it fail.
 */
#ifndef BENCH_BENCH_H
#define BENCH_BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "base/json.h"
#include "base/memory.h"
#include "onebit/onebit.h"
#include "tools/options.h"

/* Exit statuses: success; a check or a function has failed; the command line is wrong. */
enum { BENCH_OK = 0, BENCH_FAILED = 1, BENCH_USAGE = 2 };

#define BENCH_TRY(call)                                                                            \
  do {                                                                                             \
    int bench_try_status = (call);                                                                 \
    if (bench_try_status != BENCH_OK)                                                              \
      return bench_try_status;                                                                     \
  } while (0)

struct bench_benchmark;
struct bench_device;
struct bench_entry;
struct bench_team;
struct bench_table;

/* --- Options. Sizes are 4 bytes per element (float32), whatever the dtype. */

#define BENCH_BY_SIZE    ((size_t)-1) /* iterations, warmups: as many as suit the size */
#define BENCH_BY_TIME    ((size_t)-1) /* tests: as many as suit the computation's length */
#define BENCH_STREAMS    16           /* the largest number of entries of --streams */
#define BENCH_VARIANTS   12           /* the largest number of entries of --compare */
#define BENCH_ALGORITHMS 16           /* the largest number of MPI's algorithms */

/* The options of a plan that a comparison varies. */
struct bench_variant {
  onebit_schedule_t schedule;
  onebit_wire_t wire;
};

struct bench_options {
  size_t smallest, largest; /* 0: the benchmark's default */
  size_t factor;            /* the ratio of each size to the previous size */
  size_t iterations, warmups;
  size_t tests; /* onebit_test calls while a computation overlaps with a collective */
  bool full, check, no_dense, json, csv;
  size_t block_size, chunk_size; /* 0: the library's default */
  onebit_scale_t scale;
  int bits;            /* bits per element; 0 means 1 */
  int residual_copies; /* 0: the library's default */
  onebit_dtype_t dtype;
  onebit_device_t device; /* the device of the buffers */
  int threads;
  int ranks;         /* number of ranks as threads of this process; 0: MPI processes */
  bool nccl;         /* the ranks communicate over NCCL */
  int nccl_ranks;    /* number of processes to start as ranks; 0: none */
  bool sockets;      /* the ranks communicate over the library's own connections */
  int connections;   /* connections per pair of ranks; 0: the library's default */
  double rate;       /* each host's link in bytes per second, with headers; 0: prints no limits */
  int cores;         /* number of cores of all ranks together; 0: each rank has its own core */
  const char *link;  /* the interface whose bytes are counted; NULL: none */
  const char *codec; /* NULL: all codecs, or the library's choice */
  size_t streams[BENCH_STREAMS], stream_count;
  struct bench_variant variant; /* the variant to run without --compare */
  struct bench_variant compare[BENCH_VARIANTS];
  size_t compare_count;
  int all_algorithms; /* 1: all algorithms of the MPI library; 0: only its default */
};

/* Reads the options from argv[2..]. If they are wrong, `error` gets a message. */
enum tool_asked bench_options_parse(int argc, char **argv, const struct bench_benchmark *benchmark,
                                    struct bench_options *options, char error[TOOL_ERROR]);
/* Prints the help, the version or the error if `speak` is true. Returns the status with which the
 * caller then exits. */
int bench_options_answer(const struct bench_benchmark *benchmark, enum tool_asked asked,
                         const char *error, bool speak);

extern const char *const bench_dtypes[],
    *const bench_scales[],
        *const bench_schedules[],
            *const bench_wires[]; /* names of enumeration values; the last entry is NULL */

/* --- The table of benchmarks */

/* The kinds of benchmarks, as bits. An option belongs to one or more kinds. */
enum {
  BENCH_COLLECTIVES = 1,
  BENCH_CODEC = 2,
  BENCH_STEPS = 4,
  BENCH_NONBLOCKING = 8,
  BENCH_RANKED = BENCH_COLLECTIVES | BENCH_NONBLOCKING
};

/* The progress lines of a run on standard error. On a terminal, each line overwrites the previous
 * one. In a file, the lines follow each other, the first one after 5 s. Only rank 0 has `open` set
 * and prints them. */
struct bench_progress {
  bool open, terminal, shown;
  double start, next; /* when the run started; the next line is due `next` seconds later */
  char what[64];      /* the description of what is measured */
};

/* Prints which entry is measured. part: the fraction of the run that is finished after
 * `seconds`. */
void bench_progress_show(struct bench_progress *progress, const char *entry, double part,
                         double seconds);
void bench_progress_clear(struct bench_progress *progress); /* called before a row is printed */

/* The state of a benchmark run. */
struct bench_job {
  const struct bench_benchmark *benchmark;
  const struct bench_options *options;
  struct bench_team *team;     /* NULL: the benchmark has no ranks */
  struct bench_device *device; /* NULL: buffers are in host memory */
  struct bench_table *table;
  bool first, last; /* this size is the first one; it is the last one */
  struct bench_progress progress;
};

/* Runs a benchmark. Returns the exit status, which is the same on all ranks. */
typedef int bench_run(struct bench_job *job);

struct bench_benchmark {
  const char *name, *summary;
  unsigned kind;
  size_t smallest, largest; /* the defaults of -m; smallest 0: only size `largest` */
  bench_run *run;
  bench_run *run_cuda; /* the benchmark with device buffers; NULL: not supported */
};

extern const struct bench_benchmark bench_table[];
/* Returns the benchmark of this name, or NULL if there is none. */
const struct bench_benchmark *bench_find_benchmark(const char *name);
/* Runs a benchmark on the device and with the output format that the options give. */
int bench_run_benchmark(const struct bench_benchmark *benchmark,
                        const struct bench_options *options, struct bench_team *team);
bench_run bench_run_collective, bench_run_nonblocking, bench_run_codec, bench_run_optimizers,
    bench_cuda_collective;

/* Calls `measure` for each size that the options give. Returns the worst exit status. */
typedef int bench_size(struct bench_job *job, size_t bytes, void *context);
int bench_measure_sizes(struct bench_job *job, bench_size *measure, void *context);

/* --- Ranks */

/* An algorithm of the MPI library for a dense collective. */
struct bench_algorithm {
  int number; /* 0: the library's own choice */
  char name[32];
};

struct bench_team_kind {
  void (*barrier)(struct bench_team *team);
  /* values[i] becomes the sum (or, if not `sum`, the maximum) of all ranks' values[i]. */
  void (*combine)(struct bench_team *team, double *values, size_t count, bool sum);
  /* The dense collectives of these ranks, on float32; NULL if there are none. `choose` is
   * collective: it fills in the team's algorithms and returns an exit status. `dense` runs the
   * algorithm with the given index. */
  int (*choose)(struct bench_team *team, const struct bench_options *options,
                onebit_operation_t operation);
  void (*dense)(struct bench_team *team, size_t algorithm, onebit_operation_t operation,
                const float *send, float *receive, size_t count);
  /* Only one nonblocking dense collective can be active. finish_dense waits until it has ended, or,
   * if not `wait`, only tests whether it has. */
  void (*start_dense)(struct bench_team *team, onebit_operation_t operation, const float *send,
                      float *receive, size_t count);
  void (*finish_dense)(struct bench_team *team, bool wait);
};

struct bench_team {
  const struct bench_team_kind *kind;
  int rank, size;
  onebit_comm_t comm;
  void *state;
  const struct bench_algorithm *algorithms;
  size_t algorithm_count; /* 0 if these ranks have no dense collective */
  const char *library;    /* the MPI library's name and version */
};

/* Returns true on all ranks if `well` is true on every rank. */
bool bench_team_agree(struct bench_team *team, bool well);

/* Run the body on each rank, and return the largest exit status. The ranks are threads with a
 * loopback communicator, or processes with a communicator of one rank each. The processes are
 * started before CUDA is used. */
typedef int bench_body(struct bench_team *team, const void *context);
int bench_team_run_threads(int ranks, bench_body *body, const void *context);
int bench_team_run_processes(int ranks, bench_body *body, const void *context);

/* Runs the body with a communicator over sockets. The environment variables RANK and WORLD_SIZE
 * give the rank and the number of ranks. */
int bench_sockets_run(int connections, bench_body *body, const void *context);

/* --- Measuring */

struct bench_statistics {
  double minimum, median, mean, percentile90, percentile99, maximum;
};

/* Sorts the samples, and returns their statistics. */
struct bench_statistics bench_statistics(double *samples, size_t count);
/* Returns statistics of a[i] / b[i], the times of two entries in the same round. `scratch` has
 * space for `count` numbers. */
struct bench_statistics bench_ratio(const double *a, const double *b, size_t count,
                                    double *scratch);

/* Fills an array with numbers like those of a gradient: normally distributed, with regions of
 * different magnitude, never all equal and never all zeros. Each seed gives different numbers. */
void bench_fill_values(float *values, size_t count, uint64_t seed);
/* Keeps one core busy with `units` pieces of arithmetic, which take about a microsecond each. */
void bench_compute_units(size_t units);
/* Returns the number of bytes, including all headers, that a network interface of this host has
 * sent, by the kernel's counter. Returns NAN if the interface does not exist. */
double bench_link_sent(const char *interface);

/* A memory space and its clock. `start` and `stop` surround the timed calls. On a device, CUDA
 * events measure the time until the work of the calls has ended. On the host, the clock measures
 * the time until the calls return. */
struct bench_space {
  const struct ob_memory *memory;
  int (*start)(struct bench_device *device, double *seconds);
  /* On entry *seconds is the value that `start` stored; on return it is the time since `start`. */
  int (*stop)(struct bench_device *device, double *seconds);
};

extern const struct bench_space bench_space_host, bench_space_cuda;

/* Fills a buffer in this memory space with the numbers of bench_fill_values, converted to a dtype.
 * Returns an exit status. */
int bench_space_fill(const struct bench_space *space, void *to, size_t count, onebit_dtype_t dtype,
                     uint64_t seed);

/* Calls the timed function of an entry. */
typedef int bench_timed(const struct bench_entry *entry); /* returns an exit status */
struct bench_entry {
  char name[48];
  bench_timed *run; /* NULL: the library refused the entry's plan */
  void *context;
  const struct bench_pass *pass; /* the pass over memory that `run` executes, or NULL */
  size_t streams;                /* number of ranks whose messages the pass reads */
  double bytes;                  /* number of bytes that the pass must move */
  bool waits;                    /* `run` waits for its result, so the host clock times it */
  double *times;                 /* in each round, seconds on the slowest rank */
  struct bench_statistics time;
  double wire_bytes, link_bytes; /* bytes sent in a call, by the rank (host) that sends most */
};

#define BENCH_ENTRIES (BENCH_STREAMS * 3 + 20)

/* A sequence of rounds. Each round runs every entry once, in an order that changes. */
struct bench_rounds {
  struct bench_entry entries[BENCH_ENTRIES];
  size_t count, rounds, warmups;
  size_t repeats;                  /* number of calls that are timed together */
  struct bench_team *team;         /* NULL: no ranks; ranks begin a measurement together */
  const struct bench_space *space; /* NULL: host memory */
  struct bench_device *device;
  const char *link;                /* the interface whose bytes are counted, or NULL */
  struct bench_progress *progress; /* NULL: none */
  double *memory, *scratch;
};

struct bench_entry *bench_rounds_add_entry(struct bench_rounds *rounds, const char *name,
                                           bench_timed *run, void *context); /* adds an entry */
/* Times all entries, and computes the statistics of their times. Collective. Returns an exit
 * status. */
int bench_rounds_measure(struct bench_rounds *rounds);
void bench_rounds_destroy(struct bench_rounds *rounds);

#define bench_print_error(...) tool_print_error("onebit-bench", __VA_ARGS__)
/* Prints that memory for `count` things called `what` could not be allocated. Returns the exit
 * status. */
int bench_report_no_memory(const char *what, size_t count);
/* If the status is an error, prints `what` and the library's error message. Returns the exit status
 * for it. */
int bench_check_status(onebit_status_t status, const char *what);

/* --- Rows. A bench_fields function puts the fields of a row, one after the other. The table prints
 * them as a line of text, a JSON object or a line of CSV. A line of column heads precedes the first
 * row. */

struct bench_table {
  const char *benchmark, *device; /* device: NULL, or its name */
  bool emulated;
  enum { BENCH_TEXT, BENCH_JSON, BENCH_CSV } format;
  bool heads; /* the current line has column heads instead of values */
  bool headed;
  size_t fields; /* number of fields that the current line already has */
  struct ob_json json;
};

typedef void bench_fields(struct bench_table *table, const void *row);
void bench_print_row(struct bench_table *table, bench_fields *fields, const void *row);
/* Prints the column heads, unless they are printed already. `row` need not have measurements. */
void bench_print_heads(struct bench_table *table, bench_fields *fields, const void *row);
/* Prints a line that begins with "# ", in text format only. The column heads are printed again
 * before the next row. */
void bench_print_note(struct bench_table *table, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Put a field. `key` is the field's name in JSON and CSV, and `head` is its name in text. If the
 * name is NULL, that format does not have the field. A negative width aligns to the left. A number
 * that is not finite is null in JSON, empty in CSV, and "-" in text if it is NAN. `digits` are the
 * digits after the point; a negative value means -digits significant digits. */
void bench_put_text(struct bench_table *table, const char *key, const char *head, int width,
                    const char *text);
void bench_put_number(struct bench_table *table, const char *key, const char *head, int width,
                      int digits, double number);
/* Puts a time. JSON and CSV have microseconds, and text has the unit that `head` names. */
void bench_put_time(struct bench_table *table, const char *key, const char *head, int width,
                    int digits, double seconds);
void bench_put_bool(struct bench_table *table, const char *key, const bool *value); /* NULL: null */

#endif
