"""What kernels ask for by what inputs and earlier kernels say: pages of attention, weights of chosen experts.

Addresses as the executor notes them, against those that NumPy finds by the definitions of pages
(refimpl/kv_types.py) and of planes (layout.py).
"""

from dataclasses import replace

import numpy as np
import pytest

from fastpath.bench import device_models
from fastpath.cuda import attention, device, early, layout, linear, linear_summed, norm, ops, read_ahead
from fastpath.cuda.fuse_flow import names_of
from fastpath.cuda.program import Launch
from fastpath.cuda.read_ahead import Asks, Weights, plan
from fastpath.lanes import Lanes
from refimpl.batch import make_batch
from tests import strategies
from tests.cuda.executors import EXECUTORS
from tests.gpu_on_cpu import devices, launching, runtime


class Log:
    """(address, bytes) of what is asked for meanwhile."""

    def __enter__(self):
        self._numbers = np.zeros((1 << 16, 2), np.uint64)
        runtime.library().run_log_prefetches(self._numbers.ctypes.data, len(self._numbers))
        return self

    def __exit__(self, *_):
        n = runtime.library().run_prefetches()
        assert n <= len(self._numbers)
        runtime.library().run_log_prefetches(None, 0)
        self.found = [tuple(map(int, row)) for row in self._numbers[:n]]


class Noting(devices.OnHostArrays):
    """It runs nothing."""

    def __init__(self):
        super().__init__(None)
        self.launches = []

    def launch(self, kernel, grid, threads, *arguments):
        self.launches.append(Launch(kernel, grid, threads, arguments))


def _host(array):
    return getattr(array, "_memory", array)


