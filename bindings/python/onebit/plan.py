"""Plans, the collectives, and requests."""

from __future__ import annotations

import array
import ctypes
import sys
from typing import TYPE_CHECKING, Any

from onebit import _native
from onebit._native import Device, Dtype, Operation, Status, argument_error, check
from onebit.buffers import buffer_of, current_stream, is_tensor, make_room, wait_for_torch
from onebit.communicator import Communicator, Member

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from onebit._interface import PlanKeywords

# Plans that the program dropped while a request was in flight: neither the plans nor the request's memory can
# be freed.
_left_in_flight = []


def _function_of(operation, prefix="", suffix=""):
    return getattr(_native.library(), f"onebit_{prefix}{operation.name.lower()}{suffix}")


class Request:
    """A nonblocking call in flight. It keeps its buffers alive until the call is finished."""

    def __init__(self, plan, handle, buffers, copy_back):
        self._plan, self._copy_back = plan, copy_back
        self._handle = handle
        self._buffers = buffers
        self._status = None

    def _advance(self, function):
        if self._status is not None:
            return self._status
        code = function(ctypes.byref(self._handle))
        if code == Status.IN_PROGRESS:
            return Status.IN_PROGRESS
        self._plan._request = self._buffers = None
        self._status = Status(code)
        self._copy_back(code)
        return check(code)

    def test(self) -> Status:
        """Advances the call. Returns IN_PROGRESS, or its final status, which is OK or SKIPPED. Raises
        `Error`."""
        return self._advance(_native.library().onebit_test)

    def wait(self) -> Status:
        """Waits for the end of the call. Returns OK or SKIPPED. Raises `Error`."""
        return self._advance(_native.library().onebit_wait)


