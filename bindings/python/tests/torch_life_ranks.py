"""Scenarios of test_torch.py: `python torch_life_ranks.py SCENARIO RANKS` starts RANKS processes
over gloo: objects give back what they make for themselves."""

import gc
import os
import signal
import sys
import threading
import weakref

from torch_common import expect_error, run_scenarios

import onebit.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def make_network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 1))


def run_backward(model, step):
    random = torch.Generator().manual_seed(100 * dist.get_rank() + step)
    model.zero_grad()
    model(torch.randn(8, 20, generator=random)).square().mean().backward()


# --- Nothing is kept -----------------------------------------------------------------------------


def make_compressed(close):
    """Makes objects that a program may drop: all of them must be gone then."""
    model = DistributedDataParallel(make_network())
    optimizer = onebit.torch.compress(model, torch.optim.AdamW(model.parameters()))
    for step in range(4):
        run_backward(model, step)
        optimizer.step()
    if close:
        optimizer.close()
    return model.module, optimizer, optimizer.comm


def make_hooked(close):
    model, state = DistributedDataParallel(make_network()), onebit.torch.HookState()
    model.register_comm_hook(state, onebit.torch.allreduce_hook)
    for step in range(4):
        run_backward(model, step)
    if close:
        state.close()
    return model.module, state, state.comm


def count_resources():
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def check_freed_objects(rank, size):
    """A model, and what was made for it, are gone once the program has dropped them, closed or
    not, and so are descriptors and threads, without the garbage collector."""
    gc.collect()
    gc.disable()
    for make in make_compressed, make_hooked:
        before = None
        for close in False, True, False:
            kept = [weakref.ref(one) for one in make(close)]
            assert not any(one() for one in kept), (make, close, [one() for one in kept])
            dist.barrier()
            now = count_resources()
            before = before or now  # threads of the process come with the first, and torch's may go
            assert all(one <= most for one, most in zip(now, before)), (make, close, before, now)
    gc.enable()


# --- The hook's state is of the model ------------------------------------------------------------


def check_groups(rank, size):
    """A state without a group has the model's, one that is shared is refused another, and a wrapped
    hook has its model too."""
    groups = [dist.new_group([0, 1], backend="gloo"), dist.new_group([2, 3], backend="gloo")]

    def make(group, state, hook=onebit.torch.allreduce_hook):
        model = DistributedDataParallel(nn.Linear(300, 30), process_group=group)
        model.register_comm_hook(state, hook)
        return model

    def wrapper(state, bucket):
        return onebit.torch.allreduce_hook(state[0], bucket)

    def gradient(model):
        model.zero_grad()
        (model(torch.ones(1, 300)) * (rank + 1.0)).sum().backward()
        return model.module.weight.grad.mean()

    mean, state = 2 * (rank // 2) + 1.5, onebit.torch.HookState(bits=8)
    for model in (
        make(groups[rank // 2], state),
        make(groups[rank // 2], [onebit.torch.HookState(bits=8)], wrapper),
    ):
        for _ in range(3):
            assert abs(gradient(model) - mean) < 0.01, gradient(model)
    assert (state.comm.size, state.compressed, state.dense) == (2, 2, 1)
    expect_error("another process group", lambda: gradient(make(None, state)))


# --- Ends ----------------------------------------------------------------------------------------


def make_both_models():
    """Returns a model with the hook, and a model with an optimizer that exchanges, after two steps."""
    hooked, carried = (DistributedDataParallel(make_network()) for _ in range(2))
    hooked.register_comm_hook(onebit.torch.HookState(), onebit.torch.allreduce_hook)
    optimizer = onebit.torch.compress(carried, torch.optim.AdamW(carried.parameters()))
    for step in range(2):
        run_backward(hooked, step)
        run_backward(carried, step)
        optimizer.step()
    return hooked, carried, optimizer


def check_forked_process(rank, size):
    """A forked process can use neither the hook nor the optimizer; it drops both and ends without harm."""
    hooked, carried, optimizer = make_both_models()
    child = os.fork()
    if child == 0:
        expect_error("was forked from it", lambda: run_backward(hooked, 2))
        del hooked, carried, optimizer
        gc.collect()
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    dist.barrier()
    run_backward(hooked, 2)
    run_backward(carried, 2)
    optimizer.step()


def check_lost_rank(rank, size):
    """When a rank ends in its forward pass, the other ranks are told which."""
    hooked, carried, optimizer = make_both_models()
    dist.barrier()
    if rank == size - 1:
        os._exit(0)
    expect_error(f"rank {size - 1}", lambda: run_backward(hooked, 2))
    run_backward(carried, 2)
    expect_error(f"rank {size - 1}", optimizer.step)
    os.write(1, f"rank {rank} knows\n".encode())  # one write: ranks share the output
    os._exit(0)


def check_interrupt(rank, size):
    """Ctrl-C ends a backward pass that waits for another rank."""
    hooked, _, _ = make_both_models()
    if rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 2.0)
        expect_error("", lambda: run_backward(hooked, 2), KeyboardInterrupt)
        dist.barrier()
    else:
        dist.barrier()
        steps = (2, 3)  # what rank 0 had sent before arrives
        expect_error("rank 0 called onebit_comm_abort", lambda: [run_backward(hooked, one) for one in steps])


SCENARIOS = (check_forked_process, check_freed_objects, check_lost_rank, check_interrupt, check_groups)


if __name__ == "__main__":
    run_scenarios(SCENARIOS)
