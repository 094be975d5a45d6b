"""Tests memory of a CUDA device, on the emulated one. `make gpu-tests CUDA=emulated
BUILD=build-emulated MPI=0` builds the libraries for this. No GPU is needed."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import types

import pytest
from conftest import HERE, REPOSITORY, run_python
from onebit import buffers

BUILD = pathlib.Path(os.environ.get("ONEBIT_EMULATED_BUILD", REPOSITORY / "build-emulated"))
ARCHIVES = [BUILD / "libonebit.a", BUILD / "tests/emulation/libemulation.a"]
COMPILER = shutil.which(os.environ.get("CXX", "c++").split()[0])


@pytest.mark.skipif(
    not COMPILER or not all(one.exists() for one in ARCHIVES), reason="no emulated device is built"
)
def test_memory_of_a_device(tmp_path):
    whole = ["-Wl,--whole-archive", *map(str, ARCHIVES), "-Wl,--no-whole-archive"]
    options = ["-shared", "-fopenmp", "-pthread", "-lm", "-lrt", "-ldl"]
    subprocess.run([COMPILER, "-o", tmp_path / "libonebit.so", *whole, *options], check=True)
    torch = ["torch"] if importlib.util.find_spec("torch") else []
    library = str(tmp_path / "libonebit.so")
    ran = run_python(HERE / "device_ranks.py", *torch, timeout=150, ONEBIT_LIBRARY=library)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.startswith("alone and over loopback\n")
    assert ran.stdout.endswith("over NCCL\nin time\n") == bool(torch)


def test_memory_that_torch_does_not_use_is_freed_first(monkeypatch):
    """Checks that torch frees its unused memory before the library allocates memory from the
    driver."""
    emptied = []
    cuda = types.SimpleNamespace(
        is_initialized=lambda: True,
        mem_get_info=lambda: (100 << 20, 1 << 30),
        empty_cache=lambda: emptied.append(True),
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    buffers.make_room(1 << 20)
    assert not emptied
    buffers.make_room(2 << 20)
    assert emptied
