"""Plans and requests on numpy arrays; ranks are threads."""

import array
import gc
import threading
import weakref

import numpy
import onebit
import pytest
from onebit import Status


def make_gradient(rank, step, count=5000):
    return numpy.random.default_rng([rank, step]).standard_normal(count).astype(numpy.float32)


def test_self_is_one_rank():
    with onebit.Communicator.self_() as comm:
        assert (comm.rank, comm.size, comm.hosts, comm.bytes_sent) == (0, 1, 1, 0)
    with pytest.raises(onebit.Error, match="communicator is closed"):
        comm.rank
    assert onebit.version().startswith("0.2.")


@pytest.mark.parametrize("hosts", [1, 2])
def test_allgather_and_reduce_scatter(on_ranks, hosts):
    def body(comm):
        gather = onebit.Plan(comm, 64, operation="allgather", wire="dense")
        everyone = numpy.empty((4, 64), numpy.float32)
        gather.allgather(make_gradient(comm.rank, 0, 64), everyone)
        scatter = onebit.Plan(comm, 64, operation=onebit.Operation.REDUCE_SCATTER, wire="dense")
        share = numpy.empty(64, numpy.float32)
        scatter.reduce_scatter(make_gradient(comm.rank, 1, 256), share)
        return everyone, share, comm.hosts

    for rank, (everyone, share, found) in enumerate(on_ranks(4, body, hosts)):
        assert numpy.array_equal(everyone, [make_gradient(other, 0, 64) for other in range(4)])
        mean = numpy.mean([make_gradient(other, 1, 256) for other in range(4)], 0)
        assert numpy.allclose(share, mean[64 * rank : 64 * rank + 64], atol=1e-6)
        assert found == hosts


def test_float16_and_arrays_of_other_libraries(on_ranks):
    def body(comm):
        ones = numpy.full(100, comm.rank + 1, numpy.float16)
        onebit.Plan(comm, 100, dtype="float16").allreduce(ones, ones)
        plain = array.array("f", [comm.rank + 1.0] * 100)
        onebit.Plan(comm, 100).allreduce(plain, plain)
        return ones, plain

    for ones, plain in on_ranks(2, body):
        assert (ones == 1.5).all() and set(plain) == {1.5}


def test_options_by_name():
    """Checks options that are given by name, also the first member of an enum, whose value is 0."""
    with onebit.Communicator.self_() as comm:
        for name in ("float32", "FLOAT32", "bfloat16"):
            assert onebit.Plan(comm, 8, dtype=name).dtype.name == name.upper()
        for schedule in ("automatic", "schedule_automatic", "exchange"):
            onebit.Plan(comm, 8, schedule=schedule)
        with pytest.raises(onebit.Error, match="dtype is 'float', not one of float32, bfloat16"):
            onebit.Plan(comm, 8, dtype="float")


def test_skipped_is_a_value(on_ranks):
    def body(comm):
        plan = onebit.Plan(comm, 40)
        bad = numpy.full(40, numpy.nan if comm.rank == 1 else 1, numpy.float32)
        result = numpy.full(40, 7, numpy.float32)
        return plan.allreduce(bad, result), plan.iallreduce(bad, result).wait(), (result == 7).all()

    assert on_ranks(2, body) == [(Status.SKIPPED, Status.SKIPPED, True)] * 2


def test_requests_in_any_order_keep_their_buffers(on_ranks):
    def body(comm):
        plans = [onebit.Plan(comm, 1000) for _ in range(4)]
        result = [numpy.empty(1000, numpy.float32) for _ in plans]
        sent = [make_gradient(comm.rank, step, 1000) for step in range(4)]
        alive = [weakref.ref(one) for one in sent]
        requests = [plan.iallreduce(*pair) for plan, *pair in zip(plans, sent, result)]
        del sent
        gc.collect()
        assert all(one() is not None for one in alive)
        for number in [0, 1, 2, 3] if comm.rank else [3, 1, 0, 2]:
            assert requests[number].wait() is Status.OK
            assert requests[number].wait() is Status.OK  # the status stays the same
        assert all(one() is None for one in alive)
        return [one.tobytes() for one in result]

    first, *others = on_ranks(3, body)
    assert all(other == first for other in others)


def test_test_progresses_a_request(on_ranks):
    def body(comm):
        plan = onebit.Plan(comm, 1000)
        mine = make_gradient(comm.rank, 0, 1000)
        request = plan.iallreduce(mine, mine)
        with pytest.raises(onebit.Error) as busy:
            plan.reset_residual()
        assert busy.value.status is Status.ERROR_BUSY
        while (status := request.test()) is Status.IN_PROGRESS:
            comm.progress()
        return status

    assert on_ranks(2, body) == [Status.OK] * 2


def test_residuals_can_be_exported_and_imported(on_ranks):
    def body(comm):
        first, second = onebit.Plan(comm, 3000), onebit.Plan(comm, 3000)
        results = []
        first.allreduce(make_gradient(comm.rank, 0, 3000), numpy.empty(3000, numpy.float32))
        second.import_residual(*first.export_residual())
        for plan in first, second:
            result = numpy.empty(3000, numpy.float32)
            plan.allreduce(make_gradient(comm.rank, 1, 3000), result)
            results.append(result.tobytes())
        with pytest.raises(onebit.Error, match="worker has 5 FLOAT32"):
            first.import_residual(worker=numpy.zeros(5, numpy.float32))
        return results[0] == results[1]

    assert on_ranks(2, body) == [True, True]


