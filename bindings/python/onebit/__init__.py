"""onebit: compressed collectives with error feedback, and the optimizers that converge with them.

The package calls the C library of that name; include/onebit/*.h is the manual of each call. It
loads the library that the environment variable ONEBIT_LIBRARY names, otherwise the one inside this
package, otherwise the system's. `python -m onebit.info` prints which one it is. numpy, torch and
mpi4py are imported only if they are needed.

    import numpy, onebit

    with onebit.Communicator.self_() as comm:
        plan = onebit.Plan(comm, 1000)
        mean = numpy.empty(1000, numpy.float32)
        plan.allreduce(numpy.ones(1000, numpy.float32), mean)

Statuses. An error is raised as `Error`, with the library's status and message. A call that every
rank skipped, because some rank's input was not finite, returns `Status.SKIPPED` instead of
`Status.OK`.

Threads. The GIL is released in every call of the library. A plan and an optimizer are used by one
thread at a time.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onebit._interface import *  # noqa: F403: the optimizers, with their options

from onebit import _native
from onebit._native import *  # noqa: E402, F403: enums, constants, errors
from onebit._native import NAMES, VERSION
from onebit.communicator import Communicator
from onebit.optimizer import *  # noqa: F403: the optimizers
from onebit.optimizer import Optimizer, Tensor
from onebit.outer import Outer, OuterSites
from onebit.plan import Plan, Request
from onebit.transport import Operation as TransportOperation
from onebit.transport import Transport

__version__ = VERSION

__all__ = [
    "Communicator",
    "Optimizer",
    "Outer",
    "OuterSites",
    "Plan",
    "Request",
    "Tensor",
    "Transport",
    "TransportOperation",
    *NAMES,
]
__all__ += _native.__all__
