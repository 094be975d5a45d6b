"""Scenarios of test_torch.py for the automatic choice of the method, with times from a model of a network."""

import contextlib
import copy
import io
import itertools
import json
import time

from torch_common import (
    broadcast_from_rank_0,
    expect_error,
    flatten_parameters,
    is_equal_on_ranks,
    record_warnings,
    run_scenarios,
)
from torch_resume_ranks import Trainer, make_network

import onebit.torch
import torch
import torch.distributed as dist
from onebit._native import argument_error
from onebit.torch import automatic, meter, remainder
from torch import nn
from torch.nn.parallel import DistributedDataParallel

COMPUTE = 0.3
BYTES = {"dense": 4.0, "8 bits": 1.0, "one bit": 0.125, "local steps": 0.125}


class Network(meter.Meter):
    """A model of a link with a variable rate. The seconds of an exchange depend on its bytes. The clock advances by a
    millisecond at each reading, so that no choice depends on how busy this machine is."""

    rate = 1e3  # bytes of elements a second
    extra = 0.0  # additional seconds of computation on this rank
    beside = 0.0  # the part of an exchange's seconds by which it slows down the computation beside it
    surprise = {}  # by method: seconds of a step beyond the model
    probes = 0
    now = itertools.count(0.0, 1e-3).__next__

    def exchange(self, method, count):
        Network.probes += (method, count) == ("one bit", 1024)  # the smallest exchange, made twice
        return BYTES[method] * count / self.rate

    def step(self, method, total, compute, holds):
        compute = COMPUTE + self.extra
        exchange = BYTES[method] * ELEMENTS / self.rate
        if method == "local steps":
            steps = (10, 30, 100, 300)
            exchange /= next((one for one in steps if exchange / one <= 0.75 * COMPUTE), 300)
            return compute + exchange, compute
        compute += 0.0 if holds else self.beside * exchange
        wait = exchange if holds else max(exchange - 2 / 3 * COMPUTE, exchange / 25)
        wait += self.surprise.get(method, 0.0)
        return compute + wait, compute


ELEMENTS = sum(one.numel() for one in make_network().parameters())
automatic.Meter = Network


def record_early_exchanges(run):
    """Returns a set of those steps, counted from 0, whose exchange will begin in the backward pass."""
    automatic, begun, passes = run.optimizer.automatic, set(), []
    add, start = automatic.add, automatic.hook._start

    def add_bucket(bucket):
        passes.append(bucket.index())
        future, made = add(bucket), automatic.made
        passes.clear()
        if made is not None and made._backward.open:
            begun.add(automatic.steps)
        return future

    def start_job(job, *saved):
        if passes:
            begun.add(automatic.steps)
        start(job, *saved)

    automatic.add, automatic.hook._start = add_bucket, start_job
    return begun


def rate_for_seconds(seconds):
    """Returns the rate of a link on which a dense exchange takes that many seconds."""
    return 4.0 * ELEMENTS / seconds


class Run(Trainer):
    """A training with `auto` that may have local steps. options: those of `Trainer`, without the class of the
    optimizer. The warm-up ends with the first choice."""

    def __init__(self, saved=None, twin=torch.optim.AdamW, late=None, **options):
        if twin is torch.optim.AdamW:
            options.setdefault("warmup_steps", 9)
        options.setdefault("local_steps", True)
        super().__init__(saved, "Momentum" if twin is torch.optim.SGD else "EfficientAdam",
                         twin=twin, compressed=False)  # fmt: skip
        self.optimizer = onebit.torch.auto(self.model, self.optimizer, **options)
        if late is not None:
            self.module.load_state_dict(late["model"])
            self.optimizer.load_state_dict(late["optimizer"])

    @property
    def method(self):
        method = self.optimizer.automatic.method
        assert is_equal_on_ranks(torch.tensor([float(meter.METHODS.index(method))])), method
        return method


