"""DiLoCo in float32 as its paper has it (arXiv 2311.08105): AdamW inside, an outer step with Nesterov
momentum 0.9 and rate 0.7 every 20 steps."""

import torch
import torch.distributed as dist


def make(model, optimizer, short):
    parameters, every, steps = list(model.parameters()), short(20), 0
    agreed = [one.detach().clone().requires_grad_() for one in parameters]
    outer = torch.optim.SGD(agreed, lr=0.7, momentum=0.9, nesterov=True)

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


METHODS = {"DiLoCo, float32": make}
