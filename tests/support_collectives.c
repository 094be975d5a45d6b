/* Runs a test case of a collective and compares it with the oracle. Also runs a plan whose input
 * makes it raise its number of bits. */
#include "tests/support_collectives.h"

#include "base/hash.h"

size_t send_count(onebit_operation_t operation, size_t count, int size) {
  return operation == ONEBIT_REDUCE_SCATTER ? count * (size_t)size : count;
}

size_t receive_count(onebit_operation_t operation, size_t count, int size) {
  return operation == ONEBIT_ALLGATHER ? count * (size_t)size : count;
}

const char *operation_name(onebit_operation_t operation) {
  static const char *const names[] = {"allreduce", "allgather", "reduce-scatter"};
  return names[operation];
}

onebit_status_t call_collective(onebit_operation_t operation, const void *sendbuf, void *recvbuf,
                                onebit_plan_t plan) {
  if (operation == ONEBIT_ALLREDUCE)
    return onebit_allreduce(sendbuf, recvbuf, plan);
  if (operation == ONEBIT_ALLGATHER)
    return onebit_allgather(sendbuf, recvbuf, plan);
  return onebit_reduce_scatter(sendbuf, recvbuf, plan);
}

onebit_status_t start_collective(onebit_operation_t operation, const void *sendbuf, void *recvbuf,
                                 onebit_plan_t plan, onebit_request_t *request) {
  if (operation == ONEBIT_ALLREDUCE)
    return onebit_iallreduce(sendbuf, recvbuf, plan, request);
  if (operation == ONEBIT_ALLGATHER)
    return onebit_iallgather(sendbuf, recvbuf, plan, request);
  return onebit_ireduce_scatter(sendbuf, recvbuf, plan, request);
}

const void **all_inputs(int size, size_t count, onebit_dtype_t dtype, int step) {
  void **inputs = allocate((size_t)size, sizeof *inputs);
  for (int r = 0; r < size; r++) {
    inputs[r] = allocate(count, dtype_size(dtype));
    fill_input(inputs[r], dtype, count, r, step);
  }
  return (const void **)inputs;
}

void free_inputs(const void **inputs, int size) {
  for (int r = 0; r < size; r++)
    free((void *)inputs[r]);
  free(inputs);
}

static void fill_case(const struct collective_case *what, void *values, size_t count, int rank,
                      int step) {
  (what->fill ? what->fill : fill_input)(values, what->options.dtype, count, rank, step);
}

struct collective_run collective_prepare(const struct collective_case *what) {
  onebit_dtype_t dtype = what->options.dtype;
  struct collective_run run = {
      *what, oracle_create_hosts(what->size, what->hosts, what->count, &what->options),
      allocate((size_t)what->steps, sizeof(void *))};
  size_t sent = send_count(what->options.operation, what->count, what->size);
  for (int step = 0; step < what->steps; step++) {
    const void **inputs = all_inputs(what->size, sent, dtype, step);
    for (int r = 0; what->fill && r < what->size; r++)
      fill_case(what, (void *)inputs[r], sent, r, step);
    run.results[step] = allocate(run.oracle->result_count, dtype_size(dtype));
    CHECK(oracle_call(run.oracle, inputs, run.results[step]), "the oracle skips finite input");
    free_inputs(inputs, what->size);
  }
  return run;
}

void collective_release(struct collective_run *run) {
  for (int step = 0; step < run->what.steps; step++)
    free(run->results[step]);
  free(run->results);
  oracle_destroy(run->oracle);
}

struct kept_errors export_errors(onebit_plan_t plan) {
  const onebit_plan_info_t info = plan_info(plan);
  struct kept_errors errors = {.worker_count = info.worker_residual_count,
                               .server_count = info.server_residual_count,
                               .server_first = info.server_residual_start};
  errors.worker = allocate(errors.worker_count, sizeof(float));
  errors.server = allocate(errors.server_count, sizeof(float));
  CHECK_STATUS(onebit_plan_export_residual(plan, errors.worker, errors.server), ONEBIT_OK);
  return errors;
}

