"""The outer step: every rank trains alone for a number of local steps, then the ranks exchange how far their
parameters have moved."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any, Sequence

from onebit import _native
from onebit._native import Device, Dtype, Status, argument_error, check, last_message
from onebit.buffers import buffer_of, check_dtypes, is_tensor, wait_for_torch
from onebit.communicator import Communicator
from onebit.optimizer import Stateful

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from onebit._interface import OuterKeywords


class Outer(Stateful):
    """The outer step for a list of parameters (onebit/outer.h is the manual). Collective.

    comm: a `Communicator`
    parameters: numpy arrays or torch tensors of one type. They must be equal on all ranks, and are changed
        in place
    uncompressed: the numbers of the parameters that are exchanged in float32
    stage: for tensors on a device, as in `onebit.torch`'s optimizers. Parameters are copied in steps that
        exchange; with fragments, a delay or several sites in all steps
    options: the fields of onebit_outer_options_t by name (`rule="nesterov"`, `bits=4`);
        parameter_dtype and device are those of the arrays

        outer = onebit.Outer(comm, list(model.parameters()), local_steps=30)
        for batch in batches:
            train(batch)              # no communication
            outer.step()              # every 30th call exchanges
        outer.synchronize()
    """

    _prefix = "onebit_outer"
    _noun = "the outer step"

    def __init__(
        self,
        comm: Communicator,
        parameters: Sequence[Any],
        uncompressed: Sequence[int] = (),
        stage: str = "auto",
        **options: Unpack[OuterKeywords],
    ) -> None:
        create = functools.partial(_native.library().onebit_outer_create, comm.handle)
        self._create(comm, create, parameters, uncompressed, stage, options)

    def _create(self, comm, create, parameters, uncompressed, stage, options):
        handle = ctypes.c_void_p()
        self._position = None  # local steps since an exchange was due; None: not known
        try:
            parameters = self._stage_parameters(parameters, stage)
            described, filled = self._describe(parameters, uncompressed, options)
        except Exception:
            create(None, 1, None, ctypes.byref(handle))  # fails on all ranks, so that no rank waits
            raise
        count = len(self._parameters)
        check(create(described, count, ctypes.byref(filled), ctypes.byref(handle)))
        self._begin(comm, handle)
        if self._stage is not None:
            self._stage.copy_back()  # the library may have rounded the parameters
            info = self.info()
            self._local_steps = info["local_steps"]
            if info["fragments"] == 1 and not info["delay"]:
                self._position = 0

    def _stage_parameters(self, parameters, stage):
        """Returns the parameters. Those on a device are replaced by copies."""
        self._stage, parameters = None, list(parameters)
        tensors = [one for one in parameters if is_tensor(one)]
        if not tensors:
            return parameters
        from onebit.torch.staged import Stage, is_staged
        from onebit.torch.state import flat

        if not is_staged(stage, tensors):
            return parameters
        self._stage, given = Stage(), parameters
        for number, one in enumerate(given):
            elements = flat(one.detach()) if is_tensor(one) else None
            if elements is not None:
                parameters[number] = self._stage.add(elements, one)
        return parameters

    def _is_due(self):
        """True if the next step may read or set parameters."""
        if self._position is None:
            return True
        self._position = self._position % self._local_steps + 1
        return self._position == self._local_steps

    def _call(self, function, *arguments):
        """Calls a function that may read and set parameters."""
        if self._stage is None:
            wait_for_torch(self._parameters)
            return check(function(self.handle, *arguments))
        self._stage.take()
        try:
            return check(function(self.handle, *arguments))
        finally:
            self._stage.copy_back()

    def _describe(self, parameters, uncompressed, options):
        self._arrays = [getattr(one, "data", one) if is_tensor(one) else one for one in parameters]
        cuda = any(is_tensor(one) and one.device.type == "cuda" for one in self._arrays)
        self._parameters = [
            buffer_of(one, f"parameters[{number}]", True, cuda)
            for number, one in enumerate(self._arrays)
        ]
        first = self._parameters[0].dtype if self._parameters else Dtype.FLOAT32
        filled = _native.set_options(
            _native.make_structure(_native.OuterOptions),
            {
                "parameter_dtype": first,
                "device": Device.DEVICE_CUDA if cuda else Device.DEVICE_HOST,
                **options,
            },
        )
        check_dtypes(self._parameters, "parameters[{}]", filled.parameter_dtype)
        wrong_numbers = [number for number in uncompressed if not 0 <= number < len(self._arrays)]
        if wrong_numbers:
            raise argument_error(f"uncompressed has number {wrong_numbers[0]}, but there are "
                                 f"{len(self._arrays)} parameters")  # fmt: skip
        described = (_native.Tensor * max(len(self._parameters), 1))()
        for number, (place, one) in enumerate(zip(described, self._parameters)):
            place.parameter = one.address if one.count else None
            place.count = one.count
            place.uncompressed = number in uncompressed
        return described, filled

    def step(self, weight: float = 1.0) -> Status:
        """Counts a local step, with `weight` if `weighted` is set, and makes the exchange that is due.
        Returns OK, or SKIPPED if nothing of the exchange is applied."""
        function = _native.library().onebit_outer_step
        if self._stage is not None and not self._is_due():
            return check(function(self.handle, weight))
        return self._call(function, weight)

    def synchronize(self) -> Status:
        """Exchanges everything, and makes the parameters equal on all ranks. Collective."""
        return self._call(_native.library().onebit_outer_synchronize)

    def _take(self):
        if self._stage is not None:
            self._stage.take()

    def _changed(self):
        if self._stage is not None:
            self._stage.copy_back()
            self._position = None  # the next exchange may be due at any step

    def consensus(self, number: int, out: Any) -> Any:
        """Copies the consensus of parameter `number` to `out`, a float32 array, and returns `out`."""
        found = buffer_of(out, "out", True)
        count = self._parameters[number].count if 0 <= number < len(self._parameters) else None
        if found.dtype != Dtype.FLOAT32:
            raise argument_error(f"out has type {found.dtype.name}, not FLOAT32")
        if count is None or found.count != count:
            raise argument_error(f"out has {found.count} elements, but parameter {number} has {count or 'none'}")
        check(_native.library().onebit_outer_get_consensus(self.handle, number, found.address))
        return out

    def info(self) -> dict[str, Any]:
        """Returns the state of the outer step in numbers: the fields of onebit_outer_info_t by name."""
        return _native.call_getter(self._function("get_info"), self.handle, _native.OuterInfo)

    def check(self) -> str | None:
        """Returns None, or a warning as text: too few bits for the rule, or a large residual."""
        status = check(_native.library().onebit_outer_check(self.handle))
        return last_message() if status == Status.WARNING else None


class OuterSites(Outer):
    """The outer step of several sites (onebit_outer_create_sites). The ranks of a site train together.
    Collective over all ranks of all sites.

    site: a `Communicator` of the ranks of this site; its rank 0 exchanges with the other sites
    between: on rank 0 of each site a `Communicator` of all these rank 0s; on all other ranks None
    patience: seconds that an exchange waits for late sites; 0: 10
    quorum: the smallest number of sites in a round; 0: more than half
    parameters, uncompressed, options: as in `Outer`

    Each site saves and loads only the parts of its own ranks.
    """

    def __init__(
        self,
        site: Communicator,
        between: Communicator | None,
        parameters: Sequence[Any],
        uncompressed: Sequence[int] = (),
        patience: float = 0.0,
        quorum: int = 0,
        stage: str = "auto",
        **options: Unpack[OuterKeywords],
    ) -> None:
        self._between = between
        rank_0s = between.handle if between else None

        def create(tensors, count, filled, handle):
            sites = _native.make_structure(_native.SitesOptions)
            sites.patience, sites.quorum = patience, quorum
            return _native.library().onebit_outer_create_sites(
                site.handle, rank_0s, tensors, count, filled, ctypes.byref(sites), handle
            )

        self._create(site, create, parameters, uncompressed, stage, options)
        self._position = None

    def sites(self) -> dict[str, Any]:
        """Returns the state of the sites in numbers: the fields of onebit_sites_info_t by name."""
        return _native.call_getter(self._function("get_sites"), self.handle, _native.SitesInfo)

    def move(self, between: Communicator | None) -> None:
        """Continues with other sites. Collective over all ranks of these sites. `between` is None except on
        rank 0 of a site."""
        self._take()
        check(self._function("move")(self.handle, between.handle if between else None))
        self._changed()
        self._between = between

    def shrink(self) -> Communicator | None:
        """Continues with the remaining sites after one was lost. Collective over the remaining sites.
        Returns the communicator between them on rank 0 of a site, and None on other ranks."""
        handle = ctypes.c_void_p()
        self._take()
        status = self._function("shrink")(self.handle, ctypes.byref(handle))
        self._changed()
        if handle:
            self._between = Communicator(handle, self._between._keeps, self._between.transport)
        check(status)
        return self._between
