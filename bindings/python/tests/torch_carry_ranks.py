"""Scenarios of test_torch.py: `python torch_carry_ranks.py SCENARIOS RANKS`, started like torch_ranks.py."""

import contextlib
import copy
import os
import pickle
import signal
import threading
import warnings

from torch_common import (
    draw_normal,
    expect_error,
    expect_status,
    flatten_parameters,
    is_equal_on_ranks,
    make_layers,
    record_warnings,
    run_scenarios,
)

import onebit
import onebit.torch
import torch
import torch.distributed as dist
from onebit import Status
from torch import nn
from torch.nn.parallel import DistributedDataParallel

KINDS = ("EfficientAdam", "Adam", "Lamb", "ZeroOneAdam", "Momentum", "Lion")


def make_network():
    """Makes a model whose gradients fill three buckets of DistributedDataParallel, and of onebit
    (bucket_size=30000)."""
    return make_layers(20, 160, 160, 160, 1)


def compute_loss(model, rank, step, count=8):
    points = draw_normal(1000 * rank + step, count, 20)
    return ((model(points) - points[:, :1].sin()) ** 2).mean()


def make_optimizer(model, comm, kind="EfficientAdam", **options):
    options = {"lr": 1e-2, "bucket_size": 30000, "comm": comm, **options}
    return getattr(onebit.torch, kind)(model.parameters(), **options)


def wrap_model(model, **options):
    return DistributedDataParallel(model, bucket_cap_mb=0.1, **options)


class Run:
    """A model that is trained with the hook, or without DistributedDataParallel."""

    def __init__(self, comm, ddp=None, kind="EfficientAdam", overlap=True, make=make_network, **options):
        self.module = make()
        self.optimizer = make_optimizer(self.module, comm, kind, **options)
        self.model = self.module
        if ddp is not None:
            self.model = wrap_model(self.module, **ddp)
            self.optimizer.attach(self.model, overlap)
        self.begun = 0
        begin = self.optimizer.onebit.begin

        def counted(rate):
            self.begun += 1
            begin(rate)

        self.optimizer.onebit.begin = counted

    def step(self, rank, step, change=None):
        self.optimizer.zero_grad()
        loss = compute_loss(self.model, rank, step)
        loss.backward()
        if change:
            change(self)
        self.optimizer.step()
        return loss.item()

    def get_parameters(self):
        return flatten_parameters(self.module)

    def close(self):
        self.optimizer.onebit.close()


def check_same_steps(comm, rank, run, change=None, steps=5, one_step=Run.step, **options):
    """Checks that steps with the hook equal those without it, to the bit."""
    plain = Run(comm, **options)
    for step in range(steps):
        for one in plain, run:
            one_step(one, rank, step, change)
            assert one.optimizer.status is Status.OK
        assert torch.equal(plain.get_parameters(), run.get_parameters()), step
    assert is_equal_on_ranks(run.get_parameters())
    begun = run.begun
    plain.close(), run.close()
    return begun


# --- The hook ------------------------------------------------------------------------------------


def check_hook(rank, size):
    comm = onebit.Communicator.torch()
    assert len(list(make_network().parameters())) == 8
    for kind in ("EfficientAdam", "Adam", "ZeroOneAdam"):
        options = {"freeze_step": 3} if kind == "Adam" else {}
        begun = check_same_steps(comm, rank, Run(comm, {}, kind=kind, **options), kind=kind, **options)
        assert begun == 3, begun  # the first two steps are only observed
    for ddp in (
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ):
        assert check_same_steps(comm, rank, Run(comm, ddp)) == 3, ddp
    assert check_same_steps(comm, rank, Run(comm, {}, overlap=False)) == 0
    clipped = {"max_norm": 0.5}
    coupled = {"weight_decay": 0.1, "decoupled_weight_decay": False}
    for options, words in ((clipped, "max_norm needs all"), (coupled, "as in torch's Adam and SGD")):
        with record_warnings() as said:
            assert check_same_steps(comm, rank, Run(comm, {}, **options), **options) == 0
        assert [words in one for one in said] == [True], said
    coupled["weight_decay"] = 0.0
    assert check_same_steps(comm, rank, Run(comm, {}, **coupled), **coupled) == 3
    check_changed_gradients(comm, rank)
    check_unused_layers(comm, rank)
    check_frozen_layers(comm, rank)
    check_channels_last(comm, rank)
    check_accumulation(comm, rank)
    check_half_precision(comm, rank)
    comm.close()


