"""Converts between torch's `optimizer.state[parameter]` and the library's state.

A rank's part of a checkpoint (docs/checkpoints.md) has all of the library's state. Its sections of elements
become tensors of the parameter's shape, named as in `_NAMES`. If each rank has its own state, the name ends
with the rank, so that all ranks can save into one checkpoint (torch.distributed.checkpoint). The rest of a part
is the tensor `head_RANK` of the first parameter. It has type uint8, so that its elements do not change if torch
converts a state to the type of its parameter.
"""

import functools
import json
import struct
from typing import Any, NamedTuple

import numpy as np
import torch

from onebit import part
from onebit._native import argument_error, warn
from onebit.torch import remainder
from onebit.torch.ranks import FLOATS, agreed, gather

# The names of a part's sections in torch's state.
_NAMES = {
    part.PARAMETERS: "parameter",
    part.MOMENTUM: "momentum",
    part.VARIANCE: "variance",
    part.FRESH: "fresh_variance",
    part.ANCHOR: "anchor",
    part.MOVED: "moved",
    part.WORKER: "worker_residual",
    part.SERVER: "server_residual",
    part.MOMENTS: "own_variance",
}
_RESIDUALS = part.WORKER, part.SERVER
# The sections that are computed from the state of torch's own optimizers.
_OF_TORCH = {
    "exp_avg": part.MOMENTUM,
    "momentum_buffer": part.MOMENTUM,
    "exp_avg_sq": part.VARIANCE,
}
# By kind, the sections that exist only before or after the freeze, or only for some elements. When they do not
# exist, they are saved as zeros, and so are residuals: loading in place always needs the same names.
_LATER = {
    "lamb": (part.FRESH,), "zero_one_adam": (part.ANCHOR, part.PARAMETERS), "lion": (part.MOMENTUM,),
    "efficient_adam": (part.VARIANCE,), "efficient_lamb": (part.VARIANCE,),
}
_HEAD = "head_"
# The bytes of a head, in each stage of an optimizer. The size is fixed so that the tensor can be loaded in
# place.
_HEAD_BYTES, _HEAD_BYTES_OF_TENSOR = 2**14, 512
_SECTION = 4096  # elements of a section: few, since Python computes its checksum
_COMPRESSED = 2  # stage: the momentum is the latest message


class Head(NamedTuple):
    """A part without its elements. It has the header, beta1 of the latest step, the sections as (what, space,
    first, count, values), with None in place of elements, and the number of the shard, which is 0 without
    shards."""

    header: bytearray
    beta1: float
    sections: Any
    shard: int


def strides_of(tensor):
    return [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size != 1]


def flat(tensor):
    """Returns a tensor's elements in the order of its memory, or None if there are gaps between them."""
    if tensor.is_contiguous():
        return tensor.flatten()
    end = 1
    for stride, size in sorted(strides_of(tensor)):
        if stride != end:
            return None
        end *= size
    return tensor.as_strided((tensor.numel(),), (1,))


def in_order_of(tensor, parameter):
    """Returns the tensor, or a copy of it with the strides of the parameter. Returns None for None."""
    if tensor is None or strides_of(tensor) == strides_of(parameter):
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)


def _is_own(what, header):
    """True if each rank has its own such section: residuals and a rank's own moments; shards, such as Lion's
    momentum; and that state of 0/1 Adam which differs between synchronisations."""
    kind = part.kind_of(header)
    return (
        what in (*_RESIDUALS, part.MOMENTS)
        or (part.shards_of(header) and what != part.PARAMETERS)
        or (kind == "lion" and what == part.MOMENTUM)
        or (kind == "zero_one_adam" and what in (part.PARAMETERS, part.MOMENTUM, part.MOVED))
    )


def _is_kept(what, header, parameters):
    """True if a section is in the state. Parameters in float32 that are equal on all ranks belong to the model,
    not to the state."""
    wide = not parameters or parameters[0].dtype == torch.float32
    return what != part.PARAMETERS or part.kind_of(header) == "zero_one_adam" or not wide


# --- From parts to a state -----------------------------------------------------------------------


def _spans_overlap(spans):
    spans = sorted(spans)
    return any(first < end for (_, end), (first, _) in zip(spans, spans[1:]))


