"""The norm of the mean of all ranks' gradients, where each rank has only its own."""

import torch

from onebit._native import Status
from onebit.plan import Plan
from onebit.torch.gather import FLOATS

# A sketch has so many numbers, a prime, so that a column of a matrix is spread over all of them. The
# norm is found with a standard deviation of 1/sqrt(2 * 4099), 1.1 %.
_NUMBERS = 4099
# So many rows of them are a block, and have signs of their own. The next block has the same or the
# opposite signs, and is added to other numbers: blocks that are alike do not add up.
_ROWS = 64


class MeanNorm:
    """A rank's sketch is sums of its elements with random signs, which all ranks have alike. It is
    linear: the mean of the ranks' sketches is the sketch of their mean, and the expected square of a
    sketch's norm is that of the elements'."""

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
        """Collective. own: gradients that each rank has for itself; squares: the squared norm of
        those that all ranks have alike. Every rank gets the same number; not-a-number where some is
        not finite."""
        squares = torch.tensor([float(squares)], **FLOATS)
        if self._comm.size == 1:
            square = squares[0] + sum((one.float().norm() ** 2).cpu() for one in own)
        else:
            values = self._shards.mean(torch.cat([self._sketch(own), squares]))
            values = self._mean(values)
            square = values[:_NUMBERS].square().sum() + values[_NUMBERS]
        return self._shards.sum(square).sqrt()

    def _mean(self, values):
        if self._plan is None:
            place = {"device": "cuda"} if self._comm.transport == "nccl" else {}
            self._plan = Plan(self._comm, values.numel(), wire="dense", **place)
        values = values.to("cuda" if self._plan.on_device else "cpu")
        if self._plan.allreduce(values, values) == Status.SKIPPED:
            values.fill_(float("nan"))
        if self._plan.on_device:
            self._plan.synchronize()
        return values.cpu()

    def close(self):
        if self._plan is not None:
            self._plan.close()

