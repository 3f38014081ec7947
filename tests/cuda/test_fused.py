"""Fused launches against the launches that they stand for: every byte that somebody reads later.

A call is recorded as a program, which fuses it, and run op by op; both on executor one.
"""

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpath.bench.blank import blank
from fastpath.cuda import (
    device,
    early,
    fuse,
    fuse_flow,
    fused_kernels,
    ops,
    program,
    read_ahead,
    rehearsal,
    table,
)
from fastpath.lanes import Lanes
from fastpath.load import load_model
from quant import FORMATS as QUANT_FORMATS
from tests import strategies, tiny
from tests.gpu_on_cpu import devices, launching, mutants, needs, offline, sass

ROUGH = devices.executor_one(launching.SCHEDULES[2:4])
FEW = devices.executor_one((launching.SCHEDULES[3], launching.SCHEDULES[4]))
ONCE = devices.executor_one((launching.LOCKSTEP,))


def fused(call, executor=FEW):
    """Results of call() op by op, of its program, and the program's launches."""
    with device.use(executor):
        before = [array.copy_to_host() for array in call()]
    return before, *replayed(call, executor)


def replayed(call, executor):
    with device.use(executor), program.record() as recorded:
        after = [array.copy_to_host() for array in call()]
    return after, recorded.launches


def check(call, n_launches, executor=FEW):
    """n_launches: how many, after fusing."""
    before, after, launches = fused(call, executor)
    names = [launch.kernel.name for launch in launches]
    assert len(names) == n_launches, names
    for b, a in zip(before, after, strict=True):
        assert b.tobytes() == a.tobytes(), names


def _slow_but(some, names):
    """Names as parameters; those that are not among `some` are slow."""
    return [name if name in some else pytest.param(name, marks=pytest.mark.slow) for name in names]


# -- patterns: name -> (call of numbers, launches that are left: a number, or numbers -> one)


class Numbers:
    """T rows of D columns, and what else a pattern wants, from a seed."""

    def __init__(self, seed, T, D, fmt):
        self.rng = np.random.default_rng(seed)
        self.T, self.D, self.format = T, D, QUANT_FORMATS[fmt]
        self._known = {}

    def rows(self, name, *shape):
        key = name, shape
        if key not in self._known:
            self._known[key] = strategies.normal(self.rng, *(shape or (self.T, self.D)))
        return device.put(self._known[key], np.float32)

    def vector(self, name, n):
        key = name, n
        if key not in self._known:
            self._known[key] = strategies.normal(self.rng, n)
        return self._known[key]

    def matrix(self, name, M, C, fmt=None):
        key = name, M, C
        if key not in self._known:
            self._known[key] = strategies.weights(self.rng, fmt or self.format, M, C)
        return self._known[key]


def _norm_sum_norm_product(n):
    x, y = n.rows("x"), n.rows("y")
    y = ops.rms_norm(y, n.vector("a", n.D), 1e-6)
    y = ops.scale(ops.add(y, x), 0.37)
    z = ops.rms_norm(y, n.vector("b", n.D), 1e-6)
    return y, ops.linear(z, n.matrix("w", 9, n.D), "int8")


def _three_ways(n):
    """One sum, of which three norms go to products of three kinds, and one to nobody but the result."""
    x, y = n.rows("x"), n.rows("y")
    x = ops.add(x, ops.rms_norm(y, n.vector("a", n.D), 1e-6))
    one, two, three = (ops.rms_norm(x, n.vector(name, n.D), 1e-5) for name in "bcd")
    products = (
        ops.linear(one, n.matrix("w", 9, n.D), "int8"),
        ops.linear(ops.scale(two, 0.61), n.matrix("f", 6, n.D, QUANT_FORMATS["F32"]), "int8"),
        ops.linear(three, n.matrix("v", 5, n.D), "float"),
    )
    return x, *products


def _three_products(n):
    x = n.rows("x")
    return tuple(ops.linear(x, n.matrix(name, M, n.D), "int8") for name, M in (("q", 12), ("k", 5), ("v", 6)))


def _two_formats(n):
    """Side by side, though one is of float32."""
    x = n.rows("x")
    y = ops.linear(x, n.matrix("w", 9, n.D), "int8")
    return y, ops.linear(x, n.matrix("f", 6, n.D, QUANT_FORMATS["F32"]), "int8")


