"""Messages between ranks other than gradients: errors, bytes, and the norm of the mean gradient. Also
calls of the library that wait for other ranks and can be interrupted."""

import atexit
import os
import queue
import threading
import time

import torch

from onebit._native import Error, Status
from onebit.plan import Plan

# Three bytes are sent as one float32, which represents every integer up to 2^24. With messages of this
# many floats each rank sends 4 MiB.
_PIECE = 2**20
# The floats that the first message has beside the part's length. A short part needs no other message, each of which
# waits for the network's delay twice.
_FIRST = 2**7
# The type and device of tensors that this file creates: a program may have set other defaults.
FLOATS = {"dtype": torch.float32, "device": "cpu"}
_BYTES = {"dtype": torch.uint8, "device": "cpu"}


def _place(comm):
    """Returns plan options for messages in memory that comm can send: over NCCL this is memory of a
    device."""
    return {"device": "cuda"} if comm.transport == "nccl" else {}


def agree(comm, reason):
    """Raises `reason`, unless it is None. If only another rank has a reason, raises `Error`
    (ERROR_PEER). Collective."""
    try:
        # The library rejects a plan of 3 bits, and all ranks get this error.
        Plan(comm, 1, bits=1 if reason is None else 3, **_place(comm)).close()
    except Error:
        if reason is None:
            raise
    if reason is not None:
        raise reason


def agreed(comm, call, shards=None):
    """Returns the result of call(). If call raises on a rank, that rank raises the same exception, and
    all other ranks raise `Error` (ERROR_PEER). Collective; with `shards` over all ranks of all
    shards."""
    result = reason = None
    try:
        result = call()
    except Exception as caught:  # noqa: BLE001
        reason = caught
    agree(comm, shards.agree(reason) if shards else reason)
    return result


def _gather(comm, values):
    """Returns the float32 values of all ranks. Each rank must have the same number of them."""
    place = _place(comm)
    everyone = torch.empty(comm.size * values.numel(), **{**FLOATS, **place})
    with Plan(comm, values.numel(), operation="allgather", wire="dense", **place) as plan:
        plan.allgather(values.to(everyone.device), everyone)
        if place:
            plan.synchronize()
    return everyone.cpu().view(comm.size, -1)


