"""Scenarios of test_torch.py for what programs do with parameters and optimizers, started like torch_ranks.py."""

import copy

from torch_common import (
    draw_normal,
    expect_error,
    flatten_parameters,
    is_equal_on_ranks,
    make_layers,
    record_warnings,
    run_scenarios,
)

import onebit.torch
import torch
import torch.distributed as dist
from onebit.torch.local import LocalSteps
from onebit.torch.stateful import StatefulOptimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def compute_loss(model, rank, step, dtype=torch.float32):
    points = draw_normal(1000 * rank + step, 8, 20).to(dtype)
    return ((model(points) - points[:, :1].sin()) ** 2).mean()


# --- Parameters that are given other memory -------------------------------------------------------


def make_compressed(module, **options):
    model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    optimizer = onebit.torch.compress(model, optimizer, warmup_steps=4, **options)
    return model, optimizer.step, optimizer.close


def make_local(module):
    comm, optimizer = onebit.Communicator.torch(), torch.optim.AdamW(module.parameters(), lr=1e-2)
    local = LocalSteps(comm, optimizer, 3)

    def step():
        optimizer.step()
        local.step()

    return module, step, lambda: (local.synchronize(), local.part(), local.close(), comm.close())


def make_diloco(module):
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    outer = onebit.torch.DiLoCo(module, optimizer, sync_every=3).__enter__()
    return module, optimizer.step, lambda: (outer.synchronize(), outer.state_dict(), outer.close())


def train_and_average(make, dtype, assigns):
    """Trains, and after some steps replaces the parameters by averages, which are assigned or written in place."""
    rank, module = dist.get_rank(), make_layers(20, 90, 1).to(dtype)
    model, step, close = make(module)
    average = [one.detach().clone() for one in module.parameters()]
    for number in range(20):
        module.zero_grad()
        compute_loss(model, rank, number, dtype).backward()
        step()
        for one, mean in zip(module.parameters(), average) if number in (2, 7, 8, 15) else ():
            mean.mul_(0.9).add_(one.detach(), alpha=0.1)
            if assigns and number != 15:
                one.data = mean.clone()
            else:
                with torch.no_grad():
                    one.copy_(mean)
    close()
    assert is_equal_on_ranks(flatten_parameters(module))
    return flatten_parameters(module)


def check_moved_parameters(rank, size):
    """Checks that assigning one.data has the same result as writing in place, also if the library has its own copy of
    the parameters."""
    host, late = {"stage": "host"}, {"overlap": False}
    ways = [lambda module, of=of: make_compressed(module, **of) for of in ({}, host, late)]
    has_hooks = hasattr(torch.optim.Optimizer, "register_step_post_hook")
    for make in [*ways, make_local, *([make_diloco] if has_hooks else [])]:
        for dtype in (torch.float32, torch.bfloat16) if hasattr(torch, "compile") else (torch.float32,):
            results = [train_and_average(make, dtype, assigns) for assigns in (True, False)]
            assert torch.equal(*results), (make, dtype, (results[0] - results[1]).abs().max())
    for change in (lambda one: one.to(torch.bfloat16), lambda one: one[:1].clone()):
        module = make_layers(20, 90, 1)
        model, step, close = make_compressed(module)
        compute_loss(model, rank, 0).backward()
        first = next(module.parameters())
        first.grad, first.data = None, change(first.data)
        expect_error("parameter 0 has changed its size, strides, type or device", step)
        close()


# --- Several models, and parameters of no model --------------------------------------------------


