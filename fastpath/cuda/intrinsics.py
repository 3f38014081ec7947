"""PTX instructions that Numba has no name for, one function each.

Every function is one inline-assembly instruction (or, for arithmetic on int32, one LLVM instruction).  So a
kernel can be read beside its PTX, and the executors of the tests know each of them by its opcode.

Numba widens int32 arithmetic to int64 and float32 with int32 to float64.  Kernels use the functions here on
packed words and write float32(...) around every other number.

Rounding: NVVM and ptxas fuse a product and a sum where they find them.  Where the last bit is defined,
kernels say `mul_rn`, `add_rn` and `fma_rn`, which nobody touches.
"""

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing import signature
from numba.cuda.extending import intrinsic

I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
# Weights: by the read-only path, for what nobody writes while the kernel runs.  They are read once: the
# first-level cache does not keep them, the second-level one drops them before what was asked for ahead.
WEIGHTS = "ld.global.nc.L1::no_allocate"
GOES_FIRST = 0x12F0000000000000  # what createpolicy.fractional.L2::evict_first.b64 of 1.0 gives
CONSTRAINT = {I16: "h", I32: "r", I64: "l", F32: "f"}
TYPE = {types.int32: I32, types.float32: F32}


def _emit(builder, text, results, values, touches_memory=False):
    """One instruction: `text` names its results $0.. and then its operands.  Returns a list of results."""
    if text.startswith(WEIGHTS):
        text = text.replace(WEIGHTS, f"{WEIGHTS}.L2::cache_hint").replace(
            "];", f"], ${len(results) + len(values)};"
        )
        values = [*values, ir.Constant(I64, GOES_FIRST)]
    kinds = [value.type for value in values]
    constraints = ["=" + CONSTRAINT[kind] for kind in results] + [CONSTRAINT[kind] for kind in kinds]
    if touches_memory:
        constraints.append("~{memory}")
    returned = {0: ir.VoidType(), 1: results[0] if results else None}.get(len(results))
    if returned is None:
        returned = ir.LiteralStructType(results)
    asm = ir.InlineAsm(ir.FunctionType(returned, kinds), text, ",".join(constraints), touches_memory)
    value = builder.call(asm, values)
    if len(results) < 2:
        return [value] * len(results)
    return [builder.extract_value(value, i) for i in range(len(results))]


def _group(first, n):
    return "{" + ", ".join(f"${i}" for i in range(first, first + n)) + "}"


# -- addresses of array elements


def _pointer(context, builder, kind, array, index):
    return builder.gep(context.make_array(kind)(context, builder, array).data, [index])


def _global(context, builder, kind, array, index):
    return builder.ptrtoint(_pointer(context, builder, kind, array, index), I64)


@intrinsic
def address_of(typingctx, array, index):
    """Of array[index]: 64 bits, for the functions here whose names say `at`."""

    def codegen(context, builder, sig, args):
        return _global(context, builder, sig.args[0], *args)

    return signature(types.int64, array, types.int64), codegen


def piece_of(n_bytes):
    """(array, i) -> the address of its piece i of so many bytes; i counts without a sign, to 2^32."""

    @intrinsic
    def function(typingctx, array, i):
        def codegen(context, builder, sig, args):
            start = _global(context, builder, sig.args[0], args[0], ir.Constant(I64, 0))
            return builder.add(start, builder.mul(builder.zext(args[1], I64), ir.Constant(I64, n_bytes)))

        return signature(types.int64, array, types.int32), codegen

    return function


def _shared(context, builder, kind, array, index):
    """32 bits, as instructions on shared memory want it."""
    pointer = _pointer(context, builder, kind, array, index)
    return builder.ptrtoint(builder.addrspacecast(pointer, pointer.type.pointee.as_pointer(3)), I32)


def _shared_32(context, builder, kind, array, index):
    """The same, reckoned in 32 bits."""
    start = _shared(context, builder, kind, array, I64(0))
    n_bytes = context.get_abi_sizeof(context.get_data_type(kind.dtype))
    return builder.add(start, builder.mul(builder.trunc(index, I32), I32(n_bytes)))


# -- arithmetic


def _unary(opcode, result, kind):
    @intrinsic
    def function(typingctx, x):
        def codegen(context, builder, sig, args):
            return _emit(builder, f"{opcode} $0, $1;", [TYPE[result]], args)[0]

        return signature(result, kind), codegen

    return function


def _binary(opcode, result, kind):
    @intrinsic
    def function(typingctx, x, y):
        def codegen(context, builder, sig, args):
            return _emit(builder, f"{opcode} $0, $1, $2;", [TYPE[result]], args)[0]

        return signature(result, kind, kind), codegen

    return function


