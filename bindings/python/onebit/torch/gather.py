"""What ranks tell each other besides gradients: whether all are well, and bytes."""

import torch

from onebit._native import Error
from onebit.plan import Plan

# Three bytes of a part travel as a float32, which has every whole number up to 2^24: a message as
# long as this one of them takes 4 MiB from each rank.
_PIECE = 2**20
# Tensors that are made here have this type and device: a program may have set other defaults.
FLOATS = {"dtype": torch.float32, "device": "cpu"}
_BYTES = {"dtype": torch.uint8, "device": "cpu"}


def _place(comm):
    """Options of a plan whose messages comm can move: NCCL's are in memory of a device."""
    return {"device": "cuda"} if comm.transport == "nccl" else {}


def agree(comm, reason):
    """Raises reason, unless it is None; where another rank has one, `Error` (ERROR_PEER).
    Collective."""
    try:
        # Refused by the library, which tells all ranks.
        Plan(comm, 1, bits=1 if reason is None else 3, **_place(comm)).close()
    except Error:
        if reason is None:
            raise
    if reason is not None:
        raise reason


def _gather(comm, values):
    """The float32 of all ranks, which have as many."""
    place = _place(comm)
    everyone = torch.empty(comm.size * values.numel(), **{**FLOATS, **place})
    with Plan(comm, values.numel(), operation="allgather", wire="dense", **place) as plan:
        plan.allgather(values.to(everyone.device), everyone)
        if place:
            plan.synchronize()
    return everyone.cpu().view(comm.size, -1)


def gather(comm, part):
    """The parts of all ranks, each some bytes, in the order of ranks. Collective."""
    if comm.size == 1:
        return [part]
    length = torch.tensor([len(part) // _PIECE, len(part) % _PIECE], **FLOATS)
    lengths = [int(high) * _PIECE + int(low) for high, low in _gather(comm, length).tolist()]
    threes = torch.zeros(-(-max(lengths) // 3), 3, **_BYTES)
    if part:
        threes.view(-1)[: len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
    everyone = torch.empty(comm.size, *threes.shape, **_BYTES)
    for first in range(0, len(threes), _PIECE):
        low, middle, high = threes[first : first + _PIECE].to(torch.int32).unbind(1)
        arrived = _gather(comm, (low | middle << 8 | high << 16).float()).to(torch.int32)
        for place in range(3):
            everyone[:, first : first + _PIECE, place] = arrived >> 8 * place & 255
    return [
        everyone[rank].view(-1)[:count].numpy().tobytes() for rank, count in enumerate(lengths)
    ]
