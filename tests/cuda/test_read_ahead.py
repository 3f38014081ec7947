"""What launches ask for ahead of its use: where it lies, once, within the budget, as much as time allows."""

import itertools

import numpy as np
import pytest

from fastpath.bench.blank import blank
from fastpath.cuda import device, early, fuse, layout, linear, norm, ops, read_ahead, rehearsal
from fastpath.cuda.gpu import Gpu
from fastpath.cuda.program import Launch
from fastpath.cuda.read_ahead import BLOCKS, BUDGET, SLAB, Asks, Weights, plan
from fastpath.lanes import Lanes
from fastpath.load import load_model
from quant import FORMATS
from tests import strategies, tiny
from tests.cuda.fake_driver import FakeDriver
from tests.engine.conftest import FORMATS as ENGINE_FORMATS
from tests.gpu_on_cpu import devices, launching, runtime

PUBLISHED = {"E4B:Q8_0": 1.5e9, "26B-A4B:Q4_K_M": 0.9e9}  # the least that is asked for, in bytes


def _address(array):
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    return interface["data"][0]


@pytest.mark.parametrize("spec, n_seqs", [("E4B:Q8_0", 1), ("26B-A4B:Q4_K_M", 5), ("26B-A4B:Q4_K_M", 1)])
def test_plans_of_published_sizes(spec, n_seqs):
    noted = rehearsal.of(blank(spec), rehearsal.Call(1, n_seqs, 1000))
    launches = fuse.fuse(noted.launches, noted.results)
    asked = plan(launches, noted.to_ask_for())
    assert len(asked) == len(launches)
    planes = {buffer.address: (buffer, weight) for buffer, weight in noted.planes.items()}
    vectors = {_address(v): v.nbytes for v in noted._constants.arrays()}
    pieces = np.array([(p.address, p.n_bytes, p.use, i) for i, each in enumerate(asked) for p in each.pieces])
    address, n_bytes, use, by = pieces.T

    # in order, of later launches, whole units
    assert (use > by).all() and (n_bytes % 16 == 0).all() and (n_bytes >= 16).all()
    assert (address % 16 == 0).all() and (n_bytes <= SLAB).all()
    # none twice
    order = np.argsort(address)
    assert (address[order][1:] >= (address + n_bytes)[order][:-1]).all()
    # inside of what the launch is given that is to read it: planes of matrices that are no stacks, vectors
    bounds = {}
    for i in set(use.tolist()):
        assert not launches[i].kernel.name.startswith("embed")
        for array in launches[i].arguments:
            if getattr(array, "ndim", 0):
                first = _address(array)
                if first in planes and len(planes[first][1].shape) == 2:
                    bounds.setdefault(i, []).append((first, first + planes[first][0].n_bytes))
                elif first in vectors:
                    bounds.setdefault(i, []).append((first, first + vectors[first]))
    for at, n, i, _ in pieces.tolist():
        assert any(first <= at and at + n <= end for first, end in bounds[i])
    # pages of every launch of attention, each block once; of chosen experts whenever they are few
    blocks, n_chosen = {}, 0
    for i, each in enumerate(asked):
        held = [(i, pages.use, (pages.end - pages.begin) * pages.size) for pages in each.pages]
        for pages in each.pages:
            blocks[pages.use] = [*blocks.get(pages.use, []), (pages.begin, pages.end)]
        if each.chosen:
            n_chosen += 1
            of_one = sum(piece.n_bytes for piece, _ in each.chosen.pieces)
            held.append((i, each.chosen.use, of_one * each.chosen.ids[1]))
        for a, b, n in held:
            assert a < b
            by, use, n_bytes = (np.append(x, y) for x, y in ((by, a), (use, b), (n_bytes, n)))
    attending = [i for i, one in enumerate(launches) if one.kernel.name.startswith("attention_part")]
    assert set(blocks) <= set(attending) and len(blocks) > len(attending) / 2
    assert all(found[0][0] == 0 for found in blocks.values())
    assert all(a[1] == b[0] for found in blocks.values() for a, b in itertools.pairwise(found))
    assert n_chosen == (30 if (spec[:3], n_seqs) == ("26B", 1) else 0)
    # never more that is not used when a launch ends than the budget
    for i in range(len(launches)):
        assert n_bytes[(by <= i) & (use > i)].sum() <= BUDGET
    assert n_bytes.sum() > PUBLISHED[spec]


