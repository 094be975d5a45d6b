/* One case of a collective: what the oracle says, and the check on a rank. */
#include "tests/support_collectives.h"

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

struct collective_run collective_prepare(const struct collective_case *what) {
  onebit_dtype_t dtype = what->options.dtype;
  struct collective_run run = {
      *what, oracle_create_hosts(what->size, what->hosts, what->count, &what->options),
      allocate((size_t)what->steps, sizeof(void *))};
  size_t sent = send_count(what->options.operation, what->count, what->size);
  for (int step = 0; step < what->steps; step++) {
    const void **inputs = all_inputs(what->size, sent, dtype, step);
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

/* The buffers of a rank. In place, the smaller one lies inside the larger. */
struct buffers {
  struct guarded send_memory, receive_memory;
  char *send, *receive;
};

static struct buffers make_buffers(const struct collective_case *what, int rank) {
  struct buffers buffers = {{0}, {0}, NULL, NULL};
  size_t element = dtype_size(what->options.dtype);
  size_t sent = send_count(what->options.operation, what->count, what->size) * element;
  size_t received = receive_count(what->options.operation, what->count, what->size) * element;
  if (what->placement == IN_PLACE) {
    size_t part = (size_t)rank * what->count * element;
    buffers.send_memory = guarded_create(sent > received ? sent : received, GUARD_ABOVE);
    buffers.send = buffers.receive = buffers.send_memory.data;
    buffers.send += what->options.operation == ONEBIT_ALLGATHER ? part : 0;
    buffers.receive += what->options.operation == ONEBIT_REDUCE_SCATTER ? part : 0;
    return buffers;
  }
  enum guard guard = what->placement == APART_ABOVE ? GUARD_ABOVE : GUARD_BELOW;
  size_t odd = what->placement == APART_ODD ? element : 0;
  buffers.send_memory = guarded_create(sent + odd, guard);
  buffers.receive_memory = guarded_create(received + 3 * odd, guard);
  buffers.send = (char *)buffers.send_memory.data + odd;
  buffers.receive = (char *)buffers.receive_memory.data + 3 * odd;
  return buffers;
}

static void free_buffers(struct buffers *buffers) {
  guarded_destroy(&buffers->send_memory);
  if (buffers->receive_memory.mapping)
    guarded_destroy(&buffers->receive_memory);
}

/* A blocking call, or a request that is tested a few times and then waited for. */
static onebit_status_t call_once(const struct collective_case *what, const struct buffers *buffers,
                                 onebit_plan_t plan, bool nonblocking) {
  onebit_operation_t operation = what->options.operation;
  if (!nonblocking)
    return call_collective(operation, buffers->send, buffers->receive, plan);
  onebit_request_t request = NULL;
  onebit_status_t status =
      start_collective(operation, buffers->send, buffers->receive, plan, &request);
  for (int i = 0; i < 3 && status >= ONEBIT_OK && request; i++)
    status = onebit_test(&request);
  return request ? onebit_wait(&request) : status;
}

static void check_step(const struct collective_run *run, const struct buffers *buffers, int rank,
                       int step) {
  const struct collective_case *what = &run->what;
  onebit_dtype_t dtype = what->options.dtype;
  size_t received = receive_count(what->options.operation, what->count, what->size);
  size_t begin = what->options.operation == ONEBIT_REDUCE_SCATTER ? (size_t)rank * what->count : 0;
  CHECK_BITS("recvbuf", buffers->receive, (char *)run->results[step] + begin * dtype_size(dtype),
             received, dtype);
  if (what->placement != IN_PLACE) {
    size_t sent = send_count(what->options.operation, what->count, what->size);
    void *input = allocate(sent, dtype_size(dtype));
    fill_input(input, dtype, sent, rank, step);
    CHECK_BITS("sendbuf afterwards", buffers->send, input, sent, dtype);
    free(input);
  }
}

static void tell_case(const struct collective_case *what) {
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
  int rank = onebit_comm_rank(comm);
  onebit_plan_t plan = NULL;
  tell_case(what);
  if (!CHECK_STATUS(onebit_plan_create(comm, what->count, &what->options, &plan), ONEBIT_OK))
    return;
  struct buffers buffers = make_buffers(what, rank);
  size_t sent = send_count(what->options.operation, what->count, what->size);
  for (int step = 0; step < what->steps; step++) {
    fill_input(buffers.send, what->options.dtype, sent, rank, step);
    onebit_status_t status = call_once(what, &buffers, plan, what->nonblocking && step % 2);
    if (CHECK_STATUS(status, ONEBIT_OK))
      check_step(run, &buffers, rank, step);
  }
  check_errors(plan, run->oracle, rank);
  CHECK_STATUS(onebit_plan_destroy(plan), ONEBIT_OK);
  free_buffers(&buffers);
}

void collective_check(const struct collective_case *what, rank_body *body) {
  struct collective_run run = collective_prepare(what);
  on_hosts(what->size, what->hosts ? what->hosts : 1, body, &run);
  collective_release(&run);
}

void collective_each(const char *name, size_t thinner, struct collective_case *cases, size_t count,
                     collective_body *check) {
  const struct sample sample = collective_sample(name, thinner, cases, count);
  for (size_t k = 0; k < sample.count; k++) {
    struct collective_run run = collective_prepare(&cases[sample.rows[k]]);
    check(&run, k);
    collective_release(&run);
  }
  free(sample.rows);
  free(cases);
}

/* Cases that go over one communicator, one after the other. */
struct list {
  struct collective_run *runs;
  size_t count;
};

static void run_list(onebit_comm_t comm, void *context) {
  const struct list *list = context;
  for (size_t k = 0; k < list->count; k++)
    collective_on_rank(comm, &list->runs[k]);
}

static void list_over(const char *name, on_transport *on, size_t most_elements,
                      struct collective_case *cases, size_t count) {
  const struct sample sample = collective_sample(name, 1, cases, count);
  struct list list = {.runs = allocate(sample.count, sizeof *list.runs)};
  for (size_t k = 0; k < sample.count; k++)
    if (cases[sample.rows[k]].count <= most_elements)
      list.runs[list.count++] = collective_prepare(&cases[sample.rows[k]]);
  on(cases->size, cases->hosts, run_list, &list);
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
    list_over(name, on, most_elements, cases, count);
  }
  cases = schedule_cases(4, 2, FEW, &count);
  list_over(name, on, most_elements, cases, count);
}

bool seat_take(struct seat *seat, onebit_comm_t comm, const struct collective_run *run) {
  const struct collective_case *what = &run->what;
  const onebit_operation_t operation = what->options.operation;
  const size_t element = dtype_size(what->options.dtype);
  *seat = (struct seat){.run = run,
                        .sent = send_count(operation, what->count, what->size),
                        .received = receive_count(operation, what->count, what->size),
                        .rank = onebit_comm_rank(comm)};
  seat->send = allocate(seat->sent, element);
  seat->receive = allocate(seat->received, element);
  return CHECK_STATUS(onebit_plan_create(comm, what->count, &what->options, &seat->plan),
                      ONEBIT_OK);
}

void seat_fill(const struct seat *seat, int step) {
  fill_input(seat->send, seat->run->what.options.dtype, seat->sent, seat->rank, step);
}

void seat_check(const struct seat *seat, int step) {
  const struct collective_case *what = &seat->run->what;
  const onebit_dtype_t dtype = what->options.dtype;
  const bool scattered = what->options.operation == ONEBIT_REDUCE_SCATTER;
  const size_t begin = scattered ? (size_t)seat->rank * what->count : 0;
  CHECK_BITS("recvbuf", seat->receive, (char *)seat->run->results[step] + begin * dtype_size(dtype),
             seat->received, dtype);
}

void seat_call(const struct seat *seat, int step) {
  seat_fill(seat, step);
  CHECK_STATUS(
      call_collective(seat->run->what.options.operation, seat->send, seat->receive, seat->plan),
      ONEBIT_OK);
  seat_check(seat, step);
}

void seat_free(struct seat *seat) {
  CHECK_STATUS(onebit_plan_destroy(seat->plan), ONEBIT_OK);
  free(seat->send);
  free(seat->receive);
}

void seat_leave(struct seat *seat) {
  check_errors(seat->plan, seat->run->oracle, seat->rank);
  seat_free(seat);
}
