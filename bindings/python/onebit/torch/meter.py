"""Measures the exchanges and steps between which `automatic` chooses."""

import time

import torch
import torch.distributed as dist

from onebit.plan import Plan
from onebit.torch.hook import CHUNK
from onebit.torch.ranks import FLOATS, interruptible
from onebit.torch.schedule import AUTOMATIC

METHODS = DENSE, EIGHT, ONE, LOCAL = "dense", "8 bits", "one bit", "local steps"
_BITS = {DENSE: None, EIGHT: 8, ONE: 1}
_SMALL = 1024  # elements of the smallest exchange that onebit_method_measure times


class FirstSum:
    """Times a small dense sum while the ranks connect, since both take long on a link with a long delay. Collective."""

    def __init__(self, model):
        self._timed = None
        if next(model.parameters()).device.type == "cpu":
            began, self._values = time.perf_counter(), torch.zeros(_SMALL, **FLOATS)
            work = dist.all_reduce(self._values, group=model.process_group, async_op=True)
            self._timed = work.get_future().then(lambda _: time.perf_counter() - began)

    def wait(self):
        """Returns the seconds that the sum took; 0: not known."""
        return 0.0 if self._timed is None else self._timed.wait()


class Meter:
    """Measures steps and exchanges by this rank's clock. A test replaces it by a model."""

    now = staticmethod(time.perf_counter)

    def __init__(self, comm, group, device):
        self._comm, self._group, self._device = comm, group, device
        self.schedule = AUTOMATIC  # of exchanges in one bit
        self.of_small_sum = 0.0  # known seconds of a small dense sum, the same on all ranks; 0: none

    def step(self, method, total, compute, holds):
        """Returns the seconds of a step, and those without its exchanges.

        holds: whether the exchange began only when the gradients were computed
        """
        return total, compute

    def exchange(self, method, count):
        """Returns the seconds of an exchange of `count` elements. Collective."""
        if method == DENSE and count <= _SMALL and self.of_small_sum:
            return self.of_small_sum
        values = torch.linspace(-1, 1, count, **{**FLOATS, "device": self._device})
        if method == DENSE:
            return self._time(lambda: dist.all_reduce(values, group=self._group), values)
        schedule = self.schedule if method == ONE else AUTOMATIC
        with Plan(self._comm, count, bits=_BITS[method], chunk_size=CHUNK, schedule=schedule) as plan:

            def call():
                host = values.cpu()
                interruptible(self._comm, lambda: plan.allreduce(host, host))
                values.copy_(host)

            return self._time(call, values)

    def _time(self, call, values):
        values[:1].cpu()
        began = self.now()
        call()
        values[:1].cpu()
        return self.now() - began
