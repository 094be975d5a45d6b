"""Trainings in the form of usual programs, each plain and with `onebit.torch.compress`; test_torch.py runs
them. `python trainings_ranks.py CASE,CASE RANKS`; `all` runs all cases, and prints a table."""

import contextlib
import functools
import warnings

from torch_common import (
    draw_normal,
    expect_error,
    flatten_parameters,
    is_equal_on_ranks,
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
from torch.nn.utils import clip_grad_norm_

STEPS, CASES = 60, {}
# The largest relative difference between compressed and plain losses at the end.
TOLERANCE = 0.02


def compute_loss(model, rank, step, count=16):
    points = draw_normal(1000 * rank + step, count, 20)
    wanted = points[:, :1].sin() + points[:, 1:2] * points[:, 2:3]
    return nn.functional.mse_loss(model(points).float(), wanted)


def make_network():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(20, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def make_replica(module, **options):
    return DistributedDataParallel(module, bucket_cap_mb=0.01, **options)


def run_steps(model, optimizers, rank, loss=compute_loss, steps=STEPS, after=lambda step: None):
    for step in range(steps):
        after(step)
        for one in optimizers:
            one.zero_grad()
        loss(model, rank, step).backward()
        for one in optimizers:
            one.step()


def compute_held_out_loss(model, loss=compute_loss):
    """Returns the loss on held-out data. All ranks must have the same model."""
    module = getattr(model, "module", model)
    assert is_equal_on_ranks(torch.cat([one.detach().float().flatten() for one in module.parameters()]))
    with torch.no_grad():
        return loss(module, 99, 99, 512).item()


def finish_training(model, optimizers, rank, **options):
    """Makes all steps. Returns the loss on held-out data."""
    run_steps(model, optimizers, rank, **options)
    return compute_held_out_loss(model)


# --- The cases, train_CASE: their argument take compresses the optimizer, or returns it unchanged -


class Language(nn.Module):
    """A smaller nanoGPT, with tied weights."""

    def __init__(self, words=16, width=32, length=16):
        super().__init__()
        torch.manual_seed(3)
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 64, 0.0, batch_first=True)
        self.head = nn.Linear(width, words, bias=False)
        self.words.weight.data.mul_(0.1)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)
        made = self.words(tokens) + self.places(torch.arange(length))
        return self.head(self.block(made, mask))


