"""Weights in private memory: the same bytes, all of the plan and no more, the file's pages given back."""

import io
import mmap
import os
import sys
import threading

import numpy as np
import pytest

from fastpath import control_groups, memory, repack
from fastpath.backend import ops_for
from fastpath.cli.setup import PackingProgress, warm_up
from fastpath.cpu import arena, packing, threads
from fastpath.cpu.arena import Arena
from fastpath.lanes import Lanes
from fastpath.load import DEMO, load_model
from fastpath.repack import PIECE_BYTES
from quant import FORMATS, QTensor
from tests import tiny

linux = pytest.mark.skipif(sys.platform != "linux", reason="what Linux says of memory")

MODELS = {
    "e2b": {},
    "31b": {},
    "26b": {},
    "26b-fused": {"fused": ("qkv", "gate_up")},
    "26b-numbered": {"experts": "numbered"},
    "e2b-untied": {"tied": False},
    "e2b-q4_k": {"size": "block256", "formats": {"*": "Q4_K"}},
    "26b-q8_0": {"size": "block32", "formats": {"*": "Q8_0"}, "fused": ("gate_up",)},
}


@pytest.fixture(params=MODELS)
def model(request, tmp_path):
    return load_model(tiny.make(tmp_path / "m.gguf", request.param.split("-")[0], **MODELS[request.param]))


def tensors(weights):
    return {
        f"{getattr(record, 'index', '')}{name}": value
        for record in (weights, *weights.layers)
        for name, value in vars(record).items()
        if hasattr(value, "format")
    }


def same_rows(packed, tensor):
    return packed.format is tensor.format and np.array_equal(packed.unpack().data, tensor.data)


def test_every_matrix_but_the_tables(model):
    packed = model.packed()
    for before, after in zip(
        (model.weights, *model.weights.layers), (packed.weights, *packed.weights.layers)
    ):
        for name, tensor in vars(before).items():
            new = getattr(after, name)
            if not isinstance(tensor, QTensor) or name in repack.TABLES:
                assert new is tensor or name == "layers"
            else:
                assert isinstance(new, packing.PackedTensor) and same_rows(new, tensor), name
    assert packed.private_bytes == repack.plan(model.weights).nbytes > 0 and model.private_bytes == 0


def test_the_same_logits(model):
    ids = [2, 3, 5, 7, 11, 13, 17]
    mapped, packed = (Lanes(m, ops_for("cpu")) for m in (model, model.packed()))
    assert np.array_equal(mapped.extend([(0, ids)], "all"), packed.extend([(0, ids)], "all"))
    for token_id in (4, 8):
        assert np.array_equal(mapped.decode(token_id), packed.decode(token_id))


def test_the_tokenizer_is_kept():
    model = load_model(DEMO)
    assert model.packed().tokenizer is not model.tokenizer  # it had none yet
    assert model.packed().tokenizer is model.tokenizer


def test_progress_ends_at_the_total(model):
    said = []
    model.packed(lambda done, total: said.append((done, total)))
    totals = {total for _, total in said}
    assert [done for done, _ in said] == sorted(done for done, _ in said)
    assert totals == {said[-1][0]} == {repack.plan(model.weights).file_bytes}


@pytest.mark.parametrize("piece", [1, 100, 1000])
def test_pieces_of_any_size(monkeypatch, piece):
    model = load_model(DEMO)
    expected = model.packed()
    monkeypatch.setattr(repack, "PIECE_BYTES", piece * 1000)
    found = model.packed()
    assert np.array_equal(
        found.arena._memory[: found.arena.nbytes], expected.arena._memory[: found.arena.nbytes]
    )


def test_threads_do_not_change_the_bytes():
    before = threads.num_threads()
    try:
        packed = []
        for n in (1, 3):
            threads.set_num_threads(n)
            packed.append(load_model(DEMO).packed().arena)
        assert np.array_equal(*(a._memory[: a.nbytes] for a in packed))
    finally:
        threads.set_num_threads(before)


# -- memory ----------------------------------------------------------------------------------------


@pytest.fixture
def large(tmp_path):
    """A tensor of 192 MB in a mapped file."""
    path = tmp_path / "weights"
    with open(path, "wb") as file:
        file.write(np.random.default_rng(0).bytes(1 << 20) * (3 * PIECE_BYTES >> 20))
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    form = FORMATS["Q8_0"]
    rows, width = 3 * PIECE_BYTES // form.row_bytes(4096), 4096
    raw = np.frombuffer(memoryview(mapping), np.uint8)[: rows * form.row_bytes(width)]
    return QTensor(form, (rows, width), raw.reshape(rows, -1), "large")