class TwoModels:
    """Two DistributedDataParallel models in a row, with one optimizer, as in DLRM."""

    def __init__(self, saved=None):
        self.modules = [make_layers(20, 60, 20), make_layers(20, 60, 1)]
        self.models = [DistributedDataParallel(one) for one in self.modules]
        self.optimizer = torch.optim.SGD([{"params": one.parameters()} for one in self.modules], lr=0.02)
        for one in self.models:
            onebit.torch.compress(one, self.optimizer)
        if saved:
            for one, state in zip(self.modules, saved["models"]):
                one.load_state_dict(state)
            self.optimizer.load_state_dict(saved["optimizer"])

    def train(self, steps):
        for step in steps:
            self.optimizer.zero_grad()
            compute_loss(lambda points: self.models[1](self.models[0](points)), dist.get_rank(), step).backward()
            self.optimizer.clip_grad_norm_(0.5)
            self.optimizer.step()
        return torch.cat([flatten_parameters(one) for one in self.modules])

    def saved(self):
        models = [one.state_dict() for one in self.modules]
        return copy.deepcopy({"models": models, "optimizer": self.optimizer.state_dict()})


def check_two_models(rank, size):
    """Checks that one optimizer saves the residuals of two models, its own or those of all ranks, and reports both."""
    run = TwoModels()
    run.train(range(10))
    own = run.saved()
    run.optimizer.consolidate_state_dict()
    whole = [run.saved()]
    dist.broadcast_object_list(whole)
    wanted = run.train(range(10, 20))
    assert is_equal_on_ranks(wanted)
    states = [None] * size
    dist.all_gather_object(states, own["optimizer"])
    for saved in own, whole[0], {**own, "optimizer": states}:
        other = TwoModels(saved)
        assert torch.equal(other.train(range(10, 20)), wanted)
        other.optimizer.close()
    report, elements = run.optimizer.report(), len(wanted)
    assert report.steps == 20 and report.dense_bytes >= 20 * 4 * elements * 2 * (size - 1) // size, report
    names = {name for of in run.optimizer.torch_state_dict()["state"].values() for name in of}
    assert not any(name.startswith("hook") for name in names), names
    run.optimizer.close()
    again = TwoModels()
    again.optimizer.close()
    for one in again.models:  # both hooks are closed
        onebit.torch.compress(one, again.optimizer)
    for one, state in zip(again.modules, own["models"]):
        one.load_state_dict(state)
    again.optimizer.load_state_dict(own["optimizer"])
    with record_warnings() as said:
        assert torch.equal(again.train(range(10, 20)), wanted)
        names = {name for name in again.saved()["optimizer"]["state"][0] if name.startswith("hook")}
    assert names == {f"hook_{rank}", f"hook2_{rank}"}, names
    assert not any("closed" in one for one in said), said
    again.optimizer.close()
    whole = nn.ModuleDict(dict(zip(("bottom", "top"), again.models)))
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.02)
    expect_error("with 2 DistributedDataParallel models (bottom, top)", lambda: onebit.torch.compress(whole, optimizer))


def check_foreign_parameters(rank, size):
    """Checks that rank 0 names a parameter of no model, and that each rank steps it by its own gradient. If the program
    has its own copies of the model's parameters, no advice to freeze these may be given."""
    module, own = make_layers(20, 90, 1), nn.Parameter(torch.zeros(4))
    model = DistributedDataParallel(module)
    with record_warnings() as said:
        optimizer = onebit.torch.compress(model, torch.optim.AdamW([*module.parameters(), own]))
    assert said == (["left as without this call: unnamed 0 (is not of the model that is wrapped)"] if not rank else [])
    for step in range(3):
        optimizer.zero_grad()
        (compute_loss(model, rank, step) + (own - rank).square().sum()).backward()
        optimizer.step()
    assert is_equal_on_ranks(flatten_parameters(module)) and bool(own.any()) == bool(rank)
    optimizer.close()
    module = make_layers(20, 90, 1).half()
    copies = nn.Parameter(flatten_parameters(module).float())
    with record_warnings() as said:
        onebit.torch.compress(DistributedDataParallel(module), torch.optim.AdamW([copies])).close()
    assert len(said) == 2 * (rank == 0) and not any("requires_grad_" in one for one in said), said


# --- Optimizers of programs -----------------------------------------------------------------------


class Counting(torch.optim.RMSprop):
    """Has an entry of no parameter in its state, and another argument of step."""

    def step(self, closure=None, *, scale=1.0):
        self.state["scale"] = scale
        return super().step(closure)


