"""onebit.torch.DiLoCo every 20 steps: the paper's outer step in 4 bits, and the plain mean in one."""

import functools

import torch

import onebit.torch


def make(outer, model, optimizer, short):
    if outer is not None:
        outer = outer([torch.zeros(1, requires_grad=True)])
    local = onebit.torch.DiLoCo(model, optimizer, sync_every=short(20), outer=outer)
    local.__enter__()
    return model, optimizer, local.close


NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
METHODS = {
    "onebit DiLoCo, 4 bits": functools.partial(make, NESTEROV),
    "onebit DiLoCo, mean, 1 bit": functools.partial(make, None),
}