def check_choices(rank, size):
    """Checks that each method is chosen when it is the fastest, and that rank 0 prints one line about it. A rank that
    computes longer must not look like a slow link. Optimizers without a form in one bit must not get it."""
    cases = [(0.01, "dense"), (0.55, "8 bits"), (12.0, "one bit")]
    for seconds, wanted in cases:
        Network.rate = rate_for_seconds(seconds)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            run = Run()
            run.train(0, 9)
        assert run.method == wanted and run.optimizer.automatic.decided, (seconds, run.method)
        hook = run.optimizer.automatic.hook
        assert (hook.dense if seconds > 0.1 else hook.compressed) == 0  # also in the first step
        lines = said.getvalue().splitlines()
        assert len(lines) == 2 * (rank == 0), lines
        if rank == 0 and wanted == "one bit":
            assert "chooses one bit, and expects a step of" in lines[1] and "instead of" in lines[1]
        assert type(run.optimizer) is torch.optim.AdamW and is_equal_on_ranks(run.get_parameters())
        run.close()
    for twin, method in (torch.optim.AdamW, "one bit"), (torch.optim.SGD, "one bit"), (torch.optim.RMSprop, "8 bits"):
        Network.rate, Network.beside = rate_for_seconds(2.4), 1.0  # as if ranks shared cores
        run = Run(twin=twin)
        begun = record_early_exchanges(run)
        run.train(0, 9)
        assert run.method == method and abs(run.optimizer.automatic._choice.compute - COMPUTE) < 1e-6
        assert not begun & {4, 5, 6, 7} and (3 in begun or twin is torch.optim.AdamW), begun
        run.train(9, 60)
        assert run.method == method and run.optimizer.automatic.changes == 0
        run.close()
    for beside, method in (0.0, "8 bits"), (1.0, "one bit"):  # the exchange in 8 bits is hidden, or not
        Network.rate, Network.beside = rate_for_seconds(0.7), beside
        with contextlib.redirect_stderr(io.StringIO()) as said:
            run = Run()
            run.train(0, 60)
        assert run.method == method and run.optimizer.automatic.changes == 0, (beside, run.method)
        assert ("not overlapped" in said.getvalue()) == (rank == 0 and beside > 0), said.getvalue()
        run.close()
    Network.beside = 0.0
    Network.rate = rate_for_seconds(12.0)
    run = Run(twin=torch.optim.RMSprop)
    run.train(0, 9)
    assert run.method == "8 bits"
    run.close()
    Network.rate, Network.extra = rate_for_seconds(0.2), 5.0 * rank
    run = Run()
    run.train(0, 9)
    assert run.method == "dense"
    run.close()
    Network.extra = 0.0


def check_first_sum(rank, size):
    """Checks that a sum that was timed while the ranks connected is not made again if it was long on all ranks."""
    Network.rate, wait, exchange, seen = rate_for_seconds(0.01), meter.FirstSum.wait, Network.exchange, set()

    def note(self, method, count):
        seen.add(self.of_small_sum)
        return exchange(self, method, count)

    Network.exchange = note
    for own, wanted in (0.5 - 0.25 * rank, 0.25), (0.5 if rank else 0.0625, 0.0):
        meter.FirstSum.wait = lambda self, own=own: wait(self) * 0.0 + own
        run = Run()
        assert seen == {wanted} and run.optimizer.automatic.meter.of_small_sum == 0.0, seen
        seen.clear()
        run.close()
    meter.FirstSum.wait, Network.exchange = wait, exchange
    assert 0.0 < meter.FirstSum(DistributedDataParallel(make_network())).wait() < 100.0
    with onebit.Communicator.torch() as comm:
        own = meter.Meter(comm, None, "cpu")
        own.of_small_sum = 50.0
        assert own.exchange("dense", 1024) == 50.0 and own.exchange("dense", 1025) < 50.0


