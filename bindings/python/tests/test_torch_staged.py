"""Optimizers of parameters on a device, with copies in memory of the host: the bits of the processor.
On every device that torch has here, and on the processor's tensors as if they were a device's."""

import importlib.util
import os
import warnings

import onebit
import pytest
from conftest import launch

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not here")


def devices():
    import torch

    accelerator = getattr(torch, "accelerator", None)
    here = accelerator is not None and accelerator.is_available()
    return ["cpu", accelerator.current_accelerator().type] if here else ["cpu"]


@pytest.fixture
def comm():
    with onebit.Communicator.self_() as made:
        yield made


class Twins:
    """The same training twice: with parameters of the processor, and staged from a device."""

    def __init__(self, comm, kind, device, dtype, **options):
        import torch

        import onebit.torch

        torch.manual_seed(1)
        own = [torch.randn(300, 7), torch.randn(500), torch.randn(2, 3, 4, 5)]
        own[2] = own[2].contiguous(memory_format=torch.channels_last)
        make = getattr(onebit.torch, kind)
        self.direct = [torch.nn.Parameter(one.to(dtype)) for one in own]
        self.staged = [torch.nn.Parameter(one.clone().to(device, dtype)) for one in own]
        self.optimizers = (
            make(self.direct, lr=1e-2, comm=comm, **options),
            make(self.staged, lr=1e-2, comm=comm, stage="host", **options),
        )

    def step(self, number):
        import torch

        random = torch.Generator().manual_seed(number)
        for one, other in zip(self.direct, self.staged):
            gradient = torch.randn(one.shape, generator=random).to(one.dtype)
            one.grad, other.grad = gradient, gradient.to(other.device)
        for optimizer in self.optimizers:
            optimizer.step()

    def check(self):
        import torch

        for one, other in zip(self.direct, self.staged):
            assert torch.equal(one, other.cpu())


@pytest.mark.parametrize("kind", ["EfficientAdam", "Adam", "Momentum", "Lion"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.filterwarnings("error::onebit.OnebitWarning")
def test_bits_are_those_of_the_processor(comm, kind, dtype):
    import torch

    for device in devices():
        twins = Twins(comm, kind, device, getattr(torch, dtype))
        for step in range(6):
            twins.step(step)
            twins.check()
        state = [one.state_dict() for one in twins.optimizers]
        for step in range(6, 9):
            twins.step(step)
        for optimizer, saved in zip(twins.optimizers, state):
            optimizer.load_state_dict(saved)
        twins.check()


def test_parameters_of_16_bits_have_master_values(comm):
    """Steps of a thousandth, which bfloat16 does not see beside 1."""
    import torch

    import onebit.torch

    for device in devices():
        one = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16, device=device))
        optimizer = onebit.torch.EfficientAdam([one], lr=1e-3, comm=comm, stage="host")
        for _ in range(20):
            one.grad = torch.ones_like(one)
            optimizer.step()
        masters = optimizer.state[one]["parameter"]
        assert masters.dtype == torch.float32 and masters.device.type == "cpu"
        assert torch.allclose(masters, torch.tensor(0.98), atol=1e-4), masters
        assert torch.equal(one.detach().cpu(), masters.to(torch.bfloat16))


def test_what_the_program_writes_is_taken(comm):
    import torch

    for device in devices():
        twins = Twins(comm, "EfficientAdam", device, torch.float32)
        for step in range(3):
            twins.step(step)
            with torch.no_grad():
                for one in twins.direct[0], twins.staged[0]:
                    one.clamp_(-0.5, 0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            twins.step(3)
        twins.check()
        for one in twins.direct[0], twins.staged[0]:
            one.data.mul_(0.5)  # after step 4, which is looked at
        with pytest.warns(onebit.OnebitWarning, match="through .data after step 4"):
            twins.step(4)
        for step in range(5, 8):
            for one in twins.direct[1], twins.staged[1]:
                one.data.mul_(0.5)
            twins.step(step)
        twins.check()


def test_choices(comm, monkeypatch):
    import torch

    import onebit.torch

    parameter = [torch.nn.Parameter(torch.ones(3))]
    with pytest.raises(onebit.Error, match="stage is 'gpu', not one of auto, host, device"):
        onebit.torch.Adam(parameter, comm=comm, stage="gpu")
    monkeypatch.delenv("ONEBIT_STAGE", raising=False)
    assert onebit.torch.Adam(parameter, comm=comm)._stage is None
    assert onebit.torch.Adam(parameter, comm=comm, stage="host")._stage is not None
    monkeypatch.setenv("ONEBIT_STAGE", "always")
    assert onebit.torch.Adam(parameter, comm=comm)._stage is not None


class LateStream:
    """Copies of a stream that is late: they are made when somebody waits for them."""

    def __init__(self):
        self.waiting = []

    def record_event(self):
        return self

    def synchronize(self):
        while self.waiting:
            to, source = self.waiting.pop(0)
            to.copy_(source)


def test_a_late_copy_is_waited_for(monkeypatch):
    import torch

    from onebit.torch.staged import Stage

    stage, stream, told = Stage(), LateStream(), []
    stage.add(torch.zeros(4), torch.zeros(4))
    stage.add(torch.zeros(4), torch.zeros(4))
    stage._streams[torch.device("cpu")] = stream
    monkeypatch.setattr(
        stage, "_copy", lambda to, source, _: stream.waiting.append((to, source.clone()))
    )

    def tell(number):
        assert torch.equal(stage.gradient(number, torch.ones(4)), torch.ones(4)), number
        told.append(number)

    stage._gradients = {0: torch.zeros(4), 1: torch.zeros(4)}
    stage.send(0, torch.ones(4))
    stage.end_bucket(tell)
    assert told == [] and not stage._gradients[0].any()
    stage.send(1, torch.ones(4))
    stage.end_bucket(tell)
    assert told == [0]
    stage.send(1, torch.full((4,), 2.0))
    stage.wait()
    assert torch.equal(stage._gradients[1], torch.full((4,), 2.0))


ALWAYS = {
    "torch_carry_ranks.py": "hook,scaler,skipped,schedulers,compressed",
    "torch_ranks.py": "hook,own_adam,state_goes_on",
    "torch_resume_ranks.py": "own,half",
}


@pytest.mark.skipif(os.environ.get("ONEBIT_STAGE") == "always", reason="every test is staged")
@pytest.mark.parametrize("program", ALWAYS)
def test_what_is_tested_without(monkeypatch, program):
    """Scenarios of the processor's tensors, with copies of these."""
    monkeypatch.setenv("ONEBIT_STAGE", "always")
    assert launch(program, ALWAYS[program], 2).endswith("all well\n")


def test_models_on_a_device():
    import torch

    if not torch.cuda.is_available():
        fake_device = pytest.importorskip("fake_device")
        if not fake_device.is_possible():
            pytest.skip("this torch has no device of Python's, and no CUDA device")
    for scenarios, ranks in ("two_lines,half,nobody_waits,averaged,outer_steps,collectives", 2), ("inside_first", 4):
        assert launch("torch_device_ranks.py", scenarios, ranks).endswith("all well\n")
