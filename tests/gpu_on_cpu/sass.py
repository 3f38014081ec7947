"""From PTX to machine code without a device: registers, spills, which instructions are there, and where."""

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

from fastpath.cuda import early
from tests.gpu_on_cpu import offline, ptx_to_c

# float64 arithmetic comes from a literal or an integer that nobody wrapped in float32; local memory from
# an array whose index is not known at compile time.
FORBIDDEN = ("DADD", "DMUL", "DFMA", "LDL", "STL")


class Instruction(NamedTuple):
    """guard: such as "@!P0", or "" """

    address: int
    guard: str
    mnemonic: str
    operands: str


class Code(NamedTuple):
    """
    growth          instructions of machine code for each of PTX (but for ptx_to_c.FREE)
    growth_of_loops the same of what stands in loops
    """

    registers: int
    spills: int  # bytes, stores and loads
    stack: int  # bytes
    shared: int  # bytes
    listing: tuple[Instruction, ...]
    growth: float
    growth_of_loops: float

    @property
    def mnemonics(self):
        return collections.Counter(one.mnemonic for one in self.listing)


@functools.cache
def tool(name):
    """Path of a CUDA tool: of a wheel, or of an installed toolkit."""
    site = Path(sysconfig.get_path("purelib"))
    found = sorted(site.glob(f"nvidia/*/bin/{name}"))
    return str(found[0]) if found else shutil.which(name)


def code(kernel, architecture):
    """Assemble a kernel for an architecture such as (9, 0)."""
    return codes([kernel], architecture)[0]


def codes(kernels, architecture):
    """The same of several at once: most of the time goes to starting the tools."""
    texts = [offline.to_ptx(k.function, k.signature, architecture, k.bounds) for k in kernels]
    names = [re.search(r"\.entry\s+([\w$]+)", text)[1] for text in texts]
    with tempfile.TemporaryDirectory() as folder:
        text, binary = Path(folder) / "kernels.ptx", Path(folder) / "kernels.cubin"
        text.write_text(_in_one(texts))
        said = _run(tool("ptxas"), "-v", f"-arch=sm_{architecture[0]}{architecture[1]}", text, "-o", binary)
        listing = _run(tool("cuobjdump"), "-sass", binary)
    reports = _parts(r"Compiling entry function '([\w$]+)'", said)
    listings = _parts(r"Function : ([\w$]+)", listing)
    texts = dict(zip(names, texts, strict=True))
    return [_code_of(reports[name], listings[name], texts[name]) for name in names]


DECLARED = re.compile(
    r"^(?:\.(?:visible|common|extern|weak|entry) ?)*"
    r"\.(?:global|shared|const|func)\b[^;={(]*?(?:\([^)]*\) )?([\w$]+)(?:\[\d*\])?\s*(?=[;=(])",
    re.M,
)


def _in_one(texts):
    """One module of several: what they declare beside their kernels gets names of its own."""
    parts = []
    for number, text in enumerate(texts):
        text = re.sub(r"^\.common [^\n]*NumbaEnv[^\n]*\n", "", text, flags=re.M)
        for name in set(DECLARED.findall(text)):
            text = re.sub(rf"(?<![\w$]){re.escape(name)}(?![\w$])", f"{name}_of_{number}", text)
        parts.append(
            text if not parts else re.sub(r"^\.(?:version|target|address_size)[^\n]*$", "", text, flags=re.M)
        )
    return "\n".join(parts)


def _parts(heading, text):
    """{name in the heading: the text up to the next one}"""
    pieces = re.split(heading, text)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def _code_of(said, listing, ptx):
    def number(pattern):
        found = re.search(pattern, said)
        return int(found[1]) if found else 0

    spills = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
    line = r"/\*([0-9a-f]{4,})\*/\s+(@!?U?PT?\d* )?\s*([A-Z][A-Z0-9_.]+)([^;]*);"
    (n_ptx, n_ptx_loops), (n_code, n_code_loops) = _ptx_sizes(ptx), _sizes(listing)
    return Code(
        number(r"Used (\d+) registers"), spills, number(r"(\d+) bytes stack frame"),
        number(r"(\d+) bytes smem"),
        tuple(
            Instruction(int(at, 16), guard.strip(), *rest) for at, guard, *rest in re.findall(line, listing)
        ),
        n_code / n_ptx, n_code_loops / n_ptx_loops if n_ptx_loops else 1.0,
    )  # fmt: skip