def _find_spans(opened):
    """Returns, by kind, the first element and the end of each section of elements in all parts."""
    spans = {}
    for one in opened:
        for what, space, first, values in one.sections:
            if what in _NAMES and space == part.ELEMENTS:
                spans.setdefault(what, []).append((first, first + len(values)))
    return spans


def _encode_head(one, beta1, tensors, shard):
    rows, data = b"", b""
    for what, space, first, values in one.sections:
        elements = what in _NAMES and space == part.ELEMENTS
        rows += struct.pack("<IIQQ", what, space, first, len(values))
        data += b"" if elements else values.tobytes()
    made = struct.pack("<QQd", len(rows), len(data), beta1) + one.header + rows + data
    room = _HEAD_BYTES + _HEAD_BYTES_OF_TENSOR * tensors
    made += bytes(-(len(made) + 4) % room) + struct.pack("<I", shard)
    return torch.frombuffer(bytearray(made), dtype=torch.uint8)


def _decode_head(tensor):
    data = tensor.detach().cpu().to(torch.uint8).numpy().tobytes()
    rows, _, beta1 = struct.unpack_from("<QQd", data)
    at = struct.calcsize("<QQd")
    header = bytearray(data[at : at + part.HEADER])
    at += part.HEADER
    sections, values_at = [], at + rows
    for row in range(at, at + rows, struct.calcsize("<IIQQ")):
        what, space, first, count = struct.unpack_from("<IIQQ", data, row)
        values = None
        if what not in _NAMES or space != part.ELEMENTS:
            values = np.frombuffer(data, part.type_of(what), count, values_at)
            values_at += values.nbytes
        sections.append((what, space, first, count, values))
    return Head(header, beta1, sections, struct.unpack("<I", data[-4:])[0])


def of_parts(parameters, parts, beta1, shards):
    """Returns the state of parameters from this rank's whole part, or from the parts of all ranks."""
    opened = [part.read_part(one) for one in parts]
    spans, arrays = _find_spans(opened), {}
    state = {one: {} for one in parameters}
    for one in opened:
        rank = part.rank_of(one.header)
        for what, space, first, values in one.sections:
            elements = what in _NAMES and space == part.ELEMENTS
            if not elements or not _is_kept(what, one.header, parameters):
                continue
            alone = _is_own(what, one.header) and (len(parts) == 1 or _spans_overlap(spans[what]))
            arrays.setdefault(_section_name(what, one.header, alone), []).append((first, values))
        for what in _later_sections(one.header) if len(parts) == 1 else ():
            arrays.setdefault(_section_name(what, one.header, _is_own(what, one.header)), [])
        if parameters:
            head = _encode_head(one, beta1, len(parameters), shards.number)
            state[parameters[0]][f"{_HEAD}{rank}"] = shards.row(head)
    first, uncompressed, header = 0, part.uncompressed_of(opened[0]), opened[0].header
    always = {_section_name(what, header, _is_own(what, header)) for what in _later_sections(header)}
    for number, parameter in enumerate(parameters):
        local = shards.local(parameter)
        count = local.numel()
        state[parameter]["step"] = torch.tensor(float(part.steps_of(header)), **FLOATS)
        for name, pieces in arrays.items():
            some = _slice_elements(pieces, first, count)
            filled = not uncompressed[number] or name == _NAMES[part.VARIANCE]
            if some is None and name in always and filled:
                some = np.zeros(count, "<f4")
            if some is not None:
                tensor = torch.empty_like(local, dtype=torch.float32, device="cpu")
                flat(tensor).copy_(torch.from_numpy(some))
                state[parameter][name] = shards.distribute_like(parameter, tensor)
        first += count
    return state


def _section_name(what, header, alone):
    """Returns the name of a section. alone: whether the rank is part of the name"""
    return f"{_NAMES[what]}_{part.rank_of(header)}" if alone else _NAMES[what]


def _later_sections(header):
    sharded = (part.MOMENTUM, part.VARIANCE) if part.shards_of(header) else ()
    return *_RESIDUALS, *sharded, *_LATER.get(part.kind_of(header), ())


def _slice_elements(pieces, first, count):
    """Returns the elements that pieces (first, values) contain, with zeros between the pieces. None: there are
    no elements."""
    made = None
    for begin, values in pieces:
        low, high = max(first, begin), min(first + count, begin + len(values))
        if low < high:
            made = np.zeros(count, "<f4") if made is None else made
            made[low - first : high - first] = values[low - begin : high - begin]
    return made


