"""Supports parameters on any device of torch, while the library works on the processor
(docs/python-optimizers.md#on-a-gpu-through-the-host).

The library reads and writes copies in memory of the host, which is pinned if the device has streams. During the
backward pass the gradients of one bucket are copied while the bucket before it is exchanged. After the step the
parameters are copied back, and the program's later work on its stream waits for these copies. Only torch
functions that exist for all devices are used.
"""

import collections
import os

import torch

from onebit import _native
from onebit._native import argument_error, warn

_CHOICES = "auto", "host", "device"
_INTEGERS = {2: torch.int16, 4: torch.int32}  # integer type, by the bytes of an element


def has_kernels():
    return hasattr(_native.library(), "onebit_optimizer_step_stream")


def is_staged(stage, parameters):
    """True if an optimizer of these parameters works on copies in memory of the host.

    stage: "host"; "device": the library's kernels are used; "auto": kernels for CUDA devices if the library has
        them, else copies. With ONEBIT_STAGE=always in the environment, tensors in the processor's memory are
        copied too.
    """
    if stage not in _CHOICES:
        raise argument_error(f"stage is {stage!r}, not one of {', '.join(_CHOICES)}")
    kinds = {one.device.type for one in parameters} - {"cpu"}
    if "meta" in kinds:
        return False  # there is nothing to copy; the library rejects such tensors
    may_use = kinds == {"cuda"} and has_kernels()
    if stage == "device" and kinds and not may_use:
        raise argument_error(f"stage is 'device', but the library has no kernels for {', '.join(sorted(kinds))}")
    if stage == "host" or is_staging_forced():
        return True
    return stage == "auto" and bool(kinds) and not may_use


def is_staging_forced():
    return os.environ.get("ONEBIT_STAGE") == "always"


def _stream_of(device):
    """Returns a stream for copies. None: copies are made at once, which is so for the processor's memory, for a
    device that is not an accelerator of torch, and with torch before 2.7."""
    accelerator = getattr(torch, "accelerator", None)
    if (
        accelerator is None
        or not hasattr(torch.Stream, "__enter__")
        or not accelerator.is_available()
        or accelerator.current_accelerator().type != device.type
    ):
        return None
    return torch.Stream(device=device)


class Homes:
    """Follows parameters that the program has given other memory (`one.data = ...`), while the library goes on in the
    memory of the beginning.

    parameters: the program's parameters
    local: a function that returns the elements that this rank has of a parameter
    """

    def __init__(self, parameters, local=lambda one: one):
        self._parameters, self._local = parameters, local
        self._homes = [local(one.detach()) for one in parameters]
        self._strides = [one.stride() for one in parameters]
        self._places = [one.data_ptr() for one in self._homes]
        self.moved = {}  # by number of a parameter, its present address, unless that is the one of the beginning

    @torch.no_grad()
    def bring(self):
        """Copies the moved parameters to the library's memory. Returns True if some parameter has moved since the
        latest call."""
        places = [self._local(one).data_ptr() for one in self._parameters]
        if places == self._places:
            found, self.moved = bool(self.moved), {}
            return found
        before, self.moved = self.moved, {}
        for number, (place, first) in enumerate(zip(places, self._places)):
            if place != first:
                self._bring_one(number)
                self.moved[number] = place
        return before != self.moved

    def _bring_one(self, number):
        one, home = self._parameters[number], self._homes[number]
        now = self._local(one.detach())
        same = (now.shape, now.dtype, now.device) == (home.shape, home.dtype, home.device)
        if not same or one.stride() != self._strides[number]:
            raise argument_error(f"parameter {number} has changed its size, strides, type or device (model.to() and "
                                 "the like): make the optimizer after that")  # fmt: skip
        home.copy_(now)

    @torch.no_grad()
    def take_back(self):
        """Copies what the library has written to the moved parameters."""
        for number in self.moved:
            self._local(self._parameters[number].detach()).copy_(self._homes[number])

    def during(self, call):
        """Returns the result of call(), which reads and writes the library's memory."""
        self.bring()
        result = call()
        self.take_back()
        return result


