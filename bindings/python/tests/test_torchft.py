"""The backend under torchft's Manager, where torchft is: a replica that ends, and one that goes on."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest


@pytest.mark.skipif(not importlib.util.find_spec("torchft"), reason="torchft is not here")
def test_a_replica_ends():
    command = [sys.executable, str(pathlib.Path(__file__).with_name("torchft_replicas.py"))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and "all well" in ran.stdout, ran.stdout + ran.stderr[-3000:]
