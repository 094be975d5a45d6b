"""Starts the ranks of the examples, and finds the package if it is not installed."""

import os
import pathlib
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))


def _run(rank, environment, body, arguments):
    if environment:
        os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    body(*arguments)
    dist.barrier()
    dist.destroy_process_group()


def start(ranks, body, *arguments):
    """Calls body(*arguments) on each rank of a process group over gloo. The ranks are the processes
    that torchrun has started, or otherwise `ranks` processes of this machine."""
    if "RANK" in os.environ:
        _run(None, None, body, arguments)
        return
    with socket.socket() as reserved:  # no other program gets this port; rank 0 can listen at it
        reserved.bind(("127.0.0.1", 0))
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port = str(reserved.getsockname()[1])
        at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
        torch.multiprocessing.spawn(_run, (at, body, arguments), nprocs=ranks)
