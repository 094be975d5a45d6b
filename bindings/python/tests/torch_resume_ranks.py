"""Scenarios of test_torch.py, started like torch_carry_ranks.py: a trainer saves, ends and resumes."""

import copy
import io
import os
import warnings
from unittest import mock

from torch_common import (
    broadcast_from_rank_0,
    expect_error,
    flatten_parameters,
    is_equal_on_ranks,
    load_checkpoint,
    make_shared_directory,
    record_warnings,
    run_scenarios,
    save_checkpoint,
)

import onebit
import onebit.torch
import torch
import torch.distributed as dist
from onebit.torch import schedule
from torch import nn
from torch.nn.parallel import DistributedDataParallel

KINDS = {
    "EfficientAdam": {"warmup_steps": 6, "warmup_bits": 8},
    "Adam": {"freeze_step": 6, "warmup_bits": 8},
    "Lamb": {"freeze_step": 6},
    "ZeroOneAdam": {"variance_freeze_step": 6, "local_step_scaler": 2, "local_step_clipper": 4},
    "Momentum": {"warmup_steps": 6, "warmup_bits": 8},
    "Lion": {},
}
SAFELY = {"weights_only": True} if hasattr(torch, "compile") else {}  # 1.13: no numbers


def make_network(dtype=torch.float32):
    torch.manual_seed(3)
    last = torch.channels_last
    return nn.Sequential(
        nn.Unflatten(1, (5, 2, 2)), nn.Conv2d(5, 16, 2, padding=1), nn.Tanh(), nn.Flatten(),
        nn.Linear(144, 60), nn.Tanh(), nn.Linear(60, 1),
    ).to(memory_format=last).to(dtype)


class Trainer:
    """A program's model and torch optimizer, in the order of nanoGPT: a saved state is loaded into both,
    and then they are wrapped."""

    def __init__(self, saved=None, kind="EfficientAdam", group=None, twin=None, dtype=torch.float32,
                 compressed=True, mixed=False, late=None, **options):
        self.module = make_network(dtype)
        twin = twin or (torch.optim.SGD if kind == "Momentum" else torch.optim.AdamW)
        more = {"momentum": 0.9} if twin is torch.optim.SGD else {}
        self.rate = 1e-2 if more else 3e-3
        groups = [{"params": list(self.module.parameters())}]
        if mixed:  # the first group has other betas: it is averaged in 8 bits
            groups = [{"params": groups[0]["params"][:2]}, {"params": groups[0]["params"][2:]}]
            groups[1]["betas"] = (0.8, 0.99)
        inner = twin(groups, lr=self.rate, **more)
        if saved is not None:
            self.module.load_state_dict(saved["model"])
            inner.load_state_dict(saved["optimizer"])
        self.model = DistributedDataParallel(self.module, process_group=group)
        options = {**KINDS.get(kind, {}), **options}
        kind = getattr(onebit.torch, kind)
        self.optimizer = inner
        if compressed:
            self.optimizer = onebit.torch.compress(self.model, inner, kind, **options)
        if late is not None:
            self.module.load_state_dict(late["model"])
            self.optimizer.load_state_dict(late["optimizer"])
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def train(self, first, end):
        """Trains on points that are the same for any number of ranks. Returns the loss on other points. `info` reads
        the whole state, which takes as long as a part of a step, so only a change of the method may call it."""
        kind = onebit.optimizer.Optimizer
        with mock.patch.object(kind, "info", autospec=True, side_effect=kind.info) as info:
            self._make_steps(first, end)
        assert info.call_count <= 1 + (end - first) // 10, info.call_count
        with torch.no_grad():
            return self.loss(self.module, -1, 4096, slice(None)).item()

    def _make_steps(self, first, end):
        for step in range(first, end):
            self.optimizer.zero_grad()
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate * (1 - step / 300)
            self.loss(self.model, step, 48, slice(self.rank, None, self.ranks)).backward()
            self.optimizer.step()

    def loss(self, model, seed, count, some):
        random = torch.Generator().manual_seed(seed + 7)
        points, noise = (torch.randn(count, n, generator=random)[some] for n in (20, 1))
        wanted = points[:, :1].sin() + points[:, 1:2] + noise
        dtype = next(model.parameters()).dtype
        return ((model(points.to(dtype)) - wanted) ** 2).mean()

    def saved(self):
        """Returns the state after it was saved by torch.save and loaded by torch.load."""
        memory = io.BytesIO()
        torch.save(
            {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}, memory)
        memory.seek(0)
        return torch.load(memory, **SAFELY)

    def get_parameters(self):
        return flatten_parameters(self.module)

    def close(self):
        self.optimizer.close()