# --- From a state to parts -----------------------------------------------------------------------


class _Loaded:
    """A state that is being loaded, on this rank."""

    def __init__(self, optimizer, state):
        local = optimizer._shards.local
        self.optimizer, self.parameters = optimizer, [local(one) for one in optimizer._parameters]
        self.state = {
            mine: {name: local(value) for name, value in (state.get(one) or {}).items()}
            for mine, one in zip(self.parameters, optimizer._parameters)
        }
        first = self.state[self.parameters[0]] if self.parameters else {}
        self.heads = {
            int(name[len(_HEAD) :]): _decode_head(tensor)
            for name, tensor in first.items()
            if name.startswith(_HEAD)
        }
        self.firsts = np.cumsum([0, *(one.numel() for one in self.parameters)])
        for head in self.heads.values():
            elements = part.elements_of(head.header)
            if elements != self.firsts[-1]:
                raise argument_error(
                    f"the state has {elements} elements, the optimizer's parameters have {self.firsts[-1]}"
                )
            if head.shard != optimizer._shards.number:
                raise argument_error(
                    f"the state has shard {head.shard} only, and this rank has shard "
                    f"{optimizer._shards.number}: save with torch.distributed.checkpoint, each rank its "
                    "own, or after consolidate_state_dict() on all ranks"
                )
        self._check_types()

    def _check_types(self):
        """Warns of loaded values that were rounded: torch's optimizers convert values to the type of the
        parameter."""
        for number, parameter in enumerate(self.parameters):
            for name, value in self.state[parameter].items():
                rounded = isinstance(value, torch.Tensor) and value.dtype != torch.float32
                is_bytes = name.startswith((_HEAD, remainder.NAME))
                if self.heads and rounded and not is_bytes and name != "step":
                    warn(f"{name} of parameter {number} was rounded to {value.dtype} when it was loaded: to keep "
                         "exact values, call onebit.torch.compress before load_state_dict")
                    return

    @functools.cached_property
    def template(self):
        """Returns the part that this rank would save now."""
        return part.read_part(self.optimizer.onebit.save_whole())

    @property
    def ranks(self):
        return part.ranks_of(next(iter(self.heads.values())).header)

    def summary(self):
        """Returns the facts about this state that all ranks must know."""
        if not self.heads:
            return {"is": "torch's" if any(self.state.values()) else "none"}
        complete = sorted(self.heads) == list(range(self.ranks))
        apart = any(part.apart_of(head.header) for head in self.heads.values())
        steps = max(part.steps_of(head.header) for head in self.heads.values())
        return {"is": "ours", "whole": complete and self.ranks, "apart": apart, "steps": steps}

    def head_bytes(self):
        """Returns the bytes of the head of the lowest rank whose head this state has."""
        name = f"{_HEAD}{min(self.heads)}"
        return self.state[self.parameters[0]][name].detach().cpu().numpy().tobytes()

    def take_head(self, data):
        """Uses the head of a rank that saved, on a rank that did not save."""
        head = _decode_head(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.heads = {part.rank_of(head.header): head}

    def values(self, name, first, count):
        """Returns `count` elements from number `first` on."""
        made = np.empty(count, "<f4")
        for number, parameter in enumerate(self.parameters):
            begin, end = self.firsts[number : number + 2]
            low, high = max(first, begin), min(first + count, end)
            if low >= high:
                continue
            value = self.state[parameter].get(name)
            if name == "":  # "" stands for the parameters themselves
                value = parameter.detach()
            if value is None:
                raise argument_error(f"parameter {number} has no {name} in the state")
            if value.shape != parameter.shape:
                raise argument_error(f"{name} of parameter {number} has the shape {tuple(value.shape)}, the "
                                     f"parameter {tuple(parameter.shape)}")
            some = flat(in_order_of(value, parameter))[low - begin : high - begin].float().cpu().numpy()
            made[low - first : high - first] = some
        return made

    def _has(self, name):
        return any(name in one for one in self.state.values())

    def _parameters_at(self, names, first, count, apart):
        """Returns parameters. For 16 bits these are the master values, unless another model was loaded;
        otherwise those of the model."""
        name = next(filter(self._has, names), None)
        now = self.values("", first, count)
        if name is None or (not apart and self.parameters[0].dtype == torch.float32):
            return now
        if apart:
            return self.values(name, first, count)
        masters = self.values(name, first, count)
        rounded = torch.from_numpy(masters).to(self.parameters[0].dtype).float().numpy()
        return np.where(rounded == now, masters, now)

    def part(self, rank, ranks, whole):
        """Returns the part that rank `rank` of `ranks` would have saved. whole: whether the values of each rank
        are known. If not, the values of another rank are used, without residuals."""
        source = rank if rank in self.heads else min(self.heads)
        head, known = self.heads[source], whole or (rank == source)
        elements = int(self.firsts[-1])
        share = elements * rank // ranks, elements * (rank + 1) // ranks
        sections = []
        for what, space, first, count, values in head.sections:
            own = _is_own(what, head.header)
            if own and not known and what in (*_RESIDUALS, part.MOMENTS):
                continue
            if values is None:
                end = first + count
                if not own and not whole:
                    first, end = max(first, share[0]), min(end, share[1])
                if first >= end:
                    continue
                values = self._section(what, source, first, end - first, head.header)
            sections.append((what, space, first, values))
        if not known:
            sections += self._moments_of(source)
        header = bytearray(head.header)
        if not whole:
            part.place(header, self.template.header)
        return part.write_part(header, self.template.tensors, sections, _SECTION)

    def _moments_of(self, rank):
        """Returns another rank's moments for all elements. If it had moments of only some elements, as in a
        hierarchical schedule, the others become the mean of those in their tensor, or of all."""
        spans = [
            (first, count)
            for what, _, first, count, values in self.heads[rank].sections
            if what == part.MOMENTS and values is None
        ]
        if spans and not self._has(f"{_NAMES[part.MOMENTS]}_{rank}"):  # another rank has loaded these
            variance = self.values(_NAMES[part.VARIANCE], 0, int(self.firsts[-1]))
            return [(part.MOMENTS, part.ELEMENTS, 0, self._own_moments(variance, self.ranks))]
        made = np.full(int(self.firsts[-1]), np.nan, "<f4")
        for first, count in spans:
            name = f"{_NAMES[part.MOMENTS]}_{rank}"
            made[first : first + count] = self.values(name, first, count)
        known = ~np.isnan(made)
        for begin, end in zip(self.firsts, self.firsts[1:]) if spans else ():
            of = slice(begin, end) if known[begin:end].any() else slice(None)
            made[begin:end][~known[begin:end]] = made[of][known[of]].mean()
        return [(part.MOMENTS, part.ELEMENTS, 0, made)] if spans else []

    def _section(self, what, rank, first, count, header):
        names = (f"{_NAMES[what]}_{rank}", _NAMES[what])
        if what == part.PARAMETERS:
            return self._parameters_at(names, first, count, part.apart_of(header))
        return self.values(next(filter(self._has, names), names[0]), first, count)

    # --- State of torch's optimizers

    def part_of_torch(self, alone):
        """Returns a part computed from the moments and the number of steps of a dense optimizer. If the warm-up
        would already be over, it ends with the next step. Without a warm-up, or with a warm-up of divided
        gradients, the momentum is converted.

        alone: whether the part is as if a single rank had saved it, which is the same on ranks with the same
            moments
        """
        header, sections = bytearray(self.template.header), []
        ranks = part.ranks_of(self.template.header)
        if alone:
            part.place_alone(header)
        kind, no_warmup = part.kind_of(header), self.optimizer._no_warmup
        if kind == "lion":
            raise argument_error("Lion cannot begin with another optimizer's state")
        arrays = self._moments()
        steps = max((float(one["step"]) for one in self.state.values() if "step" in one), default=0)
        steps = int(steps) or max(self.optimizer._warmup_steps, 1)
        divides = self.optimizer._divides
        over = no_warmup or (divides and steps >= self.optimizer._warmup_steps)
        part.set_steps(header, steps, _COMPRESSED if over else None)
        if (over or divides) and part.VARIANCE in arrays:
            self._divide_momentum(arrays, steps, over)
            arrays[part.MOMENTS] = self._own_moments(arrays[part.VARIANCE], ranks if over else 0)
        for what, space, first, values in self.template.sections:
            if alone and (what in _RESIDUALS or space == part.PADDING):
                continue
            if what in arrays and space == part.ELEMENTS:
                values = arrays[what][first : first + len(values)]
            elif what == part.NUMBERS and kind == "zero_one_adam":
                values = np.concatenate([np.array([steps], "<u8"), values[1:]])  # the number of its updates
            sections.append((what, space, first, values))
        return part.write_part(header, self.template.tensors, sections, _SECTION)

    def _moments(self):
        """Returns the moments of torch's optimizer. A parameter that has had no gradient gets zeros."""
        arrays = {}
        for torchs, what in _OF_TORCH.items():
            if not self._has(torchs):
                continue
            for parameter in self.parameters:
                if self.state[parameter].get(torchs) is None:
                    self.state[parameter][torchs] = torch.zeros_like(parameter)
            arrays[what] = self.values(torchs, 0, int(self.firsts[-1]))
        return arrays

    def _dense_elements(self):
        return np.repeat(part.uncompressed_of(self.template), np.diff(self.firsts))

    def _divide_momentum(self, arrays, steps, over):
        """Converts the momentum of compressed tensors to that of divided gradients or, if the warm-up is
        `over`, to that of steps."""
        momentum, variance = arrays[part.MOMENTUM], arrays[part.VARIANCE]
        defaults = self.optimizer.defaults
        beta1, beta2 = self.optimizer._beta1, defaults["betas"][1]
        root = np.sqrt(variance / (1 - beta2**steps)) + defaults["eps"]
        divided = momentum / root / (1 - beta1**steps if over else 1)
        arrays[part.MOMENTUM] = np.where(self._dense_elements(), momentum, divided)

    def _own_moments(self, variance, ranks):
        """Returns the moments of each rank's own gradients, which are assumed to be independent."""
        return np.where(self._dense_elements(), variance, variance * ranks)


def _share_heads(comm, loaded, steps):
    """Gives another rank's head to ranks without one. With a checkpoint that is loaded in place
    (torch.distributed.checkpoint) these exist if fewer ranks have saved it."""
    if min(steps) or not max(steps):
        return
    heads = gather(comm, loaded.head_bytes())
    if not steps[comm.rank]:
        loaded.take_head(next(head for head, made in zip(heads, steps) if made))


def load(optimizer, state, begin):
    """Loads a state into an optimizer. Returns True if the state was not empty. Collective.

    begin: a function that is called with beta1 of the latest step, or None, before anything is loaded
    """
    comm = optimizer.comm
    loaded = agreed(comm, lambda: _Loaded(optimizer, state), optimizer._shards)
    everyone = [json.loads(one) for one in gather(comm, json.dumps(loaded.summary()).encode())]
    kinds = sorted({one["is"] for one in everyone})
    if kinds == ["none"]:
        return False
    if kinds == ["ours"]:
        _share_heads(comm, loaded, [one["steps"] for one in everyone])
    whole = all(one.get("whole") == everyone[0].get("whole") for one in everyone)
    whole = everyone[0].get("whole") if whole else 0

    def make_parts():
        if len(kinds) > 1:
            raise argument_error(f"the ranks have states of different kinds: {', '.join(kinds)}")
        if kinds == ["torch's"]:
            return [], loaded.part_of_torch(alone=True)
        if whole:
            return [loaded.part(rank, whole, True) for rank in range(whole)], None
        here = loaded.template.header
        return [], loaded.part(part.rank_of(here), part.ranks_of(here), False)

    parts, mine = agreed(comm, make_parts)
    if kinds == ["torch's"] and len(set(gather(comm, part.checksum_of(mine)))) == 1:
        parts = [mine]  # no rank needs the parts of other ranks
    elif kinds == ["torch's"]:
        mine = loaded.part_of_torch(alone=False)
    # All ranks will get each rank's share of its parameters, so the parameters must be equal. Between two
    # synchronisations of 0/1 Adam they are not equal, and the state contains them.
    if optimizer.onebit.info()["synchronized"] and not any(one.get("apart") for one in everyone):
        optimizer.onebit.compare()
    begin(next(iter(loaded.heads.values())).beta1 if loaded.heads else None)
    optimizer.onebit.load(parts or gather(comm, mine))
    return True