void free_errors(struct kept_errors *errors) {
  free(errors->worker);
  free(errors->server);
}

void check_unchanged_errors(onebit_plan_t plan, const struct kept_errors *before) {
  struct kept_errors after = export_errors(plan);
  CHECK_BITS("worker residual", after.worker, before->worker, before->worker_count, ONEBIT_FLOAT32);
  CHECK_BITS("server residual", after.server, before->server, before->server_count, ONEBIT_FLOAT32);
  free_errors(&after);
}

void check_errors(onebit_plan_t plan, const struct oracle *oracle, int rank) {
  struct kept_errors errors = export_errors(plan);
  bool dense = oracle->options.wire == ONEBIT_WIRE_DENSE;
  size_t workers = dense ? 0 : oracle_worker_count(oracle, rank),
         servers = oracle_server_count(oracle, rank);
  if (CHECK(errors.worker_count == workers, "the worker residual has %zu floats, not %zu",
            errors.worker_count, workers))
    CHECK_BITS("worker residual", errors.worker, oracle_worker_error(oracle, rank), workers,
               ONEBIT_FLOAT32);
  if (CHECK(errors.server_count == servers, "the server residual has %zu floats, not %zu",
            errors.server_count, servers) &&
      CHECK(servers == 0 || errors.server_first == oracle_server_first(oracle, rank),
            "the server residual begins at %zu", errors.server_first))
    CHECK_BITS("server residual", errors.server,
               oracle->server_error + oracle_server_first(oracle, rank), servers, ONEBIT_FLOAT32);
  free_errors(&errors);
}

/* Makes a blocking call, or starts a request, tests it a few times, and waits for it. */
static onebit_status_t call_once(const struct rank_plan *rank_plan, bool nonblocking) {
  onebit_operation_t operation = rank_plan->run->what.options.operation;
  char *send = rank_plan->send, *receive = rank_plan->receive;
  if (!nonblocking)
    return call_collective(operation, send, receive, rank_plan->plan);
  onebit_request_t request = NULL;
  onebit_status_t status = start_collective(operation, send, receive, rank_plan->plan, &request);
  for (int i = 0; i < 3 && status >= ONEBIT_OK && request; i++)
    status = onebit_test(&request);
  return request ? onebit_wait(&request) : status;
}

static void check_input(const struct rank_plan *rank_plan, int step) {
  const onebit_dtype_t dtype = rank_plan->run->what.options.dtype;
  void *input = allocate(rank_plan->sent, dtype_size(dtype));
  fill_case(&rank_plan->run->what, input, rank_plan->sent, rank_plan->rank, step);
  CHECK_BITS("sendbuf afterwards", rank_plan->send, input, rank_plan->sent, dtype);
  free(input);
}

static void label_case(const struct collective_case *what) {
  const onebit_plan_options_t *o = &what->options;
  check_case("%s%s%s of %zu %s on %d ranks, %d bits, scale %d, block %zd, chunk %zu, threads %d, "
             "placement %d, schedule %d, %d hosts%s%s",
             o->wire == ONEBIT_WIRE_DENSE ? "dense " : "",
             o->profile == ONEBIT_PROFILE_DEEPSPEED ? "deepspeed " : "",
             operation_name(o->operation), what->count, dtype_name(o->dtype), what->size, o->bits,
             (int)o->scale, (ptrdiff_t)o->block_size, o->chunk_size, o->threads,
             (int)what->placement, (int)o->schedule, what->hosts,
             what->nonblocking ? ", nonblocking" : "",
             o->no_error_feedback ? ", no error feedback" : "");
}