AVERAGED = ({"kind": "HookState"}, {"kind": "HookState", "bits": 2, "normalise": True},
            {"mixed": True})  # fmt: skip


def choose_with_times(times, function):
    """Calls a function while exchanges take these seconds: by schedule, and of a small exchange."""

    def time_exchange(comm, count, which):
        return times["small" if count == schedule._SMALL else which], True

    with mock.patch.object(schedule, "_time_exchange", time_exchange):
        return function()


def check_schedules(rank, size):
    """Each optimizer makes the same steps with both schedules, and goes on with a state of the other one. The slowest
    rank decides."""
    gathers = {"small": 0.04, "exchange": [1.0, 0.1][rank % 2], "allgather": [0.5, 0.8][rank % 2]}
    others = {**gathers, "small": 0.004}, {**gathers, "allgather": [0.5, 0.95][rank % 2]}
    for kind in KINDS:
        plain = Trainer(kind=kind)
        plain.train(0, 14)
        for before, after in ((gathers, others[0]), (others[1], gathers)):
            first = choose_with_times(before, lambda: Trainer(kind=kind))
            first.train(0, 9)
            second = choose_with_times(after, lambda: Trainer(first.saved(), kind))
            second.train(9, 14)
            found = [one.optimizer.gather_seconds is not None for one in (first, second)]
            assert found == [one is gathers and kind != "Lion" for one in (before, after)], found
            assert torch.equal(second.get_parameters(), plain.get_parameters()), kind
            for one in (first, second):
                one.optimizer.close()
        for options in ({"schedule": "exchange"}, {"max_bits": 4}):
            one = choose_with_times(gathers, lambda: Trainer(kind=kind, **options))
            assert one.optimizer.gather_seconds is None
            one.optimizer.close()
        plain.optimizer.close()
    comm = onebit.Communicator.torch()
    seconds, alone = schedule._time_exchange(comm, 5000, schedule.ALLGATHER)
    assert seconds > 0 and not alone  # the ranks share a host, and the choice is the library's
    assert schedule.choose_schedule(comm, 5000) == (schedule.AUTOMATIC, None)
    for count, wanted in ((0, 0.04), (2**22, 0.06), (2**23, 0.08), (2**24, None)):  # the exchange: 0.085, 0.09, 0.1
        times = {"small": 0.08, "exchange": 0.085, "allgather": 0.06}
        _, found = choose_with_times(times, lambda: schedule.choose_schedule(comm, count))
        assert found is wanted or abs(found - wanted) < 1e-6, (count, found)
    comm.close()


def check_resumed(rank, size):
    """Checks that a state continues to the bit: for every optimizer and for the hook's averages in few
    bits, in the warm-up and after it, saved by each rank or by one for all, and loaded before or after
    `compress`."""
    for options in (*({"kind": kind} for kind in KINDS), *AVERAGED):
        trainer, places = Trainer(**options), {}
        for step in 4, 8:
            trainer.train(step - 4, step)
            own = trainer.saved()
            trainer.optimizer.consolidate_state_dict()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                whole = broadcast_from_rank_0(trainer.saved() if rank == 0 else None)
            places[step] = {"saved": own, "late": whole} if step == 4 else {"saved": whole, "late": own}
        trainer.train(8, 12)
        for step, states in places.items():
            for when, saved in states.items():
                other = Trainer(**{when: copy.deepcopy(saved)}, **options)  # a copy: torch shares tensors
                other.train(step, 12)
                assert torch.equal(trainer.get_parameters(), other.get_parameters()), (options, step, when)
                other.close()
        trainer.close()
        if options in AVERAGED:
            states = {key: {name: one for name, one in of.items() if not name.startswith("hook_")}
                      for key, of in own["optimizer"]["state"].items()}  # fmt: skip
            other = Trainer({**own, "optimizer": {**own["optimizer"], "state": states}}, **options)
            other.train(8, 12)
            assert not torch.equal(trainer.get_parameters(), other.get_parameters())  # otherwise the test is empty
            other.close()


