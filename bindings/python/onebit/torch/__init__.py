"""onebit for PyTorch: optimizers that exchange in DistributedDataParallel's hook, and a hook that
averages gradients for a program's own optimizer."""

from onebit._native import NAMES
from onebit.torch.backward import optimizer_hook
from onebit.torch.compress import auto, compress
from onebit.torch.diloco import DiLoCo
from onebit.torch.hook import HookState, allreduce_hook
from onebit.torch.optim import *  # noqa: F403: the optimizers
from onebit.torch.report import Report
from onebit.torch.trainers import CALLBACKS

__all__ = [
    "DiLoCo", "HookState", "Report", "allreduce_hook", "auto", "compress", "optimizer_hook", "AdamW",
    *NAMES,
]  # fmt: skip


def __getattr__(name):
    """Loads the callbacks of trainers at their first use."""
    if name not in CALLBACKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = CALLBACKS[name]()
    return globals()[name]
