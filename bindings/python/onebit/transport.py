"""Transports in Python: `Transport` is onebit/custom.h's callbacks as a class to derive from."""

import ctypes
import itertools
import threading
from typing import Optional

from onebit import _native
from onebit._native import Status

FAILED = -1


class Operation:
    """A message that is being received. `memory` is where it belongs: as many bytes as the message
    may have at most, valid until the operation is complete or cancelled."""

    def __init__(self, memory: memoryview, peer: int, tag: int) -> None:
        self.memory = memory
        self.peer = peer
        self.tag = tag


class Transport:
    """Moves bytes between ranks: derive from it, and give it to `Communicator.custom`.

    `send` copies what it is given, or has sent it when it returns; so only receiving is an
    operation that takes time. What these methods raise ends the communicator on this rank with
    ERROR_TRANSPORT and the exception's words, and `abort` is called. They are called by any thread
    that uses the communicator, by several at once if the program does so, and must not use the
    communicator. include/onebit/custom.h says in which order messages must arrive.
    """

    def send(self, data: memoryview, peer: int, tag: int) -> None:
        """Sends a message: `data` is a memoryview that is only valid during the call."""
        raise NotImplementedError

    def receive(self, operation: Operation) -> None:
        """Begins to receive into `operation.memory`; `operation` is an `Operation`."""

    def test(self, operation: Operation, seconds: float) -> Optional[int]:
        """The length of the message, or None when it has not arrived; may wait up to `seconds`."""
        raise NotImplementedError

    def cancel(self, operation: Operation) -> None:
        """Gives the operation up: its memory must not be written to any more."""

    def abort(self) -> None:
        """Called when this rank has failed: makes the other ranks' receives from it fail."""

    def release(self) -> None:
        """The communicator is closed."""


def _memory_view(address, count):
    """`count` bytes of the library's memory, without a copy."""
    return memoryview((ctypes.c_char * count).from_address(address)).cast("B")


class Callbacks:
    """A transport as the library sees it. Keeps operations alive, and the words of exceptions: an
    exception that left a callback (of ctypes) would be taken for success, so none does, not even
    KeyboardInterrupt. What `cancel`, `abort` and `release` raise goes to sys.unraisablehook."""

    def __init__(self, transport, host, largest_tag, timeout):
        self.transport = transport
        self.operations = {}
        self.numbers = itertools.count(1)
        self.local = threading.local()
        table = _native.make_structure(_native.TransportCallbacks)
        types = dict(_native.TransportCallbacks._fields_)
        for name, function in {
            "send": self._send, "receive": self._receive, "test": self._test, "cancel": self._cancel,
            "abort": lambda context: transport.abort(), "message": self._words,
            "release": lambda context: transport.release(),
        }.items():  # fmt: skip
            setattr(table, name, types[name](function))
        table.host = host.encode() if host is not None else None
        table.largest_tag = largest_tag
        table.timeout = timeout
        self.table = table

    def _failed(self, reason):
        words = f"{type(reason).__name__}: {reason}".splitlines() or [type(reason).__name__]
        self.local.words = ctypes.create_string_buffer(words[0][:300].encode())
        return FAILED

    def _words(self, context, code):
        words = getattr(self.local, "words", None)
        return ctypes.addressof(words) if words is not None else None

    def _send(self, context, data, count, peer, tag, operation):
        try:
            self.transport.send(_memory_view(data, count), peer, tag)
            return Status.OK
        except BaseException as reason:  # noqa: BLE001
            return self._failed(reason)

    def _receive(self, context, data, count, peer, tag, operation):
        try:
            begun = Operation(_memory_view(data, count), peer, tag)
            self.transport.receive(begun)
        except BaseException as reason:  # noqa: BLE001
            return self._failed(reason)
        number = next(self.numbers)
        self.operations[number] = begun
        operation[0] = number
        return Status.OK

    def _test(self, context, number, seconds, count):
        try:
            arrived = self.transport.test(self.operations[number], seconds)
        except BaseException as reason:  # noqa: BLE001
            return self._failed(reason)
        if arrived is None:
            return Status.IN_PROGRESS
        del self.operations[number]
        count[0] = arrived
        return Status.OK

    def _cancel(self, context, number):
        self.transport.cancel(self.operations.pop(number))
