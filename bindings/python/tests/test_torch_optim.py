"""Tests the optimizers in the form that torch programs use. Copies in the host's memory must give the same
bits as no copies, for parameters on each available torch device and on the processor. torch_device_ranks.py
checks the same on several ranks."""

import os
import warnings

import onebit
import pytest
from conftest import run_program

torch = pytest.importorskip("torch")

import onebit.torch  # noqa: E402
from onebit.torch import remainder  # noqa: E402

KINDS = ("EfficientAdam", "Adam", "AdamW", "Lamb", "ZeroOneAdam", "Momentum", "Lion")


@pytest.fixture
def comm():
    with onebit.Communicator.self_() as made:
        yield made


@pytest.fixture
def made(comm):
    """Provides made(kind, **options): it creates an optimizer of one rank, and its parameters."""

    def make(kind="Adam", **options):
        parameters = [torch.nn.Parameter(torch.ones(5)), torch.nn.Parameter(torch.ones(3))]
        return getattr(onebit.torch, kind)(parameters, comm=comm, **options), parameters

    return make


def test_device_of_steps():
    """torch's fused and capturable optimizers have the number of steps on the parameter's device."""
    parameter = torch.nn.Parameter(torch.empty(1, device="meta"))
    for fused, capturable in (True, False), (False, True), (None, False):
        found = remainder.device_of_step({"fused": fused, "capturable": capturable}, parameter)
        assert torch.device(found).type == ("meta" if fused or capturable else "cpu")


def test_groups_have_the_keys_of_torch(made):
    twins = {"Momentum": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
    for kind in KINDS:
        optimizer, parameters = made(kind)
        dense = twins.get(kind, torch.optim.Adam)(parameters, lr=1e-3)
        missing = set(dense.param_groups[0]) - set(optimizer.param_groups[0])
        assert not missing, (kind, missing)
        assert set(optimizer.defaults) == set(optimizer.param_groups[0]) - {"params"}
        assert kind in repr(optimizer) and "lr: 0.001" in repr(optimizer)
        assert optimizer.defaults["weight_decay"] == (0.01 if kind == "AdamW" else 0)
    optimizer, _ = made("Adam", beta1=0.8, betas=(0.9, 0.95), epsilon=1e-6)
    assert optimizer.defaults["betas"] == (0.8, 0.95) and optimizer.defaults["eps"] == 1e-6
    assert made("Lion")[0].defaults["betas"] == (0.9, 0.99)
    made("Adam", foreach=True, fused=False, lr=0)[0].step()


def test_steps_are_those_of_torch(made):
    """Compares steps of the warm-up on one rank with torch's: Adam with decoupled and with coupled decay,
    and momentum SGD."""
    never = {"freeze_step": onebit.FREEZE_NEVER}
    cases = [
        ("AdamW", {**never, "betas": (0.8, 0.95), "eps": 1e-6}, torch.optim.AdamW,
         {"betas": (0.8, 0.95), "eps": 1e-6}),
        ("Adam", {**never, "weight_decay": 0.1, "decoupled_weight_decay": False},
         torch.optim.Adam, {"weight_decay": 0.1}),
        ("Momentum", {"warmup_steps": 1000, "momentum": 0.7, "weight_decay": 0.1,
                      "decoupled_weight_decay": False},
         torch.optim.SGD, {"momentum": 0.7, "weight_decay": 0.1}),
    ]
    for kind, options, twin, of_twin in cases:
        optimizer, parameters = made(kind, lr=0.1, **options)
        theirs = [torch.nn.Parameter(one.detach().clone()) for one in parameters]
        dense = twin(theirs, lr=0.1, **of_twin)
        calls = []
        hooks = hasattr(optimizer, "register_step_pre_hook")  # from torch 2.0 on
        if hooks:
            optimizer.register_step_pre_hook(lambda *given: calls.append(given))
        for step in range(4):

            def closure(of):
                for number, one in enumerate(of):
                    one.grad = torch.arange(1.0, 1 + one.numel()) * (step - 1.2) + number
                return 7

            assert optimizer.step(lambda: closure(parameters)) == 7
            dense.step(lambda: closure(theirs))
        assert len(calls) == 4 * hooks
        for mine, one in zip(parameters, theirs):
            assert torch.allclose(mine, one, atol=1e-6), (kind, mine, one)


def test_gradients_may_have_other_strides(comm):
    """Checks parameters or gradients whose elements are not in the usual order in memory."""
    torch.manual_seed(0)
    values, gradient = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5)
    last = torch.channels_last
    results = []
    for way in "contiguous", "parameter", "gradient", "both":
        one = torch.nn.Parameter(values.clone())
        one.grad = gradient.clone()
        if way in ("parameter", "both"):
            one = torch.nn.Parameter(values.to(memory_format=last))
            one.grad = gradient.clone()
        if way in ("gradient", "both"):
            one.grad = gradient.to(memory_format=last)
        optimizer = onebit.torch.Adam([one], lr=0.1, comm=comm)
        optimizer.step()
        results.append(one.detach().contiguous())
    assert all(torch.equal(results[0], one) for one in results)


