"""What test_torchft.py runs: `python torchft_replicas.py` starts two replicas under torchft's Manager.
The second ends after some steps, and the first goes on alone."""

import datetime
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import torch
import torch.multiprocessing
from torch.distributed import TCPStore
from torchft import Manager
from torchft.coordination import LighthouseServer

from onebit.torch import backend
from onebit.torch.torchft import ProcessGroupOnebit

TOGETHER = 20


def replica(number, lighthouse):
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    seconds = datetime.timedelta(seconds=20)
    group = ProcessGroupOnebit(seconds)
    manager = Manager(
        pg=group, load_state_dict=lambda state: None, state_dict=dict, min_replica_size=1,
        use_async_quorum=False, replica_id=f"replica{number}", store_addr="localhost",
        store_port=store.port, rank=0, world_size=1, lighthouse_addr=lighthouse,
        timeout=seconds, quorum_timeout=seconds, init_sync=False,
    )  # fmt: skip
    values, together, alone = torch.empty(20000), 0, 0
    while alone < 3:
        if number == 1 and together == TOGETHER:
            os._exit(0)  # without a word
        manager.start_quorum()
        size, ours = manager.num_participants(), manager.is_participating()
        values.copy_(torch.arange(20000.0) % 7 + number)
        manager.allreduce(values).wait()
        if not manager.should_commit():
            print(f"replica {number}: a step that is not committed", flush=True)
        elif size == 2:
            together += 1
            wanted = torch.arange(20000.0) % 7 + 0.5
            bits = backend._made[-1].compressed
            assert torch.equal(values, wanted) or bits and (values - wanted).abs().max() < 0.5
        elif ours:
            alone += together >= TOGETHER
            assert torch.equal(values, torch.arange(20000.0) % 7 + number)
    print(f"all well, {bits} sums in bits", flush=True)
    os._exit(0)


if __name__ == "__main__":
    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=5000)
    torch.multiprocessing.start_processes(
        replica, (server.address(),), nprocs=2, start_method="spawn")
