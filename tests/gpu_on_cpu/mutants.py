"""Kernels with one barrier, wait or commit taken out: the executors must notice each of them.

A mutant is the kernel's source file, compiled again without one statement; its kernels are called as those of
the real module are.
"""

import importlib.util
import re
import sys
import tempfile
from pathlib import Path

STATEMENT = re.compile(
    r"^( +)(cuda\.syncthreads\(\)|(?:ptx\.)?(?:wait_copies(?:_but_one)?|commit_copies)\(\))", re.M
)


def statements(module):
    """[(line number, text)] of what can be taken out of a module."""
    source = Path(module.__file__).read_text()
    return [(source.count("\n", 0, found.start()) + 1, found[2]) for found in STATEMENT.finditer(source)]


def without(module, line):
    """The module, compiled again with `pass` in that line; as it is, with None."""
    lines = Path(module.__file__).read_text().splitlines()
    if line is not None:
        lines[line - 1] = re.sub(r"\S.*", "pass", lines[line - 1])
    name = f"{module.__name__}_without_{line}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mutant.py"
        path.write_text("\n".join(lines) + "\n")
        spec = importlib.util.spec_from_file_location(name, path)
        mutant = importlib.util.module_from_spec(spec)
        sys.modules[name] = mutant
        spec.loader.exec_module(mutant)
    return mutant