def test_a_state_that_is_empty_costs_no_copy(made, monkeypatch):
    """Checks that `compress` does not copy the library's state when it takes the empty state of a training
    that begins."""
    calls = []
    monkeypatch.setattr(onebit.Adam, "save_whole", lambda *given: calls.append(given) or save(*given))
    save = onebit.optimizer.Optimizer.save_whole
    optimizer, parameters = made("Adam")
    optimizer._load({})
    assert not calls
    state = {one: {"exp_avg": torch.ones_like(one), "exp_avg_sq": torch.ones_like(one),
                   "step": torch.tensor(3.0)} for one in parameters}  # fmt: skip
    optimizer._load(state)
    assert len(calls) == 1 and optimizer.onebit.info()["steps"] == 3


def test_scalers_are_found_in_their_step(made):
    """Checks that the GradScaler that makes a step is found, and no other existing one."""
    from onebit.torch.backward import scalers_of

    if not hasattr(torch.amp, "GradScaler"):
        pytest.skip("this torch scales on CUDA only")

    class Scaler(torch.amp.GradScaler):
        def step(self, optimizer):  # does not call the base class
            return optimizer.step()

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            found.append(scalers_of(self))

    found, parameter = [], torch.nn.Parameter(torch.ones(3))
    optimizer, scalers = Watched([parameter], lr=0.1), [torch.amp.GradScaler("cpu"), Scaler("cpu")]
    for one in (*scalers, torch.amp.GradScaler("cpu", enabled=False)):
        parameter.grad = torch.ones(3)
        if one.is_enabled():
            one.scale(torch.ones(()))
            one.unscale_(optimizer)
        one.step(optimizer)
    optimizer.step()
    assert found == [[scalers[0]], [scalers[1]], [], []]


def test_empty_parameters(comm):
    empty = torch.nn.Parameter(torch.empty(0, 3))
    empty.grad = torch.empty(0, 3)
    onebit.torch.Adam([empty], comm=comm).step()
    none = [torch.nn.Parameter(torch.ones(3), requires_grad=False)]
    onebit.torch.Adam(none, comm=comm).step()


def test_one_rank_of_several_hosts_saves(on_ranks):
    """Checks a state that has the moments of only one rank's own elements."""
    saved = [None]

    def run(comm):
        parameters = [torch.nn.Parameter(torch.ones(5000)), torch.nn.Parameter(torch.ones(3000))]
        optimizer = onebit.torch.EfficientAdam(parameters, comm=comm, schedule="hierarchical")

        def steps(first, end):
            for step in range(first, end):
                for one in parameters:
                    random = torch.Generator().manual_seed(100 * comm.rank + step)
                    one.grad = torch.randn(one.shape, generator=random)
                optimizer.step()

        steps(0, 3)
        own = optimizer.state[parameters[1]].get("own_variance_0")
        if comm.rank == 0:
            assert own is None or (own == 0).any()
            saved[0] = optimizer.state_dict()
        optimizer.onebit.compare()  # waits until rank 0 has saved
        optimizer.load_state_dict(saved[0])
        for one in optimizer.state.values():
            moments = [value for name, value in one.items() if name.startswith("own_variance")]
            assert all((some >= 0).all() and some.isfinite().all() for some in moments)
        steps(3, 5)
        return torch.cat([one.detach() for one in parameters])

    found = on_ranks(4, run, hosts=2)
    assert all(torch.equal(found[0], one) and one.isfinite().all() for one in found)


