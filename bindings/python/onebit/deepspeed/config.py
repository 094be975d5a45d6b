"""Reads DeepSpeed's JSON configuration, and finds the keys that have no effect with onebit."""

import json
import math
import os
from typing import Any, NamedTuple

from onebit._native import argument_error

_ADAM = {"lr", "betas", "eps", "weight_decay"}
# The options of 1-bit LAMB and 0/1 Adam: DeepSpeed's names, and the library's names.
LAMB = {
    "max_coeff": "max_coefficient",
    "min_coeff": "min_coefficient",
    "coeff_beta": "coefficient_beta",
    "factor_max": "max_factor",
    "factor_min": "min_factor",
    "factor_threshold": "factor_change",
}
SCHEDULES = {
    "var_freeze_step": "variance_freeze_step",
    "var_update_scaler": "variance_update_scaler",
    "local_step_scaler": "local_step_scaler",
    "local_step_clipper": "local_step_clipper",
}

# The keys of optimizer.params that the classes of optim.py take as arguments.
_PARAMETERS = {
    "OneBitAdam": _ADAM | {"freeze_step"},
    "OneBitLamb": _ADAM | {"freeze_step", *LAMB},
    "ZeroOneAdam": _ADAM | {*SCHEDULES},
}

# The type of a key's value. The values of all other keys are numbers.
_BOOLEANS = {"fp16.enabled", "bf16.enabled"} | {
    f"optimizer.params.{name}" for name in ("amsgrad", "bias_correction")
}
_WHOLE = {
    "zero_optimization.stage", "train_batch_size", "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps", "fp16.initial_scale_power", "fp16.loss_scale_window",
} | {f"optimizer.params.{name}" for name in ("freeze_step", *SCHEDULES)}  # fmt: skip

# Additional reasons why a key has no effect.
_REASONS = {
    "cuda_aware": "the communicator chooses the transport",
    "comm_backend_name": "the communicator chooses the transport",
    "bias_correction": "as in DeepSpeed, which ignores it",
    "max_grad_norm": "gradient_clipping is the key that clips",
    "scheduler": "a scheduler of torch.optim.lr_scheduler steps the rate",
    "communication_data_type": "compressed steps send bits, others float32",
    "hysteresis": "the loss scale falls at once",
    "prescale_gradients": "each rank passes its own gradients, and the library divides the sum",
    "gradient_predivide_factor": "each rank passes its own gradients, and the library divides the sum",
}


class Settings(NamedTuple):
    """The settings that were read from a configuration.

    kind: the class, "OneBitAdam", "OneBitLamb" or "ZeroOneAdam"
    arguments: arguments of the class by DeepSpeed's names, and options of `onebit.Optimizer`
    without_effect: the full path of each key without effect, and the reason
    rest: the configuration without its section `optimizer`
    dtype: "float16", "bfloat16", or None: not given
    """

    kind: str
    arguments: Any
    without_effect: Any
    rest: Any
    dtype: Any


def _load_config(config):
    if isinstance(config, dict):
        return config
    with open(os.fspath(config), encoding="utf-8") as file:
        config = json.load(file)
    if not isinstance(config, dict):
        raise argument_error(f"the configuration is a {type(config).__name__}, not an object")
    return config


def _check_sections(config):
    for name in ("optimizer", "fp16", "bf16", "zero_optimization"):
        if not isinstance(config.get(name, {}), (dict, type(None))):
            raise argument_error(f"{name} is {config[name]!r}, not an object")
    parameters = (config.get("optimizer") or {}).get("params")
    if not isinstance(parameters, (dict, type(None))):
        raise argument_error(f"optimizer.params is {parameters!r}, not an object")


def _is_number(value):
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return plain and math.isfinite(value)


def _convert_value(path, value):
    """Returns the value, converted to the type that its key requires."""
    if path in _BOOLEANS:
        wanted, good = "true or false", value in (True, False) and not isinstance(value, float)
    elif path in _WHOLE:
        wanted = "a whole number of at least 0"
        good = _is_number(value) and value >= 0 and value == int(value)
        value = int(value) if good else value
    elif path.endswith(".betas"):
        wanted = "two numbers"
        good = isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_is_number, value))
    else:
        wanted, good = "a number", _is_number(value)
    if good:
        return value
    why = ": only Hugging Face's Trainer fills in this value; give a value" if value == "auto" else ""
    raise argument_error(f"{path} is {value!r}, not {wanted}{why}")


def _optimizer_kind(optimizer):
    name = str(optimizer.get("type"))
    for kind in _PARAMETERS:
        if kind.lower() == name.lower():
            return kind
    raise argument_error(f"optimizer.type is {name!r}, not one of {', '.join(_PARAMETERS)}")