class Writes:
    """Finds the program's writes to parameters between two steps. A write through `.data` changes no version
    number. In some steps sums of the bits find such a write; from then on parameters count as written to in
    every step.

    sums: whether sums are computed, which waits for a device
    """

    def __init__(self, sums=True):
        self._has_sums = sums
        self._elements = []  # the flat tensors that are checked
        self._counted = []  # the program's tensors that contain these elements
        self._versions = []  # the tensors' versions at the time of `mark`
        self._steps = 0
        self._sums = []  # sums of the elements' bits after the latest step with a check
        self._is_untold = False

    def add(self, elements, parameter):
        self._elements.append(elements)
        self._counted.append(parameter)
        self._versions.append(parameter._version)

    def refresh(self):
        """Looks for writes since the latest step. Returns True if there was one."""
        changed = self._versions != self._found_versions()
        if not changed and not self._is_untold and self._is_looked_at():
            self._is_untold = self._sums != self._found_sums()
            if self._is_untold:
                warn(f"parameters were written to through .data after step {self._steps}. Writes through "
                     ".data after earlier steps were lost. From now on they are kept, but to find them each step "
                     "copies all parameters. Write to parameters under torch.no_grad() instead")
        return changed or self._is_untold

    def mark(self):
        """Treats the parameters' present values as the library's own, not as writes of the program."""
        self._versions = self._found_versions()

    def stepped(self):
        self.mark()
        self._steps += 1
        if not self._is_untold and self._is_looked_at():
            self._sums = self._found_sums()

    def _is_looked_at(self):
        """True in steps 1, 2, 4, 8, ..., and in every 64th step."""
        return self._has_sums and self._steps and (not self._steps & (self._steps - 1) or self._steps % 64 == 0)

    def _found_versions(self):
        return [one._version for one in self._counted]

    def _found_sums(self):
        sums = [one.view(_INTEGERS[one.element_size()]).sum(dtype=torch.int64)
                for one in self._elements]  # fmt: skip
        return [int(one) for one in torch.stack([one.cpu() for one in sums])] if sums else []


class Stage:
    """The copies of an optimizer's parameters and gradients in the host's memory."""

    def __init__(self):
        self._parameters = []  # (the elements on the device, their copy)
        self.writes = Writes()  # finds writes to the parameters
        self._gradients = {}  # by number of the parameter
        self._streams = {}  # the stream for copies, by device; None: copies block
        self._copied = []  # numbers of gradients whose copies have begun since the latest bucket
        self._buckets = collections.deque()  # (events after its copies, numbers) of each bucket, oldest first

    def _stream(self, device):
        if device not in self._streams:
            self._streams[device] = _stream_of(device)
        return self._streams[device]

    def _running(self):
        return [one for one in self._streams.items() if one[1] is not None]

    def _host(self, elements):
        pinned = self._stream(elements.device) is not None
        return torch.empty(elements.shape, dtype=elements.dtype, device="cpu", pin_memory=pinned)

    def add(self, elements, parameter):
        """Creates and returns the copy of a parameter's elements, which must be flat."""
        copy = self._host(elements).copy_(elements)
        self._parameters.append((elements, copy))
        self.writes.add(elements, parameter)
        return copy

    def gradient(self, number, elements):
        """Returns the memory for the copy of a gradient."""
        known = self._gradients.get(number)
        if known is None or (known.dtype, known.shape) != (elements.dtype, elements.shape):
            known = self._gradients[number] = self._host(elements)
        return known

    def _copy(self, to, source, device):
        stream = self._stream(device)
        if stream is None:
            to.copy_(source)
            return
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            to.copy_(source, non_blocking=True)

    def send(self, number, elements):
        self._copy(self.gradient(number, elements), elements, elements.device)
        self._copied.append(number)

    def begin(self, number, elements):
        """Begins to copy a gradient. Returns the copy, and a function that waits until it is complete."""
        copy = self.gradient(number, elements)
        self._copy(copy, elements, elements.device)
        stream = self._stream(elements.device)
        return copy, stream.record_event().synchronize if stream else lambda: None

    def end_bucket(self, tell):
        """Calls `tell` with the number of each gradient whose copy is complete. Gradients of the bucket that
        ends now are not included: their copies are still running."""
        events = [stream.record_event() for _, stream in self._running()]
        self._buckets.append((events, self._copied))
        self._copied = []
        while len(self._buckets) > 1:
            events, numbers = self._buckets.popleft()
            for event in events:
                event.synchronize()
            for number in numbers:
                tell(number)

    def wait(self):
        """Waits until all copies that have begun are complete."""
        self._buckets.clear()
        self._copied.clear()
        for _, stream in self._running():
            stream.synchronize()

    def refresh(self):
        """Copies the parameters if the program has written to them since the latest step. Returns True if it
        has."""
        found = self.writes.refresh()
        if found:
            self.take()
        return found

    def take(self):
        """Copies the present values of the parameters."""
        for elements, copy in self._parameters:
            copy.copy_(elements)
        self.writes.mark()

    def copy_back(self):
        """Begins to copy the parameters back. The program's streams wait for the end of the copies."""
        for elements, copy in self._parameters:
            self._copy(elements, copy, elements.device)
        for device, stream in self._running():
            torch.accelerator.current_stream(device).wait_stream(stream)
        self.writes.stepped()
