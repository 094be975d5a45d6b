"""Converts parts of a checkpoint (docs/checkpoints.md) from and to numpy arrays."""

import struct
from typing import Any, NamedTuple

import numpy as np

NUMBERS, PARAMETERS, MOMENTUM, VARIANCE, FRESH, ANCHOR, MOVED, WORKER, SERVER, MOMENTS = range(2, 12)
ELEMENTS, PADDING = 0, 1  # the index spaces of a section
KINDS = ("adam", "lamb", "zero_one_adam")

HEADER = 232
_ROW = 40
_LIBRARY = 0 << 16 | 2 << 8 | 0  # the version of the library that wrote a part
_NUMBERS = (1, NUMBERS, 15)  # sections of 8 bytes a number: norms, numbers, ladders; all others are floats
_SECTION = 65536  # the largest number of elements of a section; checksums of sections of one size are fast


class Part(NamedTuple):
    """A part is the bytes that one rank has saved of a checkpoint.

    header, tensors: bytes
    sections: tuples (what, space, number of the first element, values); `what` is NUMBERS to MOMENTS,
        `space` is ELEMENTS or PADDING
    """

    header: Any
    tensors: Any
    sections: Any


class Layout(NamedTuple):
    """The optimizer and the tensors that a checkpoint contains.

    kind: one of KINDS
    deepspeed: whether the optimizer has the profile deepspeed
    counts: the number of elements of each tensor
    uncompressed: for each tensor, whether it is uncompressed
    """

    kind: str
    deepspeed: bool
    counts: Any
    uncompressed: Any


class Head(NamedTuple):
    """The numbers of a checkpoint other than its elements. They are the same in all parts."""

    ranks: int
    stage: int
    apart: bool
    padding: int
    steps: int
    frozen_at: int
    exchanges: Any
    numbers: Any  # 8 bytes for each number


def type_of(what):
    """Returns the type of a section's values."""
    return "<u8" if what in _NUMBERS else "<f4"


def read_part(data):
    """Returns the `Part` that some bytes contain. Its values are views of these bytes."""
    header = bytearray(data[:HEADER])
    (tensors,), (rows,) = (struct.unpack_from("<Q", header, at) for at in (88, 224))
    end = HEADER + 16 * tensors
    sections = []
    for row in range(end, end + _ROW * rows, _ROW):
        what, space, first, count, offset = struct.unpack_from("<IIQQQ", data, row)
        sections.append((what, space, first, np.frombuffer(data, type_of(what), count, offset)))
    return Part(header, bytes(data[HEADER:end]), sections)


# --- The header of a part


def _field_reader(form, at):
    return lambda header: struct.unpack_from(form, header, at)[0]


ranks_of, shards_of, apart_of = _field_reader("<I", 64), _field_reader("<I", 80), _field_reader("<I", 84)
elements_of, steps_of, rank_of = _field_reader("<Q", 96), _field_reader("<Q", 112), _field_reader("<I", 176)


def kind_of(header):
    return bytes(header[40:56]).rstrip(b"\0").decode()


def place(header, other):
    """Copies the rank, the number of ranks and the hosts from another header into the header."""
    for begin, end in ((64, 72), (176, 188)):
        header[begin:end] = other[begin:end]


def place_alone(header):
    """Changes the header to that of a single rank."""
    struct.pack_into("<II", header, 64, 1, 0)
    struct.pack_into("<III", header, 176, 0, 0, 0)


def checksum_of(data):
    """Returns the checksum of a part's header. It covers the checksums of the sections."""
    return bytes(data[32:40])


def set_steps(header, steps, stage=None):
    struct.pack_into("<Q", header, 112, steps)
    if stage is not None:
        struct.pack_into("<I", header, 72, stage)
        struct.pack_into("<Q", header, 120, 0)  # the training had no warm-up


def uncompressed_of(part):
    """Returns for each tensor whether it is uncompressed."""
    return [bool(row[1]) for row in struct.iter_unpack("<QQ", part.tensors)]


def layout_of(data):
    """Returns the `Layout` of the optimizer that has saved this part. Also returns True if it is a 1-bit
    Adam that exchanges steps or is sharded."""
    part = read_part(data)
    (profile,), (form,) = (struct.unpack_from("<I", part.header, at) for at in (60, 76))
    counts = [count for count, _ in struct.iter_unpack("<QQ", part.tensors)]
    layout = Layout(kind_of(part.header), profile == 1, counts, uncompressed_of(part))
    return layout, bool(form or shards_of(part.header))


