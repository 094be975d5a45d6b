"""Measures a step's time and bytes between hosts, if several ranks share a host. In one run, plain
DistributedDataParallel and HSDP and compressed ones take turns after each step. Hugging Face's Trainer
follows.

    tools/netlab --sockets -H 2 -r 2 -b 1gbit -- env GLOO_SOCKET_IFNAME=eth0 python3 bench/torch_hosts.py

`--nanogpt DIRECTORY`, a checkout of karpathy/nanoGPT, trains nanoGPT's model instead of plain layers.
`--trainer` trains transformers' GPT-2 of the same size.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import onebit.torch

KINDS = ("DDP", "DDP, fp16 hook", "HSDP", "DDP, compressed", "DDP, compressed, inside first",
         "HSDP, compressed")  # fmt: skip
TRAINERS = ("Trainer", "Trainer, fp16 hook", "Trainer, compressed")
FIRST = 4  # steps that are not counted: DistributedDataParallel forms its buckets, warm-up
CONTEXT, SYMBOLS, HEADS, WIDTH = 64, 256, 4, 256  # sizes of the transformers


def read_sent_bytes():
    """Returns the bytes that this host's eth0 has sent so far, by the kernel's counter."""
    line = next(one for one in open("/proc/net/dev") if one.strip().startswith("eth0:"))
    return int(line.split(":")[1].split()[8])


class Times:
    """The seconds and bytes of the steps of one kind."""

    def __init__(self):
        self.seconds, self.bytes = [], []

    def begin(self):
        dist.barrier()
        self.began, self.before = time.perf_counter(), read_sent_bytes()

    def end(self):
        self.seconds.append(time.perf_counter() - self.began)
        dist.barrier()
        self.bytes.append(read_sent_bytes() - self.before)

    def __str__(self):
        seconds = [1000 * one for one in sorted(self.seconds[FIRST:])]
        return (f"{statistics.median(seconds):8.0f} ms ({seconds[0]:.0f} to {seconds[-1]:.0f})"
                f" {statistics.median(self.bytes[FIRST:]):12.0f} bytes on eth0")  # fmt: skip


class Layers(nn.Sequential):
    """A model of plain layers with 262,656 parameters each."""

    def __init__(self, layers):
        super().__init__(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(layers)))

    def blocks(self):
        return self

    def batch(self, random):
        return (torch.randn(8, 512, generator=random),)

    def forward(self, points):
        return (super().forward(points) - points).square().mean()


def make_nanogpt(directory, layers):
    """Returns nanoGPT's model, which has 789,760 parameters a layer and 82,176 others."""
    sys.path.insert(0, directory)
    import model as nanogpt

    class Model(nanogpt.GPT):
        def blocks(self):
            return self.transformer.h

        def batch(self, random):
            return torch.randint(SYMBOLS, (2, 1, CONTEXT), generator=random).unbind()

        def forward(self, tokens, wanted):
            return super().forward(tokens, wanted)[1]

    return Model(nanogpt.GPTConfig(CONTEXT, SYMBOLS, layers, HEADS, WIDTH))


class Kind(Times):
    def __init__(self, name, make_model, mesh, inside):
        super().__init__()
        torch.manual_seed(0)
        self.model = make_model()
        self.data = self.model.batch(torch.Generator().manual_seed(dist.get_rank()))
        if name.startswith("HSDP"):
            for one in self.model.blocks():
                fully_shard(one, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        else:
            self.model = DistributedDataParallel(self.model)
        if "fp16" in name:
            self.model.register_comm_hook(None, fp16_compress_hook)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        if "compressed" in name:
            group = inside if "inside" in name else None
            self.optimizer = onebit.torch.compress(
                self.model, self.optimizer, inside=group, warmup_steps=1
            )

    def step(self):
        self.begin()
        self.optimizer.zero_grad()
        self.model(*self.data).backward()
        self.optimizer.step()
        self.end()


def train_with_trainer(name, layers, steps):
    """Trains with Hugging Face's Trainer, and returns the times of its steps."""
    import transformers

    times = Times()

    class Watch(transformers.TrainerCallback):
        def on_train_begin(self, *_, **__):
            if "fp16" in name:
                trainer.model_wrapped.register_comm_hook(None, fp16_compress_hook)

        def on_step_begin(self, *_, **__):
            times.begin()

        def on_step_end(self, *_, **__):
            times.end()

    callbacks = [Watch()]
    if "compressed" in name:
        callbacks.append(onebit.torch.TrainerCallback(warmup_steps=1))
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=SYMBOLS, n_positions=CONTEXT, n_embd=WIDTH, n_layer=layers, n_head=HEADS,
        bos_token_id=0, eos_token_id=0))  # fmt: skip
    tokens = torch.randint(SYMBOLS, (256, CONTEXT), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as place:
        arguments = transformers.TrainingArguments(
            place, max_steps=FIRST + steps, per_device_train_batch_size=1, save_strategy="no",
            report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="no",
            ddp_find_unused_parameters=False,
        )
        trainer = transformers.Trainer(
            model, arguments, callbacks=callbacks,
            train_dataset=[{"input_ids": one, "labels": one} for one in tokens],
        )  # fmt: skip
        trainer.train()
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--layers", type=int, default=32, help="of the model (%(default)s)")
    parser.add_argument("--steps", type=int, default=7, help="that count (%(default)s)")
    parser.add_argument("--nanogpt", metavar="DIRECTORY", help="which has nanoGPT's model.py")
    parser.add_argument("--trainer", action="store_true", help="the Trainer too, with a GPT-2")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size, on_host = dist.get_world_size(), 1 + int(os.environ.get("LOCAL_RANK", 0))
    counts = [None] * size
    dist.all_gather_object(counts, on_host)
    mesh = init_device_mesh("cpu", (size // max(counts), max(counts)),
                            mesh_dim_names=("replicate", "shard"))  # fmt: skip

    def make_model():
        if options.nanogpt:
            return make_nanogpt(options.nanogpt, options.layers)
        return Layers(options.layers)

    kinds = {name: Kind(name, make_model, mesh, mesh.get_group(1)) for name in KINDS}
    count = sum(one.numel() for one in make_model().parameters())
    for _ in range(FIRST + options.steps):
        for kind in kinds.values():
            kind.step()
    if options.trainer:
        kinds |= {name: train_with_trainer(name, options.layers, options.steps) for name in TRAINERS}
    if dist.get_rank() == 0:
        print(f"{count} parameters, {size} ranks on {mesh.size(0)} hosts")
        for name, kind in kinds.items():
            print(f"{name:30} {kind}")
    dist.barrier()


if __name__ == "__main__":
    main()
