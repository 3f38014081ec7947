"""The four encoders against transformers, value by value, and their laws."""

import hashlib
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from refimpl.frontend.media_file import read_media
from refimpl.frontend.media_input import open_input
from refimpl.media_tensors import ClippedLinear
from refimpl.model.audio import encode_audio
from refimpl.model.vision import encode_image, patches
from tests.media import files, tiny_mmproj
from tests.media.conftest import all_inputs, soft_tokens
from tests.oracle import goldens
from tests.tolerances import ORACLE_F32_ABS, ORACLE_F64_ABS

FAMILIES = list(tiny_mmproj.ENCODERS)
FAR = 100 * ORACLE_F32_ABS


def spread(n: int, k: int) -> np.ndarray:
    """The rows that oracles.hf_media keeps."""
    return np.unique(np.linspace(0, n - 1, min(n, k or n)).astype(int))


def traces(media, dtype) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for name in all_inputs(media):
        soft_tokens(
            media, name, dtype, trace=lambda key, x, n=name: found.update({f"{n}/{key}": np.array(x)})
        )
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_encoders_are_those_the_oracle_saw(family, mmproj_path):
    digest = hashlib.sha256(mmproj_path(family).read_bytes()).hexdigest()
    for kind in ("f32", "f64"):
        golden = goldens.read(f"media/mmproj-{family}.transformers-{kind}")
        assert golden.meta["sha256"] == digest, f"{golden.name}: recorded for other bytes; record again"


