"""The backend as a process group of torchft, which its Manager configures anew with each quorum.

    manager = torchft.Manager(pg=onebit.torch.torchft.ProcessGroupOnebit(), ...)

Large sums that repeat, in buffers that stay where they are, travel in bits, as torchft's
DistributedDataParallel makes them. What a quorum has learned, and its residuals, end with it.
"""

import datetime

from torchft.process_group import ProcessGroupWrapper

from onebit.torch.backend import MIN_ELEMENTS, Backend


class ProcessGroupOnebit(ProcessGroupWrapper):
    """bits, min_elements: as for `onebit.torch.backend.register`."""

    def __init__(
        self, timeout=datetime.timedelta(seconds=60), bits=8, min_elements=MIN_ELEMENTS
    ):
        super().__init__(timeout)
        self._options = {"bits": bits, "min_elements": min_elements}

    def _create_pg(self, store, rank, size):
        return Backend(store, rank, size, self._timeout, **self._options)

    def getBackendName(self):  # noqa: N802: torch's name
        return "torchft-onebit"
