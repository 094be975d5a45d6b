"""The structures and numbers of the package are those of the headers, as a C compiler sees them."""

import ctypes
import os
import re
import shutil
import subprocess

import onebit
import pytest
from conftest import REPOSITORY
from onebit import _native
from onebit.methods import METHODS, NAMES

COMPILER = shutil.which(os.environ.get("CC", "cc").split()[0])


def lines_of_python():
    for structure in _native.STRUCTURES:
        name = structure.c_name
        yield f"sizeof {name} {ctypes.sizeof(structure)}"
        for field, *_ in structure._fields_:
            place = getattr(structure, field)
            yield f"{name}.{field} {place.offset} {place.size}"
    for kind in _native.ENUMS:
        for member in kind:
            yield f"ONEBIT_{member.name} {int(member)}"
    for name, value in _native.CONSTANTS.items():
        yield f"{name} {value}"


def program():
    body = [f"#include <{name}.h>" for name in ("onebit/onebit", "stddef", "stdio")]
    body.append("int main(void) {")
    for structure in _native.STRUCTURES:
        name = structure.c_name
        body.append(f'printf("sizeof {name} %zu\\n", sizeof({name}));')
        for field, *_ in structure._fields_:
            size = f"sizeof((({name} *)0)->{field})"
            body.append(
                f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), {size});'
            )
    for kind in _native.ENUMS:
        for member in kind:
            body.append(f'printf("ONEBIT_{member.name} %d\\n", (int)ONEBIT_{member.name});')
    for name in _native.CONSTANTS:
        body.append(f'printf("{name} %zu\\n", (size_t){name});')
    return "\n".join([*body, "return 0; }", ""])


@pytest.mark.skipif(not COMPILER, reason="there is no C compiler here")
def test_structures_and_numbers_are_those_of_the_headers(tmp_path):
    source, binary = tmp_path / "layout.c", tmp_path / "layout"
    source.write_text(program())
    include = f"-I{REPOSITORY / 'include'}"
    subprocess.run([COMPILER, "-std=c11", include, "-o", binary, source], check=True)
    said = subprocess.run([binary], check=True, capture_output=True, text=True).stdout
    assert said.splitlines() == list(lines_of_python())


def headers():
    return "\n".join(
        re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.S)
        for path in sorted((REPOSITORY / "include" / "onebit").glob("*.h"))
        if path.name not in ("cuda.h", "nccl.h", "mpi.h", "mpi_calls.h")
    )


def test_every_field_is_there():
    """offsetof knows nothing of a field that the package has not heard of."""
    text = headers()
    for structure in _native.STRUCTURES:
        name = structure.c_name[: -len("_t")]
        body = re.search(rf"typedef struct {name} \{{(.*?)\n\}} {name}_t;", text, re.S).group(1)
        body = re.sub(r"\(\*(\w+)\)\([^;]*\)", r"\1", body)  # pointers to functions
        names = re.findall(r"(\w+)(?:\[\d+\])?\s*[;,]", body)
        assert names == [field for field, *_ in structure._fields_], name


def test_every_enumerator_is_there():
    for body, name in re.findall(r"typedef enum \w+ \{(.*?)\} onebit_(\w+)_t;", headers(), re.S):
        kind = next((kind for kind in _native.ENUMS if kind.__doc__ == f"onebit_{name}_t"), None)
        if kind is None:
            continue
        assert re.findall(r"ONEBIT_(\w+)\s*=", body) == [member.name for member in kind], name


def test_every_function_has_its_arguments():
    """As many arguments as the prototype has."""
    text = headers()
    known = {**_native.STATUS_FUNCTIONS}
    known.update({name: arguments for name, (_, arguments) in _native.OTHER_FUNCTIONS.items()})
    for name, arguments in known.items():
        found = re.search(rf"\b{name}\(([^)]*)\);", text)
        assert found, name
        count = 0 if found.group(1).strip() == "void" else found.group(1).count(",") + 1
        assert count == len(arguments), name


def test_every_optimizer_has_its_row():
    """Of the calls that make an optimizer of tensors; the outer step is none."""
    made = re.findall(r"onebit_(\w+)_create\(onebit_comm_t comm, const onebit_tensor_t", headers())
    made.remove("outer")
    assert sorted(made) == sorted(method.name for method in METHODS)
    assert all(issubclass(getattr(onebit, name), onebit.Optimizer) for name in NAMES)
