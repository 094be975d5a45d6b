"""One call for a program that has DistributedDataParallel and an optimizer of torch's.

    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = onebit.torch.compress(model, optimizer)
"""

import sys
import types

import torch

from onebit.communicator import Communicator
from onebit.errors import wrong
from onebit.torch import optim
from onebit.torch.gather import agree
from onebit.torch.shards import FSDPModule, shards_of, stop_all_reduce

# Of groups; each optimizer's own are found there, since a group may have been given others.
_KEYS = {
    torch.optim.AdamW: ("betas", "eps", *optim._ADAM_KEYS),
    torch.optim.Adam: ("betas", "eps", *optim._ADAM_KEYS),
    torch.optim.SGD: ("momentum", *optim._SGD_KEYS),
}


def _given_away(self, *_, **__):
    raise wrong("onebit.torch.compress has taken this optimizer: step the one that it returned")


# What torch's schedulers look for, so that those made before need not warn.
_given_away._wrapped_by_lr_sched = _given_away._with_counter = True


def _is_accelerated(optimizer):
    module = sys.modules.get("accelerate.optimizer")
    return module is not None and isinstance(optimizer, module.AcceleratedOptimizer)


def _check(optimizer):
    if type(optimizer) not in _KEYS:
        raise wrong(
            f"the optimizer is a {type(optimizer).__name__}, not torch.optim's AdamW, Adam or SGD: "
            "for others register onebit.torch.allreduce_hook"
        )
    if type(optimizer) is torch.optim.SGD and not optimizer.param_groups[0]["momentum"]:
        raise wrong(
            "SGD without momentum has no optimizer here: register onebit.torch.allreduce_hook"
        )


def _options_of(optimizer):
    first = optimizer.param_groups[0]
    options = {name: first[name] for name in _KEYS[type(optimizer)] if name in first}
    coupled = type(optimizer) is not torch.optim.AdamW
    options["decoupled_weight_decay"] = first.get("decoupled_weight_decay", False) or not coupled
    return {**options, "lr": optimizer.defaults["lr"], "weight_decay": first["weight_decay"]}


def _kind_of(optimizer, kind, options):
    """The class, and what is chosen for a program that chooses nothing (docs/optimizers.md)."""
    if kind is None:
        sgd = type(optimizer) is torch.optim.SGD
        kind = optim.Momentum if sgd else optim.EfficientAdam
    if kind is optim.Momentum:
        options = {"warmup_steps": 100, "warmup_bits": 8, **options}
    return kind, options


def _make(comm, model, optimizer, kind, overlap, options):
    reason = None
    try:
        _check(optimizer)
        kind, options = _kind_of(optimizer, kind, {**_options_of(optimizer), **options})
    except Exception as caught:  # noqa: BLE001
        reason = caught
    agree(comm, reason)
    made = kind(optimizer.param_groups, comm=comm, **options)
    try:
        if isinstance(model, FSDPModule):
            stop_all_reduce(model)
        else:
            made.attach(model, overlap)
        made._load(optimizer.state)
    except Exception:
        made.onebit.close()
        raise
    return made


def compress(model, optimizer, kind=None, *, overlap=True, timeout=None, **options):
    """The optimizer that goes on in place of torch's AdamW, Adam or SGD with momentum, attached to
    a DistributedDataParallel, or to a model of fully_shard on a mesh of replicas and shards (HSDP),
    whose replicas exchange what is compressed. Collective; what it cannot do raises `Error` on all
    ranks.

    Parameters, groups, learning rates, betas, eps, momentum and weight decay are those of
    `optimizer`, and so is its state: of steps that it has made, or what a trainer has loaded into
    it (`load_state_dict`). It makes no step any more. Schedulers may be made of either, before or
    after: their groups are the same.

    optimizer: one that Accelerate has prepared stays that, of the one that goes on: it is given
        back, leaves out the steps of an accumulation as before, and has the attributes `onebit`,
        `comm`, `close` and `consolidate_state_dict` of it
    kind: a class of this module; None: `Momentum` for SGD, whose first 100 steps send 8 bits an
        element (warmup_steps=, warmup_bits=), else `EfficientAdam`, whose first 40 do; all others
        send one
    overlap: as of `attach`
    timeout: seconds that a rank waits for others
    options: of that class
    """
    group = getattr(getattr(model, "_orig_mod", model), "process_group", None)
    if isinstance(model, FSDPModule):
        group = shards_of(list(model.parameters())).replicas
    comm = Communicator.torch(group, timeout)
    accelerated = _is_accelerated(optimizer) and optimizer
    if accelerated:
        optimizer = accelerated.optimizer
    try:
        made = _make(comm, model, optimizer, kind, overlap, options)
    except Exception:
        comm.close()
        raise
    made._owned = True
    optimizer.param_groups = made.param_groups
    optimizer.step = types.MethodType(_given_away, optimizer)
    optimizer._opt_called, optimizer._step_count = True, 1  # of torch 2 and of torch 1
    if not accelerated:
        return made
    accelerated.__init__(made, device_placement=False, scaler=accelerated.scaler)
    for name in "onebit", "comm", "close", "consolidate_state_dict":
        setattr(accelerated, name, getattr(made, name))
    return accelerated
