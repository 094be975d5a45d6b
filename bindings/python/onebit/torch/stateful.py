"""The base of optimizers with torch's interface that keep their state in the library."""

import collections
import contextlib

import torch

from onebit._native import argument_error, warn
from onebit.torch import state
from onebit.torch.ranks import agreed, gather, missing_residuals
from onebit.torch.remainder import moments_of
from onebit.torch.shards import Whole

_OWN_KEYS = "decoupled_weight_decay", "uncompressed"  # of groups; some versions of torch have the first one too


class StatefulOptimizer(torch.optim.Optimizer):
    """The base class. A derived class has `onebit`, `comm`, `_parameters` in the order of the library's
    tensors, `_beta1` of the latest step, `_has_state` and `_begin_loading`. It calls `_forget_state` after
    each step."""

    _state = _remainder = None
    _has_torch_state = False  # whether `torch_state_dict` can be made
    _shards = Whole()
    _consolidated = _has_warned = _closed = False
    _divides, _no_warmup, _warmup_steps = False, False, 0  # the optimizer's options determine these

    def _forget_state(self):
        self._state, self._consolidated = None, False

    @property
    def state(self):
        """Returns each parameter's state by name. The values are copies, which are made at the first access
        after a step. The state is empty before the library's optimizer is created and, unless it was
        consolidated, after `close`."""
        if not self._has_state():
            return self._state or collections.defaultdict(dict)
        if self._state is None:
            found = self._with_remainder(self._of_parts([self.onebit.save_whole()]))
            self._state = collections.defaultdict(dict, found)
        return self._state

    def _of_parts(self, parts):
        return state.of_parts(self._parameters, parts, self._beta1, self._shards)

    def _with_remainder(self, found):
        """Adds the state of the parameters that torch's own optimizer steps, and the hook's state."""
        if self._remainder is None:
            return found
        first = self._parameters[0]
        found = {**found, first: {**found[first], **self._remainder.saved.entries()}}
        return {**found, **self._remainder.state_of()}

    @state.setter
    def state(self, value):
        if self._has_state():
            raise argument_error("state cannot be assigned, since the library holds it: call load_state_dict")
        self._state = value

    def consolidate_state_dict(self, to=0):
        """Makes the next `state_dict` of rank `to` contain the state of all ranks, as with torch's
        ZeroRedundancyOptimizer. It is for a program in which only one rank saves. Collective."""
        with self._counted_as_checkpoint():
            parts = gather(self.comm, self.onebit.save())
        if self._remainder is not None:
            self._remainder.saved.consolidate(to)
        mine = self.comm.rank == to
        self._state = self._of_parts(parts) if mine else None
        if mine:
            self._shards.complete(self._state)
            self._state = collections.defaultdict(dict, self._with_remainder(self._state))
        self._consolidated = True

    def torch_state_dict(self):
        """Returns a state for torch's own optimizer, to continue without onebit. It has moments instead of
        residuals, and is the same on all ranks. Call it between two steps. Collective."""
        self._check_open()
        if not self._has_torch_state:
            raise argument_error(f"torch has no state for {type(self).__name__} with these options or this model: "
                                 "continue with the model's weights and a new optimizer")
        found = {**moments_of(self), **self._remainder.state_of()}
        kind = torch.optim.Adam if "betas" in self.defaults else torch.optim.SGD
        groups, numbers, of_torch = [], {}, kind([torch.zeros(1)], lr=1e-3).defaults  # keys that this torch has
        for group in self.param_groups:
            own = {name: value for name, value in group.items() if name not in _OWN_KEYS or name in of_torch}
            groups.append({**own, "params": [numbers.setdefault(one, len(numbers)) for one in group["params"]]})
        return {"state": {numbers[one]: of for one, of in found.items()}, "param_groups": groups}

    @contextlib.contextmanager
    def _counted_as_checkpoint(self):
        """The report counts the bytes that are sent inside as those of checkpoints."""
        before = self.comm.bytes_sent
        yield
        self._checkpoint_bytes += self.comm.bytes_sent - before

    def state_dict(self):
        """Returns the state in torch's form. It has the residuals of this rank, or after
        `consolidate_state_dict` those of all ranks. Local."""
        if self._closed and self._state is not None:  # it was consolidated before
            return super().state_dict()
        self._check_open()
        self._warn_of_missing_residuals()
        return super().state_dict()

    def _check_open(self):
        if self._closed:
            raise argument_error("the optimizer is closed: take its state before close(), or torch_state_dict() to "
                                 "continue with torch's own optimizer")
        self.onebit.handle  # noqa: B018: raises in a forked process

    def _warn_of_missing_residuals(self):
        if self._consolidated or self._has_warned or self.comm.size == 1:
            return
        if not self.onebit.stage()[1]:
            return
        self._has_warned = True
        warn(missing_residuals(self.comm.rank, ", or torch.distributed.checkpoint saves all"))

    def load_state_dict(self, state_dict):
        """Loads a rank's own state, a consolidated state, a list of all saved states, or a state of torch's
        Adam, AdamW or SGD (docs/python-optimizers.md#checkpoints). Load the model's parameters before this
        call. Collective."""
        with self._counted_as_checkpoint():
            self._load(*agreed(self.comm, lambda: self._merged(state_dict)))

    def _merged(self, state_dict):
        """Returns the state by parameter, from one state_dict or a list of all of them, and the groups."""
        dicts, merged = state_dict if isinstance(state_dict, (list, tuple)) else [state_dict], {}
        groups = dicts[0]["param_groups"]
        self._check_groups(groups)
        numbers = [number for group in groups for number in group["params"]]
        own = [one for group in self.param_groups for one in group["params"]]
        for one in dicts:
            for number, parameter in zip(numbers, own):
                merged.setdefault(parameter, {}).update(one["state"].get(number, {}))
        _, steps = self.onebit.stage()  # creates the optimizer if it does not exist yet
        if not any(merged.values()) and steps:
            raise argument_error("state_dict has no state of any parameter")
        return merged, groups

    def _load(self, loaded, groups=None):
        """Loads a state. groups: the saved groups; None: the groups do not change."""
        mine = [dict(group) for group in self.param_groups]
        for group, saved in zip(self.param_groups, groups or ()):
            group.update({name: saved[name] for name in saved if name != "params"})

        try:
            state.load(self, loaded, self._begin_loading)
        except Exception:
            for group, before in zip(self.param_groups, mine):
                group.update(before)
            raise
        self._forget_state()

    def _check_groups(self, groups):
        counts = [[len(one["params"]) for one in of] for of in (groups, self.param_groups)]
        if counts[0] != counts[1]:
            raise argument_error(f"the loaded groups have {counts[0]} parameters, the optimizer's {counts[1]}")