def check_changed_gradients(comm, rank):
    """Checks gradients that the program changes after the backward pass: always, or from some step on."""
    def clip(run):
        nn.utils.clip_grad_norm_(run.module.parameters(), 0.1)

    def ask_for_norm(run):
        run.optimizer.clip_grad_norm_(float("inf"))

    assert check_same_steps(comm, rank, Run(comm, {}), ask_for_norm) == 3  # unchanged gradients overlap
    for view in False, True:
        run = Run(comm, {"gradient_as_bucket_view": view})
        assert check_same_steps(comm, rank, run, clip) == 0
        calls = []

        def sometimes(run):
            calls.append(1)
            if len(calls) > 6:  # two runs a step: this is true from the fourth step on
                clip(run)

        run = Run(comm, {"gradient_as_bucket_view": view})
        assert check_same_steps(comm, rank, run, sometimes) == 2  # the fourth was begun, then made again

    calls = []

    def unseen(run):  # a change that torch does not count
        calls.append(1)
        for one in run.module.parameters() if len(calls) > 6 else ():
            one.grad.data.mul_(0.5)

    for view in False, True:
        calls.clear()
        assert check_same_steps(comm, rank, Run(comm, {"gradient_as_bucket_view": view}), unseen) == 2

    def rate(run):
        run.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + len(rates) // 2)
        rates.append(1)

    rates = []
    assert check_same_steps(comm, rank, Run(comm, {}), rate) == 0


def check_unused_layers(comm, rank):
    """Checks steps with a layer that this rank does not use, and with one that no rank uses."""
    def step_of(run, rank, step, change):
        run.optimizer.zero_grad()
        run.module.use = rank == step % 2
        (run.model(draw_normal(1000 * rank + step, 4, 20)) ** 2).mean().backward()
        assert run.module.extra.weight.grad is None
        run.optimizer.step()

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.first, self.extra, self.last = nn.Linear(20, 9), nn.Linear(9, 9), nn.Linear(9, 9)
            self.use = True

        def forward(self, points):
            points = self.first(points)
            return self.last(points) if self.use else points

    run = Run(comm, {"find_unused_parameters": True}, make=Branches)
    check_same_steps(comm, rank, run, one_step=step_of, make=Branches)


def check_frozen_layers(comm, rank):
    """Checks that a layer that is not trained keeps its parameters, with or without decay, and so does one that
    is no longer trained. Training such a layer later is an error."""
    def first_frozen():
        module = make_network()
        module[0].requires_grad_(False)
        return module

    options = {"weight_decay": 0.5, "make": first_frozen}
    run = Run(comm, {}, **options)
    assert len(run.optimizer._parameters) == 6
    before = [one.clone() for one in run.module[0].parameters()]
    assert check_same_steps(comm, rank, run, **options) == 3
    assert all(map(torch.equal, before, run.module[0].parameters()))
    run = Run(comm, **options)
    run.step(rank, 0)
    run.module[6].requires_grad_(False)
    before = run.get_parameters()
    run.step(rank, 1)
    changed = before != run.get_parameters()
    assert changed.any() and not changed[-161:].any()
    run.module[6].requires_grad_(True)
    before = run.get_parameters()
    run.step(rank, 2)
    assert (before != run.get_parameters())[-161:].any()
    run.module[0].requires_grad_(True)
    expect_error("had requires_grad=False when the optimizer", lambda: run.step(rank, 3))
    run.close()


def check_channels_last(comm, rank):
    """Checks parameters in channels_last, the fastest format for convolutions."""
    def convolutions():
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Unflatten(1, (5, 2, 2)), nn.Conv2d(5, 16, 2, padding=1), nn.Tanh(),
            nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(8, 1),
        ).to(memory_format=torch.channels_last)

    assert not convolutions()[3].weight.is_contiguous()
    for view in False, True:
        run = Run(comm, {"gradient_as_bucket_view": view}, make=convolutions)
        assert check_same_steps(comm, rank, run, make=convolutions) == 3


