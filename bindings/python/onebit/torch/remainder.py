"""Uses torch's own optimizer beside the library's optimizer, and after it. Beside: torch's optimizer steps the
parameters that the library's optimizer does not have; the hook averages their gradients; and the hook's state
is saved in the state of an optimizer. After: torch's optimizer continues from the library's state.
"""

import io
import struct
import weakref

import torch
import torch.distributed as dist

from onebit import Stage
from onebit._native import warn
from onebit.torch.ranks import FLOATS, Sketches, mean, missing_residuals

# The name of the momentum in the state of torch's Adam and AdamW, and of SGD.
_OF_TORCH = {"exp_avg", "momentum_buffer"}


class Part:
    """Some of the parameters of a bucket, with the methods of a bucket."""

    def __init__(self, bucket, index, carried):
        self._index, self._views = index, None
        self._parameters, self._buffer = bucket.parameters(), bucket.buffer()
        chosen = [not carried(one) for one in self._parameters]
        if all(chosen):  # e.g. sparse gradients, whose bucket has one parameter
            self._views = None if self._buffer.layout != torch.strided else bucket.gradients()
            return
        self._from = [view for view, mine in zip(bucket.gradients(), chosen) if mine]
        self._parameters = [one for one, mine in zip(self._parameters, chosen) if mine]
        self._buffer = torch.cat([one.reshape(-1) for one in self._from] or [self._buffer[:0]])
        pieces = self._buffer.split([one.numel() for one in self._from])
        self._views = [piece.view_as(one) for piece, one in zip(pieces, self._from)]

    def put_back(self, bucket):
        for to, view in zip(getattr(self, "_from", ()), self._views or ()):
            to.copy_(view)
        return bucket.buffer()

    def index(self):
        return self._index

    def is_last(self):  # not known here: the remainder ends the pass
        return False

    def parameters(self):
        return self._parameters

    def gradients(self):
        return self._views

    def buffer(self):
        return self._buffer


class Remainder:
    """The parameters of a model that the library's optimizer does not step.

    state: the `HookState` that averages their gradients
    optimizer: the torch optimizer that steps them; None: the program steps them
    parameters: those of them that belong to `optimizer`
    elements, extra: as in `SavedHook`
    """

    def __init__(self, model, state, optimizer, parameters, elements, extra=None):
        self.state, self.optimizer, self.parameters = state, optimizer, list(parameters)
        self._known = {id(one) for one in self.parameters}
        self._model = weakref.ref(model)
        self.saved = SavedHook(state, model, elements, extra)
        self._averaged = set()  # parameters whose gradients came in buckets
        self._passes = self._parts = 0  # the number of backward passes; the number of parts in the latest pass

    def __contains__(self, parameter):
        return id(parameter) in self._known

    def extend(self, parameters):
        self.parameters += parameters
        self._known.update(id(one) for one in parameters)

    def add(self, bucket, carried):
        """Returns, in the backward pass, the future of those gradients of a bucket that the library's optimizer
        does not have. None: there are none."""
        if bucket.index() == 0:
            self._passes, self._parts = self._passes + 1, 0
        part, future = Part(bucket, self._parts, carried), None
        if part.parameters():
            self._parts += 1
            self._averaged.update(part.parameters())
            future = self.state.add(part).then(lambda _: part.put_back(bucket))
        if bucket.is_last() and self._parts:
            self.state.end_pass()
        return future

    def finish_gradients(self):
        """Averages gradients without a bucket. Called before a step. Returns whether all gradients are finite,
        on all ranks."""
        self._average_others()
        gradients = [one.grad for one in self.parameters if one.grad is not None]
        values = [one if one.layout == torch.strided else one._values() for one in gradients]
        finite = [one.isfinite().all().cpu() for one in values]
        return not finite or bool(torch.stack(finite).all())

    def _average_others(self):
        """Averages the model's gradients for which DistributedDataParallel has no bucket: their parameters were
        frozen when it was created, or were added later."""
        others = [one for one in self.parameters if one.requires_grad and one not in self._averaged]
        model = self._model()
        own = {id(one) for one in model.module.parameters()} if others and self._passes else ()
        others = [one for one in others if id(one) in own]
        if not others:
            return
        group = model.process_group
        ranks = torch.tensor([float(one.grad is not None) for one in others], **FLOATS)
        ranks = ranks.to(others[0].device)
        dist.all_reduce(ranks, group=group)
        for one, count in zip(others, ranks.tolist()):
            if count:
                one.grad = torch.zeros_like(one) if one.grad is None else one.grad
                one.grad.div_(group.size())
                dist.all_reduce(one.grad, group=group)

    def step(self):
        if self.optimizer is None or not self.parameters:
            return
        groups = self.optimizer.param_groups
        self.optimizer.param_groups = [
            {**one, "params": [own for own in one["params"] if own in self]} for one in groups
        ]
        try:
            type(self.optimizer).step.__wrapped__(self.optimizer)  # calls step without its hooks
        finally:
            self.optimizer.param_groups = groups

    # --- State

    def state_of(self):
        if self.optimizer is None:
            return {}
        return {one: self.optimizer.state[one] for one in self.parameters if one in self.optimizer.state}

    def load(self, loaded):
        loaded = copied(loaded)
        self.saved.load(take(loaded))
        for one in self.parameters if self.optimizer is not None else ():
            saved = loaded.get(one) or {}
            if not _OF_TORCH.isdisjoint(saved):
                of_step = device_of_step(self._group_of(one), one)
                self.optimizer.state[one] = {
                    name: value.detach().clone().to(of_step if name == "step" else one.device)
                    if isinstance(value, torch.Tensor) else value
                    for name, value in saved.items()
                }

    def _group_of(self, parameter):
        return next(of for of in self.optimizer.param_groups if any(one is parameter for one in of["params"]))


