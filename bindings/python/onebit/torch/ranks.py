"""Messages between ranks besides gradients: errors, bytes, and the norm of the mean gradient; and
calls of the library that wait for other ranks, and can be interrupted."""

import os
import queue
import threading

import torch

from onebit._native import Error, Status
from onebit.plan import Plan

# Three bytes travel as one float32, which represents every integer up to 2^24. With messages of this
# many floats each rank sends 4 MiB.
_PIECE = 2**20
# The type and device of tensors that are made here, since a program may have set other defaults.
FLOATS = {"dtype": torch.float32, "device": "cpu"}
_BYTES = {"dtype": torch.uint8, "device": "cpu"}


def _place(comm):
    """Returns options of a plan whose messages comm can move: over NCCL they are in memory of a device."""
    return {"device": "cuda"} if comm.transport == "nccl" else {}


def agree(comm, reason):
    """Raises reason, unless it is None; if another rank has one, `Error` (ERROR_PEER). Collective."""
    try:
        # The library refuses a plan of 3 bits, and all ranks get the error.
        Plan(comm, 1, bits=1 if reason is None else 3, **_place(comm)).close()
    except Error:
        if reason is None:
            raise
    if reason is not None:
        raise reason


def agreed(comm, call, shards=None):
    """Returns the result of call(). If it raises on a rank, that rank raises the same, and all
    others `Error` (ERROR_PEER). Collective; with `shards` over all of them."""
    result = reason = None
    try:
        result = call()
    except Exception as caught:  # noqa: BLE001
        reason = caught
    agree(comm, shards.agree(reason) if shards else reason)
    return result


def _gather(comm, values):
    """Returns the float32s of all ranks, of which each has the same number."""
    place = _place(comm)
    everyone = torch.empty(comm.size * values.numel(), **{**FLOATS, **place})
    with Plan(comm, values.numel(), operation="allgather", wire="dense", **place) as plan:
        plan.allgather(values.to(everyone.device), everyone)
        if place:
            plan.synchronize()
    return everyone.cpu().view(comm.size, -1)