def check_warmup(rank, size):
    """Checks that a training begins with the warm-up of one bit, whose steps send 8 bits, and chooses at its end. It
    must continue to the bit from any step of the warm-up. If steps wait long, local steps end the warm-up."""
    for seconds, method, decides in (0.01, "dense", 39), (12.0, "one bit", 39), (20.0, "local steps", 8):
        Network.rate = rate_for_seconds(seconds)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            run = Run(warmup_steps=40)
            run.train(0, 5)
            assert run.method == "one bit" and not run.optimizer.automatic.decided
            saved = run.saved()
            for step in range(5, 50):
                assert run.optimizer.automatic.decided == (step >= decides), (step, method)
                run.train(step, step + 1)
        assert run.method == method and run.optimizer.report().steps == 50, (method, run.method)
        sent = run.optimizer.report()
        assert sent.dense_bytes > 3 * sent.bytes_sent or method != "one bit"
        lines = [line for line in said.getvalue().splitlines() if line.startswith("onebit: ")]
        assert len(lines) == 2 * (rank == 0), lines
        assert rank or "auto begins with 40 steps in 8 bits, one bit's warm-up" in lines[0], lines
        for when in "saved", "late":
            with contextlib.redirect_stderr(io.StringIO()):
                other = Run(**{when: copy.deepcopy(saved)}, warmup_steps=40)
                assert other.method == "one bit" and other.optimizer.automatic.steps == 5
                other.train(5, 50)
            assert other.method == method and other.optimizer.automatic.decided, (method, other.method)
            assert method != "one bit" or torch.equal(run.get_parameters(), other.get_parameters()), when
            if method == "local steps":  # its hook has averaged nothing yet
                other.optimizer.consolidate_state_dict()
                whole = broadcast_from_rank_0(other.saved() if rank == 0 else None)
                other.close()
                other = Run(**{when: whole}, warmup_steps=40)
                Network.rate = rate_for_seconds(0.01)
                for step in range(50, 450):
                    other.train(step, step + 1)
                    if other.method != "local steps":
                        break
                other.train(450, 452)
                Network.rate = rate_for_seconds(seconds)
                assert other.method == "dense" and is_equal_on_ranks(collect_moments(other)), other.method
            other.close()
        run.close()
    Network.rate = rate_for_seconds(0.01)
    run = Run(warmup_steps=40)
    with run.model.join():
        run.train(0, 3 + rank)
    assert run.method == "dense" and run.optimizer.automatic.made is None
    run.train(4, 14)  # torch's model stays in join(), so no step is timed
    assert run.method == "dense" and not run.optimizer.automatic.decided
    run.close()
    run = Run(twin=torch.optim.RMSprop)
    run.train(0, 4)
    assert run.optimizer.automatic._holds
    with run.model.join():  # no step is timed in it, so no exchange is held
        run.train(4, 7)
        assert not run.optimizer.automatic._holds
    run.close()
    dense = Trainer(compressed=False)
    dense.train(0, 50)
    other = Run(dense.saved(), warmup_steps=40)  # a training that has already begun has no warm-up
    other.train(50, 60)
    assert other.method == "dense" and other.optimizer.automatic.made is None
    other.close()


def check_corrections(rank, size):
    """Checks that the method follows a link that becomes slower or faster, that wrong expectations are corrected, and
    that a method that is no better is not tried again and again. Parameters must be equal, and losses near those of
    dense steps."""
    plain = Trainer(compressed=False)
    wanted = plain.train(0, 300)
    Network.rate = rate_for_seconds(0.01)
    run = Run()
    run.train(0, 30)
    assert run.method == "dense"
    Network.rate = rate_for_seconds(12.0 + rank)  # the slower rank counts
    run.train(30, 120)
    assert run.method == "one bit" and run.optimizer.automatic.made is not None
    Network.rate = rate_for_seconds(0.01)
    Network.surprise = {"one bit": 0.2}  # as with a busy processor
    run.train(120, 240)
    assert run.method == "dense" and run.optimizer.automatic.changes == 2
    assert len(run.optimizer.state) == len(list(run.module.parameters()))
    Network.surprise = {}
    found = run.train(240, 300)
    assert is_equal_on_ranks(run.get_parameters()) and abs(found / wanted - 1) < 5e-3, (found, wanted)
    assert run.optimizer.report().steps == 300
    run.close()
    Network.rate, Network.surprise = rate_for_seconds(12.0), {"8 bits": 30.0, "one bit": 30.0}
    run, before = Run(), Network.probes
    run.train(0, 290)
    assert run.method == "dense" and run.optimizer.automatic.changes <= 3
    assert Network.probes - before < 24, Network.probes
    run.close()
    Network.rate, Network.surprise = rate_for_seconds(12.0), {}
    run = Run(bytes_a_day=1e12)
    run.train(0, 60)
    assert run.method == "one bit"

    def choose(held, total):  # as on two hosts; ranks of one host send nothing
        raise argument_error("choice->bytes_a_day is 1e+12, but each of the methods sends more")

    Network.rate, run.optimizer.automatic._choose = rate_for_seconds(0.01), choose
    with record_warnings() as told:
        run.train(60, 180)
    assert run.method == "one bit", run.method
    assert "1e+12, but each of the methods sends more; the training continues with one bit" in told[0], told
    run.close()


