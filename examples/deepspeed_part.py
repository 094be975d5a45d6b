"""Writes a checkpoint for onebit's 1-bit Adam from the state of another trainer: parameters, momentum
and variance of each tensor, and the steps made. onebit_optimizer_load_files reads it, on any number
of ranks. docs/migrate-from-deepspeed.md says where DeepSpeed keeps these; docs/checkpoints.md is the
format."""

import os
import struct

import numpy as np

PARAMETERS, MOMENTUM, VARIANCE = 3, 4, 5
PROFILES = {"default": 0, "deepspeed": 1}
SECTION = 65536  # elements at most: checksums of sections of one size are computed side by side
HEADER = 232


def mix(x):
    y = x * np.uint64(0x9E3779B97F4A7C15)
    return y ^ (y >> np.uint64(32))


def checksums(rows):
    """Of each row: bytes, as many in each, a multiple of 8."""
    words = np.ascontiguousarray(rows).view("<u8")
    seeds = (0x6F6E6562, 0x69742063, 0x6865636B, 0x73756D73)
    with np.errstate(over="ignore"):
        lanes = [np.full(len(words), seed, "<u8") for seed in seeds]
        for i in range(words.shape[1]):
            lanes[i % 4] = mix(lanes[i % 4] ^ words[:, i])
        h = np.full(len(words), words.shape[1], "<u8")
        for lane in lanes:
            h = mix(h ^ lane)
    return h


def sections_of(what, space, values):
    """(what, space, first, bytes, count, checksum) of each section of an array."""
    values = np.ascontiguousarray(values, "<f4")
    if not np.isfinite(values).all():
        raise ValueError(f"section {what} holds what is not finite")
    whole = len(values) // SECTION * SECTION
    parts = [values[:whole].reshape(-1, SECTION)] if whole else []
    if len(values) > whole:
        parts.append(np.pad(values[whole:], (0, (len(values) - whole) % 2))[None])
    first = 0
    for part in parts:
        rows = part.view("u1")
        for row, checksum in zip(rows, checksums(rows)):
            count = min(SECTION, len(values) - first)
            yield what, space, first, row.tobytes(), count, int(checksum)
            first += count


def make_part(tensors, steps, profile):
    """tensors: of each, in the order of the optimizer's list, (parameter, momentum, variance)."""
    counts = [len(np.ravel(tensor[0])) for tensor in tensors]
    padding = sum(-n % 8 for n in counts) if profile == "deepspeed" else 0  # of one rank that saves
    flat = [np.concatenate([np.ravel(t[k]) for t in tensors]) for k in range(3)]
    sections = list(sections_of(PARAMETERS, 0, flat[0]))
    for what, values in ((MOMENTUM, flat[1]), (VARIANCE, flat[2])):
        if len(values) != sum(counts):
            raise ValueError(f"tensors of {sum(counts)} parameters have {len(values)} moments")
        sections += sections_of(what, 0, values)
        sections += sections_of(what, 1, np.zeros(padding)) if padding else []
    front = HEADER + 16 * len(counts) + 40 * len(sections)
    table, offset = b"", front
    for what, space, first, data, count, checksum in sections:
        table += struct.pack("<IIQQQQ", what, space, first, count, offset, checksum)
        offset += len(data)
    head = bytearray(HEADER)
    struct.pack_into("<8sIIQQ", head, 0, b"O1BC\r\n\x1a\n", 1, 0x01020304, offset, front)
    struct.pack_into("<16sIII", head, 40, b"adam", 256, PROFILES[profile], 1)
    struct.pack_into("<QQQQQQ", head, 88, len(counts), sum(counts), padding, steps, 0, steps)
    struct.pack_into("<Q", head, 224, len(sections))
    head += b"".join(struct.pack("<QQ", n, 0) for n in counts) + table
    checksum = int(checksums(np.frombuffer(bytes(head), "u1")[None])[0])
    struct.pack_into("<Q", head, 32, checksum)
    return bytes(head) + b"".join(section[3] for section in sections), checksum


def write_checkpoint(directory, tensors, steps, profile="deepspeed"):
    """In a directory that is made where it is not there."""
    part, checksum = make_part(tensors, steps, profile)
    text = "onebit checkpoint 1\nkind adam\n"
    text += f"steps {steps}\ngeneration 1\nranks 1\npart 0 {len(part)} {checksum:016x}\n"
    fnv = 0xCBF29CE484222325
    for byte in text.encode():
        fnv = (fnv ^ byte) * 0x100000001B3 % 2**64
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, "part-1-0"), "wb") as file:
        file.write(part)
    with open(os.path.join(directory, "manifest"), "w", newline="\n") as file:
        file.write(text + f"checksum {fnv:016x}\n")