def _matrix(n_bytes, n_bytes_of_scales=0):
    """Planes that nobody looks into."""
    low, sub = np.zeros(n_bytes // 4, np.int32), np.zeros(n_bytes_of_scales // 2 or 1, np.uint16)
    return layout.DeviceMatrix("Q8_0", (4, 256), low, np.zeros(1, np.int32), sub, np.zeros(1, np.uint16))


def _norm(*arrays):
    return Launch(norm.RMS_NORM, 1, 256, arrays)


def _product(matrix):
    return Launch(linear.PRODUCTS["Q8_0"], (64, 1), 256, matrix.planes)


def test_how_much_by_hand():
    """Small launches: 0.65 us of 4.4e12 bytes a second, 87 slabs of 32 KB, until the budget is spent."""
    first, second = _matrix(17 * SLAB), _matrix(17 << 20)
    launches = [_norm(), _product(first), _norm(), _product(second), _norm()]
    asked = plan(launches, Weights([first, second]))
    n = [[sum(p.n_bytes for p in each.pieces if p.use == use) / SLAB for use in range(5)] for each in asked]
    # the first product's 17 slabs, and of the second's 544 the other 70
    assert n[0] == [0, 17, 0, 70, 0]
    # the product reads 17 slabs from the cache, 77 ns at 7.2e12, in which memory could bring 10 more
    assert n[1] == [0, 0, 0, (0.65e-6 + 17 * SLAB / 7.2e12) * 4.4e12 // SLAB, 0] == [0, 0, 0, 97, 0]
    assert n[2] == [0, 0, 0, 87, 0]
    # the second one has 254 of its slabs in the cache, and nobody is behind it
    assert n[3] == n[4] == [0] * 5
    # the budget: 832 slabs
    long = _matrix(34 << 20)
    asked = plan([_norm()] * 11 + [_product(long)], Weights([long]))
    assert [sum(p.n_bytes for p in each.pieces) // SLAB for each in asked] == [87] * 9 + [49, 0, 0]
    # what a launch uses makes room: 832 slabs, of which 512 are the second launch's
    first = _matrix(16 << 20)
    asked = plan([_norm()] * 10 + [_product(first), _product(long)], Weights([first, long]))
    n = [sum(p.n_bytes for p in each.pieces) // SLAB for each in asked]
    # it reads 16 MB from the cache in 2.3 us, in which memory could bring 312 more
    assert n == [87] * 9 + [49, (0.65e-6 + (16 << 20) / 7.2e12) * 4.4e12 // SLAB, 0] and n[10] == 400


def test_a_part_of_a_matrix_is_taken_at_equal_distances():
    long = _matrix(30 << 20, 2 << 20)  # 1024 slabs: of 30 KB and 2 KB
    pieces = plan([_norm(), _product(long)], Weights([long]))[0].pieces
    for plane in (long.low, long.sub):
        starts = sorted(p.address - _address(plane) for p in pieces)
        starts = [start for start in starts if 0 <= start < plane.nbytes]
        gaps = np.diff(starts) // (plane.nbytes // 1024)  # 11.8 slabs
        assert len(starts) == 87 and set(gaps.tolist()) == {11, 12}


def test_vectors_and_what_is_left_out():
    """What norms multiply by comes whole; stacks, embeddings, arrays that somebody writes do not."""
    rng = np.random.default_rng(0)
    vector, activation = strategies.normal(rng, 2563), strategies.normal(rng, 2563)
    stack, table = _matrix(1 << 20), _matrix(1 << 20)
    stack = layout.DeviceMatrix("Q8_0", (2, 4, 256), *stack.planes)
    embed = Launch(type(norm.RMS_NORM)(lambda low: None, (), name="embed_q8_0"), 1, 32, table.planes)
    launches = [_norm(), embed, _product(stack), _norm(activation, vector), _norm(vector)]
    asked = plan(launches, Weights([stack, table], [vector]))
    assert [a.pieces for a in asked] == [[(_address(vector), 2563 * 4 // 16 * 16, 3)], [], [], [], []]
    assert not any(a.pages or a.chosen for a in asked)


def test_table():
    pieces = [read_ahead.Piece(0x7F12_8000_0010, 48, 1), read_ahead.Piece(0x10, 1 << 20, 2)]
    low = int(np.uint32(0x8000_0010).view(np.int32))
    assert read_ahead.table([Asks(), Asks(pieces)]).tolist() == [low, 0x7F12, 48, 0, 0x10, 0, 1 << 20, 0]
    assert read_ahead.table([]).size == 4


@pytest.mark.parametrize(
    "grid, n, want",
    [
        (1, 0, (1, 1, 1)), (1, 300, (1, 1, BLOCKS)), (3, 10, (3, 1, 4)), (5120, 900, (5120, 1, 1)),
        ((9, 2, 1), 900, (9, 2, 8)), ((64, 1), 298, (64, 1, 2)), ((17, 4, 3), 900, (17, 4, 3)),
    ],
)  # fmt: skip
def test_blocks_that_only_ask(grid, n, want):
    assert read_ahead.grid_of(grid, n) == want


def test_what_a_gpu_is_given(monkeypatch):
    """Outside of graphs nothing is asked for; in one, all that is planned, in the order of launches."""
    monkeypatch.setattr(ops.program, "_fused", lambda launches, results: launches)
    given = []
    driver = FakeDriver(can_start_early=True, compute=lambda function, arguments: given.append(arguments))
    rng = np.random.default_rng(1)
    weights = [strategies.weights(rng, FORMATS["Q8_0"], 64, 1024) for _ in range(2)]
    x = strategies.normal(rng, 1, 1024)
    gpu = Gpu(driver)
    grids = []
    launch = driver.launch
    monkeypatch.setattr(
        driver, "launch", lambda f, grid, *rest, **how: grids.append(grid) or launch(f, grid, *rest, **how)
    )
    with device.use(gpu), ops.program.record() as program:
        there = ops.rms_norm(device.put(x, np.float32), x[0].copy(), 1e-6)
        results = [linear.linear(there, weight, "int8") for weight in weights]
        list(map(device.get, results))
    n = len(program)
    for arguments in given:  # run one by one, before they are captured
        table, *numbers, blocks = arguments[-6:]
        assert table.size == 4 and numbers == [0, 0, 0, 0] and blocks >= 1
    given.clear()
    with device.use(gpu):
        program.replay()
    asked = plan(program.launches, Weights(layout.matrices_on(gpu), gpu._constants.arrays()))
    counts = [arguments[-4] for arguments in given]
    assert counts == [len(each.pieces) for each in asked] and counts[0] > 4 and len(given) == n
    assert [a[-5] for a in given] == np.cumsum([0, *counts[:-1]]).tolist()
    assert grids[-n:] == [
        read_ahead.grid_of(o.grid, c) for o, c in zip(program.launches, counts, strict=True)
    ]
    table = given[0][-6].copy_to_host().reshape(-1, 4)
    assert table[:, 2].tolist() == [p.n_bytes for each in asked for p in each.pieces]
    with device.use(gpu):  # both matrices are asked for, whole; the norm's vector is wanted at once
        planes = [plane for weight in weights for plane in layout.on_device(weight).planes]
    assert table[:, 2].sum() == sum(plane.nbytes for plane in planes if plane.size > 1)


class Asking(devices.Executor):
    """Replays programs as a GPU that starts kernels early does."""

    def capture(self, launches, is_early=True):
        asked = plan(launches, Weights(layout.matrices_on(self), self._constants.arrays()))
        table = self._upload(read_ahead.table(asked))
        self.asked = asked
        self.planned = sum(piece.n_bytes for each in asked for piece in each.pieces)

        def run():
            for launch, grid, arguments in read_ahead.calls(launches, asked, table):
                self.launch(early.kernel_of(launch.kernel), grid, launch.threads, *arguments)

        return run


def _prefetched():
    return runtime.library().run_prefetched_so_far()


def test_a_program_asks_for_its_plan(monkeypatch):
    """Norm, product, norm, product, replayed: the bytes of the first run, which asks for nothing."""
    monkeypatch.setattr(ops.program, "_fused", lambda launches, results: launches)
    rng = np.random.default_rng(2)
    weights = [strategies.weights(rng, FORMATS["Q8_0"], 320, 320) for _ in range(2)]
    x, vectors = strategies.normal(rng, 2, 320), strategies.normal(rng, 2, 320)
    images = devices.executor_one().image_of
    executor = Asking(images, (launching.LOCKSTEP,))
    with device.use(executor), ops.program.record() as program:
        there = device.put(x, np.float32)
        for weight, vector in zip(weights, vectors, strict=True):
            there = linear.linear(ops.rms_norm(there, vector, 1e-6), weight, "int8")
        got = device.get(there)
    want, before = got.copy(), _prefetched()
    got[:] = 0
    program.replay()
    np.testing.assert_array_equal(got, want)
    # all but what the first launch itself wants: two matrices, and the second norm's vector
    planes = [p for w in layout.matrices_on(executor) for p in w.planes if p.size > 1]
    assert executor.planned == sum(p.nbytes // 16 * 16 for p in planes) + vectors[1].nbytes
    assert _prefetched() - before == executor.planned


@pytest.mark.slow
@pytest.mark.parametrize("family", ["e2b", "26b"])
def test_a_model_that_asks(family, tmp_path):
    """A tiny model, its launches fused, decodes the logits of one that asks for nothing."""
    size = {"e2b": "block32", "26b": "block256"}[family]
    model = load_model(tiny.make(tmp_path / "m.gguf", family, size=size, formats=ENGINE_FORMATS[size]))
    ids, runs = tiny.prompt(family), []
    for kind in (devices.Executor, Asking):
        with device.use(devices.executor_one((launching.LOCKSTEP,), kind)) as executor:
            lanes = Lanes(model, ops, context_len=64, chunk=32, n_seqs=2, page=32, replay=True)
            lanes.prefill(ids[:9])
            runs.append(b"".join(lanes.decode(token).tobytes() for token in ids[9:12]))
    assert runs[0] == runs[1] and executor.planned > 0