def check_varying_steps(rank, size):
    """Checks a training whose steps take longer from time to time: auto stays dense, and prints and measures ever less
    often. A state of dense steps has no residuals, so nothing is said about them."""
    Network.rate = rate_for_seconds(0.01)
    with contextlib.redirect_stderr(io.StringIO()) as said, record_warnings() as told:
        run = Run()
        for step in range(0, 1600, 40):
            Network.extra = COMPUTE if step // 40 % 2 else 0.0
            run.train(step, step + 40)
        run.saved()
    Network.extra = 0.0
    lines = said.getvalue().splitlines()
    assert run.method == "dense" and run.optimizer.automatic.changes == 0
    assert len(lines) <= 7 * (rank == 0), lines
    assert run.optimizer.automatic._vain < 20 and not told, (run.optimizer.automatic._vain, told)
    run.close()


def check_resumed(rank, size):
    """Checks that the choice is in the state, and that the training continues to the bit with the same number of ranks:
    with a state loaded before or after auto, saved by each rank or by one for all."""
    for seconds, method in ((0.01, "dense"), (0.55, "8 bits"), (12.0, "one bit")):
        for twin in torch.optim.AdamW, torch.optim.SGD:
            Network.rate = rate_for_seconds(seconds)
            run = Run(twin=twin)
            run.train(0, 12)
            own = run.saved()
            run.optimizer.consolidate_state_dict()
            whole = broadcast_from_rank_0(run.saved() if rank == 0 else None)
            run.train(12, 18)
            one_bit = run.optimizer.automatic.made is not None
            assert run.method == method and one_bit == (method == "one bit"), (method, twin)
            for saved in own, whole:
                for when in "saved", "late":
                    with contextlib.redirect_stderr(io.StringIO()) as said:
                        other = Run(**{when: copy.deepcopy(saved)}, twin=twin)
                        assert other.method == method and other.optimizer.automatic.steps == 12
                        other.train(12, 18)
                    assert said.getvalue() == (f"onebit: auto goes on with {method}, as saved\n" if rank == 0 else "")
                    report = other.optimizer.report()
                    assert (report.steps, report.loaded_steps) == (18, 12) and report.overlapped <= 6, report
                    assert "18 steps (12 of them loaded); since loading, 0 skipped" in str(report), str(report)
                    assert torch.equal(run.get_parameters(), other.get_parameters()), (method, twin, when)
                    other.close()
            run.close()
    compressed = Trainer()
    compressed.train(0, 8)
    saved = compressed.saved()
    compressed.train(8, 12)
    other = Run(saved, warmup_steps=6, warmup_bits=8)  # a state of compress, which is in one bit
    other.train(8, 12)
    assert other.method == "one bit" and torch.equal(compressed.get_parameters(), other.get_parameters())
    compressed.close(), other.close()


def collect_moments(run):
    """Returns all moments of the optimizer."""
    every = (one for state in run.optimizer.state.values() for one in state.values() if one.dim())
    return torch.cat([one.reshape(-1) for one in every])


def count_exchanges(run):
    """Returns the number of exchanges. Checks that the consensus is the same on all ranks; parameters differ by
    residuals."""
    info = run.optimizer.automatic.local.outer.info()
    assert is_equal_on_ranks(torch.tensor([float(info["checksum"]), float(info["exchanges"])], dtype=torch.double))
    return info["exchanges"]


