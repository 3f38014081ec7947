"""Executor one: the typed LLVM IR that numba-cuda makes for NVVM, compiled for this CPU instead.

What is special to the device becomes calls into runtime.c:

    llvm.nvvm.*            the functions of the same names without "llvm."
    inline PTX             ptx_<opcode>(words in, words out)
    libdevice's __nv_*     libm
    shared arrays          fixed addresses below 4 GiB, so that 32-bit shared addresses are addresses

Integer and float types, widening and control flow stay as Numba typed them for the device: that is what the
official simulator does not do.
"""

import functools
import hashlib
import itertools
import re

import llvmlite.binding as llvm
from numba.core import types

from tests.gpu_on_cpu import launching, offline, ptx_text, runtime

LIBM = {
    "__nv_fast_expf": "expf", "__nv_fast_tanhf": "tanhf", "__nv_fsqrt_rn": "sqrtf",
    "__nv_rsqrtf": "rt_rsqrtf",
    **{f"__nv_{name}": name for name in (
        "expf", "exp2f", "tanhf", "sqrtf", "logf", "sinf", "cosf", "fabsf", "floorf", "ceilf", "rintf",
        "truncf", "fmaf", "fmaxf", "fminf", "powf", "erff", "exp", "tanh", "sqrt", "log", "sin", "cos",
    )},
}  # fmt: skip
BITS = {"half": 16, "float": 32, "double": 64, "ptr": 64}
PURE = "memory(none) nounwind willreturn"  # special registers do not change while a thread runs


@functools.cache
def image(function, signature, bounds=None):
    """The kernel, compiled; cached for each function and signature."""
    return IrImage(function, signature, bounds)


WAIT = re.compile(
    r'^ *call void (?:@"llvm\.nvvm\.barrier0"\(\)|asm sideeffect "cp\.async\.(?:wait|commit)_group[^\n]*)$',
    re.M,
)


def waits(function, signature, bounds=None):
    """[(device function, statement)]: barriers, waits and commits of a kernel and of all that it calls."""
    found = []
    for text in dict.fromkeys(offline.to_nvvm_ir(function, signature, bounds)[1]):
        for wait in WAIT.finditer(text):
            of = re.findall(r'^define [^@]*@"?([\w.]+)', text[: wait.start()], flags=re.M)[-1]
            found.append((of, wait[0].strip()))
    return found


def _without_wait(texts, number):
    """The modules without the wait of this number; a module that two others call is there twice."""
    numbers = itertools.count()

    def kept(wait):
        return "" if next(numbers) == number else wait[0]

    changed = {text: WAIT.sub(kept, text) for text in dict.fromkeys(texts)}
    return [changed[text] for text in texts]


