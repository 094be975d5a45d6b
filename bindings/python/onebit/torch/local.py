"""Local steps: torch's own optimizer on each rank, with an outer step. One of the methods of `automatic`."""

import contextlib
import hashlib
import time

import torch

from onebit._native import Status
from onebit.outer import Outer
from onebit.torch.ranks import gather, interruptible
from onebit.torch.remainder import mean_shares, means
from onebit.torch.report import Report, ring
from onebit.torch.schedule import AUTOMATIC
from onebit.torch.staged import Homes
from onebit.torch.state import flat

# The number of exchanges at the end of local steps. Each one sends a part of the residual that one bit leaves.
LAST = 4


def saved_parts(comm, parts):
    """Returns the outer step's parts of all ranks that saved, in the order of their ranks. None: some rank has
    not loaded enough of them. Collective.

    parts: the parts that this rank has loaded, by rank
    """
    every = {rank: one["outer"].cpu().numpy().tobytes() for rank, one in parts.items() if "outer" in one}
    ranks = {one["ranks"] for one in parts.values()}
    own = every.get(comm.rank) if ranks == {comm.size} else None
    has = 2 if ranks == {len(every)} else int(own is not None)
    has = min(one[0] for one in gather(comm, bytes([has])))
    if has == 1:
        return gather(comm, own)
    return [every[rank] for rank in sorted(every)] if has else None


def trained(optimizer):
    """Returns the parameters that the optimizer trains."""
    return [one for of in optimizer.param_groups for one in of["params"] if one.requires_grad]


@torch.no_grad()
def shares_of(optimizer, comm):
    """Returns, by parameter, what `mean_shares` finds by the ranks' own gradients. Collective."""
    every = trained(optimizer)
    return dict(zip(every, mean_shares(every, comm, comm.size)))


@torch.no_grad()
def average_moments(optimizer, comm, shares=None):
    """Replaces the moments of all ranks by their mean, over the ranks where they are finite. Collective.

    shares: from `shares_of`, if the next gradients are means over the ranks, whose second moments are smaller
    """
    states = [(one, optimizer.state.get(one, {})) for one in trained(optimizer)]
    names = {name for _, state in states for name, value in state.items()
             if name != "step" and isinstance(value, torch.Tensor) and value.is_floating_point()}  # fmt: skip
    for name in sorted(names):
        own = [(one, state[name]) for one, state in states if state.get(name) is not None]
        finite = all(bool(value.isfinite().all()) for _, value in own)
        values = [value if finite else torch.zeros_like(value) for _, value in own]
        *found, known = means([*values, torch.tensor(float(finite))], comm)
        for (one, value), mean in zip(own, found):
            share = shares.get(one, 1.0) if shares and name.endswith("_sq") else 1.0
            value.copy_((mean / known.clamp(min=1 / comm.size) * share).view_as(value))


@contextlib.contextmanager
def averaged_moments(optimizer, comm):
    """Averages the moments as for gradients that are means, and gives this rank its own ones back. Collective."""
    own = [value for one in trained(optimizer) for value in optimizer.state.get(one, {}).values()
           if isinstance(value, torch.Tensor)]  # fmt: skip
    before = [one.clone() for one in own]
    average_moments(optimizer, comm, shares_of(optimizer, comm))
    try:
        yield
    finally:
        for one, value in zip(own, before):
            one.copy_(value)


class LocalSteps:
    """Steps of `optimizer` on each rank alone, with an outer step after every `steps` of them.

    parts: a state from `saved_parts`; None: the parameters are equal on all ranks
    schedule: that of the exchanges
    """

    def __init__(self, comm, optimizer, steps, parts=None, schedule=AUTOMATIC):
        self._comm, self._optimizer, self.steps = comm, optimizer, steps
        self._parameters = trained(optimizer)
        arrays = [flat(one.detach()) for one in self._parameters]
        for one in arrays if parts else ():
            one.zero_()  # zeros are equal on all ranks; the parts contain the parameters
        self.outer = Outer(comm, arrays, local_steps=steps, schedule=schedule)
        self._homes = Homes(self._parameters)
        if parts:
            self._call(lambda: self.outer.load(parts))
        self._first = self._count = self.outer.info()["steps"]
        self.is_equal = parts is None  # parameters are equal on all ranks; later only the consensus is
        self.spent, self.seconds = 0.0, None  # seconds of exchanges in the latest step; of the latest exchange

    def _call(self, function):
        return self._homes.during(lambda: interruptible(self._comm, function))

    def step(self):
        """Counts a step that the optimizer has made."""
        began = time.perf_counter()
        status = self._call(self.outer.step)
        self._count += 1
        self.spent, self.is_equal = time.perf_counter() - began, False
        if self._count % self.steps == 0:
            self.seconds = self.spent
        if status == Status.SKIPPED:
            average_moments(self._optimizer, self._comm)
        return status

    def _are_alike(self):
        """True if all ranks have the same parameters, for example after a program has loaded some. Collective."""
        found = hashlib.blake2b(digest_size=16)
        for one in self._parameters:
            found.update(flat(one.detach()).cpu().view(torch.uint8).numpy())
        return len(set(gather(self._comm, found.digest()))) == 1

    def synchronize(self, times=1):
        """Makes the parameters equal on all ranks, unless they are equal already. Collective."""
        for _ in range(0 if self._are_alike() else times):
            status = self._call(self.outer.synchronize)
            if status == Status.SKIPPED:  # a rank has gone back to the consensus
                average_moments(self._optimizer, self._comm)
                self._call(self.outer.synchronize)
        self.is_equal = True

    def end(self):
        """Makes parameters and moments equal on all ranks, for a method with an exchange in each step.
        Collective."""
        self.synchronize(LAST)
        average_moments(self._optimizer, self._comm, shares_of(self._optimizer, self._comm))

    def close(self):
        self.outer.close()

    def part(self):
        """Returns this rank's state, with its parameters, as bytes in a tensor. Local."""
        return torch.frombuffer(bytearray(self._call(self.outer.save)), dtype=torch.uint8)

    def report(self, averaged):
        info = self.outer.info()
        size = sum(one.numel() * one.element_size() for one in self._parameters)
        sent = info["exchanges"] * info["exchange_bytes"]
        overlapped = self._first - self._count  # the hook's report counts local steps too
        return Report(0, info["skipped"], overlapped, sent, ring(size, self._comm.size) * info["steps"], averaged)

    def describe(self):
        info = self.outer.info()
        return f"an outer step (mean, {info['bits']} bit) after every {self.steps}"