class Wrapping(torch.optim.Optimizer):
    """Wraps an optimizer, and has no "state" in its saved state."""

    def __init__(self, inner):
        self.inner, self.defaults = inner, inner.defaults
        for name in "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks":
            setattr(self, name, {})

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def step(self, closure=None):
        return self.inner.step(closure)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def state_dict(self):
        return {"inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict):
        assert list(state_dict) == ["inner"]
        self.inner.load_state_dict(state_dict["inner"])


def in_two_groups(module, kind, first, **options):
    """Returns an optimizer with other options for the first half of the parameters."""
    every = list(module.parameters())
    return kind([{"params": every[:2], **first}, {"params": every[2:]}], **options)


OPTIMIZERS = {
    "a rate of 0": lambda of: in_two_groups(of, torch.optim.AdamW, {"lr": 0.0}, lr=5e-3),
    "amsgrad": lambda of: in_two_groups(of, torch.optim.AdamW, {"amsgrad": True}, lr=5e-3),
    "nesterov": lambda of: in_two_groups(of, torch.optim.SGD, {"nesterov": True}, lr=0.02, momentum=0.9),
    "betas": lambda of: in_two_groups(of, torch.optim.Adam, {"betas": (0.8, 0.99)}, lr=5e-3),
    "an entry of no parameter": lambda of: Counting(of.parameters(), lr=5e-3),
    "a wrapper": lambda of: Wrapping(torch.optim.RMSprop(of.parameters(), lr=5e-3)),
}


def train_with(name, replace, scaler=None, saved=None, steps=range(50)):
    """Trains with an optimizer of a program. Returns the module, and the optimizer."""
    module = make_layers(20, 90, 1)
    if saved:
        module.load_state_dict(saved[0])
    model = DistributedDataParallel(module)
    optimizer = replace(model, OPTIMIZERS[name](module))
    if saved:
        optimizer.load_state_dict(saved[1])
    more = {"scale": 0.5} if name == "an entry of no parameter" else {}
    for step in steps:
        optimizer.zero_grad()
        loss = compute_loss(model, dist.get_rank(), step)
        (scaler.scale(loss) if scaler else loss).backward()
        scaler.step(optimizer, **more) if scaler else optimizer.step(**more)
        if scaler:
            scaler.update()
    return module, optimizer


def compute_test_loss(module):
    with torch.no_grad():
        return float(sum(compute_loss(module, 50, step) for step in range(20)))


def check_optimizer(name, replace, wanted):
    """Trains with a changed optimizer to a test loss, also after loading its state, and with a GradScaler."""
    module, optimizer = train_with(name, replace)
    loss = compute_test_loss(module)
    assert is_equal_on_ranks(flatten_parameters(module)) and loss < 1.2 * wanted, (name, loss, wanted)
    if name == "a rate of 0":
        moved = [not torch.equal(*pair) for pair in zip(module.parameters(), make_layers(20, 90, 1).parameters())]
        assert moved == [False, False, True, True], moved
    saved = copy.deepcopy([module.state_dict(), optimizer.state_dict()])
    train_with(name, replace, saved=saved, steps=range(50, 53))[1].close()
    optimizer.close()
    if isinstance(optimizer, StatefulOptimizer) or getattr(getattr(optimizer, "automatic", None), "made", None):
        expect_error("the optimizer is closed: take its state before close()", optimizer.step)
        again = "from onebit.torch already" if isinstance(optimizer, StatefulOptimizer) else "in one bit"
        expect_error(again, lambda: replace(DistributedDataParallel(module), optimizer))
    else:
        optimizer.step()
        replace(DistributedDataParallel(module), optimizer).close()
    if hasattr(torch, "amp") and hasattr(torch.amp, "GradScaler"):
        module, optimizer = train_with(name, replace, torch.amp.GradScaler("cpu", init_scale=1024.0))
        loss = compute_test_loss(module)
        assert loss < 1.2 * wanted, (name, loss, wanted)
        optimizer.close()


def check_optimizers(rank, size):
    """Checks that optimizers of programs train with compress and auto as without, and go on after close() or say why
    not."""
    for name in OPTIMIZERS:
        wanted = compute_test_loss(train_with(name, lambda _, optimizer: optimizer)[0])
        with record_warnings():
            for replace in onebit.torch.compress, onebit.torch.auto:
                check_optimizer(name, replace, wanted)
    check_way_back()


def check_way_back():
    decoupled = {"decoupled_weight_decay": True}
    if set(decoupled) <= set(torch.optim.Adam([torch.zeros(1)]).defaults):
        module = make_layers(20, 90, 1)
        optimizer = torch.optim.Adam(module.parameters(), weight_decay=0.1, **decoupled)
        optimizer = onebit.torch.compress(DistributedDataParallel(module), optimizer)
        compute_loss(module, 1, 0).backward()
        optimizer.step()
        assert optimizer.torch_state_dict()["param_groups"][0]["decoupled_weight_decay"] is True
        optimizer.close()


def check_beside_one_bit(rank, size):
    """Checks a second model of an optimizer that is compressed already, types that are not compressed, and join() with
    several passes in a step."""
    for replace in onebit.torch.compress, onebit.torch.auto:
        modules = make_layers(20, 90, 20), make_layers(20, 30, 1)
        first, second = map(DistributedDataParallel, modules)
        optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=5e-3)
        with record_warnings() as said:
            optimizer = replace(first, optimizer)
            assert replace(second, optimizer) is optimizer
        assert any("gradients stay dense: its optimizer" in one for one in said) == (not rank), said
        for step in range(45):  # until auto has chosen
            optimizer.zero_grad()
            compute_loss(nn.Sequential(first, second), rank, step).backward()
            optimizer.step()
        assert all(is_equal_on_ranks(flatten_parameters(one)) for one in modules)
        assert optimizer.state[nn.Parameter(torch.zeros(1))] == {}  # as in torch's
        optimizer.close()
        module = make_layers(20, 90, 1).double()
        with record_warnings() as said:
            optimizer = replace(DistributedDataParallel(module), torch.optim.AdamW(module.parameters()))
        words = "nothing is compressed: its parameters have type torch.float64"
        assert said == [words] * (not rank) and type(optimizer) is torch.optim.AdamW, said
        optimizer.close()
    module = make_layers(20, 90, 1)
    model = DistributedDataParallel(module)
    optimizer = onebit.torch.compress(model, torch.optim.AdamW(module.parameters()))

    def accumulate():
        with model.join():
            for step in range(2):
                compute_loss(model, rank, step).backward()

    expect_error("join() is not supported with several backward passes", accumulate)
    optimizer.close()


