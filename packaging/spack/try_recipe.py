#!/usr/bin/env python3
"""Builds and installs by the Spack recipe where there is no Spack.

    try_recipe.py SOURCES PREFIX [+VARIANT | ~VARIANT]...

It replaces the names that a recipe imports from spack.package, runs the phases of a MakefilePackage
with the real make, and gives spec and prefix as Spack would. How Spack resolves dependencies and
wraps compilers is not tried.
"""
import contextlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import types

directives = []


def record_directive(name):
    def note(*arguments, **options):
        directives.append((name, arguments, options))

    return note


@contextlib.contextmanager
def working_dir(path):
    before = os.getcwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


def make(*targets):
    subprocess.run(["make", "-j2", *targets], check=True)


class MakefilePackage:
    pass


class CudaPackage:
    cuda_arch_values = ("70", "75", "80", "90", "90a", "100f")


class Prefix(str):
    lib = property(lambda self: Prefix(os.path.join(self, "lib")))
    bin = property(lambda self: Prefix(os.path.join(self, "bin")))


class Spec:
    def __init__(self, on):
        self.on = on
        self.variants = {"cuda_arch": types.SimpleNamespace(value=("90",))}

    def satisfies(self, constraint):
        return constraint[1:] in self.on if constraint[0] == "+" else constraint[1:] not in self.on

    def __getitem__(self, name):
        if name == "mpi":
            return types.SimpleNamespace(mpicc=shutil.which(os.environ.get("MPICC", "mpicc")))
        nvcc = shutil.which(name if name != "cuda" else "nvcc") or "/usr/local/cuda/bin/nvcc"
        return types.SimpleNamespace(prefix=Prefix(pathlib.Path(nvcc).resolve().parent.parent))


def load_recipe():
    package = types.ModuleType("spack.package")
    for name in ("license", "version", "variant", "depends_on", "conflicts", "maintainers"):
        setattr(package, name, record_directive(name))
    for name in (working_dir, make, MakefilePackage, CudaPackage):
        setattr(package, name.__name__, name)
    sys.modules["spack"] = types.ModuleType("spack")
    sys.modules["spack.package"] = package
    path = pathlib.Path(__file__).with_name("package.py")
    description = importlib.util.spec_from_file_location("onebit_recipe", path)
    module = importlib.util.module_from_spec(description)
    sys.dont_write_bytecode = True
    description.loader.exec_module(module)
    return module.Onebit


def main(sources, prefix, *choices):
    recipe = load_recipe()()
    variants = {a[0]: o.get("default") for name, a, o in directives if name == "variant"}
    unknown = {choice[1:] for choice in choices} - set(variants) - {"cuda"}
    if unknown:
        sys.exit("the recipe has no variant " + ", ".join(sorted(unknown)))
    on = {name for name, default in variants.items() if default}
    for choice in choices:
        (on.add if choice[0] == "+" else on.discard)(choice[1:])
    if not any(name == "version" for name, _, _ in directives):
        sys.exit("the recipe has no version")
    recipe.spec, recipe.prefix = Spec(on), Prefix(os.path.abspath(prefix))
    recipe.stage = types.SimpleNamespace(source_path=os.path.abspath(sources))
    with working_dir(recipe.stage.source_path):
        make(*recipe.build_targets)
        make(*recipe.install_targets)
    recipe.check()


main(*sys.argv[1:])