def test_moments_of_hosts(on_ranks):
    """Checks torch's moments from a hierarchical schedule, in which each rank has a part of its host's moments, by those
    of one rank per host that has the host's mean gradients."""

    def train(comm, ranks):
        parameters = [torch.nn.Parameter(torch.ones(5000)), torch.nn.Parameter(torch.ones(70, 100))]
        schedule = "hierarchical" if ranks == 1 else "exchange"
        optimizer = onebit.torch.EfficientAdam(parameters, comm=comm, schedule=schedule, warmup_steps=onebit.WARMUP_NONE)
        for step in range(8):
            for one in parameters:
                drawn = [
                    torch.randn(one.shape, generator=torch.Generator().manual_seed(100 * rank + step)) + 0.3
                    for rank in range(comm.rank * ranks, (comm.rank + 1) * ranks)
                ]
                one.grad = torch.stack(drawn).mean(0)
            optimizer.step()
        own, of_means = remainder.moments_of(optimizer, False), remainder.moments_of(optimizer)
        return [[of[one][name].clone() for one in parameters] for of in (own, of_means)
                for name in ("exp_avg", "exp_avg_sq")]  # fmt: skip

    flat = on_ranks(2, lambda comm: train(comm, 2))
    found = on_ranks(4, lambda comm: train(comm, 1), hosts=2)
    for rank in found:
        for of_rank, of_first, wanted in zip(rank, found[0], flat[0]):
            assert all(map(torch.equal, of_rank, of_first))
            for one, other in zip(of_rank, wanted):
                assert (one - other).norm() < 0.02 * other.norm(), (one, other)


def test_one_rank_with_an_invalid_argument(on_ranks):
    """All ranks get an error, and their next call of the communicator is the same."""

    def attempt(comm):
        for options in ({"betas": (0.0, 0.9)}, {"frobnicate": 1}):
            with pytest.raises((onebit.Error, TypeError)):
                onebit.torch.Adam([torch.nn.Parameter(torch.ones(5))], comm=comm, **(options if comm.rank else {}))
        found = torch.empty(comm.size)
        with onebit.Plan(comm, 1, operation="allgather", wire="dense") as plan:
            plan.allgather(torch.full((1,), float(comm.rank)), found)
        return found.tolist()

    assert on_ranks(3, attempt) == [[0.0, 1.0, 2.0]] * 3


