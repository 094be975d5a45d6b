"""Tests communicators over a transport in Python, which passes messages in lists, and over sockets; ranks are
threads. Also tests them over mpi4py, with three processes."""

import array
import collections
import functools
import importlib.util
import math
import os
import shutil
import socket
import subprocess
import sys
import threading

import numpy
import onebit
import pytest
from conftest import HERE, REPOSITORY, python_environment, run_on_threads
from onebit import Communicator, Status


# --- Transports in Python -------------------------------------------------------------------------


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


def run_on_hub(size, body, fails=None):
    """Runs body(rank, transport) on each rank. Returns results, or exceptions as results."""
    hub = Hub()
    transports = [Threads(hub, rank, fails if rank == 1 else None) for rank in range(size)]
    calls = [functools.partial(body, *pair) for pair in enumerate(transports)]
    return hub, run_on_threads(calls)


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

    hub, results = run_on_hub(3, body)
    assert results == on_ranks(3, exchange)
    assert hub.released == 3
    assert not any(hub.wanted.values()) and not any(hub.letters.values())


@pytest.mark.parametrize("fails", ["send", "receive", "test"])
def test_what_a_transport_raises_reaches_all(fails):
    def body(rank, transport):
        return onebit.Communicator.custom(transport, rank, 3)

    hub, results = run_on_hub(3, body, fails)
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

    _, results = run_on_hub(2, body)
    assert [one.status for one in results] == [Status.ERROR_TRANSPORT] * 2
    assert "no route to send" in results[1].message and "the hub is dead" in results[0].message


def test_an_interrupt_is_no_success():
    """An interrupt must not look like success: ctypes returns 0 to the library after an exception in a
    callback, as if the message had arrived."""

    class Interrupted(Threads):
        def test(self, operation, seconds):
            raise KeyboardInterrupt

    def body(rank, transport):
        kind = Interrupted if rank else Threads
        return onebit.Communicator.custom(kind(transport.hub, rank), rank, 2)

    _, results = run_on_hub(2, body)
    assert [one.status for one in results] == [Status.ERROR_TRANSPORT] * 2
    assert "KeyboardInterrupt" in results[1].message


def test_wrong_arguments():
    with pytest.raises(onebit.Error, match="rank is 3"):
        onebit.Communicator.custom(Threads(Hub(), 0), 3, 2)
    with pytest.raises(onebit.Error, match="size is 0"):
        onebit.Communicator.loopback(0)


# --- Sockets --------------------------------------------------------------------------------------


@pytest.fixture
def address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        # The port is held until the test ends, so that no other program gets it. Rank 0 can still listen at it.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield f"127.0.0.1:{probe.getsockname()[1]}"


def test_ranks_find_each_other(address):
    def rank(number):
        mine = array.array("f", [number + 1.0] * 40)
        with Communicator.sockets(number, 3, address, secret="s", streams=2, timeout=30) as comm:
            assert (comm.rank, comm.size, comm.transport) == (number, 3, "sockets")
            plan = onebit.Plan(comm, 40, wire="dense")
            assert plan.info()["transport"] == "sockets"
            assert plan.allreduce(mine, mine) is Status.OK
        return list(mine)

    assert run_on_threads([lambda number=one: rank(number) for one in range(3)]) == [[2.0] * 40] * 3


def test_from_the_environment(address, monkeypatch):
    host, port = address.split(":")
    values = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": host, "MASTER_PORT": port}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with Communicator.sockets(timeout=math.inf) as comm:
        assert (comm.rank, comm.size) == (0, 1)
    monkeypatch.delenv("RANK")
    with pytest.raises(onebit.Error, match="RANK"):
        Communicator.sockets()


def test_a_rank_that_does_not_come_or_is_another(address):
    def make(rank, size=3, secret=None):
        return lambda: Communicator.sockets(rank, size, address, secret=secret, timeout=1)

    first, *_ = run_on_threads([make(0), make(1)])
    assert first.status is Status.ERROR_TRANSPORT and "waited 1 s for rank 2" in first.message
    twice = run_on_threads([make(0), make(1), make(1)])
    assert any("two processes joined as rank 1" in str(one) for one in twice)
    differs = run_on_threads([make(0, 2), make(1, 3)])
    assert "the number of ranks differs: 2 on rank 0, 3 on rank 1" in str(differs[1])
    keyless = run_on_threads([make(0, 2, "one"), make(1, 2, "two")])
    assert all(one.status is Status.ERROR_TRANSPORT for one in keyless)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0,), "rank is 0, size is None"),
        ((0, 0), "size is 0"),
        ((2, 2, "127.0.0.1:9"), "rank is 2"),
        ((0, 2, "nowhere"), "expected host:port"),
        ((0, 2, "127.0.0.1:9", None, None, 65), "streams is 65"),
        ((0, 2, "127.0.0.1:9", None, None, 0, 0), "timeout is 0"),
    ],
)
def test_invalid_options_are_refused(arguments, words):
    with pytest.raises(onebit.Error, match=words) as caught:
        Communicator.sockets(*arguments)
    assert caught.value.status is Status.ERROR_ARGUMENT


# --- MPI ------------------------------------------------------------------------------------------

MPIRUN = os.environ.get("MPIRUN", "mpirun").split()[0]

over_mpi = pytest.mark.skipif(
    not importlib.util.find_spec("mpi4py")
    or not hasattr(onebit._native.library(), "onebit_comm_create_mpi"),
    reason="mpi4py is not here, or the library is built without MPI",
)


class Fake:
    """Replaces mpi4py's MPI, which describes its library."""

    Comm, COMM_SELF = "a type", "a handle"

    def __init__(self, size, handle):
        self._sizeof = {self.Comm: size}.get
        self._handleof = {self.COMM_SELF: handle}.get


def test_the_kind_of_mpi_is_known_by_its_handles():
    assert onebit.communicator.mpi_kind(Fake(4, 0x44000001)) == "mpich"
    assert onebit.communicator.mpi_kind(Fake(8, 0x7F0012345678)) == "openmpi"
    assert onebit.communicator.mpi_kind(Fake(8, 0x102)) == "standard"


@pytest.mark.parametrize("kind", ["standard", "mpich", "openmpi"])
def test_a_kind_that_is_not_built_is_refused(kind, monkeypatch):
    class Library:
        _name = "/of/a/test.so"

    monkeypatch.setattr(onebit._native, "library", Library)
    with pytest.raises(onebit.Error, match="/of/a/test.so was built without MPI") as caught:
        onebit.communicator.mpi_function(kind)
    assert caught.value.status is onebit.Status.ERROR_UNSUPPORTED


@over_mpi
@pytest.mark.skipif(not shutil.which(MPIRUN), reason=f"{MPIRUN} is not here")
def test_under_mpirun():
    command = [REPOSITORY / "tests/scripts/ranks", "3", sys.executable, HERE / "installed.py", "mpi"]
    environment = python_environment()
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    words = ran.stdout + ran.stderr
    if "onebit was built for" in words:
        pytest.skip("mpi4py has another kind of MPI than the library")
    assert ran.returncode == 0 and ran.stdout == "all well\n", words
