"""What test_torch_backend.py runs: `python backend_ranks.py RANKS` starts processes, each of which does
what `python -m onebit.torch.backend backend_ranks.py --backend ...` does: a program that does not know
of onebit, but for what is looked at in the end."""

import argparse
import os
import pathlib
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank, steps, spoil, group=None):
    """The loss of the last steps, and all parameters at the end. In step `spoil` rank 0's gradients
    are not finite."""
    torch.manual_seed(3)
    layers = [nn.Linear(20, 300), *(nn.Linear(300, 300) for _ in range(4)), nn.Linear(300, 1)]
    network = nn.Sequential(*(nn.Sequential(one, nn.Tanh()) for one in layers[:-1]), layers[-1])
    model = DistributedDataParallel(network, bucket_cap_mb=0.1, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    random = torch.Generator().manual_seed(7 + rank)
    losses = []
    for step in range(steps):
        points = torch.randn(16, 20, generator=random)
        optimizer.zero_grad()
        loss = ((model(points) - points[:, :1].sin()) ** 2).mean()
        (loss * float("inf") if step == spoil and rank == 0 else loss).backward()
        if all(bool(one.grad.isfinite().all()) for one in model.parameters()):
            optimizer.step()
        losses.append(loss.item())
    mean = torch.tensor(losses[-10:]).mean()
    dist.all_reduce(mean)
    values = torch.cat([one.detach().flatten() for one in model.parameters()])
    return mean.item() / dist.get_world_size(), values


def alike(tensor):
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor)
    return all(torch.equal(one, tensor) for one in everyone)


def others(rank, size):
    """Collectives that are gloo's."""
    one = torch.full((40000,), rank + 1.0)
    dist.broadcast(one, 1)
    assert (one == 2).all()
    parts = torch.empty(size * 3)
    dist.all_gather_into_tensor(parts, torch.full((3,), float(rank)))
    assert parts.view(size, 3)[:, 0].tolist() == list(range(size))
    part = torch.empty(5)
    dist.reduce_scatter_tensor(part, torch.arange(5.0 * size))
    assert torch.equal(part, size * torch.arange(5.0 * rank, 5 * rank + 5))
    whole = torch.full((40000,), rank, dtype=torch.int64)
    dist.all_reduce(whole)
    assert (whole == size * (size - 1) // 2).all()
    most = torch.full((40000,), float(rank))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    assert (most == size - 1).all()
    if rank == 0:
        dist.send(torch.ones(3), 1)
    elif rank == 1:
        got = torch.empty(3)
        dist.recv(got, 0)
        assert (got == 1).all()
    names = [None] * size
    dist.all_gather_object(names, f"rank {rank}")
    assert names[-1] == f"rank {size - 1}"
    dist.barrier()


def another_address(backend, rank):
    """A tensor that lies elsewhere on one rank only: all begin anew, and sums are exact."""
    tensors = [torch.empty(20000) for _ in range(3)]

    def calls(count, lists):
        for step in range(count):
            for one in lists:
                one.copy_(torch.arange(20000.0) % 7 - 3 + rank)
                dist.all_reduce(one)

    calls(6, tensors)
    before = backend.compressed
    calls(1, tensors)
    assert backend.compressed == before + 3
    # The second and the third change places on rank 1 alone.
    changed = tensors if rank != 1 else [tensors[0], tensors[2], tensors[1]]
    calls(1, changed)
    assert backend.compressed == before + 4
    size = dist.get_world_size()
    wanted = size * (torch.arange(20000.0) % 7 - 3) + size * (size - 1) / 2
    assert all(torch.equal(one, wanted) for one in tensors[1:])


def main():
    parser = argparse.ArgumentParser()
    for name in "backend", "store":
        parser.add_argument(f"--{name}")
    for name in "rank", "ranks":
        parser.add_argument(f"--{name}", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    store = dist.FileStore(options.store, options.ranks)
    dist.init_process_group(
        options.backend, store=store, rank=options.rank, world_size=options.ranks
    )
    loss, values = train(options.rank, 30, spoil=24)
    plain, _ = train(options.rank, 30, spoil=24, group=dist.new_group(backend="gloo"))
    assert alike(values) and abs(loss / plain - 1) < 0.005, (loss, plain)
    if "onebit" in options.backend:
        from onebit.torch import backend

        (one,) = backend._made
        buckets, dense = len(one._plans), 8 * (1 - 1 / options.ranks) * len(values)
        found = buckets, one.skipped, one.compressed, one.comm.bytes_sent * buckets / dense
        assert buckets > 1 and one.skipped == buckets and one.compressed > 15 * buckets, found
        assert 0.2 < found[3] / one.compressed < 0.27, found
        others(options.rank, options.ranks)
        one._begin()
        another_address(one, options.rank)
        half = dist.new_group([0, 1], backend="onebit")  # a group of its own
        if options.rank < 2:
            small = torch.ones(20000)
            dist.all_reduce(small, group=half)
            assert (small == 2).all()
    dist.barrier()
    dist.destroy_process_group()
    print(f"all well, loss {loss:.5f}, of gloo {plain:.5f}")


def as_module(rank, ranks, store):
    from onebit.torch import backend

    sys.argv = ["-m", __file__, "--backend", "cpu:onebit", "--store", store]
    sys.argv += ["--rank", str(rank), "--ranks", str(ranks)]
    backend.main()


if __name__ == "__main__" and len(sys.argv) > 2:
    main()
elif __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
    with tempfile.TemporaryDirectory() as place:
        arguments = (int(sys.argv[1]), os.path.join(place, "store"))
        torch.multiprocessing.start_processes(
            as_module, arguments, nprocs=arguments[0], start_method="fork")
