/* Implements the benchmarks that compare the library's collectives with MPI's. Each size has a
 * case, whose ways (plans and MPI algorithms) are timed by turns. */
#include "bench/bench_collective.h"

#include <limits.h>
#include <math.h>
#include <string.h>

#include "compression/numerics.h"

const struct bench_collective bench_collectives[] = {
    [ONEBIT_ALLREDUCE] = {"allreduce", "MPI_Allreduce", ONEBIT_ALLREDUCE, onebit_allreduce, false,
                          false, "iallreduce", "MPI_Iallreduce", onebit_iallreduce},
    [ONEBIT_ALLGATHER] = {"allgather", "MPI_Allgather", ONEBIT_ALLGATHER, onebit_allgather, true,
                          false, "iallgather", "MPI_Iallgather", onebit_iallgather},
    [ONEBIT_REDUCE_SCATTER] = {"reduce-scatter", "MPI_Reduce_scatter_block", ONEBIT_REDUCE_SCATTER,
                               onebit_reduce_scatter, false, true, "ireduce-scatter",
                               "MPI_Ireduce_scatter_block", onebit_ireduce_scatter},
};

/* --- Ways of the host */

onebit_plan_info_t bench_plan_info(onebit_plan_t plan) {
  onebit_plan_info_t info = {.size = sizeof info};
  onebit_plan_get_info(plan, &info);
  return info;
}

onebit_plan_options_t bench_case_options(const struct bench_case *test,
                                         struct bench_variant variant, onebit_device_t device) {
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  options.operation = test->collective->operation;
  options.dtype = test->options->dtype;
  options.scale = test->options->scale;
  options.block_size = test->options->block_size;
  options.chunk_size = test->options->chunk_size;
  options.threads = test->options->threads;
  options.schedule = variant.schedule;
  options.wire = variant.wire;
  options.bits = variant.wire == ONEBIT_WIRE_BITS ? test->options->bits : 0;
  options.residual_copies = test->options->residual_copies;
  options.device = device;
  return options;
}

struct bench_way *bench_case_add(struct bench_case *test, const char *name, bench_timed *run) {
  struct bench_way *way = &test->ways[test->rounds.count];
  *way = (struct bench_way){.test = test, .computing = NAN, .right = true};
  bench_rounds_add_entry(&test->rounds, name, run, way);
  return way;
}

static int collective_run_plan(const struct bench_entry *entry) {
  const struct bench_way *way = entry->context;
  const struct bench_case *test = way->test;
  return bench_check_status(test->collective->call(test->send, test->receive, way->plan),
                            test->collective->name);
}

static int collective_run_dense(const struct bench_entry *entry) {
  const struct bench_way *way = entry->context;
  struct bench_team *team = way->test->team;
  team->kind->dense(team, (size_t)(way->algorithm - team->algorithms),
                    way->test->collective->operation, way->test->dense_send,
                    way->test->dense_receive, way->test->count);
  return BENCH_OK;
}

/* Adds a plan. If the library refuses a plan of --compare, the run continues, and the plan's row
 * says why. */
static int add_plan(struct bench_case *test, struct bench_variant variant) {
  char name[48];
  snprintf(name, sizeof name, "%s%s", bench_schedules[variant.schedule],
           variant.wire == ONEBIT_WIRE_DENSE ? ":dense" : "");
  struct bench_way *way = bench_case_add(test, name, collective_run_plan);
  onebit_plan_options_t options = bench_case_options(test, variant, ONEBIT_DEVICE_HOST);
  onebit_status_t status = onebit_plan_create(test->comm, test->count, &options, &way->plan);
  bool refused = status == ONEBIT_ERROR_ARGUMENT || status == ONEBIT_ERROR_UNSUPPORTED;
  way->variant = variant;
  test->plan_count++;
  if (refused && test->options->compare_count) {
    test->rounds.entries[test->plan_count - 1].run = NULL;
    snprintf(way->refusal, sizeof way->refusal, "%s", onebit_last_error());
    return BENCH_OK;
  }
  if (!test->plan)
    test->plan = way->plan;
  if (status == ONEBIT_OK || test->team->rank == 0)
    return bench_check_status(status, "onebit_plan_create");
  return status == ONEBIT_ERROR_ARGUMENT ? BENCH_USAGE : BENCH_FAILED;
}

