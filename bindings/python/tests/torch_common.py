"""What the files of scenarios over torch.distributed have in common."""

import onebit
import torch
import torch.distributed as dist


def alike(tensor, group=None):
    """Whether every rank has the same bits."""
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, tensor, group=group)
    return all(torch.equal(one, tensor) for one in everyone)


def gradient(rank, step, count=5000):
    return torch.randn(count, generator=torch.Generator().manual_seed(1000 * rank + step))


def raises(status, call, words=""):
    try:
        call()
    except onebit.Error as error:
        assert error.status is status and words in error.message, error
        return
    raise AssertionError(f"{call} did not fail")


def expect(words, call, kind=(onebit.Error, RuntimeError)):
    try:
        call()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)
