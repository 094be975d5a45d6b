"""The command `onebit-tune`: runs the program of that name, which is in the package."""

import os
import pathlib
import sys


def main():
    """Runs onebit-tune in this process. It has no MPI: it predicts (--predict), but does not measure."""
    program = str(pathlib.Path(__file__).with_name("onebit-tune"))
    os.execv(program, [program, *sys.argv[1:]])
