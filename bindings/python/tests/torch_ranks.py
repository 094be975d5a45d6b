"""Scenarios of test_torch.py: `python torch_ranks.py SCENARIO RANKS` starts RANKS processes over gloo. If an
assertion of one rank fails, all ranks end, with its message."""

import argparse
import copy
import gc
import io
import operator
import os
import pickle
import signal
import sys
import threading
import time
import weakref

from torch_common import draw_normal, expect_error, expect_status, is_equal_on_ranks, make_layers, run_scenarios

import onebit
import onebit.torch
import torch
import torch.distributed as dist
import torch_connections
import train_ddp
from onebit import Status
from torch import nn
from torch.nn.parallel import DistributedDataParallel


# --- The hook ------------------------------------------------------------------------------------


def make_network():
    return make_layers(20, 60, 60, 1)


def make_large_network():
    return make_layers(20, 300, 300, 300, 300, 300, 1)


def wrap_model(state=None, dtype=torch.float32):
    """Wraps a model so that it has several buckets. The first has a megabyte, with any bucket_cap_mb."""
    model = DistributedDataParallel(make_large_network().to(dtype), bucket_cap_mb=0.1)
    if state:
        model.register_comm_hook(state, onebit.torch.allreduce_hook)
    return model


def run_backward(model, rank, step, spoil=None):
    """Returns the gradients of a step as one tensor, and the loss."""
    points = draw_normal(7000 + 100 * rank + step, 16, 20).to(next(model.parameters()).dtype)
    model.zero_grad()
    loss = ((model(points) - points[:, :1].sin()) ** 2).mean()
    (loss * spoil if spoil is not None else loss).backward()
    return torch.cat([one.grad.flatten() for one in model.parameters()]), loss.item()


def check_hook(rank, size):
    state = onebit.torch.HookState(warmup_steps=2, schedule="exchange")
    plain, bits = wrap_model(), wrap_model(state)
    for step in range(2):  # the warm-up equals torch to the bit, also with new buckets
        assert torch.equal(run_backward(plain, rank, step)[0], run_backward(bits, rank, step)[0])
    assert state.comm.bytes_sent == 0 and not state._plans
    total_plain, total_bits = 0, 0
    for step in range(2, 18):
        wanted, got = run_backward(plain, rank, step)[0], run_backward(bits, rank, step)[0]
        assert is_equal_on_ranks(got) and not torch.equal(wanted, got)
        total_plain, total_bits = total_plain + wanted, total_bits + got
    # The residual of a step is added in the next step, so sums agree much better than single steps.
    single, summed = (got - wanted).norm() / wanted.norm(), total_bits - total_plain
    off = summed.norm() / total_plain.norm()
    assert off < 0.3 * single, (off, single)
    assert len(state._plans) > 1 and state.dropped == 0 and state.steps == 18
    check_not_finite(plain, bits, state, rank)
    check_layout_changes(state, rank)
    state.close()
    check_shortest_warmup(rank)
    check_other_types(rank)


def check_widths(rank, size):
    """Checks that exchanges use the given bits, or 8; and that the optimizer's kind decides whether gradients are
    normalised."""
    model = make_network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    adam = torch.optim.AdamW(model.parameters())
    coupled = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    cases = [
        ({}, 8, False), ({"optimizer": sgd}, 8, False), ({"optimizer": sgd, "bits": 1}, 1, False),
        ({"optimizer": adam}, 8, False), ({"optimizer": adam, "bits": 2}, 2, True),
        ({"optimizer": coupled, "bits": 2}, 2, False), ({"bits": 2}, 2, False),
        ({"optimizer": sgd, "bits": 4}, 4, False), ({"bits": 8, "normalise": True}, 8, True),
    ]
    bytes_of = {}
    for options, bits, normalise in cases:
        state = onebit.torch.HookState(schedule="exchange", **options)
        assert (state.bits, state.normalise) == (bits, normalise), options
        bits_model = wrap_model(state)
        for step in range(3):
            assert is_equal_on_ranks(run_backward(bits_model, rank, step)[0])
        assert all(plan.info()["bits"] == bits for _, plan in state._plans.values())
        bytes_of[bits] = state.comm.bytes_sent
        state.close()
    assert 6 < bytes_of[8] / bytes_of[1] < 8 and 1.8 < bytes_of[4] / bytes_of[2] < 2
    for options, words in (({"bits": 3}, "bits is 3"), ({"optimizer": sgd, "normalise": True}, "SGD")):
        expect_error(words, lambda: onebit.torch.HookState(**options), ValueError)
    check_normalised(rank, size)


