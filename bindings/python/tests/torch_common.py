"""Functions that scenarios over torch.distributed share. Programs import this file before the package,
so that they get the package beside the tests."""

import contextlib
import os
import pathlib
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

PACKAGE = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PACKAGE), str(PACKAGE / "examples")]

import onebit  # noqa: E402


def is_equal_on_ranks(tensor, group=None):
    """True if the tensor has the same bits on every rank."""
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, tensor, group=group)
    return all(torch.equal(one, tensor) for one in everyone)


def flatten_parameters(module):
    """Returns all parameters in one tensor."""
    return torch.cat([one.detach().cpu().flatten().double() for one in module.parameters()])


def broadcast_from_rank_0(thing):
    """Returns rank 0's object on all ranks, as if they had read its file."""
    things = [thing]
    dist.broadcast_object_list(things)
    return things[0]


def make_shared_directory():
    """Returns a directory that is the same on all ranks. It is removed when the ranks have ended."""
    return broadcast_from_rank_0(tempfile.mkdtemp() if dist.get_rank() == 0 else None)


@contextlib.contextmanager
def record_warnings():
    """Yields a list. After the block it contains the messages of all warnings."""
    messages = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(one.message) for one in caught]


def make_layers(*widths):
    """Makes linear layers of these widths with tanh between them. They are the same on each rank."""
    torch.manual_seed(3)
    layers = [(nn.Linear(*pair), nn.Tanh()) for pair in zip(widths, widths[1:])]
    return nn.Sequential(*sum(layers, ())[:-1])


def draw_normal(seed, *shape):
    """Returns normally distributed numbers. The same seed gives the same numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_gradient(rank, step, count=5000):
    return draw_normal(1000 * rank + step, count)


def _checkpoint_state(model, optimizer):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))


def save_checkpoint(model, optimizer, directory, group=None):
    """Saves with torch.distributed.checkpoint: each rank writes its own state."""
    from torch.distributed import checkpoint

    state = _checkpoint_state(model, optimizer)
    checkpoint.save(state, checkpoint_id=directory, process_group=group)


def load_checkpoint(model, optimizer, directory, group=None, partial=False):
    """Loads a checkpoint of `save_checkpoint`. partial: values that it lacks do not change."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import set_state_dict

    state = _checkpoint_state(model, optimizer)
    planner = checkpoint.DefaultLoadPlanner(allow_partial_load=partial)
    checkpoint.load(state, checkpoint_id=directory, process_group=group, planner=planner)
    set_state_dict(model, optimizer, model_state_dict=state["model"],
                   optim_state_dict=state["optimizer"])  # fmt: skip


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


def _run_rank(rank, scenarios, size, directory, begin):
    torch.set_num_threads(1)
    tempfile.tempdir = directory  # the process that has started the ranks removes it
    backends = begin(rank, size) if begin else None
    store = dist.FileStore(os.path.join(directory, "store"), size)
    dist.init_process_group(backends or "gloo", store=store, rank=rank, world_size=size)
    for scenario in scenarios:
        scenario(rank, size)
        dist.barrier()
    if rank == 0:
        print("all well", flush=True)


def run_scenarios(scenarios, begin=None, start="fork"):
    """Runs the functions that the program's first argument names. The second argument is the number of
    ranks, which are processes. They are connected over gloo, or over the backends that begin(rank,
    size) returns. scenarios: the functions by name"""
    with tempfile.TemporaryDirectory() as directory:
        named, size = [scenarios[name] for name in sys.argv[1].split(",")], int(sys.argv[2])
        arguments = (named, size, directory, begin)
        torch.multiprocessing.start_processes(_run_rank, arguments, nprocs=size, start_method=start)
