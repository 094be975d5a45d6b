"""torch's quantization hook: 8 bits an element, gathered by all ranks."""

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks
from torch.nn.parallel import DistributedDataParallel


def make(model, optimizer, short):
    model = DistributedDataParallel(model)
    model.register_comm_hook(dist.group.WORLD, quantization_hooks.quantization_pertensor_hook)
    return model, optimizer, None


METHODS = {"torch's quantization hook": make}
