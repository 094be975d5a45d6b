"""A single call for a program that has DistributedDataParallel and torch optimizers.

    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = onebit.torch.compress(model, optimizer)
"""

import json
import sys
import types
import weakref
from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit import _native
from onebit._native import argument_error, warn
from onebit.communicator import Communicator
from onebit.torch import optim
from onebit.torch.automatic import Automatic
from onebit.torch.backward import check_wrapped, register, sparse_modules, wrapped_of
from onebit.torch.hook import DTYPES, HookState, instances_of
from onebit.torch.meter import FirstSum
from onebit.torch.ranks import agreed, gather
from onebit.torch.remainder import Remainder, SavedHook, save_with
from onebit.torch.report import add_reports, summaries
from onebit.torch.shards import FSDPModule, inside_of, shards_of, stop_all_reduce
from onebit.torch.state import flat
from onebit.torch.stateful import StatefulOptimizer
from onebit.torch.transport import create_for, suits_nccl, timeout_of


class _How(NamedTuple):
    """The way in which the library's optimizer replaces a torch optimizer.

    kind: the class that replaces torch's
    given: keys of torch's groups that are options of `kind`; they need the same value in all groups
    keys: other keys of these groups, with the only value that `kind` accepts; None: any value, since the key has
        no effect
    """

    kind: type
    given: tuple
    keys: dict


# The gradients of all other optimizers are averaged in 8 bits, and the optimizers do not change.
_HOWS = {
    torch.optim.AdamW: _How(optim.EfficientAdam, ("betas", "eps"), optim._ADAM_KEYS),
    torch.optim.Adam: _How(optim.EfficientAdam, ("betas", "eps"), optim._ADAM_KEYS),
    torch.optim.SGD: _How(optim.Momentum, ("momentum",), optim._SGD_KEYS),
}
_BITS = 8
_FROZEN = "is frozen"
_FOREIGN = "is not of the model that is wrapped"
_BY_TORCH = ", so torch averages it"  # the end of such a reason
_ASKED = "kind is HookState"  # a reason that gives no warning


def _refuse_step(self, *_, **__):
    raise argument_error("this optimizer was replaced by onebit.torch.compress: call step() of the one that it "
                         "returned")


# torch's schedulers check these attributes. With them, schedulers that exist already give no warning.
_refuse_step._wrapped_by_lr_sched = _refuse_step._with_counter = True


# Classes of trainers that wrap an optimizer and have it as their attribute `optimizer`, by module.
_PREPARED = {
    "accelerate.optimizer": "AcceleratedOptimizer", "lightning.fabric.wrappers": "_FabricOptimizer",
    "lightning_fabric.wrappers": "_FabricOptimizer",
}  # fmt: skip


def _is_prepared(optimizer):
    modules = [(sys.modules.get(one), name) for one, name in _PREPARED.items()]
    return any(isinstance(optimizer, getattr(one, name, ())) for one, name in modules)


# --- The optimizer to replace --------------------------------------------------------------------


def _why_not_values(how, group):
    """Returns the reason why the library's optimizer cannot have the values of a group; None: it can."""
    for name in how.given:
        values = group[name] if name == "betas" else (group[name],)
        limit = 1 if name != "eps" else 2
        if not all(0 < one < limit for one in values):
            return f"{name} is {group[name]}: onebit's optimizers need values above 0 and below {limit}"
    for name, value in how.keys.items():
        if value is not None and group.get(name, value) != value:
            return f"{name} is {group[name]}: {optim._WHY_NOT[name]}"
    return None


def _why_not_group(how, group, first):
    """Returns the reason why the library's optimizer cannot have the parameters of a group; None: it can.

    first: as `_first_group` returns it
    """
    reason = _why_not_values(how, group)
    for name in *how.given, "decoupled_weight_decay":
        if not reason and group.get(name) != first.get(name):
            reason = f"{name} is {group[name]}, and {first[name]} in another group"
    return reason


def _first_group(how, optimizer):
    """Returns the first group whose values the library's optimizer can have, or the first of all if none has."""
    fits = (one for one in optimizer.param_groups if _why_not_values(how, one) is None)
    return next(fits, optimizer.param_groups[0])


