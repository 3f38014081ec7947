"""The fast encoders: the reference's bytes on its table, and close to the truth on the kernels'."""

import numpy as np
import pytest

import fastpath.cpu
import refimpl.ops
from fastpath.cpu import threads
from fastpath.model.audio import encode_audio
from fastpath.model.vision import encode_image
from tests.media import tiny_mmproj
from tests.media.conftest import all_inputs, soft_tokens
from tests.media.test_encoders import FAMILIES, spread
from tests.oracle import goldens
from tests.tolerances import ORACLE_F32_ABS


def encode(ops, media, name, dtype=np.float32, **options):
    """Of a canvas or a clip, by its name."""
    if name in tiny_mmproj.CANVASES:
        return encode_image(ops, *media.need_vision(), tiny_mmproj.canvas(name), dtype, **options)
    return encode_audio(ops, *media.need_audio(), tiny_mmproj.clip(name), dtype, **options)


def traced(call, **options):
    found = []
    call(trace=lambda name, x: found.append((name, np.array(x))), **options)
    return found


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bytes_as_the_reference(family, dtype, media):
    """Every name in the same order, every value, on the reference's op table."""
    for name in all_inputs(media(family)):
        expected = traced(
            lambda n=name, **options: soft_tokens(media(family), n, dtype, **options), activations="float"
        )
        got = traced(
            lambda n=name, **options: encode(refimpl.ops, media(family), n, dtype, **options),
            activations="float",
        )
        assert [key for key, _ in got] == [key for key, _ in expected]
        for (key, ours), (_, theirs) in zip(got, expected, strict=True):
            assert ours.dtype == dtype and ours.tobytes() == theirs.tobytes(), f"{name}: {key}"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_equals_transformers(family, media):
    golden = goldens.read(f"media/mmproj-{family}.transformers-f32")
    found = {
        f"{name}/{key}": x
        for name in all_inputs(media(family))
        for key, x in traced(lambda n=name, **options: encode(fastpath.cpu, media(family), n, **options))
    }
    for name, want in golden.arrays.items():
        got = found[name][spread(len(found[name]), golden.meta["rows"])]
        error = goldens.max_abs_in_deviations(got, want)
        assert got.dtype == np.float32 and error <= ORACLE_F32_ABS, f"{name}: {error:.2g}"


@pytest.mark.parametrize("family", FAMILIES)
def test_against_float64(family, media):
    """Of the same weights, in the reference: the kernels' own errors, at the end of the encoders."""
    for name in all_inputs(media(family)):
        want = soft_tokens(media(family), name, np.float64, activations="float")
        got = encode(fastpath.cpu, media(family), name)
        assert goldens.max_abs_in_deviations(got, want) <= ORACLE_F32_ABS, name


@pytest.mark.parametrize("family", ["e2b", "26b"])
def test_any_number_of_threads(family, media):
    before = threads.num_threads()
    results = {}
    try:
        for n in (1, 2, 3):
            threads.set_num_threads(n)
            for name in all_inputs(media(family)):
                results.setdefault(name, set()).add(encode(fastpath.cpu, media(family), name).tobytes())
    finally:
        threads.set_num_threads(before)
    assert all(len(bytes_of) == 1 for bytes_of in results.values())
