"""The library reads and writes the memory of numpy arrays, torch tensors, objects with the buffer
protocol, and arrays on CUDA devices that have __cuda_array_interface__. Nothing is copied."""

import ctypes
import math
import sys
from typing import Any, NamedTuple

from onebit._native import Dtype, argument_error


class Buffer(NamedTuple):
    """Memory: `owner` keeps it alive."""

    address: int
    count: int
    dtype: Dtype
    owner: Any


_BY_TYPESTR = {"<f4": Dtype.FLOAT32, "<f2": Dtype.FLOAT16}
_BY_FORMAT = {"f": Dtype.FLOAT32, "e": Dtype.FLOAT16}


def _wrong_place(name, place, on_device):
    wanted = "on a CUDA device, as device= says" if on_device else "on the processor"
    return argument_error(f"{name} is on {place}, not {wanted}")


def _describe_tensor(tensor, name, on_device):
    torch = sys.modules["torch"]
    dtypes = {
        torch.float32: Dtype.FLOAT32,
        torch.bfloat16: Dtype.BFLOAT16,
        torch.float16: Dtype.FLOAT16,
    }
    if tensor.device.type != ("cuda" if on_device else "cpu"):
        raise _wrong_place(name, tensor.device, on_device)
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise argument_error(f"{name} is not contiguous: its strides are not those of its shape")
    if tensor.dtype not in dtypes:
        raise argument_error(f"{name} is of {tensor.dtype}, not float32, bfloat16 or float16")
    return Buffer(tensor.data_ptr(), tensor.numel(), dtypes[tensor.dtype], tensor)


def _describe_array(array, described, name, writable):
    address, read_only = described["data"]
    dtype = _BY_TYPESTR.get(described["typestr"])
    if dtype is None and getattr(getattr(array, "dtype", None), "name", "") == "bfloat16":
        dtype = Dtype.BFLOAT16  # the type is of ml_dtypes
    if dtype is None:
        raise argument_error(f"{name} is of {described['typestr']}, not float32, bfloat16 or float16")
    if not array.flags.c_contiguous:
        raise argument_error(f"{name} is not contiguous")
    if writable and read_only:
        raise argument_error(f"{name} is read-only")
    return Buffer(address, int(array.size), dtype, array)


def _of_device(array, described, name, writable):
    address, read_only = described["data"]
    dtype = _BY_TYPESTR.get(described["typestr"])
    if dtype is None:
        raise argument_error(f"{name} is of {described['typestr']}, not float32 or float16")
    count = math.prod(described["shape"])
    size, strides = int(described["typestr"][2:]), described.get("strides")
    for extent, stride in zip(reversed(described["shape"]), reversed(strides or ())):
        if extent != 1 and stride != size and count:
            raise argument_error(f"{name} is not contiguous")
        size *= extent
    if writable and read_only:
        raise argument_error(f"{name} is read-only")
    return Buffer(address, count, dtype, array)


def _of_memory(thing, name, writable):
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
    use: of another type, on a device where it should be on the processor or the other way round, not
    contiguous, or read-only where it is written to."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(thing, getattr(torch, "Tensor", ())):
        return _describe_tensor(thing, name, on_device)
    described = getattr(thing, "__cuda_array_interface__", None)
    if described is not None:
        if not on_device:
            raise _wrong_place(name, "a CUDA device", on_device)
        return _of_device(thing, described, name, writable)
    if on_device:
        raise _wrong_place(name, "the processor", on_device)
    described = getattr(thing, "__array_interface__", None)  # each access makes it anew
    if described is not None:
        return _describe_array(thing, described, name, writable)
    try:
        return _of_memory(thing, name, writable)
    except TypeError:
        raise argument_error(f"{name} is a {type(thing).__name__}, not an array") from None


def current_stream(buffer):
    """Returns torch's current stream on the device of a torch tensor; None, which is the default
    stream, for arrays of other packages."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(buffer.owner, torch.Tensor):
        return torch.cuda.current_stream(buffer.owner.device).cuda_stream
    return None


# The bytes an element that are needed on a device: residuals, messages, master values, moments, rounding.
_ROOM_ELEMENT, _ROOM_BESIDE = 32, 64 << 20


def make_room(count):
    """Called before an object of `count` elements is made on a device: where the device has too little
    memory, torch gives back what it has cached and does not use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    if torch.cuda.mem_get_info()[0] < count * _ROOM_ELEMENT + _ROOM_BESIDE:
        torch.cuda.empty_cache()


def wait_for_torch(buffers):
    """Waits until what torch has put on its current streams is complete: what the library does in a
    call that takes no stream is in the order of none of them."""
    torch = sys.modules.get("torch")
    owners = [one.owner for one in buffers if torch and isinstance(one.owner, torch.Tensor)]
    for device in {one.device for one in owners if one.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
