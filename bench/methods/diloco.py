"""DiLoCo with an exchange every 20 steps. In float32 as in its paper (arXiv 2311.08105): AdamW as inner
optimizer, and an outer step with Nesterov momentum. By onebit: the same outer step in 4 bits, and a
plain mean in one bit, or in SparseLoCo's messages (arXiv 2508.15706)."""

import functools

import torch
import torch.distributed as dist

import onebit.torch

NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def make_dense(model, optimizer, short):
    parameters, every, steps = list(model.parameters()), short(20), 0
    agreed = [one.detach().clone().requires_grad_() for one in parameters]
    outer = NESTEROV(agreed)

    @torch.no_grad()
    def exchange(*_):
        nonlocal steps
        steps += 1
        if steps % every:
            return
        drift = torch.cat([(old - new).flatten() for old, new in zip(agreed, parameters)])
        dist.all_reduce(drift)
        drift /= dist.get_world_size()
        for old, part in zip(agreed, drift.split([one.numel() for one in agreed])):
            old.grad = part.view_as(old)
        outer.step()
        for old, new in zip(agreed, parameters):
            new.copy_(old)

    optimizer.register_step_post_hook(exchange)
    return model, optimizer, None


def make_compressed(outer, bits, model, optimizer, short):
    if outer is not None:
        outer = outer([torch.zeros(1, requires_grad=True)])
    local = onebit.torch.DiLoCo(model, optimizer, sync_every=short(20), bits=bits, outer=outer)
    local.__enter__()
    return model, optimizer, local.close


METHODS = {"DiLoCo, float32": make_dense, "onebit DiLoCo, 4 bits": functools.partial(make_compressed, NESTEROV, 4),
           "onebit DiLoCo, mean, 1 bit": functools.partial(make_compressed, None, 1),
           "onebit DiLoCo, SparseLoCo's codec": functools.partial(make_compressed, None, onebit.OUTER_SPARSE)}  # fmt: skip
