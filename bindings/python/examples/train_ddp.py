"""Trains a small network with DistributedDataParallel over gloo, first without and then with onebit's
hooks, and prints losses and bytes. Runs on 4 processes of this machine, or on those of torchrun.

    python train_ddp.py                 # SGD plain and in 8 bits; AdamW plain and in one bit
    python train_ddp.py --steps 600 --ranks 2
    torchrun --nproc-per-node 4 train_ddp.py

The lines that change a program that uses DistributedDataParallel are marked with `# onebit`.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ranks import start

import onebit.torch  # onebit

WIDTH, HIDDEN, CLASSES, BATCH = 64, 256, 10, 32


def teacher_data(count, seed):
    """Returns points and their classes, which a fixed random network determines."""
    fixed = torch.Generator().manual_seed(1)
    own = torch.Generator().manual_seed(seed)
    first = torch.randn(WIDTH, 32, generator=fixed)
    second = torch.randn(32, CLASSES, generator=fixed)
    points = torch.randn(count, WIDTH, generator=own)
    return points, (torch.tanh(points @ first / 8) @ second).argmax(1)


def make_network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
        nn.Linear(HIDDEN, CLASSES),
    )


def validation_loss(network):
    points, classes = teacher_data(4096, seed=99)
    with torch.no_grad():
        return nn.functional.cross_entropy(network(points), classes).item()


def ring_bytes(network):
    """Returns the bytes that a rank sends in gloo's ring: each element twice, except in its own share."""
    size = dist.get_world_size()
    return 2 * (size - 1) / size * 4 * sum(one.numel() for one in network.parameters())


def steps_of(options, model, optimizer):
    """Yields the number of each step, and makes the step."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    points, classes = teacher_data(4096, seed=100 + dist.get_rank())
    shuffle = torch.Generator().manual_seed(200 + dist.get_rank())
    for step in range(options.steps):
        yield step
        chosen = torch.randint(len(points), (BATCH,), generator=shuffle)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(points[chosen]), classes[chosen]).backward()
        optimizer.step()
        schedule.step()


def train(options, compressed, **plan_options):
    """Trains with SGD. Returns the validation loss, and the bytes of gradients that this rank sent in each
    step."""
    network = make_network()
    model = DistributedDataParallel(network, bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    state = None
    if compressed:
        state = onebit.torch.HookState(  # onebit
            warmup_steps=options.warmup, optimizer=optimizer, **plan_options
        )
        model.register_comm_hook(state, onebit.torch.allreduce_hook)  # onebit
    sent_before = 0
    for step in steps_of(options, model, optimizer):
        if state and step == options.warmup:
            sent_before = state.comm.bytes_sent
    each = ring_bytes(network)
    if state:
        each = (state.comm.bytes_sent - sent_before) / max(options.steps - options.warmup, 1)
        state.close()  # onebit
    return validation_loss(network), each


def train_adam(options, kind, **of_kind):
    """Trains with torch's or onebit's Adam. Returns the validation loss, and the bytes of the latest
    step."""
    network = make_network()
    optimizer = kind(network.parameters(), lr=options.adam_lr, weight_decay=0.01, **of_kind)
    model = DistributedDataParallel(network, bucket_cap_mb=0.1)
    compressed = hasattr(optimizer, "attach")
    if compressed:
        optimizer.attach(model)  # onebit
    for _ in steps_of(options, model, optimizer):
        pass
    each = ring_bytes(network)
    if compressed:
        each = optimizer.onebit.info()["compressed_bytes"]
        optimizer.close()  # onebit
    return validation_loss(network), each


def print_row(name, row, plain):
    print(
        f"{name:14}validation loss {row[0]:.5f} ({row[0] / plain[0]:.3f}), {row[1]:9.0f} bytes a step "
        f"and rank (1/{plain[1] / row[1]:.1f})"
    )


def compare(options):
    """Compares SGD without compression and in 8 bits, and AdamW without compression and in one bit."""
    rows = [
        ("SGD", train(options, compressed=False)),
        ("8 bits", train(options, compressed=True)),
        ("AdamW", train_adam(options, torch.optim.AdamW)),
        ("EfficientAdam", train_adam(options, onebit.torch.EfficientAdam)),
        ("1-bit Adam", train_adam(options, onebit.torch.Adam, freeze_step=options.steps // 4)),
    ]
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {options.steps} steps")
        for number, (name, row) in enumerate(rows):
            print_row(name, row, rows[0 if number < 2 else 2][1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=4, help="processes (without torchrun)")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--warmup", type=int, default=20, help="dense steps at the beginning")
    parser.add_argument("--lr", type=float, default=0.05, help="of SGD")
    parser.add_argument("--adam-lr", type=float, default=1e-3)
    options = parser.parse_args()
    start(options.ranks, compare, options)


if __name__ == "__main__":
    main()
