"""Creates communicators of torch.distributed's process groups: over the library's own sockets, over gloo's
point-to-point calls, or over NCCL, whose unique id is sent through the group's store.

torch's work object of a receive can be waited for, but not tested, and messages may arrive in another order
than the program waits for them. So with gloo a thread for each peer always receives: a header (tag and
length), then the message. The thread passes the message to the receive that waits for it, or stores it until
there is one. gloo's own collectives use other slots.
"""

import atexit
import collections
import contextlib
import ctypes
import datetime
import functools
import math
import os
import threading
import time
import weakref

import torch
import torch.distributed as dist

from onebit import _native
from onebit._native import Error, Status, argument_error, check, warn
from onebit.torch.rendezvous import Rendezvous, create_sockets
from onebit.torch.staged import has_kernels, is_staging_forced
from onebit.transport import Transport

HEADER, MESSAGE = 0, 1  # gloo's tags; the headers of a peer arrive in order, and so do its messages
GOODBYE, ABORT = -1, -2  # in place of a tag: the last header of a rank that closes, or that has failed
LARGEST_TAG = 2**30
# The timeout of the gloo group. With gloo's own timeout a group that sends nothing for half an hour would
# fail.
FOR_EVER = datetime.timedelta(days=3650)
# The largest number of messages to a peer in flight. The wait for the oldest one is short, since the peer's
# thread receives messages at any time.
MOST_UNDER_WAY = 64

SECONDS_AT_EXIT = 30  # the time in which all other ranks must say goodbye too

_open = weakref.WeakSet()
_ending = []  # the threads of released transports


