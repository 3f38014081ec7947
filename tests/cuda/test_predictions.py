"""Predictions: occupancy and time by hand arithmetic; launches as they are; the page as it is written."""

from dataclasses import replace

import numpy as np
import pytest

from fastpath.bench.blank import blank
from fastpath.cuda import device, fuse_flow, layout, limits, linear, ops, read_ahead, rehearsal
from fastpath.cuda.rehearsal import Call
from fastpath.lanes import Lanes
from quant import FORMATS
from refimpl.batch import make_batch
from tests import strategies
from tests.gpu_on_cpu import devices, launching, needs
from tests.gpu_on_cpu.traffic import Profiler

CODE = limits.Code(64, 16 << 10)


@pytest.mark.parametrize(
    "registers, shared, threads, blocks",
    [
        (64, 0, 256, 4),  # 65,536 / (64 * 256)
        (65, 0, 256, 3),  # 72 are given out
        (32, 0, 256, 8),  # 64 warps
        (16, 0, 32, 32),
        (32, 56 << 10, 256, 4),  # 228 KB / 57
        (128, 46848, 256, 2),
    ],
)
def test_occupancy(registers, shared, threads, blocks):
    assert limits.blocks_per_multiprocessor(limits.Code(registers, shared), threads) == blocks


def _launch(name, T, M, C):
    """A product on arrays without memory."""
    noted = rehearsal.Rehearsal()
    weight = strategies.random_blocks(np.random.default_rng(0), FORMATS[name], 4, C)
    weight = type(weight)(weight.format, (M, C), np.broadcast_to(weight.data[:1], (M, weight.row_bytes)))
    with device.use(noted):
        linear.linear(noted.empty((T, C), np.float32), noted.matrix(weight), "int8")
    return noted, noted.launches[-1]


def test_a_product_by_hand():
    """8,192 rows of 8,192 columns of Q8_0: 71.3 MB; 1,024 blocks, 13 of which fit a multiprocessor."""
    noted, launch = _launch("Q8_0", 1, 8192, 8192)
    p = limits.predict(launch, noted, Call(1), lambda kernel: CODE, lambda kernel, tokens: 100.0)
    assert p.memory_bytes == 8192 * 8192 * 34 // 32
    assert p.ops == 2 * 8192 * 8192 and p.warps == 26 and p.limit == "memory"
    assert p.waves == pytest.approx(1024 / (13 * 132))
    # two warps of a block, two steps of each: 4 rows of 1,024 columns
    assert p.in_flight == pytest.approx(1024 * 2 * 2 * 4352, rel=1e-4)
    # its first weights are asked for before it waits: then a trip to the cache for activations
    stream = p.memory_bytes / (4.8e12 * 0.92)
    assert p.seconds == pytest.approx(0.6e-6 + 0.20e-6 + 0.15e-6 + stream)
    late = limits.predict(
        launch, noted, Call(1), lambda kernel: CODE, lambda kernel, tokens: 100.0, limits.LATE
    )
    assert late.seconds - p.seconds == pytest.approx(0.6e-6)


def test_few_blocks_keep_too_little_on_its_way():
    noted, launch = _launch("Q8_0", 1, 256, 8192)  # 32 blocks of 2 warps, two steps of each
    p = limits.predict(launch, noted, Call(1), lambda kernel: CODE, lambda kernel, tokens: 0.0)
    assert (
        p.in_flight == pytest.approx(32 * 2 * 2 * 4352, rel=1e-3)
        and p.in_flight < limits.H200.wanted_in_flight
    )
    # a quarter of it comes with the first trip, the rest with three more; 32 multiprocessors take it
    port = (p.memory_bytes + p.cache_bytes) / (32 * 64 * 1.83e9)
    again = (p.memory_bytes / p.in_flight - 1) * 0.65e-6
    assert p.seconds == pytest.approx(0.6e-6 + 0.20e-6 + 0.15e-6 + max(port, again), rel=1e-6)


def _two_launches(bytes_early):
    """A norm that asks for some of what the product behind it reads: 71.3 MB, as above."""
    noted, product = _launch("Q8_0", 1, 8192, 8192)
    vector = np.ones(1024, np.float32)
    with device.use(noted):
        ops.rms_norm(noted.empty((1, 1024), np.float32), vector, 1e-6)
    low = product.arguments[0]
    pieces = [read_ahead.Piece(fuse_flow.span(low).start, bytes_early, 1)] if bytes_early else []
    queue, got = limits.Queue(), []
    for i, (launch, asks) in enumerate(((noted.launches[-1], pieces), (product, []))):
        one = (launch, noted, Call(1), lambda kernel: CODE, lambda kernel, tokens: 0.0, limits.H200)
        got.append(limits.predict(*one, queue, i, read_ahead.Asks(asks)))
    return got


