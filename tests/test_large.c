/*
 * Tests values so large that the sum at a server may overflow although all inputs are finite. If it
 * overflows, every rank must get ONEBIT_SKIPPED, and no receive buffer or residual may change,
 * although results are usually applied while other messages are still in flight. Large values that
 * do not overflow give the oracle's results.
 */
#include "tests/support_collectives.h"

/* Dense messages are cut as if blocks had the default size. */
enum { BLOCK = 32, CHUNK = 2048, COUNT = 24 * CHUNK, STEPS = 6 };

struct large {
  struct collective_case what;
  float value;
  struct oracle *oracle;
  float results[STEPS][COUNT];
  bool done[STEPS]; /* false: skipped */
};

/* Fills a rank's input. All ranks of a worker have the same large values, which are only in the
 * last block, in the last server's last chunk. Step 0 leaves a residual of at least a third of the
 * value in this block, positive in the first half and negative in the second. The input of step 1
 * has the same signs. Workers find their own values valid, so only the server notices the
 * overflow. */
static void fill_large_values(const struct large *large, float *values, int rank, int step) {
  const struct collective_case *what = &large->what;
  bool hosts = what->options.schedule == ONEBIT_SCHEDULE_HIERARCHICAL;
  int workers = hosts ? what->hosts : what->size, worker = rank / (what->size / workers);
  fill_input(values, ONEBIT_FLOAT32, COUNT, rank, step);
  for (int i = 0; i < BLOCK; i++) {
    bool second = i >= BLOCK / 2, alone = worker == workers - 1 && workers % 2 == 1;
    float value = second && (step == 1 || worker % 2 == 1) ? -large->value : large->value;
    values[COUNT - BLOCK + i] = step > 1 || (step == 0 && alone) ? 0.0f : value;
  }
}

static void run_oracle(struct large *large) {
  const struct collective_case *what = &large->what;
  float *values = allocate((size_t)what->size * COUNT, sizeof *values);
  const void **inputs = allocate((size_t)what->size, sizeof *inputs);
  large->oracle = oracle_create_hosts(what->size, what->hosts, COUNT, &what->options);
  for (int step = 0; step < STEPS; step++) {
    for (int r = 0; r < what->size; r++) {
      fill_large_values(large, values + r * COUNT, r, step);
      inputs[r] = values + r * COUNT;
    }
    large->done[step] = oracle_call(large->oracle, inputs, large->results[step]);
  }
  free(inputs);
  free(values);
}

static void check_call(const struct large *large, onebit_plan_t plan, int rank, int step) {
  float send[COUNT], receive[COUNT];
  struct kept_errors before = export_errors(plan);
  fill_large_values(large, send, rank, step);
  fill_pattern(receive, sizeof receive);
  onebit_status_t status = onebit_allreduce(send, receive, plan);
  CHECK_STATUS(status, large->done[step] ? ONEBIT_OK : ONEBIT_SKIPPED);
  if (large->done[step]) {
    CHECK_BITS("recvbuf", receive, large->results[step], COUNT, ONEBIT_FLOAT32);
  } else {
    CHECK(pattern_holds(receive, sizeof receive), "a skipped call changed recvbuf");
    check_unchanged_errors(plan, &before);
  }
  free_errors(&before);
}

static void large_on_rank(onebit_comm_t comm, void *context) {
  const struct large *large = context;
  const onebit_plan_options_t *options = &large->what.options;
  int rank = onebit_comm_rank(comm);
  onebit_plan_t plan = NULL;
  if (!CHECK_STATUS(onebit_plan_create(comm, COUNT, options, &plan), ONEBIT_OK))
    return;
  for (int step = 0; step < STEPS; step++) {
    check_case("step %d of %g, schedule %d, scale %d, wire %d, %d ranks, %d hosts", step,
               (double)large->value, (int)options->schedule, (int)options->scale,
               (int)options->wire, large->what.size, large->what.hosts);
    check_call(large, plan, rank, step);
  }
  check_errors(plan, large->oracle, rank);
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
}

static const int splits[][2] = {{2, 1}, {3, 1}, {4, 2}, {6, 3}, {6, 2}};
#define SPLITS (sizeof splits / sizeof splits[0])

static struct collective_case make_case(size_t split, onebit_schedule_t schedule) {
  struct collective_case what = {.size = splits[split][0],
                                 .hosts = splits[split][1],
                                 .steps = STEPS,
                                 .count = COUNT,
                                 .options = ONEBIT_PLAN_OPTIONS_INIT};
  what.options.schedule = schedule;
  what.options.block_size = BLOCK;
  what.options.chunk_size = CHUNK;
  return what;
}

/* True for cases whose result the oracle predicts. The library checks the mean over a host's ranks
 * by its squares, whatever the scale rule is. The oracle does not model this check. */
static bool is_predicted(const struct collective_case *what, bool overflows) {
  if (what->options.schedule != ONEBIT_SCHEDULE_HIERARCHICAL)
    return true;
  return what->hosts > 1 && (what->options.scale == ONEBIT_SCALE_RMS || !overflows);
}

/* Checks a value in all schedules. `overflows` is true if step 1 overflows wherever ranks reduce
 * elements as servers. */