class GlooTransport(Transport):
    """A `Transport` over a process group that is used for nothing else."""

    def __init__(self, group, timeout):
        self._group = group
        self._timeout = datetime.timedelta(seconds=timeout)
        self._rank, size = group.rank(), group.size()
        self._changed = threading.Condition()
        # By (peer, tag): messages for which no operation waits yet; operations that wait, in their order.
        self._arrived = collections.defaultdict(collections.deque)
        self._wanted = collections.defaultdict(collections.deque)
        self._failed = None  # the error message of the failure that ended the transport
        self._gone = {}  # by peer that sends nothing more: the reason
        peers = [peer for peer in range(size) if peer != self._rank]
        self._sending = {peer: threading.Lock() for peer in peers}
        self._under_way = {peer: collections.deque() for peer in peers}
        self._threads = [
            threading.Thread(target=self._listen, args=(peer,), daemon=True, name=f"onebit-{peer}")
            for peer in peers
        ]
        for thread in self._threads:
            thread.start()
        _open.add(self)

    # --- What the library calls ------------------------------------------------------------------

    def send(self, data, peer, tag):
        self._check(peer)
        self._post(peer, tag, bytearray(data))

    def receive(self, operation):
        key = operation.peer, operation.tag
        operation.message = None
        with self._changed:
            if self._arrived[key]:
                operation.message = self._arrived[key].popleft()
            else:
                self._check(operation.peer)
                self._wanted[key].append(operation)

    def test(self, operation, seconds):
        with self._changed:
            if operation.message is None and seconds > 0:
                self._check(operation.peer)
                self._changed.wait(seconds)
            message = operation.message
            if message is None:
                self._check(operation.peer)
                return None
        count = message.numel()
        room = operation.memory.nbytes
        if 0 < count <= room:
            memory = (ctypes.c_char * room).from_buffer(operation.memory)
            ctypes.memmove(memory, message.data_ptr(), count)
        return count

    def cancel(self, operation):
        with self._changed, contextlib.suppress(ValueError):
            self._wanted[operation.peer, operation.tag].remove(operation)

    def abort(self):
        self._fail("this rank has aborted the communicator")
        self._tell_all(ABORT)

    def release(self):
        """Sends a goodbye to all peers, and waits until it is sent. The threads end when all peers have sent
        their goodbyes."""
        _open.discard(self)
        _ending[:] = [one for one in _ending if one.is_alive()] + self._threads
        self._tell_all(GOODBYE)
        for peer in self._under_way:
            with contextlib.suppress(Exception):
                self._wait_for_sends(peer, 0)

    # --- Messages --------------------------------------------------------------------------------

    def _check(self, peer):
        reason = self._failed or self._gone.get(peer)
        if reason:
            raise RuntimeError(reason)

    def _fail(self, reason):
        with self._changed:
            self._failed = self._failed or reason
            self._changed.notify_all()

    def _note_end(self, peer, reason):
        """Records that a peer sends nothing more. The messages that it has already sent can still be
        received."""
        with self._changed:
            self._gone[peer] = reason
            self._changed.notify_all()

    def _tell_all(self, what):
        for peer in self._under_way:
            with contextlib.suppress(Exception):  # a lost peer need not get the message
                self._post(peer, what, b"")

    def _post(self, peer, tag, data):
        tensors = [torch.tensor([tag, len(data)], dtype=torch.int64, device="cpu")]
        if data:
            tensors.append(torch.frombuffer(data, dtype=torch.uint8))
        with self._sending[peer]:
            for slot, tensor in zip((HEADER, MESSAGE), tensors):
                work = self._group.send([tensor], peer, slot)
                self._under_way[peer].append((work, tensor, data))
            self._wait_for_sends(peer, MOST_UNDER_WAY)

    def _wait_for_sends(self, peer, most):
        """Waits until at most `most` messages to a peer are in flight. The memory of the others is then
        free."""
        while len(self._under_way[peer]) > most:
            work, *_ = self._under_way[peer].popleft()
            work.wait(self._timeout)

    # --- A peer's thread -------------------------------------------------------------------------

    def _receive_tensor(self, tensor, peer, slot):
        self._group.recv([tensor], peer, slot).wait(FOR_EVER)
        return tensor

    def _listen(self, peer):
        try:
            while True:
                header = torch.empty(2, dtype=torch.int64, device="cpu")
                tag, count = self._receive_tensor(header, peer, HEADER).tolist()
                if tag == GOODBYE:
                    self._note_end(peer, f"rank {peer} has closed its communicator")
                    return
                if tag == ABORT:
                    self._fail(f"rank {peer} has aborted the communicator")
                    continue
                message = torch.empty(count, dtype=torch.uint8, device="cpu")
                if count:
                    self._receive_tensor(message, peer, MESSAGE)
                self._deliver(peer, tag, message)
        except Exception as reason:  # noqa: BLE001
            lines = str(reason).splitlines() or [type(reason).__name__]
            self._note_end(peer, f"rank {peer}: {lines[0]}")

    def _deliver(self, peer, tag, message):
        key = peer, tag
        with self._changed:
            if self._wanted[key]:
                self._wanted[key].popleft().message = message
                self._changed.notify_all()
            else:
                self._arrived[key].append(message)


@atexit.register
def _leave_all():
    """Ends all transports at exit. Otherwise a thread that returns from a receive while the interpreter ends
    would abort the process."""
    for transport in list(_open):
        transport.release()
    until = time.monotonic() + SECONDS_AT_EXIT
    for thread in _ending:
        thread.join(max(until - time.monotonic(), 0))


def check_member(group):
    if not (dist.is_available() and dist.is_initialized()):
        raise argument_error("torch.distributed is not initialised: call init_process_group first")
    if group is not None and dist.get_rank(group) < 0:
        raise argument_error("group does not have this process")


def timeout_of(group, timeout):
    """Returns the given seconds, or those of ONEBIT_TIMEOUT, or those of the process group."""
    name, asked = "timeout", timeout
    if timeout is None:
        name, asked = "ONEBIT_TIMEOUT", os.environ.get("ONEBIT_TIMEOUT")
    if not asked:
        return _own_timeout(dist.distributed_c10d._get_default_group() if group is None else group)
    try:
        seconds = math.inf if asked in ("never", "0") else float(asked)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise argument_error(f"{name} is {asked} seconds: it must be a number above 0, or never")
    return min(seconds, FOR_EVER.total_seconds())