# --- The hook's saved state -----------------------------------------------------------------------
#
# The state is a tensor of bytes named `hook_RANK`, in the state of the optimizer's first parameter. All
# trainers save and load it there, also into torch's own optimizer before `compress`. Each byte is an element,
# so that its value does not change if torch converts a state to the type of its parameter.

NAME = "hook_"
# The key of this tensor's dictionary in the saved state of an optimizer that has no "state" there (one that wraps
# another optimizer).
_OUTSIDE = "onebit"
# The bytes of the record. Their number is fixed, so that a state can be loaded in place
# (torch.distributed.checkpoint).
_BYTES, _BYTES_OF_PARAMETER = 2**16, 2**12
_SAFELY = {"weights_only": True} if hasattr(torch, "compile") else {}  # torch 1.13 accepts no numbers there


def _pack_record(record, size):
    memory = io.BytesIO()
    torch.save(record, memory)
    made = struct.pack("<Q", memory.tell()) + memory.getvalue()
    return torch.frombuffer(bytearray(made.ljust(size, b"\0")), dtype=torch.uint8)


def _unpack_record(tensor):
    data = tensor.detach().cpu().to(torch.uint8).numpy().tobytes()
    (count,) = struct.unpack_from("<Q", data)
    return torch.load(io.BytesIO(data[8 : 8 + count]), **_SAFELY)


def copied(states):
    """Returns copies of the states of parameters. An optimizer may also have values there that belong to none."""
    return {key: dict(one) if isinstance(one, dict) else one for key, one in states.items()}


def states_of(saved):
    """Returns copies of the states in a saved state."""
    return copied(saved["state"] if "state" in saved else {0: saved.get(_OUTSIDE, {})})


def of_parameters(states):
    """Returns the states without an optimizer's other values."""
    return [one for one in states.values() if isinstance(one, dict)]


def take(states, prefix=NAME):
    """Returns, by name, the values that a hook has saved in the states of parameters, and removes them from
    these states. Also removes a state that is then empty."""
    found = {}
    for key, state in list(states.items()):
        names = list(state) if isinstance(state, dict) else ()
        names = [one for one in names if isinstance(one, str) and one.startswith(prefix)]
        found.update({name: state.pop(name) for name in names})
        if names and not state:
            del states[key]
    return found


