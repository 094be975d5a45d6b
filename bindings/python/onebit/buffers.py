"""Passes the memory of arrays to the library without a copy: numpy arrays, torch tensors, objects
with the buffer protocol, and arrays on CUDA devices that have __cuda_array_interface__."""

import ctypes
import math
import sys
from typing import Any, NamedTuple

from onebit._native import Dtype, argument_error


class Buffer(NamedTuple):
    """A piece of memory. `owner` is the object that keeps it alive."""

    address: int
    count: int
    dtype: Dtype
    owner: Any


_BY_TYPESTR = {"<f4": Dtype.FLOAT32, "<f2": Dtype.FLOAT16}
_BY_FORMAT = {"f": Dtype.FLOAT32, "e": Dtype.FLOAT16}
_BY_TORCH = {f"torch.{one.name.lower()}": one for one in Dtype}


def is_tensor(thing):
    """True for a torch tensor. Does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(thing, getattr(torch, "Tensor", ()))


def _wrong_place(name, place, on_device):
    wanted = "on a CUDA device, as device= says" if on_device else "on the processor"
    return argument_error(f"{name} is on {place}, not {wanted}")


def _describe_tensor(tensor, name, on_device):
    dtype = _BY_TORCH.get(str(tensor.dtype))
    if tensor.device.type != ("cuda" if on_device else "cpu"):
        raise _wrong_place(name, tensor.device, on_device)
    if str(tensor.layout) != "torch.strided" or not tensor.is_contiguous():
        raise argument_error(f"{name} is not contiguous: its strides are not those of its shape")
    if dtype is None:
        raise argument_error(f"{name} has type {tensor.dtype}, not float32, bfloat16 or float16")
    return Buffer(tensor.data_ptr(), tensor.numel(), dtype, tensor)


def _describe_array(array, described, name, writable):
    """Returns the `Buffer` of an array. described: its __array_interface__ or
    __cuda_array_interface__"""
    address, read_only = described["data"]
    dtype = _BY_TYPESTR.get(described["typestr"])
    if dtype is None and getattr(getattr(array, "dtype", None), "name", "") == "bfloat16":
        dtype = Dtype.BFLOAT16  # the type comes from ml_dtypes
    if dtype is None:
        raise argument_error(f"{name} has type {described['typestr']}, not float32, bfloat16 or float16")
    count = math.prod(described["shape"])
    size, strides = int(described["typestr"][2:]), described.get("strides")
    for extent, stride in zip(reversed(described["shape"]), reversed(strides or ())):
        if extent != 1 and stride != size and count:
            raise argument_error(f"{name} is not contiguous")
        size *= extent
    if writable and read_only:
        raise argument_error(f"{name} is read-only")
    return Buffer(address, count, dtype, array)


def _describe_memory(thing, name):
    view = memoryview(thing)
    if view.format not in _BY_FORMAT:
        raise argument_error(f"{name} has elements of format {view.format!r}, not 'f' or 'e'")
    if not view.c_contiguous:
        raise argument_error(f"{name} is not contiguous")
    if view.readonly:
        raise argument_error(f"{name} is read-only")
    exported = (ctypes.c_char * view.nbytes).from_buffer(view) if view.nbytes else None
    address = ctypes.addressof(exported) if exported is not None else 0
    return Buffer(address, view.nbytes // view.itemsize, _BY_FORMAT[view.format], (view, exported))


def buffer_of(thing, name, writable=False, on_device=False):
    """Returns an array's memory. Raises `Error` (ERROR_ARGUMENT) for memory that the library cannot
    use: another type, another memory space, not contiguous, or read-only although it is to be
    written."""
    if is_tensor(thing):
        return _describe_tensor(thing, name, on_device)
    described = getattr(thing, "__cuda_array_interface__", None)
    if described is not None:
        if not on_device:
            raise _wrong_place(name, "a CUDA device", on_device)
        return _describe_array(thing, described, name, writable)
    if on_device:
        raise _wrong_place(name, "the processor", on_device)
    described = getattr(thing, "__array_interface__", None)  # computed again at each access
    if described is not None:
        return _describe_array(thing, described, name, writable)
    try:
        return _describe_memory(thing, name)
    except TypeError:
        raise argument_error(f"{name} is a {type(thing).__name__}, not an array") from None


def check_dtypes(buffers, name, dtype):
    """Raises `Error` for the first array of another type. name: the array's name, with {} in place of
    its number"""
    for number, one in enumerate(buffers):
        if one.dtype != dtype:
            wanted = Dtype(dtype).name
            raise argument_error(f"{name.format(number)} has type {one.dtype.name}, not {wanted}")


def current_stream(buffer):
    """Returns torch's current stream on the device of a torch tensor. For arrays of other packages
    returns None, which stands for the default stream."""
    if is_tensor(buffer.owner):
        return sys.modules["torch"].cuda.current_stream(buffer.owner.device).cuda_stream
    return None


# The bytes that an element needs on a device, for residuals, messages, master values, moments and
# rounding.
_ROOM_ELEMENT, _ROOM_BESIDE = 32, 64 << 20


def make_room(count):
    """Empties torch's cache of device memory if too little memory is free for an object of `count`
    elements."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    if torch.cuda.mem_get_info()[0] < count * _ROOM_ELEMENT + _ROOM_BESIDE:
        torch.cuda.empty_cache()


def wait_for_torch(buffers):
    """Waits for torch's current streams. Called before a call of the library that takes no stream."""
    owners = [one.owner for one in buffers if is_tensor(one.owner)]
    for device in {one.device for one in owners if one.device.type == "cuda"}:
        sys.modules["torch"].cuda.current_stream(device).synchronize()
