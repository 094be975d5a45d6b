/* Defines the table of subcommands, runs a subcommand for each size, and prints rows as text, JSON
 * and CSV. */
#include <math.h>
#include <stdarg.h>
#include <string.h>
#include <unistd.h>

#include "base/process.h"
#include "bench/bench_passes.h"

#ifdef ONEBIT_HAVE_CUDA
#define CUDA(run) run
#else
#define CUDA(run) NULL
#endif

#define K ((size_t)1 << 10)
#define M ((size_t)1 << 20)

/* clang-format off */
const struct bench_benchmark bench_table[] = {
    {"allreduce", "onebit_allreduce compared with MPI_Allreduce",
     BENCH_COLLECTIVES, 4 * K, 16 * M, bench_run_collective, CUDA(bench_cuda_collective)},
    {"allgather", "onebit_allgather compared with MPI_Allgather",
     BENCH_COLLECTIVES, 4 * K, 4 * M, bench_run_collective, CUDA(bench_cuda_collective)},
    {"reduce-scatter", "onebit_reduce_scatter compared with MPI_Reduce_scatter_block",
     BENCH_COLLECTIVES, 4 * K, 16 * M, bench_run_collective, CUDA(bench_cuda_collective)},
    {"iallreduce", "onebit_iallreduce during a computation, compared with MPI_Iallreduce",
     BENCH_NONBLOCKING, 4 * K, 16 * M, bench_run_nonblocking, NULL},
    {"iallgather", "onebit_iallgather during a computation, compared with MPI_Iallgather",
     BENCH_NONBLOCKING, 4 * K, 4 * M, bench_run_nonblocking, NULL},
    {"ireduce-scatter",
     "onebit_ireduce_scatter during a computation, compared with MPI_Ireduce_scatter_block",
     BENCH_NONBLOCKING, 4 * K, 16 * M, bench_run_nonblocking, NULL},
    {"codec", "one core's passes over memory, compared with a triad loop",
     BENCH_CODEC, 0, 128 * M, bench_run_codec, CUDA(bench_run_codec)},
    {"optimizers", "each optimizer's step on one rank, compared with its dense step",
     BENCH_STEPS, 0, 128 * M, bench_run_optimizers, CUDA(bench_run_optimizers)},
    {0}};
/* clang-format on */

const struct bench_benchmark *bench_find_benchmark(const char *name) {
  const struct bench_benchmark *row = bench_table;
  while (row->name && strcmp(row->name, name) != 0)
    row++;
  return row->name ? row : NULL;
}

int bench_run_benchmark(const struct bench_benchmark *benchmark,
                        const struct bench_options *options, struct bench_team *team) {
  struct bench_table table = {.benchmark = benchmark->name,
                              .format = options->json  ? BENCH_JSON
                                        : options->csv ? BENCH_CSV
                                                       : BENCH_TEXT};
  struct bench_job job = {benchmark, options, team, NULL, &table, true, false, {0}};
  job.progress = (struct bench_progress){
      .open = !team || team->rank == 0, .terminal = isatty(STDERR_FILENO), .start = ob_seconds()};
  if (options->device == ONEBIT_DEVICE_HOST)
    return benchmark->run(&job);
  int status = BENCH_USAGE;
#ifdef ONEBIT_HAVE_CUDA
  struct bench_device device;
  status = bench_device_open(team, &device);
  job.device = &device;
  table.device = device.properties.name;
  table.emulated = BENCH_EMULATED;
  if (status == BENCH_OK)
    status = benchmark->run_cuda(&job);
  bench_device_close(&device);
#endif
  return status;
}

/* Measures each size. After a failure of a collective on the host, such as a wrong result, the next
 * size is still measured. Other failures end the run, since the next size would fail too. */
int bench_measure_sizes(struct bench_job *job, bench_size *measure, void *context) {
  int worst = BENCH_OK;
  for (size_t bytes = job->options->smallest; bytes <= job->options->largest;
       bytes *= job->options->factor) {
    job->last = bytes * job->options->factor > job->options->largest;
    int status = measure(job, bytes, context);
    worst = status > worst ? status : worst;
    if (status == BENCH_USAGE || (status != BENCH_OK && (!job->team || job->device)))
      break;
  }
  return worst;
}

/* --- Rows */

