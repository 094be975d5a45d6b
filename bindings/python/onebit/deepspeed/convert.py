"""Converts the state of DeepSpeed's optimizers to a checkpoint of the same optimizer of onebit."""

import math
import os
from typing import NamedTuple

import numpy as np

from onebit import part
from onebit._native import argument_error, warn
from onebit.deepspeed import state
from onebit.deepspeed.config import read_config

_CLASSES = {"OneBitAdam": "adam", "OneBitLamb": "lamb", "ZeroOneAdam": "zero_one_adam"}
_DEFAULTS = {
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "freeze_step": 100000,
    "var_freeze_step": 100000,
    "var_update_scaler": 16,
    "local_step_scaler": 32678,
    "local_step_clipper": 16,
}
_SNAP = 1e-5  # a relative difference: two operations round by 2^-24 each


class Unit(NamedTuple):
    """A group of elements that DeepSpeed compresses together: `count` elements, padded to `padded`."""

    first: int
    count: int
    padding_first: int
    padded: int


def _list_units(kind, counts, uncompressed, world):
    quantum = world * (world * 8 // math.gcd(world, 8))
    if kind == "lamb":
        if any(uncompressed):
            raise argument_error("a tensor is uncompressed, but DeepSpeed's 1-bit LAMB has no such tensors")
        counts, uncompressed = [sum(counts)], [False]
    units, first, padding = [], 0, 0
    for count, whole in zip(counts, uncompressed):
        padded = -(-count // quantum) * quantum
        if count and not whole:
            units.append(Unit(first, count, padding, padded))
            padding += padded - count
        first += count
    return units


def _make_sections(unit, what, begin, values, padding):
    """Returns the values of a unit from its element `begin` on, as sections of a part."""
    some = max(min(unit.count - begin, len(values)), 0)
    if some:
        yield what, part.ELEMENTS, unit.first + begin, values[:some]
    if padding and some < len(values):
        first = unit.padding_first + begin + some - unit.count
        yield what, part.PADDING, first, values[some:]


def _count_schedule(step, rules):
    """Returns 0/1 Adam's counters after DeepSpeed's call number `step`, and the number of steps for each kind
    of exchange."""
    variance, count, local, local_count, sent = 1, 0, 1, 0, [0, 0, 0]
    for number in range(2, step + 1):
        if number > rules["var_freeze_step"] + 1:
            sent[2 if number % local else 1] += 1
            local_count += 1
            if local_count == rules["local_step_scaler"]:
                local_count, local = 0, min(rules["local_step_clipper"], 2 * local)
        elif number % variance:
            sent[1] += 1
        else:
            sent[0] += 1
            count += 1
            if count == rules["var_update_scaler"]:
                count, variance = 0, 2 * variance
    names = ("var_interval", "var_counter", "local_step_interval", "local_step_counter")
    return dict(zip(names, (variance, count, local, local_count))), sent


class _Parts:
    """The parts of a checkpoint that the same number of onebit's ranks would have saved."""

    def __init__(self, found, layout, rules):
        self.found, self.layout, self.rules = found, layout, rules
        self.world, self.steps = found.world, found.step - 1
        counts = [len(one["parameter"]) for one in found.tensors]
        if sum(counts) != sum(layout.counts) or (not found.flat and counts != list(layout.counts)):
            raise argument_error(f"the checkpoint has tensors of {counts} elements, the optimizer of "
                                 f"{list(layout.counts)}")  # fmt: skip
        same = counts == list(layout.counts)
        flags = layout.uncompressed if same else [False] * len(counts)
        self.sources = _list_units(found.kind, counts, flags, self.world)
        self.units = _list_units(layout.kind, layout.counts, layout.uncompressed, self.world)
        self.padded = layout.deepspeed and self.sources == self.units
        if layout.deepspeed and not self.padded:
            warn("DeepSpeed compressed each group as one tensor; here each tensor has its own scales")
        self.padding = sum(one.padded - one.count for one in self.units) if layout.deepspeed else 0
        self.dense = np.repeat(layout.uncompressed, layout.counts).astype(bool)
        self.alike = []  # (what, elements, padding): each rank saves a share of these
        self.own = [[] for _ in range(self.world)]  # for each rank, the sections that only this rank has

    def add(self, what, elements, padding=None):
        self.alike.append((what, elements, np.zeros(self.padding) if padding is None else padding))

    def share_of(self, rank):
        for what, elements, padding in self.alike:
            for space, values in ((part.ELEMENTS, elements), (part.PADDING, padding)):
                if space == part.PADDING and what == part.PARAMETERS:
                    continue
                begin, end = (len(values) * one // self.world for one in (rank, rank + 1))
                if end > begin:
                    yield what, space, begin, values[begin:end]

    def make_parts(self, stage, numbers, exchanges, frozen_at=0, apart=False):
        head = part.Head(
            self.world, stage, apart, self.padding, self.steps, frozen_at, exchanges, numbers
        )
        return [
            part.make_part(self.layout, head, rank, [*self.share_of(rank), *self.own[rank]])
            for rank in range(self.world)
        ]

    def joined(self, name):
        """Returns the values with this name of all tensors, in one array."""
        return np.concatenate([one[name] for one in self.found.tensors] or [np.zeros(0, "f4")])

    # --- Residuals

    def add_residuals(self, fill=None):
        """Adds the residuals. fill: for each unit, the worker's residual in its padding, if the checkpoint
        has no residuals."""
        known = self.found.ranks
        if known is None and self.world > 1:
            warn("the checkpoint has no residuals, so they begin with zeros: call "
                 "onebit.deepspeed.save_residuals when you save")
        for rank in range(self.world):
            lists = (known[rank].worker, known[rank].server) if known else ([], [])
            for what, values in zip((part.WORKER, part.SERVER), lists):
                self.own[rank] += self._residual(what, rank, values, fill)

    def _residual(self, what, rank, values, fill):
        sections = []
        for k, unit in enumerate(self.sources):
            share = unit.padded // self.world
            begin, size = (0, unit.padded) if what == part.WORKER else (rank * share, share)
            one = np.zeros(size, "f4")
            if values:
                one = values[k]
            elif fill and what == part.WORKER:
                one[unit.count :] = fill[k]
            if len(one) != size:
                raise argument_error(f"a residual of rank {rank} has {len(one)} elements, not {size}")
            sections += _make_sections(unit, what, begin, one, self.padded)
        if self.layout.deepspeed and not self.padded:
            sections += self._no_padding(what, rank)
        return sections

    def _no_padding(self, what, rank):
        """Yields zeros for the padding of units, which differs from DeepSpeed's."""
        for unit in self.units:
            share = unit.padded // self.world
            begin, size = (0, unit.padded) if what == part.WORKER else (rank * share, share)
            first = max(begin, unit.count)
            if first < begin + size:
                yield from _make_sections(unit, what, first, np.zeros(begin + size - first), True)

    # --- Momentum in the form that was sent

    def messages(self, values, tails):
        """Returns the momentum as it was sent: its values are rounded to signs with one scale for each share.
        Also returns its padding, which is `tails`, or the scale of the share where `tails` is None."""
        values, padding = values.astype("f4"), np.zeros(self.padding, "f4")
        for unit, tail in zip(self.sources if self.padded else [], tails):
            share = unit.padded // self.world
            here = values[unit.first : unit.first + unit.count]
            full = np.zeros(unit.padded, "f4")
            full[: unit.count] = here
            for begin in range(0, unit.count, share):
                some = here[begin : begin + share]
                scale = np.median(np.abs(some))
                if np.all(np.abs(np.abs(some) - scale) <= _SNAP * scale):
                    some[:] = np.where(np.signbit(some), -scale, scale)
                full[max(begin, unit.count) : begin + share] = scale
                full[begin + len(some) : begin + share] = scale
            end = unit.padding_first + unit.padded - unit.count
            padding[unit.padding_first : end] = full[unit.count :] if tail is None else tail
        return values, padding

    # --- 1-bit Adam and 1-bit LAMB

    def momentum_parts(self):
        freeze = self.rules["freeze_step"]
        frozen = self.found.step >= freeze and self.steps > 0
        self.add(part.PARAMETERS, self.joined("parameter"))
        if frozen and not self.layout.deepspeed:
            warn("the optimizer has the default profile, so its variance freezes only after one more dense step")
        if not frozen or not self.layout.deepspeed:
            self.add(part.MOMENTUM, self.joined("exp_avg"))
            self.add(part.VARIANCE, self.joined("exp_avg_sq"))
            return self.make_parts(0, self.lamb_numbers(False), (self.steps, 0, 0))
        frozen_at = max(freeze - 1, 1)
        sent = self.steps > frozen_at and self.world > 1
        scalings = self.scalings()
        self.add_frozen_momentum(sent, scalings)
        root = np.sqrt(self.joined("exp_avg_sq")) + np.float32(self.rules["eps"])
        variance = np.where(self.dense, self.joined("exp_avg_sq"), 1 / root)
        lamb = self.found.kind == "lamb"
        nothing = np.full(self.padding, 1 / np.float32(self.rules["eps"]) if lamb else 0)
        self.add(part.VARIANCE, variance, nothing)
        if lamb:
            self.add(part.FRESH, self.joined("exp_avg_sq_fresh"))
        exchanges = (frozen_at, self.steps - frozen_at, 0)
        return self.make_parts(2 if sent else 1, self.lamb_numbers(True), exchanges, frozen_at)

    def add_frozen_momentum(self, sent, scalings):
        momentum = self.joined("exp_avg")
        if not sent:
            beta1 = np.float32(self.rules["betas"][0])
            self.add(part.MOMENTUM, np.where(self.dense, momentum, beta1 * momentum))
            return
        known, tails, fill = self.found.ranks, [None] * len(self.sources), None
        if self.found.kind == "lamb":
            sizes = [len(one["parameter"]) for one in self.found.tensors]
            momentum = momentum * np.repeat(np.asarray(scalings, "f4"), sizes)
            if known and known[0].tail:
                tails = known[0].tail
            elif known is None and self.padded:
                # DeepSpeed's tail begins with zeros: the tail of a message plus the same amount as residual.
                unit, made = self.sources[0], self.messages(momentum, tails)[1]
                fill = [-made[: unit.padded - unit.count]]
        self.add(part.MOMENTUM, *self.messages(momentum, tails))
        self.add_residuals(fill)

    def scalings(self):
        """Returns 1-bit LAMB's scalings, which DeepSpeed computes before the first compressed step."""
        if self.found.kind != "lamb":
            return []
        tensors = self.found.tensors
        if all("scaling_coeff" in one for one in tensors):
            return [float(one["scaling_coeff"]) for one in tensors]
        levels = [float(np.sqrt(np.mean(np.square(one["exp_avg"], dtype="f8")))) for one in tensors]
        if not all(levels):
            return [1.0] * len(levels)
        return [sum(levels) / len(levels) / one for one in levels]

    def lamb_numbers(self, frozen):
        if self.found.kind != "lamb":
            return np.zeros(0)
        lists = [
            [float(one.get("lamb_coeff_freeze", 0)) for one in self.found.tensors],
            [float(one.get("last_factor", 1)) for one in self.found.tensors],
            self.scalings() if frozen else [1.0] * len(self.found.tensors),
        ]
        return np.concatenate(lists)

    # --- 0/1 Adam

    def zero_one_parts(self):
        found, rules = self.found, self.rules
        frozen = found.step > rules["var_freeze_step"]
        if frozen and not self.layout.deepspeed:
            raise argument_error("a checkpoint of 0/1 Adam with a frozen variance needs profile='deepspeed'")
        counters, exchanges = _count_schedule(found.step, rules)
        first = found.tensors[0]
        for name, value in counters.items():
            if frozen == name.startswith("local") and first.get(name, value) != value:
                warn(f"{name} is {first[name]} in the checkpoint and {value} by the options; the training "
                     f"continues with {value} (DeepSpeed restarts its schedules when it loads)")
        local = counters["local_step_interval"]
        apart = frozen and found.step % local != 0 and found.step > rules["var_freeze_step"] + 1
        rates = float(first.get("lrs", 0)) if apart else 0.0
        numbers = np.array([exchanges[0], apart and self.world > 1, 0, 0], "<u8")
        numbers[2:] = np.array([rates, rates]).view("<u8")
        self.add_zero_one(frozen, apart)
        self.add_residuals()
        frozen_at = rules["var_freeze_step"] if frozen else 0
        return self.make_parts(int(frozen), numbers, exchanges, frozen_at, bool(numbers[1]))

    def add_zero_one(self, frozen, apart):
        parameter, variance = self.joined("parameter"), self.joined("exp_avg_sq")
        if frozen:
            eps = np.float32(self.rules["eps"])
            self.add(part.VARIANCE, np.sqrt(variance) + eps, np.full(self.padding, eps))
            moved = self.joined("momentum_accumulator") if apart else np.zeros(len(parameter))
            self.add(part.ANCHOR, parameter - moved.astype("f4"))
        else:
            self.add(part.VARIANCE, variance)
        if apart and self.world > 1:
            self.add_own()
            return
        self.add(part.PARAMETERS, parameter)
        self.add(part.MOMENTUM, self.joined("exp_avg"))
        if frozen:
            self.add(part.MOVED, moved)

    def add_own(self):
        """Adds the state that differs between ranks between two synchronisations. If only rank 0's is known,
        uses it for all ranks."""
        known = self.found.ranks
        if not known or not known[0].own:
            warn("saved between two synchronisations of 0/1 Adam, with rank 0's state only: all ranks "
                 "begin with it")
        names = ("parameter", "exp_avg", "momentum_accumulator")
        for rank in range(self.world):
            tensors = known[rank].own if known and known[rank].own else self.found.tensors
            for what, name in zip((part.PARAMETERS, part.MOMENTUM, part.MOVED), names):
                values = np.concatenate([one[name] for one in tensors])
                self.own[rank].append((what, part.ELEMENTS, 0, values))
                if what != part.PARAMETERS and self.padding:
                    self.own[rank].append((what, part.PADDING, 0, np.zeros(self.padding)))


def parts_of(found, layout, arguments):
    """Returns the parts that an optimizer with this layout loads. arguments: its options by DeepSpeed's
    names"""
    if found.kind != layout.kind:
        raise argument_error(f"the checkpoint belongs to {found.kind}, but the optimizer is {layout.kind}")
    rules = {name: arguments.get(name) or value for name, value in _DEFAULTS.items()}
    parts = _Parts(found, layout, rules)
    return parts.zero_one_parts() if found.kind == "zero_one_adam" else parts.momentum_parts()


def convert_checkpoint(directory, output, config, tag=None, names=None, profile="deepspeed"):
    """Writes a checkpoint of onebit from a checkpoint that DeepSpeed up to 0.19.6 has saved with OneBitAdam,
    OneBitLamb or ZeroOneAdam. `save_residuals` adds the state that DeepSpeed leaves out.

    directory: the argument of engine.save_checkpoint
    output: a directory; the optimizer's `onebit.load_files(output)` loads it, with the parameters, on any
        number of ranks
    config: DeepSpeed's configuration, for options such as freeze_step
    tag: None: the latest
    names: the names of the parameters in the order of DeepSpeed's optimizer; None: all parameters of the
        model, in the model's order
    profile: the profile of the optimizer that will load the checkpoint

    Raises `Error` if the directory has no such checkpoint. Warns of state that is not converted.
    """
    settings = read_config(config, profile=profile, engine=True)
    folder, checkpoint = state.read_folder(directory, tag)
    module = checkpoint["module"]
    if names is None:
        left_out = {*checkpoint["buffer_names"], *(checkpoint.get("shared_params") or ())}
        names = [name for name in module if name not in left_out]
    missing = [name for name in names if name not in module]
    if missing:
        raise argument_error(f"{folder} has no parameter {missing[0]!r}")
    found = state.read_state(folder, checkpoint, [(k, module[one]) for k, one in enumerate(names)])
    kind = _CLASSES[settings.kind]
    counts = [len(one["parameter"]) for one in found.tensors]
    layout = part.Layout(kind, str(profile) == "deepspeed", counts, [False] * len(counts))
    parts = parts_of(found, layout, settings.arguments)
    os.makedirs(output, exist_ok=True)
    for rank, data in enumerate(parts):
        with open(os.path.join(output, f"part-1-{rank}"), "wb") as file:
            file.write(data)
    with open(os.path.join(output, "manifest"), "w", encoding="ascii", newline="\n") as file:
        file.write(part.manifest(kind, found.step - 1, parts))