def check_accumulation(comm, rank):
    """Checks steps with several backward passes, with and without no_sync."""
    def step_of(run, rank, step, quiet):
        run.optimizer.zero_grad()
        for part in range(3):
            quietly = quiet and part < 2 and run.model is not run.module
            with run.model.no_sync() if quietly else contextlib.nullcontext():
                (compute_loss(run.model, rank, 10 * step + part) / 3).backward()
        run.optimizer.step()

    begun = check_same_steps(comm, rank, Run(comm, {}), True, one_step=step_of)
    assert begun == 3, begun
    assert check_same_steps(comm, rank, Run(comm, {}), False, one_step=step_of) == 0
    # A step that has begun gets another backward pass, and is then made again.
    plain, run = Run(comm), Run(comm, {})
    for step in range(6):
        for one in plain, run:
            one.optimizer.zero_grad()
            for part in range(2 if step == 4 else 1):
                compute_loss(one.model, rank, 10 * step + part).backward()
            one.optimizer.step()
    assert torch.equal(plain.get_parameters(), run.get_parameters()) and run.begun == 3
    plain.close(), run.close()


def check_diverging_programs(rank, size):
    """Checks programs in which one rank leaves out a step, for example because of the norm of its own
    gradients. No step may mix gradients of different steps. If all ranks leave it out, the run continues."""
    comm = onebit.Communicator.torch()
    for overlap in False, True:
        run = Run(comm, {}, overlap=overlap)
        for step in range(4):
            run.step(rank, step)
        kept = run.get_parameters()
        if overlap:
            run.optimizer.zero_grad()
            compute_loss(run.model, rank, 4).backward()
            if rank == 0:
                compute_loss(run.model, rank, 5).backward()
            else:
                expect_status(Status.ERROR_PEER, run.optimizer.step, "made 1 backward pass before this step")
        else:
            compute_loss(run.model, rank, 4).backward()
            if rank == 0:
                compute_loss(run.model, rank, 5).backward()
            expect_status(Status.ERROR_MISMATCH, run.optimizer.step, "make or skip the same steps")
            assert torch.equal(kept, run.get_parameters())
            for step in 6, 7:
                compute_loss(run.model, rank, step).backward()  # all ranks leave out the first of these
            run.step(rank, 8)
            assert is_equal_on_ranks(run.get_parameters())
        run.close()
    comm.close()


def check_skipped_steps(rank, size):
    comm = onebit.Communicator.torch()
    run = Run(comm, {})

    def spoil(run):
        next(run.module.parameters()).grad[0] = float("nan" if rank == 0 else "inf")

    with record_warnings() as said:
        for step in range(10):
            run.step(rank, step, spoil if 1 <= step <= 6 else None)
    found = [one for one in said if "written to" not in one]
    assert [f"so far {count} steps" in one for count, one in zip((1, 2, 4), found)] == [True] * 3
    assert len(found) == 3 and run.optimizer.onebit.info()["steps"] == 4
    with record_warnings() as said, run.model.no_sync():
        run.step(rank, 9), run.step(rank, 10)
    assert ["step() was called inside the model's no_sync()" in one for one in said] == [True]
    run.close()
    comm.close()


def check_half_precision(comm, rank):
    """Checks steps with autocast in bfloat16."""
    def cast(run, rank, step, change):
        run.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = compute_loss(run.model, rank, step)
        loss.backward()
        run.optimizer.step()

    assert check_same_steps(comm, rank, Run(comm, {}), one_step=cast) == 3


def check_compiled_models(rank, size):
    """Checks torch.compile of the wrapped model, and of the module in it."""
    if not hasattr(torch, "compile"):
        return
    comm = onebit.Communicator.torch()
    for outside in True, False:
        plain, run = Run(comm), Run(comm)
        model = run.module if outside else torch.compile(run.module, backend="aot_eager")
        run.model = DistributedDataParallel(model)
        if outside:
            run.model = torch.compile(run.model, backend="aot_eager")
        run.optimizer.attach(run.model)
        for step in range(4):
            plain.step(rank, step), run.step(rank, step)
        assert torch.allclose(plain.get_parameters(), run.get_parameters(), atol=1e-6)
        assert is_equal_on_ranks(run.get_parameters())
        plain.close(), run.close()
    comm.close()


