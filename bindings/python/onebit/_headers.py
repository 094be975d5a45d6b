"""Generates Python's interface to C from include/onebit/*.h: enums, constants, structures and functions for ctypes, and
the options of each class for type checkers. The build writes the interface to onebit/_interface.py. In a checkout
`onebit._native` generates it at each import. Raises KeyError for an unknown type.
"""

import pathlib
import re

# The headers whose functions some libraries lack. Headers that need an mpi.h are left out.
_OPTIONAL = "counters", "cuda", "nccl"
_SCALARS = {"size_t": "c_size_t", "int": "c_int", "double": "c_double", "float": "c_float", "char": "c_char",
            "uint32_t": "c_uint32", "uint64_t": "c_uint64"}  # fmt: skip
_KEYWORDS = {"c_int": "int", "c_size_t": "int", "c_double": "float", "c_float": "float"}
_HANDLES = {"cudaStream_t", "ncclComm_t"}

_BEGIN = '''"""The C interface, by onebit._headers: not to be edited."""

from __future__ import annotations

import enum
from ctypes import (
    CFUNCTYPE, POINTER, Structure, c_char, c_char_p, c_double, c_float, c_int, c_size_t, c_uint32, c_uint64,
    c_void_p,
)
from typing import TYPE_CHECKING, TypedDict

OUT = POINTER(c_void_p)  # the output of a function that makes a handle
'''
_TYPES = """
if TYPE_CHECKING:
    from typing_extensions import Unpack

    from onebit.communicator import Communicator
    from onebit.optimizer import Optimizer, Tensors
"""
_CLASS = """
    class {0}(Optimizer):
        def __init__(self, comm: Communicator, tensors: Tensors, **options: Unpack[{0}Keywords]) -> None: ...
"""


def _python_name(c_name):
    """Returns the name of a type in Python: PlanOptions for onebit_plan_options_t."""
    return "".join(one.capitalize() for one in re.fullmatch(r"onebit_(\w+?)(?:_t)?", c_name)[1].split("_"))


