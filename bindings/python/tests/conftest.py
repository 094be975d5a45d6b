"""Functions that the tests share. The package is the one beside them, the library that of ONEBIT_LIBRARY, or
of the repository's build directory."""

import os
import pathlib
import subprocess
import sys
import threading

import pytest

HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = HERE.parent
REPOSITORY = PACKAGE.parents[1]
sys.path.insert(0, str(PACKAGE))
os.environ.setdefault("ONEBIT_LIBRARY", str(REPOSITORY / "build" / "libonebit.so"))

import onebit  # noqa: E402


def without_gloo(text):
    """Gloo of torch 2.9 says on standard output who is connected."""
    return "".join(line for line in text.splitlines(True) if not line.startswith("[Gloo]"))


def launch(program, scenarios, ranks):
    """Runs a program of torch_common.run_scenarios; returns its output."""
    command = [sys.executable, str(HERE / program), scenarios, str(ranks)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return without_gloo(ran.stdout)


@pytest.fixture
def on_ranks():
    """on_ranks(size, body): body(comm) on `size` ranks, each a thread; what each returned. The
    first exception of a rank is raised here."""

    def run(size, body, hosts=1):
        comms = onebit.Communicator.loopback(size, hosts)
        results, reasons = [None] * size, [None] * size

        def rank(number):
            try:
                results[number] = body(comms[number])
            except BaseException as reason:  # noqa: BLE001
                reasons[number] = reason

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for reason in filter(None, reasons):
            raise reason
        for comm in comms:
            comm.close()
        return results

    return run