def check_grad_scaler(rank, size):
    """Checks that a GradScaler lowers its scale on all ranks, and that no rank waits, if the gradients of one
    rank, and then of all ranks, are not finite."""
    if not hasattr(torch, "amp") or not hasattr(torch.amp, "GradScaler"):
        return  # torch has it for processors from 2.3 on
    comm = onebit.Communicator.torch()
    for unscale in False, True:
        plain, run = Run(comm), Run(comm, {})
        scalers = [
            torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
            for _ in range(2)
        ]
        for step in range(6):
            for one, grad_scaler in zip((plain, run), scalers):
                one.optimizer.zero_grad()
                loss = compute_loss(one.model, rank, step)
                if step == 2 and rank == 1 or step == 4:
                    loss = loss * float("inf")
                grad_scaler.scale(loss).backward()
                if unscale:
                    grad_scaler.unscale_(one.optimizer)
                    nn.utils.clip_grad_norm_(one.module.parameters(), 1.0)
                before = one.get_parameters()
                grad_scaler.step(one.optimizer)
                grad_scaler.update()
                skipped = step in (2, 4)
                assert one.optimizer.status is (Status.SKIPPED if skipped else Status.OK), step
                assert skipped == torch.equal(before, one.get_parameters())
        assert torch.equal(plain.get_parameters(), run.get_parameters()) and run.begun == 0
        assert is_equal_on_ranks(run.get_parameters())
        assert [one.get_scale() for one in scalers] == [2.0**8] * 2
        plain.close(), run.close()
    comm.close()


def check_refused_models(rank, size):
    """Checks that if the hook rejects a model on one rank, all ranks get an error and none waits."""
    comm, taken, module = onebit.Communicator.torch(), wrap_model(make_network()), make_network()
    taken.register_comm_hook(None, lambda state, bucket: None)
    of_taken, other = make_optimizer(taken.module, comm), wrap_model(make_network())
    cases = [(make_optimizer(module, comm), wrap_model(module), other, "is not one of the optimizer's")]
    if hasattr(taken, "_comm_hooks"):
        cases += [(of_taken, wrap_model(taken.module), taken, "communication hook already")]
    for optimizer, good, bad, words in cases:
        status = Status.ERROR_ARGUMENT if rank == 1 else Status.ERROR_PEER
        expect_status(status, lambda: optimizer.attach(bad if rank == 1 else good), words if rank == 1 else "")
    comm.close()


def check_errors(rank, size):
    """Checks that backward passes and steps fail with sparse gradients, join(), other parameters and wrong
    arguments."""
    comm = onebit.Communicator.torch()

    # An error of one rank has another error message on the other ranks. Afterwards the run continues.
    run = Run(comm, {})
    for step in range(5):
        run.step(rank, step)
    run.optimizer.param_groups[0]["betas"] = (0.9, 0.99) if rank == 0 else (0.9, 0.999)
    compute_loss(run.model, rank, 5)
    expect_error("only the first beta can change" if rank == 0 else "ERROR_PEER", run.optimizer.step)
    run.optimizer.param_groups[0]["betas"] = (0.8 + 0.01 * rank, 0.999)
    expect_status(Status.ERROR_MISMATCH, run.optimizer.step, "beta1 or the tag (shown as a hash)")
    run.optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    run.step(rank, 6)
    assert is_equal_on_ranks(run.get_parameters())
    run.close()
    for ddp, join in ({"find_unused_parameters": True}, {}), ({}, {"divide_by_initial_world_size": False}):
        run = Run(comm, ddp)
        with run.model.join(**join):
            expect_error("join()", lambda: run.step(rank, 0))
        run.close()
    module = nn.Sequential(nn.Embedding(9, 20, sparse=True), nn.Linear(20, 1))
    one = make_optimizer(module, comm)
    expect_error("sparse=False", lambda: one.attach(wrap_model(module)))
    module(torch.arange(4)).sum().backward()
    expect_error("is sparse", one.step)
    one.onebit.close()
    module = make_network()
    one = make_optimizer(module, comm)
    for parameter in module.parameters():
        parameter.data = parameter.data.double()
    expect_error("make the optimizer after that", one.step)
    one.onebit.close()
    model = wrap_model(make_network())  # registered without attach: the first pass finds it
    one = make_optimizer(make_network(), comm)
    model.register_comm_hook(one.hook_state(), onebit.torch.optimizer_hook)
    expect_error("is not one of the optimizer's", lambda: compute_loss(model, rank, 0).backward())
    one.onebit.close()
    made = {
        "is on meta": lambda: nn.Linear(3, 3, device="meta"),
        "has type torch.float64": lambda: nn.Linear(3, 3, dtype=torch.float64),
    }
    for words, make in made.items():
        expect_error(words, lambda: make_optimizer(make(), comm))
        # The error occurs on one rank only.
        module = make() if rank == 0 else nn.Linear(3, 3)
        expect_error(words if rank == 0 else "ERROR_PEER", lambda: make_optimizer(module, comm))
    comm.close()


