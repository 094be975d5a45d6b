"""Measures a step's time and bytes between hosts, where several ranks share a host: plain
DistributedDataParallel and HSDP beside compressed ones, step by step in turn, in one run.

    tools/netlab --sockets -H 2 -r 2 -b 1gbit -- env GLOO_SOCKET_IFNAME=eth0 python3 bench/torch_hosts.py
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import onebit.torch

WIDTH = 512
KINDS = ("DDP", "DDP, fp16 hook", "HSDP", "DDP, compressed", "DDP, compressed, inside first",
         "HSDP, compressed")  # fmt: skip


def sent():
    """Bytes of this host's eth0 so far, by the kernel."""
    line = next(one for one in open("/proc/net/dev") if one.strip().startswith("eth0:"))
    return int(line.split(":")[1].split()[8])


class Kind:
    def __init__(self, name, layers, mesh, inside):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(layers)]
        self.model, self.seconds, self.bytes = nn.Sequential(*blocks), [], []
        if name.startswith("HSDP"):
            for one in blocks:
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

    def step(self, points):
        dist.barrier()
        begin, before = time.perf_counter(), sent()
        self.optimizer.zero_grad()
        (self.model(points) - points).square().mean().backward()
        self.optimizer.step()
        seconds = time.perf_counter() - begin
        dist.barrier()
        self.bytes.append(sent() - before)
        self.seconds.append(seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=32, help="of 262,656 parameters (%(default)s)")
    parser.add_argument("--steps", type=int, default=7, help="after 4 others (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size, on_host = dist.get_world_size(), 1 + int(os.environ.get("LOCAL_RANK", 0))
    counts = [None] * size
    dist.all_gather_object(counts, on_host)
    mesh = init_device_mesh("cpu", (size // max(counts), max(counts)),
                            mesh_dim_names=("replicate", "shard"))  # fmt: skip
    kinds = {name: Kind(name, options.layers, mesh, mesh.get_group(1)) for name in KINDS}
    points = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(4 + options.steps):
        for kind in kinds.values():
            kind.step(points)
    if dist.get_rank() == 0:
        print(f"{options.layers * (WIDTH + 1) * WIDTH} parameters, {size} ranks on {mesh.size(0)} hosts")
        for name, kind in kinds.items():
            seconds = 1000 * statistics.median(kind.seconds[4:])
            print(f"{name:30} {seconds:8.0f} ms {statistics.median(kind.bytes[4:]):12.0f} bytes on eth0")
    dist.barrier()


if __name__ == "__main__":
    main()
