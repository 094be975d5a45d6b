"""The hook that carries an optimizer, over gloo: what each scenario finds is in
torch_carry_ranks.py."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not here")


def without_gloo(text):
    """Gloo of torch 2.9 says on standard output who is connected."""
    return "".join(line for line in text.splitlines(True) if not line.startswith("[Gloo]"))


def launch(scenarios, ranks=2, program="torch_carry_ranks.py"):
    command = [sys.executable, str(HERE / program), scenarios, str(ranks)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return without_gloo(ran.stdout)


@pytest.mark.parametrize(
    "scenarios", ["hook", "compiled,scaler", "refusals,errors", "programs_apart,skipped"]
)
def test_steps_are_those_without_it(scenarios):
    assert launch(scenarios).endswith("all well\n")


@pytest.mark.parametrize("scenario", ["interrupted", "half_way"])
def test_an_interrupt_reaches_all(scenario):
    assert launch(scenario) == "all well\n"


def test_workers_of_a_data_loader_and_an_end_without_close(tmp_path):
    """Workers are forked from a rank and end while it trains; then the ranks end with all open."""
    script = (
        "import sys; sys.path[:0] = [sys.argv[3], sys.argv[4]]; rank = int(sys.argv[1])\n"
        "import gc, torch, torch.distributed as dist, onebit.torch, torch_carry_ranks as ranks\n"
        "torch.set_num_threads(1)\n"
        "store = dist.FileStore(sys.argv[2], 2)\n"
        "dist.init_process_group('gloo', store=store, rank=rank, world_size=2)\n"
        "class Data(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 6\n"
        "    def __getitem__(self, number):\n"
        "        global run; run = None; gc.collect()  # gives up what it has inherited\n"
        "        return number\n"
        "run = ranks.Run(None, {}, timeout=60)\n"
        "for number in torch.utils.data.DataLoader(Data(), num_workers=2):\n"
        "    run.step(rank, int(number))\n"
        "assert run.begun == 4 and ranks.alike(run.bits()); print('well', flush=True)\n"
    )
    arguments = [str(tmp_path / "store"), str(HERE.parent), str(HERE)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]
    said = [one.communicate(timeout=200) for one in ranks]
    assert [without_gloo(out) for out, _ in said] == ["well\n"] * 2, said
    assert [one.returncode for one in ranks] == [0, 0], said