# --- The optimizers ------------------------------------------------------------------------------


def make_groups(module):
    weights = [one for one in module.parameters() if one.dim() > 1]
    others = [one for one in module.parameters() if one.dim() == 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}]


def check_schedulers(rank, size):
    """Checks schedulers of torch with two groups: rates must equal those of torch's own optimizer, and
    parameters those of single steps with these rates."""
    from torch.optim import lr_scheduler as of

    comm = onebit.Communicator.torch()
    makers = [
        lambda one: of.LambdaLR(one, [lambda step: 0.1 * step, lambda step: 0.5**step]),
        lambda one: of.OneCycleLR(one, [1e-2, 2e-3], 10),
        lambda one: of.ReduceLROnPlateau(one, patience=1),
        lambda one: of.SequentialLR(
            one, [of.ConstantLR(one, 0.1, 2), of.ExponentialLR(one, 0.9)], [2]),
    ]
    for make in makers:
        module, twin = make_network(), make_network()
        ours = onebit.torch.Adam(
            make_groups(module), lr=1e-2, comm=comm, freeze_step=onebit.FREEZE_NEVER)
        dense = torch.optim.AdamW(make_groups(twin), lr=1e-2, weight_decay=0.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            schedules = [make(one) for one in (ours, dense)]
        for step in range(6):
            for one, model in ((ours, module), (dense, twin)):
                one.zero_grad(set_to_none=step % 2 == 0)
                compute_loss(model, rank, step).backward()
            for one in twin.parameters():  # the mean gradients of data-parallel training
                dist.all_reduce(one.grad)
                one.grad /= size
            for one, schedule in zip((ours, dense), schedules):
                one.step()
                plateau = isinstance(schedule, of.ReduceLROnPlateau)
                schedule.step(1.0) if plateau else schedule.step()
            rates = [[group["lr"] for group in one.param_groups] for one in (ours, dense)]
            assert rates[0] == rates[1], rates
        for mine, theirs in zip(module.parameters(), twin.parameters()):
            assert torch.allclose(mine, theirs, atol=2e-5), (mine - theirs).abs().max()
        ours.onebit.close()
    check_weight_decays(comm, rank)
    comm.close()


def check_weight_decays(comm, rank):
    """Checks that a weight decay may change and a rate may be 0. If one rank's values differ, that is an
    error."""
    plain, run = Run(comm, kind="Momentum"), Run(comm, kind="Momentum", weight_decay=0.5)
    run.optimizer.param_groups[0]["weight_decay"] = 0.0
    for step in range(3):
        plain.step(rank, step), run.step(rank, step)
    assert torch.equal(plain.get_parameters(), run.get_parameters())
    run.optimizer.param_groups[0]["lr"] = 0.0
    before = run.get_parameters()
    run.step(rank, 3)
    assert torch.equal(before, run.get_parameters())
    run.optimizer.param_groups[0].update(lr=0.01, weight_decay=0.1 * (rank + 1))
    expect_status(Status.ERROR_MISMATCH, lambda: run.step(rank, 4), "weight decay")
    plain.close(), run.close()


def check_states(rank, size):
    """Checks that load_state_dict loads groups, and a list of all ranks' states, and rejects other states.
    torch_resume_ranks.py checks that states continue to the bit."""
    comm = onebit.Communicator.torch()
    for kind in KINDS:
        run, again = Run(comm, {}, kind=kind), Run(comm, {}, kind=kind)
        for step in range(3):
            run.step(rank, step)
        group = run.optimizer.param_groups[0]
        changed = {"momentum": 0.8} if "momentum" in group else {"betas": (0.8, group["betas"][1])}
        group.update(changed, lr=0.004)
        saved = run.optimizer.state_dict()
        assert set(saved) == {"state", "param_groups"}
        again.module.load_state_dict(run.module.state_dict())
        again.optimizer.load_state_dict(saved)
        assert {**again.optimizer.param_groups[0], **changed, "lr": 0.004, "params": 0} == {
            **again.optimizer.param_groups[0], "params": 0}
        for one in run, again:
            one.step(rank, 3)
        assert torch.equal(run.get_parameters(), again.get_parameters()), kind
        everyone = [None] * size
        dist.all_gather_object(everyone, run.optimizer.state_dict())
        alone = make_optimizer(run.module, onebit.Communicator.self_(), kind)
        alone.load_state_dict(everyone)
        assert alone.param_groups[0]["lr"] == 0.004 and alone.onebit.info()["steps"] == 4
        alone.close(), again.close(), run.close()
    check_refused_states(comm, rank)
    check_copies(comm, rank)
    comm.close()


def check_refused_states(comm, rank):
    run = Run(comm, {})
    run.step(rank, 0)
    optimizer, saved = run.optimizer, run.optimizer.state_dict()
    kept = run.get_parameters()
    nothing = {**saved, "state": {}}
    narrow = {**saved, "state": {**saved["state"], 1: dict.fromkeys(saved["state"][1], torch.zeros(3))}}
    other = make_optimizer(nn.Linear(20, 3), comm).state_dict()
    for words, mine in (("no state of any parameter", nothing), ("groups have [2]", other),
                        ("the shape (3,)", narrow)):
        expect_status(Status.ERROR_ARGUMENT, lambda: optimizer.load_state_dict(mine), words)
        status = Status.ERROR_ARGUMENT if rank == 0 else Status.ERROR_PEER
        expect_status(status, lambda: optimizer.load_state_dict(mine if rank == 0 else saved))
    for ours in nothing, saved:  # a state without steps and one of torch load nothing
        fresh = Run(comm, {})
        mine = nothing if rank == 0 else ours
        call = lambda: fresh.optimizer.load_state_dict(mine)  # noqa: E731
        call() if ours is nothing else expect_status(Status.ERROR_ARGUMENT, call, "different kinds: none, ours")
        fresh.close()
    with torch.no_grad():
        next(run.module.parameters())[0] += rank
    expect_status(Status.ERROR_MISMATCH, lambda: optimizer.load_state_dict(saved), "tensors[0]")
    assert torch.equal(kept[3200:], run.get_parameters()[3200:]) and optimizer.onebit.info()["steps"] == 1
    expect_error("state cannot be assigned", lambda: setattr(optimizer, "state", {}))
    run.close()


def check_copies(comm, rank):
    run = Run(comm, {})
    for call in (copy.deepcopy, pickle.dumps):
        expect_error("state_dict()", lambda: call(run.optimizer), TypeError)
    run.step(rank, 0)
    model = copy.deepcopy(run.model)  # its hook is not registered: it averages like other models
    compute_loss(model, rank, 0).backward()
    assert is_equal_on_ranks(next(model.parameters()).grad)
    pickle.loads(pickle.dumps(run.model.module))
    run.close()


def check_compress(rank, size):
    """Checks compress. In a dense warm-up the steps must be those of torch's optimizer on mean gradients, with
    its groups and an existing scheduler. Afterwards they are compressed, and the replicas must be equal."""
    sgd = {"momentum": 0.7, "weight_decay": 0.1}
    frozen = {"kind": onebit.torch.Adam, "freeze_step": 6}
    cases = [
        (torch.optim.AdamW, {"betas": (0.8, 0.95), "eps": 1e-6}, frozen),
        (torch.optim.Adam, {"weight_decay": 0.1}, frozen),
        (torch.optim.SGD, sgd, {"warmup_steps": 6, "warmup_bits": 0}),
    ]
    for kind, options, warmup in cases:
        module, twin = make_network(), make_network()
        made = [kind(make_groups(one), lr=1e-2, **options) for one in (module, twin)]
        schedules = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in made]
        model = wrap_model(module)
        ours = onebit.torch.compress(model, made[0], **warmup, bucket_size=30000)
        for step in range(9):
            if step == 4:
                ours.load_state_dict(ours.state_dict())
            ours.zero_grad(), made[1].zero_grad()
            compute_loss(model, rank, step).backward()
            compute_loss(twin, rank, step).backward()
            for one in twin.parameters():  # the mean gradients of data-parallel training
                dist.all_reduce(one.grad)
                one.grad /= size
            ours.step(), made[1].step()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                schedules[0].step()
            schedules[1].step()
            rates = [[group["lr"] for group in one.param_groups] for one in (ours, made[1])]
            assert rates[0] == rates[1], rates
            if step == 5:
                for mine, theirs in zip(module.parameters(), twin.parameters()):
                    assert torch.allclose(mine, theirs, atol=2e-5), (mine - theirs).abs().max()
        assert is_equal_on_ranks(flatten_parameters(module))
        assert list(ours.onebit.info()["exchanges"])[:2] == [6, 3], ours.onebit.info()
        expect_status(Status.ERROR_ARGUMENT, made[0].step, "call step() of the one that it returned")
        ours.close()
    module = make_network()
    ours = onebit.torch.compress(wrap_model(module), torch.optim.AdamW(module.parameters()))
    assert type(ours) is onebit.torch.EfficientAdam and ours.defaults["weight_decay"] == 0.01
    ours.close()
    check_refused_compress(rank, size)


