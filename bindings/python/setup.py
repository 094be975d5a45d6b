"""Builds the package with setuptools: it builds the library inside the package, and makes the source
distribution.

The Makefile builds the library, so GNU make and a C compiler are needed. If mpicc is found, the
    transport over its MPI is also built, one for each kind of MPI (mpicc.openmpi, mpicc.mpich). In
    either case the library is linked to no MPI.

Environment: CC and CFLAGS, as usual; MPICCS, the MPI compiler wrappers to use ("" for none);
    ONEBIT_MAKE, settings for make ("OPENMP=0 CUDA=1"); ONEBIT_LABEL, a suffix of the version ("cu13").
"""

import os
import pathlib
import re
import runpy
import shlex
import shutil
import subprocess
import tempfile

from setuptools import Distribution, find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # before 70.1
    from wheel.bdist_wheel import bdist_wheel

HERE = pathlib.Path(__file__).resolve().parent
# In the repository this file is in bindings/python. A source distribution also has it at the top.
TOP = HERE if (HERE / "Makefile").exists() else HERE.parents[1]
PACKAGE = TOP / "bindings/python"
# The sources of the library and of the package.
SOURCES = (
    "Makefile CHANGELOG.md LICENSE onebit.map onebit.pc.in include base compression collectives"
    " optimizers dropin cuda tools bindings/python bindings/fortran/rules.mk examples/rules.mk"
    " packaging/install.mk docs/site/rules.mk tests/rules.mk tests/gpu/rules.mk"
).split()
# Paths that are not part of the sources, such as the folder onebit-VERSION that setuptools creates
# here.
LEFT_OUT = re.compile(
    r"(^|/)(__pycache__|build[^/]*|onebit-\d[^/]*|[^/]*\.egg-info|\..*)(/|$)"
    r"|\.(so|pyc|whl)$|_interface\.py$"
)


def interface():
    """Returns the text of onebit/_interface.py."""
    label = os.environ.get("ONEBIT_LABEL", "")
    generate_module = runpy.run_path(str(PACKAGE / "onebit/_headers.py"))["generate_module"]
    return generate_module(TOP / "include/onebit", f"+{label}" if label else "")


def version():
    return re.search(r'VERSION = "(.*)"', interface())[1]


# --- The library ---------------------------------------------------------------------------------


def settings():
    return shlex.split(os.environ.get("ONEBIT_MAKE", ""))


def compiler():
    """Returns the command of CC that make will use."""
    named = [one[len("CC=") :] for one in settings() if one.startswith("CC=")]
    return shlex.split((named or [os.environ.get("CC", "cc")])[-1])


def machine():
    """Returns the machine for which the compiler compiles, in the form that wheels use."""
    ask = [*compiler(), "-E", "-dM", "-x", "c", os.devnull]
    macros = subprocess.run(ask, check=True, stdout=subprocess.PIPE, text=True).stdout
    known = (one for one in ("x86_64", "aarch64") if f"__{one}__ " in macros)
    return next(known, os.uname().machine)


def links_openmp():
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "openmp.c")
        source.write_text("#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n")
        command = [*compiler(), "-fopenmp", str(source), "-o", str(source.with_suffix(""))]
        return subprocess.run(command, capture_output=True).returncode == 0


def mpi_wrappers():
    named = os.environ.get("MPICCS")
    names = ["mpicc.openmpi", "mpicc.mpich", "mpicc_abi", "mpicc"] if named is None else named.split()
    found = {}
    for name in names:
        path = shutil.which(name)
        if path is None and named is not None:
            raise SystemExit(f"onebit: MPICCS names {name}, which is not there")
        if path is not None:  # Debian's mpicc is a link to another one
            found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def run_make(*options):
    jobs = [] if "MAKEFLAGS" in os.environ else [f"-j{os.cpu_count() or 1}"]
    command = ["make", *jobs, *options]
    print("+", " ".join(map(shlex.quote, command)), flush=True)
    subprocess.run(command, check=True, cwd=TOP)


def build_library():
    """Builds the shared libraries and onebit-tune, and returns their paths."""
    missing = [needed for needed in ("make", compiler()[0]) if not shutil.which(needed)]
    if missing:
        raise SystemExit(f"onebit: {' and '.join(missing)} needed to build the library, and not there: "
                         "apt-get install make gcc, where there is apt-get")  # fmt: skip
    names = [one.partition("=")[0] for one in settings()]
    common = ["FORTRAN=0", *settings()]
    common += [] if "OPENMP" in names or links_openmp() else ["OPENMP=0"]
    common += [] if "CUDA" in names else ["CUDA=0"]
    build = f"build-python-{machine()}"
    library = f"{build}/python/libonebit_python.so"
    shutil.rmtree(TOP / build / "mpi", ignore_errors=True)
    run_make("MPI=0", f"BUILD={build}", *common, "python-library", "python-tune")
    for number, wrapper in enumerate(mpi_wrappers()):
        options = ["MPI=1", f"MPICC={wrapper}", f"BUILD={build}/mpi/{number}"]
        run_make(*options, f"PYTHON_LIBRARY={library}", *common, "python-mpi")
    return [TOP / library, TOP / build / "python/onebit-tune", *(TOP / build).glob("mpi/*/python/*.so")]


# --- Commands of setuptools ----------------------------------------------------------------------


class BuildPackage(build_py):
    """Builds the package with the library in it. For an editable installation puts the library beside
    the sources."""

    def run(self):
        super().run()
        folder = PACKAGE if self.editable_mode else pathlib.Path(self.build_lib)
        for stale in (folder / "onebit").glob("libonebit_*.so"):  # from another machine or MPI
            stale.unlink()
        for path in build_library():
            shutil.copy(path, folder / "onebit")
        (folder / "onebit/_interface.py").write_text(interface())


class Binary(Distribution):
    """Installs as for one machine: auditwheel rejects a library in a package of pure Python."""

    def has_ext_modules(self):
        return True


class Wheel(bdist_wheel):
    """Names a wheel for any Python 3 and for the machine of the library."""

    def get_tag(self):
        return "py3", "none", f"linux_{machine()}"


class SourceDistribution(sdist):
    """Packs the repository's tree, and also puts pyproject.toml and setup.py at its top."""

    def make_release_tree(self, base_dir, files):
        for source in SOURCES:
            path = TOP / source
            for one in sorted(path.rglob("*")) if path.is_dir() else [path]:
                name = one.relative_to(TOP).as_posix()
                if one.is_file() and not LEFT_OUT.search(name):
                    target = pathlib.Path(base_dir, name)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(one, target)
        for name in ("pyproject.toml", "setup.py"):
            shutil.copy(PACKAGE / name, pathlib.Path(base_dir, name))
        self.distribution.metadata.write_pkg_info(base_dir)


os.chdir(HERE)
setup(
    distclass=Binary,
    version=version(),
    license="BSD-3-Clause",
    long_description=(PACKAGE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    package_dir={"": os.path.relpath(PACKAGE, HERE)},
    packages=find_packages(str(PACKAGE), include=["onebit*"]),
    package_data={"": ["py.typed"]},
    cmdclass={"build_py": BuildPackage, "bdist_wheel": Wheel, "sdist": SourceDistribution},
)
