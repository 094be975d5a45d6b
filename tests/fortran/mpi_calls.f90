! Compares the Fortran calls with MPI's, on values that one bit holds exactly. Prints a line, or aborts.
program mpi_calls
  use mpi_f08
  use onebit_mpi
  implicit none
  integer, parameter :: count = 3000, steps = 6
  real, allocatable, asynchronous :: mine(:), total(:), wanted(:), gathered(:, :), wide(:, :)
  type(ONEBIT_Request) :: request, several(2)
  type(MPI_Status) :: status
  type(MPI_Comm) :: comm
  logical :: done
  integer :: rank, ranks, step, i, code, elements

  call MPI_Init()
  call MPI_Comm_dup(MPI_COMM_WORLD, comm)
  call MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN)
  call MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN)
  call MPI_Comm_rank(comm, rank)
  call MPI_Comm_size(comm, ranks)
  allocate(mine(count), total(count), wanted(count), gathered(count, ranks), wide(count, ranks))
  do step = 1, steps
    do i = 1, count
      mine(i) = merge(-1.0, 1.0, mod(i * 7, 5) < 2) * (rank + 1) * 2.0**step
    end do
    call MPI_Allreduce(mine, wanted, count, MPI_REAL, MPI_SUM, comm)

    call ONEBIT_Allreduce(mine, total, count, MPI_REAL, MPI_SUM, comm, code)
    call check(code == MPI_SUCCESS .and. all(total == wanted), "the sum")
    total = mine
    call ONEBIT_Allreduce(MPI_IN_PLACE, total, count, MPI_REAL, ONEBIT_AVG(), comm)
    call check(all(total == wanted / ranks), "the mean in place")

    call ONEBIT_Allgather(mine, count, MPI_REAL, gathered, count, MPI_REAL, comm)
    call check(all(gathered(:, rank + 1) == mine), "an allgather")
    call check(all(sum(gathered, 2) == wanted), "an allgather of all")
    wide = spread(mine, 2, ranks)
    call ONEBIT_Reduce_scatter_block(wide, total, count, MPI_REAL, MPI_SUM, comm)
    call check(all(total == wanted), "a reduce-scatter")
    call ONEBIT_Reduce_scatter_block(MPI_IN_PLACE, wide, count, MPI_REAL, MPI_SUM, comm)
    call check(all(wide(:, 1) == wanted), "a reduce-scatter in place")

    total = 0
    call ONEBIT_Iallreduce(mine, total, count, MPI_REAL, MPI_SUM, comm, request)
    call check(request /= ONEBIT_REQUEST_NULL, "a request")
    done = .false.
    do while (.not. done)
      call ONEBIT_Test(request, done, status)
    end do
    call MPI_Get_elements(status, MPI_BYTE, elements)
    call check(elements == 0 .and. request == ONEBIT_REQUEST_NULL, "an empty status")
    call check(all(total == wanted), "a sum in flight")
  end do

  call ONEBIT_Allreduce_init(mine, total, count, MPI_REAL, MPI_SUM, comm, MPI_INFO_NULL, several(1))
  call ONEBIT_Allreduce_init(mine, gathered, count, MPI_REAL, MPI_SUM, comm, MPI_INFO_NULL, &
      several(2))
  do step = 1, steps
    total = 0
    gathered = 0
    call ONEBIT_Start(several(1))
    call ONEBIT_Start(several(2))
    if (mod(step, 2) == 0) call ONEBIT_Wait(several(2), MPI_STATUS_IGNORE)
    call ONEBIT_Waitall(several, code)
    call check(code == MPI_SUCCESS .and. all(total == wanted), "a persistent sum")
    call check(all(gathered(:, 1) == wanted), "another persistent sum")
  end do
  call ONEBIT_Request_free(several(1))
  call ONEBIT_Request_free(several(2), code)
  call check(code == MPI_SUCCESS .and. several(2) == ONEBIT_REQUEST_NULL, "a freed request")

  call ONEBIT_Forget(mine, comm, code)
  call check(code == MPI_SUCCESS, "forgetting")
  call ONEBIT_Allreduce(mine, total, count, MPI_INTEGER, MPI_SUM, comm, code)
  call check(code == MPI_ERR_TYPE, "integers")
  call check(index(onebit_last_error(), "datatype") > 0, "the words")
  call ONEBIT_Allreduce(mine(::2), total, count / 2, MPI_REAL, MPI_SUM, comm, code)
  call check(code == MPI_ERR_BUFFER, "an array with gaps")
  call ONEBIT_Allreduce(mine, total, count, ONEBIT_BFLOAT16_TYPE(), MPI_MAX, comm, code)
  call check(code == MPI_ERR_OP, "a maximum")
  call MPI_Comm_free(comm)
  call MPI_Finalize()
  if (rank == 0) print "(a, i0, a)", "Fortran's calls on ", ranks, " ranks are equal to MPI's"

contains

  subroutine check(holds, what)
    logical, intent(in) :: holds
    character(*), intent(in) :: what
    if (holds) return
    print "(a, i0, 3a)", "rank ", rank, ": ", what, " is wrong: " // trim(onebit_last_error())
    call MPI_Abort(MPI_COMM_WORLD, 1)
  end subroutine check
end program mpi_calls
