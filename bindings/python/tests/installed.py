"""What tests/scripts/check-python runs where nothing but the package and numpy is installed."""

import importlib.metadata
import os
import sys
import threading

import numpy
import onebit

here = os.path.dirname(onebit.__file__)
assert here.startswith(sys.prefix), here
assert os.path.dirname(onebit.library_path()) == here, onebit.library_path()
assert onebit.__version__ == onebit.version() == importlib.metadata.version("onebit")
needs = importlib.metadata.requires("onebit")
assert [one for one in needs if "extra" not in one] == ["numpy"], needs

COUNT, comms = 100_003, onebit.Communicator.loopback(2)
exact = numpy.random.default_rng(7).standard_normal((2, COUNT)).astype(numpy.float32)
sums = numpy.zeros((2, COUNT))


def rank(number):
    """The mean over many calls of what a rank gets is the mean: error feedback."""
    plan, result = onebit.Plan(comms[number], COUNT), numpy.empty(COUNT, numpy.float32)
    for _ in range(20):
        assert plan.allreduce(exact[number], result) is onebit.Status.OK
        sums[number] += result
    assert plan.info()["transport"] == "loopback"


threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert (sums[0] == sums[1]).all()
off = numpy.abs(sums[0] / 20 - exact.mean(axis=0)).mean()
assert 0 < off < 0.2, off
print(f"two ranks agree; the mean of 20 calls is {off:.3f} from the exact one")
