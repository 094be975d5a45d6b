"""python -m onebit.info: prints which library the package has found, and what it can use on this
machine.

Exit status: 0; 1 if there is no library, if it has another version, or if it creates no plan with these
    environment variables; 2 for a wrong command line.
"""

import ctypes
import ctypes.util
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys

from onebit import _native
from onebit._native import Error
from onebit.communicator import MPI_KINDS, Communicator, mpi_function, mpi_kind, mpi_part
from onebit.plan import Plan


def _version_of(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_function(function):
    return hasattr(_native.library(), function)


def _describe_origin(path):
    if os.environ.get("ONEBIT_LIBRARY"):
        return "named by ONEBIT_LIBRARY"
    return "inside the package" if os.path.dirname(path) == _native.HERE else "the system's"


def _describe_library():
    path = _native.library_path()
    yield "onebit", f"package {_native.VERSION}, library {_native.version()}"
    interface = _native.version().rpartition(".")[0]
    yield "interface", f"{interface}: before 1.0 a minor version may change it"
    yield "library", f"{path} ({_describe_origin(path)})"


def _find_codec():
    """Yields the codec that a plan uses: that of ONEBIT_CODEC, or the fastest one on this processor."""
    with Communicator.self_() as comm, Plan(comm, 1) as plan:
        info = plan.info()
    chosen = "ONEBIT_CODEC" if os.environ.get("ONEBIT_CODEC") else "the fastest here"
    yield "instructions", f"{info['codec']} ({chosen}; this processor is {platform.machine()})"


# --- Transports ----------------------------------------------------------------------------------


def _mpi_parts():
    if _has_function("onebit_comm_create_mpi"):
        return "the library has it for the MPI it was built with"
    inside = os.path.dirname(_native.library_path()) == _native.HERE
    kinds = [name for kind, name in MPI_KINDS.items() if inside and mpi_part(kind)]
    return f"built for {' and '.join(kinds)}" if kinds else None


def _describe_mpi():
    """Describes MPI. Imports mpi4py without initialising MPI."""
    parts = _mpi_parts()
    if parts is None:
        return "no: built without MPI (an mpicc was not there)"
    if importlib.util.find_spec("mpi4py") is None:
        return f"{parts}; no mpi4py here"
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as reason:
        return f"{parts}; mpi4py finds no MPI library: {reason}".partition("\n")[0]
    words = " ".join(MPI.Get_library_version().partition("\n")[0].split()).rstrip("\0").split(",")[0]
    try:
        mpi_function(mpi_kind(MPI))
    except Error as reason:
        return f"no: {reason.message}"
    return f"{parts}; mpi4py {_version_of('mpi4py')} uses {words}"


def _find_loaded_file(name):
    """Returns the file from which this process has loaded a library."""
    with open("/proc/self/maps") as maps:
        found = (line.split()[-1] for line in maps if f"/lib{name}.so" in line)
        return next(found, f"lib{name}.so is not loaded in this process")


def _find_kernels():
    with open(_native.library_path(), "rb") as file:
        found = re.search(rb"onebit kernels: ([\d,]+)", file.read())
    return ", ".join(f"sm_{int(one) // 10}" for one in found[1].split(b",")) if found else "kernels"


def _describe_nccl():
    if _has_function("onebit_comm_create_nccl"):
        return f"the library has it, {_find_loaded_file('nccl')}"
    found = _native.find_nvidia_files("nccl/lib/libnccl.so*")
    path = (found or [ctypes.util.find_library("nccl")])[0]
    here = f"NCCL is here, {path}" if path else "no NCCL here"
    return f"no: the library is built without NCCL (make CUDA=1, ONEBIT_LIBRARY); {here}"


def _describe_driver():
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no driver here (libcuda.so.1)"
    count = ctypes.c_int()
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return f"the driver reports error {code}" if code else f"devices here: {count.value}"


def _describe_cuda():
    if _has_function("onebit_allreduce_stream"):
        return f"the library has {_find_kernels()}; {_find_loaded_file('cudart')}; {_describe_driver()}"
    return f"no: the library is built without CUDA (make CUDA=1, ONEBIT_LIBRARY); {_describe_driver()}"


def _describe_transports():
    yield "loopback", "ranks that are threads of this process"
    yield "custom", "a Transport in Python"
    yield "sockets", "yes"
    yield "MPI", _describe_mpi()
    yield "NCCL", _describe_nccl()
    yield "CUDA", _describe_cuda()


def _describe_packages():
    yield "Python", f"{platform.python_version()}, {sys.executable}"
    for package in ("numpy", "torch", "mpi4py"):
        yield package, _version_of(package) or "not installed"


def _print_rows(rows):
    for name, text in rows:
        print(f"{name:<15} {text}", flush=True)


def main(arguments):
    if arguments:
        print(__doc__, file=sys.stdout if arguments == ["--help"] else sys.stderr)
        return 0 if arguments == ["--help"] else 2
    good = True
    for rows in (_describe_library, _find_codec, _describe_transports):
        try:
            _print_rows(rows())
        except (ImportError, RuntimeError) as reason:  # no library was loaded, or a plan cannot be created
            print(f"{'error':<15} {reason}")
            good = False
            if rows is _describe_library:
                break
    _print_rows(_describe_packages())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