void collective_on_rank(onebit_comm_t comm, void *context) {
  const struct collective_run *run = context;
  const struct collective_case *what = &run->what;
  struct rank_plan rank_plan;
  label_case(what);
  if (!rank_plan_create(&rank_plan, comm, run))
    return;
  for (int step = 0; step < what->steps; step++) {
    rank_plan_fill(&rank_plan, step);
    if (!CHECK_STATUS(call_once(&rank_plan, what->nonblocking && step % 2), ONEBIT_OK))
      continue;
    rank_plan_check(&rank_plan, step);
    if (what->placement != IN_PLACE)
      check_input(&rank_plan, step);
  }
  rank_plan_finish(&rank_plan);
}

void collective_check(const struct collective_case *what, rank_body *body) {
  struct collective_run run = collective_prepare(what);
  on_hosts(what->size, what->hosts ? what->hosts : 1, body, &run);
  collective_release(&run);
}

void collective_check_sample(const char *name, size_t thinner, struct collective_case *cases,
                             size_t count, collective_body *check) {
  const struct sample sample = collective_sample(name, thinner, cases, count);
  for (size_t k = 0; k < sample.count; k++) {
    struct collective_run run = collective_prepare(&cases[sample.rows[k]]);
    check(&run, k);
    collective_release(&run);
  }
  free(sample.rows);
  free(cases);
}

/* A list of cases that run one after the other on one communicator. */
struct list {
  struct collective_run *runs;
  size_t count;
};

static void run_cases(onebit_comm_t comm, void *context) {
  const struct list *list = context;
  for (size_t k = 0; k < list->count; k++)
    collective_on_rank(comm, &list->runs[k]);
}

static void run_cases_over(const char *name, on_transport *on, size_t most_elements,
                           struct collective_case *cases, size_t count) {
  const struct sample sample = collective_sample(name, 1, cases, count);
  struct list list = {.runs = allocate(sample.count, sizeof *list.runs)};
  for (size_t k = 0; k < sample.count; k++)
    if (cases[sample.rows[k]].count <= most_elements)
      list.runs[list.count++] = collective_prepare(&cases[sample.rows[k]]);
  on(cases->size, cases->hosts, run_cases, &list);
  for (size_t k = 0; k < list.count; k++)
    collective_release(&list.runs[k]);
  free(sample.rows);
  free(list.runs);
  free(cases);
}

void collectives_over(const char *name, on_transport *on, size_t most_elements) {
  size_t count;
  struct collective_case *cases;
  for (int size = 1; size <= 4; size++) {
    cases = collective_cases(size, FEW, &count);
    run_cases_over(name, on, most_elements, cases, count);
  }
  cases = schedule_cases(4, 2, FEW, &count);
  run_cases_over(name, on, most_elements, cases, count);
}

/* Creates the buffers of a rank. For an in-place call the smaller buffer is inside the larger
 * one. */
static void make_buffers(struct rank_plan *rank_plan) {
  const struct collective_case *what = &rank_plan->run->what;
  const onebit_operation_t operation = what->options.operation;
  const size_t element = dtype_size(what->options.dtype);
  size_t sent = rank_plan->sent * element, received = rank_plan->received * element;
  if (what->placement == IN_PLACE) {
    size_t part = (size_t)rank_plan->rank * what->count * element;
    rank_plan->send_memory = guarded_create(sent > received ? sent : received, GUARD_ABOVE);
    rank_plan->send = rank_plan->receive = rank_plan->send_memory.data;
    rank_plan->send += operation == ONEBIT_ALLGATHER ? part : 0;
    rank_plan->receive += operation == ONEBIT_REDUCE_SCATTER ? part : 0;
    return;
  }
  enum guard guard = what->placement == APART_ABOVE ? GUARD_ABOVE : GUARD_BELOW;
  size_t odd = what->placement == APART_ODD ? element : 0;
  rank_plan->send_memory = guarded_create(sent + odd, guard);
  rank_plan->receive_memory = guarded_create(received + 3 * odd, guard);
  rank_plan->send = (char *)rank_plan->send_memory.data + odd;
  rank_plan->receive = (char *)rank_plan->receive_memory.data + 3 * odd;
}