def test_invalid_arguments_are_refused(made):
    refused = {
        "negate the loss": {"maximize": True},
        "no such variant": {"amsgrad": True},
        "not recorded by autograd": {"differentiable": True},
        "wait for other ranks": {"capturable": True},
        "betas of group 0 is": {"betas": (0.0, 0.9)},
        "eps is": {"eps": 0},
        "lr of group 0 is nan": {"lr": float("nan")},
        "weight_decay of group 0": {"weight_decay": -1},
    }
    for words, options in refused.items():
        with pytest.raises(onebit.Error, match=words):
            made("Adam", **options)
    with pytest.raises(onebit.Error, match="heavy-ball"):
        made("Momentum", nesterov=True)
    with pytest.raises(TypeError, match="Adam has no momentum"):
        made("Adam", momentum=0.9)
    with pytest.raises(TypeError, match="no option 'frobnicate'"):
        made("Adam", frobnicate=1)
    with onebit.Communicator.self_() as comm, pytest.raises(TypeError, match="comm="):
        onebit.torch.Adam([torch.nn.Parameter(torch.ones(3))], comm)
    optimizer, parameters = made("Adam")
    with pytest.raises(onebit.Error, match="cannot be added"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    optimizer.param_groups[0]["betas"] = (0.9, 0.99)
    with pytest.raises(onebit.Error, match="only the first beta can change"):
        optimizer.step()
    table, comm = torch.nn.Parameter(torch.ones(3)), optimizer.comm
    with pytest.raises(onebit.Error, match="tables has something that is not"):
        onebit.torch.EfficientAdam([table], comm=comm, tables=[torch.ones(3)])
    with pytest.raises(onebit.Error, match="ONEBIT_TABLE, which only Efficient-Adam supports"):
        onebit.torch.Adam([table], comm=comm, tables=[table])
    with pytest.raises(onebit.Error, match="is not dense"):
        onebit.torch.Adam([torch.nn.Parameter(torch.ones(4, 4)[:, :2])], comm=optimizer.comm)


# --- Copies in memory of the host -----------------------------------------------------------------


def list_devices():
    accelerator = getattr(torch, "accelerator", None)
    here = accelerator is not None and accelerator.is_available()
    return ["cpu", accelerator.current_accelerator().type] if here else ["cpu"]


class Twins:
    """The same training twice: once with parameters on the processor, once staged from a device."""

    def __init__(self, comm, kind, device, dtype, **options):
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
        random = torch.Generator().manual_seed(number)
        for one, other in zip(self.direct, self.staged):
            gradient = torch.randn(one.shape, generator=random).to(one.dtype)
            one.grad, other.grad = gradient, gradient.to(other.device)
        for optimizer in self.optimizers:
            optimizer.step()

    def check(self):
        for one, other in zip(self.direct, self.staged):
            assert torch.equal(one, other.cpu())


@pytest.mark.parametrize("kind", ["EfficientAdam", "Adam", "Momentum", "Lion"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.filterwarnings("error::onebit.OnebitWarning")
def test_bits_are_those_of_the_processor(comm, kind, dtype):
    for device in list_devices():
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


@pytest.mark.parametrize("stage", ["auto", "host"])
def test_weights_of_16_bits_that_are_loaded_stay(comm, stage):
    """Checks that loaded 16-bit weights stay. Torch's state has no master values, so the earlier ones must
    be dropped."""
    def stepped(kind, **options):
        one = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
        optimizer = kind([one], lr=1e-3, **options)
        one.grad = torch.ones_like(one)
        optimizer.step()
        return one, optimizer

    saved = stepped(torch.optim.AdamW)[1].state_dict()
    one, optimizer = stepped(onebit.torch.EfficientAdam, comm=comm, stage=stage)
    with torch.no_grad():
        one.fill_(3.0)
    optimizer.load_state_dict(saved)
    assert (one == 3).all()
    for _ in range(20):  # each step changes a thousandth, which is less than rounding
        optimizer.step()
    assert (optimizer.state[one]["parameter"] - 2.98).abs().max() < 0.005 and (one < 3).all()


def test_writes_of_the_program_are_kept(comm):
    for device in list_devices():
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
            one.data.mul_(0.5)  # after step 4, which has a check
        with pytest.warns(onebit.OnebitWarning, match="through .data after step 4"):
            twins.step(4)
        for step in range(5, 8):
            for one in twins.direct[1], twins.staged[1]:
                one.data.mul_(0.5)
            twins.step(step)
        twins.check()


def test_choice_of_copies(comm, monkeypatch):
    parameter = [torch.nn.Parameter(torch.ones(3))]
    with pytest.raises(onebit.Error, match="stage is 'gpu', not one of auto, host, device"):
        onebit.torch.Adam(parameter, comm=comm, stage="gpu")
    monkeypatch.delenv("ONEBIT_STAGE", raising=False)
    assert onebit.torch.Adam(parameter, comm=comm)._stage is None
    assert onebit.torch.Adam(parameter, comm=comm, stage="host")._stage is not None
    monkeypatch.setenv("ONEBIT_STAGE", "always")
    assert onebit.torch.Adam(parameter, comm=comm)._stage is not None


ALWAYS = {
    "torch_carry_ranks.py": "check_hook,check_grad_scaler,check_skipped_steps,check_schedulers,check_compress",
    "torch_ranks.py": "check_hook,check_resumed_state",
    "torch_resume_ranks.py": "check_resumed,check_half_precision",
}


@pytest.mark.skipif(os.environ.get("ONEBIT_STAGE") == "always", reason="every test is staged")
@pytest.mark.parametrize("program", ALWAYS)
def test_scenarios_of_the_processor_with_copies(monkeypatch, program):
    """Runs scenarios of the processor's tensors with copies of these tensors."""
    monkeypatch.setenv("ONEBIT_STAGE", "always")
    assert run_program(program, ALWAYS[program], 2).endswith("all well\n")


def test_models_on_a_device():
    if not torch.cuda.is_available():
        fake_device = pytest.importorskip("fake_device")
        if not fake_device.is_possible():
            pytest.skip("this torch has no device of Python's, and no CUDA device")
    for scenarios, ranks in (
        ("check_compress,check_missing_wait,check_averaging_hook,check_outer_steps,check_collectives", 2),
        ("check_inside_hosts", 4),
    ):
        assert run_program("torch_device_ranks.py", scenarios, ranks).endswith("all well\n")
