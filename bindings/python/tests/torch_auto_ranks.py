"""Scenarios of test_torch.py: the method that chooses itself, with times of a model of a network."""

import contextlib
import copy
import io
import warnings

from torch_common import alike, expect, from_rank_0, run_scenarios
from torch_resume_ranks import Trainer, network

import onebit.torch
import torch
from onebit._native import wrong
from onebit.torch import automatic
from torch import nn
from torch.nn.parallel import DistributedDataParallel

COMPUTE = 0.3
BYTES = {"dense": 4.0, "8 bits": 1.0, "one bit": 0.125}


class Network(automatic.Meter):
    """Seconds by the bytes of an exchange, on a link whose rate changes."""

    rate = 1e3  # elements' bytes a second
    extra = 0.0  # seconds that this rank computes longer
    surprise = {}  # by method: what steps take beyond the model
    probes = 0

    def exchange(self, method, count):
        Network.probes += (method, count) == ("dense", 1024)  # the smallest, twice each time
        return BYTES[method] * count / self.rate

    def step(self, method, total, compute):
        compute = COMPUTE + self.extra
        exchange = BYTES[method] * ELEMENTS / self.rate
        wait = max(exchange - 2 / 3 * COMPUTE, exchange / 25) + self.surprise.get(method, 0.0)
        return compute + wait, compute


ELEMENTS = sum(one.numel() for one in network().parameters())
automatic.Meter = Network


def rate_of(seconds):
    """At which a dense exchange takes so many."""
    return 4.0 * ELEMENTS / seconds


class Run(Trainer):
    """options: of `Trainer`, whose optimizer's class is not named"""

    def __init__(self, saved=None, twin=torch.optim.AdamW, late=None, **options):
        super().__init__(saved, "Momentum" if twin is torch.optim.SGD else "EfficientAdam",
                         twin=twin, compressed=False)  # fmt: skip
        self.optimizer = onebit.torch.auto(self.model, self.optimizer, **options)
        if late is not None:
            self.module.load_state_dict(late["model"])
            self.optimizer.load_state_dict(late["optimizer"])

    @property
    def method(self):
        method = self.optimizer.automatic.method
        assert alike(torch.tensor([float(automatic.METHODS.index(method))])), method
        return method


def choices(rank, size):
    """Each method where it is the shortest; one line on rank 0 says so; a rank that computes longer is
    no slow link; optimizers without a form in one bit have none."""
    cases = [(0.01, "dense"), (0.55, "8 bits"), (20.0, "one bit")]
    for seconds, wanted in cases:
        Network.rate = rate_of(seconds)
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            run = Run()
            run.train(0, 8)
        assert run.method == wanted and run.optimizer.automatic.decided, (seconds, run.method)
        hook = run.optimizer.automatic.hook
        assert (hook.dense if seconds > 0.1 else hook.compressed) == 0  # the first step, too
        lines = said.getvalue().splitlines()
        assert len(lines) == (rank == 0), lines
        if rank == 0 and wanted == "one bit":
            assert "takes one bit, and expects a step of" in lines[0] and "instead of" in lines[0]
        assert type(run.optimizer) is torch.optim.AdamW and alike(run.bits())
        run.close()
    Network.rate = rate_of(20.0)
    run = Run(twin=torch.optim.RMSprop)
    run.train(0, 8)
    assert run.method == "8 bits"
    run.close()
    Network.rate, Network.extra = rate_of(0.2), 5.0 * rank
    run = Run()
    run.train(0, 8)
    assert run.method == "dense"
    run.close()
    Network.extra = 0.0


