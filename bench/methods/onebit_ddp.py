"""onebit beside DistributedDataParallel: compress, whose AdamW is Efficient-Adam in one bit after 40
steps in 8 bits, and the hook, which sends gradients in 8 bits to torch's own AdamW."""

from torch.nn.parallel import DistributedDataParallel

import onebit.torch


def make_compress(model, optimizer, short):
    model = DistributedDataParallel(model)
    optimizer = onebit.torch.compress(model, optimizer, warmup_steps=short(40))
    return model, optimizer, optimizer.close


def make_hook(model, optimizer, short):
    model = DistributedDataParallel(model)
    state = onebit.torch.HookState(optimizer=optimizer)
    model.register_comm_hook(state, onebit.torch.allreduce_hook)
    return model, optimizer, state.close


METHODS = {"onebit compress, 1 bit": make_compress, "onebit hook, 8 bits": make_hook}
