"""Writes a checkpoint for onebit's 1-bit Adam from the state of another trainer: the parameters,
momentum and variance of each tensor, and the number of steps. onebit_optimizer_load_files reads the
checkpoint, on any number of ranks. docs/migrate-from-deepspeed.md says where DeepSpeed stores this
state. docs/checkpoints.md defines the format, which bindings/python/onebit/part.py of the checkout
writes. Needs numpy, but not the library."""

import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "bindings" / "python"))

from onebit.part import (  # noqa: E402
    ELEMENTS,
    MOMENTUM,
    PADDING,
    PARAMETERS,
    VARIANCE,
    Head,
    Layout,
    make_part,
    manifest,
)


def arrays_of(tensors, padding):
    """Joins the arrays of tensors, which are a list of (parameter, momentum, variance) in the
    optimizer's order."""
    count = sum(np.size(one[0]) for one in tensors)
    for what, values in zip((PARAMETERS, MOMENTUM, VARIANCE), zip(*tensors)):
        flat = np.concatenate([np.ravel(one) for one in values])
        if len(flat) != count:
            raise ValueError(f"tensors of {count} parameters have {len(flat)} moments")
        if not np.isfinite(flat).all():
            raise ValueError(f"section {what} holds what is not finite")
        yield what, ELEMENTS, 0, flat
        if padding and what != PARAMETERS:
            yield what, PADDING, 0, np.zeros(padding)


def write_checkpoint(directory, tensors, steps, profile="deepspeed"):
    """Writes the checkpoint to a directory, which is created if it does not exist."""
    counts = [np.size(tensor[0]) for tensor in tensors]
    deepspeed = {"default": False, "deepspeed": True}[profile]
    padding = sum(-n % 8 for n in counts) if deepspeed else 0  # the padding if one rank saves
    layout = Layout("adam", deepspeed, counts, [False] * len(counts))
    head = Head(1, 0, False, padding, steps, 0, (steps, 0, 0), ())
    part = make_part(layout, head, 0, arrays_of(tensors, padding))
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "part-1-0").write_bytes(part)
    (directory / "manifest").write_bytes(manifest("adam", steps, [part]).encode())
