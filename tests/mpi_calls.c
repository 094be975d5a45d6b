/*
 * Compares the blocking calls of onebit/mpi_calls.h with MPI's. If one bit represents the values
 * exactly, results must be equal. Otherwise they may differ by the residual. Sums must stay correct
 * even if ranks change their buffers.
 */
#include "dropin/mpi/communicator.h"
#include "tests/support_collectives.h"
#include "tests/support_mpi.h"

enum { COUNT = 5000 };

/* ---- Each operation and type, also in place ---- */

static const struct {
  const char *name;
  onebit_dtype_t dtype;
} types[] = {{"float", ONEBIT_FLOAT32}, {"bfloat16", ONEBIT_BFLOAT16}, {"half", ONEBIT_FLOAT16}};

static MPI_Datatype mpi_type_of(onebit_dtype_t dtype) {
  return dtype == ONEBIT_FLOAT32    ? MPI_FLOAT
         : dtype == ONEBIT_BFLOAT16 ? ONEBIT_BFLOAT16_TYPE
                                    : ONEBIT_FLOAT16_TYPE;
}

struct buffers {
  void *send, *receive;
  size_t bytes;
};

static struct buffers make_buffers(int size) {
  size_t bytes = (size_t)size * COUNT * sizeof(float);
  return (struct buffers){allocate(1, bytes), allocate(1, bytes), bytes};
}

static void free_buffers(struct buffers *buffers) {
  free(buffers->send);
  free(buffers->receive);
}

static void check_element(const void *buffer, onebit_dtype_t dtype, size_t i, float wanted) {
  float got = oracle_load(buffer, i, dtype);
  CHECK(got == wanted, "element %zu is %g, not %g", i, (double)got, (double)wanted);
}

static void check_allreduce(onebit_dtype_t dtype, bool average, bool in_place,
                            const struct buffers *buffers, int turn) {
  int size = size_of(MPI_COMM_WORLD), scale = turn % 3;
  void *from = in_place ? buffers->receive : buffers->send;
  fill_exact(from, dtype, COUNT, rank_of(MPI_COMM_WORLD), scale);
  int code = ONEBIT_Allreduce(in_place ? MPI_IN_PLACE : from, buffers->receive, COUNT,
                              mpi_type_of(dtype), average ? ONEBIT_AVG : MPI_SUM, MPI_COMM_WORLD);
  CHECK(code == MPI_SUCCESS, "code %d: %s", code, onebit_last_error());
  for (size_t i = 0; i < COUNT; i++)
    check_element(buffers->receive, dtype, i, exact_result(i, size, scale, average));
}

static void check_reduce_scatter(onebit_dtype_t dtype, bool average, bool in_place,
                                 const struct buffers *buffers, int turn) {
  int size = size_of(MPI_COMM_WORLD), rank = rank_of(MPI_COMM_WORLD), scale = turn % 3;
  void *from = in_place ? buffers->receive : buffers->send;
  size_t width = dtype_size(dtype), first = (size_t)rank * COUNT;
  fill_pattern((char *)buffers->receive + COUNT * width, buffers->bytes - COUNT * width);
  fill_exact(from, dtype, (size_t)size * COUNT, rank, scale);
  int code = ONEBIT_Reduce_scatter_block(in_place ? MPI_IN_PLACE : from, buffers->receive, COUNT,
                                         mpi_type_of(dtype), average ? ONEBIT_AVG : MPI_SUM,
                                         MPI_COMM_WORLD);
  CHECK(code == MPI_SUCCESS, "code %d: %s", code, onebit_last_error());
  for (size_t i = 0; i < COUNT; i++)
    check_element(buffers->receive, dtype, i, exact_result(first + i, size, scale, average));
  if (!in_place)
    CHECK(pattern_holds((char *)buffers->receive + COUNT * width, buffers->bytes - COUNT * width),
          "more than the result was written");
  for (size_t i = COUNT; in_place && i < (size_t)size * COUNT; i++)
    check_element(buffers->receive, dtype, i, exact_value(i, rank, scale));
}