def check_local_steps(rank, size):
    """Checks that the ranks make local steps if one bit would wait for the link longer than it computes. They must have
    the same consensus after each round, become equal when the link is fast again, and reach a loss near that of dense
    steps."""
    plain = Trainer(compressed=False)
    wanted = plain.train(0, 300)
    Network.rate = rate_for_seconds(300.0)
    run = Run()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        run.train(0, 8)
    assert run.method == "local steps" and run.optimizer.automatic.local.steps == 100, said.getvalue()
    if rank == 0:
        assert "chooses local steps (100), and expects a step of 0.394 s instead of" in said.getvalue()
        assert said.getvalue().count("the ranks' models differ until all ranks call optimizer.automatic.synchronize()") == 1
    assert "an outer step (mean, 1 bit) after every 100" in run.optimizer.describe()
    run.train(8, 10)
    assert not is_equal_on_ranks(run.get_parameters())
    Network.rate = rate_for_seconds(600.0)  # no reason to change the number of steps
    run.train(10, 108)
    assert count_exchanges(run) == 1
    run.train(108, 150)
    assert run.method == "local steps" and not is_equal_on_ranks(run.get_parameters())
    assert not is_equal_on_ranks(collect_moments(run))
    before, Network.rate, step = run.optimizer.report(), rate_for_seconds(0.01), 150
    assert before.steps == 150 and before.overlapped <= 150 - run.optimizer.automatic.local.outer.info()["steps"] < 10
    while run.method == "local steps":
        run.train(step, step + 1)
        step += 1
        assert step < 270 and (step != 208 or count_exchanges(run) == 2)
    assert run.method == "dense" and is_equal_on_ranks(run.get_parameters()) and is_equal_on_ranks(collect_moments(run))
    found = run.train(step, 300)
    assert is_equal_on_ranks(run.get_parameters()) and is_equal_on_ranks(collect_moments(run))
    assert abs(found / wanted - 1) < 0.02, (found, wanted)
    assert 0 < before.bytes_sent < before.dense_bytes / 9 and run.optimizer.report().steps == 300
    run.close()


def check_faster_link(rank, size):
    """Checks that local steps end when the link has become faster, although they hardly take less time then, and
    measuring takes long."""
    Network.rate = rate_for_seconds(300.0)
    run = Run()
    run.train(0, 10)
    assert run.method == "local steps"
    run.optimizer.automatic._cost, Network.rate = 1e6, rate_for_seconds(0.01)
    run.train(10, 170)
    assert run.method == "dense" and is_equal_on_ranks(run.get_parameters())
    run.close()


def check_resumed_local_steps(rank, size):
    """Checks states of local steps: saved by each rank between two exchanges, they continue to the bit; so does one
    saved for all after an exchange. A state of only one rank begins again, with a message."""
    Network.rate = rate_for_seconds(300.0)
    for twin in torch.optim.AdamW, torch.optim.SGD:
        run = Run(twin=twin)
        run.train(0, 40)
        assert run.method == "local steps" and not is_equal_on_ranks(run.get_parameters())
        with record_warnings() as told:
            own = run.saved()
        assert any("each rank has its own model" in one for one in told)
        alone = broadcast_from_rank_0(own)
        run.train(40, 150)
        wanted = run.train(150, 160)
        for when in "saved", "late":
            with contextlib.redirect_stderr(io.StringIO()) as said:
                other = Run(**{when: copy.deepcopy(own)}, twin=twin)
                assert other.method == "local steps" and not is_equal_on_ranks(other.get_parameters())
                assert other.optimizer.automatic.steps == 40
                found = other.train(40, 160)
            assert found == wanted and torch.equal(run.get_parameters(), other.get_parameters()), when
            assert said.getvalue().count("auto goes on with local steps (100), as saved; the ranks' models") == (rank == 0)
            other.close()
            other = Run(**{when: copy.deepcopy(alone)}, twin=twin)
            assert other.method == "local steps" and is_equal_on_ranks(other.get_parameters())
            other.train(40, 44)
            other.close()
        run.optimizer.consolidate_state_dict()
        assert is_equal_on_ranks(run.get_parameters())
        whole = broadcast_from_rank_0(run.saved() if rank == 0 else None)
        for when in "saved", "late":
            other = Run(**{when: copy.deepcopy(whole)}, twin=twin)
            assert torch.equal(run.get_parameters(), other.get_parameters()) and other.method == "local steps"
            residuals = [one.optimizer.automatic.local.outer.info()["residual_norm"] for one in (run, other)]
            assert residuals[0] == residuals[1] > 0
            other.close()
        with contextlib.redirect_stderr(io.StringIO()):
            other = Run(copy.deepcopy(whole), twin=twin, local_steps=None)  # goes on as it was saved
            other.train(160, 300)  # measures again meanwhile
        assert other.method == "local steps"
        other.close()
        other = Run(twin=twin, local_steps=False)
        words = "has method local steps, not one of dense"
        expect_error(words, lambda: other.optimizer.load_state_dict(whole["optimizer"]))
        other.close()
        run.train(160, 163)
        assert not is_equal_on_ranks(run.get_parameters())
        other = Run(copy.deepcopy(whole), twin=twin)
        other.train(160, 163)
        other.module.load_state_dict(whole["model"])  # a trainer loads the best model in this way at its end
        loaded = other.get_parameters()
        other.close()
        assert torch.equal(other.get_parameters(), loaded)
        run.close()
        assert is_equal_on_ranks(run.get_parameters())