def check_normalised(rank, size):
    """Checks that in the dense warm-up a result is the mean of the ranks' normalised gradients."""
    state = onebit.torch.HookState(warmup_steps=4, normalise=True, bits=4)
    model, local = wrap_model(state), make_large_network()
    squares, steps = 0, 0
    for step in range(4):
        spoil = float("inf") if (rank, step) == (0, 2) else None
        got, own = run_backward(model, rank, step, spoil)[0], run_backward(local, rank, step)[0]
        if spoil is None:  # values that are not finite change no moment
            squares, steps = 0.999 * squares + 0.001 * own * own, steps + 1
        wanted = torch.where(squares > 0, own / (squares / (1 - 0.999**steps)).sqrt(), own)
        dist.all_reduce(wanted)
        assert step != 2 or not got.isfinite().all()
        assert step == 2 or torch.allclose(got, wanted / size, atol=1e-5), step
    state.close()


def check_not_finite(plain, bits, state, rank):
    """Checks that all ranks get torch's result if some rank's gradient is not finite, and that the next step is
    finite again."""
    spoil = float("inf") if rank == 1 else None
    wanted, got = (run_backward(model, rank, 50, spoil)[0] for model in (plain, bits))
    assert not got.isfinite().all() and is_equal_on_ranks(got.nan_to_num(1e9, 2e9, 3e9))
    assert torch.equal(wanted.nan_to_num(1e9, 2e9, 3e9), got.nan_to_num(1e9, 2e9, 3e9))
    assert state.skipped == len(state._plans)
    assert run_backward(bits, rank, 51)[0].isfinite().all()


def check_layout_changes(state, rank):
    """Checks another model on the same state: the buckets differ, so their residuals are dropped, and the state
    counts these."""
    plans = len(state._plans)
    model = DistributedDataParallel(make_network())
    model.register_comm_hook(state, onebit.torch.allreduce_hook)
    assert is_equal_on_ranks(run_backward(model, rank, 0)[0])
    assert is_equal_on_ranks(run_backward(model, rank, 1)[0])
    assert 1 <= state.dropped <= plans + 2


def check_shortest_warmup(rank):
    """Checks that no residual is lost with the shortest warm-up: the buckets do not change after the first
    step."""
    state = onebit.torch.HookState()
    model = wrap_model(state)
    for step in range(3):
        assert is_equal_on_ranks(run_backward(model, rank, step)[0])
    assert len(state._plans) > 1 and state.dropped == 0
    state.close()


def check_other_types(rank):
    """Checks that a type that cannot be compressed is averaged as without a hook. gloo cannot add bfloat16, so
    no model of that type can be wrapped: the test passes such a bucket to the hook itself."""
    state = onebit.torch.HookState(warmup_steps=1)
    bits, plain = (wrap_model(one, torch.float64) for one in (state, None))
    for step in range(2):
        assert torch.equal(run_backward(bits, rank, step)[0], run_backward(plain, rank, step)[0])
    assert not state._plans

    class Bucket:  # is passed to the hook outside of a backward pass
        def __init__(self, value):
            self.tensor = torch.full((100,), value, dtype=torch.bfloat16)
            self.buffer, self.parameters = lambda: self.tensor, list
            self.index, self.is_last = lambda: 7, lambda: True

    mean = (dist.get_world_size() + 1) / 2
    for spoilt in False, True:
        value = float("nan") if spoilt and rank == 0 else rank + 1.0
        got = onebit.torch.allreduce_hook(state, Bucket(value)).wait()
        assert torch.equal(got, torch.full_like(got, mean)) or spoilt and got.isnan().all()
    assert state.skipped == 1 and list(state._plans) == [7]
    state.close()


