! The calls of include/onebit/mpi_calls.h for programs that use mpi_f08. That header is their manual.
!
!   use mpi_f08
!   use onebit_mpi
!   call ONEBIT_Allreduce(MPI_IN_PLACE, gradient, size(gradient), MPI_REAL, ONEBIT_AVG(), MPI_COMM_WORLD)
!
! Buffers may have any type and rank, but must be contiguous: a section with gaps gives MPI_ERR_BUFFER.
! As with MPI, the buffers of a call in flight must have the asynchronous attribute where they are
! declared, and ierror is optional.
module onebit_mpi
  use, intrinsic :: iso_c_binding, only: c_int, c_ptr, c_null_ptr, c_associated, c_char
  use mpi_f08
  implicit none
  private

  public :: ONEBIT_Allreduce, ONEBIT_Allgather, ONEBIT_Reduce_scatter_block, ONEBIT_Forget
  public :: ONEBIT_Iallreduce, ONEBIT_Allreduce_init, ONEBIT_Start
  public :: ONEBIT_Wait, ONEBIT_Test, ONEBIT_Waitall, ONEBIT_Request_free
  public :: ONEBIT_AVG, ONEBIT_BFLOAT16_TYPE, ONEBIT_FLOAT16_TYPE, ONEBIT_Request
  public :: onebit_last_error, operator(==), operator(/=)

  type, public, bind(C) :: ONEBIT_Request
    private
    type(c_ptr) :: handle = c_null_ptr
  end type ONEBIT_Request

  type(ONEBIT_Request), parameter, public :: ONEBIT_REQUEST_NULL = ONEBIT_Request(c_null_ptr)

  interface operator(==)
    module procedure requests_equal
  end interface
  interface operator(/=)
    module procedure requests_differ
  end interface

  ! MPI_IN_PLACE and MPI_STATUS_IGNORE are recognised by their addresses, so the calls pass these
  ! addresses to C.
  interface
    integer(c_int) function f_allreduce(sendbuf, recvbuf, in_place, count, datatype, op, comm) &
        bind(C, name="ob_fortran_allreduce")
      import :: c_int
      type(*), dimension(..), intent(in) :: sendbuf, in_place
      type(*), dimension(..) :: recvbuf
      integer(c_int), value :: count, datatype, op, comm
    end function f_allreduce

    integer(c_int) function f_allgather(sendbuf, sendcount, sendtype, recvbuf, in_place, &
        recvcount, recvtype, comm) bind(C, name="ob_fortran_allgather")
      import :: c_int
      type(*), dimension(..), intent(in) :: sendbuf, in_place
      type(*), dimension(..) :: recvbuf
      integer(c_int), value :: sendcount, sendtype, recvcount, recvtype, comm
    end function f_allgather

    integer(c_int) function f_reduce_scatter_block(sendbuf, recvbuf, in_place, count, datatype, &
        op, comm) bind(C, name="ob_fortran_reduce_scatter_block")
      import :: c_int
      type(*), dimension(..), intent(in) :: sendbuf, in_place
      type(*), dimension(..) :: recvbuf
      integer(c_int), value :: count, datatype, op, comm
    end function f_reduce_scatter_block

    integer(c_int) function f_forget(buffer, comm) bind(C, name="ob_fortran_forget")
      import :: c_int
      type(*), dimension(..), intent(in) :: buffer
      integer(c_int), value :: comm
    end function f_forget

    integer(c_int) function f_begin(sendbuf, recvbuf, in_place, count, datatype, op, comm, &
        persistent, request) bind(C, name="ob_fortran_begin")
      import :: c_int, ONEBIT_Request
      type(*), dimension(..), intent(in) :: sendbuf, in_place
      type(*), dimension(..) :: recvbuf
      integer(c_int), value :: count, datatype, op, comm, persistent
      type(ONEBIT_Request), intent(out) :: request
    end function f_begin

    integer(c_int) function f_start(request) bind(C, name="ONEBIT_Start")
      import :: c_int, ONEBIT_Request
      type(ONEBIT_Request), intent(inout) :: request
    end function f_start

    integer(c_int) function f_wait(request) bind(C, name="ob_fortran_wait")
      import :: c_int, ONEBIT_Request
      type(ONEBIT_Request), intent(inout) :: request
    end function f_wait

    integer(c_int) function f_test(request, flag) bind(C, name="ob_fortran_test")
      import :: c_int, ONEBIT_Request
      type(ONEBIT_Request), intent(inout) :: request
      integer(c_int), intent(out) :: flag
    end function f_test

    integer(c_int) function f_free(request) bind(C, name="ONEBIT_Request_free")
      import :: c_int, ONEBIT_Request
      type(ONEBIT_Request), intent(inout) :: request
    end function f_free

    integer(c_int) function f_same(a, b) bind(C, name="ob_fortran_same")
      import :: c_int
      type(*), intent(in) :: a, b
    end function f_same

    integer(c_int) function f_handle(which) bind(C, name="ob_fortran_handle")
      import :: c_int
      integer(c_int), value :: which
    end function f_handle

    subroutine f_message(text, length) bind(C, name="ob_fortran_message")
      import :: c_int, c_char
      character(kind=c_char), intent(out) :: text(*)
      integer(c_int), value :: length
    end subroutine f_message
  end interface

