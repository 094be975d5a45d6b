"""For users of DeepSpeed: its 1-bit optimizers with its names, configurations and checkpoints.

    optimizer = onebit.deepspeed.from_config("ds_config.json", model.parameters())

DeepSpeed 0.19.6 is the last release with OneBitAdam, OneBitLamb and ZeroOneAdam. This package
provides them further. docs/migrate-from-deepspeed.md shows programs before and after the change.
Only `initialize` imports DeepSpeed itself.
"""


import torch

from onebit._native import OnebitWarning, warn
from onebit.deepspeed import optim
from onebit.deepspeed.config import Settings, read_config
from onebit.deepspeed.convert import convert_checkpoint
from onebit.deepspeed.optim import OneBitAdam, OneBitLamb, ZeroOneAdam
from onebit.deepspeed.state import save_residuals

__all__ = [
    "OneBitAdam",
    "OneBitLamb",
    "Settings",
    "ZeroOneAdam",
    "convert_checkpoint",
    "from_config",
    "initialize",
    "read_config",
    "save_residuals",
]


def _world(comm):
    if comm is not None:
        return comm.size
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if ready else None


def _check_dtype(wanted, optimizer):
    """Checks that the model has the type of the configuration. The caller must have converted the
    model."""
    for _, one in optimizer._trained_parameters():
        if wanted and str(one.dtype) != f"torch.{wanted}":
            section = {"float16": "fp16", "bfloat16": "bf16"}[wanted]
            words = f"{section}.enabled is true, but a parameter has type {one.dtype}"
            warn(f"{words}: convert the model")
            return


def from_config(config, model_parameters, comm=None, profile="default", engine=False, **options):
    """Returns the optimizer that a DeepSpeed configuration names: `OneBitAdam`, `OneBitLamb` or
    `ZeroOneAdam`.

    config: the path of a JSON file, or a dict
    model_parameters: as in torch.optim
    comm: a `Communicator`; None: a new one of all processes over torch.distributed
    profile: "default", or "deepspeed" for its arithmetic, such as for a training that DeepSpeed has
        begun
    engine: whether DeepSpeed's engine reads the rest of the configuration, as in `initialize`
    options: override the configuration

    Warns (`OnebitWarning`) of each key without effect, by its full path. Raises `Error` for
    settings that no 1-bit optimizer supports.
    """
    settings = read_config(config, _world(comm), profile, engine)
    for path, reason in settings.without_effect:
        words = f"{path} has no effect" + (f": {reason}" if reason else "")
        warn(words)
    arguments = {**settings.arguments, **options}
    kind = getattr(optim, settings.kind)
    made = kind(model_parameters, comm, profile=profile, engine=engine, **arguments)
    if not engine:
        _check_dtype(settings.dtype, made)
    return made


def initialize(config, model, model_parameters=None, comm=None, profile="default", **arguments):
    """Returns (engine, optimizer, dataloader, scheduler), as deepspeed.initialize does. It works
    with the same configuration and with a DeepSpeed release that has no 1-bit optimizers.

    The engine accumulates, scales and clips gradients, but does not average them: the optimizer
        exchanges them. The engine's checkpoints have only this rank's part of the optimizer's
        state; `optimizer.onebit.save_files`, called on all ranks, saves the whole state.

    arguments: other arguments of deepspeed.initialize. The rest is as in `from_config`
    """
    import deepspeed

    given = model_parameters
    if given is None:
        given = [one for one in model.parameters() if one.requires_grad]
    optimizer = from_config(config, given, comm, profile, engine=True)
    rest = read_config(config, engine=True).rest
    engine, _, loader, scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, config=rest, **arguments
    )
    optimizer.attach(engine)
    return engine, optimizer, loader, scheduler