def check_skipped_local_steps(rank, size):
    """Checks that an exchange is skipped if a rank's values are not finite, and that this rank continues from the
    consensus."""
    Network.rate = rate_for_seconds(300.0)
    run = Run()
    run.train(0, 40)
    if rank == 1:
        for one in run.module.parameters():
            one.grad.fill_(float("inf"))
    run.optimizer.step()
    assert torch.isfinite(run.get_parameters()).all() == (rank != 1)
    run.train(41, 108)
    assert run.optimizer.report().skipped == 1 and torch.isfinite(run.get_parameters()).all()
    assert torch.isfinite(collect_moments(run)).all()
    run.close()
    assert is_equal_on_ranks(run.get_parameters())


def check_closed_local_steps(rank, size):
    """Checks that the moments of a training that ends during local steps are the same on all ranks in a state for torch,
    and in steps after close(). After one bit there are no such steps."""
    Network.rate = rate_for_seconds(300.0)
    run = Run()
    run.train(0, 40)
    own = collect_moments(run)
    given = run.optimizer.torch_state_dict()["state"]
    given = torch.cat([one[name].flatten() for one in given.values() for name in ("exp_avg", "exp_avg_sq")])
    assert run.method == "local steps" and is_equal_on_ranks(given) and not is_equal_on_ranks(own)
    assert torch.equal(collect_moments(run), own)
    run.train(40, 45)
    run.optimizer.close()
    assert is_equal_on_ranks(run.get_parameters())
    run.train(45, 50)
    assert is_equal_on_ranks(run.get_parameters()) and is_equal_on_ranks(collect_moments(run))
    run = Run()
    run.train(0, 4)
    assert run.method == "one bit"  # its warm-up
    run.optimizer.close()
    expect_error("the optimizer is closed: take its state before close()", run.optimizer.step)
    again = DistributedDataParallel(run.module)
    expect_error("ended with close(), in one bit", lambda: onebit.torch.auto(again, run.optimizer))


def check_failed_local_steps(rank, size):
    """Checks that a rank that closes because of an exception does not wait for the others, and that they get an
    error."""
    Network.rate = rate_for_seconds(300.0)
    run = Run(timeout=30)
    run.train(0, 40)
    began = time.monotonic()
    with record_warnings() as told:
        try:
            if rank == 0:
                raise ValueError("of rank 0")
            run.train(40, 140)
        except (ValueError, onebit.Error) as reason:
            assert isinstance(reason, ValueError) == (rank == 0), reason
            run.close()
    assert any("models were not made equal" in one for one in told)
    assert time.monotonic() - began < 20