def test_reading_ahead_by_hand():
    """A third of the bytes is asked for, then half, then all."""
    rate = 4.8e12 * 0.92
    norm, product = _two_launches(0)
    # 4096 bytes of its vector come from memory: a trip; two arrays of 4096 bytes from the cache, by one port
    of_port = 3 * 4096 / (64 * 1.83e9)
    assert norm.seconds == pytest.approx(0.6e-6 + 0.40e-6 + 0.15e-6 + of_port)
    total, tail = product.memory_bytes, 1  # all blocks are there at once
    assert product.seconds == pytest.approx(0.6e-6 + 0.35e-6 + total / rate * tail)

    third = 23_767_712
    norm, product = _two_launches(third)
    # memory is busy with the third from 0.40 us on, for 5.4 us; the norm's vector waits behind it, as its own
    # kernel has asked for it; then come the other two
    done = 0.40e-6 + third / rate
    assert norm.seconds == pytest.approx(done + 4096 / rate, rel=1e-6)
    assert (norm.early_bytes, product.early_bytes) == (0, third)
    assert product.seconds == pytest.approx(0.6e-6 + 0.35e-6 + (total - third) / rate * tail)
    assert product.limit == "memory"

    half = total // 2 // 16 * 16
    norm, product = _two_launches(half)
    # memory takes 8.1 us for the other half; of all, what the warps hold has come out of the cache while
    # the norm ran, and the rest takes 7.4, at 7.2e12
    assert product.limit == "memory"
    assert product.seconds == pytest.approx(0.6e-6 + 0.35e-6 + (total - half) / rate)

    norm, product = _two_launches(total)
    brought = product.in_flight  # the norm leaves all but a block's share of the card, the product takes 0.6
    assert 1 - norm.waves > product.waves == pytest.approx(1024 / (13 * 132))
    assert product.limit == "cache" and product.early_bytes == total
    from_cache = total + product.cache_bytes - brought
    assert product.seconds == pytest.approx(0.6e-6 + 0.35e-6 + from_cache / 7.2e12)


def test_no_byte_is_brought_twice_and_memory_never_does_two_things():
    queue = limits.Queue()
    queue.ask(2.0, [(7, 3000), (8, 1000)], 1000.0)
    assert queue.early == {7: (3000, 5.0), 8: (1000, 6.0)}
    assert queue.read(4.0, 500, 1000.0) == 6.5  # behind what was asked for
    assert queue.read(9.0, 500, 1000.0) == 9.5  # memory had nothing to do
    assert queue.read(9.1, 0, 1000.0) == 9.1 and queue.free == 9.5


def test_pages_and_chosen_experts_by_hand():
    """Bytes that stand in the queue: of whole blocks, once for tokens of one sequence; of experts, once."""
    of_one = read_ahead.Pages((0, 16384), (0, 8192), 8, 4, 1024, (0, 99, 99), 0, 0, 0, 2, 7, 3, 400)
    asks = read_ahead.Asks([read_ahead.Piece(0, 48, 5)], [of_one])
    # two sequences at position 1030 with a token each: the window begins at 7, so blocks 0 to 32; 3 to 32 of
    # 8 heads of both
    assert limits.asked_first(asks, Call(1, 2, 1030)) == [(5, 48), (7, 30 * 8 * 24576 * 2)]
    # one sequence with two tokens, 1054 and 1055: from 31 on, so blocks 0 to 32 again, once
    assert limits.asked_first(asks, Call(2, 1, 1054)) == [(5, 48), (7, 30 * 8 * 24576)]
    assert limits.asked_first(asks, Call(1, 2, 70)) == [(5, 48), (7, 0)]  # blocks 0 to 2

    noted = rehearsal.Rehearsal()
    noted.n_active = 8
    pieces = ((read_ahead.Piece(0, 3200, 6), 1 << 20), (read_ahead.Piece(0, 1600, 6), 1 << 20))
    asks = read_ahead.Asks(chosen=read_ahead.Chosen((0, 16), 128, pieces, 6))
    assert limits.asked_last(asks, noted, Call(1)) == [(6, 8 * 4800)]
    # two tokens: 128 * (1 - (15/16)^2) = 15.5 experts
    assert limits.asked_last(asks, noted, Call(1, 2)) == [(6, 74400)]
    assert limits.asked_last(read_ahead.NOTHING, noted, Call(1)) == []


