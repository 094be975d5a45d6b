"""A torch device made in Python: PrivateUse1, named "fake". Each of its tensors has a tensor of the
processor behind it. Copies that are put on a stream are late: their destination has not-a-number
until the program waits for the stream, or for a later event. If several copies are pending, they
are made in reverse order. Work that is put on no stream is done at once.

`install()` must be called before any tensor is created, in a separate process.
"""

import collections
import threading
import weakref

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree

# The number of copies that were put on streams, by the destination's device type. Below: the
# present and the largest number of bytes of pinned memory.
copies = collections.Counter()
pinned = {"now": 0, "most": 0}
_raw_of = {}  # the fake tensor by its storage, for tensors that C++ creates from it
_current = threading.local()
_lock = threading.RLock()


class Stream:
    """Replaces torch.Stream."""

    def __init__(self, device=None):
        self.waiting = []  # (source, destination) of pending copies

    def __enter__(self):
        self._before, _current.stream = current_stream(), self

    def __exit__(self, *_):
        _current.stream = self._before

    def copy(self, source, to):
        to.fill_(float("nan"))
        with _lock:
            self.waiting.append((source, to))

    def run(self, count):
        """Makes the first `count` copies, in reverse order."""
        with _lock:
            some, self.waiting = self.waiting[:count], self.waiting[count:]
            for source, to in reversed(some):
                to.copy_(source)

    def synchronize(self):
        self.run(len(self.waiting))

    def wait_stream(self, other):
        """Makes the copies of the other stream before this stream's next work."""
        if other is not self:
            other.synchronize()

    def record_event(self):
        return Event(self)

    def is_capturing(self):
        return False


class Event:
    def __init__(self, stream):
        self._stream, self._copies = stream, list(stream.waiting)

    def synchronize(self):
        with _lock:
            left = {id(one) for one in self._copies}
            self._stream.run(sum(id(one) in left for one in self._stream.waiting))


_VIEWS = ("as_strided", "detach", "expand", "permute", "select.int", "slice.Tensor", "t",
          "transpose.int", "unsqueeze")
_default = Stream()


def current_stream(device=None):
    return getattr(_current, "stream", _default)


class Tensor(torch.Tensor):
    """A tensor that always reports to be contiguous, also if the processor's tensor behind it is
    not."""

    @staticmethod
    def __new__(cls, raw):
        made = torch._C._acc.create_empty_tensor(tuple(raw.shape), raw.dtype)
        made.__class__ = Tensor
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __init__(self, raw):
        self.raw = raw
        _raw_of[self.untyped_storage()._cdata] = raw

    def data_ptr(self):
        return self.raw.data_ptr()

    def __repr__(self):
        return f"fake({self.raw})"


def is_fake(thing):
    return isinstance(thing, torch.Tensor) and thing.device.type == "fake"


def raw(thing):
    if not is_fake(thing):
        return thing
    return thing.raw if isinstance(thing, Tensor) else _raw_of[thing.untyped_storage()._cdata]


def _fallback(op, *args, **options):
    """Runs any operation on the processor's tensors behind the fake ones."""
    given = [one for one in pytree.tree_leaves((args, options)) if is_fake(one)]
    to_host = options.get("device") is not None and torch.device(options["device"]).type == "cpu"
    raws, raw_options = pytree.tree_map(raw, (args, options))
    if raw_options.get("device") is not None:
        raw_options["device"] = torch.device("cpu")
    raw_options.pop("pin_memory", None)
    with torch.no_grad():
        made = op(*raws, **raw_options)
    if to_host:
        return made

    def give(one):
        if not isinstance(one, torch.Tensor):
            return one
        same = [of for of in given if raw(of) is one]  # for operations in place, and with out=
        return same[0] if same else Tensor(one.contiguous())

    return pytree.tree_map(give, made)


def _copy_from(source, to, non_blocking=False):
    stream = current_stream()
    if stream is _default or not non_blocking:
        raw(to).copy_(raw(source))
    else:
        copies[to.device.type] += 1
        stream.copy(raw(source), raw(to))
    return to


def _empty(size, *, dtype=None, **_):
    return Tensor(torch.empty(size, dtype=dtype, device="cpu"))


def _empty_strided(size, stride, *, dtype=None, **_):
    return Tensor(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _view(name):
    """Returns an operation whose result shares the memory of its argument."""
    return lambda of, *given: Tensor(getattr(torch.ops.aten, name)(raw(of), *given))


def _free(count):
    pinned["now"] -= count


def _count_pinned(empty):
    def counting(*size, pin_memory=False, **options):
        made = empty(*size, **options)
        if pin_memory:
            pinned["now"] += made.nbytes
            pinned["most"] = max(pinned["most"], pinned["now"])
            weakref.finalize(made, _free, made.nbytes)
        return made

    return counting


class Group(dist.ProcessGroup):
    """Collectives of fake tensors: those of gloo, on the processor's tensors behind them."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self):  # noqa: N802: torch's
        return "fakeccl"

    @property
    def group_name(self):
        return dist.distributed_c10d._world.pg_names[self]

    def _call(name):
        def call(self, *given, **options):
            return getattr(self._gloo, name)(*pytree.tree_map(raw, given), **options)

        return call

    for _one in ("allreduce", "broadcast", "allgather", "_allgather_base", "_reduce_scatter_base",
                 "all_gather_single", "reduce_scatter_single", "barrier"):
        locals()[_one] = _call(_one)


_libraries = []  # registrations are valid as long as these objects exist


def is_possible():
    return hasattr(torch.utils, "backend_registration") and hasattr(
        torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"
    )


def install():
    torch.utils.backend_registration._setup_privateuseone_for_python_backend("fake")
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_fallback, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for name, function in {
        "_copy_from": _copy_from,
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "view": lambda of, size: Tensor(raw(of).reshape(size)),
        "_reshape_alias": lambda of, size, _: Tensor(raw(of).reshape(size)),
        **{name: _view(name.partition(".")[0]) for name in _VIEWS},
    }.items():
        aten.impl(name, function, "PrivateUse1")
    _libraries.extend([everything, aten])
    torch.Stream, torch.accelerator.current_stream = Stream, current_stream
    torch.empty = _count_pinned(torch.empty)
    dist.Backend.register_backend("fakeccl", Group, devices=["fake"])
    return "cpu:gloo,fake:fakeccl"
