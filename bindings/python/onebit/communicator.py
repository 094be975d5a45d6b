"""Communicators: who takes part, and how bytes move between them."""

import ctypes
import sys
import weakref

from onebit import _native
from onebit.errors import check, wrong
from onebit.transport import Callbacks


class Communicator:
    """One rank's handle on a group of ranks. Made by the class methods; a context manager.

    Plans and optimizers keep it alive. `close` gives it back, after them; over MPI and
    torch.distributed that is to be done on all ranks.
    """

    def __init__(self, handle, keeps=()):
        self._handle = handle
        self._keeps = keeps
        self._collective = False
        self._members = weakref.WeakSet()  # to close first
        # The numbers of those that are open. The garbage collector ends a cycle in any order, and
        # clears weak references before: whoever is the last to go destroys the communicator then.
        self._open = set()
        self._abandoned = False

    @classmethod
    def self_(cls):
        """A group of this rank alone."""
        handle = ctypes.c_void_p()
        check(_native.library().onebit_comm_create_self(ctypes.byref(handle)))
        return cls(handle)

    @classmethod
    def loopback(cls, size, hosts=1):
        """`size` ranks that are threads of this process, as if on `hosts` hosts: a list of
        communicators, one to be used by each thread."""
        handles = (ctypes.c_void_p * max(size, 1))()
        check(_native.library().onebit_comm_create_loopback_hosts(size, hosts, handles))
        return [cls(ctypes.c_void_p(handle)) for handle in handles]

    @classmethod
    def mpi(cls, comm):
        """The ranks of an mpi4py communicator, which is duplicated. Collective. The library must be
        built with the MPI that mpi4py was built with."""
        from onebit.mpi import create

        made = cls(create(comm))
        made._collective = True
        return made

    @classmethod
    def torch(cls, group=None, timeout=None):
        """The ranks of a torch.distributed process group over gloo. Collective.

        group: for onebit's use alone from now on, since its messages are point-to-point messages of
            that group; None: a new group of all processes, which is closed with the communicator
        timeout: seconds that a rank waits for a message before that is an error; default 1800
        """
        from onebit.torch.transport import create

        return create(cls, group, timeout)

    @classmethod
    def custom(cls, transport, rank, size, host=None, largest_tag=0, timeout=0.0):
        """Over a `Transport` of your own. Collective; the rest is as in onebit/custom.h."""
        callbacks = Callbacks(transport, host, largest_tag, timeout)
        handle = ctypes.c_void_p()
        table = ctypes.byref(callbacks.table)
        create = _native.library().onebit_comm_create_custom
        check(create(table, rank, size, ctypes.byref(handle)))
        return cls(handle, keeps=(callbacks,))

    @property
    def handle(self):
        """The onebit_comm_t; raises `Error` when the communicator is closed."""
        if not self._handle:
            raise wrong("the communicator is closed")
        return self._handle

    @property
    def rank(self):
        return _native.library().onebit_comm_rank(self.handle)

    @property
    def size(self):
        return _native.library().onebit_comm_size(self.handle)

    @property
    def hosts(self):
        return _native.library().onebit_comm_hosts(self.handle)

    @property
    def bytes_sent(self):
        """Bytes of messages that this rank has sent to others."""
        return _native.library().onebit_comm_bytes_sent(self.handle)

    def progress(self):
        """Moves nonblocking calls on without finishing any."""
        check(_native.library().onebit_progress(self.handle))

    def abort(self):
        """Ends every call in flight and every later one, on every rank, with ERROR_TRANSPORT. Any
        thread may call it."""
        check(_native.library().onebit_comm_abort(self.handle))

    def shrink(self):
        """A communicator of the ranks that are left, after this one has failed. Collective over
        those; raises `Error` (ERROR_UNSUPPORTED) where the transport cannot."""
        handle = ctypes.c_void_p()
        check(_native.library().onebit_comm_shrink(self.handle, ctypes.byref(handle)))
        made = type(self)(handle)
        made._collective = self._collective
        return made

    def _join(self, member):
        """Something was made on the communicator."""
        self._members.add(member)
        self._open.add(id(member))

    def _leave(self, member):
        """And was given back."""
        self._open.discard(id(member))
        if self._abandoned and not self._open:
            self.close()

    def close(self):
        """Gives back the communicator, and what was made on it. Raises `Error` (ERROR_BUSY), and
        closes nothing more, where a plan has a request in flight."""
        if not self._handle:
            return
        for member in list(self._members):
            member.close()
        handle, self._handle = self._handle, None
        _native.library().onebit_comm_destroy(handle)
        self._keeps = ()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __del__(self):
        # Over MPI destroying is collective, and garbage is collected when each rank likes.
        if not getattr(self, "_handle", None) or self._collective or sys.is_finalizing():
            return
        self._abandoned = True
        if not self._open:
            self.close()
