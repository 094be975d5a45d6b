"""Transports in Python: `Transport` is a base class for the callbacks of onebit/custom.h."""

import ctypes
import itertools
import threading
from typing import Optional

from onebit import _native
from onebit._native import Status

FAILED = -1


class Operation:
    """A message that is being received into `memory`. The memory has the largest size that the
    message may have, and is valid until the operation is complete or cancelled."""

    def __init__(self, memory: memoryview, peer: int, tag: int) -> None:
        self.memory = memory
        self.peer = peer
        self.tag = tag


class Transport:
    """Moves bytes between ranks. Derive a class from it, and pass an object of that class to
    `Communicator.custom`.

    When `send` returns, it has sent or copied the message; only a receive is an operation that
    takes time. An exception in these methods ends the communicator on this rank with
    ERROR_TRANSPORT and the text of the exception, and `abort` is called. Any thread that uses the
    communicator calls the methods, several threads at once if the program does so. The methods must
    not use the communicator. include/onebit/custom.h defines the order in which messages must
    arrive.
    """

    def send(self, data: memoryview, peer: int, tag: int) -> None:
        """Sends a message. `data` is a memoryview that is valid only during the call."""
        raise NotImplementedError

    def receive(self, operation: Operation) -> None:
        """Begins to receive a message into `operation.memory`."""

    def test(self, operation: Operation, seconds: float) -> Optional[int]:
        """Returns the length of the message, or None if it has not arrived. May wait up to `seconds`."""
        raise NotImplementedError

    def cancel(self, operation: Operation) -> None:
        """Cancels the operation. Its memory must not be written to any more."""

    def abort(self) -> None:
        """Called when this rank has failed. Makes the other ranks' receives from this rank fail."""

    def release(self) -> None:
        """Called when the communicator is closed."""


def _memory_view(address, count):
    """Returns `count` bytes of the library's memory as a view, without a copy."""
    return memoryview((ctypes.c_char * count).from_address(address)).cast("B")


class Callbacks:
    """The callbacks of a transport for the library. Keeps operations and the texts of exceptions
    alive. ctypes treats an exception in a callback as success, so every exception is caught, even
    KeyboardInterrupt. Exceptions of `cancel`, `abort` and `release` go to sys.unraisablehook."""

    def __init__(self, transport, host, largest_tag, timeout):
        self.transport = transport
        self.operations = {}
        self.numbers = itertools.count(1)
        self.local = threading.local()
        table = _native.make_structure(_native.TransportCallbacks)
        types = dict(_native.TransportCallbacks._fields_)
        for name, function in {
            "send": self._guard(self._send), "receive": self._guard(self._receive),
            "test": self._guard(self._test), "cancel": self._cancel, "message": self._message,
            "abort": lambda context: transport.abort(),
            "release": lambda context: transport.release(),
        }.items():  # fmt: skip
            setattr(table, name, types[name](function))
        table.host = host.encode() if host is not None else None
        table.largest_tag = largest_tag
        table.timeout = timeout
        self.table = table

    def _guard(self, function):
        def call(*arguments):
            try:
                return function(*arguments)
            except BaseException as reason:  # noqa: BLE001
                line = f"{type(reason).__name__}: {reason}".splitlines()[0]
                self.local.message = ctypes.create_string_buffer(line[:300].encode())
                return FAILED

        return call

    def _message(self, context, code):
        message = getattr(self.local, "message", None)
        return ctypes.addressof(message) if message is not None else None

    def _send(self, context, data, count, peer, tag, operation):
        self.transport.send(_memory_view(data, count), peer, tag)
        return Status.OK

    def _receive(self, context, data, count, peer, tag, operation):
        begun = Operation(_memory_view(data, count), peer, tag)
        self.transport.receive(begun)
        number = next(self.numbers)
        self.operations[number] = begun
        operation[0] = number
        return Status.OK

    def _test(self, context, number, seconds, count):
        arrived = self.transport.test(self.operations[number], seconds)
        if arrived is None:
            return Status.IN_PROGRESS
        del self.operations[number]
        count[0] = arrived
        return Status.OK

    def _cancel(self, context, number):
        self.transport.cancel(self.operations.pop(number))