def language_loss(model, rank, step, count=8):
    random = torch.Generator().manual_seed(1000 * rank + step)
    first = torch.randint(16, (count, 1), generator=random)
    tokens = (first + 5 * torch.arange(17)) % 16
    noise = torch.randint(16, tokens.shape, generator=random)
    tokens = torch.where(torch.rand(tokens.shape, generator=random) < 0.2, noise, tokens)
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train_gpt(rank, take):
    """Trains with tied weights, groups, a schedule, accumulation with no_sync, and clipping of the
    norm."""
    model = make_replica(Language())
    matrices = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=1e-2, betas=(0.9, 0.95))
    optimizer = take(model, optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            (language_loss(model, rank, 2 * step) / 2).backward()
        (language_loss(model, rank, 2 * step + 1) / 2).backward()
        if take is keep_optimizer:
            clip_grad_norm_(model.parameters(), 1.0)
        else:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        schedule.step()
    return compute_held_out_loss(model, language_loss)


def train_phases(rank, take):
    """Trains one wrapped model in phases: first a head, then all layers with another optimizer, then with
    torch's own optimizer."""
    model = make_replica(make_network(), find_unused_parameters=True)
    optimizer = take(model, torch.optim.RMSprop(model.module[5].parameters(), lr=1e-3))
    for make in (torch.optim.AdamW, torch.optim.SGD, None):
        run_steps(model, [optimizer], rank, steps=20)
        if take is not keep_optimizer:
            optimizer.close()
        optimizer = (make or torch.optim.AdamW)(model.parameters(), lr=3e-3)
        optimizer = optimizer if make is None else take(model, optimizer)
    run_steps(model, [optimizer], rank, steps=20)
    return compute_held_out_loss(model)


def of_optimizer(make, ddp=None, **options):
    def body(rank, take):
        model = make_replica(make_network(), **(ddp or {}))
        return finish_training(model, [take(model, make(model.parameters(), **options))], rank)

    return body


for _name, _options in {
    "SGD": {"lr": 0.05}, "RMSprop": {"lr": 1e-3}, "Adagrad": {"lr": 1e-2}, "Adamax": {"lr": 5e-3},
    "Adafactor": {"lr": 3e-2}, "NAdam": {"lr": 3e-3}, "RAdam": {"lr": 3e-3}, "ASGD": {"lr": 0.05},
    "Adadelta": {"lr": 1.0}, "Adam": {"lr": 3e-3},
}.items():  # fmt: skip
    if hasattr(torch.optim, _name):
        CASES[_name] = of_optimizer(getattr(torch.optim, _name), **_options)
CASES["momentum"] = of_optimizer(torch.optim.SGD, lr=0.02, momentum=0.9)
CASES["nesterov"] = of_optimizer(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True)
CASES["amsgrad"] = of_optimizer(torch.optim.AdamW, lr=3e-3, amsgrad=True)
CASES["static_graph"] = of_optimizer(torch.optim.RMSprop, {"static_graph": True}, lr=1e-3)
CASES["views"] = of_optimizer(torch.optim.RMSprop, {"gradient_as_bucket_view": True}, lr=1e-3)
CASES["beta1_of_0"] = of_optimizer(torch.optim.Adam, lr=3e-3, betas=(0.0, 0.9))


class Recommender(nn.Module):
    """A model in the shape of DLRM: a batch uses few rows of its tables."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.table, self.top = nn.Embedding(500, 8, sparse=True), make_network()
        self.top[0] = nn.Linear(28, 64)

    def forward(self, points):
        rows = (points[:, 0].abs() * 100).long() % 500
        return self.top(torch.cat([points, self.table(rows)], 1))


def train_sparse(rank, take):
    """Trains with sparse gradients, which the program's own optimizer supports."""
    model = make_replica(Recommender())
    return finish_training(model, [take(model, torch.optim.SGD(model.parameters(), lr=0.05))], rank)


def train_sparse_and_adam(rank, take):
    model = make_replica(Recommender())
    optimizers = [
        torch.optim.SparseAdam([model.module.table.weight], lr=1e-2),
        torch.optim.AdamW(model.module.top.parameters(), lr=3e-3),
    ]
    optimizers = take(model, optimizers)
    return finish_training(model, optimizers, rank)


def train_muon(rank, take):
    """Trains matrices by Muon, and all other parameters by AdamW."""
    kind = getattr(torch.optim, "Muon", torch.optim.RMSprop)  # torch has Muon from 2.9 on
    model = make_replica(make_network())
    matrices = [one for one in model.parameters() if one.dim() == 2 and one.shape[0] > 1]
    known = {id(one) for one in matrices}
    others = [one for one in model.parameters() if id(one) not in known]
    options = {"lr": 1e-3} if kind is torch.optim.RMSprop else {"lr": 5e-3}
    optimizers = take(
        model, [kind(matrices, **options), torch.optim.AdamW(others, lr=3e-3)])
    return finish_training(model, optimizers, rank)


class Mixed(nn.Module):
    """A model with weights in bfloat16 and norms in float32. gloo of torch 1.13 has no bfloat16."""

    def __init__(self):
        super().__init__()
        new = hasattr(torch, "compile")
        low, wide = (torch.bfloat16, torch.float32) if new else (torch.float32, torch.float64)
        self.body = make_network()
        for module in self.body:
            module.to(low if isinstance(module, nn.Linear) else wide)

    def forward(self, points):
        for module in self.body:
            points = module(points.to(next(module.parameters(), points).dtype))
        return points


def train_types(rank, take):
    """Trains weights in bfloat16 and norms in float32."""
    model = make_replica(Mixed())
    optimizer = take(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    return finish_training(model, [optimizer], rank)


def train_thawed(rank, take):
    """Trains a layer that is frozen when the optimizer is created, and trained later."""
    model = make_replica(make_network(), find_unused_parameters=True)
    layer = model.module[3]
    layer.requires_grad_(False)
    optimizer = take(model, torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0))
    return finish_training(model, [optimizer], rank, after=lambda step: layer.requires_grad_(step >= 20))


def train_added(rank, take):
    """Trains a layer that is thawed, whose group is added at that time."""
    model = make_replica(make_network(), find_unused_parameters=True)
    layer = model.module[3]
    layer.requires_grad_(False)
    some = [one for one in model.parameters() if one.requires_grad]
    optimizer = take(model, torch.optim.AdamW(some, lr=3e-3))

    def after(step):
        if step == 20:
            layer.requires_grad_(True)
            optimizer.add_param_group({"params": list(layer.parameters()), "lr": 1e-3})

    return finish_training(model, [optimizer], rank, after=after)


def train_of_no_optimizer(rank, take):
    """Trains only the head of a model whose body has gradients too."""
    model = make_replica(make_network())
    optimizer = take(model, torch.optim.AdamW(model.module[3:].parameters(), lr=3e-3))
    return finish_training(model, [optimizer], rank)


def train_lora(rank, take):
    class Adapted(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear.requires_grad_(False)
            self.down = nn.Parameter(torch.randn(4, linear.in_features) * 0.1)
            self.up = nn.Parameter(torch.zeros(linear.out_features, 4))

        def forward(self, points):
            return self.linear(points) + points @ self.down.T @ self.up.T

    module = make_network()
    for number in (0, 3, 5):
        module[number] = Adapted(module[number])
    module[1].requires_grad_(False)
    model = make_replica(module)
    trained = [one for one in model.parameters() if one.requires_grad]
    return finish_training(model, [take(model, torch.optim.AdamW(trained, lr=1e-2))], rank)


def train_gan(rank, take):
    """Trains two models. Each loss depends on both."""
    torch.manual_seed(5)
    maker = make_replica(nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2)))
    critic = make_replica(nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)))
    adam = {"lr": 3e-3, "betas": (0.5, 0.999)}
    of_maker = take(maker, torch.optim.Adam(maker.parameters(), **adam))
    of_critic = take(critic, torch.optim.Adam(critic.parameters(), **adam))
    judge = nn.functional.binary_cross_entropy_with_logits
    for step in range(STEPS):
        random = torch.Generator().manual_seed(1000 * rank + step)
        noise = torch.randn(32, 4, generator=random)
        true = torch.randn(32, 2, generator=random) * 0.3 + 1
        of_critic.zero_grad()
        found = critic(torch.cat([true, maker(noise).detach()]))
        judge(found, torch.cat([torch.ones(32, 1), torch.zeros(32, 1)])).backward()
        of_critic.step()
        of_maker.zero_grad()
        judge(critic.module(maker(noise)), torch.ones(32, 1)).backward()
        of_maker.step()
    with torch.no_grad():
        noise = draw_normal(1, 512, 4)
        return 1 + compute_held_out_loss(critic, lambda model, *_: (maker.module(noise) - 1).square().mean())