def _gated(n):
    gate, up = n.rows("gate"), n.rows("up")
    return (ops.linear(ops.geglu(gate, up), n.matrix("w", 9, n.D), "int8"),)


def _experts(n):
    """A router's choice, its groups, two products of each expert, their gate, the third product, the sum."""
    x, E, A, F = n.rows("x"), 5, 2, n.D
    scale = n.vector("scale", E)
    logits = ops.linear(x, n.matrix("router", E, n.D, QUANT_FORMATS["F32"]), "int8")
    ids, chosen = ops.route(logits, A, scale)
    key = "experts"
    if key not in n._known:
        n._known[key] = [
            strategies.weights(n.rng, n.format, E, *shape) for shape in ((F, n.D), (F, n.D), (7, F))
        ]
    up, gate, down = n._known[key]
    hidden = ops.geglu(ops.expert_linear(x, gate, ids, "int8"), ops.expert_linear(x, up, ids, "int8"))
    out = ops.expert_sum(ops.expert_linear(hidden, down, ids, "int8"), chosen)
    return ids, ops.rms_norm(out, n.vector("c", 7), 1e-6)


def _sum_of_experts(n):
    """All of a token's experts read one row."""
    ids, chosen = ops.route(n.rows("logits", n.T, 5), 3, n.vector("scale", 5))
    if "stack" not in n._known:
        n._known["stack"] = strategies.weights(n.rng, n.format, 5, 7, n.D)
    return (ops.expert_sum(ops.expert_linear(n.rows("x"), n._known["stack"], ids, "int8"), chosen),)


def _gated_products(n):
    """288 rows: the last 224 of 512 are padding, where they are rounded."""
    x = n.rows("x")
    up, gate = (ops.linear(x, n.matrix(name, 288, n.D), "int8") for name in ("up", "gate"))
    hidden = ops.geglu(gate, up)
    return (ops.linear(hidden, n.matrix("down", 6, 288, QUANT_FORMATS["Q4_0"]), "int8"),)


def _is_short(n):
    """Rounding, which comes before a product, is done by each of its blocks."""
    return n.T <= 2 and n.D <= fuse.MOST_BEFORE


PATTERNS = {
    "norm, sum, scale, norm, rounding": (_norm_sum_norm_product, 2),
    "three ways": (_three_ways, 2),
    "three products": (_three_products, 2),
    "products of two formats": (_two_formats, 2),
    "gate and rounding": (_gated, lambda n: 1 if _is_short(n) else 2),
    # rounding; products, gate and rounding of one row; product; of two rows the last one gates and rounds
    "gated products": (_gated_products, lambda n: 3 if n.T <= 2 else 4),
    # rounding with spreading; router; choice, groups; gate, up; geglu, rounding; down; sum, norm
    "experts": (_experts, 7),
    # rounding, choice, groups; products and, of few tokens at once, their sum
    "sum of experts": (_sum_of_experts, lambda n: 2 if n.T <= 2 else 3),
}


BARRIER = "cuda.syncthreads()"


BARRIERS = {  # pattern: rows, columns
    "norm, sum, scale, norm, rounding": (3, 512), "gate and rounding": (2, 512), "experts": (3, 512),
}  # fmt: skip


@pytest.mark.parametrize("name", _slow_but(list(BARRIERS)[:2], BARRIERS))
def test_each_barrier_is_needed(name, monkeypatch):
    """Without any one of those between steps, executor one sees it."""
    call, source = PATTERNS[name][0], fused_kernels.source
    n = Numbers(0, *BARRIERS[name], "Q4_K")
    texts = []

    def noted(*arguments, is_early=False):
        made = source(*arguments, is_early=is_early)
        return made if is_early else texts.append(made) or made

    monkeypatch.setattr(fused_kernels, "source", noted)
    fused_kernels.kernel_of.cache_clear()
    whole, _ = replayed(lambda: call(n), ROUGH)
    found = [(i, k) for i, (text, _) in enumerate(texts) for k in range(text.count(BARRIER))]
    assert found
    for number, k in found:

        def without(*arguments, text=texts[number][0], k=k, **how):
            made, steps = source(*arguments, **how)
            if made == text:
                pieces = made.split(BARRIER)
                made = BARRIER.join(pieces[: k + 1]) + "pass" + BARRIER.join(pieces[k + 1 :])
            return made, steps

        monkeypatch.setattr(fused_kernels, "source", without)
        fused_kernels.kernel_of.cache_clear()
        try:
            after, _ = replayed(lambda: call(n), ROUGH)
        except launching.KernelError:
            continue
        same = all(a.tobytes() == b.tobytes() for a, b in zip(whole, after, strict=True))
        assert not same, f"nobody noticed: {k} of\n{texts[number][0]}"
    monkeypatch.undo()
    fused_kernels.kernel_of.cache_clear()


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("fmt", [pytest.param("Q8_0", marks=pytest.mark.slow), "Q4_K"])
def test_pattern(name, fmt):
    call, n_launches = PATTERNS[name]
    block = QUANT_FORMATS[fmt].block_size

    @settings(max_examples=2)
    @given(seed=st.integers(0, 99), T=st.integers(1, 16), blocks=st.integers(1, 9 if block == 32 else 3))
    def some(seed, T, blocks):
        n = Numbers(seed, T, blocks * block, fmt)
        check(lambda: call(n), n_launches if isinstance(n_launches, int) else n_launches(n))

    some()


