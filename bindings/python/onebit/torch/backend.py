"""A backend of torch.distributed that is gloo's but for sums of gradients, which travel in bits: for a
program that is not to be changed.

    torchrun --nproc-per-node 4 -m onebit.torch.backend train.py --backend=onebit

or, in a program, `import onebit.torch.backend` and `init_process_group("onebit")` (or
"cpu:onebit,cuda:nccl"). What a program does with a sum no backend can know: one that changes its
program gives DistributedDataParallel the hook, or takes an optimizer of onebit.torch.
"""

import argparse
import inspect
import os
import queue
import runpy
import sys
import threading
import warnings

import torch
import torch.distributed as dist

from onebit._native import Operation, Status
from onebit.communicator import Communicator
from onebit.errors import Error, OnebitWarning
from onebit.plan import Plan
from onebit.torch.hook import CHUNK, DTYPES
from onebit.torch.rendezvous import Meeting, create_sockets

MIN_ELEMENTS = 2**14
_SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
# So many calls after the first, or after the order has changed, ranks compare what they have seen.
_LOOKS = (16, 64, 256, 1024)
# What is gloo's, where this torch has it.
_OF_GLOO = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced",
    "all_to_all_single", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced",
    "allreduce_coalesced", "allreduce_sparse", "alltoall", "alltoall_base", "barrier", "broadcast",
    "gather", "gather_into_tensor", "gather_single", "monitored_barrier", "recv", "recv_anysource",
    "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip

_made = []  # torch keeps only their part in C++


