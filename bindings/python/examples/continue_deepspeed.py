"""Trains with the 1-bit optimizers of DeepSpeed 0.19.6 (its own code, on processors, over gloo),
stops each in its compressed stage, and continues with onebit. Prints the losses of the next steps
beside those of a DeepSpeed run that was not stopped, and of DeepSpeed after loading its own
checkpoint.

    pip install deepspeed==0.19.6
    python continue_deepspeed.py                      # a table for each optimizer, 2 ranks
    python continue_deepspeed.py --record DIRECTORY   # its checkpoints and losses

On processors DeepSpeed lacks two things, which this program adds: a kernel that packs bits (numpy's
    packbits), and scales of the shape that gloo requires.
"""

import argparse
import json
import os
import pathlib
import shutil
import tempfile
import warnings

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # must be set before deepspeed is imported

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ranks import start

import onebit.deepspeed

PARAMETERS = {
    "OneBitAdam": {"lr": 2e-3, "freeze_step": 40, "weight_decay": 0.01},
    "OneBitLamb": {"lr": 1e-2, "freeze_step": 40, "weight_decay": 0.01, "max_coeff": 0.3},
    "ZeroOneAdam": {"lr": 2e-3, "var_freeze_step": 60, "var_update_scaler": 4,
                    "local_step_scaler": 8, "local_step_clipper": 4, "weight_decay": 0.01},
}  # fmt: skip
# The numbers of steps before the stop. For 0/1 Adam the stop is between two synchronisations.
STOPS = {"OneBitAdam": 100, "OneBitLamb": 100, "ZeroOneAdam": 102}
WAYS = ("DeepSpeed, not stopped", "here", "here, no residuals", "DeepSpeed, loaded")


def configuration(kind, inside_deepspeed):
    parameters = dict(PARAMETERS[kind])
    if inside_deepspeed:
        parameters["comm_backend_name"] = "compressed"
    return {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_clipping": 0.0,  # without this key DeepSpeed clips at 1, by another norm
        "optimizer": {"type": kind, "params": parameters},
    }


def network(inputs, hidden):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 3))


def loss_of(model, inputs, rank, step):
    """Returns the loss on a batch of this rank and step. The class of a point is the index of its
    largest weighted sum."""
    drawn = torch.Generator().manual_seed(1000 * step + rank)
    points = torch.randn(16, inputs, generator=drawn)
    weights = torch.randn(inputs, 3, generator=torch.Generator().manual_seed(1))
    return nn.functional.cross_entropy(model(points), (points @ weights).argmax(1))


class Packer:
    """Replaces DeepSpeed's kernel that packs bits, which does not exist for processors."""

    def load(self):
        return self

    def packbits(self, values, count, rank):
        return torch.from_numpy(np.packbits(values.detach().numpy() >= 0))

    def unpackbits(self, bits, count, rank):
        return torch.from_numpy(2 * np.unpackbits(bits.numpy()).astype("f4") - 1)


class Gloo:
    """Wraps deepspeed.comm. Scales have no dimension; the wrapper gives them the dimension that
    gloo expects."""

    def __init__(self, comm):
        self.comm = comm

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def all_gather(self, into, tensor, **options):
        return self.comm.all_gather(into, tensor.reshape(into[0].shape), **options)


def engine_of(options, kind, model):
    import deepspeed
    from deepspeed.runtime.comm import compressed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise it would be compiled
    compressed.PackbitsBuilder, compressed.dist = Packer, Gloo(deepspeed.comm)
    return deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=configuration(kind, True)
    )[0]


def mean(loss):
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def train_with_deepspeed(rank, options, kind, folder, loads):
    model = network(options.inputs, options.hidden)
    engine = engine_of(options, kind, model)
    if loads:
        engine.load_checkpoint(folder)
    losses = []
    stop = STOPS[kind]
    for step in range(stop if loads else 0, stop + options.more):
        if step == stop and not loads:
            engine.save_checkpoint(folder)
            onebit.deepspeed.save_residuals(engine, folder)
        loss = loss_of(engine, options.inputs, rank, step)
        engine.backward(loss)
        engine.step()
        losses.append(mean(loss))
    return losses[-options.more :]


def here(rank, options, kind, folder):
    model = network(options.inputs, options.hidden)
    comm = onebit.Communicator.torch()
    optimizer = onebit.deepspeed.from_config(
        configuration(kind, False), model.parameters(), comm, profile="deepspeed"
    )
    optimizer.load_deepspeed(folder, model)
    losses = []
    for step in range(STOPS[kind], STOPS[kind] + options.more):
        optimizer.zero_grad()
        loss = loss_of(model, options.inputs, rank, step)
        loss.backward()
        optimizer.step()
        losses.append(mean(loss))
    comm.close()
    return losses


def run(options, kind, way, folder):
    rank = dist.get_rank()
    warnings.simplefilter("ignore")
    said = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # DeepSpeed prints on every rank
    if way.startswith("here"):
        losses = here(rank, options, kind, folder)
    else:
        losses = train_with_deepspeed(rank, options, kind, folder, way == WAYS[3])
    if rank == 0:
        (pathlib.Path(folder) / f"{way}.json").write_text(json.dumps(losses))
    os.dup2(said, 1)


def without_residuals(folder):
    copy = folder.with_name(folder.name + "-without")
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("onebit-rank-*"))
    return copy


def losses_of(options, kind, folder):
    """Returns the losses of each way."""
    found = {}
    for way in WAYS[:1] if options.record else WAYS:
        place = without_residuals(folder) if way == WAYS[2] else folder
        start(options.ranks, run, options, kind, way, str(place))
        found[way] = json.loads((place / f"{way}.json").read_text())
    return found


def table(options, kind, found):
    print(f"\n{kind}, {options.ranks} ranks, stopped after {STOPS[kind]} steps: losses\n")
    print("| step |" + "".join(f" {way} |" for way in WAYS))
    print("|---|" + "---|" * len(WAYS))
    for step, losses in enumerate(zip(*found.values())):
        print(f"| {STOPS[kind] + step + 1} |" + "".join(f" {loss:.6f} |" for loss in losses))
    whole = found[WAYS[0]]
    apart = [max(abs(a / b - 1) for a, b in zip(found[way], whole)) for way in WAYS]
    print("| largest difference |" + "".join(f" {one:.1e} |" for one in apart), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--more", type=int, default=20, help="steps after the stop")
    parser.add_argument("--inputs", type=int, default=40)
    parser.add_argument("--hidden", type=int, default=100)
    parser.add_argument("--record", type=pathlib.Path)
    parser.add_argument("--optimizer", choices=PARAMETERS, action="append")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        for kind in options.optimizer or PARAMETERS:
            folder = (options.record or pathlib.Path(work)) / kind
            folder.mkdir(parents=True)
            found = losses_of(options, kind, folder)
            if not options.record:
                table(options, kind, found)


if __name__ == "__main__":
    main()