@pytest.mark.parametrize("fmt", ["Q8_0", pytest.param("Q6_K", marks=pytest.mark.slow)])
def test_products_of_eight_rows(fmt):
    """q, k and v stand in one grid, each with rows that fill no block; of 11 rows in two groups of tokens."""
    for T in (8, 11):
        n = Numbers(T, T, 1280, fmt)
        before, after, launches = fused(lambda n=n: _three_products(n))
        assert [b.tobytes() for b in before] == [a.tobytes() for a in after]
        assert any(f"3_some_{fmt.lower()}" in launch.kernel.name for launch in launches)


@pytest.mark.parametrize("name", _slow_but(("sum of experts",), ("experts", "sum of experts")))
def test_experts_of_few_tokens(name):
    """Their sum is part of the last product; of more it is not."""
    for T, fmt, D in ((1, "Q8_0", 96), (2, "Q6_K", 1280), (3, "Q4_K", 256)):
        n = Numbers(T, T, D, fmt)
        before, after, launches = fused(lambda n=n: PATTERNS[name][0](n))
        assert [b.tobytes() for b in before] == [a.tobytes() for a in after]
        names = [launch.kernel.name for launch in launches]
        assert (f"fused_linear_{fmt.lower()}_expert_sum" in names) == (T <= 2)


def test_a_gate_of_one_row():
    """In the last product's launch; and as it starts early."""
    starts_early = devices.executor_one((launching.LOCKSTEP,), Early)
    for fmt, D, executor in (("Q6_K", 1280, FEW), ("Q8_0", 1056, starts_early)):
        n = Numbers(D, 1, D, fmt)
        before, after, launches = fused(lambda n=n: _gated_products(n), executor)
        assert [b.tobytes() for b in before] == [a.tobytes() for a in after]
        assert launches[1].kernel.name == f"fused_2_linear_{fmt.lower()}_geglu_round_32"


@pytest.mark.parametrize(("pattern", "T"), [("sum of experts", 2), ("gated products", 1)])
def test_the_barrier_behind_products_is_needed(pattern, T):
    """Of kernels that are not put together from steps."""
    n = Numbers(0, T, 256, "Q4_K")
    _, launches = replayed(lambda: PATTERNS[pattern][0](n), ONCE)
    launch = launches[1]
    assert launch.kernel.name.endswith(("_expert_sum", "_geglu_round_32"))
    arrays = {
        name: a._memory if isinstance(a, devices.DeviceArray) else a
        for name, a in zip(fuse_flow.names_of(launch.kernel), launch.arguments, strict=True)
    }

    def call():
        results = {name: np.zeros_like(arrays[name]) for name in launch.kernel.writes}
        device.current().launch(launch.kernel, launch.grid, launch.threads, *(arrays | results).values())
        return tuple(results.values())

    assert len(mutants.waits(launch.kernel)) == 1
    assert not mutants.unnoticed(launch.kernel, call)


class Early(devices.Executor):
    """Runs what a GPU would, from sm_90 on."""

    def launch(self, kernel, grid, threads, *arguments):
        listed = self.put(read_ahead.table([]), np.int32)
        more = read_ahead.more_of(listed, 0, read_ahead.NOTHING, grid)
        super().launch(early.kernel_of(kernel), grid, threads, *arguments, *more)