def _why_not_bits(one, sparse):
    """Returns the reason why a gradient is not compressed at all; None: it is."""
    reason = "has sparse gradients" if id(one) in sparse else f"has type {one.dtype}"
    return reason + _BY_TORCH if id(one) in sparse or one.dtype not in DTYPES else None


def _why_not_parameter(one):
    if not one.requires_grad:
        return _FROZEN
    one = getattr(one, "to_local", lambda: one)()  # only a DTensor has to_local
    return None if flat(one.detach()) is not None else "has gaps in its memory"


def _module_of(model):
    return model if isinstance(model, FSDPModule) else model.module


def _model_with(optimizer):
    """Returns the model with which an optimizer is compressed already; None: there is none, or it is closed."""
    automatic = getattr(optimizer, "automatic", None)
    if automatic is not None:
        return None if automatic._closed else automatic._model()
    backward = getattr(optimizer, "_backward", None) if isinstance(optimizer, StatefulOptimizer) else None
    return None if backward is None or optimizer._closed else backward.model


def _is_of_another(model, optimizer):
    """True if the optimizer is compressed with another model already, and steps this model too."""
    other = _model_with(optimizer)
    if other is None:
        return False
    own = {id(one) for one in _module_of(model).parameters() if one.requires_grad}
    every = {id(one) for group in optimizer.param_groups for one in group["params"]}
    return own <= every and own.isdisjoint(map(id, other.parameters()))


def _reasons(model, optimizer):
    """Returns, for each parameter of an optimizer, the reason why the library's optimizer cannot have it; None: it
    can."""
    how, reasons = _HOWS.get(type(optimizer)), {}
    first = how and _first_group(how, optimizer)
    ignored, module = set(getattr(model, "parameters_to_ignore", ())), _module_of(model)
    names = {id(one) for name, one in module.named_parameters() if name not in ignored}
    sparse = {id(one.weight) for one in sparse_modules(module).values()}
    for group in optimizer.param_groups:
        why_not = f"is stepped by {type(optimizer).__name__}"
        if how is not None:
            why_not = _why_not_group(how, group, first)
        for one in group["params"]:
            is_foreign = id(one) not in names
            reasons[one] = (_FOREIGN if is_foreign else
                            _why_not_bits(one, sparse) or why_not or _why_not_parameter(one))  # fmt: skip
    sizes = {}
    for one, reason in reasons.items():
        if reason is None:
            key = one.dtype, one.device.type
            sizes[key] = sizes.get(key, 0) + one.numel()
    most = max(sizes, key=sizes.get, default=None)
    for one, reason in reasons.items():
        if reason is None and (one.dtype, one.device.type) != most:
            reasons[one] = f"has type {one.dtype} on {one.device.type}, but most have {most[0]} on {most[1]}"
    return reasons


