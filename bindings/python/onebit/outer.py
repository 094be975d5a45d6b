"""The outer step: local steps on every rank, and an exchange of drifts now and then."""

import ctypes
import sys
from typing import Any, Dict, Optional, Sequence

from onebit import _native
from onebit._native import Device, Dtype, OuterRule, Status
from onebit.buffers import buffer_of, wait_for_torch
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

        def create(*arguments):
            return _native.library().onebit_outer_create(comm.handle, *arguments)

        self._create(comm, create, parameters, uncompressed, options)

    def _create(self, comm, create, parameters, uncompressed, options):
        handle = ctypes.c_void_p()
        try:
            described, filled = self._describe(parameters, uncompressed, options)
        except Exception:
            create(None, 1, None, ctypes.byref(handle))  # the others need not wait
            raise
        count = len(self._parameters)
        check(create(described, count, ctypes.byref(filled), ctypes.byref(handle)))
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
        wait_for_torch(self._parameters)
        return check(_native.library().onebit_outer_step(self.handle, weight))

    def synchronize(self) -> Status:
        """Exchanges everything, and makes the parameters equal on all ranks. Collective."""
        wait_for_torch(self._parameters)
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


class OuterSites(Outer):
    """The outer step of several sites (onebit_outer_create_sites), each of ranks that train as one.
    Collective over all ranks of all sites.

    site: a `Communicator` of this site; its rank 0 speaks for it
    between: on rank 0 of each site one of all of these, on all other ranks None
    patience: seconds that an exchange waits for sites that are late; 0: 10
    quorum: how many sites a round has at least; 0: more than half
    parameters, uncompressed, options: as of `Outer`

    Each site saves and loads parts of its own ranks.
    """

    def __init__(
        self,
        site: Communicator,
        between: Optional[Communicator],
        parameters: Sequence[Any],
        uncompressed: Sequence[int] = (),
        patience: float = 0.0,
        quorum: int = 0,
        **options: Any,
    ) -> None:
        self._handle = None
        self._between = between
        rank_0s = between.handle if between else None

        def create(tensors, count, filled, handle):
            sites = _native.sized(_native.SitesOptions)
            sites.patience, sites.quorum = patience, quorum
            return _native.library().onebit_outer_create_sites(
                site.handle, rank_0s, tensors, count, filled, ctypes.byref(sites), handle
            )

        self._create(site, create, parameters, uncompressed, options)

    def sites(self) -> Dict[str, Any]:
        """How sites stand: the fields of onebit_sites_info_t by name."""
        info = _native.sized(_native.SitesInfo)
        check(_native.library().onebit_outer_get_sites(self.handle, ctypes.byref(info)))
        return _native.fields_of(info)

    def move(self, between: Optional[Communicator]) -> None:
        """Goes on with other sites. Collective over all their ranks; None but on rank 0 of a
        site."""
        check(self._function("move")(self.handle, between.handle if between else None))
        self._between = between

    def shrink(self) -> Optional[Communicator]:
        """When a site was lost: goes on with the others. Collective over these; what joins them
        from now on, None but on rank 0 of a site."""
        handle = ctypes.c_void_p()
        status = self._function("shrink")(self.handle, ctypes.byref(handle))
        if handle:
            self._between = Communicator(handle, self._between._keeps, self._between.transport)
        check(status)
        return self._between


def _is_torch(thing):
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(thing, torch.Tensor)