static void check_allgather(onebit_dtype_t dtype, bool in_place, const struct buffers *buffers,
                            int turn) {
  int size = size_of(MPI_COMM_WORLD), rank = rank_of(MPI_COMM_WORLD), scale = turn % 3;
  char *place = (char *)buffers->receive + (size_t)rank * COUNT * dtype_size(dtype);
  void *from = in_place ? place : buffers->send;
  fill_exact(from, dtype, COUNT, rank, scale);
  int code = ONEBIT_Allgather(in_place ? MPI_IN_PLACE : from, in_place ? -1 : COUNT,
                              in_place ? MPI_DATATYPE_NULL : mpi_type_of(dtype), buffers->receive,
                              COUNT, mpi_type_of(dtype), MPI_COMM_WORLD);
  CHECK(code == MPI_SUCCESS, "code %d: %s", code, onebit_last_error());
  for (int r = 0; r < size; r++)
    for (size_t i = 0; i < COUNT; i++)
      check_element(buffers->receive, dtype, (size_t)r * COUNT + i, exact_value(i, r, scale));
}

RankedTest(mpi_calls, are_exact_where_one_bit_says_all) {
  struct buffers buffers = make_buffers(size_of(MPI_COMM_WORLD));
  size_t tensors;
  for (int turn = 0; turn < 4; turn++)
    for (size_t k = 0; k < sizeof types / sizeof types[0]; k++)
      for (int form = 0; form < 4; form++) {
        bool average = form & 1, in_place = form & 2;
        check_case("%s, turn %d, %s, %s", types[k].name, turn, average ? "mean" : "sum",
                   in_place ? "in place" : "apart");
        check_allreduce(types[k].dtype, average, in_place, &buffers, turn);
        check_reduce_scatter(types[k].dtype, average, in_place, &buffers, turn);
        if (!average)
          check_allgather(types[k].dtype, in_place, &buffers, turn);
      }
  struct ob_tally tally = tally_of(MPI_COMM_WORLD, &tensors);
  if (size_of(MPI_COMM_WORLD) > 1) {
    CHECK(tensors == 30, "%zu tensors", tensors);
    CHECK(tally.calls == 120 && tally.compressed == 120, "%d of %d compressed",
          (int)tally.compressed, (int)tally.calls);
    CHECK(tally.bytes_sent * 8 < tally.bytes_dense, "%.0f bytes instead of %.0f",
          (double)tally.bytes_sent, (double)tally.bytes_dense);
  }
  free_buffers(&buffers);
}

/* ---- Widths ---- */

/* Returns the relative error of an allreduce of that width. All magnitudes of the values differ, so
 * no width represents them exactly. */
static double measure_error(MPI_Comm comm, const char *bits) {
  static float send[COUNT], receive[COUNT];
  double error = 0, all = 0;
  setenv("ONEBIT_BITS", bits, 1);
  for (int i = 0; i < COUNT; i++)
    send[i] = (float)(i - COUNT / 2) / COUNT;
  CHECK(ONEBIT_Allreduce(send, receive, COUNT, MPI_FLOAT, ONEBIT_AVG, comm) == MPI_SUCCESS, "%s",
        onebit_last_error());
  for (int i = 0; i < COUNT; i++) {
    double missed = (double)receive[i] - (double)send[i];
    error += missed * missed;
    all += (double)send[i] * (double)send[i];
  }
  return sqrt(error / all);
}

