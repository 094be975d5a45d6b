"""Runs a program without changing it, and registers the hook with each DistributedDataParallel that
the program creates (docs/python-trainers.md#a-program-that-is-not-to-be-changed).

    torchrun --nproc-per-node 4 -m onebit.torch.run train.py --lr 0.1
"""

import argparse
import atexit
import collections
import functools
import os
import runpy
import sys
import weakref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from onebit._native import Error, Status
from onebit.torch.hook import HookState, allreduce_hook


class Totals:
    """Sums over all models of the program, including those that it has dropped."""

    def __init__(self):
        self.rank = int(os.environ.get("RANK", 0))
        self.ends = []  # functions that add the counts of a state, unless they are added already
        self._counts = collections.Counter()

    def add(self, state):
        names = "compressed", "dense", "skipped", "bytes_sent"
        self._counts.update({name: getattr(state, name) for name in names})
        self._counts["states"] += 1

    def text(self):
        for end in self.ends:
            end()
        found = self._counts
        if not found["states"]:
            return "nothing was compressed: no model is a DistributedDataParallel on the CPU, or each has a hook"
        return (
            f"{found['compressed']} buckets of gradients compressed ({found['bytes_sent']} "
            f"bytes from rank 0), {found['dense']} averaged by torch, {found['skipped']} of them because a "
            "gradient of some rank was not finite"
        )

    def report(self):
        if self.rank == 0:
            print(f"onebit: {self.text()}", file=sys.stderr, flush=True)


class Given:
    """The hook that a model gets, and its state, which the program may replace."""

    def __init__(self, totals, options):
        self.hook, self.state = allreduce_hook, HookState(**options)
        self._end = weakref.finalize(self, totals.add, self.state)
        self._end.atexit = False
        totals.ends.append(self._end)

    def replace(self, hook, state):
        self._end.detach()
        self.hook, self.state = hook, state

    def __reduce__(self):  # a copied model has no hook, as in torch
        return object, ()


def given_hook(given, bucket):
    return given.hook(given.state, bucket)


def give_hooks(totals, **options):
    """Registers the hook with each DistributedDataParallel that is created from now on."""
    if int(torch.__version__.split(".")[0]) < 2:
        raise Error(Status.ERROR_UNSUPPORTED, "torch before 2.0 cannot report which hooks a model has: "
                                              "install torch 2.0 or newer")
    make, register = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook

    @functools.wraps(make)
    def __init__(self, *arguments, **named):  # noqa: N807
        make(self, *arguments, **named)
        totals.rank = dist.get_rank()
        on_processor = all(one.device.type == "cpu" for one in self.parameters())
        if on_processor and not self._comm_hooks:
            register(self, Given(totals, options), given_hook)

    @functools.wraps(register)
    def register_comm_hook(self, state, hook):
        given = next((one for _, one in self._comm_hooks if isinstance(one, Given)), None)
        if given is None or given.hook is not allreduce_hook:
            return register(self, state, hook)
        self._check_comm_hook(hook)
        given.replace(hook, state)

    DistributedDataParallel.__init__ = __init__
    DistributedDataParallel.register_comm_hook = register_comm_hook


def main():
    from onebit.torch import run  # a copied model finds this module, not __main__

    parser = argparse.ArgumentParser(prog="onebit.torch.run", description="runs a program")
    parser.add_argument("--bits", type=int, default=8, choices=[1, 2, 4, 8])
    parser.add_argument("-m", action="store_true", help="the program is a module")
    parser.add_argument("program", help="with its arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    totals = run.Totals()
    atexit.register(totals.report)
    run.give_hooks(totals, bits=options.bits)
    sys.argv = [options.program, *options.arguments]
    if options.m:
        sys.path[0] = os.getcwd()
        runpy.run_module(options.program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(options.program))
        runpy.run_path(options.program, run_name="__main__")


if __name__ == "__main__":
    main()
