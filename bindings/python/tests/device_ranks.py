"""The program that test_device.py runs with the emulated CUDA device. Ranks are threads of this process. Arrays
on the device have a __cuda_array_interface__, as those of torch and CuPy do."""

import array
import ctypes
import os
import sys
import threading

import onebit
from conftest import run_on_comms
from onebit import _native


class Array:
    """An array of floats on the device."""

    def __init__(self, values, **described):
        self.count = len(values)
        self.pointer = ctypes.c_void_p()
        size = ctypes.c_size_t(4 * max(self.count, 1))
        assert library.cudaMalloc(ctypes.byref(self.pointer), size) == 0
        host = array.array("f", values)
        self.copy(self.pointer.value, host.buffer_info()[0], 1)
        self.described = described

    def copy(self, to, source, kind):
        size = ctypes.c_size_t(4 * self.count)
        code = library.cudaMemcpy(ctypes.c_void_p(to), ctypes.c_void_p(source), size, kind)
        assert code == 0

    @property
    def __cuda_array_interface__(self):
        address = self.pointer.value
        shape = {"shape": (self.count,), "typestr": "<f4", "data": (address, False), "version": 3}
        return {**shape, **self.described}

    def values(self):
        host = array.array("f", bytes(4 * self.count))
        assert library.cudaDeviceSynchronize() == 0
        self.copy(host.buffer_info()[0], self.pointer.value, 2)
        return list(host)


def expect_error(call, words):
    try:
        call()
    except onebit.Error as error:
        assert words in error.message, error
        return
    raise AssertionError(words)


def check_collectives(comm):
    size, rank, count = comm.size, comm.rank, 64
    mine = [float(rank + 1)] * count
    result = Array([0.0] * count)
    plan = onebit.Plan(comm, count, device="cuda", bits=8, scale="largest")
    assert plan.info()["codec"] == "cuda"
    assert plan.allreduce(Array(mine), result) is onebit.Status.OK
    assert plan.synchronize() is onebit.Status.OK
    mean = (size + 1) / 2
    assert all(abs(one - mean) < 0.05 for one in result.values()), result.values()
    if comm.transport == "nccl":
        plan.scale_result(result, 2.0)
        assert all(abs(one - 2 * mean) < 0.1 for one in result.values())
        plan.allreduce(Array([float("nan")] * count if rank == 0 else mine), result)
        plan.scale_result(result, 1.0)
        assert all(one != one for one in result.values())
        assert plan.synchronize() is onebit.Status.SKIPPED
        assert plan.calls() == (1, 1)
    gather = onebit.Plan(comm, count, operation="allgather", device="cuda")
    everyone = Array([0.0] * count * size)
    gather.allgather(Array(mine), everyone)
    if comm.transport == "nccl":
        gather.scale_result(everyone, 1.0)
    assert everyone.values()[::count] == [float(one + 1) for one in range(size)]
    scatter = onebit.Plan(comm, count, operation="reduce_scatter", device="cuda")
    scatter.reduce_scatter(Array(mine * size), result)
    assert result.values() == [mean] * count
    parameter, gradient = Array([1.0] * count), Array(mine)
    optimizer = onebit.Momentum(comm, [(parameter, gradient)], device="cuda", warmup_steps=5)
    assert optimizer.step(0.5) is onebit.Status.OK
    assert optimizer.synchronize() is onebit.Status.OK
    assert all(abs(one - (1 - 0.5 * mean)) < 1e-5 for one in parameter.values())
    if comm.transport in ("self", "nccl"):
        before, rate = parameter.values()[0], Array([0.25])
        rated = onebit.Momentum(comm, [(parameter, gradient)], device="cuda", warmup_steps=5)
        rated.set_learning_rate_pointer(rate)
        rated.step(float("nan"))
        assert rated.synchronize() is onebit.Status.OK
        assert all(abs(one - (before - 0.25 * mean)) < 1e-5 for one in parameter.values())
        rated.set_learning_rate_pointer(None)
        expect_error(lambda: rated.set_learning_rate_pointer(parameter), "rate has 64 elements of FLOAT32, not one")
    return mean


def check_wrong_memory():
    comm = onebit.Communicator.self_()
    device, host = Array([1.0] * 8), array.array("f", [1.0] * 8)
    on_host, on_device = onebit.Plan(comm, 8), onebit.Plan(comm, 8, device="cuda")
    expect_error(lambda: on_host.allreduce(device, host), "sendbuf is on a CUDA device, not on the proc")
    expect_error(lambda: on_device.allreduce(host, device), "sendbuf is on the processor, not on a CUDA")
    expect_error(lambda: on_device.allreduce(Array([1.0] * 8, typestr="<f8"), device), "has type <f8, not")
    strided = Array([1.0] * 8, strides=(8,))
    expect_error(lambda: on_device.allreduce(strided, device), "sendbuf is not contiguous")
    readable = Array([1.0] * 8, data=(device.pointer.value, True))
    expect_error(lambda: on_device.allreduce(device, readable), "recvbuf is read-only")
    expect_error(lambda: onebit.Lion(comm, [(host, host)], device="cuda"), "parameter is on the processor")


library = ctypes.CDLL(_native.candidates()[0])
check_collectives(onebit.Communicator.self_())
check_wrong_memory()
run_on_comms(onebit.Communicator.loopback(2), check_collectives)
print("alone and over loopback")
if "torch" in sys.argv[1:]:
    from onebit.torch.transport import Nccl

    nccl = Nccl()
    text = nccl.unique_id()
    both = threading.Barrier(2)

    def over_nccl(rank):
        assert library.cudaSetDevice(rank) == 0  # NCCL requires a device for each rank
        comm = nccl.create(onebit.Communicator, text, rank, 2)
        assert (comm.rank, comm.size, comm.transport) == (rank, 2, "nccl")
        mean = check_collectives(comm)
        both.wait()  # a rank that closes first would end the other's calls
        comm.close()
        return mean

    assert run_on_comms(range(2), over_nccl) == [1.5, 1.5]
    print("over NCCL")

    def close_alone(rank):
        """Closes a communicator while rank 0's stream waits for a message that never arrives, as it may in a
        graph."""
        assert library.cudaSetDevice(rank) == 0
        comm = nccl.create(onebit.Communicator, text, rank, 2, timeout=1)
        both.wait()
        if rank == 0:
            place = Array([0.0])
            stream = ctypes.c_void_p()
            library.cudaStreamCreateWithFlags(ctypes.byref(stream), 1)
            message = (place.pointer, ctypes.c_size_t(1), 7, 1, handles[0], stream)
            assert library.ncclRecv(*message) == 0
            comm.close()
        both.wait()
        comm.close()

    text, handles, init = nccl.unique_id(), {}, nccl._init
    nccl._init = lambda made, *rest: handles.__setitem__(rest[-1], made._obj) or init(made, *rest)
    run_on_comms(range(2), close_alone)
    nobody_else = (onebit.Communicator, nccl.unique_id(), 0, 2, 0.3)
    expect_error(lambda: nccl.create(*nobody_else), "waited 0.3 s for the other ranks")
    print("in time", flush=True)
    os._exit(0)  # a thread still waits for the missing rank
