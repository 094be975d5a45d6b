"""Communicators over MPI, from mpi4py's."""

import ctypes

from onebit import _native
from onebit._native import Status
from onebit.errors import Error, check, wrong


def create(comm):
    """An onebit_comm_t over an mpi4py communicator."""
    from mpi4py import MPI

    library = _native.library()
    if not isinstance(comm, MPI.Comm):
        raise wrong(f"comm is a {type(comm).__name__}, not an mpi4py communicator")
    if not hasattr(library, "onebit_comm_create_mpi"):
        raise Error(Status.ERROR_UNSUPPORTED, f"{library._name} is built without MPI")
    # By value: a pointer in Open MPI, an int in MPICH. The library uses the MPI that mpi4py has loaded,
    # and refuses one whose handles it does not know before it looks at this one.
    kind = ctypes.c_int if MPI._sizeof(MPI.Comm) == ctypes.sizeof(ctypes.c_int) else ctypes.c_void_p
    function = library.onebit_comm_create_mpi
    function.restype, function.argtypes = ctypes.c_int, [kind, _native.OUT]
    handle = ctypes.c_void_p()
    check(function(kind(MPI._handleof(comm)), ctypes.byref(handle)))
    return handle