WRONG = {
    "has type <f8": lambda: numpy.zeros(40),
    "has 39 elements, not 40": lambda: numpy.zeros(39, numpy.float32),
    "is not contiguous": lambda: numpy.zeros(80, numpy.float32)[::2],
    "has type FLOAT16, but the plan has type FLOAT32": lambda: numpy.zeros(40, numpy.float16),
    "is a int, not an array": lambda: 3,
    "has type >f4": lambda: numpy.zeros(40, ">f4"),
    "has elements of format 'd'": lambda: array.array("d", [0.0] * 40),
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_array_on_one_rank_is_told_to_all(on_ranks, words):
    def body(comm):
        plan = onebit.Plan(comm, 40)
        mine = WRONG[words]() if comm.rank == 1 else numpy.ones(40, numpy.float32)
        for call in plan.allreduce, plan.iallreduce:
            with pytest.raises(onebit.Error) as caught:
                request = call(mine, numpy.empty(40, numpy.float32))
                request.wait()
            if comm.rank == 1:
                assert caught.value.status is Status.ERROR_ARGUMENT
                assert f"sendbuf {words}" in caught.value.message
            else:
                assert caught.value.status is Status.ERROR_PEER and "rank 1" in caught.value.message
        return plan.allreduce(numpy.ones(40, numpy.float32), numpy.empty(40, numpy.float32))

    assert on_ranks(3, body) == [Status.OK] * 3


def test_a_result_that_cannot_be_written(on_ranks):
    def body(comm):
        plan = onebit.Plan(comm, 40)
        result = numpy.empty(40, numpy.float32)
        result.flags.writeable = False
        with pytest.raises(onebit.Error, match="recvbuf is read-only"):
            plan.allreduce(numpy.ones(40, numpy.float32), result)
        with pytest.raises(onebit.Error, match="the plan is for ALLREDUCE, not for ALLGATHER"):
            plan.allgather(numpy.ones(40, numpy.float32), numpy.empty(40, numpy.float32))

    on_ranks(1, body)


def test_wrong_options_on_one_rank_are_told_to_all(on_ranks):
    def body(comm):
        wrong = [{"block_size": 33}, {"scale": "loud"}, {"scheduel": 1}]
        statuses = []
        for options in wrong:
            with pytest.raises((onebit.Error, TypeError)) as caught:
                onebit.Plan(comm, 100, **(options if comm.rank == 0 else {}))
            statuses.append(getattr(caught.value, "status", TypeError))
        with pytest.raises(onebit.Error) as caught:
            onebit.Plan(comm, 100 + comm.rank)
        return [*statuses, caught.value.status]

    argument, peer, other = Status.ERROR_ARGUMENT, Status.ERROR_PEER, Status.ERROR_MISMATCH
    first, second = on_ranks(2, body)
    assert first == [argument, argument, TypeError, other]
    assert second == [peer, peer, peer, other]


def test_plans_and_communicators_close():
    comm = onebit.Communicator.self_()
    plan = onebit.Plan(comm, 10)
    comm.close()
    comm.close()
    with pytest.raises(onebit.Error, match="the plan is closed"):
        plan.info()
    with onebit.Communicator.self_() as comm, onebit.Plan(comm, 10, scale="mean_absolute") as plan:
        assert plan.info()["transport"] == "self" and plan.info()["wire"] is onebit.Wire.WIRE_BITS
        assert isinstance(plan.explain(), str)


def test_garbage_is_collected_in_any_order(monkeypatch):
    """Checks that plans and optimizers still work if the communicator of a reference cycle is collected
    before them."""
    calls = []
    library = onebit._native.library()
    for name in "onebit_plan_destroy", "onebit_optimizer_destroy", "onebit_comm_destroy":
        real = getattr(library, name)

        def noted(handle, real=real, name=name):
            calls.append(name.split("_")[1])
            return real(handle)

        monkeypatch.setattr(library, name, noted)
    gc.collect()
    calls.clear()
    for order in 0, 1:
        one = {}
        one["comm"] = onebit.Communicator.self_()
        one["plan"] = onebit.Plan(one["comm"], 10)
        tensors = [(numpy.zeros(3, numpy.float32), None)]
        one["optimizer"] = onebit.Adam(one["comm"], tensors)
        for part in list(one.values())[:: 1 - 2 * order]:
            part.cycle = one
        del one, part
        gc.collect()
        assert sorted(calls) == ["comm", "optimizer", "plan"] and calls[-1] == "comm"
        calls.clear()


def test_a_request_that_is_forgotten_keeps_its_memory():
    """Checks a plan that the program drops while its request is in flight: the plan is not destroyed,
    and memory that the library may still write to is not freed."""
    comms = onebit.Communicator.loopback(2)
    done = threading.Event()

    def late():
        plan = onebit.Plan(comms[1], 1000)
        done.wait()
        plan.allreduce(numpy.ones(1000, numpy.float32), numpy.empty(1000, numpy.float32))

    thread = threading.Thread(target=late)
    thread.start()
    plan = onebit.Plan(comms[0], 1000)
    mine = numpy.ones(1000, numpy.float32)
    alive = weakref.ref(mine)
    request = plan.iallreduce(mine, mine)
    with pytest.raises(onebit.Error) as busy:
        plan.close()
    assert busy.value.status is Status.ERROR_BUSY
    handle = plan._handle
    del plan, request, mine
    gc.collect()
    assert alive() is not None
    done.set()
    while onebit._native.library().onebit_plan_reset_residual(handle) == Status.ERROR_BUSY:
        comms[0].progress()
        if not thread.is_alive():
            break
    thread.join()


def test_survivors_of_an_aborted_communicator():
    with onebit.Communicator.self_() as comm:
        comm.abort()
        with pytest.raises(onebit.Error, match="rank 0 called onebit_comm_abort"):
            onebit.Plan(comm, 5)
        with comm.shrink() as survivors:
            assert survivors.size == 1
