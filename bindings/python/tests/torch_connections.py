"""Scenarios of torch_ranks.py for communicators over a process group, and for the way in which ranks
find each other."""

import contextlib
import datetime
import inspect
import io
import os

import onebit
import onebit.torch
import torch
import torch.distributed as dist
from onebit import Status
from onebit.torch import rendezvous, transport
from onebit.torch.ranks import gather
from onebit.torch.transport import timeout_of
from torch_common import expect_status, is_equal_on_ranks, make_gradient, record_warnings


def check_collectives(rank, size, transport="sockets"):
    comm = onebit.Communicator.torch(transport=transport)
    assert (comm.rank, comm.size, comm.transport) == (rank, size, transport)
    plan = onebit.Plan(comm, 5000, schedule="exchange", chunk_size=1024)
    assert plan.info()["transport"] == ("sockets" if transport == "sockets" else "custom")
    kept = onebit.Plan(onebit.Communicator.self_(), 5000)  # belongs to no other rank
    for step in range(3):
        mine = make_gradient(rank, step)
        assert plan.allreduce(mine, mine) is Status.OK
        kept.allreduce(make_gradient(rank, step), torch.empty(5000))
        assert is_equal_on_ranks(mine)
    check_concurrent_requests(comm, rank, size)
    check_gathered_bytes(comm, rank, size)
    comm.close()
    another = onebit.Communicator.torch(dist.new_group(backend="gloo"), 50, transport)
    assert onebit.Plan(another, 3).allreduce(torch.ones(3), torch.empty(3)) is Status.OK
    expect_status(Status.ERROR_ARGUMENT, lambda: onebit.Communicator.torch(timeout=-1), "timeout is -1")
    another.close()


