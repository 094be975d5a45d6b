"""Communicators over the library's own sockets, without torch: ranks are threads of this process."""

import array
import math
import socket
import threading

import onebit
import pytest
from onebit import Communicator, Status


@pytest.fixture
def address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def on_threads(calls):
    """What each call returned or raised; each is made by a thread."""
    results = [None] * len(calls)

    def run(number):
        try:
            results[number] = calls[number]()
        except onebit.Error as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_ranks_find_each_other(address):
    def rank(number):
        mine = array.array("f", [number + 1.0] * 40)
        with Communicator.sockets(number, 3, address, secret="s", streams=2, timeout=30) as comm:
            assert (comm.rank, comm.size, comm.transport) == (number, 3, "sockets")
            plan = onebit.Plan(comm, 40, wire="dense")
            assert plan.info()["transport"] == "sockets"
            assert plan.allreduce(mine, mine) is Status.OK
        return list(mine)

    assert on_threads([lambda number=one: rank(number) for one in range(3)]) == [[2.0] * 40] * 3


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

    first, *_ = on_threads([make(0), make(1)])
    assert first.status is Status.ERROR_TRANSPORT and "waited 1 s for rank 2" in first.message
    twice = on_threads([make(0), make(1), make(1)])
    assert any("there is a rank 1 already" in str(one) for one in twice)
    differs = on_threads([make(0, 2), make(1, 3)])
    assert "the number of ranks differs: 2 on rank 0, 3 on rank 1" in str(differs[1])
    keyless = on_threads([make(0, 2, "one"), make(1, 2, "two")])
    assert all(one.status is Status.ERROR_TRANSPORT for one in keyless)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0,), "rank is 0 and size None"),
        ((0, 0), "size 0"),
        ((2, 2, "127.0.0.1:9"), "rank is 2"),
        ((0, 2, "nowhere"), "expected host:port"),
        ((0, 2, "127.0.0.1:9", None, None, 65), "streams is 65"),
        ((0, 2, "127.0.0.1:9", None, None, 0, 0), "timeout is 0"),
    ],
)
def test_what_is_refused(arguments, words):
    with pytest.raises(onebit.Error, match=words) as caught:
        Communicator.sockets(*arguments)
    assert caught.value.status is Status.ERROR_ARGUMENT