class _Writer:
    def __init__(self, headers):
        self.enums, self.structures, self.handles, self.pointers = [], [], set(_HANDLES), []
        self.text, self.functions, self.optional, self.kinds, self.enum_fields = {}, {}, {}, [], {}
        for path in sorted(pathlib.Path(headers).glob("*.h")):
            whole = path.read_text()
            if path.stem not in ("mpi", "mpi_calls"):
                text = re.sub(r"/\*.*?\*/", " ", whole, flags=re.S)
                self.text[path.stem] = whole, re.sub(r"\\\n", " ", text)
        self.all = "\n".join(text for _, text in self.text.values())

    def type_of(self, declared):
        """Returns the ctypes type of a declaration. Arguments that point to void or float are addresses."""
        words, stars = re.sub(r"\bconst\b|\*", " ", declared).split()[0], declared.count("*")
        if words in self.handles or words == "void" or stars > 1 or (words == "float" and stars):
            known = {"void": {0: "None", 1: "c_void_p"}, "float": {1: "c_void_p"}}.get(words, {0: "c_void_p"})
            return known.get(stars, "POINTER(c_void_p)")
        if words == "char" and stars:
            return "c_char_p"
        known = {**_SCALARS, **dict.fromkeys(self.enums, "c_int")}
        known = known.get(words) or {one: _python_name(one) for one in self.structures + self.pointers}[words]
        return f"POINTER({known})" if stars else known

    def arguments_of(self, parameters):
        """Returns the types of a list of named parameters."""
        parts = [] if parameters.strip() == "void" else parameters.split(",")
        return [self.type_of(re.sub(r"\w+\s*(\[\])?$", lambda found: "*" * bool(found[1]), one.strip()))
                for one in parts]  # fmt: skip

    def function_of(self, result, parameters):
        """Returns the type of a callback. Strings are passed as addresses."""
        result = self.type_of(result).replace("c_char_p", "c_void_p")
        return f"CFUNCTYPE({', '.join([result, *self.arguments_of(parameters)])})"

    def generate_enums(self):
        for body, name in re.findall(r"typedef enum \w+ \{(.*?)\} (onebit_\w+_t);", self.all, re.S):
            self.enums.append(name)
            yield f'\n\nclass {_python_name(name)}(enum.IntEnum):\n    """{name}"""\n\n'
            yield from (f"    {one} = {value}\n"
                        for one, value in re.findall(r"ONEBIT_(\w+)\s*=\s*(-?\d+)", body))  # fmt: skip

    def generate_constants(self):
        yield "\n\n"
        numbers = re.findall(r"#define ONEBIT_(?!VERSION)(\w+)[ ]+(\(?\(?(size_t)?\)?-?\d+\)?)[ ]*$", self.all, re.M)
        for name, value, size in numbers:
            value = re.search(r"-?\d+", value)[0]
            yield f"{name} = " + (f"c_size_t({value}).value\n" if size else f"{value}\n")

    def fields_of(self, body):
        for one in re.findall(r"([^;]+);", body):
            called = re.fullmatch(r"(.*?)\(\*(\w+)\)\((.*)\)", one.strip(), re.S)
            if called:
                yield called[2], self.function_of(called[1], called[3])
                continue
            declared, names = re.fullmatch(r"(.*?[\s*])(\w+(?:\[\w+\])?(?:,\s*\w+)*)", one.strip(), re.S).groups()
            for name in re.split(r",\s*", names):
                name, _, count = name.rstrip("]").partition("[")
                if declared.strip() in self.enums:
                    self.enum_fields[name] = _python_name(declared.strip())
                kind = self.type_of(declared)
                yield name, f"{kind} * {count.replace('ONEBIT_', '')}" if count else kind

    def generate_structures(self):
        found = re.findall(r"typedef struct \w+ \{(.*?)\n\} (onebit_\w+_t);", self.all, re.S)
        self.handles.update(re.findall(r"typedef struct \w+ \*(\w+);", self.all))
        # A structure that is a field of other structures comes first.
        found.sort(key=lambda one: (not one[1].startswith("onebit_optimizer_"), "info" not in one[1]))
        for body, name in found:
            fields = dict(self.fields_of(body))
            self.structures.append(name)
            rows = "".join(f'        ("{one}", {kind}),\n' for one, kind in fields.items())
            yield f'\n\nclass {_python_name(name)}(Structure):\n    c_name = "{name}"\n    _fields_ = [\n{rows}    ]\n'
            if name.endswith("_options_t"):
                self.kinds.append((_python_name(name)[: -len("Options")], fields))

    def generate_functions(self):
        for result, name, parameters in re.findall(r"typedef (\w+) \(\*(\w+)\)\((.*?)\);", self.all, re.S):
            self.pointers.append(name)
            yield f"\n\n{_python_name(name)} = {self.function_of(result, parameters)}\n"
        for stem, (_, text) in self.text.items():
            rows = self.optional if stem in _OPTIONAL else self.functions
            prototypes = re.findall(r"^((?:const )?\w+ \*?)(onebit_\w+)\(([^()]*)\);", text, re.M)
            for result, name, parameters in prototypes:
                rows[name] = f"({self.type_of(result)}, [{', '.join(self.arguments_of(parameters))}])"
        for name, rows in ("FUNCTIONS", self.functions), ("OPTIONAL_FUNCTIONS", self.optional):
            yield f"\n# Their results and arguments.\n{name} = {{\n"
            yield from (f'    "{one}": {types},\n' for one, types in rows.items())
            yield "}\n"

    def generate_tables(self):
        yield f"\nENUMS = {', '.join(map(_python_name, self.enums))}\n"
        yield f"STRUCTURES = {', '.join(map(_python_name, self.structures))}\n"
        yield f"ENUM_FIELDS = {{{', '.join(f'{name!r}: {kind}' for name, kind in self.enum_fields.items())}}}\n"
        yield "# Of each optimizer its class, its name in C, what it is, and its options.\nOPTIMIZERS = (\n"
        for stem, (whole, text) in self.text.items():
            if f"onebit_{stem}_create(onebit_comm_t comm, const onebit_tensor_t" in text and stem != "outer":
                title = re.match(r"/\*\s+\* ([^(:.]*[^(:. ])", whole)[1]
                yield f'    ("{_python_name("onebit_" + stem)}", "{stem}", "{title}", {_python_name(f"onebit_{stem}_options")}),\n'
        yield ")\n"

    def generate_types(self):
        yield _TYPES
        for kind, fields in sorted(self.kinds, key=lambda one: one[0] != "Optimizer"):
            base = "OptimizerKeywords" if "common" in fields else "TypedDict"
            yield f"\n    class {kind}Keywords({base}, total=False):\n"
            for name, c_type in fields.items():
                known = self.enum_fields.get(name)
                if name not in ("size", "common"):
                    yield f"        {name}: {f'{known} | str' if known else _KEYWORDS.get(c_type, 'str')}\n"
            if "common" in fields:
                yield _CLASS.format(kind)


def generate_module(headers, label=""):
    """Returns the text of the module, generated from the headers in a directory."""
    writer = _Writer(headers)
    numbers = ".".join(re.findall(r"define ONEBIT_VERSION_\w+ (\d+)", writer.all))
    made = [_BEGIN, f'\nVERSION = "{numbers}{label}"\n']
    for part in (writer.generate_enums, writer.generate_constants, writer.generate_structures, writer.generate_functions,
                 writer.generate_tables, writer.generate_types):  # fmt: skip
        made += part()
    return "".join(made)
