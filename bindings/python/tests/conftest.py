"""Functions that the tests share. The tests use the package beside them. The library is that of
ONEBIT_LIBRARY, or the one in the repository's build directory."""

import concurrent.futures
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = HERE.parent
REPOSITORY = PACKAGE.parents[1]
sys.path.insert(0, str(PACKAGE))
os.environ.setdefault("ONEBIT_LIBRARY", str(REPOSITORY / "build" / "libonebit.so"))

import onebit  # noqa: E402


def remove_gloo_lines(text):
    """Removes the lines in which torch 2.9's gloo prints which ranks are connected."""
    return "".join(line for line in text.splitlines(True) if not line.startswith("[Gloo]"))


def python_environment(**variables):
    """Returns an environment in which Python finds the package, with additional variables."""
    path = os.pathsep.join(filter(None, [str(PACKAGE), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **variables}


def run_python(*arguments, timeout=60, **variables):
    """Runs Python with the package. Returns the result of subprocess.run. Python aborts if its allocator is called without
    the GIL, and prints where each thread is when a signal ends it."""
    command = [sys.executable, *map(str, arguments)]
    environment = python_environment(**{"PYTHONMALLOC": "debug", "PYTHONFAULTHANDLER": "1", **variables})
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


def run_program(program, scenarios, ranks):
    """Runs a program that calls torch_common.run_scenarios. Returns its output."""
    ran = run_python(HERE / program, scenarios, ranks, timeout=900)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return remove_gloo_lines(ran.stdout)


def run_on_threads(calls):
    """Makes each call on a separate thread. Returns their results or exceptions."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        made = [pool.submit(call) for call in calls]
    return [one.exception() or one.result() for one in made]


def run_on_comms(comms, body):
    """Calls body(comm) for each communicator, on a thread. Returns the results, or raises the first
    exception of a rank."""
    results = run_on_threads([lambda comm=comm: body(comm) for comm in comms])
    for reason in results:
        if isinstance(reason, BaseException):
            raise reason
    return results


@pytest.fixture
def on_ranks():
    """Provides on_ranks(size, body): it runs body(comm) on `size` ranks, which are threads, and returns the
    results of all ranks."""

    def run(size, body, hosts=1):
        comms = onebit.Communicator.loopback(size, hosts)
        results = run_on_comms(comms, body)
        for comm in comms:
            comm.close()
        return results

    return run
