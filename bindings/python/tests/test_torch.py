"""torch.distributed over gloo, the communication hook and the optimizers: processes of this
machine. What each scenario finds is in torch_ranks.py. And torch tensors in one process."""

import importlib.util
import pathlib
import subprocess
import sys

import onebit
import pytest
from onebit import Status
from test_torch_hook import launch as of_program
from test_torch_hook import without_gloo

HERE = pathlib.Path(__file__).resolve().parent

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not here")


def launch(scenarios, ranks):
    return of_program(scenarios, ranks, "torch_ranks.py")


def test_four_processes():
    connections = "collectives,over_gloo,groups,of_another_backend,falls_back,over_nccl_by_default"
    said = launch(connections + ",hook,widths,sparse,own_adam,training,state_goes_on", 4)
    print(said)
    assert said.endswith("all well\n")


def test_an_error_in_the_hook_reaches_all():
    assert launch("hook_fails", 3) == "all well\n"


def test_fsdp2():
    from onebit.torch import fsdp

    if fsdp.FSDPModule is None:
        pytest.skip("this torch has no set_custom_reduce_scatter")
    said = launch("fsdp", 4)
    print(said)
    assert said.endswith("all well\n")


@pytest.mark.parametrize("scenario", ["gone", "gone_over_gloo"])
def test_a_rank_that_is_gone(scenario):
    assert sorted(launch(scenario, 3).splitlines()) == ["rank 0 knows", "rank 1 knows"]


@pytest.mark.parametrize("transport", ["gloo", "sockets"])
def test_a_process_ends(tmp_path, transport):
    """Rank 0 closes last; where rank 1's threads of gloo outlive its interpreter they abort it.
    Sockets need not be closed, nor the hook's state."""
    script = (
        "import atexit, sys, threading, time\n"
        "def left():\n"
        "    print([one.name for one in threading.enumerate()\n"
        "           if one.name[:7] == 'onebit-' and one.name[7:].isdigit()])\n"
        "atexit.register(left)  # called after what is registered later\n"
        f"sys.path.insert(0, {str(HERE.parent)!r}); rank = int(sys.argv[1])\n"
        "import torch, torch.distributed as dist, onebit.torch\n"
        "store = dist.FileStore(sys.argv[2], 2)\n"
        "dist.init_process_group('gloo', store=store, rank=rank, world_size=2)\n"
        "comm = onebit.Communicator.torch(transport=sys.argv[3])\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(40, 1))\n"
        "model.register_comm_hook(onebit.torch.HookState(), onebit.torch.allreduce_hook)\n"
        "for _ in range(2): model(torch.ones(40)).sum().backward()\n"
        "time.sleep(1 - rank)\n"
        "if sys.argv[3] == 'gloo': comm.close(); dist.destroy_process_group()\n"
    )
    command = [sys.executable, "-c", script]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), transport],
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]
    said = [without_gloo(one.communicate(timeout=100)[0]) for one in ranks]
    assert said == ["[]\n", "[]\n"] and all(one.returncode == 0 for one in ranks)


def test_importing_the_package_imports_neither_torch_nor_numpy_nor_mpi4py():
    script = (
        f"import sys; sys.path.insert(0, {str(HERE.parent)!r}); import array, onebit\n"
        "comm = onebit.Communicator.self_(); one = array.array('f', [1.0])\n"
        "onebit.Plan(comm, 1).allreduce(one, one)\n"
        "print([name for name in ('torch', 'numpy', 'mpi4py') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.stdout == "[]\n", ran.stderr


def test_tensors_are_used_in_place():
    import torch

    with onebit.Communicator.self_() as comm:
        plan = onebit.Plan(comm, 64, dtype="bfloat16")
        ones = torch.ones(64, dtype=torch.bfloat16)
        assert plan.allreduce(ones * 3, ones) is Status.OK and (ones == 3).all()
        wrong = {
            "is not contiguous": torch.ones(128, dtype=torch.bfloat16)[::2],
            "is of torch.float64, not": torch.ones(64, dtype=torch.float64),
            "is of FLOAT32, the plan of BFLOAT16": torch.ones(64),
            "is on meta, not on the processor": torch.ones(64, device="meta"),
        }
        for words, tensor in wrong.items():
            with pytest.raises(onebit.Error, match=words):
                plan.allreduce(tensor, ones)
        with pytest.raises(onebit.Error, match="init_process_group comes first"):
            onebit.Communicator.torch()