def _own_timeout(group):
    """Returns the group's timeout that the program has set, or torch's default for a backend that has no
    timeout."""
    devices = getattr(group, "_device_types", None)  # from torch 2.0 on a group has a backend for each device
    backends = [group] if devices is None else [group._get_backend(one) for one in devices]
    options = [getattr(one, "options", None) for one in backends]
    found = [one._timeout.total_seconds() for one in options if hasattr(one, "_timeout")]
    return max(found, default=dist.default_pg_timeout.total_seconds())


def _create_gloo(kind, rendezvous, timeout):
    """Creates a communicator over its own gloo connections."""
    group = dist.ProcessGroupGloo(
        rendezvous.store_of("gloo"), rendezvous.rank, rendezvous.size, datetime.timedelta(seconds=timeout)
    )
    transport = GlooTransport(group, timeout)
    try:
        made = kind.custom(
            transport, rendezvous.rank, rendezvous.size, largest_tag=LARGEST_TAG, timeout=timeout
        )
    except Exception:
        transport.release()
        raise
    made.transport = "gloo"
    return made


TRANSPORTS = ("automatic", "sockets", "gloo")


def create(kind, group, timeout, transport, streams):
    """Creates a communicator of class `kind` for the processes of a group."""
    check_member(group)
    timeout = timeout_of(group, timeout)
    if transport not in TRANSPORTS:
        raise argument_error(f"transport is {transport!r}, not one of {', '.join(TRANSPORTS)}")
    if dist.get_world_size(group) == 1:
        return kind.self_()
    rendezvous = Rendezvous(group, timeout)
    asked = rendezvous.share(transport)
    if asked != [transport] * rendezvous.size:
        other = next(rank for rank, one in enumerate(asked) if one != asked[0])
        words = f"transport differs: {asked[0]} on rank 0, {asked[other]} on rank {other}"
        raise Error(Status.ERROR_MISMATCH, words)
    if transport == "gloo":
        return _create_gloo(kind, rendezvous, timeout)
    try:
        return create_sockets(kind, rendezvous, timeout, streams)
    except ConnectionError as reason:
        why = f"sockets cannot be used: {reason}"
    if transport == "sockets":
        raise Error(Status.ERROR_TRANSPORT, why)
    warn(f"messages go over gloo, which is slower, since {why}")
    return _create_gloo(kind, rendezvous, timeout)


# --- Over NCCL ------------------------------------------------------------------------------------


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


