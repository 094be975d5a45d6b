"""The optimizers with the interface of torch.optim.Optimizer.

    optimizer = onebit.torch.EfficientAdam(model.parameters(), lr=1e-3)
    model = DistributedDataParallel(model)
    optimizer.attach(model)

Each rank calls `backward` on its own loss, and `step` exchanges. After `attach`, DistributedDataParallel does
not also average the gradients, and as much of the exchange as possible is made in the backward pass.
"""

import json
import math
from typing import Any, NamedTuple

import torch

import onebit
from onebit import Status
from onebit._native import NAMES, OPTIMIZERS, Error, argument_error, warn
from onebit.communicator import Communicator
from onebit.torch.backward import (
    Backward,
    HookHandle,
    check_model,
    fail_step,
    register,
    tell_scalers,
    wrapped_of,
)
from onebit.torch.hook import future_of
from onebit.torch.ranks import MeanNorm, agreed, gather, interruptible
from onebit.torch.report import Report, ring
from onebit.torch.schedule import can_gather, choose_schedule
from onebit.torch.shards import shards_of
from onebit.torch.staged import Homes, Stage, Writes, is_staged
from onebit.torch.state import flat, in_order_of
from onebit.torch.stateful import StatefulOptimizer
from onebit.torch.transport import create_for

# The defaults of options with torch's names. The optimizers' options have C's names.
_TORCH_NAMES = {
    "betas": (("beta1", "beta2"), (0.9, 0.999)),
    "eps": (("epsilon",), 1e-8),
    "momentum": (("momentum",), 0.9),
}
_DEFAULTS = {"Lion": {"betas": (0.9, 0.99)}, "AdamW": {"weight_decay": 1e-2}}
# Keys of torch's groups, and the value that each must have; other values are rejected. None: any value, since
# the key has no effect here.
_ADAM_KEYS = {
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False,
    "differentiable": False, "fused": None,
}
_SGD_KEYS = {
    "dampening": 0, "nesterov": False, "maximize": False, "foreach": None, "differentiable": False,
    "fused": None,
}
_WHY_NOT = {
    "maximize": "negate the loss",
    "amsgrad": "the library's Adam has no such variant",
    "capturable": "steps wait for other ranks",
    "differentiable": "the library's steps are not recorded by autograd",
    "nesterov": "the library has heavy-ball momentum only",
    "dampening": "the library's momentum has no dampening",
}

# The number of elements of a bucket that is sent during the backward pass. It corresponds to
# DistributedDataParallel's 25 MiB of gradients, within a factor of two.
_BUCKET_SIZE = 2**22
# The relative difference below which two factors count as equal.
_TOLERANCE = 1e-6


class _Rates(NamedTuple):
    """The rates of a step: its learning rate; for each group its factor (None: unchanged, because the rate is
    0) and its weight decay; and beta1, or the momentum, which all groups share."""

    rate: float
    factors: Any
    decays: Any
    beta1: float


