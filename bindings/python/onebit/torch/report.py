"""The report of bytes and time saved: `print(optimizer.report())`."""

from typing import Any, NamedTuple


class Report(NamedTuple):
    """steps: that this rank has made, with those of a state that was loaded; skipped: others, of
        gradients that were not finite
    overlapped: steps whose exchange began in the backward pass
    bytes_sent: by this rank; what torch averages is counted for a ring
    dense_bytes: what a ring would have sent of the same gradients in their own type
    averaged: by name, parameters that are not exchanged in one bit, and why
    """

    steps: int
    skipped: int
    overlapped: int
    bytes_sent: int
    dense_bytes: int
    averaged: Any

    def __str__(self):
        sent, dense = self.bytes_sent, self.dense_bytes
        less = "no less traffic yet: " if sent else ""
        if sent and dense > sent:
            less = f"{dense / sent:.1f}x less traffic: "
        text = (
            f"{self.steps} steps, {self.skipped} skipped, {self.overlapped} with an exchange in the "
            f"backward pass; {less}{sent / 1e6:.3g} MB sent instead of {dense / 1e6:.3g} MB"
        )
        return "; ".join([text, *summaries(self.averaged)])


def ring(count, ranks):
    """Returns the bytes that a rank sends for a ring all-reduce of `count` bytes."""
    return 2 * (ranks - 1) * count // ranks


def summaries(reasons, named=4):
    """Returns a text for each reason of pairs (name, reason), with at most `named` of its names."""
    by_reason = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        more = f" and {len(names) - named} others" if len(names) > named else ""
        yield f"not exchanged in one bit: {', '.join(names[:named])}{more} ({reason})"