class _Choice:
    """Chooses which of the program's optimizers the library's optimizer replaces.

    optimizers: the torch optimizers of the program
    kind: as in `compress`
    carried: the index of the optimizer to replace; None: none is replaced
    reasons: by parameter, the reason why it is not exchanged in one bit
    dense: the reason why nothing is compressed, or None
    """

    def __init__(self, model, optimizers, kind):
        self.dense = None
        if getattr(model, "mixed_precision", None) is not None:
            self.dense = ("the model's own mixed_precision sets a communication hook: use torch.autocast "
                          "instead")
        elif not isinstance(model, FSDPModule):
            check_wrapped(model)
            types = {one.dtype for one in model.module.parameters() if one.requires_grad}
            if types.isdisjoint(DTYPES):
                self.dense = f"its parameters have type {', '.join(sorted(map(str, types)))}"
        if any(isinstance(one, StatefulOptimizer) for one in optimizers):
            raise argument_error("an optimizer is from onebit.torch already: attach it to the model. If its "
                                 "trainer has ended, make another trainer")
        if any(hasattr(one, "automatic") and one.automatic.ended_in_one_bit for one in optimizers):
            raise argument_error("an optimizer's state ended with close(), in one bit: make a new optimizer (or "
                                 "trainer), and load the state that torch_state_dict() returned before close()")
        every = [_reasons(model, one) for one in optimizers]
        sizes = [sum(one.numel() for one, reason in of.items() if reason is None) for of in every]
        best = max(range(len(sizes)), key=sizes.__getitem__)
        self.carried = best if sizes[best] and kind is not HookState and not self.dense else None
        why = _ASKED if kind is HookState else "another optimizer has more parameters"
        self.reasons = {}
        for number, of in enumerate(every):
            for one, reason in of.items():
                if reason or number != self.carried:
                    self.reasons[one] = reason or why
        if self.carried is None and kind not in (None, HookState) and not self.dense:
            reason = next(iter(self.reasons.values()), "does not exist")
            raise argument_error(f"{kind.__name__} cannot replace {type(optimizers[0]).__name__}, whose first "
                                 f"parameter {reason}")
        self.names = {one: name for name, one in _module_of(model).named_parameters()}
        for one in self.names:
            if one.requires_grad and not any(one in of for of in every):
                others = _FOREIGN in self.reasons.values()  # perhaps copies, from which the program sets this one
                self.reasons[one] = "is in no optimizer" + (
                    "" if others else ": requires_grad_(False) avoids its exchange")
        others = [one for one, reason in self.reasons.items() if reason != _FROZEN]
        if isinstance(model, FSDPModule) and others:
            name = self.names.get(others[0], "a parameter of the optimizer")
            raise argument_error(f"with fully_shard every parameter must use one bit, but {name} "
                                 f"{self.reasons[others[0]]}: use onebit.torch.fsdp.compress")

    def averaged(self):
        """Returns, by name, the reasons why parameters that are not frozen are not exchanged in one bit."""
        return {
            self.names.get(one, f"unnamed {number}"): reason
            for number, (one, reason) in enumerate(self.reasons.items())
            if reason != _FROZEN
        }

    def words(self):
        """Returns the lines to print about the choice."""
        if self.dense:
            return [f"nothing is compressed: {self.dense}"]
        lines = {f"averaged in {_BITS} bits an element, not exchanged in one bit: ": {}, "not compressed: ": {},
                 "left as without this call: ": {}}  # fmt: skip
        in_bits, exact, foreign = lines.values()
        for name, why in self.averaged().items():
            if why != _ASKED:
                (foreign if why == _FOREIGN else exact if why.endswith(_BY_TORCH) else in_bits)[name] = why
        return [begin + one for begin, of in lines.items() for one in summaries(of)]

    def digest(self):
        """Returns a text that is the same on all ranks if they have made the same choice."""
        return json.dumps([self.carried, bool(self.dense), sorted(self.names.get(one, "") for one in self.reasons)])


def _choose(comm, model, optimizers, kind):
    choice = agreed(comm, lambda: _Choice(model, optimizers, kind))
    if len(set(gather(comm, choice.digest().encode()))) > 1:  # all ranks compare
        raise argument_error("the ranks' optimizers differ in type or in parameters")
    return choice


# --- The optimizer that replaces it --------------------------------------------------------------


def _options_of(optimizer):
    first = _first_group(_HOWS[type(optimizer)], optimizer)
    options = {name: first[name] for name in _HOWS[type(optimizer)].given}
    options.update({name: first[name] for name in _HOWS[type(optimizer)].keys if name in first})
    coupled = type(optimizer) is not torch.optim.AdamW
    options["decoupled_weight_decay"] = first.get("decoupled_weight_decay", False) or not coupled
    return {**options, "lr": optimizer.defaults["lr"], "weight_decay": first["weight_decay"]}


def _hook_state(model, timeout, **options):
    state = HookState(timeout=timeout, **{"bits": _BITS, **options})
    _native.set_options(_native.make_structure(_native.PlanOptions), state._plan_options)  # raises for other options
    state._model = weakref.ref(model)
    return state


def _layout_of(model, optimizer, inside, kind, timeout, options):
    """Returns the layout of the parameters: each rank has all of them, or the shards of FSDP or HSDP."""
    if isinstance(model, FSDPModule):
        return shards_of(list(model.parameters()))
    reason = None
    if any(one.device.type == "cpu" for group in optimizer.param_groups for one in group["params"]):
        reason = "parameters are on the processor"
    elif kind is optim.Lamb or any(options.get(name) for name in ("max_norm", "trust_ratio")):
        reason = "norms of all elements are asked for"
    elif not FSDPModule:
        reason = "this torch has no torch.distributed.tensor"
    device = next(one for group in optimizer.param_groups for one in group["params"]).device.type
    group = model.process_group
    return inside_of(group, inside, device, reason, timeout_of(group, timeout))