static void check_value(float value, onebit_scale_t scale, onebit_wire_t wire, bool overflows) {
  for (size_t k = 0; k < SPLITS; k++)
    for (int schedule = ONEBIT_SCHEDULE_EXCHANGE; schedule <= ONEBIT_SCHEDULE_HIERARCHICAL;
         schedule++) {
      struct collective_case what = make_case(k, (onebit_schedule_t)schedule);
      what.options.scale = scale;
      what.options.wire = wire;
      if (!test_wanted(k) || !is_predicted(&what, overflows))
        continue;
      struct large *large = allocate(1, sizeof *large);
      large->what = what;
      large->value = value;
      run_oracle(large);
      bool served = schedule != ONEBIT_SCHEDULE_ALLGATHER || wire == ONEBIT_WIRE_DENSE;
      cr_assert(large->done[1] == !(overflows && served), "the oracle %s step 1 of %g",
                large->done[1] ? "makes" : "skips", (double)value);
      cr_assert(large->done[2], "the oracle skips step 2");
      on_hosts(large->what.size, large->what.hosts, large_on_rank, large);
      oracle_destroy(large->oracle);
      free(large);
    }
}

/* The sum of a worker's block is 32 * 1e37, which is finite. The server's sum is at least 4/3 of
 * it, and overflows. */
Test(large, sums_that_overflow_at_a_server) {
  check_value(1e37f, ONEBIT_SCALE_MEAN_ABSOLUTE, ONEBIT_WIRE_BITS, true);
}
Test(large, squares_that_overflow_at_a_server) {
  check_value(3e18f, ONEBIT_SCALE_RMS, ONEBIT_WIRE_BITS, true);
}
Test(large, dense_sums_that_overflow_at_a_server) {
  check_value(3e38f, ONEBIT_SCALE_RMS, ONEBIT_WIRE_DENSE, true);
}

/* The values are close to the scale above which results are not applied early. */
Test(large, values_that_do_not_overflow) {
  static const float values[] = {0x1.fffffep31f, 0x1p32f, 0x1.000002p32f, 0x1p60f};
  for (size_t k = 0; k < sizeof values / sizeof values[0]; k++) {
    check_value(values[k], ONEBIT_SCALE_MEAN_ABSOLUTE, ONEBIT_WIRE_BITS, false);
    check_value(values[k], ONEBIT_SCALE_RMS, ONEBIT_WIRE_BITS, false);
  }
}

/* A case in which one rank imports a server residual that is too large. */
struct imported {
  struct collective_run run;
  int rank;
};

/* Changes the last block of the server's residual, which is in the server's last chunk. */
static void import_large_residual(onebit_plan_t plan, const struct kept_errors *errors) {
  float *server = allocate(errors->server_count, sizeof *server);
  memcpy(server, errors->server, errors->server_count * sizeof *server);
  for (size_t i = 0; i < BLOCK && i < errors->server_count; i++)
    server[errors->server_count - 1 - i] = 3e38f;
  CHECK_STATUS(onebit_plan_import_residual(plan, NULL, server), ONEBIT_OK);
  free(server);
}

static void check_imported(const struct imported *imported, onebit_plan_t plan, int rank) {
  float send[COUNT], receive[COUNT];
  struct kept_errors errors = export_errors(plan);
  if (rank == imported->rank)
    import_large_residual(plan, &errors);
  struct kept_errors before = export_errors(plan);
  fill_input(send, ONEBIT_FLOAT32, COUNT, rank, 77);
  fill_pattern(receive, sizeof receive);
  CHECK_STATUS(onebit_allreduce(send, receive, plan), ONEBIT_SKIPPED);
  CHECK(pattern_holds(receive, sizeof receive), "a skipped call changed recvbuf");
  check_unchanged_errors(plan, &before);
  CHECK_STATUS(onebit_plan_import_residual(plan, errors.worker, errors.server), ONEBIT_OK);
  free_errors(&before);
  free_errors(&errors);
}

static void imported_on_rank(onebit_comm_t comm, void *context) {
  const struct imported *imported = context;
  const struct collective_case *what = &imported->run.what;
  struct rank_plan rank_plan;
  check_case("imported on rank %d of %d on %d hosts, schedule %d, block %zd", imported->rank,
             what->size, what->hosts, (int)what->options.schedule,
             (ptrdiff_t)what->options.block_size);
  if (!rank_plan_create(&rank_plan, comm, &imported->run))
    return;
  for (int step = 0; step < what->steps; step++) {
    check_imported(imported, rank_plan.plan, rank_plan.rank);
    rank_plan_call(&rank_plan, step);
  }
  rank_plan_finish(&rank_plan);
}

static void check_imports(const struct collective_case *what) {
  struct imported imported = {.run = collective_prepare(what)};
  for (imported.rank = 0; imported.rank < what->size; imported.rank++)
    on_hosts(what->size, what->hosts, imported_on_rank, &imported);
  collective_release(&imported.run);
}

Test(large, server_errors_that_overflow) {
  for (size_t k = 0; k < SPLITS; k++) {
    struct collective_case what = make_case(k, ONEBIT_SCHEDULE_EXCHANGE);
    what.steps = 2;
    check_imports(&what);
    what.options.block_size = ONEBIT_BLOCK_BUFFER;
    check_imports(&what);
    what = make_case(k, ONEBIT_SCHEDULE_HIERARCHICAL);
    what.steps = 2;
    check_imports(&what);
  }
}
