"""A kernel: a plain function for the device, with everything that launching and checking it needs."""

from collections.abc import Callable
from dataclasses import dataclass

MAX_REGISTERS = 128  # with more, fewer than 16 warps fit on a multiprocessor


@dataclass(frozen=True)
class Kernel:
    """
    function   plain Python; numba-cuda compiles it when a device wants it
    signature  Numba types of its arguments: the one signature it is ever compiled for
    wants      beginnings of SASS mnemonics without which the kernel is not the one that was meant
    registers  ceiling per thread
    bounds     (threads of a block, blocks that should fit on a multiprocessor), if the assembler must be told
    writes     names of the arguments that it writes; it only reads the others
    early      the same function with a wait for the kernel ahead inside it, behind what needs none (early.py)
    """

    function: Callable
    signature: tuple
    wants: tuple[str, ...] = ()
    registers: int = 64
    bounds: tuple[int, int] | None = None
    writes: tuple[str, ...] = ("out",)
    name: str = ""
    early: Callable | None = None

    def __post_init__(self):
        if not self.name:
            object.__setattr__(self, "name", self.function.__name__.strip("_").removesuffix("_kernel"))

    def __hash__(self):
        return hash((self.function, self.signature))
