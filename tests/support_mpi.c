/* Implements support_mpi.h: ranks of an MPI job, data that one bit represents exactly, and access
 * to the library's state of a communicator. */
#include "tests/support_mpi.h"

#include "dropin/elements.h"
#include "dropin/mpi/communicator.h"
#include "onebit/mpi.h"
#include "tests/oracle.h"

/* Begins a test. The MPI-shaped calls send one bit per element unless the test sets another width,
 * because one bit is exact for values of a single magnitude. */
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

void fill_exact(void *buffer, onebit_dtype_t dtype, size_t count, int rank, int scale) {
  for (size_t i = 0; i < count; i++)
    oracle_store(buffer, i, dtype, exact_value(i, rank, scale));
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

int error_class_of(int code) {
  int class = MPI_SUCCESS;
  MPI_Error_class(code, &class);
  return class;
}

struct mpi_tensors mpi_tensors_make(size_t count) {
  struct mpi_tensors tensors = {.comm = duplicate_world()};
  for (int t = 0; t < MPI_TENSORS; t++) {
    tensors.count[t] = (int)count;
    tensors.send[t] = allocate(count, sizeof(float));
    tensors.receive[t] = allocate(count, sizeof(float));
  }
  return tensors;
}

void mpi_tensors_free(struct mpi_tensors *tensors) {
  for (int t = 0; t < MPI_TENSORS; t++) {
    free(tensors->send[t]);
    free(tensors->receive[t]);
  }
  if (tensors->comm != MPI_COMM_NULL)
    MPI_Comm_free(&tensors->comm);
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