def weights_of(tensor):
    model = load_model(DEMO)
    layer = repack.replace(model.weights.layers[0], attn_q=tensor)
    return repack.replace(model.weights, layers=(layer,))


@linux
def test_pages_of_the_file_are_given_back(large):
    from fastpath.cli.stats import _status_bytes

    weights, peak = weights_of(large), 0
    before = _status_bytes("RssFile")

    def look(done, total):
        nonlocal peak
        peak = max(peak, _status_bytes("RssFile") - before)

    packed, its_arena = repack.pack(weights, repack.plan(weights), look)
    assert peak < PIECE_BYTES + (8 << 20)
    assert _status_bytes("RssFile") - before < 16 << 20
    assert same_rows(packed.layers[0].attn_q, large)  # and the file still has them
    assert abs(its_arena.resident_bytes() / its_arena.nbytes - 1) < 0.01


def test_memory_without_a_file_is_never_given_back(monkeypatch):
    """MADV_DONTNEED would erase it: experts that a file keeps one by one are copies."""
    private = np.zeros(100, np.uint8)
    assert repack._mapping(private) is None and repack._mapping(private[10:].reshape(9, 10)[2:]) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repack, "_advise_bytes", lambda *given: pytest.fail("released"))
        form = FORMATS["F32"]
        repack._advise(repack.DONT_NEED, QTensor(form, (5, 5), private.reshape(5, 20), "copy"), 0, 1)


def test_an_interrupt_ends_the_packing(large):
    weights = weights_of(large)

    def interrupted(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        repack.pack(weights, repack.plan(weights), interrupted)
    assert same_rows(repack.pack(weights, repack.plan(weights))[0].layers[0].attn_q, large)


def test_too_little_memory_is_said_before(monkeypatch):
    model = load_model(DEMO)
    monkeypatch.setattr(repack, "available_bytes", lambda: repack.SPARE_BYTES)
    monkeypatch.setattr(repack, "pack", lambda *given: pytest.fail("packed"))
    with pytest.raises(ValueError, match="--no-repack") as caught:
        model.packed()
    assert "\n" not in str(caught.value) and "GB are free" in str(caught.value)
    monkeypatch.setattr(repack, "available_bytes", lambda: None)  # nobody knows: try
    monkeypatch.setattr(repack, "pack", lambda weights, *given: (weights, None))
    model.packed()


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), MemoryError()])
def test_memory_that_is_refused(monkeypatch, error):
    def refused(nbytes):
        raise error

    monkeypatch.setattr(repack, "Arena", refused)
    with pytest.raises(ValueError, match="--no-repack") as caught:
        load_model(DEMO).packed()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_an_arena_anywhere(monkeypatch, platform):
    if platform == "linux" != sys.platform:
        pytest.skip("huge pages of Linux")
    monkeypatch.setattr(arena.sys, "platform", platform)
    memory = Arena(1000)
    first, second = memory.take(100), memory.take(800)
    assert all(arena.address(part) % 64 == 0 for part in (first, second))
    first[:], second[:] = 1, 2
    assert first.tolist() == [1] * 100 and second.tolist() == [2] * 800
    with pytest.raises(ValueError, match="200 bytes asked for"):
        memory.take(200)


@linux
def test_an_arena_that_goes_gives_its_memory_back():
    from fastpath.cli.stats import own_bytes

    before = own_bytes()
    view = Arena(64 << 20).take(64 << 20)
    view[:] = 1
    assert own_bytes() - before > 60 << 20
    del view
    assert own_bytes() - before < 4 << 20