class IrImage(launching.Image):
    """without: the number of the wait that is left out, in the order of `waits`"""

    def __init__(self, function, signature, bounds, without=None):
        self.signature = tuple(
            kind.copy(readonly=False) if isinstance(kind, types.Array) and not kind.mutable else kind
            for kind in signature
        )
        self.name = function.__name__
        self.shared = runtime.SharedLayout()
        self._shims = {}
        entry, texts = offline.to_nvvm_ir(function, self.signature, bounds)
        texts = [self._translate(text) for text in _without_wait(texts, without)]
        start = f"inttoptr (i64 {runtime.shared_memory() + self.dynamic_start} to ptr)"
        texts = [text.replace("@DYNAMIC", start) for text in texts]
        self._engine = _compile([*texts, *self._shims.values(), _entry(entry, texts)])
        self.address = self._engine.get_function_address("kernel_entry")

    def _translate(self, text):
        """A module as the host's LLVM reads it."""
        text = re.sub(r"^(target|!).*$", "", text, flags=re.M)
        text = re.sub(r", !\w+ !\d+", "", text)
        text = re.sub(r'^@"?llvm\.used"?.*$', "", text, flags=re.M)
        text = _opaque_pointers(text)
        text = re.sub(r"\baddrspacecast\b", "bitcast", text)
        text = self._place_shared_arrays(text)
        text = re.sub(r" addrspace\(\d+\)", "", text)
        text = re.sub(r'^(declare .*@"?llvm\.nvvm\.read\.ptx\.sreg.*)$', rf"\1 {PURE}", text, flags=re.M)
        text = text.replace("llvm.nvvm.", "nvvm.")
        text = re.sub(r"__nv_\w+", _libm, text)
        return re.sub(
            r'call (?P<result>.+?) asm\s+(?:sideeffect\s+)?"(?P<asm>[^"]*)", "[^"]*"\s*'
            r"\((?P<values>[^\n]*)\)$",
            self._inline_assembly, text, flags=re.M,
        )  # fmt: skip

    def _place_shared_arrays(self, text):
        pattern = r'^@"?([\w.]+)"? = (.*)addrspace\(3\) global (\[[^\n]*?\])(?: undef)?,? ?(?:align \d+)?$'
        places = {}
        for name, linkage, kind in re.findall(pattern, text, flags=re.M):
            if "external" in linkage:
                places[name] = "@DYNAMIC"
            else:
                places[name] = f"inttoptr (i64 {self.shared.place(name, _size_of(kind))} to ptr)"
        text = re.sub(pattern, "", text, flags=re.M)
        for name, place in places.items():
            text = re.sub(rf'@"?{re.escape(name)}"?(?![\w.])', place, text)
        return text

    def _inline_assembly(self, found):
        """The call of a function that puts the operands into words, calls runtime.c and takes the results."""
        result, asm = found["result"], found["asm"]
        if "%dynamic_smem_size" in asm:
            return "call i32 @run_dynamic_bytes()"
        values = ptx_text.operands(found["values"])
        kinds = tuple(value.split(" ")[0] for value in values)
        key = (asm, result, kinds)
        name = "asm." + hashlib.sha256(repr(key).encode()).hexdigest()[:12]
        if key not in self._shims:
            self._shims[key] = _shim(name, asm, result, kinds)
        return f"call {result} @{name}({', '.join(values)})"


def _libm(found):
    if found[0] not in LIBM:
        raise NotImplementedError(f"executor one: libdevice function {found[0]}")
    return LIBM[found[0]]


def _opaque_pointers(text):
    """Typed pointers, which llvmlite prints, as `ptr`."""
    kind = r'\bi\d+|\b(?:float|double|half|ptr|void)|%"[^"]*"|\{[^{}]*\}|\[\d+ x [^\[\]]*\]|<\d+ x [^<>]*>'
    function = r"\b(?:void|i\d+|float|double|ptr|\{[^{}]*\}) \([^()]*\)"
    pointer = re.compile(rf"(?:{kind}|{function})(?: addrspace\(\d+\))?\*")
    while True:
        text, n = pointer.subn("ptr", text)
        if not n:
            return re.sub(r"ptr addrspace\(\d+\)", "ptr", text)