def train_join(rank, take, clip=False, **options):
    """Trains with fewer batches on the last rank, whose scheduler stops with them."""
    model = make_replica(Mixed() if clip else make_network())
    optimizer = take(model, torch.optim.AdamW(model.parameters(), lr=3e-3), **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)
    with model.join():
        for step in range(STEPS - 12 * rank):
            optimizer.zero_grad()
            compute_loss(model, rank, step).backward()
            if clip and take is keep_optimizer:
                clip_grad_norm_(model.parameters(), 0.5)
            elif clip:
                optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            schedule.step()
    return compute_held_out_loss(model)


CASES["join_and_clip"] = lambda rank, take: train_join(rank, take, True)
CASES["join_in_8_bits"] = lambda rank, take: train_join(
    rank, take, **({} if take is keep_optimizer else {"kind": onebit.torch.HookState}))


def train_zero(rank, take):
    """Trains with stage 1 of ZeRO: torch's ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = make_replica(make_network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-3)
    return finish_training(model, [take(model, optimizer)], rank)


def train_shards(rank, take):
    def sharded(model, optimizer):
        return take(model, optimizer, onebit.torch.Adam, shards=1, freeze_step=20)

    model = make_replica(make_network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = optimizer if take is keep_optimizer else sharded(model, optimizer)
    return finish_training(model, [optimizer], rank)


@contextlib.contextmanager
def defaults():
    """Trains with torch's defaults (dtype, device) changed, as a program may do."""
    torch.set_default_dtype(torch.float64)
    with torch.device("meta") if hasattr(torch, "compile") else contextlib.nullcontext():
        yield
    torch.set_default_dtype(torch.float32)