def gather(comm, part):
    """Returns the parts of all ranks, each some bytes, in the order of ranks. Collective."""
    if comm.size == 1:
        return [part]
    length = torch.tensor([len(part) // _PIECE, len(part) % _PIECE], **FLOATS)
    lengths = [int(high) * _PIECE + int(low) for high, low in _gather(comm, length).tolist()]
    threes = torch.zeros(-(-max(lengths) // 3), 3, **_BYTES)
    if part:
        threes.view(-1)[: len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
    everyone = torch.empty(comm.size, *threes.shape, **_BYTES)
    for first in range(0, len(threes), _PIECE):
        low, middle, high = threes[first : first + _PIECE].to(torch.int32).unbind(1)
        arrived = _gather(comm, (low | middle << 8 | high << 16).float()).to(torch.int32)
        for place in range(3):
            everyone[:, first : first + _PIECE, place] = arrived >> 8 * place & 255
    return [
        everyone[rank].view(-1)[:count].numpy().tobytes() for rank, count in enumerate(lengths)
    ]


def missing_residuals(rank, others=""):
    """Returns the warning for a state that has one rank's residuals."""
    return (f"this state has the residuals of rank {rank} alone. Where each rank saves its own{others}, "
            "nothing is missing; where one rank saves, those of the other ranks are, unless all ranks "
            "call consolidate_state_dict() before")


# --- The norm of a mean that no rank has ----------------------------------------------------------

# The number of values of a sketch is a prime, so that a column of a matrix is spread over all of
# them. The standard deviation of the norm is 1/sqrt(2 * 4099).
_NUMBERS = 4099
# The number of rows of a block, which has random signs. The next block has the same or the opposite
# signs, and is added to other values, so that equal blocks do not add up.
_ROWS = 64


class MeanNorm:
    """Estimates the norm from sketches. A rank's sketch is sums of its elements with random signs,
    which are the same on all ranks. It is linear: the mean of the ranks' sketches is the sketch of
    their mean, and the expected square of a sketch's norm is that of the elements'."""

    def __init__(self, comm, shards):
        self._comm, self._shards, self._plan = comm, shards, None
        self._signs = self._block = None

    def _sketch(self, gradients):
        if self._signs is None:
            random = torch.Generator("cpu").manual_seed(1)
            signs = torch.randint(2, (_ROWS, _NUMBERS), generator=random, **FLOATS) * 2 - 1
            self._signs = signs.to(gradients[0].device if gradients else "cpu")
            self._block = torch.empty_like(self._signs).view(-1)
        sketch, block, at, blocks = torch.zeros_like(self._signs[0]), self._block, 0, 0
        for one in gradients:
            left = one.detach().reshape(-1)
            while len(left):
                some = left[: len(block) - at]
                block[at : at + len(some)].copy_(some)
                at, left = at + len(some), left[len(some) :]
                if at == len(block):
                    sketch += self._sum(blocks)
                    at, blocks = 0, blocks + 1
        block[at:].zero_()
        return (sketch + self._sum(blocks)).cpu()

    def _sum(self, number):
        summed = self._block.view_as(self._signs).mul_(self._signs).sum(0).roll(number**2)
        return summed if bin(number).count("1") % 2 else -summed

    def find(self, own, squares):
        """Returns the norm, the same on all ranks: exact up to 4,099 elements, else within 1.1 %
        (one standard deviation); not-a-number if some gradient is not finite. Collective.

        own: gradients of which each rank has its own
        squares: the squared norm of those that are equal on all ranks
        """
        squares = torch.tensor([float(squares)], **FLOATS)
        if self._comm.size == 1:
            square = squares[0] + sum((one.float().norm() ** 2).cpu() for one in own)
        else:
            if sum(one.numel() for one in own) <= _NUMBERS:  # the same on all ranks of a shard
                numbers = [one.detach().reshape(-1).float().cpu() for one in own]
            else:
                numbers = [self._sketch(own)]
            values = self._mean(self._shards.mean(torch.cat([*numbers, squares])))
            square = values[:-1].square().sum() + values[-1]
        return self._shards.sum(square).sqrt()

    def _mean(self, values):
        if self._plan is None:
            self._plan = Plan(self._comm, values.numel(), wire="dense", **_place(self._comm))
        values = values.to("cuda" if self._plan.on_device else "cpu")
        if self._plan.allreduce(values, values) == Status.SKIPPED:
            values.fill_(float("nan"))
        if self._plan.on_device:
            self._plan.synchronize()
        return values.cpu()

    def close(self):
        if self._plan is not None:
            self._plan.close()


# --- Waiting --------------------------------------------------------------------------------------

_lock = threading.Lock()
_workers = {}  # the queue of this process


def run_calls(calls):
    """Makes the calls of a queue, until there is a None. It keeps no reference to a call that is
    over, so that an object whose calls these are can be freed."""
    while (call := calls.get()) is not None:
        call()
        call = None


def _calls():
    """Returns the queue of this process's thread; a forked process makes a thread of its own."""
    with _lock:
        if os.getpid() not in _workers:
            _workers.clear()
            calls = _workers[os.getpid()] = queue.SimpleQueue()
            work = {"target": run_calls, "args": (calls,), "name": "onebit-calls"}
            threading.Thread(**work, daemon=True).start()
        return _workers[os.getpid()]


os.register_at_fork(after_in_child=_lock._at_fork_reinit)


def wait_for(comm, done):
    """Waits for another thread's call on the communicator. An interrupt aborts the communicator,
    which ends the call on all ranks."""
    try:
        while not done.wait(0.2):  # another thread may have received the signal
            pass
    except BaseException:
        if not done.is_set():
            comm.abort()
            done.wait()
        raise


def interruptible(comm, call):
    """Makes call() in another thread, since Ctrl-C could not end a call of the library in the main
    thread. Returns or raises what it does."""
    if threading.current_thread() is not threading.main_thread() or comm.size == 1:
        return call()
    outcome, done = [], threading.Event()

    def run():
        try:
            outcome.append((call(), None))
        except BaseException as reason:  # noqa: BLE001
            outcome.append((None, reason))
        done.set()

    _calls().put(run)
    wait_for(comm, done)
    result, reason = outcome.pop()
    if reason is not None:
        raise reason
    return result
