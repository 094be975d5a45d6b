"""The C library: its path, its constants, structures and functions, and its errors as exceptions."""

import ctypes
import functools
import glob
import importlib.util
import mmap
import os
import re
import sys
import types
import warnings
from ctypes import Structure
from typing import Any, NamedTuple

HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGES = "onebit", "torch", "contextlib", "functools"  # whose lines a warning does not name


def _make_interface():
    """Creates onebit._interface from the headers of a checkout, which has no file from a build."""
    from onebit._headers import generate_module

    made = types.ModuleType("onebit._interface")
    text = generate_module(os.path.join(HERE, "../../../include/onebit"))
    exec(compile(text, made.__name__, "exec"), made.__dict__)  # noqa: S102
    sys.modules[made.__name__] = made


if not importlib.util.find_spec("onebit._interface"):
    _make_interface()

from onebit import _interface  # noqa: E402
from onebit._interface import *  # noqa: E402, F403
from onebit._interface import VERSION, Status  # noqa: E402

# The names of this module that `onebit` exports too.
__all__ = [
    "BLOCK_BUFFER", "FREEZE_AUTOMATIC", "FREEZE_NEVER", "OUTER_DENSE", "OUTER_SPARSE", "TABLE",
    "WARMUP_NONE", "WARMUP_STEPS", "AdamExchange", "Dtype", "Error", "OnebitWarning", "Operation",
    "OuterRule", "Profile", "Scale", "Schedule", "Shards", "Stage", "Status", "Wire",
    "library_path", "version",
]  # fmt: skip

# --- Errors --------------------------------------------------------------------------------------


class Error(RuntimeError):
    """The exception for a call of the library that failed.

    status: the `Status` that it returned
    message: the library's text, with the argument and its value if one is wrong
    """

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message

    def __str__(self) -> str:
        return f"{self.status.name}: {self.message}"


class OnebitWarning(UserWarning):
    """The warning for a call that succeeded, but found something that the caller should check."""


def warn(text):
    """Warns at the line of the program that has called this package, perhaps through torch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, OnebitWarning, stacklevel=level)


def last_message():
    """Returns the error message of this thread's latest failure."""
    return library().onebit_last_error().decode(errors="replace")


def check(code):
    """Returns the status of a call. Raises `Error` unless it is OK, IN_PROGRESS, WARNING or SKIPPED."""
    status = Status(code)
    if status >= Status.OK or status == Status.SKIPPED:
        return status
    raise Error(status, last_message())


def argument_error(message):
    """Returns the `Error` for a wrong argument that Python has found, not the library."""
    return Error(Status.ERROR_ARGUMENT, message)


# --- Structures ----------------------------------------------------------------------------------


class OptimizerKind(NamedTuple):
    """A class of optimizers: its name, its name in C, its title, and the structure of its options."""

    kind: str
    name: str
    title: str
    options: Any

    @property
    def fields(self):
        """Returns the names of the options that only this optimizer has."""
        return [name for name, *_ in self.options._fields_ if name not in ("size", "common")]


# The package creates the classes of each optimizer from its row.
OPTIMIZERS = [OptimizerKind(*row) for row in _interface.OPTIMIZERS]
NAMES = [row.kind for row in OPTIMIZERS]


def make_structure(structure):
    """Returns a structure of zeros whose size field is set, as by the _INIT macros."""
    made = structure()
    if structure._fields_[0][0] == "size":
        made.size = ctypes.sizeof(structure)
    return made


def fields_of(structure):
    """Returns a structure as a dictionary, without `size`. Text becomes str, and numbers of an enum become
    its members."""
    found = {}
    for name, *_ in structure._fields_:
        value = getattr(structure, name)
        if isinstance(value, Structure):
            value = fields_of(value)
        elif isinstance(value, bytes):
            value = value.decode()
        elif isinstance(value, ctypes.Array):
            value = tuple(value)
        elif name in _interface.ENUM_FIELDS:
            value = _interface.ENUM_FIELDS[name](value)
        found[name] = value
    found.pop("size", None)
    return found


def call_getter(function, handle, structure, *arguments):
    """Calls a function that fills in a structure. Returns the structure as a dictionary."""
    found = make_structure(structure)
    check(function(handle, *arguments, ctypes.byref(found)))
    return fields_of(found)