def _make_optimizer(comm, model, optimizer, kind, timeout, layout, options, reasons, extra=None):
    """Creates the library's optimizer with the state of torch's optimizer. extra: as in `SavedHook`"""
    remainder, own = None, {one for group in optimizer.param_groups for one in group["params"]}
    if not isinstance(model, FSDPModule):
        every = [one for one in model.parameters() if one.requires_grad]
        elements = sum(one.numel() for one in every if one in reasons)
        remainder = Remainder(model, _hook_state(model, timeout), optimizer,
                              [one for one in reasons if one in own], elements, extra)  # fmt: skip
    options = {**_options_of(optimizer), **options, "layout": layout, "remainder": remainder}
    made = kind(optimizer.param_groups, comm=comm, **options)
    if kind in (optim.EfficientAdam, optim.Momentum) and not layout.number and not options.get("trust_ratio"):
        made._has_torch_state = True
    try:
        made._load(optimizer.state)
    except Exception:
        made.onebit.close()
        raise
    for one in made._parameters:
        optimizer.state.pop(one, None)
    hooks = {name: one for name, one in vars(optimizer).items() if name.endswith("_hooks")}
    vars(made).update(hooks)  # the program's hooks of steps and states
    return made


def _replace_optimizer(comm, model, optimizer, kind, overlap, timeout, layout, options, reasons):
    made = _make_optimizer(comm, model, optimizer, kind, timeout, layout, options, reasons)
    try:
        if made._remainder is None:
            stop_all_reduce(model)
        else:
            made.attach(model, overlap)
    except Exception:
        made.onebit.close()
        raise
    made._owned = True
    optimizer.param_groups = made.param_groups
    optimizer.step = types.MethodType(_refuse_step, optimizer)
    optimizer._opt_called, optimizer._step_count = True, 1  # attributes of torch 2 and of torch 1
    return made


def _keep_torch_state(optimizer):
    """Gives torch_state_dict to an optimizer whose own state is torch's."""
    if not hasattr(optimizer, "torch_state_dict"):
        optimizer.torch_state_dict = optimizer.state_dict


def _share_report(optimizers, carried, averaged):
    """Gives all optimizers of the model the report of the replaced one, which is about the whole model."""
    carried.averaged = averaged
    for one in optimizers:
        if one is not carried:
            one.close = lambda: None
            one.report, one.clip_grad_norm_ = carried.report, carried.clip_grad_norm_
            _keep_torch_state(one)


def _register_averaging_hook(comm, model, optimizers, timeout, options, dense, averaged):
    """Keeps the optimizers, and registers a hook that averages gradients in few bits, unless nothing is
    compressed."""
    state = agreed(comm, lambda: _hook_state(model, timeout, **options))
    if not dense:
        register(model, state)
        elements = sum(one.numel() for one in model.parameters() if one.requires_grad)
        save_with(optimizers[0], SavedHook(state, model, elements))
    state.averaged = averaged
    for one in optimizers:
        _give_methods(one, state, model)
        _keep_torch_state(one)


def _give_methods(optimizer, state, model):
    """Gives an optimizer the methods of its hook, or of its hooks, if it steps several models."""
    hooks = [pair for pair in getattr(optimizer, "_onebit_averaged", ()) if not pair[0]._closed] + [(state, model)]

    def clip_grad_norm_(max_norm, norm_type=2.0):
        every = [one for _, of in hooks for one in of.parameters()]
        return torch.nn.utils.clip_grad_norm_(every, max_norm, norm_type)

    def close():
        for one, _ in hooks:
            one.close()

    optimizer._onebit_averaged, optimizer.clip_grad_norm_, optimizer.close = hooks, clip_grad_norm_, close
    optimizer.report = lambda: add_reports([one.report() for one, _ in hooks])