def check_excluded_local_steps(rank, size):
    """Checks that local steps are not used when they would be wrong or are turned off, and that the printed line says
    why."""
    Network.rate = rate_for_seconds(300.0)

    def check(run, why, said=None):
        """Checks that rank 0 prints the words `said`, or else the reason that the optimizer describes."""
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            run.train(0, 9)
        assert run.method in ("one bit", "8 bits") and why in run.optimizer.describe(), run.optimizer.describe()
        assert rank or (said or why) in printed.getvalue(), printed.getvalue()
        run.close()

    check(Run(local_steps=False), "; no local steps: local_steps=False")
    words = "; local steps (100) would take 0.394 s, at a higher loss: local_steps=True allows them\n"
    check(Run(local_steps=None), "auto: one bit", words)
    check(Run(twin=torch.optim.RMSprop), "; no local steps: not all parameters belong to one optimizer")
    for late in (False, True) if hasattr(torch.amp, "GradScaler") else ():
        run, scaler = Run(), torch.amp.GradScaler("cpu", init_scale=4.0)
        run.train(0, 20 if late else 0)
        assert run.method == ("local steps" if late else "one bit")
        for step in range(8):
            run.optimizer.zero_grad()
            scaler.scale(run.loss(run.model, step, 48, slice(rank, None, size))).backward()
            if late and not step and rank == 1:
                next(run.module.parameters()).grad.fill_(float("inf"))
            scaler.step(run.optimizer)
            scaler.update()
        assert run.method != "local steps" and "a GradScaler" in run.optimizer.describe()
        assert is_equal_on_ranks(run.get_parameters()) and scaler.get_scale() == (2.0 if late else 4.0)
        run.close()
    run = Run()
    run.train(0, 20)
    assert run.method == "local steps"
    with run.model.join():
        run.train(20, 22)
    assert run.method == "8 bits" and is_equal_on_ranks(run.get_parameters())
    assert is_equal_on_ranks(collect_moments(run))
    assert "join()" in run.optimizer.describe()
    with run.model.join():
        run.train(22, 24 + rank)
    run.train(30, 60)
    assert run.method != "local steps"
    run.close()


def check_thawed_layers(rank, size):
    """Checks that one warning reports a thawed layer, for which DistributedDataParallel has no bucket."""
    Network.rate, module = rate_for_seconds(0.01), make_network()
    module[6].requires_grad_(False)
    model = DistributedDataParallel(module)
    optimizer = onebit.torch.auto(model, torch.optim.AdamW(module.parameters()), warmup_steps=8, local_steps=True)

    def make_step():
        optimizer.zero_grad()
        model(torch.ones(4, 20) + rank).sum().backward()
        optimizer.step()

    with record_warnings() as told:
        for step in range(12):
            module[6].requires_grad_(step > 9)
            make_step()
    assert ["6.weight, 6.bias: frozen when" in one for one in told] == [True], told
    Network.rate = rate_for_seconds(300.0)
    for _ in range(120):  # until local steps begin, with equal parameters
        make_step()
    assert optimizer.automatic.method == "local steps"
    optimizer.close()
    assert is_equal_on_ranks(flatten_parameters(module))


def check_waiting_states(rank, size):
    """Checks that a state of an earlier version, which averaged in 8 bits until one bit began, continues in the warm-up
    of one bit."""
    Network.rate = rate_for_seconds(0.01)
    run = Run()
    run.train(0, 12)
    saved = run.saved()
    run.close()
    name = f"hook_{rank}"
    state = next(one for one in saved["optimizer"]["state"].values() if name in one)
    record = remainder._unpack_record(state[name])
    auto = {**json.loads(record["auto"]), "method": "one bit", "waits": True}
    state[name] = remainder._pack_record({**record, "auto": json.dumps(auto)}, len(state[name]))
    for when in "saved", "late":
        other = Run(**{when: copy.deepcopy(saved)}, warmup_steps=40)
        assert other.method == "one bit" and other.optimizer.automatic.made is not None
        assert other.optimizer.automatic.made._remainder.state._loaded is None
        other.train(12, 50)
        assert other.method == "one bit" and is_equal_on_ranks(other.get_parameters())
        other.close()


def check_moments_of(made, size):
    """Checks that the second moments of a rank's own gradients are those of mean gradients, divided by the share that
    the mean keeps."""
    means, own = (remainder.moments_of(made, of_means) for of_means in (True, False))
    shares = remainder.mean_shares(list(own), made.comm, size)
    for one, share in zip(own, shares):
        assert 1 / size <= share <= 1
        assert torch.allclose(own[one]["exp_avg_sq"] * share, means[one]["exp_avg_sq"], rtol=1e-5)
        assert torch.equal(own[one]["exp_avg"], means[one]["exp_avg"])