def _ternary(opcode, kind):
    @intrinsic
    def function(typingctx, x, y, z):
        def codegen(context, builder, sig, args):
            return _emit(builder, f"{opcode} $0, $1, $2, $3;", [TYPE[kind]], args)[0]

        return signature(kind, kind, kind, kind), codegen

    return function


def _strict(operation):
    """int32 in, int32 out: one LLVM instruction."""

    @intrinsic
    def function(typingctx, x, y):
        def codegen(context, builder, sig, args):
            return getattr(builder, operation)(*args)

        return signature(types.int32, types.int32, types.int32), codegen

    return function


add32, sub32, mul32 = _strict("add"), _strict("sub"), _strict("mul")
and32, or32, xor32 = _strict("and_"), _strict("or_"), _strict("xor")
shl32, shr32, sar32 = _strict("shl"), _strict("lshr"), _strict("ashr")
div32 = _strict("udiv")  # without a sign; y is not 0


def _logic(table):
    """A function of three bits, on all 32 at once: bit 4x + 2y + z of the table is its value."""

    @intrinsic
    def function(typingctx, x, y, z):
        def codegen(context, builder, sig, args):
            return _emit(builder, f"lop3.b32 $0, $1, $2, $3, {table};", [I32], args)[0]

        return signature(types.int32, types.int32, types.int32, types.int32), codegen

    return function


and_or, and_xor = _logic(0xEA), _logic(0x6A)  # x & y | z, x & y ^ z

dp4a_s8 = _ternary("dp4a.s32.s32", types.int32)  # four int8 of x times four of y, plus z
permute_bytes = _ternary("prmt.b32", types.int32)  # bytes of x (0-3) and y (4-7), chosen by nibbles of z

mul_rn = _binary("mul.rn.f32", types.float32, types.float32)
add_rn = _binary("add.rn.f32", types.float32, types.float32)
round_to_int = _unary("cvt.rni.s32.f32", types.int32, types.float32)  # ties to even
exp2_approx = _unary("ex2.approx.ftz.f32", types.float32, types.float32)  # 2 units; denormal results are 0
tanh_approx = _unary("tanh.approx.f32", types.float32, types.float32)  # relative error 2^-11
pack_bf16 = _binary("cvt.rn.bf16x2.f32", types.int32, types.float32)  # x in the upper half, y in the lower
pack_f16 = _binary("cvt.rn.f16x2.f32", types.int32, types.float32)


@intrinsic
def wide_mad(typingctx, x, y, z):
    """x * y + z for int32 x and y, and int64 z."""

    def codegen(context, builder, sig, args):
        return _emit(builder, "mad.wide.s32 $0, $1, $2, $3;", [I64], args)[0]

    return signature(types.int64, types.int32, types.int32, types.int64), codegen


@intrinsic
def fma_rn(typingctx, x, y, z):
    """x * y + z with one rounding."""

    def codegen(context, builder, sig, args):
        return builder.fma(*args)

    return signature(types.float32, types.float32, types.float32, types.float32), codegen


@intrinsic
def f16_to_f32(typingctx, bits):
    """float16 in the low half of an int32 -> float32."""

    def codegen(context, builder, sig, args):
        return _emit(builder, "cvt.f32.f16 $0, $1;", [F32], [builder.trunc(args[0], I16)])[0]

    return signature(types.float32, types.int32), codegen


@intrinsic
def as_f32(typingctx, bits):
    """The float32 of these bits; of a bfloat16 shifted up by 16, its value."""

    def codegen(context, builder, sig, args):
        return builder.bitcast(args[0], F32)

    return signature(types.float32, types.int32), codegen


@intrinsic
def as_i32(typingctx, x):
    """The bits of a float32."""

    def codegen(context, builder, sig, args):
        return builder.bitcast(args[0], I32)

    return signature(types.int32, types.float32), codegen


# -- loads


def _load(opcode, n, address=_global):
    """n words from array[index]: the index is flat and counts elements of the array."""

    @intrinsic
    def function(typingctx, array, index):
        result = types.UniTuple(types.int32, n)

        def codegen(context, builder, sig, args):
            at = address(context, builder, sig.args[0], args[0], args[1])
            text = f"{opcode} {_group(0, n) if n > 1 else '$0'}, [${n}];"
            words = _emit(builder, text, [I32] * n, [at], touches_memory=True)
            return cgutils.pack_array(builder, words)

        return signature(result, array, types.int64), codegen

    return function