def corrected(rank, size):
    """A link that changes is followed, both ways; what was expected wrongly is put right; a method that
    is no better is not changed again and again. Parameters are alike, and losses those of dense."""
    plain = Trainer(compressed=False)
    wanted = plain.train(0, 300)
    Network.rate = rate_of(0.01)
    run = Run()
    run.train(0, 30)
    assert run.method == "dense"
    Network.rate = rate_of(20.0 + rank)  # the slower one counts
    run.train(30, 120)
    assert run.method == "one bit" and run.optimizer.automatic.made is not None
    Network.rate = rate_of(0.01)
    Network.surprise = {"one bit": 0.2}  # as of a busy processor
    run.train(120, 240)
    assert run.method == "dense" and run.optimizer.automatic.changes == 2
    assert len(run.optimizer.state) == len(list(run.module.parameters()))
    Network.surprise = {}
    found = run.train(240, 300)
    assert alike(run.bits()) and abs(found / wanted - 1) < 5e-3, (found, wanted)
    assert run.optimizer.report().steps == 300
    run.close()
    Network.rate, Network.surprise = rate_of(20.0), {"8 bits": 30.0, "one bit": 30.0}
    run, before = Run(), Network.probes
    run.train(0, 290)
    assert run.method == "dense" and run.optimizer.automatic.changes <= 3
    assert Network.probes - before < 24, Network.probes
    run.close()
    Network.rate, Network.surprise = rate_of(20.0), {}
    run = Run(bytes_a_day=1e12)
    run.train(0, 60)
    assert run.method == "one bit"

    def choose(total, compute):  # as on two hosts; those of one send nothing
        raise wrong("choice->bytes_a_day is 1e+12: each of the methods sends more")

    Network.rate, run.optimizer.automatic._choose = rate_of(0.01), choose
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.train(60, 180)
    assert run.method == "one bit" and "1e+12: each of the methods sends more; one bit goes on" in str(told[0].message), told
    run.close()


WARMUP = {"warmup_steps": 8, "warmup_bits": 8}  # of which one bit has what is left
CASES = ((torch.optim.AdamW, {}), (torch.optim.AdamW, WARMUP), (torch.optim.SGD, {}))


def resumed(rank, size):
    """The choice is in the state, and goes on to the bit with as many ranks: loaded before auto and
    after it, saved by each rank or by one for all."""
    for seconds, method in ((0.01, "dense"), (0.55, "8 bits"), (20.0, "one bit")):
        for twin, options in CASES:
            Network.rate = rate_of(seconds)
            run = Run(twin=twin, **options)
            run.train(0, 12)
            own = run.saved()
            run.optimizer.consolidate_state_dict()
            whole = from_rank_0(run.saved() if rank == 0 else None)
            run.train(12, 18)
            one_bit = run.optimizer.automatic.made is not None
            assert run.method == method and one_bit == (method == "one bit" and (
                bool(options) or twin is torch.optim.SGD)), (method, twin)  # fmt: skip
            for saved in own, whole:
                for when in "saved", "late":
                    other = Run(**{when: copy.deepcopy(saved)}, twin=twin, **options)
                    assert other.method == method and other.optimizer.automatic.steps == 12
                    other.train(12, 18)
                    assert torch.equal(run.bits(), other.bits()), (method, twin, when)
                    other.close()
            run.close()
    compressed = Trainer()
    compressed.train(0, 8)
    saved = compressed.saved()
    compressed.train(8, 12)
    other = Run(saved, warmup_steps=6, warmup_bits=8)  # of compress: is in one bit
    other.train(8, 12)
    assert other.method == "one bit" and torch.equal(compressed.bits(), other.bits())
    compressed.close(), other.close()


def thawed(rank, size):
    """DistributedDataParallel has no bucket for a layer that is thawed: that is said, once."""
    Network.rate, module = rate_of(0.01), network()
    module[6].requires_grad_(False)
    model = DistributedDataParallel(module)
    optimizer = onebit.torch.auto(model, torch.optim.AdamW(module.parameters()))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(4):
            module[6].requires_grad_(step > 1)
            optimizer.zero_grad()
            model(torch.ones(4, 20)).sum().backward()
            optimizer.step()
    assert ["6.weight, 6.bias: frozen when" in str(one.message) for one in told] == [True], told
    optimizer.close()


def refused(rank, size):
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters())
    wrong = lambda: onebit.torch.compress(model, optimizer, method="automatic")  # noqa: E731
    expect("method is 'automatic', not 'auto'", wrong)
    expect("is a Linear, not a Dist", lambda: onebit.torch.auto(nn.Linear(2, 2), optimizer))
    onebit.torch.auto(model, optimizer).close()


SCENARIOS = (choices, corrected, resumed, thawed, refused)


if __name__ == "__main__":
    run_scenarios(SCENARIOS)
