#!/usr/bin/env python3
"""torch_cuda.py [RANKS]: checks onebit's plans and optimizers on torch's tensors on one GPU; prints
one line per check.

    PYTHONPATH=bindings/python ONEBIT_LIBRARY=build-gpu/libonebit.so tests/gpu/torch_cuda.py

Ranks are processes that share the GPU: NCCL_HOSTID makes each of them a host of its own. The script
ends with "N passed, N failed", and with exit status 1 if a check fails.
"""

import os
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import onebit
import onebit.torch

SECONDS = 240  # for all ranks
BUSY = 200_000_000  # clock cycles of a kernel that only waits: 0.1 s
CHECKS = []


def register_check(function):
    CHECKS.append(function)
    return function


def exact_values(count, rank, dtype=torch.float32):
    """Returns values of one magnitude whose signs are equal on all ranks: one bit represents them exactly."""
    signs = torch.where(torch.arange(count, device="cuda") % 3 == 0, -1.0, 1.0)
    return (signs * (rank + 1)).to(dtype)


def mean_of_exact(count, size):
    return exact_values(count, 0) * (size + 1) / 2


def equal_on_all_ranks(parameters):
    flat = torch.cat([one.detach().float().flatten() for one in parameters]).cpu()
    of_all = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, flat)
    return all(torch.equal(one, flat) for one in of_all)


def make_network(width=512):
    torch.manual_seed(0)
    layers = torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width)
    return torch.nn.Sequential(*layers).cuda()


