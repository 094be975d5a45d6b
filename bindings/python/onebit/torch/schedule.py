"""Chooses the schedule of an optimizer's steps in one bit by timing exchanges. No bit of any result depends on it
(docs/schedules.md)."""

import time

import torch

from onebit import _native
from onebit.plan import Plan
from onebit.torch.ranks import FLOATS, interruptible

AUTOMATIC, EXCHANGE, ALLGATHER = "automatic", "exchange", "allgather"
_SMALL = 1024  # elements of an exchange that takes little more than the delay
_MOST = 2**22  # elements of the longest exchange that is timed; more take time and memory
_LONG = 0.02  # seconds. If a small exchange takes less, its delay is not worth measuring.
_WORTH = 0.9  # an allgather takes at most this part of the time of an exchange, or it is not chosen
_NETWORKS = "sockets", "gloo", "mpi"


def can_gather(comm, kind, options, on_host):
    """True if the optimizer supports both schedules, and the program has not chosen one.

    kind: the name of the library's optimizer
    on_host: whether its parameters, or copies of them, are in host memory
    """
    plain = {"schedule", "profile", "shards", "max_bits"}.isdisjoint(options)
    of_blocks = options.get("block_size") != _native.BLOCK_BUFFER
    return comm.size > 1 and comm.transport in _NETWORKS and kind != "Lion" and plain and of_blocks and on_host


def _time_exchange(comm, count, schedule):
    """Returns the seconds of the faster of two exchanges, and whether each host has one rank. The first exchange also
    waits for the last rank."""
    values, seconds = torch.linspace(-1, 1, count, **FLOATS), []
    with Plan(comm, count, schedule=schedule) as plan:
        for _ in range(2):
            began = time.perf_counter()
            interruptible(comm, lambda: plan.allreduce(values, values))
            seconds.append(time.perf_counter() - began)
        return min(seconds), plan.info()["hosts"] == comm.size


def choose_schedule(comm, count):
    """Returns the faster schedule for `count` elements, and the seconds of an allgather if it is the faster one.
    Collective."""
    some = max(min(count, _MOST), 1)

    def seconds_of_all(delay, seconds):
        return delay + (seconds - delay) * count / some

    with Plan(comm, 2, operation="allgather", wire="dense") as plan:

        def slowest(*own):
            mine, found = torch.tensor(own, **FLOATS), torch.empty(2 * comm.size, **FLOATS)
            interruptible(comm, lambda: plan.allgather(mine, found))
            return found.view(-1, 2).max(0).values.tolist()

        small, alone = _time_exchange(comm, _SMALL, EXCHANGE)
        small = slowest(small, 0)[0]
        if not alone or small < _LONG:
            return AUTOMATIC, None
        exchange, allgather = slowest(*(_time_exchange(comm, some, one)[0] for one in (EXCHANGE, ALLGATHER)))
    exchange = seconds_of_all(small, exchange)
    allgather = seconds_of_all(small / 2, allgather)  # it waits for the delay once, an exchange twice
    return (ALLGATHER, allgather) if allgather < _WORTH * exchange else (AUTOMATIC, None)
