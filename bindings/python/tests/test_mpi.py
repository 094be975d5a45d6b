"""Communicators from mpi4py: a launch of three ranks."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import onebit
import pytest

MPIRUN = os.environ.get("MPIRUN", "mpirun").split()
HERE = pathlib.Path(__file__).resolve().parent
ALLOWED = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}

pytestmark = [
    pytest.mark.skipif(
        not importlib.util.find_spec("mpi4py"), reason="mpi4py is not here"
    ),
    pytest.mark.skipif(
        not hasattr(onebit._native.library(), "onebit_comm_create_mpi"),
        reason="the library is built without MPI",
    ),
]


@pytest.mark.skipif(not shutil.which(MPIRUN[0]), reason=f"{MPIRUN[0]} is not here")
def test_under_mpirun():
    command = [*MPIRUN, "-n", "3", sys.executable, str(HERE / "mpi_ranks.py")]
    ran = subprocess.run(
        command, env={**os.environ, **ALLOWED}, capture_output=True, text=True, timeout=100
    )
    words = ran.stdout + ran.stderr
    if "is built with" in words and "mpi4py with" in words:
        pytest.skip("mpi4py is built with another MPI than the library")
    assert ran.returncode == 0 and ran.stdout == "all well\n", words


def test_another_mpi_is_refused(monkeypatch):
    """A handle of one MPI would crash another."""
    script = (
        "import mpi4py; mpi4py.rc.initialize = False\n"
        "from mpi4py import MPI\n"
        "import onebit, onebit.mpi\n"
        "class Other:\n"
        "    Get_library_version = staticmethod(lambda: 'Other MPI v9')\n"
        "try:\n"
        "    onebit.mpi._check_same(onebit._native.library(), Other)\n"
        "except onebit.Error as error:\n"
        "    print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert "ERROR_UNSUPPORTED" in ran.stdout, ran.stderr
    assert "mpi4py with Other MPI v9" in ran.stdout
