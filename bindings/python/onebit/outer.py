"""The outer step: local steps on every rank, and an exchange of drifts now and then."""

import ctypes
import sys
from typing import Any, Dict, Optional, Sequence

from onebit import _native
from onebit._native import Device, Dtype, OuterRule, Status
from onebit.buffers import buffer_of
from onebit.communicator import Communicator
from onebit.errors import check, last_message, wrong
from onebit.stateful import Stateful


class Outer(Stateful):
    """The outer step of a list of parameters (onebit/outer.h is the manual). Collective.

    comm: a `Communicator`
    parameters: numpy arrays or torch tensors, all of one type and either on the processor or on the
        current CUDA device; equal on all ranks, trained and set in place. The inner optimizer is
        the caller's.
    uncompressed: the numbers of those that are exchanged in float32
    options: the fields of onebit_outer_options_t by name (`rule="nesterov"`, `bits=4`);
        parameter_dtype and device are those of the arrays

        outer = onebit.Outer(comm, list(model.parameters()), local_steps=30)
        for batch in batches:
            train(batch)              # no communication
            outer.step()              # every 30th time the exchange
        outer.synchronize()
    """

    _prefix = "onebit_outer"
    _words = "the outer step"

    def __init__(
        self,
        comm: Communicator,
        parameters: Sequence[Any],
        uncompressed: Sequence[int] = (),
        **options: Any,
    ) -> None:
        self._handle = None
        create = _native.library().onebit_outer_create
        handle = ctypes.c_void_p()
        try:
            described, filled = self._describe(parameters, uncompressed, options)
        except Exception:
            create(comm.handle, None, 1, None, ctypes.byref(handle))  # the others need not wait
            raise
        count = len(self._parameters)
        check(create(comm.handle, described, count, ctypes.byref(filled), ctypes.byref(handle)))
        self._begin(comm, handle)

    def _describe(self, parameters, uncompressed, options):
        self._arrays = [getattr(one, "data", one) if _is_torch(one) else one for one in parameters]
        cuda = any(_is_torch(one) and one.device.type == "cuda" for one in self._arrays)
        self._parameters = [
            buffer_of(one, f"parameters[{number}]", True, cuda)
            for number, one in enumerate(self._arrays)
        ]
        first = self._parameters[0].dtype if self._parameters else Dtype.FLOAT32
        filled = _native.fill(
            _native.sized(_native.OuterOptions),
            {
                "parameter_dtype": first,
                "device": Device.DEVICE_CUDA if cuda else Device.DEVICE_HOST,
                **options,
            },
        )
        for number, one in enumerate(self._parameters):
            if one.dtype != filled.parameter_dtype:
                wanted = Dtype(filled.parameter_dtype).name
                raise wrong(f"parameters[{number}] is of {one.dtype.name}, not {wanted}")
        wrong_numbers = [number for number in uncompressed if not 0 <= number < len(self._arrays)]
        if wrong_numbers:
            raise wrong(f"uncompressed has {wrong_numbers[0]}, of {len(self._arrays)} parameters")
        described = (_native.TensorDescription * max(len(self._parameters), 1))()
        for number, (place, one) in enumerate(zip(described, self._parameters)):
            place.parameter = one.address if one.count else None
            place.count = one.count
            place.uncompressed = number in uncompressed
        return described, filled

    def step(self, weight: float = 1.0) -> Status:
        """Counts a local step, which with `weighted` counts as `weight` says, and exchanges what is
        due: OK; or SKIPPED, and nothing of that exchange is applied."""
        return check(_native.library().onebit_outer_step(self.handle, weight))

    def synchronize(self) -> Status:
        """Exchanges everything, and makes the parameters equal on all ranks. Collective."""
        return check(_native.library().onebit_outer_synchronize(self.handle))

    def consensus(self, number: int, out: Any) -> Any:
        """Copies the consensus of parameter `number` to `out`, which is of float32, and returns
        it."""
        found = buffer_of(out, "out", True)
        count = self._parameters[number].count if 0 <= number < len(self._parameters) else None
        if found.dtype != Dtype.FLOAT32:
            raise wrong(f"out is of {found.dtype.name}, not FLOAT32")
        if count is None or found.count != count:
            raise wrong(f"out has {found.count} elements, parameter {number} has {count or 'none'}")
        check(_native.library().onebit_outer_get_consensus(self.handle, number, found.address))
        return out

    def info(self) -> Dict[str, Any]:
        """How it stands: the fields of onebit_outer_info_t by name."""
        info = _native.sized(_native.OuterInfo)
        check(_native.library().onebit_outer_get_info(self.handle, ctypes.byref(info)))
        return {**_native.fields_of(info), "rule": OuterRule(info.rule)}

    def check(self) -> Optional[str]:
        """None; or what wants to be changed: too few bits for the rule, or a large residual."""
        status = check(_native.library().onebit_outer_check(self.handle))
        return last_message() if status == Status.WARNING else None


def _is_torch(thing):
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(thing, torch.Tensor)
