! A Fortran program that does not use onebit itself, with each of MPI's Fortran interfaces.
subroutine with_mpi()
  use mpi
  implicit none
  integer, parameter :: n = 20000
  real :: mine(n), total(n)
  integer :: step, i, ranks, error, request
  call MPI_Comm_size(MPI_COMM_WORLD, ranks, error)
  do step = 1, 30
    mine = [(merge(1.0, -1.0, mod(i + step, 3) > 0), i = 1, n)]
    call MPI_Allreduce(mine, total, n, MPI_REAL, MPI_SUM, MPI_COMM_WORLD, error)
    if (any(total /= mine * ranks)) error stop 3
    total = mine
    call MPI_Allreduce(MPI_IN_PLACE, total, n, MPI_REAL, MPI_SUM, MPI_COMM_WORLD, error)
    if (any(total /= mine * ranks)) error stop 4
    call MPI_Iallreduce(mine, total, n, MPI_REAL, MPI_SUM, MPI_COMM_WORLD, request, error)
    call MPI_Wait(request, MPI_STATUS_IGNORE, error)
    if (any(total /= mine * ranks)) error stop 5
  end do
end subroutine

subroutine with_mpi_f08()
  use mpi_f08
  implicit none
  integer, parameter :: n = 20001
  real :: mine(n), total(n)
  type(MPI_Request) :: request
  integer :: step, i, ranks
  call MPI_Comm_size(MPI_COMM_WORLD, ranks)
  do step = 1, 30
    mine = [(merge(1.0, -1.0, mod(i + step, 3) > 0), i = 1, n)]
    call MPI_Allreduce(mine, total, n, MPI_REAL, MPI_SUM, MPI_COMM_WORLD)
    if (any(total /= mine * ranks)) error stop 6
    total = mine
    call MPI_Allreduce(MPI_IN_PLACE, total, n, MPI_REAL, MPI_SUM, MPI_COMM_WORLD)
    if (any(total /= mine * ranks)) error stop 7
    call MPI_Iallreduce(mine, total, n, MPI_REAL, MPI_SUM, MPI_COMM_WORLD, request)
    call MPI_Wait(request, MPI_STATUS_IGNORE)
    if (any(total /= mine * ranks)) error stop 8
  end do
end subroutine

program fortran
  use mpi
  implicit none
  integer :: error
  call MPI_Init(error)
  call with_mpi()
  call with_mpi_f08()
  call MPI_Finalize(error)
end program
