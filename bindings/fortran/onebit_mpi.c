/*
 * The functions that onebit_mpi.f90 calls. They convert Fortran's handles and arrays to C's. Arrays
 * are passed as the descriptors of Fortran 2018 (ISO_Fortran_binding.h comes with the Fortran
 * compiler).
 */
#include <ISO_Fortran_binding.h>
#include <mpi.h>
#include <string.h>

#include "onebit/mpi_calls.h"

/* Returns the address of an array. If the array has gaps, returns NULL, which every call
 * rejects. */
static void *buffer_address(const CFI_cdesc_t *array) {
  return array->rank == 0 || CFI_is_contiguous(array) ? array->base_addr : NULL;
}

/* Returns the send buffer in C's form: Fortran recognises MPI_IN_PLACE by its address, C by its
 * value. */
static const void *source_address(const CFI_cdesc_t *sendbuf, const CFI_cdesc_t *in_place) {
  return sendbuf->base_addr == in_place->base_addr ? MPI_IN_PLACE : buffer_address(sendbuf);
}

int ob_fortran_allreduce(CFI_cdesc_t *sendbuf, CFI_cdesc_t *recvbuf, CFI_cdesc_t *in_place,
                         int count, int datatype, int op, int comm) {
  return ONEBIT_Allreduce(source_address(sendbuf, in_place), buffer_address(recvbuf), count,
                          MPI_Type_f2c(datatype), MPI_Op_f2c(op), MPI_Comm_f2c(comm));
}

int ob_fortran_allgather(CFI_cdesc_t *sendbuf, int sendcount, int sendtype, CFI_cdesc_t *recvbuf,
                         CFI_cdesc_t *in_place, int recvcount, int recvtype, int comm) {
  return ONEBIT_Allgather(source_address(sendbuf, in_place), sendcount, MPI_Type_f2c(sendtype),
                          buffer_address(recvbuf), recvcount, MPI_Type_f2c(recvtype),
                          MPI_Comm_f2c(comm));
}

int ob_fortran_reduce_scatter_block(CFI_cdesc_t *sendbuf, CFI_cdesc_t *recvbuf,
                                    CFI_cdesc_t *in_place, int count, int datatype, int op,
                                    int comm) {
  return ONEBIT_Reduce_scatter_block(source_address(sendbuf, in_place), buffer_address(recvbuf),
                                     count, MPI_Type_f2c(datatype), MPI_Op_f2c(op),
                                     MPI_Comm_f2c(comm));
}

int ob_fortran_forget(CFI_cdesc_t *buffer, int comm) {
  return ONEBIT_Forget(buffer_address(buffer), MPI_Comm_f2c(comm));
}

int ob_fortran_begin(CFI_cdesc_t *sendbuf, CFI_cdesc_t *recvbuf, CFI_cdesc_t *in_place, int count,
                     int datatype, int op, int comm, int persistent, ONEBIT_Request *request) {
  const void *from = source_address(sendbuf, in_place);
  void *to = buffer_address(recvbuf);
  MPI_Datatype type = MPI_Type_f2c(datatype);
  if (persistent)
    return ONEBIT_Allreduce_init(from, to, count, type, MPI_Op_f2c(op), MPI_Comm_f2c(comm),
                                 MPI_INFO_NULL, request);
  return ONEBIT_Iallreduce(from, to, count, type, MPI_Op_f2c(op), MPI_Comm_f2c(comm), request);
}

int ob_fortran_wait(ONEBIT_Request *request) { return ONEBIT_Wait(request, MPI_STATUS_IGNORE); }

int ob_fortran_test(ONEBIT_Request *request, int *flag) {
  *flag = 1;
  return ONEBIT_Test(request, flag, MPI_STATUS_IGNORE);
}

int ob_fortran_same(const void *a, const void *b) { return a == b; }

/* Returns a handle as a Fortran integer. which: 0 for ONEBIT_AVG, 1 for ONEBIT_BFLOAT16_TYPE, 2 for
 * ONEBIT_FLOAT16_TYPE. */
int ob_fortran_handle(int which) {
  return which == 0   ? MPI_Op_c2f(ONEBIT_AVG)
         : which == 1 ? MPI_Type_c2f(ONEBIT_BFLOAT16_TYPE)
                      : MPI_Type_c2f(ONEBIT_FLOAT16_TYPE);
}

void ob_fortran_message(char *text, int length) {
  const char *message = onebit_last_error();
  size_t known = strlen(message), capacity = (size_t)length;
  memset(text, ' ', capacity);
  memcpy(text, message, known < capacity ? known : capacity);
}