def _begin_auto(
    comm, model, optimizers, kind, overlap, timeout, options, choice, bytes_a_day, local_steps, first
):  # fmt: skip
    """Begins the automatic choice among the methods that this optimizer supports."""
    make, lead = None, choice.carried or 0
    if choice.carried is not None:
        kind = kind or _HOWS[type(optimizers[lead])].kind
        known = {one for of in optimizers for group in of.param_groups for one in group["params"]}

        def make(extra):
            groups = optimizers[lead].param_groups
            added = {one: "was added" for group in groups for one in group["params"] if one not in known}
            layout = _layout_of(model, optimizers[lead], None, kind, timeout, options)
            made = _make_optimizer(comm, model, optimizers[lead], kind, timeout, layout, options,
                                   {**choice.reasons, **added}, extra)  # fmt: skip
            made.averaged = choice.averaged()
            made.hook_state(overlap, model)
            return made

    state = _hook_state(model, timeout, **({} if make else options))
    state.averaged = choice.averaged()
    words = choice.words() if make else ()
    warmup = kind is optim.EfficientAdam and (options.get("warmup_steps") or onebit.WARMUP_STEPS)
    warmup = 0 if warmup == onebit.WARMUP_NONE or (options.get("warmup_bits") or 8) != 8 else int(warmup)
    automatic = Automatic(comm, model, optimizers, lead, state, make, warmup, words, bytes_a_day, local_steps, first)
    register(model, automatic)


def auto(model, optimizer, **options):
    """Calls `compress(model, optimizer, method="auto", ...)`."""
    return compress(model, optimizer, method="auto", **options)


def compress(
    model, optimizer, kind=None, *, method=None, bytes_a_day=None, local_steps=None, overlap=True,
    timeout=None, inside="auto", **options
):  # fmt: skip
    """Returns the optimizer that replaces torch's. It is attached to a DistributedDataParallel, or to a model of
    fully_shard on a mesh of replicas and shards (HSDP). docs/python-optimizers.md describes which parameters use
    one bit, and which use 8 bits. Collective: raises `Error` on all ranks if it cannot compress the model.

    The result has the groups and the state of `optimizer`, which makes no more steps. Either of them can have a
    scheduler. If the library has no optimizer of this kind with one bit, `optimizer` itself is returned, and makes
    its own steps.

    optimizer: one, or a list of several, such as Muon and AdamW: then a list is returned, in which the one that
        uses one bit is replaced. An optimizer that Accelerate or Fabric has prepared keeps its wrapper, and gets
        the attributes `onebit`, `comm`, `describe` and `consolidate_state_dict`. All returned optimizers have
        `clip_grad_norm_`, `report` and `close`
    kind: a class of this module; None: `Momentum` for SGD, else `EfficientAdam`. `HookState`: no optimizer is
        replaced
    method: "auto": DistributedDataParallel's own exchange, 8 bits, one bit or local steps are chosen by measured
        times. The optimizers are not replaced and get the attribute `automatic`, whose `method` is the present
        choice; kind and options are used for one bit. None: as `kind` says
    bytes_a_day: with method "auto", the most bytes that a host may send; None: any number
    local_steps: with method "auto", whether local steps may be chosen where one bit would wait for the link. They
        cost loss, and with them the ranks' models differ until all ranks call `automatic.synchronize()` or
        `close()`. None: only if each other method sends more than bytes_a_day
    overlap: as in `attach`
    timeout: seconds that a rank waits for others
    inside: "auto": if parameters are on a device, and several hosts have the same number of ranks, torch's
        collectives reduce gradients inside a host, and each rank exchanges its shard with the other hosts; a
        process group of this rank's host: the same on any device; None: never
    options: those of the class; if no optimizer is replaced, those of `HookState`
    """
    several = isinstance(optimizer, (list, tuple))
    given = list(optimizer) if several else [optimizer]
    inner = [one.optimizer if _is_prepared(one) else one for one in given]
    wrapped = wrapped_of(model)
    group = getattr(wrapped, "process_group", None)
    if isinstance(wrapped, FSDPModule):
        group = shards_of(list(wrapped.parameters())).mesh.get_group(0)
    if wrapped is not None and any(_is_of_another(wrapped, one) for one in inner):
        if not wrapped.process_group.rank():
            warn("this model's gradients stay dense: its optimizer is compressed with another model already")
        return optimizer
    for one in inner:
        if hasattr(one, "automatic"):
            one.automatic.average_own_moments()
    first = FirstSum(wrapped) if method == "auto" and isinstance(wrapped, DistributedDataParallel) else None
    comm = Communicator.torch(group, timeout)
    says = not comm.rank  # the choice is the same on all ranks
    try:
        if method not in (None, "auto"):
            raise argument_error(f"method is {method!r}, not 'auto'")
        if bytes_a_day is not None and not (method and bytes_a_day > 0):
            raise argument_error(f"bytes_a_day is {bytes_a_day}: it must be above 0, and needs method 'auto'")
        if method and (isinstance(wrapped, FSDPModule) or inside not in ("auto", None)):
            raise argument_error("method 'auto' needs a DistributedDataParallel, and no inside: leave out method "
                                 "or inside")
        choice = _choose(comm, wrapped, inner, kind)
        is_auto = method == "auto" and not choice.dense
        made = list(inner)
        if is_auto:
            _begin_auto(comm, wrapped, inner, kind, overlap, timeout, options, choice, bytes_a_day, local_steps,
                        first)
        elif choice.carried is None:
            _register_averaging_hook(comm, wrapped, inner, timeout, options, choice.dense, choice.averaged())
        else:
            carried = inner[choice.carried]
            kind = kind or _HOWS[type(carried)].kind  # docs/optimizers.md gives the reasons
            layout = _layout_of(wrapped, carried, inside, kind, timeout, options)
            if layout.number and group is not layout.mesh.get_group(0):
                comm.close()
                comm = Communicator.torch(layout.mesh.get_group(0), timeout)
            elif set(choice.reasons.values()) <= {_FROZEN}:  # other optimizers report a skipped step at once
                every = [one for of in carried.param_groups for one in of["params"]]
                stage = options.get("stage", "auto")
                if suits_nccl(group, every, stage):
                    comm.close()
                    comm = create_for(Communicator, every, stage, group, timeout)
            made[choice.carried] = _replace_optimizer(
                comm, wrapped, carried, kind, overlap, timeout, layout, options, choice.reasons)
            _share_report(made, made[choice.carried], choice.averaged())
    except Exception:
        comm.close()
        raise
    if choice.carried is None and not is_auto:
        comm.close()
    for words in choice.words() if says and not is_auto else ():
        warn(words)
    results = [_keep_wrapper(*pair) for pair in zip(given, made)]
    return results if several else results[0]


