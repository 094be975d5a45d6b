"""DeepSpeed's 1-bit optimizers by its names, as torch.optim.Optimizer."""

import contextlib

import torch

import onebit
from onebit import part
from onebit._native import OPTIMIZERS, Profile, argument_error, enum_value
from onebit.deepspeed import convert, state
from onebit.deepspeed.config import LAMB, SCHEDULES
from onebit.torch import optim

_KINDS = {row.kind: row for row in OPTIMIZERS}


class _Optimizer(optim._Optimizer):
    """params: parameters, or groups of parameters; a group may have its own lr and weight_decay, and, as in
    DeepSpeed, non_freeze: its gradients are averaged in full precision
    comm: a `Communicator`; None: a new one of all processes over torch.distributed
    lr, betas, eps, weight_decay: as in DeepSpeed
    profile: "default": scales of 2048 elements, bias correction, no padding; "deepspeed": its
        arithmetic, padding, scales and count of steps (docs/migrate-from-deepspeed.md)
    engine: whether the optimizer is for `deepspeed.initialize(optimizer=...)`: it makes no step before
        `attach(engine)`
    options: other options of DeepSpeed's optimizer, and of `onebit.Optimizer`, by name

    The first access of `onebit`, also by the first step, creates the `onebit.Optimizer`, collectively. A
    wrapper of DeepSpeed's may replace the model's parameters before that. The rest is as in
    `onebit.torch`'s optimizers.
    """

    _names = {}  # options that DeepSpeed has renamed: its name, and the library's

    def __init__(self, params, comm=None, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
                 bias_correction=True, profile="default", engine=False, **options):  # fmt: skip
        self._core = self._remainder = self._backward = self._norm = self.status = None
        self._comm, self._owned, self._waits = comm, comm is None, engine
        profile = enum_value(Profile, profile, "profile")
        self._named = {**options, "betas": betas, "eps": eps}
        self._options = {"beta1": betas[0], "beta2": betas[1], "epsilon": eps, "profile": profile}
        if profile == Profile.PROFILE_DEFAULT and not bias_correction:
            self._options["no_bias_correction"] = True
        for name, value in options.items():
            self._options[self._names.get(name, name)] = value
        self._count_as_here(profile)
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay,
                    "decoupled_weight_decay": True, "uncompressed": False}  # fmt: skip
        torch.optim.Optimizer.__init__(self, params, defaults)
        self._first_rates()  # raises errors for wrong rates
        self._complete = True

    def _count_as_here(self, profile):
        """Converts freeze_step: DeepSpeed counts a first call that makes no step, and has no automatic
        freeze."""
        if "freeze_step" not in self._method.fields:
            return
        given = self._options.get("freeze_step")
        if given is not None and given < 1:
            raise argument_error(f"freeze_step is {given}, not positive")
        if profile == Profile.PROFILE_DEEPSPEED:
            self._options["freeze_step"] = given or 100000
        elif given is not None:
            self._options["freeze_step"] = max(given - 1, 1)

    def _trained_parameters(self):
        """Returns (number, parameter) of the trained parameters, with DeepSpeed's numbers."""
        every = [one for group in self.param_groups for one in group["params"]]
        return [(number, one) for number, one in enumerate(every) if one.requires_grad]

    @property
    def comm(self):
        if self._comm is None:
            self._comm = onebit.Communicator.torch()
        return self._comm

    @property
    def onebit(self):
        """Returns the `onebit.Optimizer`, for statistics and checkpoints in files."""
        if self._core is None:
            try:
                self._make(self._options)
            except Exception:
                self._kind._refuse(self.comm)
                raise
        return self._core

    @onebit.setter
    def onebit(self, made):
        self._core = made

    def add_param_group(self, group):
        if hasattr(self, "_complete"):
            raise argument_error("parameters cannot be added once the optimizer is made")
        torch.optim.Optimizer.add_param_group(self, group)
        self.param_groups[-1]["uncompressed"] = bool(group.get("non_freeze"))

    def attach(self, engine):
        """Tells DeepSpeed's engine not to average gradients: afterwards `engine.step()` exchanges them,
        compressed. Raises `Error` for ZeRO stages from 1 on, pipelines and experts."""
        stage = int(engine.zero_optimization_stage())
        if stage:
            raise argument_error(f"the engine has ZeRO stage {stage}: 1-bit optimizers are for stage 0")
        if getattr(engine, "has_moe_layers", False) or getattr(engine, "pipeline_parallelism", 0):
            raise argument_error("the engine has experts or a pipeline: gradients are not all ranks' alike")
        engine.enable_backward_allreduce = False
        self._waits = False

    def step(self, closure=None):
        """Makes a step. Collective."""
        if self._waits:  # DeepSpeed's fp16 and bf16 wrappers make a first call with gradients of zero
            loss = closure() if closure is not None else None
            for _, one in self._trained_parameters():
                if one.grad is not None and one.grad.count_nonzero():
                    raise argument_error("step() before attach(engine): DeepSpeed has averaged the gradients; "
                                         "call attach(engine) first")  # fmt: skip
            return loss
        self.onebit  # noqa: B018: creates the library's optimizer
        return super().step(closure)

    @property
    def loss_scale(self):
        """Returns the factor of the next loss, if the configuration's fp16 requires one."""
        return self.onebit.loss_scale

    def _has_state(self):
        return self._core is not None and not self._closed

    def load_deepspeed(self, directory, model=None, tag=None):
        """Continues from a checkpoint that engine.save_checkpoint of DeepSpeed up to 0.19.6 has written.
        Uses the residuals of `save_residuals`, if the checkpoint has any. Collective.

        model: the model whose weights and buffers are also loaded from the checkpoint; that of an engine is
            engine.module. None: the model has these weights already
        tag: None: the latest

        Groups and their parameters must be in the order of the checkpoint. Learning rates become those of
        the checkpoint. Raises `Error` if the checkpoint is of another optimizer or model. Warns of state
        that is not converted.
        """
        core = self.onebit
        try:
            parts = self._parts_from(directory, model, tag)
        except Exception:
            with contextlib.suppress(onebit.Error):
                core.load([])  # fails on all ranks, so that no rank waits
            raise
        if self._stage is not None:
            self._stage.refresh()
        core.load(parts)
        with torch.no_grad():
            self._copy_parameters_back()
        self._forget_state()

    def _parts_from(self, directory, model, tag):
        folder, checkpoint = state.read_folder(directory, tag)
        if model is not None:
            model.load_state_dict(checkpoint["module"])
        layout, other = part.layout_of(self.onebit.save())
        if other:
            raise argument_error("exchange and shards are not options of DeepSpeed's")
        found = state.read_state(folder, checkpoint, self._trained_parameters())
        saved = checkpoint["optimizer"].get("optimizer_state_dict", checkpoint["optimizer"])
        parts = convert.parts_of(found, layout, self._named)
        for group, one in zip(self.param_groups, saved["param_groups"]):
            group["lr"] = one["lr"]
        return parts


class OneBitAdam(_Optimizer):
    __doc__ = f"1-bit Adam: freeze_step.\n\n    {_Optimizer.__doc__}"
    _kind, _method = onebit.Adam, _KINDS["Adam"]


class OneBitLamb(_Optimizer):
    __doc__ = (
        "1-bit LAMB: freeze_step, max_coeff, min_coeff, coeff_beta, factor_max, factor_min, "
        f"factor_threshold.\n\n    {_Optimizer.__doc__}"
    )
    _kind, _method, _names = onebit.Lamb, _KINDS["Lamb"], LAMB


class ZeroOneAdam(_Optimizer):
    __doc__ = (
        "0/1 Adam: var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper.\n\n"
        f"    {_Optimizer.__doc__}"
    )
    _kind, _method, _names = onebit.ZeroOneAdam, _KINDS["ZeroOneAdam"], SCHEDULES
