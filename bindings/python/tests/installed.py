"""The program that tests/scripts/check-python runs in an environment with only the package and numpy.
test_communicators.py runs it under mpirun, with the argument `mpi`."""

import concurrent.futures
import importlib.metadata
import os
import sys

import numpy
import onebit


def check_mpi():
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
    for wrong, words in (MPI.COMM_NULL, "MPI_COMM_NULL"), (3, "is a int, not an mpi4py communicator"):
        try:
            onebit.Communicator.mpi(wrong)
        except onebit.Error as error:
            assert error.status is onebit.Status.ERROR_ARGUMENT and words in error.message
        else:
            raise AssertionError(f"{wrong} was accepted")
    world.Barrier()
    if world.rank == 0:
        print("all well")


def check_package():
    here = os.path.dirname(onebit.__file__)
    assert here.startswith(sys.prefix), here
    assert os.path.dirname(onebit.library_path()) == here, onebit.library_path()
    assert onebit.__version__ == onebit.version() == importlib.metadata.version("onebit")
    needs = importlib.metadata.requires("onebit")
    assert [one for one in needs if "extra" not in one] == ["numpy"], needs

    count, comms = 100_003, onebit.Communicator.loopback(2)
    exact = numpy.random.default_rng(7).standard_normal((2, count)).astype(numpy.float32)
    sums = numpy.zeros((2, count))

    def rank(number):
        """Checks error feedback: the mean over many calls of a rank's results is the true mean."""
        plan, result = onebit.Plan(comms[number], count), numpy.empty(count, numpy.float32)
        for _ in range(20):
            assert plan.allreduce(exact[number], result) is onebit.Status.OK
            sums[number] += result
        assert plan.info()["transport"] == "loopback"

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(rank, range(2)))  # raises the exceptions of the ranks
    assert (sums[0] == sums[1]).all()
    off = numpy.abs(sums[0] / 20 - exact.mean(axis=0)).mean()
    assert 0 < off < 0.2, off
    print(f"two ranks agree; the mean of 20 calls is {off:.3f} from the exact one")


check_mpi() if sys.argv[1:] == ["mpi"] else check_package()
