"""Trains a small transformer on the characters of a text, with DistributedDataParallel over gloo: with
torch's AdamW and dense gradients, and with optimizers of onebit instead.

    python train_gpt.py TEXT                    # 4 processes of this machine
    python train_gpt.py TEXT --steps 1000 --seed 2 --optimizers AdamW,EfficientAdam

The lines that change a program that uses DistributedDataParallel are marked with `# onebit`.
"""

import argparse
import math
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ranks import start

import onebit.torch  # onebit

LENGTH, WIDTH, HEADS, LAYERS, BATCH = 64, 96, 4, 3, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attend = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden):
        batch, length, _ = hidden.shape
        parts = self.attend(self.norms[0](hidden)).view(batch, length, 3, HEADS, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH / HEADS)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(later, -math.inf).softmax(-1) @ value
        hidden = hidden + self.project(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return hidden + self.wide(self.norms[1](hidden))


class Transformer(nn.Module):
    def __init__(self, characters):
        super().__init__()
        self.characters = nn.Embedding(characters, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, characters, bias=False)
        for name, one in self.named_parameters():
            if one.dim() > 1:
                nn.init.normal_(one, std=0.02 if "project" not in name else 0.02 / LAYERS**0.5)

    def forward(self, text):
        hidden = self.characters(text) + self.places(torch.arange(text.shape[1]))
        return self.head(self.norm(self.blocks(hidden)))


def read(path):
    """Returns the text as numbers, in two parts (nine tenths to train on, and the rest), and the
    number of different characters."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    number = {one: k for k, one in enumerate(sorted(set(text)))}
    values = torch.tensor([number[one] for one in text])
    return values[: len(values) * 9 // 10], values[len(values) * 9 // 10 :], len(number)


def loss_of(model, text, random, batch=BATCH):
    starts = torch.randint(len(text) - LENGTH, (batch,), generator=random).tolist()
    given = torch.stack([text[at : at + LENGTH] for at in starts])
    wanted = torch.stack([text[at + 1 : at + LENGTH + 1] for at in starts])
    return nn.functional.cross_entropy(model(given).flatten(0, 1), wanted.flatten())


def groups_of(model):
    """Returns parameter groups in which only matrices have weight decay, as in nanoGPT."""
    decayed = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() == 1]
    return [{"params": decayed}, {"params": others, "weight_decay": 0.0}]


def train(options, name, data):
    """Returns the validation loss, the bytes that this rank sent in each step, and the seconds of a
    step."""
    text, validation, characters = data
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(options.seed)
    network = Transformer(characters)
    optimizer = torch.optim.AdamW(
        groups_of(network), lr=options.lr, betas=(0.9, 0.99), weight_decay=0.1
    )
    model = DistributedDataParallel(network)
    if name == "auto":
        onebit.torch.auto(model, optimizer)  # onebit
    elif name != "AdamW":
        optimizer = onebit.torch.compress(model, optimizer, getattr(onebit.torch, name))  # onebit
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=options.steps // 20),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps, options.lr / 10),
        ],
        [options.steps // 20],
    )
    random = torch.Generator().manual_seed(1000 * options.seed + rank)
    began = time.perf_counter()
    for _ in range(options.steps):
        optimizer.zero_grad()
        loss_of(model, text, random).backward()
        optimizer.step()
        schedule.step()
    seconds = (time.perf_counter() - began) / options.steps
    elements = sum(one.numel() for one in network.parameters())
    each = 2 * (size - 1) / size * 4 * elements  # bytes of gloo's ring
    if name != "AdamW":
        report = optimizer.report()
        each = report.bytes_sent / options.steps
        if rank == 0:
            print(report)
        optimizer.close()  # onebit
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        loss = sum(loss_of(network, validation, random, 32).item() for _ in range(10)) / 10
    return loss, each, seconds


def run(options):
    data = read(options.text)
    first = None
    for name in options.optimizers.split(","):
        loss, each, seconds = train(options, name, data)
        first = first or (loss, each)
        if dist.get_rank() == 0:
            print(
                f"seed {options.seed} {name:14} validation loss {loss:.4f} ({loss / first[0]:.4f}), "
                f"{each:9.0f} bytes a step and rank (1/{first[1] / each:.1f}), {seconds:.3f} s a step",
                flush=True,
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("text", help="a file")
    parser.add_argument("--ranks", type=int, default=4, help="processes")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--optimizers", default="AdamW,EfficientAdam,Adam",
                        help="names: of classes of onebit.torch, HookState (8 bits), auto")
    options = parser.parse_args()
    start(options.ranks, run, options)


if __name__ == "__main__":
    main()