class Nccl:
    """The same NCCL that the library calls, which is torch's: its libnccl.so.2 is loaded before the
    library."""

    def __init__(self):
        library = _native.library()
        if not hasattr(library, "onebit_comm_create_nccl"):
            raise Error(Status.ERROR_UNSUPPORTED, f"{library._name} is built without NCCL")
        try:
            # The search for names includes the libraries to which the library is linked.
            found = library if hasattr(library, "ncclGetUniqueId") else ctypes.CDLL("libnccl.so.2")
        except OSError as reason:
            raise Error(Status.ERROR_UNSUPPORTED, f"NCCL is not here: {reason}") from None
        self._init, self._abort = found.ncclCommInitRank, found.ncclCommAbort
        self._init.argtypes = [_native.OUT, ctypes.c_int, UniqueId, ctypes.c_int]
        self._abort.argtypes = [ctypes.c_void_p]
        self._text, self._id = found.ncclGetErrorString, found.ncclGetUniqueId
        self._text.restype, self._text.argtypes = ctypes.c_char_p, [ctypes.c_int]
        self._id.argtypes = [ctypes.POINTER(UniqueId)]
        self._create = library.onebit_comm_create_nccl
        self._cuda = library

    def _check(self, code, what):
        if code != 0:
            raise Error(Status.ERROR_TRANSPORT, f"{what}: {self._text(code).decode()}")

    def unique_id(self):
        """Returns a unique id as text, for `create`."""
        made = UniqueId()
        self._check(self._id(ctypes.byref(made)), "ncclGetUniqueId")
        return bytes(made).hex()

    def _within(self, seconds, device, call, *arguments):
        """Makes a call that has no time limit in another thread, on a device. Returns its result, or None
        after `seconds`."""
        result = []

        def run():
            self._cuda.cudaSetDevice(device)
            result.append(call(*arguments))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(min(seconds, threading.TIMEOUT_MAX))
        return result[0] if result else None

    def create(self, kind, unique_id, rank, size, timeout=threading.TIMEOUT_MAX):
        """Creates a communicator of class `kind` on the current device. Collective."""
        unique_id = UniqueId.from_buffer_copy(bytes.fromhex(unique_id))
        nccl_comm, handle, device = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
        self._cuda.cudaGetDevice(ctypes.byref(device))
        wait = functools.partial(self._within, timeout, device.value)
        code = wait(self._init, ctypes.byref(nccl_comm), size, unique_id, rank)
        if code is None:
            words = f"waited {timeout:.3g} s for the other ranks in ncclCommInitRank"
            raise Error(Status.ERROR_TRANSPORT, words)
        self._check(code, "ncclCommInitRank")
        try:
            check(self._create(nccl_comm, ctypes.byref(handle)))
        except Error as error:
            if error.status != Status.ERROR_TRANSPORT:  # otherwise the library has aborted it already
                self._abort(nccl_comm)
            raise
        made = kind(handle, transport="nccl")
        made._collective = True
        made._before_close = functools.partial(_synchronize_and_abort, wait)
        return made


def _synchronize_and_abort(wait, comm):
    """Waits for work that graphs have launched, at most until the timeout. Then aborts the communicator,
    which has no effect if it has already failed."""
    wait(_native.library().cudaDeviceSynchronize)
    _native.library().onebit_comm_abort(comm.handle)


def suits_nccl(group, parameters, stage):
    """True if an optimizer of these parameters could use NCCL, as the program's own collectives do on the
    devices of these parameters. All ranks get the same answer. The ranks' libraries may still lack NCCL."""
    if {one.device.type for one in parameters} != {"cuda"} or stage == "host" or is_staging_forced():
        return False
    if any(hasattr(one, "to_local") for one in parameters):  # all shards must skip a step together
        return False
    backend = getattr(dist, "get_backend_config", dist.get_backend)(group)  # from torch 2.0 on
    return "nccl" in str(backend) and dist.get_world_size(group) > 1


def create_nccl(kind, group, timeout):
    """Creates a communicator of class `kind` over NCCL for the processes of a group."""
    check_member(group)
    rendezvous = Rendezvous(group, timeout_of(group, timeout))

    def begin():
        if not has_kernels():
            raise Error(Status.ERROR_UNSUPPORTED, "the library was built without CUDA, so it has no kernels")
        nccl = Nccl()
        return nccl.unique_id() if dist.get_rank(group) == 0 else None

    try:
        unique_id = rendezvous.share_results(begin)[0]
    except ConnectionError as reason:
        raise Error(Status.ERROR_UNSUPPORTED, f"NCCL cannot be used: {reason}") from None
    return Nccl().create(kind, unique_id, rendezvous.rank, rendezvous.size, rendezvous.timeout)


def create_for(kind, parameters, stage, group, timeout):
    """Creates a communicator for an optimizer of these parameters. It is over NCCL if this suits the
    parameters and if every rank's library has kernels and NCCL; otherwise it is over sockets."""
    check_member(group)
    if suits_nccl(group, parameters, stage):
        try:
            with torch.cuda.device(parameters[0].device):
                return create_nccl(kind, group, timeout)
        except Error as reason:
            if reason.status != Status.ERROR_UNSUPPORTED:
                raise
            if has_kernels():
                words = f"messages go through the host, which is slower: {reason.message}"
                warn(words)
    return kind.torch(group, timeout)