static int collective_add_ways(struct bench_case *test) {
  const struct bench_options *options = test->options;
  char name[48];
  if (!options->compare_count)
    BENCH_TRY(add_plan(test, options->variant));
  for (size_t k = 0; k < options->compare_count; k++)
    BENCH_TRY(add_plan(test, options->compare[k]));
  if (!test->plan) {
    if (test->team->rank == 0)
      bench_print_error("--compare: no plan can be created for any of these schedules: %s",
                        test->ways[0].refusal);
    return BENCH_USAGE;
  }
  for (size_t k = 0; k < test->team->algorithm_count; k++) {
    snprintf(name, sizeof name, "MPI %s", test->team->algorithms[k].name);
    bench_case_add(test, name, collective_run_dense)->algorithm = &test->team->algorithms[k];
  }
  return BENCH_OK;
}

/* --- A case */

static bool collective_allocate(struct bench_case *test) {
  const struct ob_memory *memory = test->space->memory;
  size_t size = ob_dtype_size(test->options->dtype);
  bool dense = test->device || test->team->algorithm_count;
  test->dense_send = memory->allocate(test->send_count, sizeof(float));
  test->send = size == sizeof(float) ? test->dense_send : memory->allocate(test->send_count, size);
  test->receive = memory->allocate(test->receive_count, size);
  if (dense)
    test->dense_receive = memory->allocate(test->receive_count, sizeof(float));
  if (test->device)
    test->half_send = memory->allocate(test->send_count, 2);
  return test->dense_send && test->send && test->receive && (!dense || test->dense_receive) &&
         (!test->device || test->half_send);
}

static int collective_fill(struct bench_case *test) {
  uint64_t seed = (uint64_t)test->team->rank + 1;
  BENCH_TRY(
      bench_space_fill(test->space, test->dense_send, test->send_count, ONEBIT_FLOAT32, seed));
  if (test->send != test->dense_send)
    BENCH_TRY(
        bench_space_fill(test->space, test->send, test->send_count, test->options->dtype, seed));
  return test->half_send ? bench_space_fill(test->space, test->half_send, test->send_count,
                                            ONEBIT_BFLOAT16, seed)
                         : BENCH_OK;
}

/* Completes a case for a size: creates the buffers, plans and entries. */
static int set_up_case(struct bench_case *test, size_t bytes) {
  const struct bench_collective *collective = test->collective;
  size_t ranks = (size_t)test->team->size, elements = bytes / sizeof(float);
  size_t share = elements / ranks ? elements / ranks : 1;
  test->bytes = bytes;
  test->count = collective->scatters ? share : elements;
  test->send_count = test->count * (collective->scatters ? ranks : 1);
  test->receive_count = test->count * (collective->gathers ? ranks : 1);
  int status = BENCH_OK;
  if (!bench_team_agree(test->team, collective_allocate(test))) {
    if (test->team->rank == 0)
      bench_print_error("some rank is out of memory for buffers of %zu bytes", bytes);
    status = BENCH_FAILED;
  }
  if (status == BENCH_OK && !bench_team_agree(test->team, collective_fill(test) == BENCH_OK))
    status = BENCH_FAILED;
  if (status == BENCH_OK)
    status = test->calls->add(test);
  if (status != BENCH_OK)
    bench_case_destroy(test);
  return status;
}

void bench_case_destroy(struct bench_case *test) {
  const struct ob_memory *memory = test->space->memory;
  bench_rounds_destroy(&test->rounds);
  for (size_t k = 0; k < test->rounds.count; k++)
    if (k == 0 || test->ways[k].plan != test->ways[k - 1].plan)
      onebit_plan_destroy(test->ways[k].plan);
  if (test->send != test->dense_send)
    memory->release(test->send);
  memory->release(test->dense_send);
  memory->release(test->dense_receive);
  memory->release(test->receive);
  memory->release(test->half_send);
}

