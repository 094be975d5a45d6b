"""The optimizers in the shape of torch.optim.Optimizer.

    comm = onebit.Communicator.torch()
    optimizer = onebit.torch.EfficientAdam(model.parameters(), comm, lr=1e-3)

Each rank calls `backward` on its own loss, and `step` does the exchange: the model is not wrapped
in DistributedDataParallel. All ranks must begin with the same parameters.
"""

import torch

import onebit
from onebit.errors import wrong
from onebit.methods import METHODS, NAMES


class _Optimizer(torch.optim.Optimizer):
    """params and lr are as in torch.optim; options are those of the onebit optimizer by name.

    Groups of parameters may have a weight_decay (decoupled, as in AdamW), an `uncompressed` and an
    lr of their own; the ratios of the groups' rates are fixed when the optimizer is made, as
    learning-rate schedulers leave them.

    status: of the latest step, `Status.OK`, or `Status.SKIPPED` where some rank's gradient was not
        finite and nothing was changed
    onebit: the `onebit.Optimizer`, for statistics and checkpoints in files
    """

    _kind = None

    def __init__(self, params, comm, lr=1e-3, weight_decay=0.0, **options):
        self.onebit = None
        self.status = None
        defaults = {"lr": lr, "weight_decay": weight_decay, "uncompressed": False}
        super().__init__(params, defaults)
        self._first_rate = self.param_groups[0]["lr"]
        if not self._first_rate > 0:
            raise wrong(f"lr is {self._first_rate}: the first group's must be positive")
        self._factors = [group["lr"] / self._first_rate for group in self.param_groups]
        self._parameters = [one for group in self.param_groups for one in group["params"]]
        tensors = [
            onebit.Tensor(one.detach(), None, group["weight_decay"], factor, group["uncompressed"])
            for group, factor in zip(self.param_groups, self._factors)
            for one in group["params"]
        ]
        self.onebit = self._kind(comm, tensors, **options)

    def add_param_group(self, group):
        if self.onebit is not None:
            raise wrong("parameters cannot be added once the optimizer is made")
        super().add_param_group(group)

    def _rate(self):
        """The rate of the first group; the others' must have kept their ratio to it."""
        rate = self.param_groups[0]["lr"]
        for number, (group, factor) in enumerate(zip(self.param_groups, self._factors)):
            if abs(group["lr"] - factor * rate) > 1e-6 * abs(factor * rate):
                raise wrong(f"lr of group {number} is {group['lr']}, no longer {factor:g} times "
                            f"that of group 0, {rate}")
        return rate

    @torch.no_grad()
    def step(self, closure=None):
        """One step. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            rate = self._rate()
            for number, one in enumerate(self._parameters):
                self.onebit.set_gradient(number, one.grad)
        except Exception:
            # The step that no rank can make: the others need not wait for this one.
            onebit._native.library().onebit_optimizer_step(self.onebit.handle, float("nan"))
            raise
        self.status = self.onebit.step(rate)
        return loss

    def state_dict(self):
        """As torch's, and `part`: this rank's part of the state, as a tensor of bytes."""
        part = torch.frombuffer(bytearray(self.onebit.save()), dtype=torch.uint8)
        return {**super().state_dict(), "part": part}

    def load_state_dict(self, state_dict):
        """Takes the state from `state_dict`s of all ranks that saved: a list of them in the order
        of their ranks; of one rank, itself. Parameters too. Collective."""
        dicts = state_dict if isinstance(state_dict, (list, tuple)) else [state_dict]
        try:
            parts = [bytes(one["part"].tolist()) for one in dicts]
        except Exception:
            self.onebit.load([])  # is refused: the other ranks need not wait
            raise
        self.onebit.load(parts)
        super().load_state_dict({key: dicts[0][key] for key in ("state", "param_groups")})


for _method in METHODS:
    globals()[_method.kind] = type(
        _method.kind,
        (_Optimizer,),
        {
            "__doc__": f"`onebit.{_method.kind}` for torch: {_method.title}.",
            "__module__": __name__,
            "_kind": getattr(onebit, _method.kind),
        },
    )
__all__ = NAMES