bool rank_plan_create(struct rank_plan *rank_plan, onebit_comm_t comm,
                      const struct collective_run *run) {
  const struct collective_case *what = &run->what;
  const onebit_operation_t operation = what->options.operation;
  *rank_plan = (struct rank_plan){.run = run,
                                  .sent = send_count(operation, what->count, what->size),
                                  .received = receive_count(operation, what->count, what->size),
                                  .rank = onebit_comm_rank(comm)};
  make_buffers(rank_plan);
  return CHECK_STATUS(onebit_plan_create(comm, what->count, &what->options, &rank_plan->plan),
                      ONEBIT_OK);
}

void rank_plan_fill(const struct rank_plan *rank_plan, int step) {
  fill_case(&rank_plan->run->what, rank_plan->send, rank_plan->sent, rank_plan->rank, step);
}

void rank_plan_check(const struct rank_plan *rank_plan, int step) {
  const struct collective_case *what = &rank_plan->run->what;
  const onebit_dtype_t dtype = what->options.dtype;
  const bool scattered = what->options.operation == ONEBIT_REDUCE_SCATTER;
  const size_t begin = scattered ? (size_t)rank_plan->rank * what->count : 0;
  CHECK_BITS("recvbuf", rank_plan->receive,
             (char *)rank_plan->run->results[step] + begin * dtype_size(dtype), rank_plan->received,
             dtype);
}

void rank_plan_call(const struct rank_plan *rank_plan, int step) {
  rank_plan_fill(rank_plan, step);
  CHECK_STATUS(call_collective(rank_plan->run->what.options.operation, rank_plan->send,
                               rank_plan->receive, rank_plan->plan),
               ONEBIT_OK);
  rank_plan_check(rank_plan, step);
}

void rank_plan_free(struct rank_plan *rank_plan) {
  CHECK_STATUS(onebit_plan_destroy(rank_plan->plan), ONEBIT_OK);
  guarded_destroy(&rank_plan->send_memory);
  if (rank_plan->receive_memory.mapping)
    guarded_destroy(&rank_plan->receive_memory);
}

void rank_plan_finish(struct rank_plan *rank_plan) {
  check_errors(rank_plan->plan, rank_plan->run->oracle, rank_plan->rank);
  rank_plan_free(rank_plan);
}

/* ---- A plan whose input changes from ordinary values to hard ones and back ---- */

static float ordinary_value(size_t i, int rank, int call) {
  const uint64_t place = ((uint64_t)call * 16 + (uint64_t)rank) * 65536 + i;
  return uniform_value(place) + uniform_value(place + ((uint64_t)1 << 40));
}

/* Returns an input element. In the hard phase, one element of each block is a thousand times as
 * large as the others on rank 0. */
static float ladder_value(size_t i, int rank, int call, bool hard) {
  return hard && rank == 0 && i % 2048 == 7 ? 1000 : ordinary_value(i, rank, call);
}

void ladder_fill(float *values, size_t count, int rank, int call) {
  for (size_t i = 0; i < count; i++)
    values[i] = ladder_value(i, rank, call, call >= LADDER_ORDINARY && call < LADDER_HARD);
}

onebit_plan_t ladder_plan(onebit_comm_t comm, const struct climb *climb, int bits) {
  onebit_plan_options_t options = ONEBIT_PLAN_OPTIONS_INIT;
  options.operation = climb->operation;
  options.schedule = climb->schedule;
  options.bits = bits;
  options.max_bits = 8;
  onebit_plan_t plan;
  return CHECK_STATUS(onebit_plan_create(comm, LADDER_COUNT, &options, &plan), ONEBIT_OK) ? plan
                                                                                          : NULL;
}

/* The plan and the buffer with which ranks compare their bits per element after every call. In an
 * allreduce they also compare their results. */
struct comparison {
  onebit_plan_t plan; /* a dense plan, which gathers values unchanged */
  float *all;
};

