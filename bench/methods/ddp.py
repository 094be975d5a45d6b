"""DistributedDataParallel as it is, and with torch's hooks that halve what is sent."""

import functools

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel


def make(hook, model, optimizer, short):
    model = DistributedDataParallel(model)
    if hook is not None:
        model.register_comm_hook(None, hook)
    return model, optimizer, None


METHODS = {
    "DDP, float32": functools.partial(make, None),
    "DDP, fp16 hook": functools.partial(make, default_hooks.fp16_compress_hook),
    "DDP, bf16 hook": functools.partial(make, default_hooks.bf16_compress_hook),
}
