"""From PTX to machine code without a device: registers, spills, and which instructions are there."""

import collections
import functools
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.gpu_on_cpu import offline

# float64 arithmetic comes from a literal or an integer that nobody wrapped in float32; local memory from
# an array whose index is not known at compile time.
FORBIDDEN = ("DADD", "DMUL", "DFMA", "LDL", "STL")


class Code(NamedTuple):
    registers: int
    spills: int  # bytes, stores and loads
    stack: int  # bytes
    shared: int  # bytes
    mnemonics: collections.Counter


@functools.cache
def tool(name):
    """Path of a CUDA tool: of a wheel, or of an installed toolkit."""
    site = Path(sysconfig.get_path("purelib"))
    found = sorted(site.glob(f"nvidia/*/bin/{name}"))
    return str(found[0]) if found else shutil.which(name)


def code(kernel, architecture):
    """Assemble a kernel for an architecture such as (9, 0)."""
    ptx = offline.to_ptx(kernel.function, kernel.signature, architecture, kernel.bounds)
    with tempfile.TemporaryDirectory() as folder:
        text, binary = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        text.write_text(ptx)
        name = f"sm_{architecture[0]}{architecture[1]}"
        said = _run(tool("ptxas"), "-v", f"-arch={name}", text, "-o", binary)
        listing = _run(tool("cuobjdump"), "-sass", binary)

    def number(pattern):
        found = re.search(pattern, said)
        return int(found[1]) if found else 0

    spills = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
    opcode = r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?PT?\d* )?\s*([A-Z][A-Z0-9_.]+)"
    return Code(
        number(r"Used (\d+) registers"), spills, number(r"(\d+) bytes stack frame"),
        number(r"(\d+) bytes smem"),
        collections.Counter(re.findall(opcode, listing)),
    )  # fmt: skip


def _run(*command):
    path = os.pathsep.join([str(Path(command[0]).parent), os.environ["PATH"]])  # cuobjdump calls nvdisasm
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": path}
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]}: {(done.stdout + done.stderr)[:2000]}")
    return done.stdout + done.stderr


def faults(kernel, architecture):
    """One line for everything that is wrong with the machine code of a kernel."""
    made = code(kernel, architecture)

    def has(beginning):
        return any(name.startswith(beginning) for name in made.mnemonics)

    lines = [f"no {wanted}" for wanted in kernel.wants if not has(wanted)]
    lines += [f"{name} is there" for name in FORBIDDEN if has(name)]
    if made.spills or made.stack:
        lines.append(f"{made.spills} bytes spilled, {made.stack} bytes of stack")
    if made.registers > kernel.registers:
        lines.append(f"{made.registers} registers, {kernel.registers} are allowed")
    return lines