static struct comparison create_comparison(onebit_comm_t comm) {
  struct comparison comparison = {.all =
                                      allocate(2 * (size_t)onebit_comm_size(comm), sizeof(float))};
  onebit_plan_options_t options = {
      .size = sizeof options, .operation = ONEBIT_ALLGATHER, .wire = ONEBIT_WIRE_DENSE};
  CHECK_STATUS(onebit_plan_create(comm, 2, &options, &comparison.plan), ONEBIT_OK);
  return comparison;
}

static void compare_ranks(const struct comparison *comparison, int size, int bits, uint64_t hash,
                          int call) {
  const float mine[2] = {(float)bits, (float)(hash % (1 << 24))};
  CHECK_STATUS(onebit_allgather(mine, comparison->all, comparison->plan), ONEBIT_OK);
  for (int k = 0; k < size; k++)
    CHECK(!memcmp(mine, comparison->all + 2 * k, sizeof mine),
          "call %d: %d bits, rank %d: %g, hash %g", call, bits, k, (double)comparison->all[2 * k],
          (double)comparison->all[2 * k + 1]);
}

/* Checks the number of bits at the end of each phase, and the number of bytes that the plan's info
 * reports for a call. */
static void check_climb(onebit_plan_t plan, int call, bool alone) {
  const onebit_plan_info_t info = plan_info(plan);
  if (call + 1 == LADDER_ORDINARY)
    CHECK(info.bits == 1 && info.moves == 0, "ordinary: %d bits, %d moves", info.bits,
          (int)info.moves);
  if (call + 1 == LADDER_HARD)
    CHECK(info.bits == 8 && info.moves == 3 && info.residual_ratio > 0,
          "hard: %d bits, %d moves, ratio %g", info.bits, (int)info.moves, info.residual_ratio);
  if (call + 1 == LADDER_HARD)
    CHECK(strstr(onebit_plan_explain(plan), "bits per element: 8 now, 1 to 8, changes: 3\n"), "%s",
          onebit_plan_explain(plan));
  if (call + 1 == LADDER_CALLS)
    CHECK(info.bits == 1 && info.moves == 6, "ordinary again: %d bits, %d moves", info.bits,
          (int)info.moves);
  CHECK(info.min_bits == 1 && info.max_bits == 8, "%d to %d bits", info.min_bits, info.max_bits);
  CHECK(alone || info.wire_bytes > 0, "a call sends no bytes");
}

void climb_on_rank(onebit_comm_t comm, void *context) {
  const struct climb *climb = context;
  const struct comparison comparison = create_comparison(comm);
  const int rank = onebit_comm_rank(comm), size = onebit_comm_size(comm);
  const size_t sent = send_count(climb->operation, LADDER_COUNT, size);
  const size_t received = receive_count(climb->operation, LADDER_COUNT, size);
  float *values = allocate(sent, sizeof *values), *result = allocate(received, sizeof *result);
  onebit_plan_t plan = ladder_plan(comm, climb, 1);
  for (int call = 0; plan && call < LADDER_CALLS; call++) {
    const uint64_t announced = plan_info(plan).wire_bytes, before = onebit_comm_bytes_sent(comm);
    ladder_fill(values, sent, rank, call);
    CHECK_STATUS(call_collective(climb->operation, values, result, plan), ONEBIT_OK);
    CHECK(onebit_comm_bytes_sent(comm) - before == announced, "call %d: %d bytes, announced %d",
          call, (int)(onebit_comm_bytes_sent(comm) - before), (int)announced);
    const bool alike = climb->operation == ONEBIT_ALLREDUCE;
    compare_ranks(&comparison, size, plan_info(plan).bits,
                  alike ? ob_hash(OB_HASH_START, result, LADDER_COUNT * sizeof *result) : 0, call);
    check_climb(plan, call, size == 1);
  }
  onebit_plan_destroy(plan);
  onebit_plan_destroy(comparison.plan);
  free(comparison.all);
  free(values);
  free(result);
}
