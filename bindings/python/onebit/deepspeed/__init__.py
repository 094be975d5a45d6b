"""Coming from DeepSpeed: its 1-bit optimizers by its names, configurations and checkpoints.

    optimizer = onebit.deepspeed.from_config("ds_config.json", model.parameters())

DeepSpeed 0.19.6 is the last release with OneBitAdam, OneBitLamb and ZeroOneAdam; these go on here.
docs/migrate-from-deepspeed.md has programs before and after. DeepSpeed itself is imported by
`initialize` only.
"""

from onebit.deepspeed.config import Settings, read_config
from onebit.deepspeed.engine import from_config, initialize
from onebit.deepspeed.optim import OneBitAdam, OneBitLamb, ZeroOneAdam

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


def __getattr__(name):
    """What needs numpy is imported when it is asked for."""
    if name == "save_residuals":
        from onebit.deepspeed.state import save_residuals as found
    elif name == "convert_checkpoint":
        from onebit.deepspeed.convert import convert_checkpoint as found
    else:
        raise AttributeError(name)
    return found