def test_trips_of_what_was_asked_for():
    """Attention waits for positions, tables, pages; experts for ids, weights."""
    card = limits.H200
    for is_there, trip in ((True, 0.20e-6), (False, 0.40e-6)):
        seconds = limits.trips("attention_part_f16_f16", card, is_there, False)
        assert seconds == pytest.approx(0.20e-6 + 0.20e-6 + trip + 2 * 0.15e-6)
        assert limits.trips("linear_q8_0", card, is_there, True) == pytest.approx(0.20e-6 + trip + 0.15e-6)


@pytest.mark.parametrize("spec", ["E4B:Q8_0", "26B-A4B:Q4_K_M"])
def test_no_step_is_faster_than_its_bytes(spec):
    """Nothing but memory, and kernels that take no time: a call takes what its bytes take, or longer."""
    card = replace(
        limits.H200, gap_s=0.0, cache_trip_s=0.0, memory_trip_s=0.0, loaded_trip_s=0.0, reduction_s=0.0
    )
    for one in (card, limits.H200):
        step = limits.predict_step(blank(spec), Call(1, 1, 1024), lambda _: CODE, lambda *_: 0.0, card=one)
        assert step.seconds >= step.memory_bytes / (4.8e12 * 0.92)
        assert 0 < sum(p.early_bytes for p in step.predictions) < step.memory_bytes
    without = limits.predict_step(blank(spec), Call(1, 1, 1024), lambda _: CODE, lambda *_: 0.0, asks=False)
    assert without.seconds > step.seconds and without.memory_bytes == step.memory_bytes


def test_attention_by_hand():
    """E4B's window of 512 keys, two heads of keys of 256 components: a launch's share by its parts."""
    counted = {}

    def issued(kernel, n):
        counted[kernel] = n
        return 1000.0

    step = limits.predict_step(blank("E4B:Q8_0"), Call(1, 1, 1024), lambda kernel: CODE, issued)
    found = [p for p in step.predictions if "attention_part" in p.name]
    sliding = found[0]
    assert counted["attention_part_f16_f16"] == 512  # the full layers' heads, seen last
    assert sliding.memory_bytes == 512 * 2 * 256 * 2 * 2  # keys and values of 2 bytes
    # 9 pieces of 64 for each head, 8 warps each, 16 loads of 32 lanes of 16 bytes
    assert sliding.in_flight == 18 * 8 * 16 * 512


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q6_K"])
def test_bytes_are_those_that_warps_read(name):
    """Sectors of weights as the executor counts them, against the bytes that predictions go by."""
    weight = layout.device_matrix(strategies.weights(np.random.default_rng(0), FORMATS[name], 8, 4096))
    with device.use(Profiler()) as profiler:
        linear.linear(strategies.normal(np.random.default_rng(1), 1, 4096), weight, "int8")
    sites = profiler.sites[f"linear_{name.lower()}"]
    large = [s for s in sites if "no_allocate" in s.instruction]
    of_blocks = weight.block.nbytes if weight.coding.is_256 else 0  # which stay in the first-level cache
    assert sum(s.requests * s.cost * 32 for s in large) == weight.read_bytes - of_blocks


def test_launches_are_those_of_a_real_call():
    """The same kernels as often, on arrays without memory and on an executor."""
    from fastpath.bench import device_models

    model = device_models.small_model(device_models.SMALL["dense, k = v"], "Q8_0")
    once = devices.executor_one((launching.LOCKSTEP,))
    with device.use(once):
        lanes = Lanes(model, ops, context_len=64, chunk=32, page=32, replay=False)
        lanes.forward(make_batch([(0, 0, [3], "last")]))
    noted, found = rehearsal.of(model, Call(1)), {}
    for launch in noted.launches:
        found[launch.kernel.name] = found.get(launch.kernel.name, 0) + 1
    assert found == once.launched


def test_fusion_keeps_weights():
    """A fused step reads what the launches read that it stands for."""
    model = blank("26B-A4B:Q4_K_M")
    steps = [
        limits.predict_step(
            model, Call(1, 1, 1024), lambda kernel: CODE, lambda kernel, tokens: 0.0, fused=fused
        )
        for fused in (False, True)
    ]
    one_by_one, fused = steps
    assert len(fused.predictions) < len(one_by_one.predictions) / 3
    assert fused.memory_bytes == pytest.approx(one_by_one.memory_bytes, rel=1e-6)
    assert fused.seconds < one_by_one.seconds


@pytest.mark.slow
def test_page():
    """docs/gpu.md holds what the command writes."""
    if needs.missing_assembler():
        pytest.skip(needs.missing_assembler())
    from tests.gpu_on_cpu import predict

    assert predict.between_markers(predict.PAGE.read_text()) == predict.page().strip()