def check_resumed_state(rank, size):
    """Checks that a state that is saved and loaded, pickled or copied continues to the bit in another model
    with the same parameters, whose first step has other buckets."""
    for number, options in enumerate(({"bits": 1}, {"normalise": True}, {"warmup_steps": 5})):
        state = onebit.torch.HookState(**options)
        model = wrap_model(state)
        for step in range(3):
            run_backward(model, rank, step)
        memory = io.BytesIO()
        torch.save(state.state_dict() if number == 1 else state, memory)
        unsafely = {"weights_only": number == 1} if hasattr(torch, "compile") else {}
        saved = torch.load(io.BytesIO(memory.getvalue()), **unsafely)
        if number == 1:
            other = onebit.torch.HookState(**options)
            other.load_state_dict(saved)
        else:
            other = copy.deepcopy(state) if number == 2 else saved
            assert other.comm is None and other.steps == 3
        again = wrap_model(other)
        for step in range(3, 7):
            wanted, got = (run_backward(one, rank, step)[0] for one in (model, again))
            assert torch.equal(wanted, got), (options, step)
        assert other.dropped == 0 and other.steps == state.steps
        assert len(other._layouts) > 1 and len(other._plans) == len(other._layouts)
        check_refused_state(rank, other) if number == 0 else other.close()
        state.close()


def check_refused_state(rank, state):
    """Checks that a state of another rank or model, or with a group, is rejected, and so is a closed state."""
    saved = state.state_dict()
    wrong = {**saved, "rank": 1} if rank == 0 else saved
    status = Status.ERROR_ARGUMENT if rank == 0 else Status.ERROR_PEER
    words = "rank of the loaded state is 1, but rank of this HookState is 0" if rank == 0 else ""
    expect_status(status, lambda: state.load_state_dict(wrong), words)
    state.load_state_dict({**saved, "steps": 1})  # is ignored
    plain, model = DistributedDataParallel(make_network()), DistributedDataParallel(make_network())
    model.register_comm_hook(state, onebit.torch.allreduce_hook)
    assert torch.equal(run_backward(plain, rank, 0)[0], run_backward(model, rank, 0)[0])
    state.load_state_dict(saved)
    expect_error("belongs to another model", lambda: run_backward(model, rank, 0))
    assert is_equal_on_ranks(run_backward(copy.deepcopy(model), rank, 0)[0])  # without the hook, as in torch
    state.close()
    expect_error("this HookState is closed", lambda: run_backward(model, rank, 0))
    group = dist.new_group(backend="gloo")
    with_group = onebit.torch.HookState(process_group=group)
    for call in copy.deepcopy, pickle.dumps:
        expect_error("take its state_dict()", lambda: call(with_group), TypeError)


def check_hook_errors(rank, size):
    """Checks that backward raises the error of an exchange on every rank, and that no rank waits."""
    state = onebit.torch.HookState(chunk_size=32 * (rank + 1))
    model = wrap_model(state)
    run_backward(model, rank, 0)
    expect_status(Status.ERROR_MISMATCH, lambda: run_backward(model, rank, 1), "chunk_size differs")


# --- Training ------------------------------------------------------------------------------------


def check_training(rank, size):
    """Checks that a training with the hook reaches the loss of the plain run. trainings_ranks.py checks
    optimizers."""
    options = argparse.Namespace(steps=100, warmup=10, lr=0.05)
    plain, plain_bytes = train_ddp.train(options, compressed=False)
    # Newer versions of torch have an additional small bucket, for which an allgather would be faster.
    bits, bits_bytes = train_ddp.train(options, compressed=True, bits=1, schedule="exchange")
    without, _ = train_ddp.train(options, compressed=True, bits=1, no_error_feedback=1)
    if rank == 0:
        print(f"hook: plain {plain:.5f}, one bit {bits:.5f}, without error feedback {without:.5f}")
    assert abs(bits - plain) < 0.06 * plain and without > 1.2 * plain, (plain, bits, without)
    assert bits_bytes < plain_bytes / 28


# --- Freed objects -------------------------------------------------------------------------------


def make_compressed(close):
    """Makes objects that a program may drop. All of them must then be freed."""
    model = DistributedDataParallel(make_network())
    optimizer = onebit.torch.compress(model, torch.optim.AdamW(model.parameters()))
    for step in range(4):
        run_backward(model, dist.get_rank(), step)
        optimizer.step()
    if close:
        optimizer.close()
    return model.module, optimizer, optimizer.comm


def make_hooked(close):
    model, state = DistributedDataParallel(make_network()), onebit.torch.HookState()
    model.register_comm_hook(state, onebit.torch.allreduce_hook)
    for step in range(4):
        run_backward(model, dist.get_rank(), step)
    if close:
        state.close()
    return model.module, state, state.comm


