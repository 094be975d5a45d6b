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


def _encode_text(words):
    return None if words is None else str(words).encode()


class Communicator:
    """One rank's handle on a group of ranks. Made by the class methods; a context manager.

    Plans and optimizers keep it alive. `close` gives it back, after them; over MPI and
    gloo that is to be done on all ranks. Of the process that made it: one forked from it can neither
    use it nor harm it.

    transport: what messages go over: self, loopback, mpi, sockets, gloo, nccl or custom
    """

    def __init__(self, handle, keeps=(), transport="custom"):
        self._handle = handle
        self._keeps = keeps
        self._process = os.getpid()
        self._before_close = None
        self.transport = transport
        self._collective = False
        self._members = weakref.WeakSet()  # objects that are closed first
        # The ids of the open objects. The garbage collector frees a cycle in any order, after it has
        # cleared weak references: the last object that is freed then destroys the communicator.
        self._open = set()
        self._abandoned = False

    @classmethod
    def self_(cls) -> Self:
        """Makes a communicator of this rank alone."""
        handle = ctypes.c_void_p()
        check(_native.library().onebit_comm_create_self(ctypes.byref(handle)))
        return cls(handle, transport="self")

    @classmethod
    def loopback(cls, size: int, hosts: int = 1) -> list[Self]:
        """Makes `size` ranks that are threads of this process, as if on `hosts` hosts. Returns a list of
        communicators, one for each thread."""
        handles = (ctypes.c_void_p * max(size, 1))()
        check(_native.library().onebit_comm_create_loopback_hosts(size, hosts, handles))
        return [cls(ctypes.c_void_p(handle), transport="loopback") for handle in handles]

    @classmethod
    def mpi(cls, comm: Any) -> Self:
        """Makes a communicator of the ranks of an mpi4py communicator, which is duplicated. Collective. The
        library must be built with the MPI that mpi4py was built with."""
        made = cls(_create_mpi(comm), transport="mpi")
        made._collective = True
        return made

    @classmethod
    def sockets(
        cls, rank: int | None = None, size: int | None = None, address: str | None = None,
        host: str | None = None, secret: str | None = None, streams: int = 0,
        timeout: float | None = None,
    ) -> Self:  # fmt: skip
        """Over TCP connections of the library's own (onebit/sockets.h has more of each). Collective.

        rank, size: this rank's number, and how many there are; None: RANK and WORLD_SIZE of the
            environment
        address: where rank 0 listens, "host:port"; None: MASTER_ADDR and MASTER_PORT
        host: ranks that give the same name share a host; None: the host's name
        secret: the same text on all ranks; keeps other jobs away
        streams: connections of each two ranks; 0: the library's choice
        timeout: seconds that a rank waits for others; math.inf: for ever; None: ONEBIT_TIMEOUT
        """
        if (rank is None) != (size is None) or (size is not None and size < 1):
            raise argument_error(f"rank is {rank} and size {size}: give both, size at least 1, or neither")
        if timeout is not None and not timeout > 0:
            raise argument_error(f"timeout is {timeout} seconds")
        options = _native.make_structure(_native.SocketsOptions)
        given = {"rank": rank, "ranks": size, "streams": streams, "timeout": timeout}
        given.update(rendezvous=_encode_text(address), host=_encode_text(host), secret=_encode_text(secret))
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
        """The ranks of a torch.distributed process group, over any backend: its store is all that
        is needed. Collective.

        group: None: all processes
        timeout: seconds that a rank waits for a message before that is an error; None:
            ONEBIT_TIMEOUT's, or where that is not set the process group's
        transport: "sockets": the library's own, at the address that gloo would use
            (ONEBIT_SOCKET_IFNAME, or GLOO_SOCKET_IFNAME, names an interface); "gloo";
            "automatic": sockets, and gloo, with a warning, where some two ranks cannot connect.
            The same on all ranks; `transport` of the communicator says which it is
        streams: connections of each two ranks; 0: the library's choice
        """
        from onebit.torch.transport import create

        return create(cls, group, timeout, transport, streams)

    @classmethod
    def nccl(cls, group: Any = None, timeout: float | None = None) -> Self:
        """Makes a communicator of the ranks of a torch.distributed process group, over any backend, through an
        NCCL communicator of their own on the CUDA device that is current on each: for plans and optimizers with
        device="cuda". Collective, and so is `close`. The library must be built with NCCL.

        timeout: seconds to wait here for a rank that does not come; None: as above
        """
        from onebit.torch.transport import create_nccl

        return create_nccl(cls, group, timeout)

    @classmethod
    def custom(
        cls, transport: Transport, rank: int, size: int, host: str | None = None,
        largest_tag: int = 0, timeout: float = 0.0,
    ) -> Self:  # fmt: skip
        """Over a `Transport` of your own. Collective; the rest is as in onebit/custom.h."""
        callbacks = Callbacks(transport, host, largest_tag, timeout)
        handle = ctypes.c_void_p()
        table = ctypes.byref(callbacks.table)
        create = _native.library().onebit_comm_create_custom
        check(create(table, rank, size, ctypes.byref(handle)))
        return cls(handle, keeps=(callbacks,))

    @property
    def handle(self) -> Any:
        """Returns the onebit_comm_t; raises `Error` when the communicator is closed."""
        if not self._handle:
            raise argument_error("the communicator is closed")
        self._check_process()
        return self._handle

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
        """Returns the bytes of messages that this rank has sent to others."""
        return _native.library().onebit_comm_bytes_sent(self.handle)

    def progress(self) -> None:
        """Moves nonblocking calls on without finishing any."""
        check(_native.library().onebit_progress(self.handle))

    def abort(self) -> None:
        """Ends every call in flight and every later one, on every rank, with ERROR_TRANSPORT. Any
        thread may call it."""
        check(_native.library().onebit_comm_abort(self.handle))

    def shrink(self) -> Self:
        """Makes a communicator of the remaining ranks, after this one has failed. Collective over those; raises
        `Error` (ERROR_UNSUPPORTED) where the transport cannot."""
        handle = ctypes.c_void_p()
        check(_native.library().onebit_comm_shrink(self.handle, ctypes.byref(handle)))
        made = type(self)(handle, transport=self.transport)
        made._collective = self._collective
        return made

    def _join(self, member):
        """Registers an object that was made on the communicator."""
        self._members.add(member)
        self._open.add(id(member))

    def _leave(self, member):
        """Removes such an object, and closes an abandoned communicator after the last."""
        self._open.discard(id(member))
        if self._abandoned and not self._open:
            self.close()

    def close(self) -> None:
        """Gives back the communicator, and what was made on it. Raises `Error` (ERROR_BUSY), and
        closes nothing more, where a plan has a request in flight."""
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self):
        # Over MPI destroying is collective, and each rank collects garbage at another time.
        if not getattr(self, "_handle", None) or self._collective or sys.is_finalizing():
            return
        self._abandoned = True
        if not self._open:
            self.close()