def check_way_back(rank, size):
    """Checks that torch's own optimizer continues a training of each method from torch_state_dict, and better than
    from the weights alone; and what a state of a closed optimizer has."""
    for kind, options in (torch.optim.AdamW, {"lr": 3e-3}), (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}):
        for method in "dense", "one bit", "hook":
            module = make_network()
            model, given = wrap_model(module), kind(module.parameters(), **options)
            made = {"dense": lambda *_: given, "one bit": onebit.torch.compress,
                    "hook": lambda *both: onebit.torch.compress(*both, onebit.torch.HookState)}  # fmt: skip
            optimizer = made[method](model, given)
            assert method == "dense" or optimizer.torch_state_dict()["state"] == {}  # before the first step
            train(model, optimizer, rank, range(60))
            if method != "dense":
                with record_warnings() as said:
                    optimizer.consolidate_state_dict(), optimizer.state_dict()
                assert not said, "all ranks have given their residuals"
            before = train(model, optimizer, rank, range(60, 70))
            saved = optimizer.state_dict() if method == "dense" else optimizer.torch_state_dict()
            names = {"exp_avg", "exp_avg_sq", "step"} if kind is torch.optim.AdamW else {"momentum_buffer"}
            assert all(set(of) == names for of in saved["state"].values()) and len(saved["state"]) == 8, saved
            if method != "dense":
                check_closed(optimizer, method)
            losses = {}
            for state in {}, saved:
                twin = copy.deepcopy(module)
                after = kind(twin.parameters(), **options)
                if state:
                    after.load_state_dict(state)
                losses[bool(state)] = train(wrap_model(twin), after, rank, range(70, 80))
                assert is_equal_on_ranks(flatten_parameters(twin))
            assert losses[True] < 1.1 * before, (method, before, losses)
            assert kind is torch.optim.SGD or losses[True] < losses[False], (method, before, losses)
    module = make_network()
    first, *others = module.parameters()
    model, given = wrap_model(module), [torch.optim.RMSprop([first]), torch.optim.AdamW(others)]
    optimizers = onebit.torch.compress(model, given)
    compute_loss(model, rank, 0).backward()
    for one, fresh in zip(optimizers, (torch.optim.RMSprop([first]), torch.optim.AdamW(others))):
        one.step()
        fresh.load_state_dict(one.torch_state_dict())
        assert fresh.state, "also the optimizer that was not replaced"
    optimizers[1].close()
    module = make_network()
    lamb = onebit.torch.compress(wrap_model(module), torch.optim.AdamW(module.parameters()), onebit.torch.Lamb)
    expect_status(Status.ERROR_ARGUMENT, lamb.torch_state_dict, "torch has no state for Lamb")
    lamb.close()


