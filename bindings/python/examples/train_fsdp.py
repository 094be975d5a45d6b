"""Trains a model that predicts the next byte of a text, under FSDP2, without and with compression.

    python train_fsdp.py --text FILE                       # 4 processes of this machine
    torchrun --nproc-per-node 4 train_fsdp.py --text FILE
"""

import argparse
import pathlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ranks import start

import onebit.torch.fsdp

WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 96, 4, 2, 32, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        inner = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]
        self.inner = nn.Sequential(*inner)

    def forward(self, x):
        parts = self.mix(self.before(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.inner(self.between(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        for one in self.bytes, self.places:
            nn.init.normal_(one.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.after, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, text):
        places = self.places(torch.arange(text.shape[1]))
        return self.head(self.after(self.blocks(self.bytes(text) + places)))


def loss_of(model, text, count, random):
    starts = torch.randint(len(text) - CONTEXT - 1, (count,), generator=random).tolist()
    pieces = torch.stack([text[one : one + CONTEXT + 1] for one in starts])
    return nn.functional.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def train(options, text, seed, **bits):
    """Returns the validation loss, and the bytes that this rank sent in each step."""
    torch.manual_seed(seed)
    rank, size = dist.get_rank(), dist.get_world_size()
    model, mesh = Model(), init_device_mesh("cpu", (size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    compression = onebit.torch.fsdp.compress(model, **bits) if bits else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 2e-3, total_steps=options.steps, pct_start=0.1
    )
    random = torch.Generator().manual_seed(100 * seed + rank)
    known, unknown = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    for _ in range(options.steps):
        loss_of(model, known, BATCH, random).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    # The bytes of dense FSDP: it gathers parameters in the forward pass, gathers those of the
    # blocks again in the backward pass, and reduces gradients.
    whole = sum(one.numel() for one in model.parameters())
    blocks = sum(one.numel() for one in model.blocks.parameters())
    each = 4 * (size - 1) / size * (2 * whole + blocks)
    if compression:
        each = compression.bytes_sent / options.steps
        compression.close()  # afterwards each rank gathers whole parameters
    random, total = torch.Generator().manual_seed(5 + rank), torch.zeros(1)
    with torch.no_grad():
        for _ in range(16):
            total += loss_of(model, unknown, 32, random) / 16
    dist.all_reduce(total)
    return total.item() / size, each


def run(options):
    data = pathlib.Path(options.text).read_bytes()
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    chosen = {"reduce_bits": options.reduce_bits, "gather_bits": options.gather_bits}
    if options.no_error_feedback:
        chosen["error_feedback"] = False
    for seed in range(1, options.seeds + 1):
        plain, plain_bytes = train(options, text, seed)
        bits, bits_bytes = train(options, text, seed, **chosen)
        if dist.get_rank() == 0:
            print(f"seed {seed}, {options.steps} steps: validation loss {plain:.4f} without, "
                  f"{bits:.4f} with {chosen}: {100 * (bits / plain - 1):+.2f} %; bytes a step and "
                  f"rank {plain_bytes:.0f} and {bits_bytes:.0f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--text", required=True, help="a file to learn")
    parser.add_argument("--ranks", type=int, default=4, help="processes (without torchrun)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--reduce-bits", type=int, default=8, choices=[1, 2, 4, 8])
    parser.add_argument("--no-error-feedback", action="store_true", help="of gradients")
    parser.add_argument("--gather-bits", type=int, default=4, choices=[1, 2, 4, 8])
    options = parser.parse_args()
    start(options.ranks, run, options)


if __name__ == "__main__":
    main()