def wanted_pages(launch, begin=0, end=1 << 30):
    """Blocks of 32 positions that attention sees: of each token every position, one by one.

    Of each token, blocks begin .. end - 1 from the first that it sees.
    """
    of = dict(zip(names_of(launch.kernel), map(_host, launch.arguments), strict=True))
    H, K, blocks, table = of["q"].shape[2], int(of["K"]), int(of["blocks"]), of["table"]
    columns, found = -(-H // 32), set()
    sizes = {"k": H * 32, "v": columns * 32 * 32}
    for x in "kv":
        pages = of[f"{x}_pages"]
        n_bytes = sizes[x] * pages.dtype.itemsize
        if pages.dtype == np.uint8:
            n_bytes = columns * (64 + 32 * 32)  # q8_0: a tile's scales, and its codes
        for lane, position, last in zip(of["seq_ids"], of["positions"], of["ends"], strict=True):
            first = max(0, int(position) - int(of["window"]) + 1)
            for p in range(first, int(last) + 1):
                if not begin <= p // 32 - first // 32 < end:
                    continue
                page = int(table[lane, p // (32 * blocks) % table.shape[1]])
                for head in range(K):
                    number = (page * K + head) * blocks + p // 32 % blocks
                    found.add((pages.ctypes.data + number * n_bytes, n_bytes))
    return found


# (lanes of the tokens, their positions, window): alone, several sequences, tokens of one sequence side by
# side, the first block, the last place of a block and the first of the next, more than tables hold at once
ROWS = {
    "one": ([0], [70], None),
    "first": ([1], [0], 40),
    "window": ([2], [200], 65),
    "sequences": ([2, 0, 1], [31, 95, 64], None),
    "windows": ([0, 1, 2], [250, 33, 96], 33),
    "side by side": ([0, 0, 0, 1, 1], [62, 63, 64, 127, 128], 64),
    "around": ([1, 0], [300, 290], 50),
}


def _attention_launch(rows, kinds, H, ends=None):
    """Of 3 lanes with 4 columns of pages of 64 positions, in the first columns of a wider table."""
    lanes, positions, window = rows
    rng, K, blocks, n_pages = np.random.default_rng(3), 2, 2, 20
    shapes = (H, 32), (-(-H // 32), 32, 32)
    if kinds == "q8_0":
        pages = [np.zeros((n_pages, K, blocks, -(-H // 32), 64 + 1024), np.uint8) for _ in "kv"]
    else:
        pages = [np.zeros((n_pages, K, blocks, *rest), np.dtype(kinds)) for rest in shapes]
    table = rng.permutation(n_pages)[:15].reshape(3, 5).astype(np.int32)[:, :4]
    q = strategies.normal(rng, len(lanes), 4, H)
    with device.use(Noting()) as noted:
        attention.attention(
            q, *pages, table, np.array(lanes, np.int32), np.array(positions, np.int32), window, ends
        )
    return noted.launches, pages


def _ask(executor, asks, grid=3):
    """By a launch of three blocks of a norm, of other sizes."""
    x, first = np.ones((grid, 320), np.float32), 2
    listed = read_ahead.table([Asks([read_ahead.Piece(0, 0, 0)] * first), asks])
    arguments = x, x[0], np.int32(0), np.float32(1e-6), np.zeros_like(x)
    more, kernel = read_ahead.more_of(listed, first, asks, grid), early.kernel_of(norm.RMS_NORM)
    with device.use(executor), Log() as log:
        executor.launch(kernel, read_ahead.grid_of(grid, asks.n), 256, *arguments, *more)
    return log.found


@pytest.mark.parametrize("executor", ["ir", "sm_90"])
@pytest.mark.parametrize("rows", ROWS)
def test_pages(rows, executor):
    """Exactly those that attention reads, once in each launch, whole or in two parts."""
    launches, _held = _attention_launch(ROWS[rows], "float16", 40)
    (pages,) = read_ahead.pages_of(launches)
    assert pages.use == 0
    want, one = wanted_pages(launches[0]), EXECUTORS[executor]
    found = _ask(one, Asks(pages=[replace(pages, end=pages.n)]))
    assert sorted(found) == sorted([*want] * len(one.schedules))
    halves = [replace(pages, end=2), replace(pages, begin=2, end=pages.n)]
    apart = [_ask(one, Asks(pages=[half])) for half in halves]
    assert set(apart[0]) | set(apart[1]) <= want
    if rows != "side by side":  # where a token may rely on the one before it for what another launch asks for
        assert set(apart[0]) | set(apart[1]) == want and not set(apart[0]) & set(apart[1])
    together = _ask(one, Asks([read_ahead.Piece(_held[0].ctypes.data, 64, 9)], halves))
    assert set(together) == set(apart[0]) | set(apart[1]) | {(_held[0].ctypes.data, 64)}


@pytest.mark.parametrize("kind, H", [("float32", 36), ("uint16", 64), ("q8_0", 72)])
def test_pages_of_types(kind, H):
    launches, _held = _attention_launch(ROWS["windows"], kind, H)
    (pages,) = read_ahead.pages_of(launches)
    one = EXECUTORS["ir"]
    found = _ask(one, Asks(pages=[replace(pages, end=pages.n)]))
    assert set(found) == wanted_pages(launches[0])


def test_ends_that_lie_behind_positions():
    ends = np.array([99, 40], np.int32)
    launches, _held = _attention_launch(([0, 1], [70, 33], 20), "float16", 32, ends)
    (pages,) = read_ahead.pages_of(launches)
    found = _ask(EXECUTORS["ir"], Asks(pages=[replace(pages, end=4)]))
    assert set(found) == wanted_pages(launches[0])


def test_inputs_that_somebody_writes_are_not_read_early():
    launches, _held = _attention_launch(ROWS["one"], "float16", 32)
    positions = launches[0].arguments[names_of(launches[0].kernel).index("positions")]
    writer = Launch(norm.RMS_NORM, 1, 256, (*[None] * (len(norm.RMS_NORM.signature) - 1), positions))
    assert names_of(norm.RMS_NORM)[-1] == "out"
    assert read_ahead.pages_of([writer, *launches]) == [] != read_ahead.pages_of(launches)


def test_pages_by_hand():
    """26B-A4B's window of 1024: 33 blocks, of 8 heads, 16 KB of keys and as much of values."""
    pages = read_ahead.Pages((0, 16384), (0, 16384), 8, 4, 1024, (0, 99, 99), 0, 0, 0, 1, 5)
    assert pages.n == 33 and pages.size == 8 * 32768
    assert replace(pages, table=(0, 99, 2)).n == 8  # two pages of 4 blocks
    assert replace(pages, window=2**31 - 1).n == 99 * 4
    assert replace(pages, window=1).n == 1 and replace(pages, window=2).n == 2


# -- the chosen


def _stack(n_bytes_of_one, n_bytes_of_scales):
    """Planes of 6 experts; of one plane they lie 8 bytes apart from whole units."""
    planes = np.zeros(6 * n_bytes_of_one // 4, np.int32), np.zeros(1, np.int32)
    scales = np.zeros(6 * n_bytes_of_scales // 2, np.uint16), np.zeros(6 * 20, np.uint16)
    return layout.DeviceMatrix("Q4_K", (6, 8, 256), *planes, *scales)


def _chosen_launches(stack, ids):
    product = linear.PRODUCTS["Q4_K"]
    first = Launch(product, (2, 1), 64, (*stack.planes, *[None] * (len(product.signature) - 4)))
    kernel = linear_summed.kernel_of("Q4_K")
    rest = dict.fromkeys(names_of(kernel)[4:]) | {"ids": ids}
    small = Launch(norm.RMS_NORM, 1, 256, (None,) * len(norm.RMS_NORM.signature))
    return [first, small, Launch(kernel, (2, 1), 256, (*stack.planes, *rest.values()))]


@pytest.mark.parametrize("executor", ["ir", "sm_90"])
@pytest.mark.parametrize("ids", [[4], [5, 0], [3, 1, 3, 2]])
def test_planes_of_the_chosen(ids, executor):
    """All of each, in slabs, once for each time that it is chosen; odd sizes; not what lies beside units."""
    stack, ids = _stack(70_000, 4_304), np.array(ids, np.int32)
    (asks, *others) = plan(_chosen_launches(stack, ids), Weights([stack]))
    assert not any(each.pieces or each.chosen for each in others) and not asks.pieces
    one = EXECUTORS[executor]
    found = _ask(one, asks)
    want = [
        (plane.ctypes.data + e * n, plane.ctypes.data + (e + 1) * n)
        for plane, n in ((stack.low, 70_000), (stack.sub, 4_304)) for e in ids.tolist()
    ]  # fmt: skip
    assert all(any(first <= at and at + n <= end for first, end in want) for at, n in found)
    assert sum(n for _, n in found) == len(ids) * (70_000 + 4_304) * len(one.schedules)
    assert {at + n for at, n in found} >= {end for _, end in want}
    assert max(n for _, n in found) <= read_ahead.SLAB


def test_who_may_ask_for_the_chosen():
    """The last launch before that reads a stack; not if the ids are written by it, or later."""
    stack, ids = _stack(70_000, 4_304), np.array([4, 1], np.int32)
    launches, weights = _chosen_launches(stack, ids), Weights([stack])
    (found,) = weights.chosen(launches)
    assert (found.by, found.use, found.E, found.ids) == (0, 2, 6, (ids.ctypes.data, 2))
    writer = Launch(norm.RMS_NORM, 1, 256, (*[None] * (len(norm.RMS_NORM.signature) - 1), ids))
    first, small, last = launches
    assert [s.by for s in weights.chosen([first, small, first, last])] == [2]
    assert [s.by for s in weights.chosen([writer, first, small, last])] == [1]
    assert weights.chosen([first, writer, last]) == [] == weights.chosen([small, last])


def test_how_much_of_the_chosen_by_hand():
    """8 of 3 MB: all that the budget of 26 MB has room for, and what comes next waits for them."""
    stack, ids = _stack(3 << 20, 4_096), np.arange(4, dtype=np.int32)
    first, small, last = _chosen_launches(stack, np.concatenate([ids, ids]))
    long = layout.DeviceMatrix("Q8_0", (4, 256), np.zeros(4 << 20, np.int32), *[np.zeros(1, np.int32)] * 3)
    product = Launch(linear.PRODUCTS["Q8_0"], (64, 1), 64, long.planes)
    asked = plan([first, *[small] * 4, last, product], Weights([stack, long]))
    n = [sum(p.n_bytes for p in each.pieces) // read_ahead.SLAB for each in asked]
    # 97 slabs of each expert: 32,512 bytes of the one plane, 128 of the other, which ends after 32 of them
    chosen = asked[0].chosen.pieces
    assert len(chosen) == 97 + 32 and sum(piece.n_bytes for piece, _ in chosen) == (3 << 20) + 4_096
    assert {stride for _, stride in chosen} == {3 << 20, 4_096}
    # before its own work the first launch might ask for 87 slabs, 0.65 us of 4.4e12 bytes a second; what is
    # promised to the chosen leaves room for 59
    assert n[0] == (read_ahead.BUDGET - 8 * 97 * 32_640) // read_ahead.SLAB == 59
    # four small ones have 2.6 us, in which 11.4 MB of the 25.3 come: nobody asks for more
    assert n[1:5] == [0] * 4
    # behind them 13.8 MB are still to come, while the launch reads 25.2 from the cache in 3.5 us
    reads = 8 * ((3 << 20) + 4_096)
    more = 4.4e12 * (0.65e-6 + reads / 7.2e12) - (reads - 4 * 2_860_000)
    assert n[5] == more // read_ahead.SLAB == 137


# -- models


class Checking(devices.Executor):
    """Replays programs as a GPU that starts kernels early does, and looks at all that is asked for."""

    n_chosen = n_pages = 0

    def capture(self, launches, is_early=True):
        weights = Weights(layout.matrices_on(self), self._constants.arrays())
        asked = plan(launches, weights)
        listed = self._upload(read_ahead.table(asked))
        starts = np.cumsum([0, *(len(each.rows()) for each in asked)])

        def run():
            for i, (launch, grid, arguments) in enumerate(read_ahead.calls(launches, asked, listed)):
                assert arguments[len(launch.arguments) + 1] == starts[i]
                with Log() as log:
                    self.launch(early.kernel_of(launch.kernel), grid, launch.threads, *arguments)
                want = [(p.address, p.n_bytes) for p in asked[i].pieces]
                for pages in asked[i].pages:
                    want += wanted_pages(launches[pages.use], pages.begin, pages.end)
                    self.n_pages += 1
                found = sorted(log.found)
                if asked[i].chosen:
                    found = self._without_chosen(found, launches[asked[i].chosen.use], want)
                assert found == sorted(want)

        return run

    def _without_chosen(self, found, launch, others):
        """Planes of the chosen, whole; the rest of what was asked for."""
        of = dict(zip(names_of(launch.kernel), map(_host, launch.arguments), strict=True))
        place = of["low"].ctypes.data
        (matrix,) = [m for m in layout.matrices_on(self) if _host(m.low).ctypes.data == place]
        rest = list(found)
        for one in others:
            rest.remove(one)
        want = []
        for plane in map(_host, matrix.planes):
            stride = plane.nbytes // matrix.shape[0]
            if plane.size > 1 and stride % 16 == 0:
                for e in of["ids"].tolist():
                    want += range(plane.ctypes.data + e * stride, plane.ctypes.data + (e + 1) * stride)
        bytes_of_rest = sorted(b for at, n in rest for b in range(at, at + n))
        assert bytes_of_rest == sorted(want) and want
        self.n_chosen += 1
        return sorted(others)


@pytest.mark.slow
@pytest.mark.parametrize("n_seqs", [1, 2, 3])
@pytest.mark.parametrize("recipe", ["Q4_K_M", "Q8_0"])
def test_a_model_with_experts(recipe, n_seqs):
    """The same bytes as without, and all that is asked for is what is read: T 1 and 2 know the chosen."""
    model = device_models.small_model(device_models.SMALL["experts"], recipe)
    runs = []
    for kind in (devices.Executor, Checking):
        with device.use(devices.executor_one((launching.LOCKSTEP,), kind)) as executor:
            lanes = Lanes(model, ops, context_len=160, chunk=96, n_seqs=n_seqs, page=32, replay=True)
            depths, made = [40 + 13 * lane for lane in range(n_seqs)], []
            for lane, depth in enumerate(depths):
                lanes.forward(make_batch([(lane, 0, list(range(depth)), "last")]))
            for i in range(3):
                spans = [(lane, depth + i, [7 * lane + i], "last") for lane, depth in enumerate(depths)]
                made.append(lanes.forward(make_batch(spans)).tobytes())
            runs.append(made)
    assert runs[0] == runs[1]
    assert executor.n_pages > 0 and (executor.n_chosen > 0) == (n_seqs <= 2)
