"""Trains a small network with Accelerate, in three ways, and says how they compare: as it is, with
onebit's hook, and with Adam that sends one bit an element.

    pip install accelerate
    torchrun --nproc-per-node 2 accelerate_ddp.py

Tried with Accelerate 1.15. The lines that change a program are marked with `# onebit`.
"""

import argparse

import accelerate
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from train_ddp import CLASSES, HIDDEN, WIDTH, teacher_data

import onebit.torch  # onebit

WAYS = ("plain SGD", "SGD, the hook", "plain AdamW", "Adam in one bit")


def network():
    accelerate.utils.set_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
        nn.Linear(HIDDEN, CLASSES),
    )


def train(options, way):
    """The loss on data that was not trained on, and the bytes that onebit has sent."""
    accelerator = accelerate.Accelerator(cpu=True)
    model, state = network(), None
    loader = DataLoader(TensorDataset(*teacher_data(8192, seed=100)), batch_size=32, shuffle=True)
    if "SGD" in way:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if way == WAYS[3]:
        optimizer = onebit.torch.compress(model, optimizer)  # onebit
    if way == WAYS[1]:
        state = onebit.torch.HookState(warmup_steps=20, optimizer=optimizer.optimizer)  # onebit
        model.register_comm_hook(state, onebit.torch.allreduce_hook)  # onebit
    step = 0
    while step < options.steps:
        for points, classes in loader:
            if step < options.steps:
                optimizer.zero_grad()
                accelerator.backward(nn.functional.cross_entropy(model(points), classes))
                optimizer.step()
                step += 1
    points, classes = teacher_data(4096, seed=99)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(accelerator.unwrap_model(model)(points), classes).item()
    sent = None
    if state:
        sent = state.comm.bytes_sent
        state.close()  # onebit
    if way == WAYS[3]:
        sent = optimizer.comm.bytes_sent
        optimizer.close()  # onebit
    return loss, sent


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    accelerator = accelerate.Accelerator(cpu=True)
    ranks = accelerator.num_processes
    elements = sum(one.numel() for one in network().parameters())
    ring = int(2 * (ranks - 1) / ranks * 4 * elements * options.steps)
    accelerator.print(f"Accelerate {accelerate.__version__}, {ranks} ranks, {options.steps} steps")
    for way in WAYS:
        loss, sent = train(options, way)
        note = " (counted for a ring)" if sent is None else ""
        accelerator.print(f"{way:16} validation loss {loss:.4f}  {sent or ring} bytes sent{note}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