def check_closed(optimizer, method):
    """Checks a state that is saved after close(): with residuals only if it was consolidated before."""
    if method == "hook":
        optimizer.close()
        with record_warnings() as said:
            assert "hook_0" not in optimizer.state_dict()["state"][0]
        assert any("save before close()" in one for one in said), said
        return
    optimizer.consolidate_state_dict()
    optimizer.close()
    if dist.get_rank() == 0:
        assert {"worker_residual_0", "worker_residual_1"} <= set(optimizer.state_dict()["state"][0])
    else:
        expect_status(Status.ERROR_ARGUMENT, optimizer.state_dict, "take its state before close()")
    expect_status(Status.ERROR_ARGUMENT, optimizer.torch_state_dict, "take its state before close()")


def train(model, optimizer, rank, steps):
    """Returns the mean loss of some steps."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        losses.append(compute_loss(model, rank, step, 32))
        losses[-1].backward()
        optimizer.step()
    mean = torch.stack(losses).detach().mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def check_refused_compress(rank, size):
    """Checks that compress fails on all ranks if one rank cannot be compressed."""
    module = make_network()
    model, weights = wrap_model(module), list(module.parameters())
    other, good = torch.optim.RMSprop(weights), torch.optim.AdamW(weights)
    status = Status.ERROR_ARGUMENT
    words = "EfficientAdam cannot replace RMSprop, whose first parameter is stepped by"
    expect_status(
        status, lambda: onebit.torch.compress(model, other, onebit.torch.EfficientAdam), words)
    expect_status(status, lambda: onebit.torch.compress(module, good), "not a Distributed")
    if size > 1:
        mine = other if rank == 0 else good
        expect_status(status, lambda: onebit.torch.compress(model, mine), "differ in type")
        mine = model if rank == 0 else module
        expect_status(Status.ERROR_PEER if rank == 0 else status, lambda: onebit.torch.compress(mine, good))
    expect_error("frobnicate", lambda: onebit.torch.compress(model, other, frobnicate=1), TypeError)
    first, again = onebit.torch.compress(model, good), torch.optim.AdamW(weights)
    if hasattr(model, "_comm_hooks"):  # otherwise the message is torch's own
        expect_status(status, lambda: onebit.torch.compress(model, again), "communication hook already")
        first.close()
        first = onebit.torch.compress(model, again)
    first.close()


# --- Interrupted exchanges -----------------------------------------------------------------------


def check_interrupts(rank, size):
    """Checks that Ctrl-C ends a step that waits for another rank, and that the other ranks get an error."""
    run = Run(None, {}, timeout=60)
    comm = run.optimizer.comm
    for step in range(4):
        run.step(rank, step)
    run.optimizer.zero_grad()
    compute_loss(run.model, rank, 4).backward()
    if rank == 0:
        # A shell that runs the tests in the background ignores SIGINT.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(2.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        expect_error("", run.optimizer.step, KeyboardInterrupt)
        dist.barrier()
    else:
        dist.barrier()
        expect_status(Status.ERROR_TRANSPORT, run.optimizer.step)
    expect_status(Status.ERROR_TRANSPORT, lambda: onebit.Plan(comm, 1))
    dist.barrier()
    if rank == 0:
        print("all well", flush=True)
    os._exit(0)  # a normal exit would wait for the interrupted exchange


def check_interrupted_backward(rank, size):
    run = Run(None, {}, timeout=60)
    for step in range(4):
        run.step(rank, step)
    assert run.begun == 2

    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(context, value):
            return value.clone()

        @staticmethod
        def backward(context, gradient):
            raise KeyboardInterrupt

    if rank == 0:
        first = run.module[0].register_forward_hook(lambda module, given, made: Stop.apply(made))
        expect_error("", lambda: run.step(rank, 4), KeyboardInterrupt)
        first.remove()
        run.optimizer.close()
        return
    try:
        run.step(rank, 4)
    except onebit.Error as error:  # ERROR_TRANSPORT if the other process has already ended
        assert error.status in (Status.ERROR_PEER, Status.ERROR_TRANSPORT), error
    else:
        raise AssertionError("a step that only one rank has made")


if __name__ == "__main__":
    run_scenarios(globals())
