"""Communicators from mpi4py: a launch of three ranks."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import onebit
import onebit.communicator
import pytest

MPIRUN = os.environ.get("MPIRUN", "mpirun").split()
HERE = pathlib.Path(__file__).resolve().parent
ALLOWED = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}

over_mpi = pytest.mark.skipif(
    not importlib.util.find_spec("mpi4py")
    or not hasattr(onebit._native.library(), "onebit_comm_create_mpi"),
    reason="mpi4py is not here, or the library is built without MPI",
)


class Fake:
    """What mpi4py's MPI would say of its library."""

    Comm, COMM_SELF = "a type", "a handle"

    def __init__(self, size, handle):
        self._sizeof = {self.Comm: size}.get
        self._handleof = {self.COMM_SELF: handle}.get


def test_the_kind_of_mpi_is_known_by_its_handles():
    assert onebit.communicator.mpi_kind(Fake(4, 0x44000001)) == "mpich"
    assert onebit.communicator.mpi_kind(Fake(8, 0x7F0012345678)) == "openmpi"
    assert onebit.communicator.mpi_kind(Fake(8, 0x102)) == "standard"


@pytest.mark.parametrize("kind", ["standard", "mpich", "openmpi"])
def test_a_kind_that_is_not_built_is_refused(kind, monkeypatch):
    class Library:
        _name = "/of/a/test.so"

    monkeypatch.setattr(onebit._native, "library", Library)
    with pytest.raises(onebit.Error, match="/of/a/test.so is built without MPI") as caught:
        onebit.communicator.mpi_function(kind)
    assert caught.value.status is onebit.Status.ERROR_UNSUPPORTED


@over_mpi
@pytest.mark.skipif(not shutil.which(MPIRUN[0]), reason=f"{MPIRUN[0]} is not here")
def test_under_mpirun():
    command = [*MPIRUN, "-n", "3", sys.executable, str(HERE / "mpi_ranks.py")]
    environment = {**os.environ, **ALLOWED, "PYTHONPATH": str(HERE.parent)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    words = ran.stdout + ran.stderr
    if "onebit was built for" in words:
        pytest.skip("mpi4py has another kind of MPI than the library")
    assert ran.returncode == 0 and ran.stdout == "all well\n", words


@over_mpi
@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler is here")
def test_another_mpi_is_refused(tmp_path):
    """A handle of one kind of MPI would crash another."""
    library = _of_other_kind(tmp_path)
    script = (
        "import mpi4py; mpi4py.rc.initialize = False\n"
        "from mpi4py import MPI\n"
        "import onebit.communicator\n"
        "try:\n"
        "    onebit.communicator._create_mpi(MPI.COMM_WORLD)\n"
        "except onebit.Error as error:\n"
        "    print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "LD_PRELOAD": str(library)}
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert "ERROR_UNSUPPORTED" in ran.stdout, ran.stderr
    assert "the program runs with" in ran.stdout and "of a test" in ran.stdout


def _of_other_kind(tmp_path):
    """A library that says it is the kind of MPI which mpi4py's is not."""
    from mpi4py import MPI

    other = "MPICH" if "Open MPI" in MPI.Get_library_version() else "Open MPI"
    source, library = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text(
        "#include <string.h>\n"
        "int PMPI_Init(void) { return 1; }\n"
        "int PMPI_Get_library_version(char *text, int *length) {\n"
        f'  *length = (int)strlen(strcpy(text, "{other} of a test"));\n'
        "  return 0;\n}\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library