contains

  subroutine report(code, ierror)
    integer(c_int), intent(in) :: code
    integer, optional, intent(out) :: ierror
    if (present(ierror)) ierror = code
  end subroutine report

  subroutine ONEBIT_Allreduce(sendbuf, recvbuf, count, datatype, op, comm, ierror)
    type(*), dimension(..), intent(in) :: sendbuf
    type(*), dimension(..) :: recvbuf
    integer, intent(in) :: count
    type(MPI_Datatype), intent(in) :: datatype
    type(MPI_Op), intent(in) :: op
    type(MPI_Comm), intent(in) :: comm
    integer, optional, intent(out) :: ierror
    call report(f_allreduce(sendbuf, recvbuf, MPI_IN_PLACE, count, datatype%MPI_VAL, op%MPI_VAL, &
        comm%MPI_VAL), ierror)
  end subroutine ONEBIT_Allreduce

  subroutine ONEBIT_Allgather(sendbuf, sendcount, sendtype, recvbuf, recvcount, recvtype, comm, &
      ierror)
    type(*), dimension(..), intent(in) :: sendbuf
    type(*), dimension(..) :: recvbuf
    integer, intent(in) :: sendcount, recvcount
    type(MPI_Datatype), intent(in) :: sendtype, recvtype
    type(MPI_Comm), intent(in) :: comm
    integer, optional, intent(out) :: ierror
    call report(f_allgather(sendbuf, sendcount, sendtype%MPI_VAL, recvbuf, MPI_IN_PLACE, &
        recvcount, recvtype%MPI_VAL, comm%MPI_VAL), ierror)
  end subroutine ONEBIT_Allgather

  subroutine ONEBIT_Reduce_scatter_block(sendbuf, recvbuf, recvcount, datatype, op, comm, ierror)
    type(*), dimension(..), intent(in) :: sendbuf
    type(*), dimension(..) :: recvbuf
    integer, intent(in) :: recvcount
    type(MPI_Datatype), intent(in) :: datatype
    type(MPI_Op), intent(in) :: op
    type(MPI_Comm), intent(in) :: comm
    integer, optional, intent(out) :: ierror
    call report(f_reduce_scatter_block(sendbuf, recvbuf, MPI_IN_PLACE, recvcount, &
        datatype%MPI_VAL, op%MPI_VAL, comm%MPI_VAL), ierror)
  end subroutine ONEBIT_Reduce_scatter_block

  subroutine ONEBIT_Forget(buffer, comm, ierror)
    type(*), dimension(..), intent(in) :: buffer
    type(MPI_Comm), intent(in) :: comm
    integer, optional, intent(out) :: ierror
    call report(f_forget(buffer, comm%MPI_VAL), ierror)
  end subroutine ONEBIT_Forget

  subroutine ONEBIT_Iallreduce(sendbuf, recvbuf, count, datatype, op, comm, request, ierror)
    type(*), dimension(..), intent(in), asynchronous :: sendbuf
    type(*), dimension(..), asynchronous :: recvbuf
    integer, intent(in) :: count
    type(MPI_Datatype), intent(in) :: datatype
    type(MPI_Op), intent(in) :: op
    type(MPI_Comm), intent(in) :: comm
    type(ONEBIT_Request), intent(out) :: request
    integer, optional, intent(out) :: ierror
    call report(f_begin(sendbuf, recvbuf, MPI_IN_PLACE, count, datatype%MPI_VAL, op%MPI_VAL, &
        comm%MPI_VAL, 0_c_int, request), ierror)
  end subroutine ONEBIT_Iallreduce

  subroutine ONEBIT_Allreduce_init(sendbuf, recvbuf, count, datatype, op, comm, info, request, &
      ierror)
    type(*), dimension(..), intent(in), asynchronous :: sendbuf
    type(*), dimension(..), asynchronous :: recvbuf
    integer, intent(in) :: count
    type(MPI_Datatype), intent(in) :: datatype
    type(MPI_Op), intent(in) :: op
    type(MPI_Comm), intent(in) :: comm
    type(MPI_Info), intent(in) :: info
    type(ONEBIT_Request), intent(out) :: request
    integer, optional, intent(out) :: ierror
    if (info == MPI_INFO_NULL) continue ! info has no effect
    call report(f_begin(sendbuf, recvbuf, MPI_IN_PLACE, count, datatype%MPI_VAL, op%MPI_VAL, &
        comm%MPI_VAL, 1_c_int, request), ierror)
  end subroutine ONEBIT_Allreduce_init

  subroutine ONEBIT_Start(request, ierror)
    type(ONEBIT_Request), intent(inout) :: request
    integer, optional, intent(out) :: ierror
    call report(f_start(request), ierror)
  end subroutine ONEBIT_Start

  ! Sets an empty status, as MPI does for a collective.
  subroutine set_status(status, code)
    type(MPI_Status), intent(inout) :: status
    integer(c_int), intent(in) :: code
    if (f_same(status, MPI_STATUS_IGNORE) /= 0) return
    status%MPI_SOURCE = MPI_ANY_SOURCE
    status%MPI_TAG = MPI_ANY_TAG
    status%MPI_ERROR = code
    call MPI_Status_set_elements(status, MPI_BYTE, 0)
    call MPI_Status_set_cancelled(status, .false.)
  end subroutine set_status

  subroutine ONEBIT_Wait(request, status, ierror)
    type(ONEBIT_Request), intent(inout) :: request
    type(MPI_Status) :: status
    integer, optional, intent(out) :: ierror
    integer(c_int) :: code
    code = f_wait(request)
    call set_status(status, code)
    call report(code, ierror)
  end subroutine ONEBIT_Wait

  subroutine ONEBIT_Test(request, flag, status, ierror)
    type(ONEBIT_Request), intent(inout) :: request
    logical, intent(out) :: flag
    type(MPI_Status) :: status
    integer, optional, intent(out) :: ierror
    integer(c_int) :: code, done
    code = f_test(request, done)
    flag = done /= 0
    if (flag) call set_status(status, code)
    call report(code, ierror)
  end subroutine ONEBIT_Test

  ! The call has no statuses, which would all be empty. ierror is MPI_ERR_IN_STATUS if any request failed.
  subroutine ONEBIT_Waitall(requests, ierror)
    type(ONEBIT_Request), intent(inout) :: requests(:)
    integer, optional, intent(out) :: ierror
    integer(c_int) :: code
    integer :: i
    code = MPI_SUCCESS
    do i = 1, size(requests)
      if (f_wait(requests(i)) /= MPI_SUCCESS) code = MPI_ERR_IN_STATUS
    end do
    call report(code, ierror)
  end subroutine ONEBIT_Waitall

  subroutine ONEBIT_Request_free(request, ierror)
    type(ONEBIT_Request), intent(inout) :: request
    integer, optional, intent(out) :: ierror
    call report(f_free(request), ierror)
  end subroutine ONEBIT_Request_free

  function ONEBIT_AVG() result(op)
    type(MPI_Op) :: op
    op%MPI_VAL = f_handle(0_c_int)
  end function ONEBIT_AVG

  function ONEBIT_BFLOAT16_TYPE() result(datatype)
    type(MPI_Datatype) :: datatype
    datatype%MPI_VAL = f_handle(1_c_int)
  end function ONEBIT_BFLOAT16_TYPE

  function ONEBIT_FLOAT16_TYPE() result(datatype)
    type(MPI_Datatype) :: datatype
    datatype%MPI_VAL = f_handle(2_c_int)
  end function ONEBIT_FLOAT16_TYPE

  ! Returns the latest error message, padded with blanks.
  function onebit_last_error() result(message)
    character(len=512) :: message
    character(kind=c_char) :: text(512)
    integer :: i
    call f_message(text, 512_c_int)
    do i = 1, 512
      message(i:i) = text(i)
    end do
  end function onebit_last_error

  pure logical function requests_equal(a, b)
    type(ONEBIT_Request), intent(in) :: a, b
    requests_equal = transfer(a%handle, 0_8) == transfer(b%handle, 0_8)
  end function requests_equal

  pure logical function requests_differ(a, b)
    type(ONEBIT_Request), intent(in) :: a, b
    requests_differ = .not. requests_equal(a, b)
  end function requests_differ
end module onebit_mpi