class Plan(Member):
    """The decisions and the memory for the exchange of one tensor. Each tensor has its own plan, which stores
    the tensor's residual. Collective: all ranks must create it, with the same count and options.

    comm: a `Communicator`
    count: the number of elements, as the operation counts them
    Torch tensors on a device are copied to memory of the host and back, unless the plan has device="cuda".

    options: the fields of onebit_plan_options_t by name; enums may be members or strings
        (`operation="reduce_scatter"`, `dtype="bfloat16"`, `wire="dense"`, `schedule="exchange"`)
    """

    _noun = "the plan"
    _request = _stage = None

    def __init__(self, comm: Communicator, count: int, **options: Unpack[PlanKeywords]) -> None:
        create = _native.library().onebit_plan_create
        try:
            filled = _native.set_options(_native.make_structure(_native.PlanOptions), options)
            if not 0 <= count < 2**63:
                raise argument_error(f"count is {count}: it must be at least 0 and below 2**63")
        except Exception:
            create(comm.handle, 0, None, None)  # the library rejects this, so that no other rank waits
            raise
        self.on_device = filled.device == Device.DEVICE_CUDA
        if self.on_device:
            make_room(count)
        handle = ctypes.c_void_p()
        check(create(comm.handle, count, ctypes.byref(filled), ctypes.byref(handle)))
        self.count = count
        self.operation = Operation(filled.operation)
        self.dtype = Dtype(filled.dtype)
        self._begin(comm, handle)

    def _counts(self):
        size = self._comm.size
        return (
            self.count * (size if self.operation == Operation.REDUCE_SCATTER else 1),
            self.count * (size if self.operation == Operation.ALLGATHER else 1),
        )

    def _buffer(self, thing, name, count, writable):
        found = buffer_of(thing, name, writable, self.on_device)
        if found.dtype != self.dtype:
            raise argument_error(f"{name} has type {found.dtype.name}, but the plan has type {self.dtype.name}")
        if found.count != count:
            raise argument_error(f"{name} has {found.count} elements, not {count}")
        return found

    def _buffers(self, sendbuf, recvbuf, operation):
        """Returns two buffers, and a function that ends a call and takes its status. If an array cannot be
        used, makes a call that the library rejects on all ranks, so that no rank waits."""
        send, receive = self._counts()
        try:
            if operation != self.operation:
                raise argument_error(f"the plan is for {self.operation.name}, not for {operation.name}")
            source = self._on_host(sendbuf, "sendbuf", True)
            result = self._on_host(recvbuf, "recvbuf", False)
            first = self._buffer(source, "sendbuf", send, False)
            second = self._buffer(result, "recvbuf", receive, True)
        except Exception:
            other = next(one for one in Operation if one != self.operation)
            _function_of(other)(None, None, self.handle)
            raise

        def copy_back(code):
            if result is not recvbuf and code == Status.OK:
                recvbuf.detach().copy_(result)

        return (first, second), copy_back

    def _on_host(self, thing, name, filled):
        """Returns an array that the library can use. For a tensor on a device this is a copy, which has the
        tensor's values if `filled` is true."""
        device = thing.device.type if is_tensor(thing) else "cpu"
        if self.on_device or device in ("cpu", "meta"):
            return thing
        if self._stage is None:
            from onebit.torch.staged import Stage

            self._stage = Stage()
        if not filled:
            return self._stage.gradient(name, thing)
        copy, wait = self._stage.begin(name, thing.detach())
        wait()
        return copy

    def _call(self, sendbuf, recvbuf, operation):
        buffers, copy_back = self._buffers(sendbuf, recvbuf, operation)
        addresses = [one.address for one in buffers]
        if self.on_device:
            function = _function_of(operation, suffix="_stream")
            return check(function(*addresses, self.handle, current_stream(buffers[1])))
        code = _function_of(operation)(*addresses, self.handle)
        copy_back(code)
        return check(code)

    def _start(self, sendbuf, recvbuf, operation):
        buffers, copy_back = self._buffers(sendbuf, recvbuf, operation)
        function, plan, handle = _function_of(operation, "i"), self.handle, ctypes.c_void_p()
        wait_for_torch(buffers)
        check(function(buffers[0].address, buffers[1].address, plan, ctypes.byref(handle)))
        self._request = Request(self, handle, buffers, copy_back)
        return self._request

    def allreduce(self, sendbuf: Any, recvbuf: Any) -> Status:
        """Stores the mean of sendbuf over the ranks in recvbuf, which may be the same array. Returns OK or
        SKIPPED. Collective, and so are the next five functions.

        With device="cuda" the call runs on torch's current stream (for other arrays on the default stream).
        Over NCCL it returns OK at once, and `synchronize` returns the status."""
        return self._call(sendbuf, recvbuf, Operation.ALLREDUCE)

    def allgather(self, sendbuf: Any, recvbuf: Any) -> Status:
        """Stores rank r's sendbuf in recvbuf[r], for all ranks r."""
        return self._call(sendbuf, recvbuf, Operation.ALLGATHER)

    def reduce_scatter(self, sendbuf: Any, recvbuf: Any) -> Status:
        """Stores the mean over the ranks of sendbuf[this rank] in recvbuf."""
        return self._call(sendbuf, recvbuf, Operation.REDUCE_SCATTER)

    def iallreduce(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Begins `allreduce`. Until the `Request` is finished, the program must not use the arrays."""
        return self._start(sendbuf, recvbuf, Operation.ALLREDUCE)

    def iallgather(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Begins `allgather`."""
        return self._start(sendbuf, recvbuf, Operation.ALLGATHER)

    def ireduce_scatter(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Begins `reduce_scatter`."""
        return self._start(sendbuf, recvbuf, Operation.REDUCE_SCATTER)

    def synchronize(self) -> Status:
        """With device="cuda": waits for the calls on streams. Returns the status of the first call since the
        last `synchronize` that was not OK, or OK."""
        return check(_native.library().onebit_plan_synchronize(self.handle))

    def calls(self) -> tuple[int, int]:
        """With device="cuda" over NCCL: returns how many calls on streams have succeeded, and how many were
        skipped, as far as the host knows at this time."""
        made, skipped = ctypes.c_uint64(), ctypes.c_uint64()
        function = _native.library().onebit_plan_get_calls
        check(function(self.handle, ctypes.byref(made), ctypes.byref(skipped)))
        return made.value, skipped.value

    def scale_result(self, recvbuf: Any, factor: float) -> None:
        """With device="cuda" over NCCL: multiplies the latest call's result, on the same stream. The result
        of a skipped call becomes not-a-number."""
        found = self._buffer(recvbuf, "recvbuf", self._counts()[1], True)
        function = _native.library().onebit_scale_result_stream
        check(function(found.address, factor, self.handle, current_stream(found)))

    def info(self) -> dict[str, Any]:
        """Returns the decisions of the plan: the fields of onebit_plan_info_t by name."""
        return _native.call_getter(_native.library().onebit_plan_get_info, self.handle, _native.PlanInfo)

    def explain(self) -> str:
        """Returns the reasons for the plan's choice of a schedule."""
        return _native.library().onebit_plan_explain(self.handle).decode()

    def export_residual(self) -> tuple[Any, Any]:
        """Returns the worker's and the server's residual: two array.array of float32."""
        info = self.info()
        worker = array.array("f", bytes(4 * info["worker_residual_count"]))
        server = array.array("f", bytes(4 * info["server_residual_count"]))
        function = _native.library().onebit_plan_export_residual
        check(function(self.handle, worker.buffer_info()[0], server.buffer_info()[0]))
        return worker, server

    def import_residual(self, worker: Any = None, server: Any = None) -> None:
        """Sets the residuals. They are float32 arrays of the same lengths as those of `export_residual`; None
        leaves a residual unchanged."""
        info, addresses, kept = self.info(), [], []
        for name, thing in (("worker", worker), ("server", server)):
            found = buffer_of(thing, name) if thing is not None else None
            count = info[f"{name}_residual_count"]
            if found and (found.dtype != Dtype.FLOAT32 or found.count != count):
                raise argument_error(f"{name} has {found.count} {found.dtype.name}, not {count} FLOAT32")
            kept.append(found)
            addresses.append(found.address if found else None)
        check(_native.library().onebit_plan_import_residual(self.handle, *addresses))

    def set_bits(self, bits: int) -> None:
        """Sets the bits an element of the next call. Must be the same on all ranks. When a plan continues
        from a checkpoint, this is `bits` of the saved plan's info()."""
        check(_native.library().onebit_plan_set_bits(self.handle, bits))

    def reset_residual(self) -> None:
        """Sets the residuals to zero."""
        check(_native.library().onebit_plan_reset_residual(self.handle))

    def reset(self) -> None:
        """Makes the plan usable again after ERROR_MESSAGE. All ranks must call it, after the program has made
        its results equal on all ranks. Sets the residuals to zero."""
        check(_native.library().onebit_plan_reset(self.handle))

    def close(self) -> None:
        """Frees the plan. Raises `Error` (ERROR_BUSY) if a request is in flight."""
        if self._handle and not self._comm._is_foreign():
            check(_native.library().onebit_plan_destroy(self._handle))
            self._comm._leave(self)
        self._handle = None

    def __del__(self):
        if not self._handle or sys.is_finalizing():
            return
        if self._request is not None:
            _left_in_flight.append((self._comm, self._handle, self._request._buffers))
        else:
            self.close()