def train_in_a_module(rank, take):
    """Trains a model inside a module of the program, with changed defaults of torch."""
    class Program(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = make_replica(make_network())

        def forward(self, points):
            return self.network(points)

    model = Program()
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with defaults():
        optimizer = take(model, inner)
    for step in range(STEPS):
        optimizer.zero_grad()
        compute_loss(model, rank, step).backward()
        clip = getattr(optimizer, "clip_grad_norm_", lambda to: clip_grad_norm_(model.parameters(), to))
        with defaults():
            clip(0.5)
            optimizer.step()
    if take is not keep_optimizer:
        with defaults():
            optimizer.consolidate_state_dict()
            optimizer.load_state_dict(optimizer.state_dict())
    return compute_held_out_loss(model.network)


CASES.update((name[6:], one) for name, one in list(globals().items()) if name.startswith("train_"))


# --- Other conditions ----------------------------------------------------------------------------


def make_mixed_model():
    model = make_replica(Mixed(), find_unused_parameters=True)
    return model, onebit.torch.compress(model, torch.optim.AdamW(model.parameters(), lr=3e-3))


def check_skipped_steps(rank, size):
    """Checks that no rank's step changes anything if a gradient of the remainder is not finite on one
    rank."""
    model, optimizer = make_mixed_model()
    norm, spoil = model.module.body[1].bias, [1.0]
    norm.register_hook(lambda gradient: gradient * spoil[0])
    for step in range(8):
        spoil[0] = float("nan") if rank == 1 and step == 5 else 1.0
        before = flatten_parameters(model)
        run_steps(model, [optimizer], rank, lambda *_: compute_loss(model, rank, step), 1)
        wanted = Status.SKIPPED if step == 5 else Status.OK
        assert optimizer.status is wanted and torch.equal(before, flatten_parameters(model)) == (step == 5)
        assert is_equal_on_ranks(flatten_parameters(model))
    assert optimizer.onebit.info()["steps"] == 7


def check_written_parameters(rank, size):
    """Checks that 16-bit parameters continue from the values that the program writes to them. Those to
    which it does not write continue from their master values."""
    if not hasattr(torch, "compile"):
        return  # gloo of torch 1.13 has no bfloat16
    for through in "no_grad", "data":
        torch.manual_seed(3)
        model = make_replica(nn.Linear(20, 20, dtype=torch.bfloat16))
        optimizer = onebit.torch.compress(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
        weight, bias = model.module.parameters()
        bias.data.fill_(1.0)
        for step in range(60):
            with torch.no_grad():
                (weight.data if through == "data" else weight).fill_(4.0)
            optimizer.zero_grad()
            model(torch.ones(4, 20, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            assert is_equal_on_ranks(flatten_parameters(model))
            assert (weight.float() - 4).abs().max() < 0.1, (step, through)
        assert (bias.float() - 0.994).abs().max() < 0.003, bias  # a step is less than rounding


def check_registered_hooks(rank, size):
    """Checks that a step's hooks that the program has registered before are called once, at the right
    time."""
    if not hasattr(torch.optim.Optimizer, "register_step_pre_hook"):
        return  # from torch 2.0 on
    model, calls = make_replica(Mixed()), []
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)

    def before(*_):
        calls.append("before")
        for one in model.parameters():
            one.grad.zero_()

    inner.register_step_pre_hook(before)
    inner.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer, wanted = onebit.torch.compress(model, inner), flatten_parameters(model)
    run_steps(model, [optimizer], rank, steps=5)
    assert calls == ["before", "after"] * 5 and torch.equal(flatten_parameters(model), wanted), calls


def check_reports(rank, size):
    """Checks that reports count the sent bytes and those of a ring's allreduce, in one bit and in 8
    bits."""
    model, optimizer = make_mixed_model()
    run_steps(model, [optimizer], rank, steps=100)
    report = optimizer.report()
    assert (report.steps, report.skipped) == (100, 0) and report.overlapped > 90, report
    assert set(report.averaged) == {"body.1.weight", "body.1.bias"}, report
    gradients = sum(one.numel() * one.element_size() for one in model.parameters())
    assert report.dense_bytes == 100 * gradients  # the bytes of a ring of two ranks
    assert 3 < report.dense_bytes / report.bytes_sent < 40, report
    optimizer.consolidate_state_dict()
    saving = optimizer.report()
    assert saving.checkpoint_bytes > gradients and saving._replace(checkpoint_bytes=0) == report, saving
    assert "B sent for checkpoints" in str(saving) and "checkpoints" not in str(report)
    with record_warnings():
        own = optimizer.state_dict()
    text, report = optimizer.describe(), saving
    optimizer.close()
    other_model, other = make_mixed_model()
    other.load_state_dict(own)
    loaded = other.report()
    assert loaded.checkpoint_bytes > 0 and loaded.bytes_sent < 2000 and loaded.loaded_steps == 100, loaded
    other.close()
    assert optimizer.report() == report and "x less traffic" in str(report), str(report)
    assert optimizer.describe().split("; sent")[0] == text.split("; sent")[0]
    model = make_replica(make_network())
    optimizer = onebit.torch.compress(model, torch.optim.RMSprop(model.parameters(), lr=1e-3))
    run_steps(model, [optimizer], rank)
    report = optimizer.report()
    optimizer.consolidate_state_dict()
    saving = optimizer.report()
    assert saving.checkpoint_bytes > 0 and saving._replace(checkpoint_bytes=0) == report, saving
    optimizer.close()
    assert optimizer.report() == saving
    assert 3 < report.dense_bytes / report.bytes_sent < 4 and report.steps == STEPS, str(report)
    assert len(report.averaged) == len(list(model.parameters()))


def check_norms(rank, size):
    """Checks that clip_grad_norm_ returns the norm of the mean, and scales equally on all ranks. A call of
    torch's own function gives a warning."""
    model, optimizer = make_mixed_model()
    for step in range(3):
        optimizer.zero_grad(set_to_none=True)
        compute_loss(model, rank, step).backward()
        if rank == 1 and step == 1:
            model.module.body[3].weight.grad = None
        means = []
        for one in model.parameters():
            mean = torch.zeros_like(one) if one.grad is None else one.grad.clone()
            mean = mean.float() / 2
            dist.all_reduce(mean)
            means.append(mean.flatten())
        wanted, own = torch.cat(means).norm(), model.module.body[0].weight.grad.clone()
        found = optimizer.clip_grad_norm_(wanted / 2)
        assert is_equal_on_ranks(found) and abs(found / wanted - 1) < 0.06, (found, wanted)
        factor = model.module.body[0].weight.grad.float().norm() / own.float().norm()
        assert abs(factor - wanted / 2 / found) < 0.01
        optimizer.step()
    expect_error("only the 2-norm", lambda: optimizer.clip_grad_norm_(1.0, 1.0))
    small = make_replica(nn.Linear(20, 1))  # has fewer gradients than a sketch has numbers
    tiny = onebit.torch.compress(small, torch.optim.AdamW(small.parameters()))
    compute_loss(small, rank, 0).backward()
    mean = torch.cat([one.grad.flatten() for one in small.parameters()]) / 2
    dist.all_reduce(mean)
    before = tiny.comm.bytes_sent
    assert abs(tiny.clip_grad_norm_(1e-3) / mean.norm() - 1) < 1e-5
    assert tiny.comm.bytes_sent - before < 2048, tiny.comm.bytes_sent - before
    tiny.step(), tiny.close()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(6):
            optimizer.zero_grad()
            compute_loss(model, rank, step).backward()
            if step < 3:
                assert not caught, caught
            else:
                clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert [one.filename for one in caught] == [__file__], "a warning names the line of the program"
    told = [str(one.message) for one in caught]
    assert len(told) == 1 and "optimizer.clip_grad_norm_(max_norm)" in told[0], told


# --- The ranks -----------------------------------------------------------------------------------


def keep_optimizer(model, optimizer):
    return optimizer


def run_case(rank, name):
    """Returns the plain and the compressed losses, the saved traffic, and the warnings."""
    wanted, taken = CASES[name](rank, keep_optimizer), []

    def take(model, optimizer, *arguments, **options):
        found = onebit.torch.compress(model, optimizer, *arguments, **options)
        taken.extend(found if isinstance(found, list) else [found])
        return found

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = CASES[name](rank, take)
    said = [str(one.message) for one in caught if one.category is onebit.OnebitWarning]
    reports = [one.report() for one in taken]
    for one in taken:
        one.close()
    return wanted, found, min(one.dense_bytes / one.bytes_sent for one in reports), said


def compare_losses(name, rank, size):
    wanted, found, less, said = run_case(rank, name)
    if rank == 0:
        text = f"{name:16} {wanted:.4f} {found:.4f} {less:.1f}x less traffic"
        print(text, *said, sep="\n    ", flush=True)
    assert name != "join_in_8_bits" or not said, said  # no warning: the program has requested this
    clips = name in ("join_and_clip", "in_a_module")  # sends 16 KiB more in each step
    assert less > (0.4 if clips else 1.5), (name, less)
    # With eight seeds momentum SGD ended 0.7 to 4.6 % below the plain loss. The result depends on the
    # vector instructions that torch uses on this processor.
    assert -5 * TOLERANCE * wanted <= found - wanted <= TOLERANCE * wanted, (name, wanted, found)


if __name__ == "__main__":
    scenarios = {name: functools.partial(compare_losses, name) for name in CASES}
    scenarios.update(one for one in list(globals().items()) if one[0].startswith("check_"))
    everything = list(scenarios.values())
    scenarios["all"] = lambda rank, size: [one(rank, size) for one in everything]
    run_scenarios(scenarios)
