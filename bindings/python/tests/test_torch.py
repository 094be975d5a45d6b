"""Tests torch.distributed over gloo with the programs of `LAUNCHES`, whose ranks are processes of this machine.
Also tests torch tensors in one process, the end of a process, and `python -m onebit.torch.run`."""

import functools
import importlib.util
import os

import onebit
import pytest
from conftest import HERE, remove_gloo_lines, run_on_threads, run_program, run_python
from onebit import Status

torch = pytest.importorskip("torch")

from onebit.torch import fsdp, shards  # noqa: E402

# The launches of each program: scenarios that run one after the other, and the number of ranks.
LAUNCHES = {
    "torch_ranks": [
        ("check_collectives,check_collectives_over_gloo,check_groups,check_other_backend,check_fallback,"
         "check_nccl_by_default,check_hook,check_hook_groups,check_widths,check_training,check_resumed_state", 4),
        ("check_freed_objects,check_forked_models,check_interrupt", 2),
        ("check_hook_errors,check_lost_rank", 3), ("check_lost_rank_over_gloo", 3),
    ],
    "torch_carry_ranks": [
        ("check_compress", 1), ("check_compress", 4),
        ("check_hook,check_compiled_models,check_grad_scaler,check_schedulers,check_way_back,check_interrupts", 2),
        ("check_states,check_refused_models,check_errors,check_diverging_programs,check_skipped_steps,"
         "check_interrupted_backward", 2),
    ],
    "torch_auto_ranks": [
        ("check_choices,check_thawed_layers,check_refused,check_corrections,check_varying_steps,check_faster_link", 2),
        ("check_first_sum,check_warmup,check_waiting_states,check_shares,check_odd_parameters,check_resumed", 2),
        ("check_local_steps,check_excluded_local_steps,check_resumed_local_steps,check_failed_local_steps,"
         "check_closed_local_steps", 2),
        ("check_local_steps,check_skipped_local_steps", 4),
    ],
    "torch_program_ranks": [
        ("check_moved_parameters,check_two_models,check_foreign_parameters,check_optimizers,check_beside_one_bit,"
         "check_diloco", 2),
    ],
    "torch_resume_ranks": [
        ("check_resumed,check_half_precision,check_dense_states,check_schedules", 2),
        ("check_other_rank_counts,check_other_averaging,check_distributed_states", 3),
    ],
    "fsdp_ranks": [
        ("check_mean_gradients,check_edge_cases,check_device_plans,check_without_error_feedback,check_losses", 4),
        ("check_full_precision,check_compressed,check_skipped_steps,check_checkpoints,check_refused", 4),
        ("check_norms,check_inside_hosts,check_inside_resumed,check_inside_refused", 4),
    ],
    "trainers_ranks": [
        ("accelerate", 2), ("lightning,lightning_local", 2), ("transformers,transformers_back,transformers_local", 2),
    ],
    "trainings_ranks": [("all", 2)],
}  # fmt: skip


def reason_to_skip(program, scenarios):
    """Returns the reason why this torch cannot run the scenarios; None: it can."""
    first = scenarios.split(",")[0]
    if program == "trainers_ranks" and not importlib.util.find_spec(first):
        return f"{first} is not here"
    lacks = {"check_mean_gradients": fsdp.FSDPModule is None, "fsdp_ranks": not shards.FSDPModule}
    return "this torch has no such thing" if lacks.get(program) or lacks.get(first) else None


@pytest.mark.parametrize(
    ("program", "scenarios", "ranks"),
    [(program, *row) for program, rows in LAUNCHES.items() for row in rows],
)
def test_ranks(program, scenarios, ranks):
    reason = reason_to_skip(program, scenarios)
    if reason:
        pytest.skip(reason)
    said = run_program(f"{program}.py", scenarios, ranks)
    print(said)
    if "check_lost_rank" in scenarios:
        assert sorted(said.splitlines()) == ["rank 0 knows", "rank 1 knows"]
    else:
        assert said.endswith("all well\n")


