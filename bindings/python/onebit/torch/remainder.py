"""What an optimizer of the library's does not carry of a model: those parameters' gradients are
averaged by the hook of gradients, and torch's own optimizer makes their steps."""

import weakref

import torch
import torch.distributed as dist

from onebit.torch.gather import FLOATS
from onebit.torch.saved import SavedHook, take

# The momentum's name in the state of torch's Adam and AdamW, and of SGD.
_OF_TORCH = {"exp_avg", "momentum_buffer"}


class Part:
    """Some parameters of a bucket, in the shape of a bucket."""

    def __init__(self, bucket, index, carried):
        self._index, self._views = index, None
        self._parameters, self._buffer = bucket.parameters(), bucket.buffer()
        chosen = [not carried(one) for one in self._parameters]
        if all(chosen):  # as of sparse gradients, whose bucket has one parameter
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

    def is_last(self):  # is not known: the remainder ends the pass
        return False

    def parameters(self):
        return self._parameters

    def gradients(self):
        return self._views

    def buffer(self):
        return self._buffer


class Remainder:
    """optimizer: torch's, whose groups have these parameters and those that are carried; None: the
    program steps another
    parameters: its parameters that are not carried
    state: the `HookState` that averages them, and those of no optimizer
    elements, extra: as of `SavedHook`
    """

    def __init__(self, model, state, optimizer, parameters, elements, extra=None):
        self.state, self.optimizer, self.parameters = state, optimizer, list(parameters)
        self._known = {id(one) for one in self.parameters}
        self._model = weakref.ref(model)
        self.saved = SavedHook(state, model, elements, extra)
        self._averaged = set()  # parameters that buckets have had
        self._passes = self._parts = 0  # backward passes; parts of the latest

    def __contains__(self, parameter):
        return id(parameter) in self._known

    def extend(self, parameters):
        self.parameters += parameters
        self._known.update(id(one) for one in parameters)

    def add(self, bucket, carried):
        """In the backward pass: the future of a bucket's gradients that are not carried; None: it
        has none."""
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

    def settle(self):
        """Before a step: whether all gradients are finite, which all ranks find alike."""
        self._average_others()
        gradients = [one.grad for one in self.parameters if one.grad is not None]
        values = [one if one.layout == torch.strided else one._values() for one in gradients]
        finite = [one.isfinite().all().cpu() for one in values]
        return not finite or bool(torch.stack(finite).all())

    def _average_others(self):
        """Those of the model that DistributedDataParallel has no bucket for: they were frozen when
        it was made, or have been added since."""
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
            type(self.optimizer).step.__wrapped__(self.optimizer)  # without the hooks of a step
        finally:
            self.optimizer.param_groups = groups

    # --- State

    def state_of(self):
        if self.optimizer is None:
            return {}
        return {one: self.optimizer.state[one] for one in self.parameters if one in self.optimizer.state}

    def load(self, loaded):
        loaded = {one: dict(of) for one, of in loaded.items()}
        self.saved.load(take(loaded))
        for one in self.parameters if self.optimizer is not None else ():
            saved = loaded.get(one) or {}
            if not _OF_TORCH.isdisjoint(saved):
                self.optimizer.state[one] = {
                    name: value.detach().clone().to("cpu" if name == "step" else one.device)
                    if isinstance(value, torch.Tensor) else value
                    for name, value in saved.items()
                }