/* Returns the number of iterations. With the default numbers, all sizes together take only minutes
 * on a gigabit network. */
static size_t choose_iterations(const struct bench_case *test) {
  if (test->options->iterations != BENCH_BY_SIZE)
    return test->options->iterations;
  return test->device ? 21 : test->bytes <= 64 << 10 ? 200 : test->bytes <= 4 << 20 ? 40 : 11;
}

static size_t choose_warmups(const struct bench_case *test) {
  if (test->options->warmups != BENCH_BY_SIZE)
    return test->options->warmups;
  return test->device ? 3 : test->bytes <= 64 << 10 ? 20 : test->bytes <= 4 << 20 ? 5 : 2;
}

void bench_case_set_iterations(struct bench_job *job, const struct bench_case *test,
                               struct bench_rounds *rounds) {
  rounds->rounds = choose_iterations(test);
  rounds->warmups = choose_warmups(test);
  snprintf(job->progress.what, sizeof job->progress.what, "%s of %zu bytes", job->benchmark->name,
           test->bytes);
  rounds->progress = &job->progress;
}

/* --- Times and rows */

/* Returns the fastest of entries first .. end - 1, or NULL if none ran. Leaves out plans with the
 * automatic schedule. */
static const struct bench_entry *find_fastest_entry(const struct bench_case *test, size_t first,
                                                    size_t end) {
  const struct bench_entry *best = NULL;
  for (size_t k = first; k < end; k++) {
    const struct bench_entry *entry = &test->rounds.entries[k];
    bool counts = test->ways[k].algorithm ||
                  (entry->run && test->ways[k].variant.schedule != ONEBIT_SCHEDULE_AUTOMATIC);
    if (counts && (!best || entry->time.median < best->time.median))
      best = entry;
  }
  return best;
}

/* Returns the dense entry on a device, which is NCCL's collective in float32, or NULL if there is
 * none. */
static const struct bench_entry *find_device_dense_entry(const struct bench_case *test) {
  return test->plan_count < test->rounds.count ? &test->rounds.entries[test->plan_count] : NULL;
}

/* Makes the row of entry k. Its times are zeros until the rounds are measured. */
static struct bench_row make_collective_row(const struct bench_case *test, size_t k) {
  const struct bench_rounds *rounds = &test->rounds;
  const struct bench_entry *best =
      test->options->compare_count ? find_fastest_entry(test, 0, test->plan_count) : NULL;
  struct bench_row row = {.test = test,
                          .way = &test->ways[k],
                          .time = &rounds->entries[k],
                          .dense = test->device
                                       ? find_device_dense_entry(test)
                                       : find_fastest_entry(test, test->plan_count, rounds->count),
                          .own = k < test->plan_count};
  if (row.dense && !test->device)
    row.dense_name = test->ways[row.dense - rounds->entries].algorithm->name;
  row.of_best = best ? row.time->time.median / best->time.median : NAN;
  return row;
}

/* Prints a row for each plan, or on a device for each entry. With --compare, also prints a row for
 * each of MPI's algorithms, in text format. */
static void collective_report(struct bench_table *table, const struct bench_case *test) {
  bool all = test->device || (test->options->compare_count && table->format == BENCH_TEXT);
  for (size_t k = 0; k < (all ? test->rounds.count : test->plan_count); k++) {
    struct bench_row row = make_collective_row(test, k);
    bench_collective_print_row(table, &row);
  }
}

/* Prints the notes and the column heads before the first row is measured. */
static void print_heads(struct bench_job *job, const struct bench_case *test) {
  struct bench_row row = make_collective_row(test, 0);
  test->calls->note(job, test);
  bench_collective_print_heads(job->table, &row);
}

