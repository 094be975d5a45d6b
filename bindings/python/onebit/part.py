"""Parts of a checkpoint (docs/checkpoints.md, version 1 of the format), from arrays of numpy."""

import struct
from typing import Any, NamedTuple

import numpy as np

NUMBERS, PARAMETERS, MOMENTUM, VARIANCE, FRESH, ANCHOR, MOVED, WORKER, SERVER = range(2, 11)
ELEMENTS, PADDING = 0, 1  # spaces
KINDS = ("adam", "lamb", "zero_one_adam")

_HEADER = 232
_ROW = 40
_LIBRARY = 0 << 16 | 2 << 8 | 0  # the version that wrote it, as the library itself would
_SECTION = 65536  # elements at most: checksums of sections of one size are computed side by side


class Layout(NamedTuple):
    """Of whom a checkpoint is.

    kind: of KINDS
    deepspeed: whether it is of profile deepspeed
    counts: elements of each tensor
    uncompressed: of each, whether it is
    """

    kind: str
    deepspeed: bool
    counts: Any
    uncompressed: Any


class Head(NamedTuple):
    """What is not elements, the same in all parts."""

    ranks: int
    stage: int
    apart: bool
    padding: int
    steps: int
    frozen_at: int
    exchanges: Any
    numbers: Any  # of 8 bytes each


def layout_of(part):
    """The `Layout` of an optimizer that has saved this part, and whether it is 1-bit Adam that
    exchanges steps or is sharded."""
    kind = part[40:56].rstrip(b"\0").decode()
    (profile,) = struct.unpack_from("<I", part, 60)
    form, shards = struct.unpack_from("<II", part, 76)
    (tensors,) = struct.unpack_from("<Q", part, 88)
    rows = [struct.unpack_from("<QQ", part, _HEADER + 16 * k) for k in range(tensors)]
    layout = Layout(kind, profile == 1, [n for n, _ in rows], [bool(one) for _, one in rows])
    return layout, bool(form or shards)


def _mix(x):
    y = x * np.uint64(0x9E3779B97F4A7C15)
    return y ^ (y >> np.uint64(32))


def _checksums(rows):
    """Of each row: bytes, as many in each, a multiple of 8."""
    words = np.ascontiguousarray(rows).view("<u8")
    seeds = (0x6F6E6562, 0x69742063, 0x6865636B, 0x73756D73)
    with np.errstate(over="ignore"):
        lanes = [np.full(len(words), seed, "<u8") for seed in seeds]
        for i in range(words.shape[1]):
            lanes[i % 4] = _mix(lanes[i % 4] ^ words[:, i])
        h = np.full(len(words), words.shape[1], "<u8")
        for lane in lanes:
            h = _mix(h ^ lane)
    return h


def _sections(what, space, first, values):
    """(what, space, first, bytes, count, checksum) of each section of an array."""
    values = np.ascontiguousarray(values)
    whole = len(values) // _SECTION * _SECTION
    rows = [values[:whole].reshape(-1, _SECTION)] if whole else []
    if len(values) > whole:
        rest = values[whole:]
        rows.append(np.pad(rest, (0, len(rest) * rest.itemsize % 8 // rest.itemsize))[None])
    end = first + len(values)
    for row in rows:
        data = row.view("u1")
        for one, checksum in zip(data, _checksums(data)):
            count = min(_SECTION, end - first)
            yield what, space, first, one.tobytes(), count, int(checksum)
            first += count


def make_part(layout, head, rank, arrays):
    """The bytes of a rank's part. arrays: (what, space, number of the first element, float32s)."""
    sections = list(_sections(NUMBERS, ELEMENTS, 0, head.numbers)) if len(head.numbers) else []
    for what, space, first, values in sorted(arrays, key=lambda one: one[:3]):
        sections += _sections(what, space, first, np.asarray(values, "<f4"))
    counts = layout.counts
    front = _HEADER + 16 * len(counts) + _ROW * len(sections)
    table, offset = b"", front
    for what, space, first, data, count, checksum in sections:
        table += struct.pack("<IIQQQQ", what, space, first, count, offset, checksum)
        offset += len(data)
    made = bytearray(_HEADER)
    struct.pack_into("<8sIIQQ", made, 0, b"O1BC\r\n\x1a\n", 1, 0x01020304, offset, front)
    struct.pack_into("<16sIII", made, 40, layout.kind.encode(), _LIBRARY, layout.deepspeed,
                     head.ranks)  # fmt: skip
    struct.pack_into("<IIIII", made, 68, 0, head.stage, 0, 0, head.apart)
    struct.pack_into("<QQQ", made, 88, len(counts), sum(counts), head.padding)
    struct.pack_into("<QQ", made, 112, head.steps, head.frozen_at)
    struct.pack_into("<QQQ", made, 128, *head.exchanges)
    struct.pack_into("<QQII", made, 160, 0, len(head.numbers), rank, 0)
    struct.pack_into("<Q", made, 224, len(sections))
    rows = zip(counts, layout.uncompressed)
    made += b"".join(struct.pack("<QQ", *row) for row in rows) + table
    checksum = int(_checksums(np.frombuffer(bytes(made), "u1")[None])[0])
    struct.pack_into("<Q", made, 32, checksum)
    return bytes(made) + b"".join(section[3] for section in sections)


def manifest(kind, steps, parts):
    """The text that names parts, of generation 1, in a directory."""
    text = f"onebit checkpoint 1\nkind {kind}\nsteps {steps}\ngeneration 1\nranks {len(parts)}\n"
    for rank, part in enumerate(parts):
        (checksum,) = struct.unpack_from("<Q", part, 32)
        text += f"part {rank} {len(part)} {checksum:016x}\n"
    fnv = 0xCBF29CE484222325
    for byte in text.encode():
        fnv = (fnv ^ byte) * 0x100000001B3 % 2**64
    return text + f"checksum {fnv:016x}\n"
