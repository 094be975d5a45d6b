"""The report of saved bytes and time: `print(optimizer.report())`."""

from typing import Any, NamedTuple


class Report(NamedTuple):
    """The steps of a training, and the bytes that this rank has sent.

    steps: the number of steps, including those of a loaded state; all other fields are of this process
    skipped: the number of other steps, whose gradients were not finite
    overlapped: steps whose exchange began in the backward pass
    bytes_sent: all bytes but those of checkpoints; for gradients that torch averages, the bytes of a
        ring
    dense_bytes: the bytes of a ring that averages the same gradients in their own type
    averaged: by name of a parameter, the reason why it is not exchanged in one bit
    checkpoint_bytes: the bytes that this rank has sent to save and load states
    loaded_steps: those of the steps that a loaded state has made
    """

    steps: int
    skipped: int
    overlapped: int
    bytes_sent: int
    dense_bytes: int
    averaged: Any
    checkpoint_bytes: int = 0
    loaded_steps: int = 0

    def __str__(self):
        sent, dense = self.bytes_sent, self.dense_bytes
        less = "no less traffic: " if sent and dense else ""
        if sent and dense > sent:
            less = f"{dense / sent:.1f}x less traffic: "
        loaded = f" ({self.loaded_steps} of them loaded); since loading" if self.loaded_steps else ""
        text = (
            f"{self.steps} steps{loaded}, {self.skipped} skipped, {self.overlapped} with an exchange in the "
            f"backward pass; {less}{_size(sent)} sent by this rank instead of {_size(dense)}"
        )
        if self.checkpoint_bytes:
            text += f"; {_size(self.checkpoint_bytes)} sent for checkpoints"
        return "; ".join([text, *(f"not exchanged in one bit: {one}" for one in summaries(self.averaged))])


def add_reports(reports):
    """Returns the report of several models that one optimizer steps."""
    sums = (sum(getattr(one, name) for one in reports) for name in ("skipped", "bytes_sent", "dense_bytes"))
    skipped, sent, dense = sums
    averaged = {name: why for one in reports for name, why in one.averaged.items()}
    return Report(max(one.steps for one in reports), skipped, max(one.overlapped for one in reports), sent, dense,
                  averaged, sum(one.checkpoint_bytes for one in reports),
                  max(one.loaded_steps for one in reports))  # fmt: skip


def _size(count):
    """Returns a number of bytes in the largest unit of which there is at least one."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def ring(count, ranks):
    """Returns the bytes that a rank sends for a ring all-reduce of `count` bytes."""
    return 2 * (ranks - 1) * count // ranks


def summaries(reasons):
    """Yields a text for each reason, with at most four of its names. reasons: by name, the reason"""
    by_reason = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        more = f" and {len(names) - 4} others" if len(names) > 4 else ""
        yield f"{', '.join(names[:4])}{more} ({reason})"