@pytest.mark.parametrize("dtype, limit", [("float64", ORACLE_F64_ABS), ("float32", ORACLE_F32_ABS)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_equals_transformers(family, dtype, limit, media):
    golden = goldens.read(f"media/mmproj-{family}.transformers-f{dtype[-2:]}")
    found = traces(media(family), np.dtype(dtype).type)
    rows = golden.meta["rows"]
    n_projected = sum(name.endswith(".projected") for name in golden.arrays)
    assert n_projected == len(all_inputs(media(family)))
    agreed = []
    for name, want in golden.arrays.items():
        got = found[name][spread(len(found[name]), rows)]
        assert got.shape == want.shape and found[name].dtype == dtype, name
        error = goldens.max_abs_in_deviations(got, want)
        assert error <= limit, f"first difference at {name}: {error:.2g} (before: {agreed[-3:]})"
        agreed.append(name)


@pytest.mark.parametrize("family", FAMILIES)
def test_counts(family, media):
    for name, (rows, columns) in tiny_mmproj.CANVASES.items():
        assert len(soft_tokens(media(family), name)) == rows * columns
    if media(family).audio:
        for name, n_frames in tiny_mmproj.CLIPS.items():
            n = -(-n_frames // 4) if family != "12b" else -(-len(tiny_mmproj.clip(name)) // 640)
            assert len(soft_tokens(media(family), name)) == n


@pytest.mark.parametrize("family", ["e2b", "e4b"])
def test_bounds_are_at_work(family, media):
    """Without them the results are others: of vision, and of audio."""
    for part, name in (("vision", "odd"), ("audio", "long")):
        config, weights = getattr(media(family), part)
        free = [
            {
                k: ClippedLinear(v.weight, None) if isinstance(v, ClippedLinear) else v
                for k, v in layer.items()
            }
            for layer in weights.layers
        ]
        loose = replace(media(family), **{part: (config, replace(weights, layers=tuple(free)))})
        assert np.abs(soft_tokens(loose, name) - soft_tokens(media(family), name)).max() > FAR


def test_standardisation_is_at_work(media):
    config, weights = media("26b").vision
    canvas = tiny_mmproj.canvas("odd")
    off = encode_image(replace(config, standardize=False), weights, canvas)
    assert np.abs(off - encode_image(config, weights, canvas)).max() > FAR


def test_large_means_stay_finite(media):
    """Published means reach 5.4e4: beyond float16, and most of a number cancels."""
    config, weights = media("26b").vision
    large = replace(weights, std_bias=np.full_like(weights.std_bias, 5.4e4))
    y, x = np.mgrid[:96, :96]
    checks = np.repeat(255 * ((x + y) % 2)[:, :, None], 3, axis=2).astype(np.uint8)
    for canvas in (checks, tiny_mmproj.canvas("odd")):
        assert np.isfinite(encode_image(config, large, canvas)).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_colors_are_told_apart(family, media):
    """Red, green, blue, white and black: five different pictures."""
    soft = [
        encode_image(*media(family).vision, np.full((48, 48, 3), color, np.uint8))
        for color in ((255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0))
    ]
    if family != "12b":  # there a flat patch has no deviation, and the first norm leaves nothing but its bias
        for i in range(5):
            for j in range(i):
                assert np.abs(soft[i] - soft[j]).max() > FAR


@pytest.mark.parametrize("family", FAMILIES)
def test_left_is_not_right_and_up_is_not_down(family, media):
    canvas = tiny_mmproj.canvas("odd")
    here = encode_image(*media(family).vision, canvas)
    mirrored = encode_image(*media(family).vision, np.ascontiguousarray(canvas[:, ::-1]))
    turned = encode_image(*media(family).vision, np.ascontiguousarray(canvas.transpose(1, 0, 2)))
    grid = here.reshape(3, 5, -1)
    assert np.abs(mirrored.reshape(3, 5, -1)[:, ::-1] - grid).max() > FAR
    assert np.abs(turned.reshape(5, 3, -1).transpose(1, 0, 2) - grid).max() > FAR


def test_a_patch_is_channel_first():
    canvas = np.arange(32 * 16 * 3, dtype=np.uint8).reshape(32, 16, 3)
    got = patches(canvas, 16).reshape(2, 3, 16, 16)
    assert np.array_equal(got[1, 2], canvas[16:, :, 2])


@pytest.mark.parametrize("family", ["e2b", "12b"])
def test_hearing_is_causal(family, media):
    """What comes later changes nothing before: the last 40 ms move the last rows only."""
    clip = tiny_mmproj.clip("long")
    changed = clip.copy()
    changed[-300:] *= -0.3
    before, after = (encode_audio(*media(family).audio, c) for c in (clip, changed))
    assert np.array_equal(before[:-2], after[:-2])
    assert np.abs(before[-1] - after[-1]).max() > FAR


def test_frames_of_the_unified_model_are_independent(media):
    clip = tiny_mmproj.clip("long")
    whole = encode_audio(*media("12b").audio, clip)
    assert np.array_equal(encode_audio(*media("12b").audio, clip[640:1280])[0], whole[1])


@pytest.mark.parametrize("family", ["e2b", "12b"])
def test_silence_is_finite(family, media):
    soft = encode_audio(*media(family).audio, np.zeros(16000, np.float32))
    assert soft.shape[0] == 25 and np.isfinite(soft).all()


@pytest.mark.parametrize("family, n", [("e2b", 0), ("e2b", 1), ("e2b", 160), ("12b", 0)])
def test_too_short(family, n, media):
    with pytest.raises(ValueError, match=f"sound: {n} samples, expected at least"):
        encode_audio(*media(family).audio, np.zeros(n, np.float32))


@pytest.mark.parametrize("shape", [(47, 48, 3), (48, 16, 3), (48, 48, 4), (48, 48), (0, 48, 3)])
def test_bad_canvas(shape, media):
    with pytest.raises(ValueError, match=r"canvas: .* expected uint8, multiples of 48"):
        encode_image(*media("e2b").vision, np.zeros(shape, np.uint8))


def test_more_patches_than_positions(media):
    with pytest.raises(ValueError, match="expected at most 40 along a side"):
        encode_image(*media("e2b").vision, np.zeros((48, 960, 3), np.uint8))
    strip = read_media(files.png(np.zeros((48, 960, 3), np.uint8)), "an image", "strip.png")
    with pytest.raises(
        ValueError, match=r"strip\.png: \d+ x 3 patches on its canvas, expected at most 40 along"
    ):
        open_input(media("e2b"), "image", strip, budget=70)


def test_traced_names_are_in_the_glossary(media):
    text = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`([va]\.[\w.-]+)`", text[text.index("## Traced values of the encoders") :]))
    seen = set()
    for family in FAMILIES:
        for name in all_inputs(media(family)):
            soft_tokens(media(family), name, trace=lambda key, x: seen.add(re.sub(r"-\d+$", "-0", key)))
    assert {re.sub(r"-\d+$", "-0", name) for name in listed - {"a.conv-1"}} == seen
