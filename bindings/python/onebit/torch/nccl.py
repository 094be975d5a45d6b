"""Communicators over NCCL, of torch.distributed's process groups: their store carries NCCL's unique
id. tests/test_device.py runs this on an emulated device, tests/gpu/torch_cuda.py on a card."""

import ctypes
import functools
import threading
import warnings

import torch
import torch.distributed as dist

from onebit import _native
from onebit._native import Error, OnebitWarning, Status, check
from onebit.torch.rendezvous import Meeting, said, why
from onebit.torch.staged import has_kernels, is_always
from onebit.torch.transport import check_member, timeout_of

_ID_BYTES = 128


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * _ID_BYTES)]

    def to_text(self):
        return bytes(ctypes.string_at(ctypes.byref(self), _ID_BYTES)).hex()

    @classmethod
    def from_text(cls, text):
        return cls.from_buffer_copy(bytes.fromhex(text))


class Nccl:
    """The NCCL that the library itself calls: torch's, whose libnccl.so.2 is in the process before
    it."""

    def __init__(self):
        library = _native.library()
        if not hasattr(library, "onebit_comm_create_nccl"):
            raise Error(Status.ERROR_UNSUPPORTED, f"{library._name} is built without NCCL")
        try:
            # Names are looked for in what the library is linked to, too.
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
        made = UniqueId()
        self._check(self._id(ctypes.byref(made)), "ncclGetUniqueId")
        return made

    def _within(self, seconds, device, call, *arguments):
        """What a call gives that no other way has a time limit, on a device; None: it is not over by
        then. A thread of its own stays in it."""
        result = []

        def run():
            self._cuda.cudaSetDevice(device)
            result.append(call(*arguments))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(min(seconds, threading.TIMEOUT_MAX))
        return result[0] if result else None

    def create(self, kind, unique_id, rank, size, timeout=threading.TIMEOUT_MAX):
        """A communicator of class `kind` on the device that is current. Collective."""
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
            if error.status != Status.ERROR_TRANSPORT:  # the library has aborted it
                self._abort(nccl_comm)
            raise
        made = kind(handle, transport="nccl")
        made._collective = True
        made._before_close = functools.partial(_end, wait)
        return made


def _end(wait, comm):
    """What graphs have launched is waited for, as long as for any rank. One that has failed is aborted
    already, and gone; the library does that once for any."""
    wait(_native.library().cudaDeviceSynchronize)
    _native.library().onebit_comm_abort(comm.handle)


def suits(group, parameters, stage):
    """Whether an optimizer of such parameters would work over NCCL, as the program's own collectives
    on their devices do. All ranks find the same, and `create` asks them for the rest."""
    if {one.device.type for one in parameters} != {"cuda"} or stage == "host" or is_always():
        return False
    if any(hasattr(one, "to_local") for one in parameters):  # shards skip steps together
        return False
    backend = getattr(dist, "get_backend_config", dist.get_backend)(group)  # from torch 2.0 on
    return "nccl" in str(backend) and dist.get_world_size(group) > 1


def create(kind, group, timeout):
    """A communicator (of class `kind`) over the processes of a group."""
    check_member(group)
    meeting = Meeting(group, timeout_of(group, timeout))

    def begin():
        if not has_kernels():
            raise Error(Status.ERROR_UNSUPPORTED, "the library has no kernels")
        nccl = Nccl()
        return nccl.unique_id().to_text() if dist.get_rank(group) == 0 else None

    found = meeting.share(said(begin))
    reason = why(found)
    if reason:
        raise Error(Status.ERROR_UNSUPPORTED, f"NCCL cannot be used: {reason}")
    unique_id = UniqueId.from_text(found[0][0])
    return Nccl().create(kind, unique_id, meeting.rank, meeting.size, meeting.timeout)


def create_for(kind, parameters, stage, group, timeout):
    """A communicator for an optimizer of these parameters: over NCCL where that suits them and every
    rank's library has kernels and NCCL, else over sockets."""
    check_member(group)
    if suits(group, parameters, stage):
        try:
            with torch.cuda.device(parameters[0].device):
                return create(kind, group, timeout)
        except Error as reason:
            if reason.status != Status.ERROR_UNSUPPORTED:
                raise
            if has_kernels():
                words = f"messages go through the host, which is slower: {reason.message}"
                warnings.warn(OnebitWarning(words), stacklevel=3)
    return kind.torch(group, timeout)
