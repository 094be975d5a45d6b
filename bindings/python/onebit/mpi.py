"""Communicators over MPI, from mpi4py's."""

import ctypes

from onebit import _native
from onebit._native import Status
from onebit.errors import Error, check, wrong


def _check_same(library, MPI):
    """A handle of one MPI library means nothing to another."""
    words = ctypes.create_string_buffer(8192)
    length = ctypes.c_int()
    library.MPI_Get_library_version(words, ctypes.byref(length))
    # The string is fixed text in a buffer; some libraries count its zero byte, some do not.
    ours = words.value.decode(errors="replace").strip("\0 \n")
    theirs = MPI.Get_library_version().strip("\0 \n")
    if ours != theirs:
        raise Error(
            Status.ERROR_UNSUPPORTED,
            f"{library._name} is built with {ours.splitlines()[0]}, "
            f"mpi4py with {theirs.splitlines()[0]}",
        )


def create(comm):
    """An onebit_comm_t over an mpi4py communicator."""
    from mpi4py import MPI

    library = _native.library()
    if not isinstance(comm, MPI.Comm):
        raise wrong(f"comm is a {type(comm).__name__}, not an mpi4py communicator")
    if not hasattr(library, "onebit_comm_create_mpi"):
        raise Error(Status.ERROR_UNSUPPORTED, f"{library._name} is built without MPI")
    _check_same(library, MPI)
    # By value: a pointer in Open MPI, an int in MPICH.
    kind = ctypes.c_int if MPI._sizeof(MPI.Comm) == ctypes.sizeof(ctypes.c_int) else ctypes.c_void_p
    function = library.onebit_comm_create_mpi
    function.restype, function.argtypes = ctypes.c_int, [kind, _native.OUT]
    handle = ctypes.c_void_p()
    check(function(kind(MPI._handleof(comm)), ctypes.byref(handle)))
    return handle
