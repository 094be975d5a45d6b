"""What an optimizer that `compress` hands out saves of the hook that averages gradients.

It is a tensor of bytes in the state of the optimizer's first parameter, `hook_RANK`, since that is
what all trainers save and load, also into torch's own optimizer before `compress` has it. A byte is
an element, which stays what it is where torch converts a state to the type of its parameter.
"""

import io
import struct
import warnings

import torch

from onebit._native import OnebitWarning
from onebit.torch.gather import FLOATS, gather

NAME = "hook_"
# A state of fixed size can be loaded in place (torch.distributed.checkpoint): bytes besides elements.
_BYTES, _BYTES_OF_PARAMETER = 2**16, 2**12
_SAFELY = {"weights_only": True} if hasattr(torch, "compile") else {}  # 1.13 has no numbers there


def _pack(record, size):
    memory = io.BytesIO()
    torch.save(record, memory)
    made = struct.pack("<Q", memory.tell()) + memory.getvalue()
    return torch.frombuffer(bytearray(made.ljust(size, b"\0")), dtype=torch.uint8)


def _unpack(tensor):
    data = tensor.detach().cpu().to(torch.uint8).numpy().tobytes()
    (count,) = struct.unpack_from("<Q", data)
    return torch.load(io.BytesIO(data[8 : 8 + count]), **_SAFELY)


def take(states):
    """By name what hooks have saved in the states of parameters, which have it no more. A state that
    is then empty goes."""
    found = {}
    for key, state in list(states.items()):
        names = [one for one in state if isinstance(one, str) and one.startswith(NAME)]
        found.update({name: state.pop(name) for name in names})
        if names and not state:
            del states[key]
    return found


def records(found):
    """By rank, of what `take` has found."""
    return {int(name[len(NAME) :]): _unpack(one) for name, one in found.items()}


def _mean(parts, rank, ranks):
    """For another number of ranks: residuals become the mean of the ranks' that are known, with what
    each serves at its place."""
    made = {**next(iter(parts.values())), "rank": rank, "ranks": ranks}
    made["buckets"] = {
        index: {**bucket, **_mean_residual([one["buckets"].get(index, {}) for one in parts.values()],
                                           sum(bucket["sizes"]))}
        for index, bucket in made["buckets"].items()
    }  # fmt: skip
    everyone = [one["moments"] for one in parts.values()]
    made["moments"] = {
        number: (torch.stack([one[number][0] for one in everyone]).mean(0), steps)
        for number, (_, steps) in made["moments"].items()
    }
    return made


def _mean_residual(buckets, count):
    workers = [one["worker"] for one in buckets if len(one.get("worker", ())) == count]
    if len(workers) < len(buckets):  # of a hierarchical schedule ranks have a part, or none has one
        return {"worker": torch.zeros(count, **FLOATS), "server": None} if "bits" in buckets[0] else {}
    mean = torch.stack(workers).mean(0)
    for one in buckets:
        first = one["server_start"]
        mean[first : first + len(one["server"])] += one["server"]
    return {"worker": mean, "server": None}


class SavedHook:
    """state: the `HookState`
    model: the DistributedDataParallel
    elements: how many the hook averages, at most
    extra: a function: what else is saved with it; None: nothing is
    """

    def __init__(self, state, model, elements, extra=None):
        group = model.process_group
        self.state, self._extra, self._is_used = state, extra or dict, bool(elements or extra)
        self._rank, self._ranks = group.rank(), group.size()
        words = 4 * (elements + elements // self._ranks + (elements if state.normalise else 0))
        self._size = _BYTES + words + _BYTES_OF_PARAMETER * len(list(model.parameters()))
        self._everyone, self._said = None, False

    def entries(self):
        """By name: this rank's, or after `consolidate` and before the next step all ranks'."""
        if not self._is_used:
            return {}
        if self._everyone is not None and self._everyone[0] == self.state.steps:
            return self._everyone[1]
        return {f"{NAME}{self._rank}": self._own()}

    def _own(self):
        record = {**self.state.state_dict(), **self._extra()}
        return _pack({**record, "rank": self._rank, "ranks": self._ranks}, self._size)

    def consolidate(self, to=0):
        """Collective."""
        if self.state.comm is None or not self._is_used:  # there was no backward pass
            return
        parts = gather(self.state.comm, self._own().numpy().tobytes())
        if self._rank == to:
            tensors = [torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in parts]
            named = {f"{NAME}{rank}": one for rank, one in enumerate(tensors)}
            self._everyone = self.state.steps, named

    def say_what_is_missing(self):
        is_whole = self._everyone is not None and self._everyone[0] == self.state.steps
        if is_whole or self._said or self._ranks == 1 or self.state.steps < 2:
            return
        self._said = True
        warnings.warn(
            f"this state has the residuals of rank {self._rank} alone. Where each rank saves its own, "
            "nothing is missing; where one rank saves, those of the other ranks are, unless all ranks "
            "call consolidate_state_dict() before",
            OnebitWarning,
            stacklevel=3,
        )

    def load(self, found):
        """What `take` has found; nothing: residuals are zeros. Collective, once a step was made."""
        parts, made = records(found), None
        own = parts.get(self._rank)
        if own is not None and own["ranks"] == self._ranks:
            made = own
        elif parts:
            made = _mean(parts, self._rank, self._ranks)
        self.state.load_state_dict(made)


def save_with(optimizer, saved):
    """Has an optimizer of torch's save and load the hook's state with its own."""
    own_state, own_load = optimizer.state_dict, optimizer.load_state_dict
    own_consolidate = getattr(optimizer, "consolidate_state_dict", lambda to: None)

    def state_dict():
        saved.say_what_is_missing()
        found = own_state()
        found["state"] = {**found["state"], 0: {**found["state"].get(0, {}), **saved.entries()}}
        return found

    def load_state_dict(state_dict):
        dicts = state_dict if isinstance(state_dict, (list, tuple)) else [state_dict]
        states = [{key: dict(one) for key, one in of["state"].items()} for of in dicts]
        found = {}
        for one in states:
            found.update(take(one))
        own_load({**dicts[0], "state": states[0]})
        saved.load(found)

    def consolidate_state_dict(to=0):
        own_consolidate(to)
        saved.consolidate(to)

    optimizer.state_dict, optimizer.load_state_dict = state_dict, load_state_dict
    optimizer.consolidate_state_dict = consolidate_state_dict
    found = take(optimizer.state)
    if found:
        saved.load(found)