load_weights_v4 = _load(f"{WEIGHTS}.v4.u32", 4)
load_weights_v2 = _load(f"{WEIGHTS}.v2.u32", 2)
load_weights_v1 = _load(f"{WEIGHTS}.u32", 1)
load_weights_half = _load(f"{WEIGHTS}.u16", 1)
# All else may be what the kernel before wrote while this one was waiting for it (early.py).
load_v1 = _load("ld.global.u32", 1)
load_v2 = _load("ld.global.v2.u32", 2)
load_v4 = _load("ld.global.v4.u32", 4)
load_shared_v4 = _load("ld.shared.v4.u32", 4, _shared)


def loads_at(opcode, words, count, apart=None, first=0):
    """(address) -> the words of so many loads: the first `first` bytes behind this address, the next ones
    `apart` bytes from one to another.

    Without `apart`: (address, apart as an int64) -> the same.
    """
    n = words * count

    def codegen(context, builder, sig, args):
        found = []
        for i in range(count):
            behind = first + i * (apart or 0)
            at, offset = args[0], f" + {behind}" if behind else ""
            if not apart and i:
                at = builder.add(at, builder.mul(args[1], ir.Constant(I64, i)))
            text = f"{opcode} {_group(0, words) if words > 1 else '$0'}, [${words}{offset}];"
            found += _emit(builder, text, [I32] * words, [at], touches_memory=True)
        return cgutils.pack_array(builder, found)

    if apart:

        @intrinsic
        def function(typingctx, address):
            return signature(types.UniTuple(types.int32, n), types.int64), codegen

    else:

        @intrinsic
        def function(typingctx, address, apart):
            return signature(types.UniTuple(types.int32, n), types.int64, types.int64), codegen

    return function


def _load_rows(opcode, n, rows, step, address, start=0):
    """The same from `rows` places, `step` bytes apart, the first `start` bytes on: n words of each."""

    @intrinsic
    def function(typingctx, array, index):
        result = types.UniTuple(types.int32, n * rows)

        def codegen(context, builder, sig, args):
            at, words = address(context, builder, sig.args[0], args[0], args[1]), []
            for row in range(rows):
                text = f"{opcode} {_group(0, n)}, [${n}+{start + row * step}];"
                words += _emit(builder, text, [I32] * n, [at], touches_memory=True)
            return cgutils.pack_array(builder, words)

        return signature(result, array, types.int64), codegen

    return function


def load_rows_v4(rows, step):
    return _load_rows("ld.global.v4.u32", 4, rows, step, _global)


def load_rows_v2(rows, step, start=0):
    return _load_rows("ld.global.v2.u32", 2, rows, step, _global, start)


def load_shared_rows_v4(rows, step):
    return _load_rows("ld.shared.v4.u32", 4, rows, step, _shared_32)


def load_shared_rows_v2(rows, step):
    return _load_rows("ld.shared.v2.u32", 2, rows, step, _shared_32)


def _store(opcode, address, n=4, rows=1, step=0):
    """n words to array[index], at a multiple of their bytes; then n more, each time `step` bytes on."""

    @intrinsic
    def function(typingctx, array, index, words):
        def codegen(context, builder, sig, args):
            at = address(context, builder, sig.args[0], args[0], args[1])
            values = cgutils.unpack_tuple(builder, args[2])
            for row in range(rows):
                text = f"{opcode} [{f'$0+{row * step}' if row else '$0'}], {_group(1, n) if n > 1 else '$1'};"
                _emit(builder, text, [], [at, *values[row * n :][:n]], touches_memory=True)
            return context.get_dummy_value()

        return signature(types.void, array, types.int64, types.UniTuple(types.int32, n * rows)), codegen

    return function


def store_rows_v4(rows, step):
    return _store("st.global.v4.u32", _global, 4, rows, step)


def store_shared_rows_v4(rows, step):
    return _store("st.shared.v4.u32", _shared_32, 4, rows, step)


store_v1 = _store("st.global.u32", _global, 1)
store_v2 = _store("st.global.v2.u32", _global, 2)
store_v4 = _store("st.global.v4.u32", _global)
store_shared_v4 = _store("st.shared.v4.u32", _shared)


def zeros_of(n):
    """() -> n int32."""

    @intrinsic
    def function(typingctx):
        def codegen(context, builder, sig, args):
            return cgutils.pack_array(builder, [ir.Constant(I32, 0)] * n)

        return signature(types.UniTuple(types.int32, n)), codegen

    return function


# -- between the lanes of a warp