def test_a_system_without_huge_pages(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert Arena(100).take(100).shape == (100,)


# -- what is available -----------------------------------------------------------------------------


@pytest.fixture
def system(tmp_path, monkeypatch):
    """system(meminfo, {group: {file: content}}) describes a machine."""

    def describe(meminfo, groups, own="/a/b"):
        (tmp_path / "meminfo").write_text(meminfo)
        (tmp_path / "cgroup").write_text(f"0::{own}\n")
        for group, files in groups.items():
            folder = tmp_path / "groups" / group
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                (folder / name).write_text(content)
        monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
        monkeypatch.setattr(control_groups, "_OWN", tmp_path / "cgroup")
        monkeypatch.setattr(control_groups, "_ROOT", tmp_path / "groups")
        return memory.available_bytes()

    return describe


MEMINFO = "MemTotal: 100 kB\nMemFree: 10 kB\nMemAvailable:      50 kB\n"


def test_of_the_machine(system):
    assert system(MEMINFO, {}) == 50 * 1024
    assert system("", {}) is None


def test_of_a_container(system):
    limited = {
        "memory.max": "30000\n",
        "memory.current": "20000\n",
        "memory.stat": "anon 1\nactive_file 500\n",
    }
    assert system(MEMINFO, {"a/b": limited}) == 10500
    assert system(MEMINFO, {"a/b": limited | {"memory.max": "max\n"}}) == 50 * 1024
    assert system(MEMINFO, {"a/b": limited | {"memory.max": "10000\n"}}) == 0


def test_of_the_groups_around_it(system):
    inner = {"memory.max": "max\n", "memory.current": "20000\n"}
    outer = {"memory.max": "30000\n", "memory.current": "25000\n"}
    assert system(MEMINFO, {"a/b": inner, "a": outer}) == 5000
    assert system(MEMINFO, {"": outer}, own="/") == 5000  # inside a container its group is the root


def test_threads_of_the_groups_around_it(system, monkeypatch):
    """Time of so many CPUs: the least of all groups' shares, one at least."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for inner, outer, n in (
        ("max 100000", "max 100000", 8),
        ("350000 100000", "max 100000", 3),
        ("max 100000", "200000 50000", 4),
        ("600000 100000", "500000 100000", 5),
        ("20000 100000", "max 100000", 1),
        ("nonsense", "", 8),
    ):
        system(MEMINFO, {"a/b": {"cpu.max": f"{inner}\n"}, "a": {"cpu.max": f"{outer}\n"}})
        assert threads.available() == n, (inner, outer)


# -- progress --------------------------------------------------------------------------------------


class Screen(io.StringIO):
    def __init__(self, is_tty):
        super().__init__()
        self.is_tty = is_tty

    def isatty(self):
        return self.is_tty


def shown(is_tty, seconds):
    """What packing says that takes so many seconds, in steps of a percent."""
    screen, now = Screen(is_tty), [0.0]
    progress = PackingProgress(screen, lambda: now[0])
    for percent in range(1, 101):
        now[0] = seconds * percent / 100
        progress(percent, 100)
    return screen.getvalue()


def test_short_packing_says_nothing():
    assert shown(True, 0.9) == shown(False, 0.9) == ""


def test_on_a_terminal_one_line_that_goes():
    text = shown(True, 10)
    assert text.startswith("\rpacking weights: 10 %") and text.endswith("\r\x1b[K") and "\n" not in text
    assert text.count("packing") == 91


def test_elsewhere_a_line_per_quarter():
    lines = shown(False, 10).splitlines()
    assert [line.split(":")[1].split("%")[0].strip() for line in lines] == ["25", "50", "75"]
    assert len(shown(False, 1.05).splitlines()) <= 1


# -- kernels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("repacked", [True, False])
@pytest.mark.parametrize("family", ["e2b", "26b"])
def test_warming_up_finds_every_kernel(tmp_path, monkeypatch, repacked, family):
    """After it nothing is compiled: neither for the prompt nor for what follows."""
    from fastpath.cpu.kernel import KERNELS

    model = load_model(tiny.make(tmp_path / "m.gguf", family, size="block32", formats={"*": "Q4_0"}))
    engine = Lanes(model, ops_for("cpu"))
    ids = list(range(2, 40))
    warm_up(engine, len(ids), repack=repacked)
    used = []
    run = threads.run
    monkeypatch.setattr(threads, "run", lambda kernel, *a, **k: used.append(kernel) or run(kernel, *a, **k))
    for kernel in KERNELS.values():
        monkeypatch.setattr(
            kernel, "load", lambda kernel=kernel: pytest.fail(f"{kernel.name} was not loaded")
        )
    if repacked:
        engine.model = model.packed()
    engine.prefill(ids)
    engine.decode(3)
    assert used


def test_a_dry_run_computes_nothing():
    from fastpath.cpu.warm import kernels_of

    model = load_model(DEMO)
    engine = Lanes(model, ops_for("cpu"))
    warm_up(engine, 5, repack=True)
    pages = [array for layer in engine.cache.owners() for array in engine.cache.layer(layer)[:2]]
    assert pages and not any(array.any() for array in pages)
    assert engine.cache.held(0) == {"global": [], "sliding": []}
    x = np.ones((3, 64), np.float32)
    found = []
    names = [kernel.name for kernel in kernels_of(lambda: found.append(engine.ops.rms_norm(x, None, 1e-6)))]
    assert names == ["norm._rms_norm_kernel"] and not found[0].any()
    assert engine.ops.rms_norm(x, None, 1e-6).any()  # and afterwards as ever


def test_a_thread_that_does_not_plan_computes():
    from fastpath.cpu.warm import kernels_of

    x, results = np.ones((3, 64), np.float32), []
    begin, done = threading.Event(), threading.Event()

    def other():
        begin.wait(10)
        results.append(ops_for("cpu").rms_norm(x, None, 1e-6))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    kernels_of(lambda: (begin.set(), done.wait(10)))
    thread.join()
    assert results[0].all()