def _keep_wrapper(given, made):
    """Returns the optimizer. If a trainer has prepared the given one, its wrapper is kept."""
    if not _is_prepared(given):
        return made
    if not hasattr(given, "scaler"):  # it is a wrapper of Fabric
        given._optimizer = made
    elif given.optimizer is not made or hasattr(made, "automatic"):  # another object makes the step
        given.__init__(made, device_placement=False, scaler=given.scaler)
    names = ("onebit", "comm", "automatic", "close", "report", "describe", "clip_grad_norm_",
             "consolidate_state_dict", "torch_state_dict")  # fmt: skip
    for name in names:
        if hasattr(made, name):
            setattr(given, name, getattr(made, name))
    accelerate = sys.modules.get("accelerate")
    for one in instances_of(accelerate.Accelerator) if accelerate else ():
        if any(of is given for of in one._optimizers):
            _clip_for(one, made)
    return given


def _clip_for(accelerator, optimizer):
    """Makes an Accelerator's clip_grad_norm_ call the optimizer's function for its parameters."""
    before = accelerator.clip_grad_norm_

    def clip_grad_norm_(parameters, max_norm, norm_type=2):
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        known = {id(one) for one in parameters}
        # auto's gradients are the program's, for torch to clip, unless its method is one bit
        own = getattr(optimizer.automatic.made if hasattr(optimizer, "automatic") else optimizer, "_parameters", ())
        if norm_type != 2 or not own or any(id(one) not in known for one in own):
            return before(parameters, max_norm, norm_type)
        accelerator.unscale_gradients()
        return optimizer.clip_grad_norm_(max_norm)

    accelerator.clip_grad_norm_ = clip_grad_norm_