@intrinsic
def of_lane_in_8(typingctx, x, lane):
    """The float32 or int32 that lane 0 to 7 has, of every 8 lanes side by side; all 32 meet here."""

    def codegen(context, builder, sig, args):
        kind = ir.FunctionType(ir.LiteralStructType((I32, ir.IntType(1))), [I32] * 5)
        shuffle = cgutils.get_or_insert_function(builder.module, kind, "llvm.nvvm.shfl.sync.i32")
        segments = (32 - 8) << 8 | 31
        mask, idx, clamp = (ir.Constant(I32, number) for number in (-1, 0, segments))
        found = builder.call(shuffle, (mask, idx, builder.bitcast(args[0], I32), args[1], clamp))
        return builder.bitcast(builder.extract_value(found, 0), TYPE[x])

    return signature(x, x, types.int32), codegen


# -- asynchronous copies from global to shared memory


@intrinsic
def copy_async_16(typingctx, to, to_index, source, source_index):
    """16 bytes, both ends at multiples of 16; there once `wait_copies` says so."""

    def codegen(context, builder, sig, args):
        target = _shared(context, builder, sig.args[0], args[0], args[1])
        origin = _global(context, builder, sig.args[2], args[2], args[3])
        _emit(builder, "cp.async.cg.shared.global [$0], [$1], 16;", [], [target, origin], touches_memory=True)
        return context.get_dummy_value()

    return signature(types.void, to, types.int64, source, types.int64), codegen


def _statement(text):
    @intrinsic
    def function(typingctx):
        def codegen(context, builder, sig, args):
            _emit(builder, text, [], [], touches_memory=True)
            return context.get_dummy_value()

        return signature(types.void), codegen

    return function


commit_copies = _statement("cp.async.commit_group;")  # closes a group
wait_copies = _statement(
    "cp.async.wait_group 0;"
)  # for all groups of this thread; then a barrier for the others'
wait_copies_but_one = _statement("cp.async.wait_group 1;")  # the last group may be on its way


# -- between kernels, from sm_90 on (early.py)

wait_for_previous = _statement("griddepcontrol.wait;")  # it has ended, and what it wrote can be seen
let_next_start = _statement("griddepcontrol.launch_dependents;")


@intrinsic
def prefetch_bytes(typingctx, array, index, n_bytes):
    """From array[index] on, into the second-level cache: a multiple of 16 bytes at a multiple of 16."""

    def codegen(context, builder, sig, args):
        at = _global(context, builder, sig.args[0], args[0], args[1])
        text = "cp.async.bulk.prefetch.L2.global [$0], $1;"
        _emit(builder, text, [], [at, args[2]], touches_memory=True)
        return context.get_dummy_value()

    return signature(types.void, array, types.int64, types.int32), codegen


@intrinsic
def prefetch_at(typingctx, address, n_bytes):
    """The same from an address on, which nobody checks."""

    def codegen(context, builder, sig, args):
        text = "cp.async.bulk.prefetch.L2.global [$0], $1;"
        _emit(builder, text, [], args, touches_memory=True)
        return context.get_dummy_value()

    return signature(types.void, types.int64, types.int32), codegen


# -- tensor cores


def _load_matrix(n, transposed):
    """n 8x8 matrices of 16-bit numbers; lane 8m + i gives the index of row i of matrix m."""
    opcode = f"ldmatrix.sync.aligned.m8n8.x{n}{'.trans' if transposed else ''}.shared.b16"
    return _load(opcode, n, _shared)


load_matrix_x4, load_matrix_x2 = _load_matrix(4, False), _load_matrix(2, False)
load_matrix_x4_transposed = _load_matrix(4, True)


def _multiply_matrices(form, number, n_left=4):
    """d = a * b + c for a warp; a 4 words, b half as many, c and d 4 numbers per lane."""
    n_right = n_left // 2

    @intrinsic
    def function(typingctx, a, b, c):
        left, numbers = types.UniTuple(types.int32, n_left), types.UniTuple(number, 4)

        def codegen(context, builder, sig, args):
            places = _group(4, n_left), _group(4 + n_left, n_right), _group(4 + n_left + n_right, 4)
            text = f"mma.sync.aligned.{form} {_group(0, 4)}, {', '.join(places)};"
            values = [value for part in args for value in cgutils.unpack_tuple(builder, part)]
            return cgutils.pack_array(builder, _emit(builder, text, [TYPE[number]] * 4, values))

        return signature(numbers, left, types.UniTuple(types.int32, n_right), numbers), codegen

    return function


mma_s8 = _multiply_matrices("m16n8k32.row.col.s32.s8.s8.s32", types.int32)
mma_s8_short = _multiply_matrices("m16n8k16.row.col.s32.s8.s8.s32", types.int32, 2)
mma_bf16 = _multiply_matrices("m16n8k16.row.col.f32.bf16.bf16.f32", types.float32)
mma_f16 = _multiply_matrices("m16n8k16.row.col.f32.f16.f16.f32", types.float32)
