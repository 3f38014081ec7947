"""Reading PTX instructions, those of a PTX file and those of inline assembly alike."""

import re

from tests.gpu_on_cpu import runtime


def operands(text):
    """Split at the commas outside of brackets."""
    parts, depth, part = [], 0, ""
    for character in text:
        depth += (character in "{[(") - (character in "}])")
        if character == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += character
    return [*parts, part.strip()] if part.strip() else parts


def instruction(text):
    """(opcode, operands) of one instruction without guard and semicolon."""
    opcode, _, rest = text.strip().rstrip(";").partition(" ")
    return opcode, operands(rest)


def members(operand):
    """The registers of "{a, b}", or the operand itself."""
    return operands(operand[1:-1]) if operand.startswith("{") else [operand]


def runtime_function(opcode):
    """Name of the C function of an opcode, ptx_ld_global_nc_v4_u32; None where runtime.c has none.

    A hint for caches, the last operand, changes nothing here.
    """
    name = "ptx_" + re.sub(r"[.:]+", "_", opcode.replace(".L2::cache_hint", ""))
    return name if runtime.has(name) else None


def has_result(opcode):
    return not opcode.startswith(("cp.async", "griddepcontrol"))
