"""Communicators: groups of ranks, and the transports that move bytes between them; over MPI those of mpi4py."""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any

from onebit import _native
from onebit._native import Error, Status, argument_error, check
from onebit.transport import Callbacks, Transport

if TYPE_CHECKING:
    from typing_extensions import Self


def _encode(text):
    return None if text is None else str(text).encode()


class Handle:
    """A handle of the library. A derived class has `close`, and `_check_process`, which raises `Error` in a
    forked process."""

    _handle = None  # None: not created yet, or closed
    _noun = None  # the object's name in messages: "the plan"

    @property
    def handle(self) -> Any:
        """Returns the C handle. Raises `Error` after `close`."""
        if not self._handle:
            raise argument_error(f"{self._noun} is closed")
        self._check_process()
        return self._handle

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Member(Handle):
    """A handle that is created on a communicator. The communicator closes it."""

    def _begin(self, comm, handle):
        """Stores the handle that the C function has created."""
        self._handle, self._comm = handle, comm
        comm._join(self)

    def _check_process(self):
        self._comm._check_process()


class Communicator(Handle):
    """One rank's handle of a group of ranks. The class methods create it. It is a context manager.

    Plans and optimizers keep it alive. `close` first closes them; over MPI and gloo all ranks must call
    `close`. A forked process can neither use the communicator nor harm it.

    transport: "self", "loopback", "mpi", "sockets", "gloo", "nccl" or "custom"
    """

    _noun = "the communicator"

    def __init__(self, handle, keeps=(), transport="custom"):
        self._handle = handle
        self._keeps = keeps
        self._process = os.getpid()
        self._before_close = None
        self.transport = transport
        self._collective = False
        self._members = weakref.WeakSet()  # objects that must be closed before the communicator
        # The ids of the open objects. The garbage collector first clears weak references, and then frees the
        # objects of a cycle in any order: the last one that is freed destroys the communicator.
        self._open = set()
        self._abandoned = False

    @classmethod
    def self_(cls) -> Self:
        """Creates a communicator of this rank alone."""
        handle = ctypes.c_void_p()
        check(_native.library().onebit_comm_create_self(ctypes.byref(handle)))
        return cls(handle, transport="self")

    @classmethod
    def loopback(cls, size: int, hosts: int = 1) -> list[Self]:
        """Creates `size` ranks that are threads of this process, as if on `hosts` hosts. Returns a list of
        communicators, one for each thread."""
        handles = (ctypes.c_void_p * max(size, 1))()
        check(_native.library().onebit_comm_create_loopback_hosts(size, hosts, handles))
        return [cls(ctypes.c_void_p(handle), transport="loopback") for handle in handles]

    @classmethod
    def mpi(cls, comm: Any) -> Self:
        """Creates a communicator of the ranks of an mpi4py communicator, which is duplicated. Collective. The
        library must be built with the same MPI as mpi4py."""
        made = cls(_create_mpi(comm), transport="mpi")
        made._collective = True
        return made

    @classmethod
    def sockets(
        cls, rank: int | None = None, size: int | None = None, address: str | None = None,
        host: str | None = None, secret: str | None = None, streams: int = 0,
        timeout: float | None = None,
    ) -> Self:  # fmt: skip
        """Creates a communicator over the library's own TCP connections (onebit/sockets.h). Collective.

        rank, size: this rank's number, and the number of ranks; None: RANK and WORLD_SIZE of the environment
        address: where rank 0 listens, "host:port"; None: MASTER_ADDR and MASTER_PORT
        host: ranks that give the same name share a host; None: the host's name
        secret: the same text on all ranks; it keeps out ranks of other jobs
        streams: the number of connections between two ranks; 0: the library's choice
        timeout: seconds that a rank waits for others; math.inf: without limit; None: ONEBIT_TIMEOUT
        """
        if (rank is None) != (size is None) or (size is not None and size < 1):
            raise argument_error(f"rank is {rank}, size is {size}: give both, with size at least 1, or neither")
        if timeout is not None and not timeout > 0:
            raise argument_error(f"timeout is {timeout} seconds: it must be above 0")
        options = _native.make_structure(_native.SocketsOptions)
        given = {"rank": rank, "ranks": size, "streams": streams, "timeout": timeout}
        given.update(rendezvous=_encode(address), host=_encode(host), secret=_encode(secret))
        for name, value in given.items():
            if value is not None:
                setattr(options, name, value)
        handle = ctypes.c_void_p()
        create = _native.library().onebit_comm_create_sockets
        check(create(ctypes.byref(options), ctypes.byref(handle)))
        return cls(handle, transport="sockets")

    @classmethod
    def torch(
        cls, group: Any = None, timeout: float | None = None, transport: str = "automatic",
        streams: int = 0,
    ) -> Self:  # fmt: skip
        """Creates a communicator of the ranks of a torch.distributed process group with any backend
        (docs/python-reference.md#how-messages-travel). Collective.

        group: None: all processes
        timeout: seconds that a rank waits for a message before that is an error; None:
            ONEBIT_TIMEOUT, or the process group's if it is not set
        transport: "sockets": the library's own connections; "gloo"; "automatic": sockets, or gloo with a
            warning if two ranks cannot connect. It must be the same on all ranks. The communicator's attribute
            `transport` has the choice
        streams: as in `sockets`
        """
        from onebit.torch.transport import create

        return create(cls, group, timeout, transport, streams)

    @classmethod
    def nccl(cls, group: Any = None, timeout: float | None = None) -> Self:
        """Creates a communicator of the ranks of a torch.distributed process group, over a new NCCL
        communicator on each rank's current CUDA device. It is for plans and optimizers with device="cuda". The
        library must be built with NCCL. Collective, and so is `close`.

        timeout: seconds that this function waits for a missing rank; None: as in `torch`
        """
        from onebit.torch.transport import create_nccl

        return create_nccl(cls, group, timeout)

    @classmethod
    def custom(
        cls, transport: Transport, rank: int, size: int, host: str | None = None,
        largest_tag: int = 0, timeout: float = 0.0,
    ) -> Self:  # fmt: skip
        """Creates a communicator over your own `Transport`. Collective. The other arguments are those of
        onebit/custom.h."""
        callbacks = Callbacks(transport, host, largest_tag, timeout)
        handle = ctypes.c_void_p()
        table = ctypes.byref(callbacks.table)
        create = _native.library().onebit_comm_create_custom
        check(create(table, rank, size, ctypes.byref(handle)))
        return cls(handle, keeps=(callbacks,))

    def _is_foreign(self):
        """True if this process was forked from the one that made the communicator."""
        return self._process != os.getpid()

    def _check_process(self):
        if self._is_foreign():
            raise argument_error(
                f"the communicator belongs to process {self._process}: this process was forked "
                "from it and cannot use its connections"
            )

    @property
    def rank(self) -> int:
        return _native.library().onebit_comm_rank(self.handle)

    @property
    def size(self) -> int:
        return _native.library().onebit_comm_size(self.handle)

    @property
    def hosts(self) -> int:
        return _native.library().onebit_comm_hosts(self.handle)

    @property
    def bytes_sent(self) -> int:
        """Returns the bytes of messages that this rank has sent to other ranks."""
        return _native.library().onebit_comm_bytes_sent(self.handle)

    def progress(self) -> None:
        """Advances nonblocking calls without completing any of them."""
        check(_native.library().onebit_progress(self.handle))

    def abort(self) -> None:
        """Ends every call in flight and every later one with ERROR_TRANSPORT, on every rank. Any thread may
        call it."""
        check(_native.library().onebit_comm_abort(self.handle))

    def shrink(self) -> Self:
        """Creates a communicator of the remaining ranks after this one has failed. Collective over the
        remaining ranks. Raises `Error` (ERROR_UNSUPPORTED) if the transport cannot do this."""
        handle = ctypes.c_void_p()
        check(_native.library().onebit_comm_shrink(self.handle, ctypes.byref(handle)))
        made = type(self)(handle, transport=self.transport)
        made._collective = self._collective
        return made

    def _join(self, member):
        """Registers an object that was created on the communicator."""
        self._members.add(member)
        self._open.add(id(member))

    def _leave(self, member):
        """Removes an object from the communicator. If it was the last one, an abandoned communicator is
        closed."""
        self._open.discard(id(member))
        if self._abandoned and not self._open:
            self.close()

    def close(self) -> None:
        """Frees the communicator, and all objects that were created on it. If a plan has a request in flight,
        raises `Error` (ERROR_BUSY) and closes nothing more."""
        if not self._handle:
            return
        if self._is_foreign():
            self._handle = None  # connections and locks belong to the parent process
            return
        for member in list(self._members):
            member.close()
        if self._before_close is not None:
            self._before_close(self)
        handle, self._handle = self._handle, None
        _native.library().onebit_comm_destroy(handle)
        self._keeps = ()

    def __del__(self):
        # Over MPI destroying is collective, but each rank collects garbage at a different time.
        if not self._handle or self._collective or sys.is_finalizing():
            return
        self._abandoned = True
        if not self._open:
            self.close()


