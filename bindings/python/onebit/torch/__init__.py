"""onebit for PyTorch: a communication hook for DistributedDataParallel, and optimizers."""

from onebit.torch.hook import HookState, allreduce_hook
from onebit.torch.optim import Adam, EfficientAdam, Lamb, Lion, Momentum, ZeroOneAdam

__all__ = [
    "Adam",
    "EfficientAdam",
    "HookState",
    "Lamb",
    "Lion",
    "Momentum",
    "ZeroOneAdam",
    "allreduce_hook",
]
