"""onebit: compressed collectives with error feedback, and the optimizers that converge with them.

A package over the C library of that name; include/onebit/*.h is the manual of what each call means.
The library is what the environment variable ONEBIT_LIBRARY names, or the one inside this package, or
the system's: `python -m onebit.info` says which. numpy, torch and mpi4py are imported by what needs
them only.

    import numpy, onebit

    with onebit.Communicator.self_() as comm:
        plan = onebit.Plan(comm, 1000)
        mean = numpy.empty(1000, numpy.float32)
        plan.allreduce(numpy.ones(1000, numpy.float32), mean)

Statuses. What goes wrong is raised as `Error`, with the status and the library's words. A call that
every rank skipped, because some rank's input was not finite, is no error: it returns
`Status.SKIPPED` in place of `Status.OK`.

Threads. The GIL is released in every call of the library. A plan and an optimizer are used by one
thread at a time.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onebit._interface import *  # noqa: F403: the optimizers, with their options

from onebit._native import (  # noqa: E402
    BLOCK_BUFFER,
    FREEZE_AUTOMATIC,
    FREEZE_NEVER,
    NAMES,
    OUTER_DENSE,
    OUTER_SPARSE,
    TABLE,
    VERSION,
    WARMUP_NONE,
    WARMUP_STEPS,
    AdamExchange,
    Dtype,
    Error,
    OnebitWarning,
    Operation,
    OuterRule,
    Profile,
    Scale,
    Schedule,
    Shards,
    Stage,
    Status,
    Wire,
    library_path,
    version,
)
from onebit.communicator import Communicator
from onebit.optimizer import *  # noqa: F403: the optimizers
from onebit.optimizer import Optimizer, Tensor
from onebit.outer import Outer, OuterSites
from onebit.plan import Plan, Request
from onebit.transport import Operation as TransportOperation
from onebit.transport import Transport

__version__ = VERSION

__all__ = [
    "BLOCK_BUFFER",
    "FREEZE_AUTOMATIC",
    "FREEZE_NEVER",
    "OUTER_DENSE",
    "OUTER_SPARSE",
    "TABLE",
    "WARMUP_NONE",
    "WARMUP_STEPS",
    "AdamExchange",
    "Communicator",
    "Dtype",
    "Error",
    "OnebitWarning",
    "Operation",
    "Optimizer",
    "Outer",
    "OuterRule",
    "OuterSites",
    "Plan",
    "Profile",
    "Request",
    "Scale",
    "Schedule",
    "Shards",
    "Stage",
    "Status",
    "Tensor",
    "Transport",
    "TransportOperation",
    "Wire",
    "library_path",
    "version",
    *NAMES,
]