def run_on_two_ranks(tmp_path, script, *arguments, first=""):
    """Runs a script in two processes over gloo, with `rank` set. Returns their output. first: lines that come
    before all imports."""
    start = (
        f"import sys; sys.path.insert(0, {str(HERE)!r}); rank = int(sys.argv[1])\n"
        f"{first}"
        "import torch, torch.distributed as dist, onebit.torch\n"
        "torch.set_num_threads(1)\n"
        "store = dist.FileStore(sys.argv[2], 2)\n"
        "dist.init_process_group('gloo', store=store, rank=rank, world_size=2)\n"
    )
    run = functools.partial(run_python, "-c", start + script, timeout=200)
    ranks = run_on_threads([functools.partial(run, rank, tmp_path / "store", *arguments) for rank in range(2)])
    assert [one.returncode for one in ranks] == [0, 0], ranks
    return [remove_gloo_lines(one.stdout) for one in ranks]


def test_threads_end_before_the_interpreter():
    """Checks that a thread of the package may free what a call held, also if the program ends meanwhile."""
    script = (
        "import functools, time, torch\n"
        "from onebit.torch import ranks\n"
        "class Held:\n"
        "    def __del__(self):\n"
        "        for _ in range(100):\n"
        "            torch.ones(10).sum(), time.sleep(0.005)\n"
        "        print('freed', flush=True)\n"
        "ranks._calls().put(functools.partial(lambda held: None, Held()))\n"
        "print('ends', flush=True)\n"
    )
    ran = run_python("-c", script)
    assert ran.returncode == 0 and ran.stdout.split() == ["ends", "freed"], ran


@pytest.mark.parametrize("transport", ["gloo", "sockets"])
def test_a_process_ends(tmp_path, transport):
    """Checks that processes end well without closing sockets or the hook's state. Rank 0 closes last: if rank 1's
    gloo threads outlived its interpreter, they would abort it."""
    first = (
        "import atexit, threading, time\n"
        "def left():\n"
        "    print([one.name for one in threading.enumerate()\n"
        "           if one.name[:7] == 'onebit-' and one.name[7:].isdigit()])\n"
        "atexit.register(left)  # called after what is registered later\n"
    )
    script = (
        "comm = onebit.Communicator.torch(transport=sys.argv[3])\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(40, 1))\n"
        "model.register_comm_hook(onebit.torch.HookState(), onebit.torch.allreduce_hook)\n"
        "for _ in range(2): model(torch.ones(40)).sum().backward()\n"
        "time.sleep(1 - rank)\n"
        "if sys.argv[3] == 'gloo': comm.close(); dist.destroy_process_group()\n"
    )
    assert run_on_two_ranks(tmp_path, script, transport, first=first) == ["[]\n", "[]\n"]


def test_workers_of_a_data_loader_and_an_end_without_close(tmp_path):
    """Checks that workers are forked from a rank and end while the rank trains, and that the ranks then end with
    all objects open. They are not compared over gloo: its thread could still free a tensor of Python when the
    interpreter ends, which aborts the process."""
    script = (
        "import gc, torch_carry_ranks as ranks\n"
        "class Data(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 6\n"
        "    def __getitem__(self, number):\n"
        "        global run; run = None; gc.collect()  # gives up what it has inherited\n"
        "        return number\n"
        "run = ranks.Run(None, {}, timeout=60)\n"
        "for number in torch.utils.data.DataLoader(Data(), num_workers=2):\n"
        "    run.step(rank, int(number))\n"
        "found = onebit.torch.ranks.gather(run.optimizer.comm, run.get_parameters().numpy().tobytes())\n"
        "assert run.begun == 4 and found[0] == found[1]; print('well', flush=True)\n"
    )
    assert run_on_two_ranks(tmp_path, script) == ["well\n"] * 2