def check_shares(rank, size):
    """Compares the shares of gradients, estimated for large parameters, with those of summed gradients."""
    random, common = torch.Generator().manual_seed(rank), torch.Generator().manual_seed(size)
    every = [nn.Parameter(torch.zeros(shape)) for shape in ((3,), (400, 500), (100, 41), (7, 600))]
    for one, signal in zip(every, (1.0, 0.3, 2.0, 0.0)):
        one.grad = torch.randn(one.shape, generator=random) + signal * torch.randn(one.shape, generator=common)
    every[1].grad[rank % 2 :: 2] = 0.0  # rows of a table
    with onebit.Communicator.torch() as comm:
        for one, found in zip(every, remainder.mean_shares(every, comm, size)):
            sums = torch.cat([one.grad.reshape(-1) / size, one.grad.square().sum().view(1) / size])
            dist.all_reduce(sums)
            exact = min(max(float(sums[:-1].square().sum() / sums[-1]), 1 / size), 1.0)
            assert abs(found / exact - 1) < 0.05, (tuple(one.shape), found, exact)
        every[0].grad[0] = float("nan") if rank == 0 else 0.0
        assert remainder.mean_shares(every, comm, size) == [1 / size] * 4


def check_change_to_dense(module, size, options):
    """Trains in one bit and then dense. options: of torch's AdamW"""
    automatic.Meter.rate = rate_for_seconds(0.01)
    model, rank = DistributedDataParallel(module), dist.get_rank()
    optimizer = onebit.torch.auto(model, torch.optim.AdamW(module.parameters(), **options), warmup_steps=8)
    for step in range(12):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 20) + rank).sum()
        (loss * float("inf") if step == 0 else loss).backward()
        optimizer.step()
        if step == 5:
            check_moments_of(optimizer.automatic.made, size)
        if step in (5, 11):  # in one bit, and dense
            saved = optimizer.torch_state_dict()["state"]
            assert all(set(of) == {"step", "exp_avg", "exp_avg_sq"} for of in saved.values()), saved
    assert optimizer.automatic.method == "dense" and is_equal_on_ranks(flatten_parameters(module))
    for one in module.inner.parameters():
        moments = optimizer.state[one]
        assert moments["exp_avg_sq"].stride() == one.stride() and torch.isfinite(moments["exp_avg"]).all()
    optimizer.close()


def check_odd_parameters(rank, size):
    """Checks that the change from one bit back to torch gives torch the moments of all parameters except empty ones, in
    their order in memory, also after a first step that was skipped, and with torch's fused steps."""

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.nothing = make_network(), nn.Parameter(torch.empty(0))

        def forward(self, points):
            return self.inner(points) + self.nothing.sum()

    for options in ({}, {"fused": True}) if hasattr(torch.amp, "GradScaler") else ({},):
        check_change_to_dense(Network(), size, options)


def check_refused(rank, size):
    model = DistributedDataParallel(make_network())
    optimizer = torch.optim.AdamW(model.parameters())
    wrong = lambda: onebit.torch.compress(model, optimizer, method="automatic")  # noqa: E731
    expect_error("method is 'automatic', not 'auto'", wrong)
    expect_error("is a Linear, not a Dist", lambda: onebit.torch.auto(nn.Linear(2, 2), optimizer))
    onebit.torch.auto(model, optimizer).close()
    Network.rate = rate_for_seconds(0.01)
    run = Run()
    run.train(0, 12)
    saved = run.saved()
    run.close()
    words = "the ranks' states differ: method dense, "
    expect_error(words + "0 steps, before a choice; method dense, 12 steps", lambda: Run(saved if rank == 0 else None))
    run = Run()
    wrong = words + "12 steps; method one bit, 0 steps, before a choice"
    expect_error(wrong, lambda: run.optimizer.load_state_dict(
        saved["optimizer"] if rank else run.saved()["optimizer"]))  # fmt: skip
    run.train(0, 3)  # as before the error
    assert is_equal_on_ranks(run.get_parameters())
    run.close()


if __name__ == "__main__":
    run_scenarios(globals())
