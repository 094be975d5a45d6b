"""Trains a small network in the engine of a DeepSpeed that has no 1-bit optimizers any more, with
the configuration that asks for one, and says what travelled: bytes of onebit's messages, and bytes
that torch.distributed averaged in steps.

    python deepspeed_client.py                           # OneBitAdam, 2 processes of this machine
    python deepspeed_client.py --optimizer ZeroOneAdam --dtype bf16

Tried with DeepSpeed 0.19.8 on processors. The line that differs from a program for DeepSpeed 0.19.6
is marked with `# onebit`.
"""

import argparse
import os
import warnings

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before deepspeed is imported

import torch
import torch.distributed as dist
from torch import nn

from ranks import start
from train_ddp import make_network, teacher_data

import onebit.deepspeed

PARAMETERS = {
    "OneBitAdam": {"freeze_step": 20},
    "OneBitLamb": {"freeze_step": 20, "lr": 0.01, "max_coeff": 0.3},
    "ZeroOneAdam": {"var_freeze_step": 20, "var_update_scaler": 4, "local_step_scaler": 20},
}


def configuration(options):
    return {
        "train_micro_batch_size_per_gpu": 32,
        "gradient_accumulation_steps": options.accumulate,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": options.dtype == "bf16"},
        "optimizer": {
            "type": options.optimizer,
            "params": {"lr": 2e-3, "weight_decay": 0.01, **PARAMETERS[options.optimizer]},
        },
    }


class Counter:
    """Bytes that torch.distributed is asked to average or gather."""

    def __init__(self):
        self.bytes = 0
        for name in ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"):
            setattr(dist, name, self._counted(getattr(dist, name)))

    def _counted(self, function):
        def counted(tensor, *arguments, **named):
            self.bytes += tensor.numel() * tensor.element_size()
            return function(tensor, *arguments, **named)

        return counted


def run(options):
    rank = dist.get_rank()
    warnings.simplefilter("ignore" if rank else "default", onebit.OnebitWarning)
    import deepspeed

    # Kernels of DeepSpeed that would be compiled for sums in shared memory.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = make_network()
    counter = Counter()
    config = configuration(options)
    engine, optimizer, _, _ = onebit.deepspeed.initialize(config, model)  # onebit
    points, classes = teacher_data(4096, seed=100 + rank)
    points = points.to(next(model.parameters()).dtype)
    shuffle = torch.Generator().manual_seed(200 + rank)
    counted = sent = 0
    for step in range(options.steps):
        if step == options.steps // 2:
            counted, sent = counter.bytes, optimizer.comm.bytes_sent
        for _ in range(options.accumulate):
            chosen = torch.randint(len(points), (32,), generator=shuffle)
            loss = nn.functional.cross_entropy(engine(points[chosen]).float(), classes[chosen])
            engine.backward(loss)
            engine.step()
        if rank == 0 and (step % 10 == 9 or step == 0):
            print(f"step {step + 1:3}  loss {loss.item():.4f}", flush=True)
    half = options.steps - options.steps // 2
    elements = sum(one.numel() for one in model.parameters())
    if rank == 0:
        print(f"DeepSpeed {deepspeed.__version__}, {options.optimizer}, {elements} parameters")
        sent, counted = optimizer.comm.bytes_sent - sent, counter.bytes - counted
        print(f"{sent / half:10.0f} bytes a step of onebit's messages")
        print(f"{counted / half:10.0f} bytes a step averaged by torch.distributed")
        print(f"{4 * elements:10d} bytes of gradients in float32")
        print(optimizer.onebit.describe())
    dist.barrier()
    optimizer.onebit.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--optimizer", choices=PARAMETERS, default="OneBitAdam")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    options = parser.parse_args()
    start(options.ranks, run, options)


if __name__ == "__main__":
    main()
