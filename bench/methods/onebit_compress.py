"""onebit.torch.compress: of AdamW Efficient-Adam in one bit, after 40 steps in 8 bits."""

from torch.nn.parallel import DistributedDataParallel

import onebit.torch


def make(model, optimizer, short):
    model = DistributedDataParallel(model)
    optimizer = onebit.torch.compress(model, optimizer, warmup_steps=short(40))
    return model, optimizer, optimizer.close


METHODS = {"onebit compress, 1 bit": make}