# --- Over MPI ------------------------------------------------------------------------------------

MPI_KINDS = {"openmpi": "Open MPI", "mpich": "MPICH", "standard": "the ABI of MPI 5"}


def mpi_kind(MPI):
    """Returns the ABI of the MPI library that mpi4py loaded, a name of MPI_KINDS. A handle is a pointer to a
    variable in Open MPI, an int in MPICH and its relatives, and in the standard's own ABI a pointer
    that is a small number."""
    if MPI._sizeof(MPI.Comm) == ctypes.sizeof(ctypes.c_int):
        return "mpich"
    return "standard" if MPI._handleof(MPI.COMM_SELF) < 4096 else "openmpi"


def mpi_part(kind):
    """Returns the path of the package's transport over MPI for this kind; None: it was built without."""
    path = os.path.join(_native.HERE, f"libonebit_{kind}.so")
    return path if os.path.exists(path) else None


def mpi_function(kind):
    """Returns onebit_comm_create_mpi: the library's, or that of the package's part for this kind of MPI, which
    belongs to the package's library."""
    library = _native.library()
    if hasattr(library, "onebit_comm_create_mpi"):
        return library.onebit_comm_create_mpi
    path = mpi_part(kind)
    if path is None or os.path.dirname(library._name) != _native.HERE:
        raise Error(
            Status.ERROR_UNSUPPORTED,
            f"{library._name} is built without MPI, or not for {MPI_KINDS[kind]}: where an mpicc of "
            f"{MPI_KINDS[kind]} is, `pip install` builds that too; or use a library of `make` "
            "(ONEBIT_LIBRARY)",
        )
    return ctypes.CDLL(path).onebit_comm_create_mpi


def _create_mpi(comm):
    """Creates an onebit_comm_t over an mpi4py communicator."""
    from mpi4py import MPI

    if not isinstance(comm, MPI.Comm):
        raise argument_error(f"comm is a {type(comm).__name__}, not an mpi4py communicator")
    kind = mpi_kind(MPI)
    # By value. The library uses the MPI that mpi4py has loaded, and refuses one whose handles it does
    # not know before it looks at this one.
    handle_type = ctypes.c_int if kind == "mpich" else ctypes.c_void_p
    function = mpi_function(kind)
    function.restype, function.argtypes = ctypes.c_int, [handle_type, _native.OUT]
    handle = ctypes.c_void_p()
    check(function(handle_type(MPI._handleof(comm)), ctypes.byref(handle)))
    return handle