@pytest.mark.skipif(os.environ.get("ONEBIT_TEST_SHARE") != "1", reason="a minute, which make check-long takes")
@pytest.mark.skipif(not hasattr(torch, "compile"), reason="the figures are of a newer torch")
def test_the_guides_have_the_lines_of_the_example():
    said = run_python(HERE.parent / "examples" / "train_ddp.py", timeout=300).stdout.splitlines()
    guides = "".join((HERE.parents[2] / "docs" / f"python-{one}.md").read_text() for one in ("optimizers", "trainers"))
    missing = [line for line in said if "validation loss" in line and f"    {line}\n" not in guides]
    assert len(said) >= 6 and not missing, missing


def test_a_report_has_a_suitable_unit_for_each_number_of_bytes():
    from onebit.torch.report import Report

    for count, text in ((336, "336 bytes"), (999600, "1 MB"), (19312000, "19.3 MB"), (2.05e9, "2.05 GB")):
        assert f"{text} sent by this rank instead of 2.05 GB" in str(Report(1, 0, 0, count, 2.05e9, {}))


def test_importing_the_package_imports_neither_torch_nor_numpy_nor_mpi4py():
    script = (
        "import array, sys, onebit\n"
        "comm = onebit.Communicator.self_(); one = array.array('f', [1.0])\n"
        "onebit.Plan(comm, 1).allreduce(one, one)\n"
        "print([name for name in ('torch', 'numpy', 'mpi4py') if name in sys.modules])"
    )
    ran = run_python("-c", script)
    assert ran.stdout == "[]\n", ran.stderr


def test_tensors_are_used_in_place():
    with onebit.Communicator.self_() as comm:
        plan = onebit.Plan(comm, 64, dtype="bfloat16")
        ones = torch.ones(64, dtype=torch.bfloat16)
        assert plan.allreduce(ones * 3, ones) is Status.OK and (ones == 3).all()
        wrong = {
            "is not contiguous": torch.ones(128, dtype=torch.bfloat16)[::2],
            "has type torch.float64, not": torch.ones(64, dtype=torch.float64),
            "has type FLOAT32, but the plan has type BFLOAT16": torch.ones(64),
            "is on meta, not on the processor": torch.ones(64, device="meta"),
        }
        for words, tensor in wrong.items():
            with pytest.raises(onebit.Error, match=words):
                plan.allreduce(tensor, ones)
        with pytest.raises(onebit.Error, match="call init_process_group first"):
            onebit.Communicator.torch()


# --- A program that is not changed ---------------------------------------------------------------


def run_launcher(arguments, ranks=1):
    """Runs the launcher. Returns (exit status, standard error) of each rank."""
    run = functools.partial(run_python, "-m", "onebit.torch.run", *arguments, timeout=100, WORLD_SIZE=str(ranks))
    ran = run_on_threads([functools.partial(run, RANK=str(rank)) for rank in range(ranks)])
    return [(one.returncode, one.stderr) for one in ran]


def test_a_program_that_is_not_changed(tmp_path):
    if torch.__version__ < "2":
        pytest.skip("this torch does not say which hooks a model has")
    first, second = run_launcher(["--bits", "8", str(HERE / "launched.py"), str(tmp_path / "store")], 2)
    assert first[0] == second[0] == 0, (first, second)
    words = "onebit: 4 buckets of gradients compressed ("
    assert words in first[1] and "from rank 0), 1 averaged by torch, 0 of them" in first[1], first
    assert "onebit" not in second[1], second


def test_a_program_without_a_model():
    ((status, said),) = run_launcher(["-m", "platform"])
    if "torch before 2.0" in said:
        pytest.skip("this torch does not say which hooks a model has")
    words = "onebit: nothing was compressed: no model is a DistributedDataParallel on the CPU, or each has a hook\n"
    assert (status, said) == (0, words)
    ((status, said),) = run_launcher(["--bits", "3", "x.py"])
    assert status == 2 and "invalid choice: 3" in said
