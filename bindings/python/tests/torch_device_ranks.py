"""Scenarios of test_torch_optim.py: `python torch_device_ranks.py SCENARIOS RANKS`, started like
torch_ranks.py. Models are on a device: on CUDA if torch has it, otherwise on that of fake_device.py, whose
copies are late. With copies in the host's memory the results must equal those of the processor to the
bit."""

import gc
import socket

import fake_device
from torch_common import draw_normal, expect_status, flatten_parameters, is_equal_on_ranks, run_scenarios

import onebit.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

device = "cuda" if torch.cuda.is_available() else "fake"
PARAMETERS = 8


def make_network(on, dtype=torch.float32):
    """Makes a model with three buckets of DistributedDataParallel. GELU saves its input for the backward
    pass."""
    torch.manual_seed(3)
    wide = [20, 160, 160, 160, 1]
    layers = [nn.Sequential(nn.Linear(*one), nn.GELU()) for one in zip(wide, wide[1:])]
    return nn.Sequential(*layers).to(dtype).to(on)


def run_backward(model, on, rank, step, dtype=torch.float32):
    points = draw_normal(1000 * rank + step, 8, 20)
    wanted = points[:, :1].sin().to(dtype).to(on)
    loss = ((model(points.to(dtype).to(on)) - wanted) ** 2).mean()
    loss.backward()
    return loss.item()


def train_steps(on, rank, make, steps=8, dtype=torch.float32):
    """Yields the loss, the optimizer and the parameters of each step. make(model) returns the
    optimizer."""
    module = make_network(on, dtype)
    model = DistributedDataParallel(module, bucket_cap_mb=0.1)
    optimizer = make(model)
    for step in range(steps):
        optimizer.zero_grad()
        yield run_backward(model, on, rank, step, dtype), None
        optimizer.step()
        yield optimizer, flatten_parameters(module)
    assert is_equal_on_ranks(flatten_parameters(module))


def check_same_steps(rank, make, **options):
    """Checks that parameters after each step on the device equal those on the processor. Returns the
    latter."""
    ways = [train_steps(on, rank, make, **options) for on in ("cpu", device)]
    for plain, staged in zip(*ways):
        if plain[1] is None:
            assert plain == staged, (plain, staged)
        else:
            assert torch.equal(plain[1], staged[1])
            yield staged[0]


def make_adam(model, **options):
    """Makes the optimizer of the README, and counts the steps that it begins in backward passes."""
    made = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"bucket_size": 30000, "warmup_steps": 4, "stage": "host", **options}
    made = onebit.torch.compress(model, made, **options)
    made.begun, begin = 0, made.onebit.begin

    def counted(rate):
        made.begun += 1
        begin(rate)

    made.onebit.begin = counted
    fake_device.copies.clear()
    return made


def reset_pinned_maximum():
    """Returns the bytes of pinned memory. From then on the maximum is counted again."""
    gc.collect()
    fake_device.pinned["most"] = fake_device.pinned["now"]
    return fake_device.pinned["now"]


def check_compress(rank, size):
    """Checks that exchanges begin in the backward pass, and that each gradient is copied once, and each
    parameter once back. The pinned memory must be as the README says: half with 16 bits, since the library
    has the master values."""
    elements = sum(one.numel() for one in make_network("cpu").parameters())
    for dtype in torch.float32, torch.bfloat16:
        pinned = reset_pinned_maximum()
        for optimizer in check_same_steps(rank, make_adam, dtype=dtype):
            if device == "fake":
                assert fake_device.copies == {"cpu": PARAMETERS, "fake": PARAMETERS}, fake_device.copies
                fake_device.copies.clear()
        assert optimizer.begun == 6  # all steps but the first two
        most = fake_device.pinned["most"] - pinned
        assert device != "fake" or most == 2 * dtype.itemsize * elements, most
        optimizer.close()
        del optimizer  # frees its copies too