/* Checks the default width and the variable ONEBIT_BITS; "" means that it is not set. */
RankedTest(mpi_calls, have_8_bits_unless_the_variable_says_otherwise) {
  static const struct {
    const char *text;
    int bits;
    double max_error; /* the relative error after both compressions, by workers and by servers */
  } cases[] = {{"", 8, 0.06}, {"8", 8, 0.06}, {"4", 4, 0.2}, {"2", 2, 0.6}, {"1", 1, 1.1}};
  double before = 0;
  for (size_t k = 0; k < sizeof cases / sizeof cases[0] && size_of(MPI_COMM_WORLD) > 1; k++) {
    MPI_Comm comm = duplicate_world();
    double error = measure_error(comm, cases[k].text);
    CHECK(tally_of(comm, NULL).bits == cases[k].bits, "%s: %d bits", cases[k].text,
          tally_of(comm, NULL).bits);
    CHECK(error < cases[k].max_error && error >= before, "%s: error %g", cases[k].text, error);
    before = error;
    MPI_Comm_free(&comm);
  }
}

RankedTest(mpi_calls, fail_on_all_ranks_where_the_variable_is_wrong_on_one) {
  float values[COUNT] = {1};
  MPI_Comm comm = duplicate_world();
  setenv("ONEBIT_BITS", rank == size - 1 ? "3" : "4", 1);
  int code = ONEBIT_Allreduce(MPI_IN_PLACE, values, COUNT, MPI_FLOAT, MPI_SUM, comm);
  CHECK(code == (size > 1 ? MPI_ERR_OTHER : MPI_SUCCESS), "code %d", code);
  CHECK(size == 1 || rank < size - 1 || strstr(onebit_last_error(), "ONEBIT_BITS=3"), "%s",
        onebit_last_error());
  MPI_Comm_free(&comm);
}

/* ---- Over many calls ---- */

static void note_first_plan(const struct ob_exchange *exchange, const struct ob_mpi_call *call,
                            void *context) {
  onebit_plan_t *plan = context;
  (void)call;
  if (!*plan)
    *plan = exchange->plan;
}

static onebit_plan_t find_first_plan(MPI_Comm comm) {
  onebit_plan_t plan = NULL;
  ob_attached_visit(ob_attached_get(comm, 2), note_first_plan, &plan);
  return plan;
}

/* Computes how far the residuals of all ranks change the mean: the mean of the worker residuals
 * plus the server residuals. */
static void sum_residuals(MPI_Comm comm, double *residuals) {
  struct kept_errors errors = export_errors(find_first_plan(comm));
  double *mine = allocate(COUNT, sizeof *mine);
  for (size_t i = 0; i < errors.worker_count; i++)
    mine[i] += (double)errors.worker[i] / size_of(comm);
  for (size_t i = 0; i < errors.server_count; i++)
    mine[errors.server_first + i] += (double)errors.server[i];
  MPI_Allreduce(mine, residuals, COUNT, MPI_DOUBLE, MPI_SUM, comm);
  free_errors(&errors);
  free(mine);
}