def _ptx_sizes(ptx):
    """Instructions, and those of them in loops: between a label and a jump back to it."""
    labels: dict[str, int] = {}
    texts = [text for _, text in early.instructions(ptx, labels)]
    jumps = [(labels[text.split()[1]], i) for i, text in enumerate(texts) if text.startswith("bra")]
    counts = [not text.startswith(ptx_to_c.FREE) for text in texts]
    return sum(counts), sum(n for i, n in enumerate(counts) if _is_inside(i, jumps))


def _sizes(listing):
    line = r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?PT?\d* )?\s*([A-Z][A-Z0-9_.]*)([^;]*);"
    found = [(int(at, 16), name, rest) for at, name, rest in re.findall(line, listing)]
    found = [one for one in found if one[1] != "NOP"]
    jumps = []
    for at, name, rest in found:
        if name.startswith("BRA") and (target := re.search(r"0x([0-9a-f]+)\s*$", rest)):
            jumps.append((int(target[1], 16), at))
    jumps = [(to, at) for to, at in jumps if to < at]  # the last one stays where it is
    return len(found), sum(_is_inside(at, jumps) for at, _, _ in found)


def _is_inside(i, jumps):
    return any(to <= i <= at for to, at in jumps)


def _run(*command):
    path = os.pathsep.join([str(Path(command[0]).parent), os.environ["PATH"]])  # cuobjdump calls nvdisasm
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": path}
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]}: {(done.stdout + done.stderr)[:2000]}")
    return done.stdout + done.stderr


def faults(kernel, architecture, made=None):
    """One line for everything that is wrong with a kernel's machine code; made: what `codes` gave for it."""
    made = made or code(kernel, architecture)

    def has(beginning):
        return any(name.startswith(beginning) for name in made.mnemonics)

    lines = [f"no {wanted}" for wanted in kernel.wants if not has(wanted)]
    lines += [f"{name} is there" for name in FORBIDDEN if has(name)]
    if made.spills or made.stack:
        lines.append(f"{made.spills} bytes spilled, {made.stack} bytes of stack")
    if made.registers > kernel.registers:
        lines.append(f"{made.registers} registers, {kernel.registers} are allowed")
    return lines


WAIT, LET_NEXT_START = "ACQBULK", "PREEXIT"


def before_the_wait(made):
    """Instructions that are reached, on any way through a kernel, before it waits for the one before it.

    A way remembers which guard of its last jump held: the same predicate, asked again, answers the same.
    """
    number = {one.address: i for i, one in enumerate(made.listing)}
    ways, seen, reached = [(0, "")], set(), set()
    while ways:
        i, known = ways.pop()
        one = made.listing[i]
        if (i, known) in seen or (one.mnemonic == WAIT and (not one.guard or one.guard == known)):
            continue
        seen.add((i, known))
        if one.guard and one.guard == _denied(known):  # never done on this way
            ways.append((i + 1, known))
            continue
        reached.add(i)
        kind = one.mnemonic.split(".")[0]
        is_jump = one.mnemonic == "BRA" and re.fullmatch(r"\s*0x[0-9a-f]+\s*", one.operands)
        if known and re.match(rf"\s*(?:P\d|PT), {known[-2:]},|\s*{known[-2:]},", one.operands):
            known = ""  # it is asked something else now
        if kind in ("BRA", "CALL"):
            to = number[int(re.search(r"0x([0-9a-f]+)\s*$", one.operands)[1], 16)]
            ways.append((to, one.guard if is_jump and one.guard else known))
        is_end = is_jump or kind in ("EXIT", "RET")
        if not is_end or (one.guard and one.guard != known):
            ways.append((i + 1, _denied(one.guard) if is_end else known))
    return [made.listing[i] for i in sorted(reached)]


def _denied(guard):
    """The guard that holds where this one does not."""
    if not guard:
        return ""
    return guard.replace("!", "") if "!" in guard else guard.replace("@", "@!")