def records(found):
    """Returns, by rank, the records in the values that `take` has returned."""
    return {int(name.rpartition("_")[2]): _unpack_record(one) for name, one in found.items()}


def _average_parts(parts, rank, ranks):
    """Returns parts for another number of ranks. Each residual becomes the mean of the known ranks' residuals,
    and server residuals are put in their places."""
    made = {**next(iter(parts.values())), "rank": rank, "ranks": ranks}
    made["buckets"] = {
        index: {**bucket, **_average_residual([one["buckets"].get(index, {}) for one in parts.values()],
                                           sum(bucket["sizes"]))}
        for index, bucket in made["buckets"].items()
    }  # fmt: skip
    everyone = [one["moments"] for one in parts.values()]
    made["moments"] = {
        number: (torch.stack([one[number][0] for one in everyone]).mean(0), steps)
        for number, (_, steps) in made["moments"].items()
    }
    return made


def _average_residual(buckets, count):
    workers = [one["worker"] for one in buckets if len(one.get("worker", ())) == count]
    if len(workers) < len(buckets):  # with a hierarchical schedule each rank has a part, or no rank has one
        return {"worker": torch.zeros(count, **FLOATS), "server": None} if "bits" in buckets[0] else {}
    mean = torch.stack(workers).mean(0)
    for one in buckets:
        first = one["server_start"]
        mean[first : first + len(one["server"])] += one["server"]
    return {"worker": mean, "server": None}


