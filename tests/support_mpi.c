/* Ranks that are processes of an MPI job, data that one bit represents exactly, and the state
 * of a communicator. */
#include "tests/support_mpi.h"

#include "dropin/elements.h"
#include "dropin/mpi/communicator.h"
#include "onebit/mpi.h"

/* The drop-in calls send one bit unless a test sets another width: one bit is exact for values of
 * one magnitude. */
int mpi_begin(void) {
  int provided, rank;
  setenv("ONEBIT_BITS", "1", 0);
  cr_assert_eq(MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &provided), MPI_SUCCESS);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  check_rank(rank);
  return rank;
}

void mpi_end(void) { MPI_Finalize(); }

void mpi_run(void (*body)(int rank, int size), int min_size) {
  const int rank = mpi_begin();
  int size;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (size >= min_size)
    body(rank, size);
  mpi_end();
  if (size < min_size)
    cr_skip_test("one rank has nobody to disagree with, or to wait for");
}

void on_mpi_ranks(MPI_Comm mpi_comm, rank_body *body, void *context) {
  onebit_comm_t comm = NULL;
  if (!CHECK_STATUS(onebit_comm_create_mpi(mpi_comm, &comm), ONEBIT_OK))
    return;
  body(comm, context);
  onebit_comm_destroy(comm);
}

/* ---- MPI-shaped calls ---- */

float exact_value(size_t i, int rank, int scale) {
  return ldexpf((float)((i * 2654435761u >> 7 & 1) ? -(rank + 1) : rank + 1), scale);
}

float load_element(const void *buffer, onebit_dtype_t dtype, size_t i) {
  float wide[1];
  uint16_t half;
  if (dtype == ONEBIT_FLOAT32)
    return ((const float *)buffer)[i];
  memcpy(&half, (const char *)buffer + i * sizeof half, sizeof half);
  uint32_t bits = (uint32_t)half << 16;
  memcpy(wide, &bits, sizeof bits);
  if (dtype == ONEBIT_BFLOAT16)
    return wide[0];
  float value = ldexpf((float)(half & 0x3ff) + (half >> 10 & 0x1f ? 1024.0f : 0.0f),
                       (half >> 10 & 0x1f ? half >> 10 & 0x1f : 1) - 25);
  value = (half & 0x7c00) == 0x7c00 ? (half & 0x3ff ? NAN : INFINITY) : value;
  return half & 0x8000 ? -value : value;
}

/* Returns the bits of a value in 16 bits. The value is a small whole number times a power of two,
 * so it has exact bits. */
static uint16_t find_half(float value, onebit_dtype_t dtype) {
  for (uint32_t half = 0; half < 0x10000; half++) {
    uint16_t bits = (uint16_t)half;
    if (load_element(&bits, dtype, 0) == value)
      return bits;
  }
  CHECK(false, "%g is no half", (double)value);
  return 0;
}

void fill_exact(void *buffer, onebit_dtype_t dtype, size_t count, int rank, int scale) {
  uint16_t plus = 0, minus = 0;
  if (dtype != ONEBIT_FLOAT32) {
    plus = find_half(ldexpf((float)(rank + 1), scale), dtype);
    minus = plus | 0x8000;
  }
  for (size_t i = 0; i < count; i++) {
    float value = exact_value(i, rank, scale);
    if (dtype == ONEBIT_FLOAT32)
      ((float *)buffer)[i] = value;
    else
      ((uint16_t *)buffer)[i] = value < 0 ? minus : plus;
  }
}

float exact_result(size_t i, int size, int scale, bool average) {
  float sum = exact_value(i, 0, scale) * (float)(size * (size + 1) / 2);
  return average ? sum / (float)size : sum;
}

bool check_exact(const char *what, const float *buffer, size_t count, int size, int scale,
                 const char *file, int line) {
  for (size_t i = 0; i < count; i++)
    if (buffer[i] != exact_result(i, size, scale, false))
      return check_note(false, file, line, "%s: element %zu is %g, not %g", what, i,
                        (double)buffer[i], (double)exact_result(i, size, scale, false));
  return true;
}

struct sum {
  struct ob_tally tally;
  size_t tensors;
};

static void add_tally(const struct ob_exchange *exchange, const struct ob_mpi_call *call,
                      void *context) {
  struct sum *sum = context;
  const struct ob_tally *tally = &exchange->tally;
  (void)call;
  sum->tensors++;
  sum->tally.bits = tally->bits;
  sum->tally.calls += tally->calls;
  sum->tally.compressed += tally->compressed;
  sum->tally.bytes_sent += tally->compressed * tally->bytes_sent;
  sum->tally.bytes_dense += tally->compressed * tally->bytes_dense;
}

struct ob_tally tally_of(MPI_Comm comm, size_t *tensors) {
  struct sum sum = {.tensors = 0};
  struct ob_attached *attached = ob_attached_get(comm, 2);
  if (attached)
    ob_attached_visit(attached, add_tally, &sum);
  if (tensors)
    *tensors = sum.tensors;
  return sum.tally;
}

MPI_Comm duplicate_world(void) {
  MPI_Comm comm;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  return comm;
}

int size_of(MPI_Comm comm) {
  int size;
  MPI_Comm_size(comm, &size);
  return size;
}

int rank_of(MPI_Comm comm) {
  int rank;
  MPI_Comm_rank(comm, &rank);
  return rank;
}