def _to_floats(part, count):
    """Returns bytes as `count` float32 of three bytes each. The missing bytes are zeros."""
    threes = torch.zeros(count, 3, **_BYTES)
    if part:
        threes.view(-1)[: len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
    low, middle, high = threes.to(torch.int32).unbind(1)
    return (low | middle << 8 | high << 16).float()


def _to_bytes(values):
    """Returns the bytes of each row of float32."""
    values = values.to(torch.int32)
    threes = torch.stack([values >> 8 * place & 255 for place in range(3)], -1)
    return threes.to(torch.uint8).view(len(values), -1)


def gather(comm, part):
    """Returns the parts of all ranks, in the order of ranks. A part is some bytes. Collective."""
    if comm.size == 1:
        return [part]
    length = torch.tensor([len(part) // _PIECE, len(part) % _PIECE], **FLOATS)
    found = _gather(comm, torch.cat([length, _to_floats(part[: 3 * _FIRST], _FIRST)]))
    lengths = [int(high) * _PIECE + int(low) for high, low in found[:, :2].tolist()]
    pieces, longest = [_to_bytes(found[:, 2:])], max(lengths)
    for first in range(3 * _FIRST, longest, 3 * _PIECE):
        count = min(-(-(longest - first) // 3), _PIECE)
        pieces.append(_to_bytes(_gather(comm, _to_floats(part[first : first + 3 * count], count))))
    everyone = torch.cat(pieces, 1)
    return [everyone[rank, :count].numpy().tobytes() for rank, count in enumerate(lengths)]


def _plan_of_mean(comm, count):
    return Plan(comm, count, wire="dense", **_place(comm))


def _mean_with(plan, values):
    values = values.to("cuda" if plan.on_device else "cpu", torch.float32, copy=True)
    if plan.allreduce(values, values) == Status.SKIPPED:
        values.fill_(float("nan"))
    if plan.on_device:
        plan.synchronize()
    return values.cpu()


def mean(comm, values):
    """Returns the mean over the ranks of float32 values. If some value is not finite, all means are not-a-number.
    Collective."""
    with _plan_of_mean(comm, values.numel()) as plan:
        return _mean_with(plan, values)


def missing_residuals(rank, others=""):
    """Returns the text of the warning for a state that has the residuals of only one rank."""
    return (f"this state has the residuals of rank {rank} only. If each rank saves its own state{others}, "
            "nothing is missing. If one rank saves for all, call consolidate_state_dict() on all ranks "
            "first: otherwise the residuals of the other ranks are lost")


# --- The norm of a mean that no rank has ----------------------------------------------------------

# The number of values of a sketch. It is a prime, so that a column of a matrix is spread over all of
# them. The standard deviation of the norm is 1/sqrt(2 * 4099).
_NUMBERS = 4099
# The number of rows of a block of random signs. The next block has the same or the opposite signs, and
# is added to other values of the sketch, so that equal blocks do not add up.
_ROWS = 64


class Sketches:
    """Creates sketches, which consist of sums of elements with random signs. The signs are the same on all ranks.
    A sketch is linear: the mean of the ranks' sketches is the sketch of their mean, and the expected square of its
    norm is that of the elements' norm."""

    def __init__(self):
        self._signs = self._block = None

    def numbers(self, gradients):
        """Returns all elements of some gradients if they are at most 4,099, or else a sketch of them."""
        if sum(one.numel() for one in gradients) <= _NUMBERS:
            every = [one.detach().reshape(-1).float().cpu() for one in gradients]
            return torch.cat([torch.empty(0, **FLOATS), *every])
        return self._sketch(gradients)

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


class MeanNorm:
    """Estimates the norm of the mean gradient from sketches."""

    def __init__(self, comm, shards):
        self._comm, self._shards, self._plan, self._sketches = comm, shards, None, Sketches()

    def find(self, own, squares):
        """Returns the norm, which is the same on all ranks. It is exact up to 4,099 elements; with more
        the standard deviation of its error is 1.1 %. Returns not-a-number if some gradient is not
        finite. Collective.

        own: gradients that differ between ranks
        squares: the squared norm of the gradients that are equal on all ranks
        """
        squares = torch.tensor([float(squares)], **FLOATS)
        if self._comm.size == 1:
            square = squares[0] + sum((one.float().norm() ** 2).cpu() for one in own)
        else:
            numbers = self._sketches.numbers(own)  # as many on all ranks of a shard
            values = self._shards.mean(torch.cat([numbers, squares]))
            if self._plan is None:
                self._plan = _plan_of_mean(self._comm, values.numel())
            values = _mean_with(self._plan, values)
            square = values[:-1].square().sum() + values[-1]
        return self._shards.sum(square).sqrt()

    def close(self):
        if self._plan is not None:
            self._plan.close()


# --- Waiting --------------------------------------------------------------------------------------

_lock = threading.Lock()
_workers = {}  # the queue of this process, by process number
_threads = {}  # the queue of each running thread
_SECONDS_AT_EXIT = 5  # a thread that still waits for another rank after this time is left


def start_thread(calls, name):
    """Returns a new thread that makes the calls of a queue, until it gets None."""
    thread = threading.Thread(target=_run_calls, args=(calls,), daemon=True, name=name)
    _threads[thread] = calls
    thread.start()
    return thread


def _run_calls(calls):
    """Keeps no reference to a call that has ended, so that the object to which the call belongs can be freed."""
    while (call := calls.get()) is not None:
        call()
        call = None
    _threads.pop(threading.current_thread(), None)


@atexit.register
def _end_threads():
    """Ends all threads at exit. Otherwise a thread that frees torch's objects while the interpreter ends would abort
    the process."""
    _workers.clear()
    for calls in list(_threads.values()):
        calls.put(None)
    until = time.monotonic() + _SECONDS_AT_EXIT
    for thread in list(_threads):
        thread.join(max(until - time.monotonic(), 0))


def _calls():
    """Returns the queue of this process's thread. A forked process creates its own thread."""
    with _lock:
        if os.getpid() not in _workers:
            _workers.clear()
            calls = _workers[os.getpid()] = queue.SimpleQueue()
            start_thread(calls, "onebit-calls")
        return _workers[os.getpid()]


os.register_at_fork(after_in_child=_lock._at_fork_reinit)


def wait_for(comm, done):
    """Waits for another thread's call on the communicator. An interrupt aborts the communicator, which
    ends the call on all ranks."""
    try:
        while not done.wait(0.2):  # another thread may have received the signal
            pass
    except BaseException:
        if not done.is_set():
            comm.abort()
            done.wait()
        raise


def interruptible(comm, call):
    """Makes call() in another thread: Ctrl-C could not end a call of the library in the main thread.
    Returns or raises what call() does."""
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