def test_pattern_in_ptx():
    call, n_launches = PATTERNS["experts"]
    n = Numbers(1, 3, 256, "Q4_K")
    check(lambda: call(n), n_launches, devices.executor_two((9, 0), (launching.LOCKSTEP,), Early))


def test_a_row_as_wide_as_memory_allows():
    """Rows of the largest model, which need two rows of shared memory at once; one wider still."""
    for D in (5376, 8192, 8224):
        n = Numbers(D, 2, D, "Q8_0")
        check(lambda n=n: _norm_sum_norm_product(n), 2, ONCE)


@pytest.mark.parametrize("kind", _slow_but(("f16", "q4_0"), ["f16", "q8_0", "q4_0"]))
def test_heads(kind):
    """Norm, rotation and storing of q, k and v in one launch; attention; its pieces joined and rounded."""

    @settings(max_examples=2)
    @given(seed=st.integers(0, 99), T=st.integers(1, 16), H=st.sampled_from([16, 48, 256, 512]))
    def some(seed, T, H):
        K, N = 2, 6
        n = Numbers(seed, T, H, "Q8_0")
        angles = strategies.normal(n.rng, 2, T, H // 2)
        kv = strategies.normal(n.rng, 2, 1, 128, K, H)
        *pages, table = strategies.kv_caches(kv[0], kv[1], kind, kind, 64)
        lanes, positions = np.zeros(T, np.int32), np.arange(40, 40 + T, dtype=np.int32)
        weight = n.matrix("w", 5, N * H)

        def call():
            keys, values = (device.current().put(page.copy(), page.dtype) for page in pages)
            rope = device.put(angles[0], np.float32), device.put(angles[1], np.float32)
            q = ops.rope(ops.rms_norm(n.rows("q", T, N, H), n.vector("a", H), 1e-6), *rope)
            v = ops.rms_norm(n.rows("k", T, K, H), None, 1e-6)
            k = ops.rope(ops.rms_norm(n.rows("k", T, K, H), n.vector("b", H), 1e-6), *rope)
            ops.write_kv(k, v, keys, values, table, lanes, positions)
            out = ops.attention(q, keys, values, table, lanes, positions, None)
            return keys, values, ops.linear(out.reshape(T, N * H), weight, "int8")

        check(call, 3 if T <= 2 and N * H <= fuse.MOST_BEFORE else 4)

    some()


# -- a decode step of every family

# lanes: launches of a layer, and of a step besides: embeddings, inputs of layers one by one, the first norm,
# the head, its soft cap
TARGET = {
    "e2b": {1: (12, 5), 2: (13, 6)}, "e4b": {1: (12, 5), 2: (13, 6)}, "12b": {1: (9, 4), 2: (10, 4)},
    "26b": {1: (12, 4), 2: (12, 4)}, "31b": {1: (9, 4), 2: (10, 4)},
}  # fmt: skip
FORMAT = {"*": "Q8_0"}


@pytest.mark.parametrize("family", _slow_but(("e2b", "26b"), tiny.FAMILIES))
def test_decode_step(family, tmp_path, monkeypatch):
    """Logits of some lanes by replay, twice, and how many launches that takes where only the rows of
    per-layer embeddings are short, as in published models."""
    monkeypatch.setattr(fuse, "MOST_BEFORE", 32)
    model = load_model(tiny.make(tmp_path / "m.gguf", family, size="block32", formats=FORMAT))
    ids, logits = tiny.prompt(family), {}
    for replay in (False, True):
        with device.use(ONCE):
            lanes = Lanes(model, ops, context_len=64, chunk=9, n_seqs=2, page=32, replay=replay)
            for lane in range(2):
                lanes.prefill(ids[: 5 + 3 * lane], lane=lane)
            logits[replay] = [
                np.array(lanes.extend([(lane, ids[i : i + 1]) for lane in some])).tobytes()
                for some, i in (((0, 1), 9), ((0, 1), 10), ((1,), 11))
            ]
    assert logits[False] == logits[True]
    for n, (per_layer, rest) in TARGET[family].items():
        names = [launch.kernel.name for launch in lanes.replay.program(n).launches]
        assert len(names) == per_layer * model.config.n_layers + rest, names


# -- what the fusing relies on


class Watching(devices.Executor):
    """Refuses kernels that write what they do not say."""

    def launch(self, kernel, grid, threads, *arguments):
        named = dict(zip(fuse_flow.names_of(kernel), arguments, strict=True))
        written = [fuse_flow.span(named[name]) for name in kernel.writes]
        read = [array for array in arguments if isinstance(array, devices.DeviceArray)]
        read = [array for array in read if not any(map(fuse_flow.span(array).overlaps, written))]
        before = [array.copy_to_host().tobytes() for array in read]
        super().launch(kernel, grid, threads, *arguments)
        after = [array.copy_to_host().tobytes() for array in read]
        assert before == after, f"{kernel.name} writes an argument that it does not name"


@pytest.mark.parametrize("family", ["e4b", "26b"])
def test_kernels_write_what_they_say(family, tmp_path):
    """All kernels of a prompt and of a decoded token."""
    model = load_model(tiny.make(tmp_path / "m.gguf", family, size="block32", formats=FORMAT))
    with device.use(devices.executor_one((launching.LOCKSTEP,), Watching)):
        lanes = Lanes(model, ops, context_len=64, chunk=20, n_seqs=1, page=32, replay=False)
        lanes.prefill(tiny.prompt(family)[:20], lane=0)
        lanes.extend([(0, [5])])


def test_every_kernel_names_what_it_writes():
    for kernel in table.KERNELS.values():
        assert kernel.writes and set(kernel.writes) <= set(fuse_flow.names_of(kernel)), kernel.name


# -- the published sizes

OFTEN = 20
PUBLISHED = {"E4B:Q8_0": (1422, 509), "26B-A4B:Q4_K_M": (1495, 364)}  # launches of a step: alone, fused


def _step(spec):
    """Launches of one decoded token after 1,000 others."""
    noted = rehearsal.of(blank(spec), rehearsal.Call(1, 1, 1000))
    return noted.launches, fuse.fuse(noted.launches, noted.results)


@pytest.mark.parametrize("spec", PUBLISHED)
def test_launches_of_published_sizes(spec):
    assert tuple(map(len, _step(spec))) == PUBLISHED[spec]


SPILLED = 64  # bytes, stores and loads


def _without_spills_around_loops(code):
    """Of products of several formats: a warp keeps a few numbers in local memory while it walks over columns,
    and needs them once behind that.  Registers for them would cost a quarter of the warps."""
    spills = sum(n for name, n in code.mnemonics.items() if name.startswith(("LDL", "STL")))
    if code.spills > SPILLED or spills > SPILLED // 4:
        return code
    kept = tuple(one for one in code.listing if not one.mnemonic.startswith(("LDL", "STL")))
    return code._replace(spills=0, stack=0, listing=kept)


@pytest.mark.parametrize("spec", _slow_but(("E4B:Q8_0",), PUBLISHED))
def test_machine_code(spec):
    """Of every fused kernel and product that a step launches often, as it starts early."""
    if needs.missing_assembler():
        pytest.skip(needs.missing_assembler())
    _, launches = _step(spec)
    names = Counter(launch.kernel.name for launch in launches)
    kernels = {launch.kernel.name: launch.kernel for launch in launches}
    often = [name for name, n in names.items() if n >= OFTEN and name.startswith(("fused", "linear"))]
    often = [early.kernel_of(kernels[name]) for name in often]
    for kernel, code in zip(often, sass.codes(often, (9, 0)), strict=True):
        if kernel.name.count("linear_") + kernel.name.count("float_") > 1:
            code = _without_spills_around_loops(code)
        faults = sass.faults(kernel, (9, 0), code)
        assert not faults, f"{kernel.name}: {'; '.join(faults)}"
        ptx = offline.to_ptx(kernel.function, kernel.signature, (9, 0), kernel.bounds)
        assert early.waits_first(ptx), kernel.name
        # the read-only path promises nothing of what others just wrote: only loads that say so may take it
        of_compiler = re.sub(r"// begin inline asm.*?// end inline asm", "", ptx, flags=re.S)
        assert "ld.global.nc" in ptx or "linear_" not in kernel.name
        assert "ld.global.nc" not in of_compiler, kernel.name
        assert any(name.startswith("UBLKPF.L2") for name in code.mnemonics), kernel.name
        assert code.mnemonics["ACQBULK"] and code.mnemonics["PREEXIT"], kernel.name
