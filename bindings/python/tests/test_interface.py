"""Checks that the interface that onebit._headers generates from the headers equals the C compiler's. Also lets
mypy check a program with it."""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys

import onebit
import pytest
from conftest import PACKAGE, REPOSITORY
from onebit import _headers, _interface

COMPILER = shutil.which(os.environ.get("CC", "cc").split()[0])
HEADERS = REPOSITORY / "include" / "onebit"
CONSTANTS = [name for name in dir(_interface) if name.isupper() and type(getattr(_interface, name)) is int]


def list_python_names():
    for structure in _interface.STRUCTURES:
        name = structure.c_name
        yield f"sizeof {name} {ctypes.sizeof(structure)}"
        for field, *_ in structure._fields_:
            place = getattr(structure, field)
            yield f"{name}.{field} {place.offset} {place.size}"
    for kind in _interface.ENUMS:
        for member in kind:
            yield f"ONEBIT_{member.name} {int(member)}"
    for name in CONSTANTS:
        yield f"ONEBIT_{name} {ctypes.c_ssize_t(getattr(_interface, name)).value}"


def write_c_line(line):
    """Returns the C statement that prints the same line."""
    name, field = line.split()[0].split(".") if "." in line else (line.split()[0], None)
    if field:
        return f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name} *)0)->{field}));'
    if name == "sizeof":
        return f'printf("sizeof {line.split()[1]} %zu\\n", sizeof({line.split()[1]}));'
    return f'printf("{name} %lld\\n", (long long){name});'


@pytest.mark.skipif(not COMPILER, reason="there is no C compiler here")
def test_structures_and_numbers_are_those_of_the_headers(tmp_path):
    """Compares structures and constants. A field that Python lacks changes the offsets of later fields."""
    source, binary, lines = tmp_path / "layout.c", tmp_path / "layout", list(list_python_names())
    body = [f"#include <{name}.h>" for name in ("onebit/onebit", "onebit/counters", "stddef", "stdio")]
    source.write_text("\n".join([*body, "int main(void) {", *map(write_c_line, lines), "return 0; }", ""]))
    subprocess.run([COMPILER, "-std=c11", f"-I{HEADERS.parent}", "-o", binary, source], check=True)
    said = subprocess.run([binary], check=True, capture_output=True, text=True).stdout
    assert said.splitlines() == lines and len(lines) > 300


def test_every_declaration_is_read():
    """Checks that Python has each function, enum, structure, constant and optimizer that the headers declare."""
    texts = [path.read_text() for path in HEADERS.glob("*.h") if path.stem not in ("mpi", "mpi_calls")]
    text = re.sub(r"/\*.*?\*/", "", "\n".join(texts), flags=re.S)
    functions = {**_interface.FUNCTIONS, **_interface.OPTIONAL_FUNCTIONS}
    assert sorted(functions) == sorted(set(re.findall(r"^[a-z][\w* ]* \*?(onebit_\w+)\(", text, re.M)))
    kinds = [kind.__doc__ for kind in _interface.ENUMS] + [one.c_name for one in _interface.STRUCTURES]
    assert sorted(kinds) == sorted(re.findall(r"\} (onebit_\w+_t);", text))
    assert len(re.findall(r"\bONEBIT_\w+ = ", text)) == sum(map(len, _interface.ENUMS))
    found = [row[1] for row in _interface.OPTIMIZERS]
    assert sorted(found) == sorted(re.findall(r"const onebit_(\w+)_options_t \*options,\s+onebit_optimizer_t", text))
    assert all(issubclass(getattr(onebit, name), onebit.Optimizer) for name in onebit._native.NAMES)


def test_an_unknown_type_is_refused(tmp_path):
    (tmp_path / "new.h").write_text("onebit_status_t onebit_new(struct stat *thing);\n")
    with pytest.raises(KeyError):
        _headers.generate_module(tmp_path)


RIGHT = """
import onebit
comms: list[onebit.Communicator] = onebit.Communicator.loopback(2)
with comms[0] as comm:
    plan = onebit.Plan(comm, 10, bits=4, schedule="exchange", dtype=onebit.Dtype.BFLOAT16)
    status: onebit.Status = plan.iallreduce(bytearray(20), bytearray(20)).wait()
    adam = onebit.Adam(comm, [(bytearray(40), None)], beta1=0.8, clip_norm=1.0)
    adam.step(1e-3)
    worse = adam.check()
    if worse is not None:
        print(worse[1].upper())
"""
WRONG = """
import onebit
comm = onebit.Communicator.self_()
onebit.Plan(comm, "ten")
onebit.Plan(comm, 10, bit=4)
comm.rank()
onebit.Adam(comm, [(bytearray(40), None)], freeze_steps=100)
onebit.Outer(comm, []).check().upper()
"""


@pytest.mark.skipif(not importlib.util.find_spec("mypy"), reason="mypy is not here")
def test_mypy_accepts_a_right_program_and_each_line_of_a_wrong_one_is_found(tmp_path):
    shutil.copytree(PACKAGE / "onebit", tmp_path / "package" / "onebit")
    (tmp_path / "package" / "onebit" / "_interface.py").write_text(_headers.generate_module(HEADERS))
    for name, text in ("right", RIGHT), ("wrong", WRONG):
        (tmp_path / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--follow-imports=silent"]
    environment = {"MYPYPATH": str(tmp_path / "package"), "PATH": ""}
    command += ["right.py", "wrong.py"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    found = [line.split(":")[:2] for line in ran.stdout.splitlines() if ": error:" in line]
    assert found == [["wrong.py", str(line)] for line in range(4, 9)], ran.stdout + ran.stderr
