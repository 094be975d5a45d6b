/*
 * The blocking calls of onebit/mpi_calls.h beside MPI's: equal where one bit says all, within the
 * residual where it does not, and never a wrong sum, whatever ranks do with their buffers.
 */
#include "dropin/mpi/communicator.h"
#include "tests/support_mpi.h"

enum { COUNT = 5000 };

/* ---- Each operation, type and place ---- */

static const struct {
  const char *name;
  onebit_dtype_t dtype;
} types[] = {{"float", ONEBIT_FLOAT32}, {"bfloat16", ONEBIT_BFLOAT16}, {"half", ONEBIT_FLOAT16}};

static MPI_Datatype mpi_type(onebit_dtype_t dtype) {
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
  float got = element(buffer, dtype, i);
  CHECK(got == wanted, "element %zu is %g, not %g", i, (double)got, (double)wanted);
}

static void one_allreduce(onebit_dtype_t dtype, bool average, bool in_place,
                          const struct buffers *buffers, int turn) {
  int size = size_of(MPI_COMM_WORLD), scale = turn % 3;
  void *from = in_place ? buffers->receive : buffers->send;
  fill_exact(from, dtype, COUNT, rank_of(MPI_COMM_WORLD), scale);
  int code = ONEBIT_Allreduce(in_place ? MPI_IN_PLACE : from, buffers->receive, COUNT,
                              mpi_type(dtype), average ? ONEBIT_AVG : MPI_SUM, MPI_COMM_WORLD);
  CHECK(code == MPI_SUCCESS, "code %d: %s", code, onebit_last_error());
  for (size_t i = 0; i < COUNT; i++)
    check_element(buffers->receive, dtype, i, exact_result(i, size, scale, average));
}

static void one_reduce_scatter(onebit_dtype_t dtype, bool average, bool in_place,
                               const struct buffers *buffers, int turn) {
  int size = size_of(MPI_COMM_WORLD), rank = rank_of(MPI_COMM_WORLD), scale = turn % 3;
  void *from = in_place ? buffers->receive : buffers->send;
  size_t width = dtype_size(dtype), first = (size_t)rank * COUNT;
  fill_pattern((char *)buffers->receive + COUNT * width, buffers->bytes - COUNT * width);
  fill_exact(from, dtype, (size_t)size * COUNT, rank, scale);
  int code =
      ONEBIT_Reduce_scatter_block(in_place ? MPI_IN_PLACE : from, buffers->receive, COUNT,
                                  mpi_type(dtype), average ? ONEBIT_AVG : MPI_SUM, MPI_COMM_WORLD);
  CHECK(code == MPI_SUCCESS, "code %d: %s", code, onebit_last_error());
  for (size_t i = 0; i < COUNT; i++)
    check_element(buffers->receive, dtype, i, exact_result(first + i, size, scale, average));
  if (!in_place)
    CHECK(pattern_holds((char *)buffers->receive + COUNT * width, buffers->bytes - COUNT * width),
          "more than the result was written");
  for (size_t i = COUNT; in_place && i < (size_t)size * COUNT; i++)
    check_element(buffers->receive, dtype, i, exact_value(i, rank, scale));
}

