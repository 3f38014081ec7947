"""A PTX kernel as a C function, instruction by instruction.

Every register is a uint64_t that holds bits; an instruction reads them as its type says and writes them back.
Instructions of one thread become C expressions here; those that need a warp or a tensor core call runtime.c.
What is not known raises NotImplementedError with the instruction.
"""

import re

from tests.gpu_on_cpu import ptx_text, runtime

HEADER = r"""
#include <math.h>
#include <stdint.h>
#include <string.h>
typedef struct { uint64_t value, flag; } two;
extern int run_tid(int), run_ctaid(int), run_ntid(int), run_nctaid(int), run_laneid(void);
extern int run_dynamic_bytes(void);
extern int run_barrier_reduce(int, int);
extern void run_barrier(void), run_sync_warp(uint32_t), run_misaligned(uint64_t, int);
extern void run_access(uint32_t, uint64_t);
extern void run_executed(void);
extern two run_shuffle(uint32_t, int, uint32_t, uint32_t, uint32_t), run_vote(uint32_t, int, int);
extern uint32_t run_match(uint32_t, uint64_t);
static inline float as_float(uint64_t r) { uint32_t u = r; float f; memcpy(&f, &u, 4); return f; }
static inline double as_double(uint64_t r) { double f; memcpy(&f, &r, 8); return f; }
static inline uint64_t of_float(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
static inline uint64_t of_double(double f) { uint64_t u; memcpy(&u, &f, 8); return u; }
static inline uint64_t aligned(uint64_t at, int n) { if (at % n) run_misaligned(at, n); return at; }
static inline double flushed(double x) { return fabs(x) < 0x1p-126 ? copysign(0, x) : x; }
static inline double clamped(double x, double low, double high) {
  return x != x ? 0 : x < low ? low : x > high ? high : x;
}
"""
C_TYPE = {
    **{f"{kind}{bits}": f"uint{bits}_t" for kind in "ub" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": f"int{bits}_t" for bits in (8, 16, 32, 64)},
    "f32": "float", "f64": "double", "pred": "int",
}  # fmt: skip
SPECIAL = {
    f"%{name}.{axis}": f"run_{name}({i})"
    for name in ("tid", "ctaid", "ntid", "nctaid")
    for i, axis in enumerate("xyz")
}
SPECIAL |= {"%laneid": "run_laneid()", "%dynamic_smem_size": "run_dynamic_bytes()", "WARP_SZ": "32"}
COMPARE = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}
ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "div": "/", "rem": "%", "and": "&", "or": "|", "xor": "^"}
FUNCTIONS = {
    "sqrt": "sqrt({})", "rsqrt": "1 / sqrt({})", "rcp": "1 / {}", "lg2": "log2({})", "ex2": "exp2({})",
    "sin": "sin({})", "cos": "cos({})",
}  # fmt: skip
# Modifiers that change a result: an instruction with one of them is known here with it, or not at all.
SPECIAL_CASES = {"sat", "satfinite", "relu", "ftz", "rm", "rp", "rz", "cc"}
KNOWN_WITH = {"cvt": {"sat"}, **{name: {"ftz"} for name in FUNCTIONS}}
ROUND = {"rni": "rint", "rmi": "floor", "rpi": "ceil", "rzi": "trunc"}
SHUFFLES = {"idx": 0, "up": 1, "down": 2, "bfly": 3}
VOTES = {"all": 0, "any": 1, "uni": 2, "ballot": 3}
REDUCTIONS = {"popc": 0, "and": 1, "or": 2}


def width(kind):
    return 1 if kind == "pred" else int(re.search(r"\d+", kind)[0])


FREE = ("mov", "ld.param", "cvta")  # which the assembler mostly makes nothing of


def is_float(kind):
    return kind in ("f32", "f64")


