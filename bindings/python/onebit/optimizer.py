"""The optimizers: their base classes, and one class for each optimizer."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any, Iterable, NamedTuple, Sequence, Union

from onebit import _native
from onebit._native import NAMES, OPTIMIZERS, Device, Dtype, Stage, Status, argument_error, check, last_message
from onebit.buffers import buffer_of, check_dtypes, current_stream, make_room
from onebit.communicator import Communicator, Member


class Stateful(Member):
    """The base of optimizers and outer steps, with functions to save, load, move and shrink."""

    _prefix = None  # the prefix of the functions in C: "onebit_optimizer"

    def _function(self, name):
        return getattr(_native.library(), f"{self._prefix}_{name}")

    def _take(self):
        """Called before the library reads the caller's arrays."""

    def _changed(self):
        """Called after the library may have written to the caller's arrays."""

    def save(self) -> bytes:
        """Returns this rank's part of a checkpoint. With an outer step, all ranks must call it after the
        same exchanges."""
        return self._saved("save")

    def _saved(self, name):
        self._take()
        function = self._function(name)
        count = ctypes.c_size_t()
        check(function(self.handle, None, 0, ctypes.byref(count)))
        part = ctypes.create_string_buffer(count.value)
        check(function(self.handle, part, count.value, ctypes.byref(count)))
        return ctypes.string_at(part, count.value)

    def load(self, parts: Sequence[bytes]) -> None:
        """Loads the state and the parameters from the parts of all ranks that saved, in the order of their
        ranks. Collective."""
        parts = [bytes(part) for part in parts]
        pointers = (ctypes.c_void_p * max(len(parts), 1))()
        sizes = (ctypes.c_size_t * max(len(parts), 1))()
        for place, part in enumerate(parts):
            pointers[place] = ctypes.cast(ctypes.c_char_p(part), ctypes.c_void_p).value
            sizes[place] = len(part)
        check(self._function("load")(self.handle, pointers, sizes, len(parts)))
        self._changed()

    def save_files(self, directory: os.PathLike[str] | str) -> None:
        """Saves into a directory that all ranks can access. Collective."""
        self._take()
        check(self._function("save_files")(self.handle, os.fsencode(directory)))

    def load_files(self, directory: os.PathLike[str] | str) -> None:
        """Loads the checkpoint that `save_files` saved last into the directory. Collective."""
        check(self._function("load_files")(self.handle, os.fsencode(directory)))
        self._changed()

    def move(self, comm: Communicator) -> None:
        """Continues with the ranks of another communicator: the remaining ranks, or new ones. Collective
        over comm. The old communicator can be closed afterwards."""
        self._take()
        check(self._function("move")(self.handle, comm.handle))
        self._change(comm)

    def shrink(self) -> Communicator:
        """Continues with the remaining ranks after one was lost. Collective over the remaining ranks.
        Returns their new communicator."""
        handle = ctypes.c_void_p()
        self._take()
        status = self._function("shrink")(self.handle, ctypes.byref(handle))
        kept, transport = self._comm._keeps, self._comm.transport
        made = Communicator(handle, kept, transport) if handle else None
        if made:
            made._collective = self._comm._collective
        self._latest = made  # set also after a failure: the next call begins from this communicator
        check(status)
        self._change(made)
        return made

    def _change(self, comm):
        comm._join(self)
        self._comm._members.discard(self)
        self._comm._leave(self)
        self._comm = comm
        self._changed()

    def close(self) -> None:
        """Frees the object; the arrays do not change. Collective while a step of an optimizer is open."""
        if self._handle:
            handle, self._handle = self._handle, None
            if self._comm._is_foreign():
                return
            self._function("destroy")(handle)
            self._comm._leave(self)

    def __del__(self):
        if self._handle and not sys.is_finalizing():
            self.close()


class Tensor(NamedTuple):
    """A tensor to optimize. Its arrays belong to the caller, and are read and updated in place.

    parameter: an array that is equal on all ranks at the beginning
    gradient: this rank's own gradient; None: it has none (`Optimizer.set_gradient` can change this)
    weight_decay: decoupled, as in AdamW
    learning_rate_factor: a factor of the step's learning rate
    uncompressed: true: the gradient is always averaged in full precision; `TABLE`, only for Efficient-Adam:
        it is compressed as a table of outputs
    """

    parameter: Any
    gradient: Any = None
    weight_decay: float = 0.0
    learning_rate_factor: float = 1.0
    uncompressed: int = 0


Tensors = Iterable[Union[Tensor, "tuple[Any, Any]"]]