def _mix_bits(x):
    y = x * np.uint64(0x9E3779B97F4A7C15)
    return y ^ (y >> np.uint64(32))


def _compute_checksums(rows):
    """Returns the checksum of each row of bytes. The length of a row is a multiple of 8."""
    words = np.ascontiguousarray(rows).view("<u8")
    seeds = (0x6F6E6562, 0x69742063, 0x6865636B, 0x73756D73)
    with np.errstate(over="ignore"):
        lanes = [np.full(len(words), seed, "<u8") for seed in seeds]
        for i in range(words.shape[1]):
            lanes[i % 4] = _mix_bits(lanes[i % 4] ^ words[:, i])
        h = np.full(len(words), words.shape[1], "<u8")
        for lane in lanes:
            h = _mix_bits(h ^ lane)
    return h


def _split_sections(what, space, first, values, size):
    """Returns (what, space, first, bytes, count, checksum) for each section of an array."""
    values = np.ascontiguousarray(values)
    whole = len(values) // size * size
    rows = [values[:whole].reshape(-1, size)] if whole else []
    if len(values) > whole:
        rest = values[whole:]
        rows.append(np.pad(rest, (0, len(rest) * rest.itemsize % 8 // rest.itemsize))[None])
    end = first + len(values)
    for row in rows:
        data = row.view("u1")
        for one, checksum in zip(data, _compute_checksums(data)):
            count = min(size, end - first)
            yield what, space, first, one.tobytes(), count, int(checksum)
            first += count


def write_part(header, tensors, arrays, size=_SECTION):
    """Returns the bytes of a part.

    header: the header, which this function changes
    tensors: the rows of the tensors, as bytes
    arrays: (what, space, number of the first element, values)
    size: the largest number of elements of a section
    """
    sections = []
    for what, space, first, values in sorted(arrays, key=lambda one: one[:3]):
        if what in _NUMBERS:
            sections += _split_sections(what, space, first, values, len(values))
        else:
            sections += _split_sections(what, space, first, np.asarray(values, "<f4"), size)
    front = HEADER + len(tensors) + _ROW * len(sections)
    table, offset = b"", front
    for what, space, first, data, count, checksum in sections:
        table += struct.pack("<IIQQQQ", what, space, first, count, offset, checksum)
        offset += len(data)
    struct.pack_into("<QQQ", header, 16, offset, front, 0)
    struct.pack_into("<Q", header, 224, len(sections))
    made = header + tensors + table
    checksum = int(_compute_checksums(np.frombuffer(bytes(made), "u1")[None])[0])
    struct.pack_into("<Q", made, 32, checksum)
    return bytes(made) + b"".join(section[3] for section in sections)


def make_part(layout, head, rank, arrays):
    """Returns the bytes of one rank's part. arrays: (what, space, number of the first element, float32
    values)."""
    counts = layout.counts
    arrays = [*arrays, *([(NUMBERS, ELEMENTS, 0, head.numbers)] if len(head.numbers) else [])]
    made = bytearray(HEADER)
    struct.pack_into("<8sII", made, 0, b"O1BC\r\n\x1a\n", 1, 0x01020304)
    struct.pack_into("<16sIII", made, 40, layout.kind.encode(), _LIBRARY, layout.deepspeed,
                     head.ranks)  # fmt: skip
    struct.pack_into("<IIIII", made, 68, 0, head.stage, 0, 0, head.apart)
    struct.pack_into("<QQQ", made, 88, len(counts), sum(counts), head.padding)
    struct.pack_into("<QQ", made, 112, head.steps, head.frozen_at)
    struct.pack_into("<QQQ", made, 128, *head.exchanges)
    struct.pack_into("<QQII", made, 160, 0, len(head.numbers), rank, 0)
    tensors = b"".join(struct.pack("<QQ", *row) for row in zip(counts, layout.uncompressed))
    return write_part(made, tensors, arrays)


def manifest(kind, steps, parts):
    """Returns the text of the manifest, which names the parts in a directory, as generation 1."""
    text = f"onebit checkpoint 1\nkind {kind}\nsteps {steps}\ngeneration 1\nranks {len(parts)}\n"
    for rank, part in enumerate(parts):
        (checksum,) = struct.unpack_from("<Q", part, 32)
        text += f"part {rank} {len(part)} {checksum:016x}\n"
    fnv = 0xCBF29CE484222325
    for byte in text.encode():
        fnv = (fnv ^ byte) * 0x100000001B3 % 2**64
    return text + f"checksum {fnv:016x}\n"
