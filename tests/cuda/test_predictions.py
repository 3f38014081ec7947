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
    """8,192 rows of 8,192 columns of Q8_0: 71.3 MB; 2,048 blocks, four of which fit a multiprocessor."""
    noted, launch = _launch("Q8_0", 1, 8192, 8192)
    p = limits.predict(launch, noted, Call(1), lambda kernel: CODE, lambda kernel, tokens: 100.0)
    # a plane that a format does not have is one number: 4 + 2 bytes
    assert p.memory_bytes == 8192 * 8192 * 34 // 32 + 6
    assert p.ops == 2 * 8192 * 8192 and p.warps == 32 and p.limit == "memory"
    assert p.waves == pytest.approx(2048 / 528)
    assert p.in_flight == pytest.approx(528 * 8 * 2 * 1088, rel=1e-4)
    # 4.8e12 * 0.65e-6 bytes keep memory busy: a third of what is on its way, half of which is lost at the end
    stream = p.memory_bytes / (4.8e12 * 0.92) * (1 + 0.5 / p.waves * 4.8e12 * 0.65e-6 / p.in_flight)
    assert p.seconds == pytest.approx(0.6e-6 + 0.40e-6 + 0.15e-6 + stream)
    late = limits.predict(
        launch, noted, Call(1), lambda kernel: CODE, lambda kernel, tokens: 100.0, limits.LATE
    )
    assert late.seconds - p.seconds == pytest.approx(0.6e-6)


def test_few_blocks_keep_too_little_on_its_way():
    noted, launch = _launch("Q8_0", 1, 256, 8192)  # 64 blocks of 8 warps, two steps of each
    p = limits.predict(launch, noted, Call(1), lambda kernel: CODE, lambda kernel, tokens: 0.0)
    assert (
        p.in_flight == pytest.approx(64 * 8 * 2 * 1088, rel=1e-3)
        and p.in_flight < limits.H200.wanted_in_flight
    )
    # half of it comes with the first trip, half with another one; 64 multiprocessors take it
    port = (p.memory_bytes + p.cache_bytes) / (64 * 64 * 1.83e9)
    again = (p.memory_bytes / p.in_flight - 1) * 0.65e-6
    assert p.seconds == pytest.approx(0.6e-6 + 0.40e-6 + 0.15e-6 + max(port, again), rel=1e-6)


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
    total, tail = product.memory_bytes, 1 + 0.5 / product.waves * 4.8e12 * 0.65e-6 / product.in_flight
    assert product.seconds == pytest.approx(0.6e-6 + 0.55e-6 + total / rate * tail)

    third = 23_767_712
    norm, product = _two_launches(third)
    # memory is busy with the third from 0.40 us on, for 5.4 us; the norm's vector waits behind it, as its own
    # kernel has asked for it; then come the other two
    done = 0.40e-6 + third / rate
    assert norm.seconds == pytest.approx(done + 4096 / rate, rel=1e-6)
    assert (norm.early_bytes, product.early_bytes) == (0, third)
    assert product.seconds == pytest.approx(0.6e-6 + 0.55e-6 + (total - third) / rate * tail)
    assert product.limit == "memory"

    _, product = _two_launches(total // 2 // 16 * 16)
    # the other half takes memory 8.5 us, all of it the cache, at 7.2e12, 9.9
    assert product.limit == "cache"
    assert product.seconds == pytest.approx(0.6e-6 + 0.55e-6 + (total + product.cache_bytes) / 7.2e12)

    norm, product = _two_launches(total - 6)  # but for two planes that are none
    # six bytes come meanwhile
    assert product.limit == "cache" and product.early_bytes == total - 6
    assert product.seconds == pytest.approx(0.6e-6 + 0.55e-6 + (total + product.cache_bytes) / 7.2e12)


def test_no_byte_is_brought_twice_and_memory_never_does_two_things():
    queue = limits.Queue()
    queue.ask(2.0, [(7, 3000), (8, 1000)], 1000.0)
    assert queue.early == {7: (3000, 5.0), 8: (1000, 6.0)}
    assert queue.read(4.0, 500, 1000.0) == 6.5  # behind what was asked for
    assert queue.read(9.0, 500, 1000.0) == 9.5  # memory had nothing to do
    assert queue.read(9.1, 0, 1000.0) == 9.1 and queue.free == 9.5


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
    assert sum(s.requests * s.cost * 32 for s in large) == weight.low.nbytes + weight.high.nbytes * (
        weight.high.size > 1
    )


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