# --- The library itself ------------------------------------------------------------------------


def candidates():
    """Returns the paths at which the library is looked for, in order. If ONEBIT_LIBRARY names a path, only
    that one is returned; otherwise the package's own library, then the system's."""
    named = os.environ.get("ONEBIT_LIBRARY")
    if named:
        return [named]
    own = os.path.join(HERE, "libonebit_python.so")
    if os.path.exists(own):
        return [own]
    import ctypes.util  # importing it here is cheaper: it starts compilers to find a library

    return [ctypes.util.find_library("onebit"), "libonebit.so.0", "libonebit.so"]


def find_nvidia_files(pattern):
    """Returns the files of NVIDIA's Python packages that match a pattern."""
    found = importlib.util.find_spec("nvidia")
    folders = found.submodule_search_locations if found else ()
    return [one for folder in folders for one in glob.glob(os.path.join(folder, pattern))]


def _open_nvidia_libraries(path):
    """Opens CUDA's runtime and NCCL from torch's packages before a library with kernels is opened. The
    linker then uses these libraries, also when torch is imported later. If another NCCL were opened first,
    it might lack functions that torch calls."""
    if not os.path.isfile(path):
        return
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as all_of_it:
        needed = set(re.findall(rb"\0(lib(?:cudart|nccl)\.so\.\d+)\0", all_of_it))
    for name in sorted(needed):
        for one in find_nvidia_files(f"*/lib/{name.decode()}"):
            ctypes.CDLL(one)


def _open_library():
    reasons = []
    for name in filter(None, candidates()):
        try:
            _open_nvidia_libraries(name)
            return ctypes.CDLL(name)
        except OSError as reason:
            reasons.append(str(reason))
    raise ImportError(
        "the library was not found. `pip install` builds it into the package, `make install` into the "
        "system; otherwise set ONEBIT_LIBRARY to its path\n  "
        + "\n  ".join(reasons)
    )


def _check_version(found):
    """Checks the library's version. Before version 1.0 a new minor version may change the interface."""
    wanted = VERSION.rsplit(".", 1)[0]
    version = found.onebit_version().decode()
    if version.rsplit(".", 1)[0] != wanted:
        raise ImportError(f"{found._name} is onebit {version}; this package is for {wanted}")


@functools.lru_cache(maxsize=None)
def library():
    """Returns the library. The first call opens it."""
    found = _open_library()
    try:
        names = "onebit_last_error", "onebit_version"
        _declare_functions(found, {name: _interface.FUNCTIONS[name] for name in names})
        _check_version(found)
        _declare_functions(found, _interface.FUNCTIONS)
    except AttributeError as reason:  # the reason names the library and the function
        raise ImportError(f"the library is older than this package: {reason}") from None
    optional = _interface.OPTIONAL_FUNCTIONS.items()
    _declare_functions(found, {name: types for name, types in optional if hasattr(found, name)})
    return found


def _declare_functions(found, functions):
    for name, (result, arguments) in functions.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments


def library_path() -> str:
    """Returns the path from which the library was opened."""
    return library()._name


def version() -> str:
    """Returns the library's version, "major.minor.patch"."""
    return library().onebit_version().decode()


def enum_value(kind, value, argument):
    """Returns a member of the enum `kind`, given as a member, a number, or a part of its name ("rms",
    "deepspeed")."""
    if isinstance(value, str):
        prefix = next(iter(kind)).name.rpartition("_")[0]
        names = {member.name.lower(): member for member in kind}
        found = names.get(value.lower(), names.get(f"{prefix}_{value}".lower()))
        if found is None:
            raise argument_error(f"{argument} is {value!r}, not one of {', '.join(names)}")
        return found
    try:
        return kind(value)
    except ValueError:
        raise argument_error(f"{argument} is {value!r}, not a {kind.__name__}") from None


def set_options(structure, options, common=None):
    """Sets options by keyword in a structure. Options that it does not have are set in `common`."""
    names = {name for name, *_ in structure._fields_} - {"size", "common"}
    for name, value in options.items():
        if name in names:
            kind = _interface.ENUM_FIELDS.get(name)
            setattr(structure, name, value if kind is None else enum_value(kind, value, name))
        elif common is not None:
            set_options(common, {name: value})
        else:
            raise TypeError(f"there is no option {name!r}")
    return structure
