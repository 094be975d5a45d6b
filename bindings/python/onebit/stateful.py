"""What optimizers and the outer step have in common: they keep state on a communicator, save and
load it, and go on with other ranks."""

import ctypes
import os
import sys
from typing import Any, Sequence

from onebit import _native
from onebit.communicator import Communicator
from onebit.errors import check, wrong


class Stateful:
    """A derived class sets `_handle` to None before anything can fail, calls `_begin` with what its
    create function made, and says how its calls are named."""

    _prefix = None  # of the functions in C: "onebit_optimizer"
    _words = None  # in messages: "the optimizer"

    def _begin(self, comm, handle):
        self._handle = handle
        self._comm = comm
        comm._join(self)

    def _function(self, name):
        return getattr(_native.library(), f"{self._prefix}_{name}")

    @property
    def handle(self) -> ctypes.c_void_p:
        """The handle of C; raises `Error` after `close`."""
        if not self._handle:
            raise wrong(f"{self._words} is closed")
        self._comm._check_process()
        return self._handle

    def save(self) -> bytes:
        """This rank's part of a checkpoint; of an outer step by all ranks after the same exchanges
        have begun."""
        return self._saved("save")

    def _saved(self, name):
        function = self._function(name)
        count = ctypes.c_size_t()
        check(function(self.handle, None, 0, ctypes.byref(count)))
        part = ctypes.create_string_buffer(count.value)
        check(function(self.handle, part, count.value, ctypes.byref(count)))
        return part.raw[: count.value]

    def load(self, parts: Sequence[bytes]) -> None:
        """Takes the state, parameters too, from the parts of all ranks that saved, in their order.
        Collective."""
        parts = [bytes(part) for part in parts]
        pointers = (ctypes.c_void_p * max(len(parts), 1))()
        sizes = (ctypes.c_size_t * max(len(parts), 1))()
        for place, part in enumerate(parts):
            pointers[place] = ctypes.cast(ctypes.c_char_p(part), ctypes.c_void_p).value
            sizes[place] = len(part)
        check(self._function("load")(self.handle, pointers, sizes, len(parts)))

    def save_files(self, directory: "os.PathLike[str] | str") -> None:
        """Saves into a directory that all ranks see. Collective."""
        check(self._function("save_files")(self.handle, os.fsencode(directory)))

    def load_files(self, directory: "os.PathLike[str] | str") -> None:
        """Loads what `save_files` saved there last. Collective."""
        check(self._function("load_files")(self.handle, os.fsencode(directory)))

    def move(self, comm: Communicator) -> None:
        """Goes on with other ranks: those that are left, or that have come. Collective over comm.
        The old communicator can be closed afterwards."""
        check(self._function("move")(self.handle, comm.handle))
        self._change(comm)

    def shrink(self) -> Communicator:
        """When a rank was lost: goes on with the others. Collective over them; the communicator
        that they have from now on."""
        handle = ctypes.c_void_p()
        status = self._function("shrink")(self.handle, ctypes.byref(handle))
        kept, transport = self._comm._keeps, self._comm.transport
        made = Communicator(handle, kept, transport) if handle else None
        if made:
            made._collective = self._comm._collective
        self._latest = made  # also after a failure: the next call begins from it
        check(status)
        self._change(made)
        return made

    def _change(self, comm):
        comm._join(self)
        self._comm._members.discard(self)
        self._comm._leave(self)
        self._comm = comm

    def close(self) -> None:
        """Gives it back; the arrays stay as they are. Collective while a step of an optimizer is
        open."""
        if self._handle:
            handle, self._handle = self._handle, None
            if self._comm._is_foreign():
                return
            self._function("destroy")(handle)
            self._comm._leave(self)

    def __enter__(self):
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def __del__(self):
        if getattr(self, "_handle", None) and not sys.is_finalizing():
            self.close()