class _Optimizer(StatefulOptimizer):
    """params, lr, betas, eps, momentum, weight_decay are as in torch.optim, also by group. Before each step
    lr and weight_decay may change. Momentum and the first of betas may change too, in all groups together.
    The second of betas and eps are fixed, and are the same in all groups.
    docs/python-optimizers.md#what-a-program-may-do has the other rules.

    weight_decay: decoupled, as in AdamW; with decoupled_weight_decay=False it is added to the
        gradient, as in torch's Adam and SGD
    max_norm: clips by the root of the mean square of the ranks' norms. `clip_grad_norm_` instead clips by the
        norm of the mean gradient, as under DistributedDataParallel
    uncompressed: true: a group's gradients are averaged in full precision
    tables: only for EfficientAdam: parameters that are tables of outputs, such as [model.lm_head.weight]
        (docs/optimizers.md)
    comm: a `Communicator`; None: one of process_group (None: all processes) is created, and closed with the
        optimizer. It is over NCCL if parameters are on CUDA devices, the group's own collectives are NCCL's,
        and the library has kernels; timeout: seconds that a rank then waits for others
    stage: for parameters on a device: "host" works on copies in memory of the host, on any device
        of torch; "device" uses the library's CUDA kernels; "auto": the kernels if the library has
        them
    options: options of the onebit optimizer by name (include/onebit/*.h): freeze_step, block_size, ...

    status: the status of the latest step, `Status.OK`, or `Status.SKIPPED` if some rank's gradient was not
        finite and nothing has changed
    gather_seconds: seconds of an exchange by the schedule allgather, if it was measured to be the faster one; or None
    onebit: the `onebit.Optimizer`, for statistics and checkpoints in files
    comm: the communicator
    """

    _kind = None
    _method = None
    # Makes a GradScaler always call step, for any gradients, so that no rank waits in vain for another.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=None,
        eps=None,
        weight_decay=None,
        *,
        momentum=None,
        decoupled_weight_decay=True,
        max_norm=None,
        uncompressed=False,
        tables=(),
        comm=None,
        process_group=None,
        timeout=None,
        stage="auto",
        layout=None,
        remainder=None,
        **options,
    ):
        self._remainder = remainder  # onebit.torch.compress sets this
        self.onebit = self.comm = self.status = self._backward = self._norm = None
        if isinstance(lr, Communicator):
            raise TypeError("the communicator is given by name: comm=")
        given = {"betas": betas, "eps": eps, "momentum": momentum, "weight_decay": weight_decay}
        defaults = {"lr": lr, **self._torch_defaults(given, options)}
        defaults.update(decoupled_weight_decay=decoupled_weight_decay, uncompressed=uncompressed)
        super().__init__(params, defaults)
        if max_norm is not None:
            options["clip_norm"] = max_norm
        self._owned = comm is None
        if comm is None:
            every = [one for group in self.param_groups for one in group["params"]]
            comm = create_for(Communicator, every, stage, process_group, timeout)
        self.comm, self._is_creating = comm, False
        try:
            self._make(options, stage, layout, tables)
        except Exception:
            if not self._is_creating:  # the other ranks wait for this one
                self._kind._refuse(self.comm)
            if self._owned:
                self.comm.close()
            raise

    @classmethod
    def _torch_defaults(cls, given, options):
        """Returns betas, eps or momentum, weight decay, and torch's other keys. Removes the first ones from
        the options."""
        fields = set(cls._method.fields)
        found, of_kind = {}, _DEFAULTS.get(cls.__name__, {})
        for name, (c_names, default) in _TORCH_NAMES.items():
            value = given[name]
            if not fields.issuperset(c_names):
                if value is not None:
                    raise TypeError(f"{cls.__name__} has no {name}")
                continue
            found[name] = of_kind.get(name, default) if value is None else value
            if name == "betas":
                found[name] = tuple(
                    options.pop(c_name, one) for c_name, one in zip(c_names, found[name])
                )
            else:
                found[name] = options.pop(c_names[0], found[name])
        decay = given["weight_decay"]
        found["weight_decay"] = of_kind.get("weight_decay", 0.0) if decay is None else decay
        for name, value in (_ADAM_KEYS if "betas" in found else _SGD_KEYS).items():
            found[name] = options.pop(name, value)
        return found

    def _first_rates(self):
        """Returns the groups' initial rates, and records their other values, which must not change."""
        self._fixed = {
            name: self.defaults[name]
            for name in self.defaults
            if name not in ("lr", "weight_decay", "uncompressed", "foreach", "fused", "betas",
                            "momentum")
        }
        self._uncompressed = [bool(group["uncompressed"]) for group in self.param_groups]
        return self._wanted_rates()

    def _make(self, options, stage="auto", layout=None, tables=()):
        rates = self._first_rates()
        self._beta1 = rates.beta1
        every = [one for group in self.param_groups for one in group["params"]]
        self._stage = Stage() if is_staged(stage, every) else None
        self._writes = None  # finds writes to 16-bit parameters, for which the library has master values
        self._shards = layout or shards_of(every)
        self._check_shards(options)
        tables = {id(one) for one in tables}
        if not tables <= {id(one) for one in every if one.requires_grad}:
            raise argument_error("tables has something that is not a trained parameter of the groups")
        # Lists in the order of the library's tensors: the parameter, the number of its group, its factor and
        # its weight decay. Parameters that are not trained have no tensor.
        self._parameters, self._group_of, self._known, self._frozen, tensors = [], [], [], [], []
        for number, group in enumerate(self.param_groups):
            factor, decay = rates.factors[number], rates.decays[number]
            factor = 1.0 if factor is None else factor
            for one in group["params"]:
                if self._remainder is not None and one in self._remainder:
                    continue
                if not one.requires_grad:
                    self._frozen.append(one)
                    continue
                self._parameters.append(one)
                self._group_of.append(number)
                self._known.append((factor or 1.0, decay))  # a tensor's factor of 0 means 1 to the library
                array = flat(self._shards.local(one.detach()))
                if array is None:
                    raise argument_error(f"parameter {len(tensors)} is not dense: elements overlap, or "
                                         "others lie between them")
                if self._stage is not None:
                    array = self._stage.add(array, one)
                elif array.element_size() < 4:
                    self._writes = self._writes or Writes(one.device.type == "cpu")
                    self._writes.add(array, one)
                uncompressed = onebit.TABLE if id(one) in tables else self._uncompressed[number]
                tensors.append(onebit.Tensor(array, None, decay, factor, uncompressed))
        self._homes = Homes(self._parameters, self._shards.local)
        self._addresses = [None] * len(tensors)
        self._divides = "gain" in self._method.fields  # its warm-up divides gradients
        steps = options.get("warmup_steps") or onebit.WARMUP_STEPS
        warms_up = "warmup_steps" in self._method.fields
        self._warmup_steps = steps if warms_up and steps != onebit.WARMUP_NONE else 0
        self._no_warmup = warms_up and not self._warmup_steps
        # Valid for one step: the gradients, and copies of those whose strides differ from the parameter's.
        self._found, self._copies = [], []
        options = self._c_options(options)
        on_host = self._stage is not None or all(one.device.type == "cpu" for one in every)
        self._is_creating, self.gather_seconds = True, None
        if can_gather(self.comm, self._method.kind, options, on_host):
            count = sum(one.numel() for one in self._parameters)
            options["schedule"], self.gather_seconds = choose_schedule(self.comm, count)
        self.onebit = self._kind(self.comm, tensors, **options)
        self._forget_state()
        self._tag = self._skipped = self._loaded_steps = 0
        self.averaged, self._sent_before, self._checkpoint_bytes = {}, self.comm.bytes_sent, 0
        self._clips = options.get("clip_norm") is not None
        self._set_rates(rates)  # some factors are 0

    def _check_shards(self, options):
        if not self._shards.number:
            return
        if options.get("clip_norm") is not None:
            raise argument_error("max_norm is not supported with shards, whose norm is not the model's: call "
                                 "optimizer.clip_grad_norm_")
        if self._method.kind == "Lamb" or options.get("trust_ratio"):
            raise argument_error("Lamb and trust_ratio are not supported with shards, whose norms are not "
                                 "those of the parameters: use another optimizer")

    def _c_options(self, options):
        options = dict(options)
        for name, (c_names, _) in _TORCH_NAMES.items():
            if name in self.defaults:
                values = self.defaults[name]
                for c_name, value in zip(c_names, values if name == "betas" else [values]):
                    below_one = 1 if name != "eps" else math.inf
                    if not 0 < value < below_one:
                        raise argument_error(f"{name} is {values}, not above 0, or a beta not below 1")
                    options[c_name] = float(value)
        if self._stage is None and any(one.device.type == "cuda" for one in self._parameters):
            options.setdefault("device", "cuda")
        whole = options.get("block_size") == onebit.BLOCK_BUFFER or "profile" in options
        if not whole:
            options.setdefault("bucket_size", _BUCKET_SIZE)
        return options

    # --- Groups ----------------------------------------------------------------------------------

    def add_param_group(self, group):
        if self.onebit is not None and self._remainder is None:
            raise argument_error(
                "parameters cannot be added once the optimizer is made: onebit.torch.compress makes "
                "one that takes them"
            )
        super().add_param_group(group)
        if self.onebit is not None:
            self._uncompressed.append(False)
            self._remainder.extend(self.param_groups[-1]["params"])
            warn("the parameters of the group that was added are averaged in "
                 f"{self._remainder.state.bits} bits an element")

    def _check_group(self, number, group):
        for name, value in self._fixed.items():
            if group.get(name, value) != value:
                raise argument_error(
                    f"{name} of group {number} is {group[name]}, but was {value} for all groups when "
                    f"the optimizer was made: {name} cannot change"
                )
            if value and name in _WHY_NOT:
                raise argument_error(f"{name} is {value}: {_WHY_NOT[name]}")
        if bool(group["uncompressed"]) != self._uncompressed[number]:
            raise argument_error(f"uncompressed of group {number} cannot change")

    def _beta1_of(self, number, group):
        if "momentum" in self.defaults:
            name, beta1, rest, fixed = "momentum", group["momentum"], (), ()
        else:
            name, (beta1, *rest), (_, *fixed) = "betas", group["betas"], self.defaults["betas"]
        if not 0 < beta1 < 1:
            raise argument_error(f"{name} of group {number} is {group[name]}: it must be above 0 and below 1")
        if list(rest) != list(fixed):
            raise argument_error(f"betas of group {number} are {group['betas']}, but were "
                                 f"{self.defaults['betas']} when the optimizer was made: only the first beta can "
                                 "change")
        return float(beta1)

    def _wanted_rates(self):
        """Returns the rates that the groups give for the next step."""
        rates, beta1 = [], None
        for number, group in enumerate(self.param_groups):
            if self._remainder is not None and all(one in self._remainder for one in group["params"]):
                rates.append(0.0)
                continue
            self._check_group(number, group)
            own = self._beta1_of(number, group)
            if beta1 not in (None, own):
                raise argument_error(f"betas or momentum of group {number} is {own}, but {beta1} in the "
                                     "groups before it: all groups must have the same value")
            beta1 = own
            for name in "lr", "weight_decay":
                if not 0 <= float(group[name]) < math.inf:
                    raise argument_error(f"{name} of group {number} is {group[name]}: it must be finite and "
                                         "at least 0")
            rates.append(float(group["lr"]))
        rate = rates[0] or max(rates, default=0.0)
        decoupled = self.defaults["decoupled_weight_decay"]
        return _Rates(
            rate,
            [one / rate if rate else None for one in rates],
            [float(group["weight_decay"]) * decoupled for group in self.param_groups],
            beta1,
        )

    def _set_rates(self, rates):
        """Sets those factors and weight decays, and the momentum, that have changed."""
        if rates.beta1 != self._beta1:
            self.onebit.set_beta1(rates.beta1)
            self._beta1 = rates.beta1
        for tensor, (one, number) in enumerate(zip(self._parameters, self._group_of)):
            known, known_decay = self._known[tensor]
            factor, decay = rates.factors[number], rates.decays[number]
            if not one.requires_grad:  # no longer trained: does not change
                factor = decay = 0.0
            if factor is not None and abs(factor - known) > _TOLERANCE * known:
                self.onebit.set_learning_rate_factor(tensor, factor)
                known = factor
            if decay != known_decay:
                self.onebit.set_weight_decay(tensor, decay)
            self._known[tensor] = known, decay

    # --- DistributedDataParallel -----------------------------------------------------------------

    def attach(self, model, overlap=True):
        """Registers a hook with a DistributedDataParallel of these parameters, compiled or not. The hook
        leaves the gradients to this optimizer. Collective: raises `Error` on all ranks if some rank's model
        does not support it. Returns the model.

        overlap: whether backward passes may exchange, if gradients are final when a pass ends
        """
        wrapped = wrapped_of(model)
        agreed(self.comm, lambda: self._check_model(wrapped))
        self.hook_state(overlap, wrapped)
        register(wrapped, self)
        return model

    def _check_model(self, model):
        if self._backward is not None:
            raise argument_error("the optimizer has a model already")
        check_model(model, self._parameters, self._shards.ranks(self.comm), self._remainder)

    def add(self, bucket):
        """Returns the future of a bucket of gradients, in the backward pass."""
        averaged = self._backward.add(bucket)
        if averaged is not None:
            return averaged
        done = future_of(bucket.buffer())
        done.set_result(bucket.buffer())
        return done

    def hook_state(self, overlap=True, model=None):
        """Returns a state with which a program itself calls `register_comm_hook`, instead of `attach`. The
        checks of `attach` are then made in the first backward pass, or not at all."""
        overlap = overlap and self._shards.overlaps and self.comm.size > 1
        reason = self._why_no_overlap() if overlap else None
        if reason:
            warn(f"gradients are exchanged in step(), not during the backward pass: {reason}")
        self._backward = Backward(self, model, overlap and not reason)
        return HookHandle(self, getattr(model, "process_group", None))

    def _why_no_overlap(self):
        if self._clips:
            return "max_norm needs all gradients before the first one can be sent"
        if self._is_coupled():
            return ("weight_decay is first added to all gradients, as in torch's Adam and SGD (AdamW's "
                    "weight decay is not)")
        if self._stage is None and any(one.device.type != "cpu" for one in self._parameters):
            return "parameters are on a device"
        return None

    def _is_coupled(self):
        decays = any(group["weight_decay"] for group in self.param_groups)
        return decays and not self.defaults["decoupled_weight_decay"]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Clips all the model's gradients by the norm of their mean over the ranks, and returns that norm,
        which `MeanNorm` finds. math.inf changes nothing. Call it before `step`, and after a GradScaler's
        `unscale_`. Collective."""
        if norm_type != 2:
            raise argument_error(f"norm_type is {norm_type}: only the 2-norm of the mean is known")
        model = self._backward and self._backward.model
        carried = {id(one) for one in self._parameters}
        every = [one for group in self.param_groups for one in group["params"]]
        every = {id(one): one for one in (*every, *(model.parameters() if model else ()))}
        others = [one.grad for key, one in every.items() if key not in carried and one.grad is not None]
        squares = float(sum((one.float().norm() ** 2).cpu() for one in others))
        self._agree_on_action(("clip", squares))
        norm = self._find_norm(squares)
        if float(max_norm) == math.inf:  # a trainer only wants the norm: gradients do not change
            return norm
        factor = (float(max_norm) / (norm + 1e-6)).clamp(max=1.0)
        for one in every.values():
            if one.grad is not None:
                one.grad.mul_(factor.to(one.grad.device))
        if self._backward is not None:
            self._backward.end_clipping()
        return norm

    def _find_norm(self, squares):
        """Returns the norm of the mean gradient. squares: the squared norm of the gradients that are averaged
        already"""
        if self._norm is None:
            self._norm = MeanNorm(self.comm, self._shards)
        return self._norm.find([_gradient_or_zeros(one) for one in self._parameters], squares)

    # --- Steps -----------------------------------------------------------------------------------

    def _set_gradient(self, number, gradient, final=True):
        """Sets the gradient that the library reads. If the library reads a copy and the gradient is final,
        begins to copy it."""
        if gradient is not None and gradient.layout != torch.strided:
            raise argument_error(f"the gradient of parameter {number} is sparse, which cannot be used")
        parameter = self._shards.local(self._parameters[number])
        given, gradient = gradient, in_order_of(gradient, parameter)
        if gradient is not given:
            self._copies.append(gradient)
        if gradient is not None and self._stage is not None:
            elements = flat(gradient)
            if final:
                self._stage.send(number, elements)
            gradient = self._stage.gradient(number, elements)
        address = None if gradient is None else gradient.data_ptr()
        if address is None or address != self._addresses[number]:
            self.onebit.set_gradient(number, gradient if gradient is None else flat(gradient))
            self._addresses[number] = address
            # The gradient need not stay alive after the step: the next step sets all gradients again.
            self.onebit._gradients[number] = None

    def _ready(self, number, gradient):
        """Called in the backward pass when the gradient of this number is final."""
        if self._stage is None:
            self.onebit.ready(number)
        else:
            self._stage.send(number, flat(gradient))

    def _prepare(self, rates):
        """Prepares the gradients, rates and pointers that the library reads in a step."""
        scale = getattr(self, "grad_scale", None)  # set by a GradScaler that has not divided the gradients
        if scale is not None:
            every = [one for group in self.param_groups for one in group["params"]]
            gradients = [one.grad for one in every if one.grad is not None]
            inverse = 1.0 / float(scale)
            for one in gradients:
                one.mul_(inverse)
        if not self.defaults["decoupled_weight_decay"]:
            for one, number in zip(self._parameters, self._group_of):
                decay = float(self.param_groups[number]["weight_decay"])
                if decay and one.grad is not None:
                    one.grad.add_(one, alpha=decay)
        self._set_rates(rates)
        self._found = self._shards.gradients(self._parameters)
        for number, one in enumerate(self._found):
            self._set_gradient(number, one)

    def _check_parameters(self):
        """Checks that no parameter has changed during the backward pass in which the library's step began, and that
        none is trained that was frozen."""
        if self._backward is not None and self._backward.open and self._homes.bring():
            raise argument_error("parameters were given other memory (one.data = ...) between a backward pass and "
                                 "its step: do so after the step, or set overlap=False")
        if any(one.grad is not None for one in self._frozen):
            raise argument_error(
                "a parameter that had requires_grad=False when the optimizer was made has a gradient: make "
                "the optimizer after you change requires_grad, or before you freeze the parameter"
            )

    # --- In the model's join(): ranks with inputs send their next action to the others

    def _agree_on_action(self, action):
        """Returns the action of the ranks that have inputs.

        action: this rank's (name, argument); None: this rank has no inputs
        """
        if action is not None and not (self._backward and self._backward.is_joining()):
            return action
        everyone = [json.loads(one) for one in gather(self.comm, json.dumps(action).encode())]
        return next(one for one in everyone if one is not None)

    @torch.no_grad()
    def follow(self):
        """Makes the step of a rank without inputs, together with the others and with gradients of zero."""
        self.zero_grad(set_to_none=True)
        call, told = self._agree_on_action(None)
        while call != "step":
            if call == "clip":
                self._find_norm(told)
            else:
                self._remainder.finish_gradients()
            call, told = self._agree_on_action(None)
        if told == "skip":
            self.status = Status.SKIPPED
        else:
            self.status = self._run_step(_Rates(*told[0]), told[1], False)
        self._count_skipped()
        self._forget_state()

    def _exchange(self):
        try:
            self._check_parameters()
            rates = self._wanted_rates()
            passes, begun = 0, False
            if self._remainder is not None:
                self._agree_on_action(("finish", None))
                if not self._remainder.finish_gradients():
                    self._agree_on_action(("step", "skip"))
                    self._backward.skip_step()
                    return Status.SKIPPED
            if self._backward is not None:
                scaled = hasattr(self, "found_inf")
                unscaled = scaled and getattr(self, "grad_scale", None) is None
                passes, begun = self._backward.finish_passes(rates, scaled, unscaled)
            self._agree_on_action(("step", (rates, passes)))
        except BaseException:
            fail_step(self.onebit)
            raise
        return self._run_step(rates, passes, begun)

    def _run_step(self, rates, passes, begun):
        try:
            if not begun:
                self._prepare(rates)
                self._set_passes(passes)
                self._refresh()
            if self._stage is not None:
                self._stage.wait()
        except BaseException:
            fail_step(self.onebit)
            raise
        if self.onebit._on_device:  # the step is put on this thread's stream, and the host does not wait
            status = self.onebit.step(rates.rate)
        else:
            try:
                status = interruptible(self.comm, lambda: self.onebit.step(rates.rate))
            except Error as error:
                raise self._explain_error(error, passes) from None
        self._copy_parameters_back()
        return status

    def _refresh(self):
        """Passes the program's writes to parameters on to the library. Called before a step."""
        moved, writes = self._homes.bring(), self._writes or self._stage
        if self._homes.moved and self._stage is not None:
            self._stage.take()
        written = writes is not None and writes.refresh()
        if (written or moved) and self._parameters and self._parameters[0].element_size() < 4:
            self.onebit.take_parameters()

    def _copy_parameters_back(self):
        """Copies the parameters that the library has written to the program's parameters."""
        if self._stage is not None:
            self._stage.copy_back()
        self._homes.take_back()
        spread = self._shards.spread(self._parameters)
        if self._writes is not None:
            self._writes.stepped()
        elif spread and self._stage is not None:
            self._stage.writes.mark()

    def _set_passes(self, passes):
        """Sets the number of the step's backward passes. By this number the ranks notice if one of them has
        left out a step. 0 counts as 1, since a rank may have no inputs."""
        if max(passes, 1) - 1 != self._tag:
            self._tag = max(passes, 1) - 1
            self.onebit.set_tag(self._tag)

    def _explain_error(self, error, passes):
        if error.status not in (Status.ERROR_MISMATCH, Status.ERROR_PEER) or not passes:
            return error
        return Error(
            error.status,
            f"{error.message} (this rank made {passes} backward pass{'' if passes == 1 else 'es'} before "
            "this step. All ranks must have the same rates, weight decays, betas and frozen parameters, and "
            "must make or skip the same steps, even if a rank decides by the norm of its own gradients)",
        )

    @torch.no_grad()
    def step(self, closure=None):
        """Makes one step. Collective. Ctrl-C ends the step, and the communicator, on all ranks."""
        self._check_open()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.status = self._exchange()
        if self._remainder is not None and self.status == Status.OK:
            self._remainder.step()
        self._count_skipped()
        if self.status == Status.SKIPPED and hasattr(self, "found_inf"):
            tell_scalers(self)
        self._found, self._copies = [], []
        self._forget_state()
        if self._backward is not None:
            self._backward.end_step()
        return loss

    def _count_skipped(self):
        if self.status != Status.SKIPPED:
            return
        self._skipped += 1
        if self._skipped & (self._skipped - 1) == 0:  # warns at powers of two
            warn(f"skipped, on all ranks: a gradient of some rank is not finite (so far "
                 f"{self._skipped} steps)")

    def describe(self):
        """Returns the statistics as one line of text, and which ranks exchange which values, in which memory.
        After `close` returns the final ones."""
        if self._closed:
            return self._described
        where = "the host's memory, in copies" if self._stage is not None else "place"
        return (f"{self.onebit.describe()}; {self._shards.describe()}, in {where}, over "
                f"{self.comm.transport}")

    def _count_sent(self):
        sent = self.comm.bytes_sent - self._sent_before
        return sent if self._remainder is None else sent + self._remainder.state.report().bytes_sent

    def report(self):
        """Returns a `Report` of the steps so far. Works also after `close`. Local."""
        if self._closed:
            return self._reported
        (_, steps), passes = self.onebit.stage(), self._backward
        made = steps - self._loaded_steps
        own = [self._shards.local(one) for one in self._parameters]
        gradients = sum(one.numel() * one.element_size() for one in own) * made
        ranks = self._shards.ranks(self.comm)[1]
        dense = ring(passes.gradients if passes else gradients, ranks)
        sent = self._count_sent() - self._checkpoint_bytes
        overlapped = passes.overlapped if passes else 0
        saving = self._checkpoint_bytes + (self._remainder.state.report().checkpoint_bytes if self._remainder else 0)
        return Report(steps, self._skipped, overlapped, sent, dense, self.averaged, saving,
                      self._loaded_steps)  # fmt: skip

    def close(self):
        """Frees the state, and the communicator if the optimizer has created it. Call it on all ranks."""
        if not self._closed:
            self._reported = self.report()
            try:
                self._described = self.describe()
            except Error as reason:  # a step was begun and not ended
                self._described = f"no statistics: {reason.message}"
        self._closed = True
        if not self._consolidated:
            self._forget_state()
        if self._norm is not None:
            self._norm.close()
        self.onebit.close()
        if self._owned:
            self.comm.close()
        if self._remainder is not None:
            self._remainder.state.close()

    # --- State -----------------------------------------------------------------------------------

    def _has_state(self):
        return self.onebit is not None and not self._closed

    def _begin_loading(self, beta1):
        # Rates are set before the state is loaded: between 0/1 Adam's synchronisations they would have an
        # effect only later.
        rates = self._wanted_rates()
        self._set_rates(rates if beta1 is None else rates._replace(beta1=beta1))

    def _load(self, loaded, groups=None):
        self._refresh()
        super()._load(loaded, groups)
        self._loaded_steps = self.onebit.stage()[1]
        if self._remainder is not None:
            self._remainder.load(loaded)
        with torch.no_grad():
            self._copy_parameters_back()

    def __getstate__(self):
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled, since it shares a communicator "
            "with other ranks: take its state_dict()"
        )


def _gradient_or_zeros(parameter):
    """Returns a parameter's gradient; with FSDP that of this rank's shard. Without a gradient returns zeros,
    which take no memory."""
    parameter, gradient = (
        getattr(one, "to_local", lambda one=one: one)() for one in (parameter, parameter.grad))
    return parameter.new_zeros(1).expand(parameter.numel()) if gradient is None else gradient


def _make_class(method, name, title):
    body = {
        "__doc__": f"`onebit.{method.kind}` for torch: {title}.\n\n{_Optimizer.__doc__}",
        "__module__": __name__,
        "_kind": getattr(onebit, method.kind),
        "_method": method,
    }
    return type(name, (_Optimizer,), body)


for _one in OPTIMIZERS:
    globals()[_one.kind] = _make_class(_one, _one.kind, _one.title)
AdamW = _make_class(
    next(one for one in OPTIMIZERS if one.kind == "Adam"),
    "AdamW",
    "1-bit Adam with the weight decay of torch's AdamW by default, 0.01",
)
__all__ = [*NAMES, "AdamW"]
