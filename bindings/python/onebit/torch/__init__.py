"""onebit for PyTorch: a communication hook for DistributedDataParallel, and optimizers."""

from onebit.torch.hook import HookState, allreduce_hook
from onebit.torch.optim import Adam, Lamb, Momentum, ZeroOneAdam

__all__ = ["Adam", "HookState", "Lamb", "Momentum", "ZeroOneAdam", "allreduce_hook"]