static void table_print_line(struct bench_table *table, bench_fields *fields, const void *row) {
  table->fields = 0;
  table->json = (struct ob_json){.file = stdout};
  if (table->format == BENCH_JSON)
    ob_json_begin(&table->json, NULL, '{');
  bench_put_text(table, "benchmark", NULL, 0, table->benchmark);
  if (table->device) {
    bench_put_text(table, "device", NULL, 0, table->device);
    bench_put_bool(table, "emulated", &table->emulated);
  }
  fields(table, row);
  if (table->format == BENCH_JSON)
    ob_json_end(&table->json, '}');
  printf("\n");
}

void bench_print_heads(struct bench_table *table, bench_fields *fields, const void *row) {
  table->heads = !table->headed && table->format != BENCH_JSON;
  if (table->heads)
    table_print_line(table, fields, row);
  table->heads = false;
  table->headed = true;
  fflush(stdout);
}

void bench_print_row(struct bench_table *table, bench_fields *fields, const void *row) {
  bench_print_heads(table, fields, row);
  table_print_line(table, fields, row);
  fflush(stdout);
}

void bench_print_note(struct bench_table *table, const char *format, ...) {
  if (table->format != BENCH_TEXT)
    return;
  va_list arguments;
  va_start(arguments, format);
  printf("# ");
  vprintf(format, arguments);
  printf("\n");
  fflush(stdout);
  va_end(arguments);
  table->headed = false;
}

/* --- Fields */

/* Prints a field in text format. Two spaces precede a left-aligned column. A line of heads begins
 * with "# ". */
static void print_put_text(struct bench_table *table, int width, const char *text) {
  const char *before = table->fields == 0 && table->heads ? "# " : "";
  if (table->fields > 0 && width < 0)
    printf("  ");
  printf("%s%*s", before, width + (*before ? 2 : 0), text);
  table->fields++;
}

/* Puts a value in CSV format, in quotes if it contains a comma or a quote. */
static void put_csv(struct bench_table *table, const char *text) {
  bool quoted = strpbrk(text, ",\"") != NULL;
  printf(table->fields++ ? "," : "");
  if (quoted)
    printf("\"");
  for (const char *c = text; *c; c++)
    printf(*c == '"' ? "\"\"" : "%c", *c);
  if (quoted)
    printf("\"");
}

/* Returns true if the caller must print the field's value. Returns false if this format does not
 * have the field, or if this function has printed the field's head. */
static bool wants_value(struct bench_table *table, const char *key, const char *head, int width) {
  if (!(table->format == BENCH_TEXT ? head : key))
    return false;
  if (table->heads && table->format == BENCH_TEXT)
    print_put_text(table, width, head);
  else if (table->heads)
    put_csv(table, key);
  return !table->heads;
}

void bench_put_text(struct bench_table *table, const char *key, const char *head, int width,
                    const char *text) {
  if (!wants_value(table, key, head, width))
    return;
  if (table->format == BENCH_JSON)
    ob_json_put_string(&table->json, key, text);
  else if (table->format == BENCH_CSV)
    put_csv(table, text ? text : "");
  else
    print_put_text(table, width, text ? text : "-");
}

void bench_put_number(struct bench_table *table, const char *key, const char *head, int width,
                      int digits, double number) {
  char text[64];
  bool whole = number >= 0 && number < 0x1p53 && number == floor(number);
  if (!wants_value(table, key, head, width))
    return;
  if (table->format == BENCH_JSON && whole)
    ob_json_integer(&table->json, key, (uint64_t)number);
  else if (table->format == BENCH_JSON)
    ob_json_real(&table->json, key, number);
  else if (table->format == BENCH_CSV && whole)
    snprintf(text, sizeof text, "%.0f", number), put_csv(table, text);
  else if (table->format == BENCH_CSV)
    put_csv(table, isfinite(number) ? ob_json_number(text, number) : "");
  else {
    snprintf(text, sizeof text, digits < 0 ? "%.*g" : "%.*f", digits < 0 ? -digits : digits,
             number);
    print_put_text(table, width, isnan(number) ? "-" : text);
  }
}

void bench_put_time(struct bench_table *table, const char *key, const char *head, int width,
                    int digits, double seconds) {
  bool milliseconds = table->format == BENCH_TEXT && head && strstr(head, "(ms)");
  bench_put_number(table, key, head, width, digits, (milliseconds ? 1e3 : 1e6) * seconds);
}

void bench_put_bool(struct bench_table *table, const char *key, const bool *value) {
  if (!wants_value(table, key, NULL, 0))
    return;
  if (table->format == BENCH_CSV)
    put_csv(table, !value ? "" : *value ? "true" : "false");
  else if (value)
    ob_json_bool(&table->json, key, *value);
  else
    ob_json_put_string(&table->json, key, NULL);
}
