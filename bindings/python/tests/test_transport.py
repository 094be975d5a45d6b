"""Transports in Python; ranks are threads, messages travel by lists."""

import collections
import threading

import numpy
import onebit
import pytest
from onebit import Status


class Hub:
    def __init__(self):
        self.changed = threading.Condition()
        self.letters = collections.defaultdict(collections.deque)
        self.wanted = collections.defaultdict(collections.deque)
        self.dead = False
        self.released = 0


class Threads(onebit.Transport):
    def __init__(self, hub, rank, fails=None):
        self.hub, self.rank, self.fails = hub, rank, fails

    def _strike(self, name):
        if self.fails == name:
            raise OSError(f"no route to {name}")
        if self.hub.dead:
            raise OSError("the hub is dead")

    def send(self, data, peer, tag):
        self._strike("send")
        with self.hub.changed:
            self.hub.letters[self.rank, peer, tag].append(bytes(data))
            self.hub.changed.notify_all()

    def receive(self, operation):
        self._strike("receive")
        operation.key = operation.peer, self.rank, operation.tag
        with self.hub.changed:
            self.hub.wanted[operation.key].append(operation)

    def test(self, operation, seconds):
        self._strike("test")
        with self.hub.changed:
            ready = lambda: self.hub.dead or (  # noqa: E731
                self.hub.letters[operation.key] and self.hub.wanted[operation.key][0] is operation
            )
            if not ready():
                self.hub.changed.wait(seconds)
            self._strike("test")
            if not ready():
                return None
            letter = self.hub.letters[operation.key].popleft()
            self.hub.wanted[operation.key].popleft()
        operation.memory[: len(letter)] = letter
        return len(letter)

    def cancel(self, operation):
        with self.hub.changed:
            self.hub.wanted[operation.key].remove(operation)

    def abort(self):
        with self.hub.changed:
            self.hub.dead = True
            self.hub.changed.notify_all()

    def release(self):
        self.hub.released += 1


def on_threads(size, body, fails=None):
    """body(rank, transport) on each rank; the exceptions too are results."""
    hub, results = Hub(), [None] * size

    def rank(number):
        try:
            results[number] = body(number, Threads(hub, number, fails if number == 1 else None))
        except Exception as reason:  # noqa: BLE001
            results[number] = reason

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return hub, results


def test_a_transport_in_python_gives_the_bits_of_loopback(on_ranks):
    def exchange(comm):
        plan = onebit.Plan(comm, 5000, schedule="exchange", chunk_size=1024)
        for step in range(3):
            random = numpy.random.default_rng([comm.rank, step])
            result = random.standard_normal(5000).astype(numpy.float32)
            plan.allreduce(result, result)
        return result.tobytes()

    def body(rank, transport):
        with onebit.Communicator.custom(transport, rank, 3, host=f"host {rank % 2}") as comm:
            assert (comm.rank, comm.size, comm.hosts) == (rank, 3, 2)
            return exchange(comm)

    hub, results = on_threads(3, body)
    assert results == on_ranks(3, exchange)
    assert hub.released == 3
    assert not any(hub.wanted.values()) and not any(hub.letters.values())


@pytest.mark.parametrize("fails", ["send", "receive", "test"])
def test_what_a_transport_raises_reaches_all(fails):
    def body(rank, transport):
        return onebit.Communicator.custom(transport, rank, 3)

    hub, results = on_threads(3, body, fails)
    assert [one.status for one in results] == [Status.ERROR_TRANSPORT] * 3
    assert f"OSError: no route to {fails}" in results[1].message
    assert hub.released == 0 and not any(hub.wanted.values())


def test_a_failure_in_a_call_reaches_all():
    def body(rank, transport):
        comm = onebit.Communicator.custom(transport, rank, 2)
        plan = onebit.Plan(comm, 5000)
        if rank == 1:
            transport.fails = "send"
        mine = numpy.ones(5000, numpy.float32)
        plan.allreduce(mine, mine)

    _, results = on_threads(2, body)
    assert [one.status for one in results] == [Status.ERROR_TRANSPORT] * 2
    assert "no route to send" in results[1].message and "the hub is dead" in results[0].message


def test_an_interrupt_is_no_success():
    """What a callback of ctypes lets out counts as 0: the message would seem to have arrived."""

    class Interrupted(Threads):
        def test(self, operation, seconds):
            raise KeyboardInterrupt

    def body(rank, transport):
        kind = Interrupted if rank else Threads
        return onebit.Communicator.custom(kind(transport.hub, rank), rank, 2)

    _, results = on_threads(2, body)
    assert [one.status for one in results] == [Status.ERROR_TRANSPORT] * 2
    assert "KeyboardInterrupt" in results[1].message


def test_wrong_arguments():
    with pytest.raises(onebit.Error, match="rank is 3"):
        onebit.Communicator.custom(Threads(Hub(), 0), 3, 2)
    with pytest.raises(onebit.Error, match="size is 0"):
        onebit.Communicator.loopback(0)