def _list_leaves(path, value):
    """Yields the full paths of all values that are not dictionaries."""
    if not isinstance(value, dict):
        yield path
        return
    for key, inner in value.items():
        yield from _list_leaves(f"{path}.{key}", inner)


class _Reader:
    """Reads keys of a configuration. Keys that it has not read have no effect."""

    def __init__(self, config, world, default_profile):
        self.config, self.world = config, world
        self.honours_bias_correction = default_profile
        self.used = set()
        self.arguments = {}

    def take(self, *path):
        """Returns the value at a path, converted to the type of its key, or None."""
        value, name = self.config, ".".join(path)
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if value is None:
            return None
        self.used.add(name)
        return _convert_value(name, value)

    def optimizer(self, kind):
        self.used.add("optimizer.type")
        parameters = self.config["optimizer"].get("params") or {}
        if self.take("optimizer", "params", "amsgrad"):
            raise argument_error("optimizer.params.amsgrad is true: no 1-bit optimizer has that variant")
        names = _PARAMETERS[kind] | ({"bias_correction"} if self.honours_bias_correction else set())
        for name in sorted(names & set(parameters)):
            value = self.take("optimizer", "params", name)
            if value is not None:
                self.arguments[name] = value

    def accumulation(self):
        """Returns the number of backward passes over which a gradient is summed."""
        steps = self.take("gradient_accumulation_steps")
        batch, micro = self.take("train_batch_size"), self.take("train_micro_batch_size_per_gpu")
        if batch and micro and self.world:
            found = batch // (micro * self.world)
            if batch != (steps or found) * micro * self.world or not found:
                raise argument_error(
                    f"train_batch_size is {batch}, not train_micro_batch_size_per_gpu, {micro}, "
                    f"times gradient_accumulation_steps, {steps or found}, times "
                    f"{self.world} ranks"
                )
            steps = found
        return steps or 1

    def precision(self):
        half, brain = self.take("fp16", "enabled"), self.take("bf16", "enabled")
        if half and brain:
            raise argument_error("fp16.enabled and bf16.enabled are both true")
        if not half:
            return "bfloat16" if brain else None
        fixed = self.take("fp16", "loss_scale") or 0
        if fixed:
            self.arguments["gradient_factor"] = 1.0 / fixed
            return "float16"
        power = self.take("fp16", "initial_scale_power")
        window = self.take("fp16", "loss_scale_window")
        least = self.take("fp16", "min_loss_scale")
        self.arguments["initial_loss_scale"] = 2.0 ** (16 if power is None else power)
        self.arguments["loss_scale_interval"] = window or 1000
        self.arguments["min_loss_scale"] = float(least or 1)
        return "float16"

    def clipping(self):
        """Sets clip_norm. DeepSpeed's default is to clip at 1."""
        norm = self.take("gradient_clipping")
        if norm != 0:
            self.arguments["clip_norm"] = 1.0 if norm is None else float(norm)

    def left_over(self):
        for key, value in self.config.items():
            for path in _list_leaves(key, value):
                if path not in self.used:
                    names = path.split(".")
                    reason = _REASONS.get(names[-1]) or _REASONS.get(names[0])
                    yield path, reason


def read_config(config, world=None, profile="default", engine=False):
    """Returns the `Settings` of a configuration: the path of a JSON file, or a dict.

    world: the number of ranks; train_batch_size and it determine the steps of an accumulation
    profile: as in `from_config`
    engine: whether only the section `optimizer` is read, because DeepSpeed's engine reads the others

    Raises `Error` (ERROR_ARGUMENT), with the key and its value, for settings that no 1-bit optimizer
    supports (ZeRO, amsgrad), for contradictions, and for a value whose type is wrong for its key, such
    as "auto".
    """
    config = _load_config(config)
    _check_sections(config)
    stage = _Reader(config, world, False).take("zero_optimization", "stage")
    if stage:
        raise argument_error(f"zero_optimization.stage is {stage}: 1-bit optimizers are for stage 0")
    optimizer = config.get("optimizer") or {}
    kind = _optimizer_kind(optimizer)
    rest = {key: value for key, value in config.items() if key != "optimizer"}
    looked_at = {"optimizer": optimizer} if engine else config
    reader = _Reader(looked_at, world, str(profile) == "default")
    reader.optimizer(kind)
    reader.take("zero_optimization", "stage")
    dtype = reader.precision()
    if not engine:
        reader.clipping()
    steps = reader.accumulation()
    if steps != 1:
        factor = reader.arguments.get("gradient_factor", 1.0)
        reader.arguments["gradient_factor"] = factor / steps
    return Settings(kind, reader.arguments, list(reader.left_over()), rest, dtype)
