"""DistributedDataParallel without a hook, and with torch's hooks: half precision, and PowerSGD
after 10 steps in float32."""

import functools

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel


def make_ddp(hook, model, optimizer, short):
    model = DistributedDataParallel(model)
    if hook is not None:
        model.register_comm_hook(None, hook)
    return model, optimizer, None


def make_power_sgd(rank, model, optimizer, short):
    # The hook makes several exchanges for each bucket, and gloo runs those of several buckets in
    # any order. With one bucket they can not be mixed up.
    model = DistributedDataParallel(model, bucket_cap_mb=1 << 20)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=short(10)
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model, optimizer, None


METHODS = {
    "DDP, float32": functools.partial(make_ddp, None),
    "DDP, fp16 hook": functools.partial(make_ddp, default_hooks.fp16_compress_hook),
    "DDP, bf16 hook": functools.partial(make_ddp, default_hooks.bf16_compress_hook),
    "PowerSGD, rank 2": functools.partial(make_power_sgd, 2),
    "PowerSGD, rank 8": functools.partial(make_power_sgd, 8),
}