def check_diloco(rank, size):
    """Checks DiLoCo with parameters in another order of memory, with a layer that is thawed later, and with wrong
    calls."""
    if not hasattr(torch.optim.Optimizer, "register_step_post_hook"):
        return
    torch.manual_seed(3)
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 1)).to(memory_format=torch.channels_last)
    module[2].requires_grad_(False)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    diloco = onebit.torch.DiLoCo(module, optimizer, sync_every=3)

    def train(steps):
        for step in steps:
            optimizer.zero_grad()
            module(draw_normal(100 * rank + step, 4, 3, 8, 8)).square().mean().backward()
            optimizer.step()

    with record_warnings() as said, diloco:
        expect_error("entered already", diloco.__enter__)
        train(range(10))
        diloco.synchronize()
        assert is_equal_on_ranks(flatten_parameters(module)) and not said, said
        module[2].requires_grad_(True)
        train(range(10, 13))
    assert len(said) == 1 and "2.weight, 2.bias: frozen when DiLoCo was made" in said[0], said
    before = diloco.outer.info()["steps"]
    train(range(13, 15))
    assert before == diloco.outer.info()["steps"] == 13
    diloco.close()
    for wrong in 0, -1, 2.5, None:
        expect_error(f"sync_every is {wrong!r}", lambda: onebit.torch.DiLoCo(module, optimizer, sync_every=wrong))


if __name__ == "__main__":
    run_scenarios(globals())