def check_other_averaging(rank, size):
    """Checks that residuals become their means with another number of ranks."""
    parts = {}
    for number in range(2):
        bucket = {"numbers": [0], "sizes": [4], "bits": 8, "server_start": 2 * number,
                  "worker": torch.arange(1.0, 5) + 2 * number,
                  "server": torch.tensor([10.0, 20.0]) + 20 * number}  # fmt: skip
        parts[number] = {"rank": number, "ranks": 2, "buckets": {0: bucket},
                         "moments": {0: (torch.full((4,), 2.0 + number), 7)}}  # fmt: skip
    mean = onebit.torch.remainder._average_parts(parts, 2, 3)
    assert mean["buckets"][0]["worker"].tolist() == [12, 23, 34, 45] and mean["rank"] == 2
    assert mean["moments"][0][0].tolist() == [2.5] * 4 and mean["buckets"][0]["server"] is None
    pair = dist.new_group(list(range(size - 1)))
    groups = [dist.new_group([0]), None]
    for options in AVERAGED:
        saved = None
        if rank < size - 1:
            trainer = Trainer(group=pair, **options)
            trainer.train(0, 30)
            trainer.optimizer.consolidate_state_dict()
            saved = trainer.saved()
            wanted = trainer.train(30, 100)
            trainer.close()
        saved, wanted = broadcast_from_rank_0((saved, wanted) if rank == 0 else None)
        for count, group in zip((1, size), groups):
            if rank < count:
                other = Trainer(copy.deepcopy(saved), group=group, **options)
                found = other.train(30, 100)
                assert abs(found - wanted) < 2e-3 * wanted, (options, count, found, wanted)
                other.close()


def check_half_precision(rank, size):
    """Checks parameters of 16 bits: torch's optimizer rounds the state that it loads, which a warning
    reports, but the compressed optimizer loads the same state exactly."""
    if not hasattr(torch, "compile"):
        return  # torch 1.13 has no convolution in float16, and its gloo no bfloat16
    trainer = Trainer(dtype=torch.float16)
    trainer.train(0, 8)
    saved = trainer.saved()
    trainer.train(8, 10)
    with record_warnings() as said:
        other = Trainer(saved, dtype=torch.float16)
    assert sum("was rounded to torch.float16" in one for one in said) == 1, said
    other.optimizer.load_state_dict(saved["optimizer"])
    other.train(8, 10)
    assert torch.equal(trainer.get_parameters(), other.get_parameters())
    other.close(), trainer.close()


def check_close(found, wanted):
    assert abs(found - wanted) < 2e-3 * wanted, (found, wanted)


def check_other_rank_counts(rank, size):
    """Resumes a training of size - 1 ranks on each number of ranks: from a consolidated state, and from a
    state of only rank 0, for which there is a warning."""
    groups = [dist.new_group(list(range(count))) for count in range(1, size)] + [None]
    pair = groups[-2]
    for stop in 60, 150:
        saved = [None, None, None]
        if rank < size - 1:
            trainer = Trainer(group=pair)
            trainer.train(0, stop)
            with record_warnings() as said:
                saved[0] = trainer.saved()
                trainer.saved()
            words = "call consolidate_state_dict() on all ranks first: otherwise the residuals"
            assert [words in one for one in said] == [True], said
            trainer.optimizer.consolidate_state_dict()
            saved[1] = trainer.saved()
            saved[2] = trainer.train(stop, 300)
            trainer.close()
        saved = broadcast_from_rank_0(saved)
        for number, one in enumerate(saved[:2]):
            for count, group in enumerate(groups, 1):
                if rank < count:
                    other = Trainer(one, group=group)
                    found = other.train(stop, 300)
                    check_close(found, saved[2])
                    assert (number, count) != (1, size - 1) or found == saved[2]
                    other.close()


