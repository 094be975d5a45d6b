"""torch's PowerSGD hook, after 10 steps in float32."""

import functools

from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel


def make(rank, model, optimizer, short):
    # The hook makes several exchanges a bucket, over gloo in any order of buckets: of one they have one.
    model = DistributedDataParallel(model, bucket_cap_mb=1 << 20)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=short(10)
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model, optimizer, None


METHODS = {f"PowerSGD, rank {rank}": functools.partial(make, rank) for rank in (2, 8)}