class Optimizer(Stateful):
    """The base of the optimizers; create one of the derived classes. Collective.

    comm: a `Communicator`
    tensors: `Tensor`s, or pairs (parameter, gradient)
    options: the fields of the optimizer's options struct and of onebit_optimizer_options_t by name.
        parameter_dtype and gradient_dtype are those of the arrays.
    """

    _prefix = "onebit_optimizer"
    _noun = "the optimizer"
    _create = None
    _options = None

    def __init__(self, comm: Communicator, tensors: Tensors, **options: Any) -> None:
        try:
            described, filled = self._describe_tensors(tensors, options)
        except Exception:
            self._refuse(comm)
            raise
        create, handle = getattr(_native.library(), self._create), ctypes.c_void_p()
        count = len(self._parameters)
        if self._on_device:
            make_room(sum(one.count for one in self._parameters))
        check(create(comm.handle, described, count, ctypes.byref(filled), ctypes.byref(handle)))
        self._begin(comm, handle)

    @classmethod
    def _refuse(cls, comm):
        """Makes a call that the library rejects, so that the other ranks do not wait for this rank."""
        create = getattr(_native.library(), cls._create)
        create(comm.handle, None, 1, None, ctypes.byref(ctypes.c_void_p()))

    def _describe_tensors(self, tensors, options):
        """Returns the C structures of tensors and options. Keeps the arrays alive."""
        tensors = [one if isinstance(one, Tensor) else Tensor(*one) for one in tensors]
        device = _native.enum_value(Device, options.get("device", Device.DEVICE_HOST), "device")
        self._on_device = device == Device.DEVICE_CUDA
        self._parameters = [
            buffer_of(one.parameter, f"tensors[{number}].parameter", True, self._on_device)
            for number, one in enumerate(tensors)
        ]
        first = self._parameters[0].dtype if self._parameters else Dtype.FLOAT32
        options = {"parameter_dtype": first, **options}
        given = next((one.gradient for one in tensors if one.gradient is not None), None)
        if "gradient_dtype" not in options:
            found = None if given is None else buffer_of(given, "gradient", False, self._on_device)
            options["gradient_dtype"] = found.dtype if found else options["parameter_dtype"]
        filled = _native.make_structure(self._options)
        _native.set_options(filled, options, filled.common)
        check_dtypes(self._parameters, "tensors[{}].parameter", filled.common.parameter_dtype)
        self._gradient_dtype = Dtype(filled.common.gradient_dtype)
        given = (one.gradient for one in tensors)
        self._gradients = [self._gradient(number, one) for number, one in enumerate(given)]
        described = (_native.Tensor * max(len(tensors), 1))()
        buffers = self._parameters, self._gradients
        for place, one, parameter, gradient in zip(described, tensors, *buffers):
            place.parameter = parameter.address if parameter.count else None
            place.gradient = gradient.address if gradient and parameter.count else None
            place.count = parameter.count
            place.weight_decay = one.weight_decay
            place.learning_rate_factor = one.learning_rate_factor
            place.uncompressed = int(one.uncompressed)
        return described, filled

    def _gradient(self, number, array):
        """Returns the memory of an array as the gradient of a tensor. None stays None."""
        if array is None:
            return None
        name = f"tensors[{number}].gradient"
        found = buffer_of(array, name, False, self._on_device)
        count = self._parameters[number].count
        if found.dtype != self._gradient_dtype:
            raise argument_error(f"{name} has type {found.dtype.name}, not {self._gradient_dtype.name}")
        if found.count != count:
            raise argument_error(f"{name} has {found.count} elements, but its parameter has {count}")
        return found

    def step(self, learning_rate: float) -> Status:
        """Makes one step. Returns OK, or SKIPPED if nothing has changed. Collective. With device="cuda" the
        step runs on a stream, as `Plan.allreduce` does."""
        return self._on_stream("step", learning_rate)

    def _call(self, name, *arguments):
        return check(self._function(name)(self.handle, *arguments))

    def _on_stream(self, name, argument):
        """Calls a function of the library. With device="cuda" calls the function that runs on torch's
        current stream."""
        if not self._on_device:
            return self._call(name, argument)
        stream = current_stream(self._parameters[0]) if self._parameters else None
        return self._call(f"{name}_stream", argument, stream)

    def synchronize(self) -> Status:
        """With device="cuda": waits for the steps. Returns the status of the first step since the last
        `synchronize` that was not OK, or OK."""
        return self._call("synchronize")

    def begin(self, learning_rate: float) -> None:
        """Opens a step whose gradients become final one after the other (`ready`). `step` ends the step."""
        self._on_stream("begin", learning_rate)

    def ready(self, tensor: int) -> None:
        """Reports that this rank's gradient of tensor number `tensor` is final."""
        self._on_stream("ready", tensor)

    def set_gradient(self, tensor: int, gradient: Any) -> None:
        """Sets the array of the gradient of tensor number `tensor`, from the next step on. None: this rank
        has no gradient for it."""
        if not 0 <= tensor < len(self._parameters):
            raise argument_error(f"tensor is {tensor}, but there are {len(self._parameters)} parameters")
        found = self._gradient(tensor, gradient)
        address = found.address if found and found.count else None
        self._call("set_gradient", tensor, address)
        self._gradients[tensor] = found

    def set_learning_rate_pointer(self, rate: Any) -> None:
        """With device="cuda": from the next step on, a step reads the learning rate from this array of one
        float32 when it runs, so that a captured graph follows a schedule. None: the rate is that of `step`.
        Must be the same on all ranks. Not for `ZeroOneAdam`."""
        found = None if rate is None else buffer_of(rate, "rate", False, self._on_device)
        if found and (found.count != 1 or found.dtype != Dtype.FLOAT32):
            raise argument_error(f"rate has {found.count} elements of {found.dtype.name}, not one of FLOAT32")
        self._call("set_learning_rate_pointer", found.address if found else None)
        self._rate = found

    def set_learning_rate_factor(self, tensor: int, factor: float) -> None:
        """Sets the factor of the step's learning rate for tensor number `tensor`, from the next step on.
        Must be the same on all ranks."""
        self._call("set_learning_rate_factor", tensor, factor)

    def set_weight_decay(self, tensor: int, weight_decay: float) -> None:
        """Sets the weight decay of a tensor from the next step on. Must be the same on all ranks."""
        self._call("set_weight_decay", tensor, weight_decay)

    def set_beta1(self, beta1: float) -> None:
        """Sets beta1, or the momentum of `Momentum`, from the next step on. Must be the same on all
        ranks."""
        self._call("set_beta1", beta1)

    def set_tag(self, tag: int) -> None:
        """Sets a tag, which is a number. Later steps fail unless all ranks have the same tag."""
        self._call("set_tag", tag)

    def take_parameters(self) -> None:
        """Makes steps continue from the present values of 16-bit parameters, after the caller has written to
        them."""
        self._call("take_parameters")

    def compare(self) -> None:
        """Raises `Error` (ERROR_MISMATCH), which names the tensor and the ranks, unless all ranks have the
        same parameters. Collective. The first step makes this comparison itself."""
        self._call("compare")

    def set_compare_interval(self, steps: int) -> None:
        """Makes every n-th step from now on compare the parameters at its start. 0: never."""
        self._call("set_compare_interval", steps)

    def save_whole(self) -> bytes:
        """Returns this rank's part of a checkpoint, including all of the state that is the same on all
        ranks."""
        return self._saved("save_whole")

    @property
    def loss_scale(self) -> float:
        """Returns the factor for the next step's loss, which is 1 without loss scaling."""
        scale = ctypes.c_double()
        self._call("get_loss_scale", ctypes.byref(scale))
        return scale.value

    def stage(self) -> tuple[Stage, int]:
        """Returns the stage of the next step, and the number of steps made. In contrast to `info`, it does not
        read the whole state."""
        stage, steps = ctypes.c_int(), ctypes.c_uint64()
        self._call("get_stage", ctypes.byref(stage), ctypes.byref(steps))
        return Stage(stage.value), steps.value

    def info(self) -> dict[str, Any]:
        """Returns the optimizer's state in numbers: the fields of onebit_optimizer_info_t by name."""
        return _native.call_getter(self._function("get_info"), self.handle, _native.OptimizerInfo)

    def statistics(self) -> dict[str, Any]:
        """Returns the optimizer's statistics: the fields of onebit_optimizer_statistics_t by name."""
        kind = _native.OptimizerStatistics
        return _native.call_getter(self._function("get_statistics"), self.handle, kind)

    def tensor_statistics(self, tensor: int) -> dict[str, Any]:
        """Returns the statistics of one tensor: the fields of onebit_tensor_statistics_t by name."""
        function = self._function("get_tensor_statistics")
        return _native.call_getter(function, self.handle, _native.TensorStatistics, tensor)

    def _line(self, form):
        length = ctypes.c_size_t()
        self._call("describe", form, None, 0, ctypes.byref(length))
        line = ctypes.create_string_buffer(length.value + 64)  # by now numbers may have more digits
        self._call("describe", form, line, len(line), None)
        return line.value.decode()

    def describe(self) -> str:
        """Returns the statistics as one line of text."""
        return self._line(_native.Format.FORMAT_TEXT)

    def describe_json(self) -> dict[str, Any]:
        """Returns the statistics as a dictionary."""
        return json.loads(self._line(_native.Format.FORMAT_JSON))

    def check(self) -> tuple[int, str] | None:
        """Returns None if all is well. Otherwise returns the number of a tensor whose residual is larger
        than in healthy runs, and the library's message."""
        tensor = ctypes.c_size_t()
        if self._call("check", ctypes.byref(tensor)) == Status.WARNING:
            return tensor.value, last_message()
        return None


def _make_class(row):
    body = {
        "__doc__": f"{row.title} (onebit/{row.name}.h): {', '.join(row.fields)}, and the options of all "
        "optimizers.",
        "__module__": __name__,
        "_create": f"onebit_{row.name}_create",
        "_options": row.options,
    }
    return type(row.kind, (Optimizer,), body)


globals().update({row.kind: _make_class(row) for row in OPTIMIZERS})
__all__ = ["Optimizer", "Tensor", *NAMES]
