#!/usr/bin/env python3
"""torch_adam.py COUNT ROUNDS LAUNCHES: PyTorch's fused Adam on COUNT parameters of the GPU.

Prints the median, the least and the greatest time of a step in seconds; or, where there is no
PyTorch with CUDA, why not. onebit-bench adam -d cuda runs it.
"""
import sys


def measure(torch, count, rounds, launches):
    parameter = torch.nn.Parameter(torch.randn(count, device="cuda") * 0.02)
    parameter.grad = torch.randn(count, device="cuda") * 0.01
    optimizer = torch.optim.Adam([parameter], lr=1e-6, fused=True)
    start = torch.cuda.Event(enable_timing=True)
    stop = torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(rounds + 2):
        start.record()
        for _ in range(launches):
            optimizer.step()
        stop.record()
        stop.synchronize()
        times.append(1e-3 * start.elapsed_time(stop) / launches)
    times = sorted(times[2:])
    return (times[(rounds - 1) // 2] + times[rounds // 2]) / 2, times[0], times[-1]


def main():
    count, rounds, launches = map(int, sys.argv[1:])
    try:
        import torch
    except ImportError:
        return "PyTorch is not installed"
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA device"
    return "%.9g %.9g %.9g" % measure(torch, count, rounds, launches)


print(main())
