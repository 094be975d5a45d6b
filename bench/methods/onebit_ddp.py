"""onebit with DistributedDataParallel, in three ways. compress: its AdamW is Efficient-Adam, in one
bit after 40 steps in 8 bits. hook: it sends gradients in 8 bits to torch's own AdamW. auto: it times
the network and chooses one of these or dense sums, or local steps if they are allowed."""

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


def make_auto(model, optimizer, _):
    model = DistributedDataParallel(model)
    optimizer = onebit.torch.auto(model, optimizer)
    return model, optimizer, optimizer.close


def make_auto_local_steps(model, optimizer, _):
    model = DistributedDataParallel(model)
    optimizer = onebit.torch.auto(model, optimizer, local_steps=True)
    return model, optimizer, optimizer.close


METHODS = {"onebit compress, 1 bit": make_compress, "onebit hook, 8 bits": make_hook,
           "onebit auto": make_auto, "onebit auto, local_steps=True": make_auto_local_steps}  # fmt: skip
WALL = {"onebit auto", "onebit auto, local_steps=True"}