class Order:
    """Which tensor a call is of: a position in a sequence of calls that repeats, with the same
    counts on all ranks and the same addresses as before on each."""

    def __init__(self):
        self.forget()

    def forget(self):
        self._calls = []
        self._known = None

    def period(self):
        """The length of the sequence that the latest half of the calls repeats; 0: of none."""
        half = self._calls[len(self._calls) // 2 :]
        return next((p for p in range(1, len(half) // 2 + 1) if half[p:] == half[:-p]), 0)

    def repeat(self, period):
        """From the next call on it is known."""
        self._known, self._next = self._calls[-period:], 0

    def add(self, signature, address):
        """(the position or None, whether the address is the one that is known, whether to look).
        The first and the last are the same on all ranks."""
        if self._known and self._known[self._next][0] != signature:
            self.forget()
        if self._known is None:
            self._calls.append((signature, address))
            if len(self._calls) > _LOOKS[-1]:
                self._calls.clear()
            return None, True, len(self._calls) in _LOOKS
        position = self._next
        self._next = (position + 1) % len(self._known)
        return position, self._known[position][1] == address, False


def _base():
    """torch's class of backends where Python can derive from it, else that of whole groups."""
    base = getattr(torch._C._distributed_c10d, "Backend", None)
    try:
        type("Tried", (base,), {})(0, 1)
    except TypeError:  # before torch 2.10
        return dist.ProcessGroup
    return base


class Backend(_base()):
    """Sums and means of float32, bfloat16 and float16 in at least min_elements elements go through
    a thread, and all else to gloo at once. In the thread calls have the same order on all ranks;
    what cannot be in bits goes through a group of gloo of its own.

    bits: an element; what they leave out comes with the tensor's next sum
    compressed, dense: calls of the thread so far
    skipped: of the dense ones, those where some rank's values were not finite
    """

    def __init__(self, store, rank, size, timeout, bits, min_elements):
        super().__init__(rank, size)
        self._gloo, self._own = (
            dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, timeout)
            for name in ("onebit-gloo", "onebit-own")
        )
        self._store, self._rank, self._size = store, rank, size
        self._seconds = timeout.total_seconds()
        self._bits, self._min_elements = bits, min_elements
        self.compressed = self.dense = self.skipped = 0
        self.comm, self._plans, self._order = None, {}, Order()
        self._jobs = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True, name="onebit-backend")
        self._thread.start()
        _made.append(self)

    def getBackendName(self):  # noqa: N802: torch's name
        return "onebit"

    def allreduce(self, tensors, opts=None):
        opts = dist.AllreduceOptions() if opts is None else opts
        one = tensors[0]
        fits = len(tensors) == 1 and one.device.type == "cpu" and one.layout == torch.strided
        fits = fits and one.dtype in DTYPES and one.numel() >= self._min_elements
        kind = getattr(opts.reduceOp, "op", opts.reduceOp)
        if not (fits and self._size > 1 and kind in _SUMS):
            return self._gloo.allreduce(tensors, opts)
        done = torch.futures.Future()
        self._jobs.put((done, tensors, kind))
        return torch._C._distributed_c10d._create_work_from_future(done.then(_unwrap))

    def shutdown(self):
        """Ends the thread, once what it has is done."""
        if self in _made:
            _made.remove(self)
            self._jobs.put(None)
            self._thread.join()
            self._plans.clear()
            if self.comm:
                self.comm.close()

    def abort(self):
        """Fails what is under way, here and on the other ranks, and ends."""
        if self.comm:
            self.comm.abort()
        for one in self._gloo, self._own:
            if hasattr(one, "abort"):
                one.abort()
        self.shutdown()

    # --- The thread ------------------------------------------------------------------------------

    def _work(self):
        while (job := self._jobs.get()) is not None:
            done, tensors, kind = job
            reason = None
            try:
                self._sum(tensors[0], kind)
            except BaseException as caught:  # noqa: BLE001
                reason = caught
            done.set_result((tensors, reason))

    def _sum(self, tensor, kind):
        position, known, look = self._order.add((tensor.numel(), tensor.dtype), tensor.data_ptr())
        if position is not None and self._in_bits(position, known, tensor):
            self.compressed += 1
            if kind == dist.ReduceOp.SUM:
                tensor.mul_(self._size)
            return
        self.dense += 1
        self._dense(tensor, kind)
        if look:
            self._look()

    def _dense(self, tensor, kind):
        """Not every gloo knows bfloat16, or means."""
        work = tensor.float() if tensor.dtype == torch.bfloat16 else tensor.contiguous()
        self._own.allreduce([work]).wait()
        if work is not tensor:
            tensor.copy_(work)
        if kind == dist.ReduceOp.AVG:
            tensor.div_(self._size)

    def _in_bits(self, position, known, tensor):
        """Whether it is done. Where a rank has another tensor than before at this position all are
        told, and begin anew: one tensor's residual must not come into another."""
        plan = self._plans.get(position)
        if plan is None:
            options = {"bits": self._bits, "chunk_size": CHUNK, "dtype": DTYPES[tensor.dtype]}
            plan = self._plans[position] = Plan(self.comm, tensor.numel(), **options)
        if known:
            try:
                skipped = plan.allreduce(tensor, tensor) == Status.SKIPPED
                self.skipped += skipped
                return not skipped
            except Error as error:
                if error.status != Status.ERROR_PEER:
                    raise
        else:
            plan._fail_on_all(Operation.ALLREDUCE)
        self._begin()
        return False

    def _begin(self):
        self._order.forget()
        self._plans.clear()

    def _look(self):
        """Whether all ranks have found the same sequence."""
        period = self._order.period()
        found = torch.tensor([period, -period])
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._own.allreduce([found], options).wait()
        if period > 0 and found.tolist() == [period, -period] and self._connect():
            self._plans.clear()
            self._order.repeat(period)

    def _connect(self):
        if self.comm is None:
            meeting = Meeting.at(self._store, self._rank, self._size, self._seconds)
            self.comm, why = create_sockets(Communicator, meeting, self._seconds, 0)
            if self.comm is None:
                words = f"sums are gloo's, uncompressed, since sockets cannot be used: {why}"
                warnings.warn(OnebitWarning(words), stacklevel=1)
                self.comm = False
        return bool(self.comm)


def _unwrap(done):
    tensors, reason = done.value()
    if reason is not None:
        raise reason
    return tensors


def _delegate(name):
    def call(self, *given, **named):
        return getattr(self._gloo, name)(*given, **named)

    call.__name__ = name
    setattr(Backend, name, call)


for _name in _OF_GLOO:
    if hasattr(dist.ProcessGroupGloo, _name):
        _delegate(_name)


_options = {}


def _create(store, rank, size, timeout):
    return Backend(store, rank, size, timeout, **_options)


def register(bits=8, min_elements=MIN_ELEMENTS):
    """What groups have that are made from now on with the backend "onebit".

    bits: an element, 1, 2, 4 or 8. Fewer than 8 are for SGD with momentum
    min_elements: sums of fewer are gloo's
    """
    if bits not in (1, 2, 4, 8):
        raise ValueError(f"bits is {bits}, not 1, 2, 4 or 8")
    if "devices" not in inspect.signature(dist.Backend.register_backend).parameters:
        raise Error(Status.ERROR_UNSUPPORTED, "torch before 2.0 cannot have this backend")
    if not _options:
        dist.Backend.register_backend("onebit", _create, devices=["cpu"])
    _options.update(bits=bits, min_elements=min_elements)


def main():
    from onebit.torch import backend  # the one that a program imports, not this one

    parser = argparse.ArgumentParser(prog="onebit.torch.backend", description="runs a program")
    parser.add_argument("--bits", type=int, default=8, choices=[1, 2, 4, 8])
    parser.add_argument("--min-elements", type=int, default=MIN_ELEMENTS)
    parser.add_argument("program", help="with its arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    backend.register(options.bits, options.min_elements)
    sys.argv = [options.program, *options.arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(options.program))
    runpy.run_path(options.program, run_name="__main__")


if __name__ == "__main__":
    main()
else:
    register()