def count_resources(most=None):
    """Returns the numbers of descriptors and of threads. Waits until they are at most `most`: a thread ends soon after
    its model is freed, not at once."""
    until = time.monotonic() + 60
    while True:
        found = len(os.listdir("/proc/self/fd")), threading.active_count()
        if most is None or all(map(operator.le, found, most)) or time.monotonic() > until:
            return found
        time.sleep(0.01)


def check_freed_objects(rank, size):
    """Checks that a model, and the objects made for it, are freed once the program has dropped them, closed or
    not, and so are descriptors and threads, without the garbage collector."""
    gc.collect()
    gc.disable()
    for make in make_compressed, make_hooked:
        before = None
        for close in False, True, False:
            kept = [weakref.ref(one) for one in make(close)]
            assert not any(one() for one in kept), (make, close, [one() for one in kept])
            dist.barrier()
            now = count_resources(before)
            before = before or now  # the first model starts threads, and torch's may end
            assert all(one <= most for one, most in zip(now, before)), (make, close, before, now)
    gc.enable()


def check_hook_groups(rank, size):
    """Checks that a state without a group uses the model's, that a shared state rejects another group, and that
    a wrapped hook finds its model too."""
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


# --- Ranks that fork, end or are interrupted ------------------------------------------------------


def make_both_models(rank):
    """Returns a model with the hook, and a model with an optimizer that exchanges. Both have made two steps."""
    hooked, carried = (DistributedDataParallel(make_network()) for _ in range(2))
    hooked.register_comm_hook(onebit.torch.HookState(), onebit.torch.allreduce_hook)
    optimizer = onebit.torch.compress(carried, torch.optim.AdamW(carried.parameters()))
    for step in range(2):
        run_backward(hooked, rank, step)
        run_backward(carried, rank, step)
        optimizer.step()
    return hooked, carried, optimizer


def check_forked_models(rank, size):
    """Checks that a forked process can use neither the hook nor the optimizer. It drops both and ends without
    harm."""
    hooked, carried, optimizer = make_both_models(rank)
    child = os.fork()
    if child == 0:
        expect_error("was forked from it", lambda: run_backward(hooked, rank, 2))
        del hooked, carried, optimizer
        gc.collect()
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    dist.barrier()
    run_backward(hooked, rank, 2)
    run_backward(carried, rank, 2)
    optimizer.step()


def check_interrupt(rank, size):
    """Checks that Ctrl-C ends a backward pass that waits for another rank."""
    hooked, _, _ = make_both_models(rank)
    if rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 2.0)
        expect_error("", lambda: run_backward(hooked, rank, 2), KeyboardInterrupt)
        dist.barrier()
    else:
        dist.barrier()
        steps = (2, 3)  # messages that rank 0 has already sent still arrive
        expect_error("rank 0 called onebit_comm_abort", lambda: [run_backward(hooked, rank, one) for one in steps])


def check_lost_rank(rank, size):
    """Checks that the other ranks are told which rank is lost when one ends in its forward pass."""
    hooked, carried, optimizer = make_both_models(rank)
    dist.barrier()
    if rank == size - 1:
        os._exit(0)
    expect_error(f"rank {size - 1}", lambda: run_backward(hooked, rank, 2))
    run_backward(carried, rank, 2)
    expect_error(f"rank {size - 1}", optimizer.step)
    report_lost_rank(rank)


def report_lost_rank(rank):
    os.write(1, f"rank {rank} knows\n".encode())  # a single write: ranks share the output
    os._exit(0)


def check_lost_rank_over_gloo(rank, size):
    """Checks that the other ranks get an error when the last rank ends without notice."""
    comm = onebit.Communicator.torch(timeout=60, transport="gloo")
    plan = onebit.Plan(comm, 5000)
    mine = torch.ones(5000)
    if rank == size - 1:
        plan.allreduce(mine, mine)
        os._exit(0)
    expect_status(Status.ERROR_TRANSPORT, lambda: [plan.allreduce(mine, mine) for _ in range(3)], "rank")
    expect_status(Status.ERROR_TRANSPORT, lambda: onebit.Plan(comm, 1))
    report_lost_rank(rank)


if __name__ == "__main__":
    run_scenarios({**vars(torch_connections), **globals()})
