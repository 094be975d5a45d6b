"""The hook that carries an optimizer, over gloo: what each scenario finds is in
torch_carry_ranks.py."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not here")


def launch(scenarios, ranks=2):
    command = [sys.executable, str(HERE / "torch_carry_ranks.py"), scenarios, str(ranks)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.parametrize("scenarios", ["hook", "compiled,scaler", "refusals,errors"])
def test_steps_are_those_without_it(scenarios):
    assert launch(scenarios).endswith("all well\n")
