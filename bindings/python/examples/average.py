"""Averages numbers over two ranks; each message has one bit a number: python average.py. The ranks are
threads here; Communicator.mpi(MPI.COMM_WORLD), .torch() or .sockets() instead of loopback makes them
processes."""

import threading

import numpy
import onebit

COUNT, STEPS = 100_000, 1000


def average(comm):
    mine = ((comm.rank + 1) * (numpy.arange(COUNT) % 7 - 3)).astype(numpy.float32)
    mean, total = numpy.empty_like(mine), 0.0
    with onebit.Plan(comm, COUNT) as plan:  # keeps the residual for the next call
        for _ in range(STEPS):
            plan.allreduce(mine, mean)
            total += mean[0]
    if comm.rank == 0:
        print(f"element 0: {total / STEPS:.3f} over {STEPS} calls, the mean of the ranks is {-1.5 * (comm.size + 1):.3f}")


threads = [threading.Thread(target=average, args=[comm]) for comm in onebit.Communicator.loopback(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