def check_inside_hosts(rank, size):
    """Checks two hosts of two ranks. Each rank works on its half of the elements, copies it, and has it in
    pinned memory."""
    name, socket.gethostname = socket.gethostname, lambda: f"host {rank // 2}"
    own = [dist.new_group(one) for one in ([0, 1], [2, 3])][rank // 2]
    pinned = reset_pinned_maximum()

    def make(model):
        on_host = next(model.parameters()).device.type == "cpu"
        return make_adam(model, inside=own if on_host else "auto")

    for optimizer in check_same_steps(rank, make):
        if device == "fake":
            # The last bias has only one element, so one rank's shard of it is empty, and so is the copy.
            assert fake_device.copies == {"cpu": PARAMETERS, "fake": PARAMETERS}, fake_device.copies
            fake_device.copies.clear()
    said = optimizer.describe()
    assert f"shard {rank % 2 + 1} of 2 is exchanged between 2 hosts, in the host's memory" in said
    elements = sum(-(-one.numel() // 2) for one in make_network("cpu").parameters()) - rank % 2
    assert optimizer.begun == 0
    assert device != "fake" or fake_device.pinned["most"] - pinned == 8 * elements
    optimizer.close()
    socket.gethostname = name


def check_missing_wait(rank, size):
    """Checks that the fake device of these scenarios detects a copy for which nothing waits."""
    if device != "fake":
        return
    wait, fake_device.Stream.run = fake_device.Stream.run, lambda *_: None
    module = make_network(device)
    optimizer = make_adam(DistributedDataParallel(module, bucket_cap_mb=0.1))
    run_backward(module, device, rank, 0)
    optimizer.step()
    assert optimizer.status is onebit.Status.SKIPPED and not flatten_parameters(module).isfinite().any()
    fake_device.Stream.run = wait
    optimizer.close()


def check_averaging_hook(rank, size):
    """Checks that the hook averages gradients for a torch optimizer."""
    states = []

    def make(model):
        sgd = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        states.append(onebit.torch.HookState(warmup_steps=2, optimizer=sgd))
        model.register_comm_hook(states[-1], onebit.torch.allreduce_hook)
        return sgd

    assert len(list(check_same_steps(rank, make))) == 8
    assert states[1].compressed == states[0].compressed > 0 == states[1].skipped
    for one in states:
        one.close()


def check_outer_steps(rank, size):
    """Checks that DiLoCo's exchanges are the same on the device, and that only exchanges copy
    parameters."""
    found = []
    for on in "cpu", device:
        module = make_network(on)
        inner = torch.optim.AdamW(module.parameters(), lr=1e-2)
        sgd = torch.optim.SGD(module.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        with onebit.torch.DiLoCo(module, inner, 3, outer=sgd, stage="host") as diloco:
            fake_device.copies.clear()
            for step in range(9):
                inner.zero_grad()
                run_backward(module, on, rank, step)
                inner.step()
                found.append(flatten_parameters(module))
        assert device == "cuda" or on == "cpu" or fake_device.copies == {"fake": 3 * PARAMETERS}
        assert diloco.outer.info()["exchanges"] == 3
        diloco.synchronize()
        found.append(flatten_parameters(module))
        assert is_equal_on_ranks(found[-1])
        diloco.close()
    assert all(torch.equal(*pair) for pair in zip(found[:10], found[10:]))


def check_collectives(rank, size):
    """Checks collectives on tensors of a device with a plan of the processor, both blocking and
    nonblocking."""
    comm = onebit.Communicator.torch()
    mine = torch.full((10, 5), rank + 1.0)
    for call in "allreduce", "iallreduce":
        plan = onebit.Plan(comm, 50, bits=8)
        for _ in range(3):
            given, mean = mine.to(device), torch.zeros(10, 5).to(device)
            done = getattr(plan, call)(given, mean)
            assert (done.wait() if call[0] == "i" else done) is onebit.Status.OK
            assert torch.allclose(mean.cpu(), torch.full((10, 5), (size + 1) / 2), rtol=0.01)
        assert plan.allreduce(given * float("inf"), mean) is onebit.Status.SKIPPED
        assert mean.cpu().isfinite().all() and torch.equal(given.cpu(), mine)
        wrong = onebit.Status.ERROR_ARGUMENT
        expect_status(wrong, lambda: plan.allreduce(given, mean[:3]), "has 15 elements")
    gather = onebit.Plan(comm, 50, operation="allgather", wire="dense")
    everyone = torch.zeros(size, 10, 5).to(device)
    gather.allgather(given, everyone)
    assert torch.equal(everyone.cpu()[:, 0, 0], torch.arange(1.0, size + 1))
    comm.close()


def install_backend(rank, size):
    return fake_device.install() if device == "fake" else "gloo"


if __name__ == "__main__":
    run_scenarios(globals(), install_backend, start="spawn" if device == "cuda" else "fork")