# --- Over MPI ------------------------------------------------------------------------------------

MPI_KINDS = {"openmpi": "Open MPI", "mpich": "MPICH", "standard": "the ABI of MPI 5"}


def mpi_kind(MPI):
    """Returns the ABI of the MPI library that mpi4py has loaded, a key of MPI_KINDS. A handle is a pointer to
    a variable in Open MPI, an int in MPICH and libraries derived from it, and in the standard's own ABI a
    pointer that is a small number."""
    if MPI._sizeof(MPI.Comm) == ctypes.sizeof(ctypes.c_int):
        return "mpich"
    return "standard" if MPI._handleof(MPI.COMM_SELF) < 4096 else "openmpi"


def mpi_part(kind):
    """Returns the path of the package's transport over this kind of MPI. None: the package was built without
    it."""
    path = os.path.join(_native.HERE, f"libonebit_{kind}.so")
    return path if os.path.exists(path) else None


def mpi_function(kind):
    """Returns onebit_comm_create_mpi. It is a function of the library, or of the package's part for this kind
    of MPI, which only works with the package's library."""
    library = _native.library()
    if hasattr(library, "onebit_comm_create_mpi"):
        return library.onebit_comm_create_mpi
    path = mpi_part(kind)
    if path is None or os.path.dirname(library._name) != _native.HERE:
        raise Error(
            Status.ERROR_UNSUPPORTED,
            f"{library._name} was built without MPI, or for another MPI than {MPI_KINDS[kind]}: install the "
            f"package again where the mpicc of {MPI_KINDS[kind]} is on the PATH, or set ONEBIT_LIBRARY to a library "
            "built by make",
        )
    return ctypes.CDLL(path).onebit_comm_create_mpi


def _create_mpi(comm):
    """Creates an onebit_comm_t over an mpi4py communicator."""
    from mpi4py import MPI

    if not isinstance(comm, MPI.Comm):
        raise argument_error(f"comm is a {type(comm).__name__}, not an mpi4py communicator")
    kind = mpi_kind(MPI)
    # The handle is passed by value. The library rejects an MPI whose handles it does not know before it reads
    # this handle.
    handle_type = ctypes.c_int if kind == "mpich" else ctypes.c_void_p
    function = mpi_function(kind)
    function.restype, function.argtypes = ctypes.c_int, [handle_type, _native.OUT]
    handle = ctypes.c_void_p()
    check(function(handle_type(MPI._handleof(comm)), ctypes.byref(handle)))
    return handle