def train(model, optimizer, steps):
    """Returns the median host time of a step, and the last loss."""
    times = []
    for step in range(steps):
        torch.manual_seed(1000 * dist.get_rank() + step)
        start = time.perf_counter()
        optimizer.zero_grad()  # gradients have new addresses in each step
        loss = model(torch.randn(64, 512, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return sorted(times)[steps // 2], loss.item()


@register_check
def allreduce_on_the_default_and_on_a_side_stream(comm):
    count = 1 << 22
    plan = onebit.Plan(comm, count, device="cuda")
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(BUSY // 4)
            result = torch.empty(count, device="cuda")
            plan.allreduce(exact_values(count, comm.rank), result)  # torch may reuse the input at once
            torch.full((count,), float("nan"), device="cuda")
            assert torch.equal(result, mean_of_exact(count, comm.size))
    assert plan.synchronize() == onebit.Status.OK


@register_check
def slices_at_odd_offsets(comm):
    count = 100_003
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        plan = onebit.Plan(comm, count, device="cuda", dtype=str(dtype).split(".")[1])
        for shift in (1, 2, 3, 5):
            whole = torch.zeros(count + 8, device="cuda", dtype=dtype)
            part = whole[shift : shift + count]
            part.copy_(exact_values(count, comm.rank, dtype))
            plan.allreduce(part, part)
            assert torch.equal(part.float(), mean_of_exact(count, comm.size)), (dtype, shift)
            assert not whole[:shift].any() and not whole[shift + count :].any(), (dtype, shift)


@register_check
def requests_begin_behind_the_current_stream(comm):
    count = 1 << 20
    plan = onebit.Plan(comm, count, device="cuda")
    mine, result = torch.zeros(count, device="cuda"), torch.empty(count, device="cuda")
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            mine.zero_()
            torch.cuda._sleep(BUSY)
            mine.copy_(exact_values(count, comm.rank))
            plan.iallreduce(mine, result).wait()
            assert torch.equal(result, mean_of_exact(count, comm.size))


@register_check
def an_outer_step_behind_a_side_stream(comm):
    count = 1 << 16
    parameter = torch.zeros(count, device="cuda")
    outer = onebit.Outer(comm, [parameter], local_steps=1)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(BUSY)
        parameter.copy_(exact_values(count, comm.rank))
        outer.step()
        outer.synchronize()
        assert torch.allclose(parameter, mean_of_exact(count, comm.size), rtol=1e-3)
    outer.close()


@register_check
def a_graph_is_replayed(comm):
    count = 1 << 20
    plan, mine = onebit.Plan(comm, count, device="cuda"), exact_values(count, comm.rank)
    result = torch.empty_like(mine)
    plan.allreduce(mine, result)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.allreduce(mine, result)
        plan.scale_result(result, float(comm.size))
    for _ in range(100):
        result.zero_()
        graph.replay()
        assert torch.equal(result, mean_of_exact(count, comm.size) * comm.size)
    assert plan.synchronize() == onebit.Status.OK


@register_check
def values_that_are_not_finite(comm):
    count = 1000
    plan = onebit.Plan(comm, count, device="cuda")
    mine = exact_values(count, comm.rank)
    if comm.rank == 0:
        mine[3] = float("inf")
    result = torch.full_like(mine, 7.0)
    plan.allreduce(mine, result)
    plan.scale_result(result, 1.0)
    assert result.isnan().all() and plan.synchronize() == onebit.Status.SKIPPED


@register_check
def efficient_adam_over_nccl_beside_the_backward_pass(comm):
    model = DistributedDataParallel(make_network(), device_ids=[0])
    optimizer = onebit.torch.EfficientAdam(model.parameters(), lr=1e-3, comm=comm)
    optimizer.attach(model)
    seconds, loss = train(model, optimizer, 30)
    print(f"  over NCCL: host time of a step {seconds * 1e3:.2f} ms, loss {loss:.5f}")
    assert equal_on_all_ranks(model.parameters())
    optimizer.onebit.close()


def train_compressed(stage):
    model = DistributedDataParallel(make_network(), device_ids=[0])
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = onebit.torch.compress(model, adam, stage=stage, warmup_steps=10)
    seconds, loss = train(model, optimizer, 30)
    print(f"  over sockets, stage={stage}: host time of a step {seconds * 1e3:.2f} ms, loss {loss:.5f}")
    assert equal_on_all_ranks(model.parameters())
    optimizer.close()
    return [one.detach().clone() for one in model.parameters()]


@register_check
def compress_over_sockets_by_kernels_and_on_the_host(comm):
    """Both runs give the same bits. The first uses the library's kernels, the second its code for the
    processor."""
    torch.use_deterministic_algorithms(True)
    by_kernels, on_host = train_compressed("device"), train_compressed("host")
    torch.use_deterministic_algorithms(False)
    assert all(torch.equal(*both) for both in zip(by_kernels, on_host))


@register_check
def a_step_staged_on_the_host(comm):
    """Measures the cost of copies: 64 Mi parameters, without a network or a model."""
    parameters = [torch.nn.Parameter(torch.randn(1 << 22, device="cuda")) for _ in range(16)]
    for one in parameters:
        one.grad = torch.randn_like(one)
    alone = onebit.Communicator.self_()
    for stage in "device", "host":
        optimizer = onebit.torch.EfficientAdam(parameters, lr=1e-6, comm=alone, stage=stage)
        times = []
        for _ in range(8):
            torch.cuda.synchronize()
            start = time.perf_counter()
            optimizer.step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        print(f"  64 Mi parameters, alone, stage={stage}: {sorted(times)[4] * 1e3:.1f} ms a step")
        optimizer.close()
    alone.close()


def run_rank():
    dist.init_process_group("gloo")
    torch.cuda.set_device(0)
    comm, failed = onebit.Communicator.nccl(), 0
    for one in CHECKS:
        try:
            one(comm)
            outcome = "passed"
        except BaseException as reason:  # noqa: BLE001
            outcome, failed = f"FAILED {type(reason).__name__}: {reason}", failed + 1
        print(f"rank {comm.rank} {one.__name__}: {outcome}", flush=True)
        torch.cuda.synchronize()
        dist.barrier()
    comm.close()
    dist.destroy_process_group()
    sys.exit(failed > 0)


def start_rank(rank, size):
    own = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29511,
           "NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": 1,
           "NCCL_NET": "Socket", "GLOO_SOCKET_IFNAME": "lo", "ONEBIT_TIMEOUT": 60,
           "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    output = tempfile.TemporaryFile("w+")
    process = subprocess.Popen(
        [sys.executable, "-u", __file__],
        env={**os.environ, **{name: str(value) for name, value in own.items()}},
        stdout=output,
        stderr=subprocess.STDOUT,
    )
    return process, output


def main():
    if "RANK" in os.environ:
        run_rank()
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    ranks = [start_rank(rank, size) for rank in range(size)]
    end, text = time.monotonic() + SECONDS, ""
    for process, output in ranks:
        try:
            process.wait(max(end - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            process.kill()
            text += f"a rank was ended after {SECONDS} s: FAILED\n"
        output.seek(0)
        text += output.read()
    passed, ended = text.count(": passed\n"), all(one.returncode == 0 for one, _ in ranks)
    failed = size * len(CHECKS) - passed
    print(f"{text}{passed} passed, {failed} failed")
    sys.exit(failed > 0 or not ended)


if __name__ == "__main__":
    main()