static void one_allgather(onebit_dtype_t dtype, bool in_place, const struct buffers *buffers,
                          int turn) {
  int size = size_of(MPI_COMM_WORLD), rank = rank_of(MPI_COMM_WORLD), scale = turn % 3;
  char *place = (char *)buffers->receive + (size_t)rank * COUNT * dtype_size(dtype);
  void *from = in_place ? place : buffers->send;
  fill_exact(from, dtype, COUNT, rank, scale);
  int code = ONEBIT_Allgather(in_place ? MPI_IN_PLACE : from, in_place ? -1 : COUNT,
                              in_place ? MPI_DATATYPE_NULL : mpi_type(dtype), buffers->receive,
                              COUNT, mpi_type(dtype), MPI_COMM_WORLD);
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
        one_allreduce(types[k].dtype, average, in_place, &buffers, turn);
        one_reduce_scatter(types[k].dtype, average, in_place, &buffers, turn);
        if (!average)
          one_allgather(types[k].dtype, in_place, &buffers, turn);
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

/* Values whose magnitudes are all different, so that what a width can not say shows. */
static double error_of(MPI_Comm comm, const char *bits) {
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

/* "" means not set. */
RankedTest(mpi_calls, have_8_bits_unless_the_variable_says_otherwise) {
  static const struct {
    const char *text;
    int bits;
    double most; /* of workers and servers together */
  } cases[] = {{"", 8, 0.06}, {"8", 8, 0.06}, {"4", 4, 0.2}, {"2", 2, 0.6}, {"1", 1, 1.1}};
  double before = 0;
  for (size_t k = 0; k < sizeof cases / sizeof cases[0] && size_of(MPI_COMM_WORLD) > 1; k++) {
    MPI_Comm comm = duplicate();
    double error = error_of(comm, cases[k].text);
    CHECK(tally_of(comm, NULL).bits == cases[k].bits, "%s: %d bits", cases[k].text,
          tally_of(comm, NULL).bits);
    CHECK(error < cases[k].most && error >= before, "%s: error %g", cases[k].text, error);
    before = error;
    MPI_Comm_free(&comm);
  }
}

RankedTest(mpi_calls, fail_on_all_ranks_where_the_variable_is_wrong_on_one) {
  float values[COUNT] = {1};
  MPI_Comm comm = duplicate();
  setenv("ONEBIT_BITS", rank == size - 1 ? "3" : "4", 1);
  int code = ONEBIT_Allreduce(MPI_IN_PLACE, values, COUNT, MPI_FLOAT, MPI_SUM, comm);
  CHECK(code == (size > 1 ? MPI_ERR_OTHER : MPI_SUCCESS), "code %d", code);
  CHECK(size == 1 || rank < size - 1 || strstr(onebit_last_error(), "ONEBIT_BITS=3"), "%s",
        onebit_last_error());
  MPI_Comm_free(&comm);
}

/* ---- Over many calls ---- */

static void first_plan(const struct ob_exchange *exchange, const struct ob_mpi_call *call,
                       void *context) {
  onebit_plan_t *plan = context;
  (void)call;
  if (!*plan)
    *plan = ob_exchange_plan(exchange);
}

static onebit_plan_t plan_of(MPI_Comm comm) {
  onebit_plan_t plan = NULL;
  ob_attached_visit(ob_attached_of(comm, 2), first_plan, &plan);
  return plan;
}

/* Adds up the residual of all calls, of the mean: the mean of the workers' residuals plus the
 * servers'. */
static void owed(MPI_Comm comm, double *owes) {
  onebit_plan_t plan = plan_of(comm);
  float *worker = allocate(COUNT, sizeof *worker), *server = allocate(COUNT, sizeof *server);
  double *mine = allocate(COUNT, sizeof *mine);
  const onebit_plan_info_t info = plan_info(plan);
  CHECK_STATUS(onebit_plan_export_residual(plan, worker, server), ONEBIT_OK);
  for (size_t i = 0; i < info.worker_residual_count; i++)
    mine[i] += (double)worker[i] / size_of(comm);
  for (size_t i = 0; i < info.server_residual_count; i++)
    mine[info.server_residual_start + i] += (double)server[i];
  MPI_Allreduce(mine, owes, COUNT, MPI_DOUBLE, MPI_SUM, comm);
  free(worker);
  free(server);
  free(mine);
}

RankedTest(mpi_calls, owe_what_is_kept_and_nothing_else) {
  enum { CALLS = 30 };
  static float send[COUNT], receive[COUNT];
  static double given[COUNT], got[COUNT], all[COUNT], owes[COUNT];
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
    owed(MPI_COMM_WORLD, owes);
  double owed_most = 0;
  for (int i = 0; i < COUNT; i++) {
    double difference = all[i] - got[i] - size * owes[i];
    CHECK(fabs(difference) < 1e-4 * size * CALLS, "element %d: %g is missing", i, difference);
    owed_most = fmax(owed_most, fabs(owes[i]));
  }
  CHECK(size == 1 || owed_most > 0.01, "nothing is owed: %g", owed_most);
}

/* ---- Buffers that change ---- */

#define TENSORS 3

struct moving {
  MPI_Comm comm;
  float *send[TENSORS], *receive[TENSORS];
  int count[TENSORS];
};

static struct moving make_moving(MPI_Comm comm) {
  struct moving moving = {.comm = comm};
  for (int t = 0; t < TENSORS; t++) {
    moving.count[t] = COUNT;
    moving.send[t] = allocate(COUNT, sizeof(float));
    moving.receive[t] = allocate(COUNT, sizeof(float));
  }
  return moving;
}

static void free_moving(struct moving *moving) {
  for (int t = 0; t < TENSORS; t++) {
    free(moving->send[t]);
    free(moving->receive[t]);
  }
}

static void call_tensor(struct moving *moving, int t, int step) {
  size_t count = (size_t)moving->count[t];
  check_case("step %d, tensor %d", step, t);
  fill_exact(moving->send[t], ONEBIT_FLOAT32, count, rank_of(moving->comm), t);
  int code = ONEBIT_Allreduce(moving->send[t], moving->receive[t], (int)count, MPI_FLOAT, MPI_SUM,
                              moving->comm);
  CHECK(code == MPI_SUCCESS, "code %d: %s", code, onebit_last_error());
  CHECK_EXACT("recvbuf", moving->receive[t], count, size_of(moving->comm), t);
}

static void steps(struct moving *moving, int number) {
  for (int step = 0; step < number; step++)
    for (int t = 0; t < TENSORS; t++)
      call_tensor(moving, t, step);
}

static void exchange_sends(struct moving *moving, int a, int b) {
  float *send = moving->send[a];
  moving->send[a] = moving->send[b];
  moving->send[b] = send;
}

static uint64_t withdrawn_of(MPI_Comm comm) {
  const struct ob_tally tally = tally_of(comm, NULL);
  return tally.calls - tally.compressed;
}

static void check_tally(MPI_Comm comm, size_t tensors, uint64_t withdrawn) {
  size_t found;
  struct ob_tally tally = tally_of(comm, &found);
  if (size_of(comm) == 1)
    return;
  CHECK(found == tensors, "%zu tensors, not %zu", found, tensors);
  CHECK((tally.calls - tally.compressed) == withdrawn, "%d calls withdrawn, not %d",
        (int)(tally.calls - tally.compressed), (int)withdrawn);
}

/* Exchanges buffers before the ranks follow a loop, and after; on one rank, and on all. */
static void exchange_buffers(int before, bool everywhere) {
  struct moving moving = make_moving(duplicate());
  bool mine = everywhere || rank_of(moving.comm) == size_of(moving.comm) - 1;
  steps(&moving, before);
  if (mine)
    exchange_sends(&moving, 0, 2);
  steps(&moving, 3);
  struct ob_tally tally = tally_of(moving.comm, NULL);
  CHECK(size_of(moving.comm) == 1 || (tally.calls - tally.compressed) <= 2, "%d withdrawn",
        (int)(tally.calls - tally.compressed));
  free_moving(&moving);
  MPI_Comm_free(&moving.comm);
}

static void move_a_buffer(int before, bool everywhere) {
  struct moving moving = make_moving(duplicate());
  bool mine = everywhere || rank_of(moving.comm) == 0;
  float *old = moving.receive[1];
  steps(&moving, before);
  if (mine)
    moving.receive[1] = allocate(COUNT, sizeof(float));
  steps(&moving, 3);
  bool known = everywhere && before == 1; /* no rank knows it, so it belongs to a new tensor */
  /* Ranks that follow a loop know the tensor by its position. */
  check_tally(moving.comm, known ? TENSORS + 1 : TENSORS, before == 1 && !everywhere);
  if (mine)
    free(old);
  free_moving(&moving);
  MPI_Comm_free(&moving.comm);
}

/* Another count is another tensor, also in the same buffers; the first one's error waits. */
static void change_a_count(void) {
  struct moving moving = make_moving(duplicate());
  steps(&moving, 9);
  moving.count[1] = COUNT - 33;
  steps(&moving, 9);
  moving.count[1] = COUNT;
  steps(&moving, 9);
  check_tally(moving.comm, TENSORS + 1, 0);
  free_moving(&moving);
  MPI_Comm_free(&moving.comm);
}

/* Leaves out one call of a step whose other calls look alike: ranks that follow take one call for
 * the other, notice it by the buffers, and stop following. */
static void leave_one_out(void) {
  struct moving moving = make_moving(duplicate());
  steps(&moving, 9);
  moving.count[2] = 0;
  steps(&moving, 20);
  struct ob_tally tally = tally_of(moving.comm, NULL);
  CHECK(size_of(moving.comm) == 1 || (tally.calls - tally.compressed) < 16, "%d withdrawn of %d",
        (int)(tally.calls - tally.compressed), (int)tally.calls);
  free_moving(&moving);
  MPI_Comm_free(&moving.comm);
}

/* A rank whose buffers change all the time: all values, each time, and no period. */
static void one_always_moves(void) {
  struct moving moving = make_moving(duplicate());
  float *room[4];
  for (int k = 0; k < 4; k++)
    room[k] = allocate(COUNT, sizeof(float));
  steps(&moving, 9);
  float *own = moving.send[0];
  for (int step = 0; step < 40; step++) {
    if (rank_of(moving.comm) == 0)
      moving.send[0] = room[step * step * step / 5 % 4];
    for (int t = 0; t < TENSORS; t++)
      call_tensor(&moving, t, step);
  }
  check_tally(moving.comm, TENSORS, withdrawn_of(moving.comm));
  moving.send[0] = own;
  for (int k = 0; k < 4; k++)
    free(room[k]);
  free_moving(&moving);
  MPI_Comm_free(&moving.comm);
}

/* Buffers that never return: a tensor is made for each until the calls are known as a loop, and the
 * sums stay right. */
static void never_the_same(void) {
  enum { EACH = 40, CALLS = 150 };
  MPI_Comm comm = duplicate();
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

/* Noise leaves a residual that the next call would add; a buffer that is forgotten has none. */
static void forget(int before) {
  struct moving moving = make_moving(duplicate());
  int rank = rank_of(moving.comm);
  for (int step = 0; step < before; step++) {
    fill_input(moving.send[0], ONEBIT_FLOAT32, COUNT, rank, step);
    ONEBIT_Allreduce(moving.send[0], moving.receive[0], COUNT, MPI_FLOAT, MPI_SUM, moving.comm);
  }
  CHECK(ONEBIT_Forget(moving.send[0], moving.comm) == MPI_SUCCESS, "%s", onebit_last_error());
  CHECK(ONEBIT_Forget(&moving, moving.comm) == MPI_SUCCESS, "%s", onebit_last_error());
  call_tensor(&moving, 0, 0);
  free_moving(&moving);
  MPI_Comm_free(&moving.comm);
}

RankedTest(mpi_calls, never_give_a_wrong_sum_when_buffers_change) {
  for (int k = 0; k < 4; k++) {
    int before = k & 1 ? 1 : 9;
    exchange_buffers(before, k & 2);
    move_a_buffer(before, k & 2);
  }
  change_a_count();
  leave_one_out();
  one_always_moves();
  never_the_same();
  forget(1);
  forget(9);
}