def check_gathered_bytes(comm, rank, size):
    for count in (0, 1, 2, 3, 4, 384, 385, 387, 388, 1000, 3 * 2**20 + 5):  # bytes of rank 0; the other ranks have fewer
        parts = [(bytes(range(one, 251 + one)) * (count // 251 + 1))[: max(count - one, 0)]
                 for one in range(size)]  # fmt: skip
        assert gather(comm, parts[rank]) == parts


def check_collectives_over_gloo(rank, size):
    check_collectives(rank, size, "gloo")


def check_concurrent_requests(comm, rank, size):
    """Checks that each rank may wait for requests in its own order, with gloo's collectives between
    them."""
    plans = [onebit.Plan(comm, 3000) for _ in range(size)]
    mine = [make_gradient(rank, step, 3000) for step in range(size)]
    everyone = torch.tensor([rank + 1.0])
    requests = [None] * size
    for turn in range(size):  # they may even be started in different orders
        number = (turn + rank) % size
        requests[number] = plans[number].iallreduce(mine[number], mine[number])
    dist.all_reduce(everyone)
    for turn in range(size):
        assert requests[(turn + 2 * rank) % size].wait() is Status.OK
    assert everyone.item() == size * (size + 1) / 2
    assert all(is_equal_on_ranks(one) for one in mine)


# --- Connections ---------------------------------------------------------------------------------


def check_groups(rank, size):
    """Checks that communicators of sub-groups, and several of one group, do not mix up messages. A
    group may have any backend."""
    halves = [dist.new_group([0, 1], backend="gloo"), dist.new_group([2, 3], backend="gloo")]
    half = halves[rank // 2]
    comms = [onebit.Communicator.torch(one) for one in (half, None, half)]
    assert [(comm.rank, comm.size) for comm in comms] == [(rank % 2, 2), (rank, 4), (rank % 2, 2)]
    for comm, mean in zip(comms, (2 * (rank // 2) + 1.5, 2.5, 2 * (rank // 2) + 1.5)):
        ones = torch.full((100,), rank + 1.0)
        onebit.Plan(comm, 100, wire="dense").allreduce(ones, ones)
        assert (ones == mean).all(), ones
        comm.close()
    other = halves[1 - rank // 2]
    expect_status(Status.ERROR_ARGUMENT, lambda: onebit.Communicator.torch(other), "does not have this")
    alone = [dist.new_group([one], backend="gloo") for one in range(size)][rank]
    assert onebit.Communicator.torch(alone).transport == "self"


def check_other_backend(rank, size):
    """Checks a group that cannot exchange anything itself: only its store is used."""
    if "devices" not in inspect.signature(dist.Backend.register_backend).parameters:
        return  # before 2.0 torch has no groups that only their own processes create

    class Mute(dist.ProcessGroup):
        def getBackendName(self):  # noqa: N802: torch's name
            return "mute"

    dist.Backend.register_backend(
        "mute", lambda store, rank, size, timeout: Mute(rank, size), devices=["cpu"]
    )
    group = dist.new_group(backend="mute")
    for kind in "sockets", "gloo":
        comm = onebit.Communicator.torch(group, transport=kind)
        ones = torch.full((100,), rank + 1.0)
        onebit.Plan(comm, 100, wire="dense").allreduce(ones, ones)
        assert comm.transport == kind and (ones == (size + 1) / 2).all()
        comm.close()


class _OnCuda:
    """A stand-in for a parameter on CUDA, for the choice of the transport."""

    device = torch.device("cuda", 0)


def check_nccl_by_default(rank, size):
    """Checks that the default is NCCL if parameters are on CUDA, torch uses NCCL for them, and every
    rank can create its communicator."""
    asked, create, kernels = [], transport.create_nccl, transport.has_kernels
    get = "get_backend_config" if hasattr(dist, "get_backend_config") else "get_backend"
    backend, device = getattr(dist, get), torch.cuda.device
    torch.cuda.device = lambda device: contextlib.nullcontext()

    def made(parameters=(_OnCuda(),), stage="auto"):
        with record_warnings() as said:
            comm = transport.create_for(onebit.Communicator, parameters, stage, None, None)
        ones = torch.full((100,), rank + 1.0)
        onebit.Plan(comm, 100, wire="dense").allreduce(ones, ones)
        assert comm.transport == "sockets" and (ones == (size + 1) / 2).all()
        comm.close()
        return said

    transport.create_nccl = lambda *arguments: asked.append(arguments) or create(*arguments)
    assert made() == [] and not asked  # the messages use gloo
    setattr(dist, get, lambda group: "cpu:gloo,cuda:nccl")
    assert made([torch.zeros(1)]) == [] == made(stage="host") and not asked
    transport.has_kernels = lambda: False
    assert made() == [] and len(asked) == 1
    transport.has_kernels = lambda: rank > 0
    words = ["messages go through the host, which is slower: NCCL cannot be used: rank 0: "
             "ERROR_UNSUPPORTED: the library was built without CUDA, so it has no kernels"]  # fmt: skip
    found = made()
    assert found == words * (rank > 0) and len(asked) == 2, (found, len(asked))
    transport.has_kernels, transport.create_nccl, torch.cuda.device = kernels, create, device
    setattr(dist, get, backend)


def check_fallback(rank, size):
    """Checks that gloo is used on all ranks if sockets are impossible, with a warning that gives the
    reason."""
    def make(**options):
        with record_warnings() as said:
            comm = onebit.Communicator.torch(timeout=20, **options)
        found = comm.transport
        comm.close()
        return found, said

    connect = rendezvous._connect_to_rank
    if rank == 1:
        os.environ["ONEBIT_SOCKET_IFNAME"] = "none7"  # only rank 0's variable has an effect
    assert make() == ("sockets", [])
    if rank == 0:
        os.environ["ONEBIT_SOCKET_IFNAME"] = "none7"
    kind, said = make()
    words = "since sockets cannot be used: rank 0: interface none7 has no IPv4 address, nor an IPv6 one"
    assert kind == "gloo" and len(said) == 1 and words in said[0], said
    expect_status(Status.ERROR_TRANSPORT, lambda: make(transport="sockets"), "interface none7")
    if rendezvous._is_own_address("::1"):  # tests interfaces that only have IPv6 addresses
        of_interface = rendezvous._ipv6_addresses
        rendezvous._ipv6_addresses = lambda name: ["fe80::1", "::1"]
        assert make() == ("sockets", [])
        rendezvous._ipv6_addresses = lambda name: ["fe80::1"]
        kind, said = make()
        assert kind == "gloo" and "none7 has link-local addresses only: fe80" in said[0], said
        rendezvous._ipv6_addresses = of_interface
    os.environ["ONEBIT_SOCKET_IFNAME"] = "lo"
    assert make() == ("sockets", [])
    del os.environ["ONEBIT_SOCKET_IFNAME"]
    if rank == 2:  # can reach rank 0, but not rank 1

        def refuse(at):
            if len(asked) == 1:
                raise OSError("no route to host")
            asked.append(at)
            return connect(at)

        asked, rendezvous._connect_to_rank = [], refuse
    kind, said = make()
    assert kind == "gloo" and "rank 2: no route to host" in said[0], said
    rendezvous._connect_to_rank = connect
    kind = "gloo" if rank == 1 else "sockets"
    words = "transport differs: sockets on rank 0, gloo on rank 1"
    expect_status(Status.ERROR_MISMATCH, lambda: make(transport=kind), words)
    expect_status(Status.ERROR_ARGUMENT, lambda: make(transport="smoke"), "transport is 'smoke'")
    check_timeouts(rank, size)
    check_missing_rank(rank, size)
    check_forked_process(rank)


def check_timeouts(rank, size):
    """Checks that the default timeout of connections is that of the process group."""
    short = dist.new_group(timeout=datetime.timedelta(seconds=77))
    default = dist.default_pg_timeout.total_seconds()
    assert [timeout_of(one, None) for one in (short, None)] == [77, default]
    for asked, seconds in (("5.5", 5.5), ("never", transport.FOR_EVER.total_seconds()), ("", 77)):
        os.environ["ONEBIT_TIMEOUT"] = asked
        assert timeout_of(short, None) == seconds and timeout_of(short, 3) == 3
    os.environ["ONEBIT_TIMEOUT"] = "soon"
    expect_status(Status.ERROR_ARGUMENT, onebit.Communicator.torch, "ONEBIT_TIMEOUT is soon seconds")
    del os.environ["ONEBIT_TIMEOUT"]


def check_missing_rank(rank, size):
    # All other ranks arrive within these seconds, even on a busy machine.
    rendezvous.GRACE_SECONDS, rendezvous.NOTICE_SECONDS = 3.0, 1.0
    for absent in size - 1, 0:
        dist.barrier()
        words = f"waited 2 s for rank {absent} to make its communicator"
        if rank != absent:
            with contextlib.redirect_stderr(io.StringIO()) as said:
                expect_status(
                    Status.ERROR_TRANSPORT, lambda: onebit.Communicator.torch(timeout=2), words
                )
            notice = f"rank {rank}: waiting 1 s for rank {absent} to make its communicator\n"
            assert said.getvalue().endswith(notice) and said.getvalue().count("\n") == 1, said
        dist.barrier()
        if rank == absent == 0:  # too late: rank 0 was missing before
            rendezvous.Rendezvous(None, 2)
        elif rank == absent:
            expect_status(Status.ERROR_TRANSPORT, lambda: onebit.Communicator.torch(timeout=2), words)


def check_forked_process(rank):
    """Checks that a forked process cannot use the connections, and does not harm them."""
    comm = onebit.Communicator.torch()
    plan = onebit.Plan(comm, 100)
    ones = torch.ones(100)
    plan.allreduce(ones, ones)
    child = os.fork()
    if child == 0:
        words = "was forked from it"
        expect_status(Status.ERROR_ARGUMENT, lambda: plan.allreduce(ones, ones), words)
        expect_status(Status.ERROR_ARGUMENT, lambda: onebit.Plan(comm, 1), words)
        comm.close()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    dist.barrier()
    assert plan.allreduce(ones, ones) is Status.OK
    comm.close()
