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
from onebit.torch.shards import FSDPModule, inside_of, shards_of, stop_all_reduce
from onebit.torch.transport import check_member, timeout_of

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


def _shards_of(model, optimizer, inside, kind, timeout, options):
    """What each rank works on."""
    if isinstance(model, FSDPModule):
        return shards_of(list(model.parameters()))
    group = getattr(getattr(model, "_orig_mod", model), "process_group", None)
    given = getattr(optimizer, "param_groups", ())
    types = {one.device.type for group in given for one in group["params"]} or {"cpu"}
    reason = None
    if "cpu" in types:
        reason = "parameters are on the processor"
    elif kind is optim.Lamb or any(options.get(name) for name in ("max_norm", "trust_ratio")):
        reason = "norms of all elements are asked for"
    elif not FSDPModule:
        reason = "this torch has no torch.distributed.tensor"
    check_member(group)
    return inside_of(group, inside, types.pop(), reason, timeout_of(group, timeout))


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


def compress(
    model, optimizer, kind=None, *, overlap=True, timeout=None, inside="auto", **options
):
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
        `comm`, `close`, `describe` and `consolidate_state_dict` of it
    kind: a class of this module; None: `Momentum` for SGD, whose first 100 steps send 8 bits an
        element (warmup_steps=, warmup_bits=), else `EfficientAdam`, whose first 40 do; all others
        send one
    overlap: as of `attach`
    timeout: seconds that a rank waits for others
    inside: where several ranks share a host, torch's own collectives reduce gradients inside it, each
        rank exchanges its shard of them with the other hosts, and parameters are gathered inside. A
        process group of this rank's host; "auto": where parameters are on a device and each of
        several hosts has as many ranks (`describe()` of the result says what is done, and why); None:
        never. A checkpoint is then of torch.distributed.checkpoint, or consolidated
    options: of that class
    """
    accelerated = _is_accelerated(optimizer) and optimizer
    if accelerated:
        optimizer = accelerated.optimizer
    shards = _shards_of(model, optimizer, inside, kind, timeout, options)
    group = getattr(getattr(model, "_orig_mod", model), "process_group", None)
    comm = Communicator.torch(shards.mesh.get_group(0) if shards.number else group, timeout)
    options["shards"] = shards
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
    for name in "onebit", "comm", "close", "describe", "consolidate_state_dict":
        setattr(accelerated, name, getattr(made, name))
    return accelerated
