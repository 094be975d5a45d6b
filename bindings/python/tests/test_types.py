"""onebit/__init__.pyi says of the package what is so; with mypy, also that a program is checked by it."""

import ast
import importlib.util
import inspect
import subprocess
import sys

import onebit
import pytest
from conftest import PACKAGE
from onebit import _native
from onebit.methods import METHODS, NAMES

STUB = PACKAGE / "onebit" / "__init__.pyi"
TREE = ast.parse(STUB.read_text())
CLASSES = {node.name: node for node in TREE.body if isinstance(node, ast.ClassDef)}


def names_of(node):
    """The parameters of a function of the stub."""
    found = [one.arg for one in node.args.posonlyargs + node.args.args + node.args.kwonlyargs]
    return found + [one.arg for one in (node.args.vararg, node.args.kwarg) if one]


def nodes_of(name):
    """What a class of the stub has, its own first."""
    bases = [base.id for base in CLASSES[name].bases if base.id in CLASSES]
    return [*CLASSES[name].body, *(node for base in bases for node in nodes_of(base))]


def test_every_public_name_is_in_the_stub():
    imported = {
        alias.asname
        for node in TREE.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    missing = set(onebit.__all__) - imported - set(CLASSES) - {"Request"}
    assert not missing
    assert all(hasattr(onebit, name) for name in imported - {None, "NAMES"})


@pytest.mark.parametrize("name", [name for name in CLASSES if not name.startswith("_") and name not in NAMES])
def test_methods_are_those_of_the_stub(name):
    """The optimizers' classes have those of `Optimizer`."""
    kind = getattr(onebit, name)
    seen = set()
    for node in nodes_of(name):
        if not isinstance(node, ast.FunctionDef) or node.name in seen:
            continue
        found = inspect.getattr_static(kind, node.name)
        decorators = {one.id for one in node.decorator_list}
        assert ("property" in decorators) == isinstance(found, property), node.name
        seen.add(node.name)
        if "property" in decorators:
            continue
        assert ("classmethod" in decorators) == isinstance(found, classmethod), node.name
        function = getattr(found, "__func__", found)
        assert names_of(node) == list(inspect.signature(function).parameters), node.name
    missing = {one for one in dir(kind) if not one.startswith("_")} - seen - set(dir(tuple))
    assert not missing - set(options_of(name))  # fields of Tensor


def options_of(name):
    """The fields of a class of the stub."""
    return [one.target.id for one in CLASSES[name].body if isinstance(one, ast.AnnAssign)]


def fields_of(structure):
    return [name for name, *_ in structure._fields_ if name not in ("size", "common")]


def test_options_are_those_of_the_structures():
    assert options_of("_PlanOptions") == fields_of(_native.PlanOptions)
    assert options_of("_OuterOptions") == fields_of(_native.OuterOptions)
    assert options_of("_OptimizerOptions") == fields_of(_native.OptimizerOptions)
    for method in METHODS:
        structure = _native.OPTIONS[method.kind]
        assert options_of(f"_{method.kind}Options") == fields_of(structure)


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
    for name, text in ("right", RIGHT), ("wrong", WRONG):
        (tmp_path / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--follow-imports=silent"]
    environment = {"MYPYPATH": str(PACKAGE), "PATH": ""}
    command += ["right.py", "wrong.py"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    found = [line.split(":")[:2] for line in ran.stdout.splitlines() if ": error:" in line]
    assert found == [["wrong.py", str(line)] for line in range(4, 9)], ran.stdout + ran.stderr
