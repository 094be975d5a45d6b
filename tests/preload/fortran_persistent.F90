! Persistent allreduces in a program in Fortran that knows nothing of onebit.
#ifdef EXTENSION
#define ALLREDUCE_INIT MPIX_Allreduce_init
#else
#define ALLREDUCE_INIT MPI_Allreduce_init
#endif
program fortran_persistent
  use mpi
  implicit none
  integer, parameter :: n = 20000
  real, asynchronous :: mine(n), total(n), twice(n)
  integer :: step, i, ranks, error, requests(2), statuses(MPI_STATUS_SIZE, 2)
#ifdef EXTENSION
  external :: MPIX_Allreduce_init
#endif
  call MPI_Init(error)
  call MPI_Comm_size(MPI_COMM_WORLD, ranks, error)
  call ALLREDUCE_INIT(mine, total, n, MPI_REAL, MPI_SUM, MPI_COMM_WORLD, MPI_INFO_NULL, requests(1), error)
  call ALLREDUCE_INIT(MPI_IN_PLACE, twice, n, MPI_REAL, MPI_SUM, MPI_COMM_WORLD, MPI_INFO_NULL, requests(2), error)
  do step = 1, 40
    mine = [(merge(1.0, -1.0, mod(i + step, 3) > 0), i = 1, n)]
    twice = 2 * mine
    if (mod(step, 2) == 0) then
      call MPI_Startall(2, requests, error)
    else
      call MPI_Start(requests(1), error)
      call MPI_Start(requests(2), error)
    end if
    call MPI_Waitall(2, requests, statuses, error)
    if (any(total /= mine * ranks)) error stop 3
    if (any(twice /= 2 * mine * ranks)) error stop 4
  end do
  call MPI_Request_free(requests(1), error)
  call MPI_Request_free(requests(2), error)
  if (any(requests /= MPI_REQUEST_NULL)) error stop 5
  call MPI_Finalize(error)
end program