int bench_measure_ways(struct bench_job *job, struct bench_case *test) {
  bool right = true;
  bench_case_set_iterations(job, test, &test->rounds);
  if (job->team->rank == 0 && job->first)
    print_heads(job, test);
  BENCH_TRY(bench_rounds_measure(&test->rounds));
  if (test->calls->synchronize)
    BENCH_TRY(test->calls->synchronize(test));
  BENCH_TRY(test->calls->judge(test, &right));
  if (test->options->rate > 0)
    BENCH_TRY(bench_measure_limits(test));
  if (job->team->rank == 0)
    collective_report(job->table, test);
  return right ? BENCH_OK : BENCH_FAILED;
}

/* --- All sizes */

static const struct bench_calls blocking = {collective_add_ways, bench_measure_ways, NULL,
                                            bench_case_check_all, bench_collective_print_notes},
                                nonblocking = {.add = collective_add_ways,
                                               .measure = bench_measure_overlap};

static struct bench_case make_case(struct bench_team *team, const struct bench_options *options,
                                   const struct bench_collective *collective) {
  return (struct bench_case){.team = team,
                             .options = options,
                             .collective = collective,
                             .calls = &blocking,
                             .space = &bench_space_host,
                             .comm = team->comm,
                             .rounds = {.repeats = 1, .team = team, .link = options->link}};
}

int bench_case_create(struct bench_team *team, const struct bench_options *options,
                      const struct bench_collective *collective, size_t bytes,
                      struct bench_case *test) {
  *test = make_case(team, options, collective);
  return set_up_case(test, bytes);
}

struct bench_case bench_case_without_size(struct bench_job *job) {
  const struct bench_collective *row = bench_collectives;
  while (strcmp(row->name, job->benchmark->name) != 0 &&
         strcmp(row->nonblocking_name, job->benchmark->name) != 0)
    row++;
  return make_case(job->team, job->options, row);
}

/* True if the counts of the dense collective fit an int, which MPI requires, and also the count of
 * an allgather's receive buffer. */
static bool dense_fits(const struct bench_case *like) {
  const struct bench_team *team = like->team;
  size_t most = (size_t)INT_MAX / (like->collective->gathers ? (size_t)team->size : 1);
  if (!team->algorithm_count || like->options->largest / sizeof(float) <= most)
    return true;
  if (team->rank == 0)
    bench_print_error("-m %zu: %s accepts at most %zu elements; --no-dense leaves it out",
                      like->options->largest, like->collective->dense_name, most);
  return false;
}

/* Measures a size. A reduce-scatter needs at least one element per rank. Smaller sizes are skipped,
 * except the last size, which is enlarged. On a device, all ranks wait in a barrier before the next
 * size: freeing device memory waits for the device, which several ranks may share. */
int bench_measure_collective_size(struct bench_job *job, size_t bytes, void *like) {
  struct bench_case test = *(const struct bench_case *)like;
  if (test.collective->scatters && bytes / sizeof(float) < (size_t)test.team->size && !job->last)
    return BENCH_OK;
  int status = set_up_case(&test, bytes);
  if (status == BENCH_OK) {
    status = test.calls->measure(job, &test);
    job->first = false;
    bench_case_destroy(&test);
  }
  if (job->device)
    job->team->kind->barrier(job->team);
  return status;
}

static int run_on_host(struct bench_job *job, const struct bench_calls *calls) {
  struct bench_case like = bench_case_without_size(job);
  struct bench_team *team = job->team;
  like.calls = calls;
  if (team->kind->choose && !job->options->no_dense &&
      team->kind->choose(team, job->options, like.collective->operation) != BENCH_OK)
    return BENCH_USAGE;
  return dense_fits(&like) ? bench_measure_sizes(job, bench_measure_collective_size, &like)
                           : BENCH_USAGE;
}

int bench_run_collective(struct bench_job *job) { return run_on_host(job, &blocking); }

int bench_run_nonblocking(struct bench_job *job) { return run_on_host(job, &nonblocking); }