def check_dense_states(rank, size):
    """Checks that a checkpoint of torch's AdamW, Adam or SGD continues with its moments and its step."""
    cases = [
        (torch.optim.AdamW, "EfficientAdam", {}, (4, 60)),
        (torch.optim.SGD, "Momentum", {}, (60,)),
        (torch.optim.AdamW, "EfficientAdam", {"warmup_steps": onebit.WARMUP_NONE, "warmup_bits": 0}, (60,)),
        (torch.optim.Adam, "Adam", {}, (60,)),
        (torch.optim.AdamW, "Lamb", {}, (60,)),
        (torch.optim.AdamW, "ZeroOneAdam", {}, (60,)),
    ]
    for twin, kind, options, stops in cases:
        plain = Trainer(kind=kind, twin=twin, compressed=False)
        places, done = [], 0
        for stop in stops:
            plain.train(done, stop)
            places.append(plain.saved())
            done = stop
        wanted = plain.train(done, 150)
        for stop, saved in zip(stops, places):
            run = Trainer(saved, kind, twin=twin, **options)
            assert run.optimizer.comm.bytes_sent < 4096  # all ranks have the moments already
            steps, before = run.optimizer.onebit.info()["steps"], run.train(0, 0)
            assert steps == (6 if kind == "Momentum" else stop), (kind, steps)
            found = run.train(stop, 150)
            # Steps are dense for the rest of the warm-up. After the warm-up one step is dense, or none.
            assert run.optimizer.onebit.info()["exchanges"][0] == (
                0 if options or kind == "ZeroOneAdam" else max(6 - stop, kind != "EfficientAdam"))
            check_close(found, wanted) if kind in ("EfficientAdam", "Momentum") else None
            assert found < before and found < 1.005 * wanted, (kind, before, found, wanted)
            run.close()
    expect_error("cannot begin with another optimizer's state", lambda: Trainer(saved, "Lion"))
    first = saved["optimizer"]["state"][0]
    first["exp_avg"] = first["exp_avg"] * (1 + rank / 1e6)  # as other processors may round
    run = Trainer(saved, "EfficientAdam", twin=torch.optim.AdamW)
    run.train(60, 62)
    assert run.optimizer.comm.bytes_sent > 4096 and is_equal_on_ranks(run.get_parameters())
    run.close()


def check_distributed_states(rank, size):
    """Checks torch.distributed.checkpoint: each rank saves its own state, and loads it in place."""
    if not hasattr(torch, "compile"):
        return
    directory = make_shared_directory()
    pair = dist.new_group(list(range(size - 1)))
    alone = dist.new_group([0])
    for kind in "EfficientAdam", "ZeroOneAdam", "Lion":
        for stop in 4, 8:
            where = os.path.join(directory, f"{kind}-{stop}")
            if rank < size - 1:
                trainer = Trainer(kind=kind, group=pair)
                trainer.train(0, stop)
                save_checkpoint(trainer.model, trainer.optimizer, where, pair)
                trainer.train(stop, 12)
            dist.barrier()
            for group, count in ((pair, size - 1), (alone, 1), (None, size)):
                if rank >= count or (kind, count) == ("Lion", 1):  # Lion's momentum differs between ranks
                    continue
                if count == size and kind != "EfficientAdam":  # 0/1 Adam's state also does
                    continue
                other = Trainer(kind=kind, group=group)
                load_checkpoint(other.model, other.optimizer, where, group, partial=count == size)
                assert other.optimizer.onebit.info()["steps"] == stop
                other.train(stop, 12)
                wanted = trainer.get_parameters() if count == size - 1 else other.get_parameters()
                assert torch.equal(wanted, other.get_parameters()) and wanted.isfinite().all(), (kind, stop)
                assert group is not None or is_equal_on_ranks(other.get_parameters())
                other.close()
            if rank < size - 1:
                trainer.close()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run_scenarios(globals())
