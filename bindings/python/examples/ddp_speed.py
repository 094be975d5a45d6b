"""Measures a step without a hook, with torch's own hooks, and with onebit's, in one run.

    python ddp_speed.py                          # 4 processes of this machine
    torchrun --nproc-per-node 4 ddp_speed.py     # or as always
    tools/netlab -H 4 -b 1gbit --sockets -- env GLOO_SOCKET_IFNAME=eth0 python3 ddp_speed.py

Each round makes one step of every kind, so that other programs slow all kinds down equally. The
time of a step is that of the slowest rank. Medians are over rounds.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ranks import start

import onebit.torch

INPUTS, OUTPUTS, WARMUP = 64, 10, 4


def network(parameters):
    """Returns a network of four square layers with about `parameters` parameters in all."""
    torch.manual_seed(0)
    width = next(one for one in range(32, 1 << 16, 32) if 4 * one * one >= 0.98 * parameters)
    layers = [nn.Linear(INPUTS, width), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, OUTPUTS))


class Kind:
    """A model, with the method by which its gradients are averaged."""

    def __init__(self, name, options):
        self.name, self.state, self.seconds = name, None, []
        # PowerSGD's hook makes several exchanges for each bucket, which gloo may mix with those of
        # other buckets. So its model has one bucket.
        whole = {"bucket_cap_mb": 1 << 20} if name == "PowerSGD hook" else {}
        self.model = DistributedDataParallel(network(options.parameters), **whole)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        if name == "fp16 hook":
            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif name == "PowerSGD hook":
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=options.rank, start_powerSGD_iter=2
            )
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif name.startswith("onebit"):
            self.state = onebit.torch.HookState(bits=int(name.split()[1]))
            self.model.register_comm_hook(self.state, onebit.torch.allreduce_hook)

    def step(self, points, classes):
        dist.barrier()
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(points), classes).backward()
        self.optimizer.step()
        seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        self.seconds.append(seconds.item())


def run(options):
    names = ["without a hook", "fp16 hook", "PowerSGD hook"]
    names += [f"onebit {bits} bit{'s' * (bits > 1)}" for bits in options.bits]
    kinds = [Kind(name, options) for name in names]
    random = torch.Generator().manual_seed(dist.get_rank())
    points = torch.randn(options.batch, INPUTS, generator=random)
    classes = torch.randint(OUTPUTS, (options.batch,), generator=random)
    for _ in range(WARMUP + options.steps):
        for kind in kinds:
            kind.step(points, classes)
    if dist.get_rank() == 0:
        count = sum(one.numel() for one in kinds[0].model.parameters())
        through = next((one.state.comm.transport for one in kinds if one.state), "-")
        print(f"{dist.get_world_size()} ranks, {count} parameters, {options.steps} steps of each; "
              f"onebit over {through}")
        for kind in kinds:
            kind.seconds[:WARMUP] = []
        fp16 = statistics.median(kinds[1].seconds)
        for kind in kinds:
            middle = statistics.median(kind.seconds)
            low, *_, high = statistics.quantiles(kind.seconds, n=10)
            print(f"{kind.name:15} {1e3 * middle:8.1f} ms  (10 to 90 %: {1e3 * low:.1f} to "
                  f"{1e3 * high:.1f})  {fp16 / middle:5.2f} times as fast as the fp16 hook")
    dist.barrier()
    for kind in kinds:
        if kind.state:
            kind.state.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=4, help="processes (without torchrun)")
    parser.add_argument("--parameters", type=float, default=1.1e6)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rank", type=int, default=1, help="of PowerSGD's matrices")
    parser.add_argument("--bits", type=int, nargs="*", default=[1, 8])
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps: at least 2")
    start(options.ranks, run, options)


if __name__ == "__main__":
    main()