RankedTest(mpi_calls, lose_nothing_but_the_residual) {
  enum { CALLS = 30 };
  static float send[COUNT], receive[COUNT];
  static double given[COUNT], got[COUNT], all[COUNT], residuals[COUNT];
  for (int call = 0; call < CALLS; call++) {
    fill_input(send, ONEBIT_FLOAT32, COUNT, rank, call);
    if (call == 17 && rank == size - 1)
      send[COUNT / 2] = NAN;
    ONEBIT_Allreduce(send, receive, COUNT, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    CHECK(!isnan(receive[COUNT / 2]) == (call != 17), "call %d: not-a-number", call);
    for (int i = 0; i < COUNT; i++) {
      given[i] += i == COUNT / 2 && call == 17 ? 0 : (double)send[i];
      got[i] += i == COUNT / 2 && call == 17 ? 0 : (double)receive[i];
    }
  }
  MPI_Allreduce(given, all, COUNT, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  if (size > 1)
    sum_residuals(MPI_COMM_WORLD, residuals);
  double max_residual = 0;
  for (int i = 0; i < COUNT; i++) {
    double difference = all[i] - got[i] - size * residuals[i];
    CHECK(fabs(difference) < 1e-4 * size * CALLS, "element %d: %g is missing", i, difference);
    max_residual = fmax(max_residual, fabs(residuals[i]));
  }
  CHECK(size == 1 || max_residual > 0.01, "the residual is 0: %g", max_residual);
}

/* ---- Buffers that change ---- */

#define TENSORS 3

static void call_tensor(struct mpi_tensors *moving, int t, int step) {
  size_t count = (size_t)moving->count[t];
  check_case("step %d, tensor %d", step, t);
  fill_exact(moving->send[t], ONEBIT_FLOAT32, count, rank_of(moving->comm), t);
  int code = ONEBIT_Allreduce(moving->send[t], moving->receive[t], (int)count, MPI_FLOAT, MPI_SUM,
                              moving->comm);
  CHECK(code == MPI_SUCCESS, "code %d: %s", code, onebit_last_error());
  CHECK_EXACT("recvbuf", moving->receive[t], count, size_of(moving->comm), t);
}

static void call_steps(struct mpi_tensors *moving, int number) {
  for (int step = 0; step < number; step++)
    for (int t = 0; t < TENSORS; t++)
      call_tensor(moving, t, step);
}

static void swap_send_buffers(struct mpi_tensors *moving, int a, int b) {
  float *send = moving->send[a];
  moving->send[a] = moving->send[b];
  moving->send[b] = send;
}

static uint64_t count_withdrawn(MPI_Comm comm) {
  const struct ob_tally tally = tally_of(comm, NULL);
  return tally.calls - tally.compressed;
}

static void check_tally(MPI_Comm comm, size_t tensors, uint64_t withdrawn) {
  size_t found;
  struct ob_tally tally = tally_of(comm, &found);
  if (size_of(comm) == 1)
    return;
  CHECK(found == tensors, "%zu tensors, not %zu", found, tensors);
  CHECK(tally.calls - tally.compressed == withdrawn, "%d calls withdrawn, not %d",
        (int)(tally.calls - tally.compressed), (int)withdrawn);
}

/* Swaps two send buffers after `before` steps, on one rank or on all ranks. After 9 steps the ranks
 * follow a loop of calls that they have learned. After one step they do not. */
static void check_swapped_buffers(int before, bool everywhere) {
  struct mpi_tensors moving = mpi_tensors_make(COUNT);
  bool mine = everywhere || rank_of(moving.comm) == size_of(moving.comm) - 1;
  call_steps(&moving, before);
  if (mine)
    swap_send_buffers(&moving, 0, 2);
  call_steps(&moving, 3);
  CHECK(size_of(moving.comm) == 1 || count_withdrawn(moving.comm) <= 2, "%d withdrawn",
        (int)count_withdrawn(moving.comm));
  mpi_tensors_free(&moving);
}

static void check_moved_buffer(int before, bool everywhere) {
  struct mpi_tensors moving = mpi_tensors_make(COUNT);
  bool mine = everywhere || rank_of(moving.comm) == 0;
  float *old = moving.receive[1];
  call_steps(&moving, before);
  if (mine)
    moving.receive[1] = allocate(COUNT, sizeof(float));
  call_steps(&moving, 3);
  bool is_new = everywhere && before == 1; /* no rank has seen the buffer before */
  /* Ranks that follow a loop identify the tensor by its position in the loop. */
  check_tally(moving.comm, is_new ? TENSORS + 1 : TENSORS, before == 1 && !everywhere);
  if (mine)
    free(old);
  mpi_tensors_free(&moving);
}

/* Checks that a call with another count belongs to another tensor, even with the same buffers. The
 * first tensor must keep its residual. */
static void check_changed_count(void) {
  struct mpi_tensors moving = mpi_tensors_make(COUNT);
  call_steps(&moving, 9);
  moving.count[1] = COUNT - 33;
  call_steps(&moving, 9);
  moving.count[1] = COUNT;
  call_steps(&moving, 9);
  check_tally(moving.comm, TENSORS + 1, 0);
  mpi_tensors_free(&moving);
}

/* Leaves out one of several similar calls of a step. Ranks that follow the learned loop of calls
 * first mistake one call for another. They must notice the mistake by the buffers, and stop
 * following the loop. */
static void check_left_out_call(void) {
  struct mpi_tensors moving = mpi_tensors_make(COUNT);
  call_steps(&moving, 9);
  moving.count[2] = 0;
  call_steps(&moving, 20);
  CHECK(size_of(moving.comm) == 1 || count_withdrawn(moving.comm) < 16, "%d withdrawn",
        (int)count_withdrawn(moving.comm));
  mpi_tensors_free(&moving);
}

/* Sends from a different buffer in each step on one rank, in an order without a period. */
static void check_changing_buffers(void) {
  struct mpi_tensors moving = mpi_tensors_make(COUNT);
  float *room[4];
  for (int k = 0; k < 4; k++)
    room[k] = allocate(COUNT, sizeof(float));
  call_steps(&moving, 9);
  float *own = moving.send[0];
  for (int step = 0; step < 40; step++) {
    if (rank_of(moving.comm) == 0)
      moving.send[0] = room[step * step * step / 5 % 4];
    for (int t = 0; t < TENSORS; t++)
      call_tensor(&moving, t, step);
  }
  check_tally(moving.comm, TENSORS, count_withdrawn(moving.comm));
  moving.send[0] = own;
  for (int k = 0; k < 4; k++)
    free(room[k]);
  mpi_tensors_free(&moving);
}

/* Uses a new buffer in each call. The library makes a new tensor for each buffer until the ranks
 * recognise the calls as a loop. The sums must stay correct. */
static void check_new_buffers(void) {
  enum { EACH = 40, CALLS = 150 };
  MPI_Comm comm = duplicate_world();
  float *room = allocate(EACH * CALLS, sizeof *room), result[EACH];
  for (int call = 0; call < CALLS; call++) {
    float *send = room + call * EACH;
    fill_exact(send, ONEBIT_FLOAT32, EACH, rank_of(comm), 0);
    ONEBIT_Allreduce(send, result, EACH, MPI_FLOAT, MPI_SUM, comm);
    CHECK_EXACT("recvbuf", result, EACH, size_of(comm), 0);
  }
  size_t tensors;
  struct ob_tally tally = tally_of(comm, &tensors);
  CHECK(size_of(comm) == 1 || (tensors < 32 && tally.calls == tally.compressed), "%zu tensors",
        tensors);
  free(room);
  MPI_Comm_free(&comm);
}

/* Checks that ONEBIT_Forget discards the residual that calls on random values leave. Otherwise the
 * next call would add it. */
static void check_forgotten_buffer(int before) {
  struct mpi_tensors moving = mpi_tensors_make(COUNT);
  int rank = rank_of(moving.comm);
  for (int step = 0; step < before; step++) {
    fill_input(moving.send[0], ONEBIT_FLOAT32, COUNT, rank, step);
    ONEBIT_Allreduce(moving.send[0], moving.receive[0], COUNT, MPI_FLOAT, MPI_SUM, moving.comm);
  }
  CHECK(ONEBIT_Forget(moving.send[0], moving.comm) == MPI_SUCCESS, "%s", onebit_last_error());
  CHECK(ONEBIT_Forget(&moving, moving.comm) == MPI_SUCCESS, "%s", onebit_last_error());
  call_tensor(&moving, 0, 0);
  mpi_tensors_free(&moving);
}

RankedTest(mpi_calls, never_give_a_wrong_sum_when_buffers_change) {
  for (int k = 0; k < 4; k++) {
    int before = k & 1 ? 1 : 9;
    check_swapped_buffers(before, k & 2);
    check_moved_buffer(before, k & 2);
  }
  check_changed_count();
  check_left_out_call();
  check_changing_buffers();
  check_new_buffers();
  check_forgotten_buffer(1);
  check_forgotten_buffer(9);
}
