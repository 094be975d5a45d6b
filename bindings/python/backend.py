"""Builds the package: the hooks of PEP 517 and 660, for pip and others that call them.

The library is built by the Makefile, the one place that knows how: GNU make and a C compiler have to
be there, and nothing of Python. Where an mpicc is found, the transport over its MPI is built too, of
each kind (mpicc.openmpi, mpicc.mpich); the library is linked to no MPI either way.

Environment: CC and CFLAGS, as ever; MPICCS, the wrappers to take ("" for none); MAKEFLAGS.
Config settings: make="VARIABLE=VALUE ...", for all that the Makefile has
(`pip install --config-settings=make="OPENMP=0" .`).
"""

import ast
import base64
import gzip
import hashlib
import io
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import tarfile
import tempfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
TOP = HERE.parents[1]
# Of the sources, what the library and the package are made of.
SOURCES = (
    "Makefile CHANGELOG.md LICENSE onebit.map onebit.pc.in include base compression collectives"
    " optimizers dropin cuda bindings/python bindings/fortran/rules.mk examples/rules.mk"
    " packaging/install.mk tests/rules.mk tests/gpu/rules.mk"
).split()
LEFT_OUT = re.compile(r"(^|/)(__pycache__|build[^/]*|\..*)(/|$)|\.(so|pyc|whl)$|_version\.py$")


# --- What the package is -------------------------------------------------------------------------


def _version():
    header = (TOP / "include/onebit/status.h").read_text()
    return ".".join(re.findall(r"define ONEBIT_VERSION_\w+ (\d+)", header))


def _project():
    """[project] of pyproject.toml and its tables, as {"project": {...}, "project.urls": {...}}.
    Python has no TOML before 3.11; the values there are strings and lists of them, in a form that
    Python shares."""
    tables, table, key, text = {}, None, None, ""
    for line in (HERE / "pyproject.toml").read_text().splitlines():
        if key is None and re.match(r"\s*(#|$)", line):
            continue
        if key is None and line.startswith("["):
            table = tables.setdefault(line.strip().strip("[]"), {})
            continue
        if key is None:
            key, _, text = (part.strip() for part in line.partition("="))
        else:
            text += line
        try:
            table[key], key = ast.literal_eval(text), None
        except SyntaxError:  # a list goes on in the next line
            continue
    return tables


def _metadata():
    tables = _project()
    project = tables["project"]
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {project['name']}",
        f"Version: {_version()}",
        f"Summary: {project['description']}",
        f"License: {project['license']}",
        f"Requires-Python: {project['requires-python']}",
        "Description-Content-Type: text/markdown",
        f"Keywords: {','.join(project['keywords'])}",
    ]
    lines += [f"Classifier: {one}" for one in project["classifiers"]]
    lines += [f"Requires-Dist: {one}" for one in project["dependencies"]]
    for extra, needs in tables["project.optional-dependencies"].items():
        lines += [f"Provides-Extra: {extra}"]
        lines += [f'Requires-Dist: {one}; extra == "{extra}"' for one in needs]
    lines += [f"Project-URL: {name}, {url}" for name, url in tables.get("project.urls", {}).items()]
    return "\n".join([*lines, "", (HERE / project["readme"]).read_text()])


# --- The library ---------------------------------------------------------------------------------


def _settings(config):
    given = (config or {}).get("make", "")
    return shlex.split(given if isinstance(given, str) else " ".join(given))


def _compiler(settings):
    """The command of CC, as make will have it."""
    named = [one[len("CC=") :] for one in settings if one.startswith("CC=")]
    return shlex.split((named or [os.environ.get("CC", "cc")])[-1])


def _machine(compiler):
    """What the compiler compiles for, as wheels name it."""
    ask = [*compiler, "-E", "-dM", "-x", "c", os.devnull]
    macros = subprocess.run(ask, check=True, stdout=subprocess.PIPE, text=True).stdout
    for machine in ("x86_64", "aarch64"):
        if f"__{machine}__ " in macros:
            return machine
    return os.uname().machine


def _run(command, **keywords):
    print("+", " ".join(map(shlex.quote, map(str, command))), flush=True)
    subprocess.run(command, check=True, **keywords)


def _links_openmp(compiler):
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "openmp.c")
        source.write_text("#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n")
        command = [*compiler, "-fopenmp", str(source), "-o", str(source.with_suffix(""))]
        return subprocess.run(command, capture_output=True).returncode == 0


def _mpi_wrappers():
    named = os.environ.get("MPICCS")
    names = ["mpicc.openmpi", "mpicc.mpich", "mpicc"] if named is None else named.split()
    found = {}
    for name in names:
        path = shutil.which(name)
        if path is None and named is not None:
            raise SystemExit(f"onebit: MPICCS names {name}, which is not there")
        if path is not None:
            found.setdefault(os.path.realpath(path), path)
    # Debian's mpicc is one of the others; realpath has seen through the link
    return list(found.values())


