"""Tests python -m onebit.info, and the search for the library."""

import ctypes.util
import re
import shutil
import subprocess
import sys

import onebit
import pytest
from conftest import PACKAGE, REPOSITORY, run_python


def run_info(*arguments, **variables):
    ran = run_python("-m", "onebit.info", *arguments, **variables)
    rows = (line.partition(" ") for line in ran.stdout.splitlines())
    return ran.returncode, {name: text.strip() for name, _, text in rows if name}, ran


def test_info_lists_what_was_found():
    code, rows, ran = run_info(ONEBIT_CODEC="scalar")
    assert code == 0, ran.stdout + ran.stderr
    assert rows["library"] == f"{onebit.library_path()} (named by ONEBIT_LIBRARY)"
    assert rows["onebit"] == f"package {onebit.__version__}, library {onebit.version()}"
    assert rows["instructions"].startswith("scalar (ONEBIT_CODEC;")
    library = onebit._native.library()
    for name, function in (
        ("sockets", "onebit_comm_create_sockets"),
        ("MPI", "onebit_comm_create_mpi"),
        ("NCCL", "onebit_comm_create_nccl"),
        ("CUDA", "onebit_allreduce_stream"),
    ):
        assert rows[name].startswith("no") != hasattr(library, function), rows[name]
    assert rows["numpy"] == __import__("numpy").__version__
    assert rows["Python"].startswith(sys.version.split()[0])


def test_the_exit_status_reports_errors(tmp_path):
    code, rows, _ = run_info(ONEBIT_LIBRARY=str(tmp_path / "none.so"))
    assert code == 1 and "was not found" in rows["error"] and "numpy" in rows
    code, rows, _ = run_info(ONEBIT_CODEC="abacus")
    assert code == 1 and "abacus" in rows["error"] and rows["onebit"]
    code, rows, _ = run_info(ONEBIT_LIBRARY=ctypes.util.find_library("m"))
    assert code == 1 and "undefined symbol: onebit_" in rows["error"]
    assert run_info("--verbose")[0] == 2
    assert run_info("--help")[0] == 0


def test_the_version_is_that_of_the_headers():
    header = (REPOSITORY / "include/onebit/status.h").read_text()
    assert onebit.__version__ == ".".join(re.findall(r"VERSION_[MP]\w+ (\d+)", header))


def test_the_packages_own_library_comes_before_the_systems(tmp_path, monkeypatch):
    monkeypatch.delenv("ONEBIT_LIBRARY", raising=False)
    monkeypatch.setattr(onebit._native, "HERE", str(tmp_path))
    assert "libonebit.so.0" in onebit._native.candidates()
    own = tmp_path / "libonebit_python.so"
    own.touch()
    assert onebit._native.candidates() == [str(own)]
    monkeypatch.setenv("ONEBIT_LIBRARY", "/another.so")
    assert onebit._native.candidates() == ["/another.so"]


def test_the_first_example_averages():
    printed = run_python(PACKAGE / "examples" / "average.py").stdout
    mean = re.fullmatch(r"element 0: (-4\.\d+) over 1000 calls, the mean of the ranks is -4\.500\n", printed)
    assert mean and abs(float(mean[1]) + 4.5) < 0.05, printed


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler is here")
def test_nccl_of_the_packages_comes_before_any_other(tmp_path):
    """Checks that a library that is linked to NCCL gets the same NCCL that torch will use, and that
    torch gets it too."""
    for number, folder in (1, tmp_path / "system"), (2, tmp_path / "site/nvidia/nccl/lib"):
        folder.mkdir(parents=True)
        source = folder / "nccl.c"
        source.write_text(f"int version(void); int version(void) {{ return {number}; }}")
        options = ["-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", folder / "libnccl.so.2"]
        subprocess.run(["cc", source, *options], check=True)
    user, system = tmp_path / "user.c", tmp_path / "system"
    user.write_text("int version(void); int used(void); int used(void) { return version(); }")
    options = ["-shared", "-fPIC", f"-L{system}", "-l:libnccl.so.2", f"-Wl,-rpath,{system}"]
    subprocess.run(["cc", user, *options, "-o", tmp_path / "user.so"], check=True)
    script = (
        "import ctypes, sys; from onebit import _native\n"
        "found = _native._open_library(); print(found.used(), ctypes.CDLL('libnccl.so.2').version())"
    )
    paths = f"{PACKAGE}:{tmp_path / 'site'}"
    ran = run_python("-c", script, PYTHONPATH=paths, ONEBIT_LIBRARY=str(tmp_path / "user.so"))
    assert ran.stdout == "2 2\n", ran.stdout + ran.stderr
