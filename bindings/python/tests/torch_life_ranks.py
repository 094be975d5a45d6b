"""What test_torch_life.py runs: `python torch_life_ranks.py SCENARIO RANKS` starts RANKS processes
that meet over gloo: what objects make for themselves, and that they give it back."""

import gc
import os
import pathlib
import sys
import tempfile
import threading
import weakref

PACKAGE = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PACKAGE))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import onebit  # noqa: E402
import onebit.torch  # noqa: E402


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 1))


def backward(model, step):
    random = torch.Generator().manual_seed(100 * dist.get_rank() + step)
    model.zero_grad()
    model(torch.randn(8, 20, generator=random)).square().mean().backward()


# --- Nothing is kept -----------------------------------------------------------------------------


def compressed(close):
    """What a program may drop: all of them must be gone."""
    model = DistributedDataParallel(network())
    optimizer = onebit.torch.compress(model, torch.optim.AdamW(model.parameters()))
    for step in range(4):
        backward(model, step)
        optimizer.step()
    if close:
        optimizer.close()
    return model.module, optimizer, optimizer.comm


def count():
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def freed(rank, size):
    """A model, and what was made for it, are gone once the program has dropped them, closed or
    not, and so are descriptors and threads."""
    for make in (compressed,):
        before = None
        for close in False, True, False:
            kept = [weakref.ref(one) for one in make(close)]
            gc.collect()
            assert not any(one() for one in kept), (make, close, [one() for one in kept])
            dist.barrier()
            before = before or count()  # threads of the process come with the first
            assert count() == before, (make, close, before, count())


SCENARIOS = (freed,)


def run(rank, name, size, path):
    torch.set_num_threads(1)
    store = dist.FileStore(path, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    next(one for one in SCENARIOS if one.__name__ == name)(rank, size)
    dist.barrier()
    if rank == 0:
        print("all well")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        arguments = (sys.argv[1], int(sys.argv[2]), os.path.join(place, "store"))
        torch.multiprocessing.start_processes(
            run, arguments, nprocs=arguments[1], start_method="fork")