class SavedHook:
    """Saves and loads a `HookState` in the state of an optimizer.

    model: the DistributedDataParallel
    elements: the largest number of elements that the hook averages
    extra: a function that returns a dictionary to save with the state; None: there is none
    comm: the ranks to use while the hook has no communicator; None: there is nothing to save then
    """

    def __init__(self, state, model, elements, extra=None, comm=None):
        group = model.process_group
        self.state, self._extra, self._is_used = state, extra or dict, bool(elements or extra)
        self._rank, self._ranks = group.rank(), group.size()
        words = 4 * (elements + elements // self._ranks + (elements if state.normalise else 0))
        self._size = _BYTES + words + _BYTES_OF_PARAMETER * len(list(model.parameters()))
        self._everyone, self._has_warned, self._comm = None, False, comm
        self.prefix = NAME  # of the names of its values

    def _is_whole(self):
        """True after `consolidate` and before the next step."""
        return self._everyone is not None and self._everyone[0] == self.state.steps

    def entries(self):
        """Returns this rank's values by name, or those of all ranks if they are known."""
        if not self._is_used:
            return {}
        if self.state._closed and not self._is_whole():
            warn("the state has no residuals, because the hook is closed: save before close()")
            return {}
        return self._everyone[1] if self._is_whole() else {f"{self.prefix}{self._rank}": self._own()}

    def _own(self):
        record = {**self.state.state_dict(), **self._extra()}
        return _pack_record({**record, "rank": self._rank, "ranks": self._ranks}, self._size)

    def consolidate(self, to=0):
        """Makes the next saved state that of all ranks. Collective."""
        comm = self.state.comm or self._comm
        if comm is None or not self._is_used:  # there was no backward pass
            return
        parts = self.state._gather_state(comm, self._own().numpy().tobytes())
        ranks = range(self._ranks) if self._rank == to else [self._rank]  # other ranks save their own part
        named = {f"{self.prefix}{rank}": torch.frombuffer(bytearray(parts[rank]), dtype=torch.uint8)
                 for rank in ranks}  # fmt: skip
        self._everyone = self.state.steps, named

    def warn_of_missing_residuals(self):
        if self._is_whole() or self._has_warned or self._ranks == 1 or self.state._closed:
            return
        if self.state.steps < 2 or not self.state.differs_between_ranks:
            return
        self._has_warned = True
        warn(missing_residuals(self._rank))

    def load(self, found):
        """Loads the values that `take` has returned, or zeros as residuals. Collective after the first step."""
        parts, made = records(found), None
        own = parts.get(self._rank)
        if own is not None and own["ranks"] == self._ranks:
            made = own
        elif parts:
            made = _average_parts(parts, self._rank, self._ranks)
        self.state.load_state_dict(made)


def save_with(optimizer, saved):
    """Makes a torch optimizer save and load the hook's state with its own state. An optimizer of several models has
    several hooks; a closed one is replaced."""
    hooks = getattr(optimizer, "_onebit_hooks", None)
    if hooks is None:
        hooks = optimizer._onebit_hooks = []
        _save_hooks(optimizer, hooks)
    hooks[:] = [one for one in hooks if not one.state._closed]
    taken = {one.prefix for one in hooks}
    saved.prefix = next(one for one in (NAME, *(f"hook{k}_" for k in range(2, len(taken) + 2))) if one not in taken)
    hooks.append(saved)
    found = take(optimizer.state, saved.prefix)
    if found:
        saved.load(found)


def _save_hooks(optimizer, hooks):
    own_state, own_load = optimizer.state_dict, optimizer.load_state_dict
    own_consolidate = getattr(optimizer, "consolidate_state_dict", lambda to: None)

    def state_dict():
        found, first = own_state(), {}
        for saved in hooks:
            saved.warn_of_missing_residuals()
            first.update(saved.entries())
        if "state" in found:
            found["state"] = {**found["state"], 0: {**found["state"].get(0, {}), **first}}
        else:
            found[_OUTSIDE] = first
        return found

    def load_state_dict(state_dict):
        dicts = state_dict if isinstance(state_dict, (list, tuple)) else [state_dict]
        states = [states_of(one) for one in dicts]
        found = []
        for saved in hooks:
            found.append({})
            for one in states:
                found[-1].update(take(one, saved.prefix))
        first = {key: one for key, one in dicts[0].items() if key != _OUTSIDE}
        own_load({**first, "state": states[0]} if "state" in first else first)
        for saved, of in zip(hooks, found):
            saved.load(of)

    def consolidate_state_dict(to=0):
        own_consolidate(to)
        for saved in hooks:
            saved.consolidate(to)

    optimizer.state_dict, optimizer.load_state_dict = state_dict, load_state_dict
    optimizer.consolidate_state_dict, optimizer.torch_state_dict = consolidate_state_dict, own_state


# --- Torch's state from one of Efficient-Adam or 1-bit momentum SGD: the way back to dense steps --


_MOST_AT_ONCE = 2**22  # elements of a mean: each mean waits for the network's delay


def means(tensors, comm):
    """Yields, for each of some tensors, the mean over the ranks in float32, as a vector on the processor. Collective."""
    batch = []
    for number, one in enumerate(tensors):
        batch.append(one.detach().to(**FLOATS).reshape(-1))
        is_last = number + 1 == len(tensors)
        if is_last or sum(map(len, batch)) + tensors[number + 1].numel() > _MOST_AT_ONCE:
            yield from mean(comm, torch.cat(batch)).split([len(of) for of in batch])
            batch = []


def mean_shares(parameters, comm, hosts):
    """Returns for each parameter the ratio of two squares: that of the mean gradient, and that of the gradient
    whose moments a rank has, which is its own or its host's. The ratio is 1 / hosts if gradients are
    independent. For a large parameter it is an estimate from sketches. Collective."""
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
    sketches = Sketches()
    own = torch.stack([one.float().square().sum().cpu() for one in gradients])
    own, *found = means([own, *(sketches.numbers([one]) for one in gradients)], comm)
    return [_share(square, float(one.square().sum()), comm.size, hosts) for square, one in zip(own.tolist(), found)]


def _share(own, of_mean, ranks, hosts):
    if not 0 < of_mean < float("inf") or ranks == 1:
        return 1 / hosts
    noise = max(own - of_mean, 0.0) / (1 - 1 / ranks)  # own is signal + noise, of_mean signal + noise / ranks
    of_host = max(of_mean - noise / ranks, 0.0) + noise * hosts / ranks
    return min(max(of_mean / of_host, 1 / hosts), 1.0)


def _variances(made, states, parameters, of_means):
    """Returns for each parameter the second moments of the mean gradient, or the mean over the ranks of the
    second moments of their own gradients. Also returns the second moments by whose root the momentum was
    divided. Collective."""
    shared = is_in_warmup(made) or not made._divides  # all ranks know the moments of the mean
    if shared:
        found = [states[one]["variance"].to(one.device).reshape(-1) for one in parameters]
        hosts = made.comm.size
    else:
        name = f"own_variance_{made.comm.rank}"  # if a host exchanges as one, a rank has only a part
        own = [states[one].get(name, torch.zeros(one.numel())) for one in parameters]
        known = list(means([one > 0 for one in own], made.comm))
        smallest = 1 / made.comm.size
        found = [(one / part.clamp(min=smallest)).to(to.device)
                 for one, part, to in zip(means(own, made.comm), known, parameters)]  # fmt: skip
        hosts = made.comm.size * max(smallest, *(float(one.max()) for one in known))
    factors = [1.0] * len(found)
    if of_means != shared:
        factors = mean_shares(parameters, made.comm, hosts)
        factors = [1 / one for one in factors] if shared else factors
    return [(one * factor, one if shared else one / hosts) for one, factor in zip(found, factors)]


def is_in_warmup(made):
    return made._warmup_steps > 0 and made.onebit.stage()[0] == Stage.STAGE_WARMUP


def _adam_moments(made, parameter, group, state, variance, divisor):
    """Returns torch's state of a parameter. divisor: the second moments by whose root the momentum was divided;
    None: it was not divided"""
    steps, defaults = float(state["step"]), made.defaults
    momentum = state["momentum"].to(parameter.device)
    if divisor is not None:
        root = (divisor.view_as(parameter) / (1 - defaults["betas"][1] ** steps)).sqrt() + defaults["eps"]
        # the momentum has no bias correction after the warm-up
        momentum = momentum * root * (1 if is_in_warmup(made) else 1 - made._beta1**steps)
    step = torch.tensor(steps, **FLOATS).to(device_of_step(group, parameter))
    of = {"exp_avg": momentum, "exp_avg_sq": variance.view_as(parameter)}
    return {"step": step, **{name: torch.empty_like(parameter).copy_(one) for name, one in of.items()}}


def device_of_step(group, parameter):
    """Returns the device on which torch's optimizer stores the number of its steps."""
    return parameter.device if group.get("fused") or group.get("capturable") else "cpu"


@torch.no_grad()
def moments_of(made, of_means=True):
    """Returns torch's state by parameter, without residuals. Before the first step it is empty. Collective.

    of_means: whether second moments are those of mean gradients or of each rank's own gradients. The ratio of
        the two is computed from the latest gradients
    """
    states, found, divided = made.state, {}, []
    for parameter, number in zip(made._parameters, made._group_of):
        state, of = states.get(parameter, {}), made.param_groups[number]
        if not parameter.numel() or not float(state.get("step", 0)):
            continue
        if "momentum" in made.defaults:
            found[parameter] = {"momentum_buffer": state["momentum"].to(parameter)}
        elif made._uncompressed[number]:  # exchanged in full precision, as with dense Adam
            variance = state["variance"].to(parameter.device)
            found[parameter] = _adam_moments(made, parameter, of, state, variance, None)
        else:
            divided.append((parameter, of))
    pairs = _variances(made, states, [one for one, _ in divided], of_means) if divided else ()
    for (parameter, of), pair in zip(divided, pairs):
        found[parameter] = _adam_moments(made, parameter, of, states[parameter], *pair)
    return found
