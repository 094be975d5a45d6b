/* A collective on buffers of one size: its numbers, and the plans to be compared. */
#include <math.h>
#include <string.h>

#include "base/memory.h"
#include "bench/bench_collective.h"
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

static bool allocate(struct bench_case *test) {
  size_t size = ob_dtype_size(test->options->dtype);
  test->dense_send = ob_allocate(test->send_count, sizeof(float));
  test->send = size == sizeof(float) ? test->dense_send : ob_allocate(test->send_count, size);
  test->receive = ob_allocate(test->receive_count, size);
  if (!test->dense_send || !test->send || !test->receive)
    return false;
  if (!test->team->algorithm_count)
    return true;
  test->dense_receive = ob_allocate(test->receive_count, sizeof(float));
  return test->dense_receive != NULL;
}

static void fill(struct bench_case *test) {
  bench_fill(test->dense_send, test->send_count, (uint64_t)test->team->rank + 1);
  for (size_t i = 0; test->send != test->dense_send && i < test->send_count; i++)
    ob_store(test->send, i, test->options->dtype, test->dense_send[i]);
}

static onebit_status_t create_plan(struct bench_case *test, struct bench_way *way) {
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  options.operation = test->collective->operation;
  options.dtype = test->options->dtype;
  options.scale = test->options->scale;
  options.block_size = test->options->block_size;
  options.chunk_size = test->options->chunk_size;
  options.threads = test->options->threads;
  options.schedule = way->variant.schedule;
  options.wire = way->variant.wire;
  return onebit_plan_create(test->team->comm, test->count, &options, &way->plan);
}

/* Among several ways, one that the library refuses is a result. */
static int add_plan(struct bench_case *test, struct bench_variant variant) {
  struct bench_way *way = &test->ways[test->plan_count++];
  *way = (struct bench_way){.variant = variant, .error = NAN, .right = true};
  onebit_status_t status = create_plan(test, way);
  bool refused = status == ONEBIT_ERROR_ARGUMENT || status == ONEBIT_ERROR_UNSUPPORTED;
  if (refused && test->options->compare_count) {
    strncpy(way->refusal, onebit_last_error(), sizeof way->refusal - 1);
    return BENCH_OK;
  }
  if (!test->plan)
    test->plan = way->plan;
  if (status == ONEBIT_OK || test->team->rank == 0)
    return bench_status(status, "onebit_plan_create");
  return status == ONEBIT_ERROR_ARGUMENT ? BENCH_USAGE : BENCH_FAILED;
}

static int add_plans(struct bench_case *test) {
  const struct bench_options *options = test->options;
  int status = options->compare_count ? BENCH_OK : add_plan(test, options->variant);
  for (size_t k = 0; status == BENCH_OK && k < options->compare_count; k++)
    status = add_plan(test, options->compare[k]);
  if (status == BENCH_OK && !test->plan) {
    if (test->team->rank == 0)
      bench_complain("--compare: none of them can be planned: %s", test->ways[0].refusal);
    return BENCH_USAGE;
  }
  return status;
}

static void add_dense(struct bench_case *test) {
  test->way_count = test->plan_count;
  for (size_t k = 0; k < test->team->algorithm_count; k++)
    test->ways[test->way_count++] =
        (struct bench_way){.algorithm = &test->team->algorithms[k], .error = NAN, .right = true};
}

int bench_case_create(struct bench_team *team, const struct bench_options *options,
                      const struct bench_collective *collective, size_t bytes,
                      struct bench_case *test) {
  size_t ranks = (size_t)team->size, elements = bytes / sizeof(float);
  size_t share = elements / ranks ? elements / ranks : 1;
  *test = (struct bench_case){
      .team = team, .options = options, .collective = collective, .bytes = bytes};
  test->count = collective->scatters ? share : elements;
  test->send_count = test->count * (collective->scatters ? ranks : 1);
  test->receive_count = test->count * (collective->gathers ? ranks : 1);
  int status = add_plans(test);
  add_dense(test);
  if (status == BENCH_OK && !bench_team_agree(team, allocate(test))) {
    if (team->rank == 0)
      bench_complain("no memory for buffers of %zu bytes on every rank", bytes);
    status = BENCH_FAILED;
  }
  if (status == BENCH_OK)
    fill(test);
  else
    bench_case_destroy(test);
  return status;
}

void bench_case_destroy(struct bench_case *test) {
  for (size_t k = 0; k < test->plan_count; k++)
    onebit_plan_destroy(test->ways[k].plan);
  if (test->send != test->dense_send)
    ob_release(test->send);
  ob_release(test->dense_send);
  ob_release(test->dense_receive);
  ob_release(test->receive);
}

/* Few enough iterations that a gigabit network is done with all sizes in minutes. */
size_t bench_case_iterations(const struct bench_case *test) {
  if (test->options->iterations != BENCH_BY_SIZE)
    return test->options->iterations;
  return test->bytes <= 64 << 10 ? 200 : test->bytes <= 4 << 20 ? 40 : 11;
}

size_t bench_case_warmups(const struct bench_case *test) {
  const struct bench_options *options = test->options;
  if (options->check && options->checked_warmups != BENCH_BY_SIZE)
    return options->checked_warmups;
  if (options->warmups != BENCH_BY_SIZE)
    return options->warmups;
  return test->bytes <= 64 << 10 ? 20 : test->bytes <= 4 << 20 ? 5 : 2;
}

int bench_case_judge(struct bench_case *test, bool *right) {
  const struct bench_options *options = test->options;
  int status = BENCH_OK;
  *right = true;
  for (size_t k = 0; k < test->plan_count && status == BENCH_OK; k++) {
    struct bench_way *way = &test->ways[k];
    test->plan = way->plan ? way->plan : test->plan;
    if (!way->plan)
      continue;
    if (options->full || options->check)
      status = bench_case_error(test, &way->error);
    if (status == BENCH_OK && options->check)
      status = bench_case_check(test, &way->right);
    *right = *right && way->right;
  }
  return status;
}
