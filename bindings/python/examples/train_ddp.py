"""Trains a small network with DistributedDataParallel over gloo, as it is and with onebit's hook,
and says how the two compare: on 4 processes of this machine, or under torchrun on yours.

    python train_ddp.py                 # plain, then with one bit an element
    python train_ddp.py --steps 600 --ranks 2
    torchrun --nproc-per-node 4 train_ddp.py

The lines that change a program that uses DistributedDataParallel are marked with `# onebit`.
"""

import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import onebit.torch  # onebit

WIDTH, HIDDEN, CLASSES, BATCH = 64, 256, 10, 32


def teacher_data(count, seed):
    """Points that a fixed random network sorts into classes."""
    fixed = torch.Generator().manual_seed(1)
    own = torch.Generator().manual_seed(seed)
    first = torch.randn(WIDTH, 32, generator=fixed)
    second = torch.randn(32, CLASSES, generator=fixed)
    points = torch.randn(count, WIDTH, generator=own)
    return points, (torch.tanh(points @ first / 8) @ second).argmax(1)


def train(options, compressed, **plan_options):
    """Trains; the validation loss, and the bytes that this rank sent for gradients."""
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    network = nn.Sequential(
        nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
        nn.Linear(HIDDEN, CLASSES),
    )
    model = DistributedDataParallel(network, bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    state = None
    if compressed:
        state = onebit.torch.HookState(  # onebit
            warmup_steps=options.warmup, optimizer=optimizer, **plan_options
        )
        model.register_comm_hook(state, onebit.torch.allreduce_hook)  # onebit
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    points, classes = teacher_data(4096, seed=100 + rank)
    shuffle = torch.Generator().manual_seed(200 + rank)
    sent_before = 0
    for step in range(options.steps):
        if state and step == options.warmup:
            sent_before = state.comm.bytes_sent
        chosen = torch.randint(len(points), (BATCH,), generator=shuffle)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(points[chosen]), classes[chosen]).backward()
        optimizer.step()
        schedule.step()
    points, classes = teacher_data(4096, seed=99)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(network(points), classes).item()
    elements = sum(one.numel() for one in network.parameters())
    # Gloo's ring sends each element twice, but for a rank's own share.
    each = 2 * (size - 1) / size * 4 * elements
    if state:
        each = (state.comm.bytes_sent - sent_before) / max(options.steps - options.warmup, 1)
        state.close()  # onebit
    return loss, each


def run(rank, options, port):
    torch.set_num_threads(1)
    if port:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", address, rank=rank, world_size=options.ranks)
    else:
        dist.init_process_group("gloo")
    plain, plain_bytes = train(options, compressed=False)
    bits, bits_bytes = train(options, compressed=True)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {options.steps} steps of SGD with momentum")
        print(f"plain        validation loss {plain:.5f}, {plain_bytes:9.0f} bytes a step and rank")
        print(f"one bit      validation loss {bits:.5f}, {bits_bytes:9.0f} bytes a step and rank")
        print(f"ratio        {bits / plain:.3f}, and 1/{plain_bytes / bits_bytes:.1f} of the bytes")
    dist.barrier()
    dist.destroy_process_group()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=4, help="processes (without torchrun)")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--warmup", type=int, default=20, help="dense steps at the beginning")
    parser.add_argument("--lr", type=float, default=0.05)
    options = parser.parse_args()
    if "RANK" in os.environ:
        run(None, options, None)
    else:
        torch.multiprocessing.spawn(run, (options, free_port()), nprocs=options.ranks)


if __name__ == "__main__":
    main()
