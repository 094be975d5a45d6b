! Averages numbers over the ranks by compressed messages: mpirun -n 4 ./average
program average
  use mpi_f08
  use onebit_mpi
  implicit none
  integer, parameter :: count = 100000, steps = 1000
  real :: mine(count), mean(count)
  double precision :: sum_of_first = 0
  integer :: rank, ranks, step, i

  call MPI_Init()
  call MPI_Comm_rank(MPI_COMM_WORLD, rank)
  call MPI_Comm_size(MPI_COMM_WORLD, ranks)
  do step = 1, steps
    mine = [((rank + 1) * (mod(i, 7) - 3), i = 0, count - 1)]
    call ONEBIT_Allreduce(mine, mean, count, MPI_REAL, ONEBIT_AVG(), MPI_COMM_WORLD)
    sum_of_first = sum_of_first + mean(1)
  end do
  if (rank == 0) print '(a, f7.3, a, i0, a, f7.3)', "element 1: ", sum_of_first / steps, " over ", steps, &
    " calls, the mean of the ranks is ", -1.5 * (ranks + 1)
  call MPI_Finalize()
end program