def _build_library(config):
    """Builds, and returns the shared libraries."""
    settings = _settings(config)
    compiler = _compiler(settings)
    for needed in ("make", compiler[0]):
        if not shutil.which(needed):
            raise SystemExit(f"onebit: {needed} is needed to build the library, and is not there")
    if not any(one.startswith("OPENMP=") for one in settings) and not _links_openmp(compiler):
        settings.append("OPENMP=0")
    machine = _machine(compiler)
    build = f"build-python-{machine}"
    common = ["FORTRAN=0", *settings]
    if not any(one.startswith("CUDA=") for one in settings):
        common.append("CUDA=0")
    shutil.rmtree(TOP / build / "mpi", ignore_errors=True)
    library = f"{build}/python/libonebit_python.so"
    make = ["make", *([] if "MAKEFLAGS" in os.environ else [f"-j{os.cpu_count() or 1}"])]
    _run([*make, "MPI=0", f"BUILD={build}", *common, "python-library"], cwd=TOP)
    libraries = [TOP / library]
    for number, wrapper in enumerate(_mpi_wrappers()):
        part = f"{build}/mpi/{number}"
        options = ["MPI=1", f"MPICC={wrapper}", f"BUILD={part}", f"PYTHON_LIBRARY={library}"]
        _run([*make, *options, *common, "python-mpi"], cwd=TOP)
        libraries += (TOP / part / "python").glob("*.so")
    return {path.name: path for path in reversed(libraries)}, machine


# --- Wheels --------------------------------------------------------------------------------------


class _Wheel:
    """A zip file with a RECORD. Its times are those of SOURCE_DATE_EPOCH, or 1980: the same input
    makes the same wheel."""

    def __init__(self, folder, tag):
        stem = f"onebit-{_version()}"
        self.info = f"{stem}.dist-info"
        self.name = f"{stem}-{tag}.whl"
        self.zip = zipfile.ZipFile(pathlib.Path(folder, self.name), "w", zipfile.ZIP_DEFLATED)
        self.record = []
        self.add(f"{self.info}/METADATA", _metadata())
        self.add(f"{self.info}/licenses/LICENSE", (TOP / "LICENSE").read_text())
        wheel = ["Wheel-Version: 1.0", "Generator: onebit", "Root-Is-Purelib: false", f"Tag: {tag}"]
        self.add(f"{self.info}/WHEEL", "\n".join([*wheel, ""]))

    def add(self, name, content, mode=0o644):
        data = content.encode() if isinstance(content, str) else content
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        self.record.append(f"{name},sha256={digest},{len(data)}")
        entry = zipfile.ZipInfo(name)
        entry.compress_type = zipfile.ZIP_DEFLATED
        entry.external_attr = (0o100000 | mode) << 16
        self.zip.writestr(entry, data)

    def close(self):
        record = f"{self.info}/RECORD"
        self.zip.writestr(zipfile.ZipInfo(record), "\n".join([*self.record, f"{record},,", ""]))
        self.zip.close()
        return self.name


def _make_wheel(folder, config, add_package):
    libraries, machine = _build_library(config)
    wheel = _Wheel(folder, f"py3-none-linux_{machine}")
    add_package(wheel, libraries)
    return wheel.close()


def _add_package(wheel, libraries):
    for path in sorted((HERE / "onebit").rglob("*")):
        name = path.relative_to(HERE).as_posix()
        if path.is_file() and not LEFT_OUT.search(name):
            wheel.add(name, path.read_bytes())
    wheel.add("onebit/_version.py", f'version = "{_version()}"\n')
    for name, path in sorted(libraries.items()):
        wheel.add(f"onebit/{name}", path.read_bytes(), 0o755)


def _add_link(wheel, libraries):
    for name, path in libraries.items():
        shutil.copyfile(path, HERE / "onebit" / name)
    wheel.add("onebit.pth", f"{HERE}\n")


# --- The hooks -----------------------------------------------------------------------------------


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    return _make_wheel(wheel_directory, config_settings, _add_package)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """The package where it is, with the library put beside it."""
    return _make_wheel(wheel_directory, config_settings, _add_link)


def build_sdist(sdist_directory, config_settings=None):
    """The same tree as the repository's, with a pyproject.toml at its top too."""
    stem = f"onebit-{_version()}"
    top = (HERE / "pyproject.toml").read_text()
    top = top.replace('backend-path = ["."]', 'backend-path = ["bindings/python"]')
    top = top.replace('readme = "README.md"', 'readme = "bindings/python/README.md"')
    generated = {"pyproject.toml": top, "PKG-INFO": _metadata()}
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in sorted({**generated, **_sources()}.items()):
            data = data.encode() if isinstance(data, str) else data
            entry = tarfile.TarInfo(f"{stem}/{name}")
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
    packed = gzip.compress(plain.getvalue(), mtime=0)
    pathlib.Path(sdist_directory, f"{stem}.tar.gz").write_bytes(packed)
    return f"{stem}.tar.gz"


def _sources():
    found = {}
    for source in SOURCES:
        path = TOP / source
        for one in sorted(path.rglob("*")) if path.is_dir() else [path]:
            name = one.relative_to(TOP).as_posix()
            if one.is_file() and not LEFT_OUT.search(name):
                found[name] = one.read_bytes()
    return found