def _size_of(kind):
    """Bytes of [n x [m x i8]] and the like."""
    if kind.startswith("["):
        n, element = re.fullmatch(r"\[(\d+) x (.*)\]", kind).groups()
        return int(n) * _size_of(element)
    return max(1, _bits(kind) // 8)


def _bits(kind):
    return BITS.get(kind) or int(kind.removeprefix("i"))


def _shim(name, asm, result, kinds):
    """An LLVM function with the operands of the assembly, which calls runtime.c's function of the opcode."""
    opcode, operands = ptx_text.instruction(asm)
    function = ptx_text.runtime_function(opcode)
    if function is None:
        raise NotImplementedError(f"executor one: runtime.c has no instruction {opcode!r}")
    if result == "void":
        results = []
    else:
        results = [part.strip() for part in result[1:-1].split(",")] if result.startswith("{") else [result]
    operands = [member for operand in operands[bool(results) :] for member in ptx_text.members(operand)]
    lines = [
        f"declare void @{function}(ptr, ptr)",
        f"define linkonce_odr {result} @{name}({', '.join(f'{k} %a{i}' for i, k in enumerate(kinds))}) {{",
        f"  %in = alloca [{max(1, len(operands))} x i64]",
        f"  %out = alloca [{max(1, len(results))} x i64]",
    ]
    for i, operand in enumerate(operands):
        number, _, offset = operand.strip("[]").replace(" ", "").partition("+")
        if number.startswith("$"):
            k = int(number[1:]) - len(results)
            lines += [*_word(f"%a{k}", kinds[k], f"%b{i}"), f"  %w{i} = add i64 %b{i}, {int(offset or 0)}"]
        else:
            lines.append(f"  %w{i} = add i64 {int(number)}, 0")
        lines += [f"  %p{i} = getelementptr i64, ptr %in, i32 {i}", f"  store i64 %w{i}, ptr %p{i}"]
    lines.append(f"  call void @{function}(ptr %in, ptr %out)")
    whole = "undef"
    for i, kind in enumerate(results):
        lines += [f"  %q{i} = getelementptr i64, ptr %out, i32 {i}", f"  %o{i} = load {kind}, ptr %q{i}"]
        if result.startswith("{"):
            lines.append(f"  %r{i} = insertvalue {result} {whole}, {kind} %o{i}, {i}")
        whole = f"%r{i}" if result.startswith("{") else f"%o{i}"
    lines += ["  ret void" if result == "void" else f"  ret {result} {whole}", "}"]
    return "\n".join(lines) + "\n"


def _word(value, kind, word):
    """LLVM lines that make an i64 of a value."""
    if kind == "ptr":
        return [f"  {word} = ptrtoint ptr {value} to i64"]
    bits, lines = _bits(kind), []
    if kind in BITS:
        lines, value = [f"  {word}.b = bitcast {kind} {value} to i{bits}"], f"{word}.b"
    return [*lines, f"  {word} = " + (f"zext i{bits} {value} to i64" if bits < 64 else f"add i64 {value}, 0")]


def _entry(name, texts):
    """void kernel_entry(words): the kernel with its arguments from an array of words."""
    found = next(
        match
        for text in texts
        if (match := re.search(rf'^define void @"?{re.escape(name)}"?\(([^\n]*)\)', text, flags=re.M))
    )
    kinds = [parameter.split(" ")[0] for parameter in found[1].split(", ")]
    lines = [f'declare void @"{name}"({", ".join(kinds)})', "define void @kernel_entry(ptr %words) {"]
    for i, kind in enumerate(kinds):
        lines += [f"  %p{i} = getelementptr i64, ptr %words, i32 {i}", f"  %v{i} = load {kind}, ptr %p{i}"]
    values = ", ".join(f"{kind} %v{i}" for i, kind in enumerate(kinds))
    return "\n".join([*lines, f'  call void @"{name}"({values})', "  ret void", "}"]) + "\n"


@functools.cache
def _machine():
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    runtime.library()
    llvm.load_library_permanently(runtime.library()._name)
    return llvm.Target.from_default_triple()


def _compile(texts):
    """One module of all texts, everything inlined into the entry; returns the engine that owns its code."""
    target, features = _machine(), llvm.get_host_cpu_features().flatten()
    machine = target.create_target_machine(opt=2, cpu=llvm.get_host_cpu_name(), features=features)
    header = f'target triple = "{llvm.get_default_triple()}"\ntarget datalayout = "{machine.target_data}"\n'
    declared = _declarations(texts)
    module = None
    for text in texts:
        missing = [line for name, line in declared.items() if f"define linkonce_odr {name}" not in text]
        part = llvm.parse_assembly("\n".join([header, text, *missing]))
        if module is None:
            module = part
        else:
            module.link_in(part)
    for function in module.functions:
        if not function.is_declaration and function.name != "kernel_entry":
            function.linkage = "internal"
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    for function in module.functions:
        name = function.name
        if function.is_declaration and not name.startswith("llvm.") and not llvm.address_of_symbol(name):
            raise NotImplementedError(f"executor one: no function {name}")
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine


def _declarations(texts):
    """ "result @name(" -> declaration, of what kernels call in other modules."""
    found = {"i32 @run_dynamic_bytes(": "declare i32 @run_dynamic_bytes()"}
    for text in texts:
        for head, parameters in re.findall(r"^define linkonce_odr (.+? @asm\.\w+\()(.*)\) \{$", text, re.M):
            found[head] = f"declare {head}{re.sub(r' %a[0-9]+', '', parameters)})"
    return found
