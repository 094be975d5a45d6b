"""onebit for PyTorch: a communication hook for DistributedDataParallel, and optimizers."""

from onebit.methods import NAMES
from onebit.torch.hook import HookState, allreduce_hook
from onebit.torch.optim import *  # noqa: F403: the optimizers

__all__ = ["HookState", "allreduce_hook", *NAMES]
