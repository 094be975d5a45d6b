"""What test_communicators.py and tests/scripts/check-python run under mpirun."""

import numpy
import onebit
from mpi4py import MPI

world = MPI.COMM_WORLD
half = world.Split(world.rank % 2, world.rank)
for mpi in world, half:
    with onebit.Communicator.mpi(mpi) as comm:
        assert (comm.rank, comm.size, comm.hosts) == (mpi.rank, mpi.size, 1)
        plan = onebit.Plan(comm, 5000, schedule="exchange")
        assert plan.info()["transport"] == "mpi"
        result = numpy.full(5000, mpi.rank + 1, numpy.float32)
        requests = [plan.iallreduce(result, result)]
        assert requests[0].wait() is onebit.Status.OK
        assert numpy.allclose(result, (mpi.size + 1) / 2)
try:
    onebit.Communicator.mpi(MPI.COMM_NULL)
except onebit.Error as error:
    assert error.status is onebit.Status.ERROR_ARGUMENT and "MPI_COMM_NULL" in error.message
else:
    raise AssertionError("MPI_COMM_NULL was taken")
try:
    onebit.Communicator.mpi(3)
except onebit.Error as error:
    assert "is a int, not an mpi4py communicator" in error.message
else:
    raise AssertionError("a number was taken")
world.Barrier()
if world.rank == 0:
    print("all well")
