"""onebit's hook for DistributedDataParallel: gradients in 8 bits, torch's own AdamW."""

from torch.nn.parallel import DistributedDataParallel

import onebit.torch


def make(model, optimizer, short):
    model = DistributedDataParallel(model)
    state = onebit.torch.HookState(optimizer=optimizer)
    model.register_comm_hook(state, onebit.torch.allreduce_hook)
    return model, optimizer, state.close


METHODS = {"onebit hook, 8 bits": make}
