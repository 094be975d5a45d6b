"""Communicators over MPI, from mpi4py's."""

import ctypes
import functools
import os

from onebit import _native
from onebit._native import Status
from onebit.errors import Error, check, wrong

KINDS = {"openmpi": "Open MPI", "mpich": "MPICH", "standard": "the ABI of MPI 5"}


def kind_of(MPI):
    """Whose ABI the MPI library has that mpi4py loaded: a name of KINDS. A handle is a pointer to a
    variable in Open MPI, an int in MPICH and its relatives, and in the standard's own ABI a pointer
    that is a small number."""
    if MPI._sizeof(MPI.Comm) == ctypes.sizeof(ctypes.c_int):
        return "mpich"
    return "standard" if MPI._handleof(MPI.COMM_SELF) < 4096 else "openmpi"


def part_path(kind):
    """Where the package has the transport over MPI for this kind; None: it was built without."""
    path = os.path.join(_native.HERE, f"libonebit_{kind}.so")
    return path if os.path.exists(path) else None


@functools.lru_cache(maxsize=None)
def _part(path):
    return ctypes.CDLL(path)


def _function(kind):
    """onebit_comm_create_mpi: the library's, or of the part of the package that is for this kind and
    belongs to the package's library."""
    library = _native.library()
    if hasattr(library, "onebit_comm_create_mpi"):
        return library.onebit_comm_create_mpi
    path = part_path(kind)
    if path is None or os.path.dirname(library._name) != _native.HERE:
        raise Error(
            Status.ERROR_UNSUPPORTED,
            f"{library._name} is built without MPI, or not for {KINDS[kind]}: where an mpicc of "
            f"{KINDS[kind]} is, `pip install` builds that too; or use a library of `make` "
            "(ONEBIT_LIBRARY)",
        )
    return _part(path).onebit_comm_create_mpi


def create(comm):
    """An onebit_comm_t over an mpi4py communicator."""
    from mpi4py import MPI

    if not isinstance(comm, MPI.Comm):
        raise wrong(f"comm is a {type(comm).__name__}, not an mpi4py communicator")
    kind = kind_of(MPI)
    # By value. The library uses the MPI that mpi4py has loaded, and refuses one whose handles it does
    # not know before it looks at this one.
    handle_type = ctypes.c_int if kind == "mpich" else ctypes.c_void_p
    function = _function(kind)
    function.restype, function.argtypes = ctypes.c_int, [handle_type, _native.OUT]
    handle = ctypes.c_void_p()
    check(function(handle_type(MPI._handleof(comm)), ctypes.byref(handle)))
    return handle
