"""The program that test_torch.py runs under `python -m onebit.torch.run`. It does not import
onebit. RANK and WORLD_SIZE are set as by torchrun. Its argument is the file of a store."""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


def make_gradient(model, rank, step):
    points = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + rank))
    model.zero_grad()
    model(points).square().mean().backward()
    return model.module.weight.grad.clone()


def main():
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    store = dist.FileStore(sys.argv[1], size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    torch.manual_seed(3)
    given, own = (DistributedDataParallel(torch.nn.Linear(20, 50)) for _ in range(2))
    own.load_state_dict(given.state_dict())
    own.register_comm_hook(None, allreduce_hook)
    for step in range(5):
        exact, found = (make_gradient(model, rank, step) for model in (own, given))
        off = (exact - found).norm() / exact.norm()
        assert off == 0 if step == 0 else 0 < off < 0.05, (step, off)
    assert torch.equal(make_gradient(copy.deepcopy(given), rank, 5), make_gradient(own, rank, 5))
    try:
        own.register_comm_hook(None, allreduce_hook)
    except RuntimeError as error:  # raised as without the launcher
        assert "only be called once" in str(error)
    else:
        raise AssertionError("two hooks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