class Translation:
    """source: C text with `void kernel_entry(uint64_t *words)`; shared; name; sites of memory accesses."""

    def __init__(self, ptx, log_accesses=False):
        ptx = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.S)
        self.log_accesses, self.sites = log_accesses, []
        self.shared, self.symbols = runtime.SharedLayout(), {}
        constants = self._memory(ptx)
        entry = re.search(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)[^{]*\{(.*)\}", ptx, flags=re.S)
        self.name = entry[1]
        parameters = [part.split()[-1] for part in entry[2].split(",") if part.strip()]
        self.parameters = {name: i for i, name in enumerate(parameters)}
        body = "\n".join(self._body(entry[3]))
        self.source = f"{HEADER}{constants}void kernel_entry(uint64_t *words) {{\n{body}\n}}\n"

    # -- declarations

    def _memory(self, ptx):
        """Places shared arrays; returns C arrays for constants."""
        dynamic = []
        for name, n_bytes in re.findall(r"\.shared \.align \d+ \.b8 ([\w$]+)\[(\d*)\];", ptx):
            if n_bytes:
                self.symbols[name] = str(self.shared.place(name, int(n_bytes)))
            else:
                dynamic.append(name)
        start = -(-(self.shared.top + runtime.GAP) // 128) * 128
        self.symbols |= {name: str(runtime.shared_memory() + start) for name in dynamic}
        text = ""
        pattern = r"\.(?:global|const) \.align (\d+) \.b8 ([\w$]+)\[(\d+)\] = \{([^}]*)\};"
        for align, name, n_bytes, values in re.findall(pattern, ptx):
            text += (
                f"static const uint8_t __attribute__((aligned({align}))) {name}[{n_bytes}] = {{{values}}};\n"
            )
            self.symbols[name] = f"(uintptr_t){name}"
        return text

    def _body(self, text):
        for name, count in re.findall(r"\.reg\s+\.\w+\s+(%[\w$]+)(?:<(\d+)>)?;", text):
            names = [f"{name}{i}" for i in range(int(count))] if count else [name]
            yield f"uint64_t {', '.join(f'{register(n)} = 0' for n in names)};"
        for align, name, n_bytes in re.findall(r"\.local \.align (\d+) \.b8\s+([\w$]+)\[(\d+)\];", text):
            yield f"uint8_t __attribute__((aligned({align}))) {name}[{n_bytes}];"
            yield f"memset({name}, 0xff, {n_bytes});"  # NaN until it is written
            self.symbols[name] = f"(uintptr_t){name}"
        text = re.sub(r"\.(reg|local|pragma)\s[^;]*;|\.(loc|maxntid|minnctapersm)\s[^\n]*", "", text)
        text = re.sub(r"^\s*[{}]\s*$", "", text, flags=re.M)
        text = re.sub(r"(\$[\w$]+):", r"\1:;", text)
        for statement in text.split(";"):
            statement = " ".join(statement.split())
            if statement.endswith(":"):
                yield f"{label(statement[:-1])}: ;"
            elif statement:
                guard, negated, predicate, rest = re.match(r"(@(!?)(%\w+)\s+)?(.*)", statement).groups()
                test = f"if ({negated}{register(predicate)}) " if guard else ""
                count = "" if not self.log_accesses or rest.startswith(FREE) else "run_executed(); "
                yield f"{count}{test}{{ {self._instruction(rest)} }}"
        yield "return;"

    # -- operands

    def bits(self, operand):
        """C expression of the bits of an operand."""
        if operand in SPECIAL:
            return f"(uint64_t){SPECIAL[operand]}"
        if operand.startswith("%"):
            return register(operand)
        if re.fullmatch(r"0[fFdD][0-9a-fA-F]+", operand):
            return f"0x{operand[2:]}ull"
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", operand):
            return f"{int(operand.rstrip('U'), 0) & (2**64 - 1)}ull"
        if operand in self.symbols:
            return f"(uint64_t){self.symbols[operand]}"
        raise NotImplementedError(f"executor two: operand {operand!r}")

    def read(self, operand, kind):
        bits = self.bits(operand)
        if is_float(kind):
            return f"as_{C_TYPE[kind]}({bits})"
        return f"({C_TYPE[kind]})({bits})"

    @staticmethod
    def write(operand, kind, value):
        if is_float(kind):
            return f"{register(operand)} = of_{C_TYPE[kind]}({value});"
        unsigned = "int" if kind == "pred" else f"uint{width(kind)}_t"
        return f"{register(operand)} = (uint64_t)({unsigned})({value});"

    def address(self, operand, is_shared):
        base, offset = re.fullmatch(r"\[([%\w$.]+)(?:\s*\+\s*(-?\d+))?\]", operand).groups()
        value = self.read(base, "u32" if is_shared else "u64")
        return f"((uint64_t){value} + {int(offset or 0)})"

    def _access(self, text, space, n_bytes, address):
        """A line for the log of accesses, where it is wanted."""
        if not self.log_accesses or space not in ("global", "shared"):
            return ""
        self.sites.append((text, space, n_bytes))
        return f"run_access({len(self.sites) - 1}, {address}); "

    # -- instructions

    def _instruction(self, text):
        opcode, operands = ptx_text.instruction(text)
        parts = opcode.split(".")
        translate = getattr(self, f"_{parts[0]}", None)
        if translate is None and (parts[0] in ARITHMETIC or parts[0] in FUNCTIONS):
            translate = self._arithmetic if parts[0] in ARITHMETIC else self._function
        if SPECIAL_CASES & set(parts) - KNOWN_WITH.get(parts[0], set()):
            translate = None
        result = translate(parts, operands, text) if translate else None
        if result is None:
            result = self._in_runtime(opcode, operands, text)
        if result is None:
            raise NotImplementedError(f"executor two: {text!r}")
        return result

    def _in_runtime(self, opcode, operands, text):
        function = ptx_text.runtime_function(opcode)
        if function is None:
            return None
        results = ptx_text.members(operands[0]) if ptx_text.has_result(opcode) else []
        rest = [member for operand in operands[bool(results) :] for member in ptx_text.members(operand)]
        words, log = [], ""
        for i, operand in enumerate(rest):
            if operand.startswith("["):
                space = "shared" if "shared" in opcode and i == 0 else "global"
                words.append(self.address(operand, space == "shared"))
                log += self._access(text, space, 16, words[-1])
            else:
                words.append(self.bits(operand))
        writes = " ".join(f"{register(r)} = out[{i}];" for i, r in enumerate(results))
        return (
            f"extern void {function}(const uint64_t *, uint64_t *); "
            f"uint64_t in[] = {{{', '.join(words) or '0'}}}, "
            f"out[{max(1, len(results))}]; {log}{function}(in, out); {writes}"
        )

    def _mov(self, parts, operands, text):
        to, source = operands
        kind = parts[-1]
        if to.startswith("{") or source.startswith("{"):
            half = width(kind) // 2
            mask = f"0x{2**half - 1:x}ull"
            if to.startswith("{"):
                low, high = (register(member) if member != "_" else None for member in ptx_text.members(to))
                value = f"uint64_t whole = {self.bits(source)}; "
                value += f"{low} = whole & {mask}; " if low else ""
                return value + (f"{high} = whole >> {half} & {mask};" if high else "")
            low, high = (self.bits(member) for member in ptx_text.members(source))
            return f"{register(to)} = ({low} & {mask}) | ({high} & {mask}) << {half};"
        return self.write(to, kind, self.read(source, kind))

    _cvta = _mov

    def _ld(self, parts, operands, text):
        kind, space = parts[-1], _space(parts)
        if space == "param":
            return self.write(
                operands[0], kind, f"*({C_TYPE[kind]} *)&words[{self.parameters[operands[1][1:-1]]}]"
            )
        registers = ptx_text.members(operands[0])
        n_bytes = width(kind) // 8 * len(registers)
        # a signed number fills its register, which may be wider
        wide = "s64" if kind.startswith("s") else kind
        loads = [self.write(r, wide, f"(({C_TYPE[kind]} *)at)[{i}]") for i, r in enumerate(registers)]
        address = self.address(operands[1], space == "shared")
        log = self._access(text, space, n_bytes, "at")
        return f"uint64_t at = aligned({address}, {n_bytes}); {log}{' '.join(loads)}"

    def _st(self, parts, operands, text):
        kind, space = parts[-1], _space(parts)
        registers = ptx_text.members(operands[1])
        n_bytes = width(kind) // 8 * len(registers)
        stores = [f"(({C_TYPE[kind]} *)at)[{i}] = {self.read(r, kind)};" for i, r in enumerate(registers)]
        address = self.address(operands[0], space == "shared")
        log = self._access(text, space, n_bytes, "at")
        return f"uint64_t at = aligned({address}, {n_bytes}); {log}{' '.join(stores)}"

    def _bra(self, parts, operands, text):
        return f"goto {label(operands[0])};"

    def _ret(self, parts, operands, text):
        return "return;"

    def _bar(self, parts, operands, text):
        if "warp" in parts:
            return f"run_sync_warp({self.bits(operands[0])});"
        if "red" in parts:
            how = next(REDUCTIONS[part] for part in parts if part in REDUCTIONS)
            return self.write(
                operands[0], parts[-1], f"run_barrier_reduce({how}, {self.read(operands[-1], 'pred')})"
            )
        return "run_barrier();"

    _barrier = _bar

    def _membar(self, parts, operands, text):
        return ";"

    _fence = _membar

    def _shfl(self, parts, operands, text):
        to, _, flag = operands[0].partition("|")
        value, by, clamp, mask = (self.bits(operand) for operand in operands[1:])
        call = f"two r = run_shuffle({mask}, {SHUFFLES[parts[2]]}, {value}, {by}, {clamp}); "
        return call + f"{register(to)} = r.value;" + (f" {register(flag)} = r.flag;" if flag else "")

    def _vote(self, parts, operands, text):
        mode = VOTES[parts[2]]
        field = "value" if parts[2] == "ballot" else "flag"
        call = f"run_vote({self.bits(operands[2])}, {mode}, {self.read(operands[1], 'pred')})"
        return f"{register(operands[0])} = {call}.{field};"

    def _match(self, parts, operands, text):
        value = self.read(operands[1], parts[-1])
        return f"{register(operands[0])} = run_match({self.bits(operands[2])}, {value});"

    def _setp(self, parts, operands, text):
        kind, how = parts[-1], parts[1]
        x, y = self.read(operands[1], kind), self.read(operands[2], kind)
        if how in ("num", "nan"):
            test = f"({'!' if how == 'num' else ''}isunordered({x}, {y}))"
        elif is_float(kind) and how.endswith("u") and how[:-1] in COMPARE:
            test = f"(isunordered({x}, {y}) || {x} {COMPARE[how[:-1]]} {y})"
        elif is_float(kind) and how == "ne":  # ordered: false with a NaN
            test = f"({x} < {y} || {x} > {y})"
        else:
            test = f"({x} {COMPARE[how]} {y})"
        combine = {"and": "&", "or": "|", "xor": "^"}.get(parts[2])
        if combine:
            test = f"({test} {combine} {self.read(operands[3], 'pred')})"
        to, _, negated = operands[0].partition("|")
        return f"{register(to)} = {test};" + (f" {register(negated)} = !{register(to)};" if negated else "")

    def _selp(self, parts, operands, text):
        to, x, y, test = operands
        return f"{register(to)} = {self.bits(test)} ? {self.bits(x)} : {self.bits(y)};"

    def _cvt(self, parts, operands, text):
        to, source = parts[-2:]
        if to not in C_TYPE or source not in C_TYPE:  # 16-bit floats: runtime.c
            return None
        value = self.read(operands[1], source)
        how = next((ROUND[part] for part in parts if part in ROUND), None)
        if is_float(source) and not is_float(to):
            low, high = (
                (0, 2 ** width(to) - 1)
                if to[0] == "u"
                else (-(2 ** (width(to) - 1)), 2 ** (width(to) - 1) - 1)
            )
            if width(to) == 64:
                return self.write(operands[0], to, f"{how}((double){value})")
            value = f"clamped({how}((double){value}), {low}.0, {high}.0)"
            return self.write(operands[0], to, f"({C_TYPE[to]}){value}")
        if how:
            value = f"{how}({value})"
        if "sat" in parts:
            if not is_float(to):
                return None
            value = f"clamped({value}, 0, 1)"
        return self.write(operands[0], to, f"({C_TYPE[to]})({value})")

    def _mul(self, parts, operands, text):
        kind = parts[-1]
        if "wide" in parts or "hi" in parts:
            return self._long_product(parts, operands, "")
        return self._arithmetic(parts, operands, text) if kind in C_TYPE else None

    def _mad(self, parts, operands, text):
        kind = parts[-1]
        if "wide" in parts or "hi" in parts:
            return self._long_product(parts, operands, "+")
        x, y, z = (self.read(operand, f"u{width(kind)}") for operand in operands[1:])
        return self.write(operands[0], kind, f"{x} * {y} + {z}")

    def _long_product(self, parts, operands, add):
        kind = parts[-1]
        n = width(kind)
        long = "__int128" if kind[0] == "s" else "unsigned __int128"
        product = f"({long}){self.read(operands[1], kind)} * ({long}){self.read(operands[2], kind)}"
        if "hi" in parts:
            product, result = f"(({product}) >> {n})", kind
        else:
            result = f"{kind[0]}{2 * n}"
        addend = f" + {self.read(operands[3], result)}" if add else ""
        return self.write(operands[0], result, f"{product}{addend}")

    def _fma(self, parts, operands, text):
        kind = parts[-1]
        x, y, z = (self.read(operand, kind) for operand in operands[1:])
        return self.write(operands[0], kind, f"fma{'f' if kind == 'f32' else ''}({x}, {y}, {z})")

    def _arithmetic(self, parts, operands, text):
        kind, operation = parts[-1], ARITHMETIC[parts[0]]
        if kind not in C_TYPE:
            return None
        sign_matters = parts[0] in ("div", "rem") or is_float(kind) or kind == "pred"
        read_as = kind if sign_matters else f"u{width(kind)}"
        x, y = (self.read(operand, read_as) for operand in operands[1:])
        if parts[0] in ("div", "rem") and not is_float(kind):
            return self.write(operands[0], kind, f"{y} ? {x} {operation} {y} : -1")
        return self.write(operands[0], kind, f"{x} {operation} {y}")

    def _function(self, parts, operands, text):
        """Roots, quotients, exponentials: in double, rounded once; a device approximates some of them."""
        x = f"(double){self.read(operands[1], parts[-1])}"
        if "ftz" in parts:
            value = FUNCTIONS[parts[0]].format(f"flushed({x})")
            return self.write(operands[0], parts[-1], f"flushed({value})")
        return self.write(operands[0], parts[-1], FUNCTIONS[parts[0]].format(x))

    def _shl(self, parts, operands, text):
        n, by = width(parts[-1]), self.read(operands[2], "u32")
        return self.write(
            operands[0], parts[-1], f"{by} >= {n} ? 0 : {self.read(operands[1], f'u{n}')} << {by}"
        )

    def _shr(self, parts, operands, text):
        kind, by = parts[-1], self.read(operands[2], "u32")
        n, x = width(kind), self.read(operands[1], kind)
        if kind[0] == "s":
            return self.write(operands[0], kind, f"{x} >> ({by} >= {n} ? {n - 1} : {by})")
        return self.write(operands[0], kind, f"{by} >= {n} ? 0 : {x} >> {by}")

    def _not(self, parts, operands, text):
        kind = parts[-1]
        return self.write(
            operands[0], kind, f"{'!' if kind == 'pred' else '~'}{self.read(operands[1], kind)}"
        )

    def _neg(self, parts, operands, text):
        kind = parts[-1]
        return self.write(operands[0], kind, f"-{self.read(operands[1], kind)}")

    def _abs(self, parts, operands, text):
        kind, x = parts[-1], self.read(operands[1], parts[-1])
        return self.write(operands[0], kind, f"fabs({x})" if is_float(kind) else f"{x} < 0 ? -{x} : {x}")

    def _min(self, parts, operands, text):
        kind, how = parts[-1], parts[0]
        x, y = (self.read(operand, kind) for operand in operands[1:])
        if is_float(kind):
            value = f"f{how}({x}, {y})"
            if "NaN" in parts:
                value = f"isunordered({x}, {y}) ? NAN : {value}"
            return self.write(operands[0], kind, value)
        return self.write(operands[0], kind, f"{x} {'<' if how == 'min' else '>'} {y} ? {x} : {y}")

    _max = _min

    def _bfe(self, parts, operands, text):
        kind = parts[-1]
        n, x = width(kind), self.read(operands[1], f"u{width(kind)}")
        start, length = (self.read(operand, "u32") for operand in operands[2:])
        unsigned = f"({length} ? ({x} >> {start}) & (~0ull >> (64 - {length})) : 0)"
        if kind[0] == "u":
            return self.write(operands[0], kind, unsigned)
        shift = f"(64 - {length})"
        return self.write(
            operands[0], kind, f"{length} ? (int64_t)({unsigned} << {shift}) >> {shift} : 0 * {n}"
        )

    def _bfi(self, parts, operands, text):
        kind = parts[-1]
        x, y = (self.read(operand, f"u{width(kind)}") for operand in operands[1:3])
        start, length = (self.read(operand, "u32") for operand in operands[3:])
        code = f"uint64_t mask = {length} ? (~0ull >> (64 - {length})) << {start} : 0; "
        return code + self.write(operands[0], kind, f"({y} & ~mask) | (((uint64_t){x} << {start}) & mask)")

    def _popc(self, parts, operands, text):
        return self.write(operands[0], "u32", f"__builtin_popcountll({self.read(operands[1], parts[-1])})")

    def _clz(self, parts, operands, text):
        n, x = width(parts[-1]), self.read(operands[1], parts[-1])
        return self.write(operands[0], "u32", f"{x} ? __builtin_clzll({x}) - {64 - n} : {n}")

    def _copysign(self, parts, operands, text):
        sign, magnitude = (self.read(operand, parts[-1]) for operand in operands[1:])
        return self.write(operands[0], parts[-1], f"copysign({magnitude}, {sign})")


def _space(parts):
    return next((part for part in parts if part in ("param", "global", "shared", "local", "const")), "")


def register(name):
    return "r_" + name.lstrip("%").replace("$", "_")


def label(name):
    return "at_" + name.strip().replace("$", "_")
