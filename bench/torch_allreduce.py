"""Times an average over ranks: by PyTorch's own means, by DeepSpeed's algorithm, and in one bit by
onebit.

    onebit-netlab --sockets -H 4 -b 1gbit -- python3 bench/torch_allreduce.py
    torchrun --nproc_per_node=4 bench/torch_allreduce.py -m 64

All methods take turns in each round. The time of a call is that of the slowest rank. DeepSpeed's
method is the compressed allreduce of its releases up to 0.19.6: four collectives, with the same
bytes as onebit's. Its GPU kernels are tensor operations here. gloo's sums of float16 are those of
torch's fp16_compress_hook. Needs torch and the package of bindings/python.
"""

import argparse
import math
import statistics
import time

import numpy
import torch
import torch.distributed as dist

import onebit
import onebit.torch  # noqa: F401


def gloo_float32(count):
    def call(values):
        dist.all_reduce(values)
        values /= dist.get_world_size()

    return call


def gloo_float16(count):
    def call(values):
        half = values.half()
        dist.all_reduce(half)
        values.copy_(half)
        values /= dist.get_world_size()

    return call


def signs(values):
    return torch.from_numpy(numpy.packbits(values.numpy() >= 0))


def unpacked(bits):
    return torch.from_numpy(numpy.unpackbits(bits.numpy())).float().mul_(2).sub_(1)


def deepspeed(count):
    """The algorithm of Tang et al., arXiv 2102.02888, section 6, with error feedback on the sender
    and on the server."""
    size = dist.get_world_size()
    quantum = size * math.lcm(size, 8)
    padded = -(-count // quantum) * quantum
    share = padded // size
    error, server_error = torch.zeros(padded), torch.zeros(share)

    def compressed(values, residual):
        """Replaces the values by their residual. Returns their scale and their bits."""
        values = values.add_(residual)
        scale = values.norm() / math.sqrt(values.numel())
        bits = signs(values)
        residual.copy_(values).sub_(unpacked(bits).mul_(scale))
        return scale.reshape(1), bits

    def call(values):
        whole = torch.zeros(padded)
        whole[:count] = values
        scale, bits = compressed(whole, error)
        received = torch.empty_like(bits)
        dist.all_to_all_single(received, bits)
        scales = [torch.empty(1) for _ in range(size)]
        dist.all_gather(scales, scale)
        mean = torch.zeros(share)
        for one, its_bits in zip(scales, received.chunk(size)):
            mean.add_(unpacked(its_bits).mul_(one / size))
        scale, bits = compressed(mean, server_error)
        gathered = [torch.empty_like(bits) for _ in range(size)]
        dist.all_gather(gathered, bits)
        dist.all_gather(scales, scale)
        result = torch.cat([unpacked(b).mul_(one) for one, b in zip(scales, gathered)])
        values.copy_(result[:count])

    return call


def one_bit(count):
    plan = onebit.Plan(one_bit.comm, count)
    return lambda values: plan.allreduce(values, values)


METHODS = {
    "gloo float32": gloo_float32,
    "gloo float16": gloo_float16,
    "DeepSpeed's": deepspeed,
    "onebit": one_bit,
}


def measure(count, rounds):
    """Returns the seconds of each method's calls on the slowest rank."""
    calls = {name: make(count) for name, make in METHODS.items()}
    mine = torch.randn(count, generator=torch.Generator().manual_seed(dist.get_rank()))
    seconds = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            values = mine.clone()
            dist.barrier()
            start = time.perf_counter()
            call(values)
            taken = torch.tensor([time.perf_counter() - start])
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            if number > 0:  # the first call fills memory and opens connections
                seconds[name].append(float(taken))
    return seconds


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", type=float, nargs="+", default=[1, 16, 64], metavar="MIB",
                        help="sizes, of float32 (1 16 64)")  # fmt: skip
    parser.add_argument("-i", type=int, default=11, metavar="N", help="timed rounds (11)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    one_bit.comm = onebit.Communicator.torch()
    tells = dist.get_rank() == 0
    if tells:
        print(f"# {dist.get_world_size()} ranks, torch {torch.__version__}, {options.i} rounds by turns")
        print("# milliseconds: median (smallest to largest); times onebit's median")
    for size in options.m:
        seconds = measure(int(size * 2**18), options.i)
        own = statistics.median(seconds["onebit"])
        for name, all_of_it in seconds.items():
            middle = statistics.median(all_of_it)
            if tells:
                print(f"{size:6g} MiB  {name:13} {1e3 * middle:9.2f} ({1e3 * min(all_of_it):.2f} to "
                      f"{1e3 * max(all_of_it):.2f})  {middle / own:6.1f}", flush=True)  # fmt: skip
    one_bit.comm.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
