"""Functions that scenarios over torch.distributed share. Imported before the package, which is the one
beside them."""

import os
import pathlib
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing

PACKAGE = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PACKAGE), str(PACKAGE / "examples")]

import onebit  # noqa: E402


def is_equal_on_ranks(tensor, group=None):
    """True if every rank has the same bits."""
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, tensor, group=group)
    return all(torch.equal(one, tensor) for one in everyone)


def flatten_parameters(module):
    """Returns all parameters in one tensor."""
    return torch.cat([one.detach().cpu().flatten().double() for one in module.parameters()])


def broadcast_from_rank_0(thing):
    """Gives all ranks rank 0's object, as if they read its file."""
    things = [thing]
    dist.broadcast_object_list(things)
    return things[0]


def make_gradient(rank, step, count=5000):
    return torch.randn(count, generator=torch.Generator().manual_seed(1000 * rank + step))


def expect_status(status, call, words=""):
    try:
        call()
    except onebit.Error as error:
        assert error.status is status and words in error.message, error
        return
    raise AssertionError(f"{call} did not fail")


def expect_error(words, call, kind=(onebit.Error, RuntimeError)):
    try:
        call()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)


def _run_rank(rank, scenarios, names, size, path, begin, end):
    torch.set_num_threads(1)
    backends = begin() if begin else "gloo"
    store = dist.FileStore(path, size)
    dist.init_process_group(backends, store=store, rank=rank, world_size=size)
    for name in names:
        next(one for one in scenarios if one.__name__ == name)(rank, size)
        dist.barrier()
    if rank == 0:
        print("all well", flush=True)
    if end:
        end(names)


def run_scenarios(scenarios, begin=None, end=None, start="fork"):
    """Runs the cases that the program's first argument names, on as many ranks as the second says,
    which are processes that meet over gloo, or over the backends that begin() returns; each then
    calls end(names)."""
    with tempfile.TemporaryDirectory() as place:
        names, size = sys.argv[1].split(","), int(sys.argv[2])
        arguments = (scenarios, names, size, os.path.join(place, "store"), begin, end)
        torch.multiprocessing.start_processes(_run_rank, arguments, nprocs=size, start_method=start)
