"""python -m onebit.torch.run: a program that is not changed."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not here")


def run(arguments, ranks=1):
    """(exit status, what it said on standard error) of each rank."""
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "onebit.torch.run", *arguments], stderr=subprocess.PIPE,
            text=True, env={**os.environ, "PYTHONPATH": path, "RANK": str(rank),
                            "WORLD_SIZE": str(ranks)},
        )  # fmt: skip
        for rank in range(ranks)
    ]
    said = [one.communicate(timeout=100)[1] for one in started]
    return [(one.returncode, text) for one, text in zip(started, said)]


def test_a_program_that_is_not_changed(tmp_path):
    import torch

    if torch.__version__ < "2":
        pytest.skip("this torch does not say which hooks a model has")
    first, second = run(["--bits", "8", str(HERE / "launched.py"), str(tmp_path / "store")], 2)
    assert first[0] == second[0] == 0, (first, second)
    words = "onebit: 4 buckets of gradients compressed ("
    assert words in first[1] and "from rank 0), 1 by torch, 0 of them" in first[1], first
    assert "onebit" not in second[1], second


def test_a_program_without_a_model():
    ((status, said),) = run(["-m", "platform"])
    if "torch before 2.0" in said:
        pytest.skip("this torch does not say which hooks a model has")
    words = "onebit: no DistributedDataParallel on the processor is without a hook of its own\n"
    assert (status, said) == (0, words)
    ((status, said),) = run(["--bits", "3", "x.py"])
    assert status == 2 and "invalid choice: 3" in said
