"""`bench --image` and `--audio`: synthetic projectors that load, and rows with what was counted."""

import numpy as np
import pytest

import fastpath.cpu
from fastpath.bench import encoders, projector
from fastpath.cli.__main__ import main
from refimpl.media_tensors import load_media


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("projector") / "mmproj.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(projector, "V_LAYERS", 1)
        patch.setattr(projector, "A_LAYERS", 1)
        patch.setattr(projector, "V_POSITIONS", 64)
        projector.write("E2B", "Q8_0", path)
    return path


def test_the_file_has_the_published_geometry(small):
    media = load_media(small)
    vision, audio = media.vision[0], media.audio[0]
    assert (vision.dim, vision.head_dim, vision.ffn_dim, vision.out_dim) == (768, 64, 3072, 1536)
    assert (audio.dim, audio.head_dim, audio.ffn_dim, audio.channels) == (1024, 128, 4096, (128, 32))
    assert media.vision[1].layers[0]["ffn_up"].weight.format.name == "Q8_0"
    assert media.vision[1].layers[0]["ffn_up"].bounds == (-8.0, 8.0, -8.0, 8.0)


def test_rows(small):
    """70 soft tokens are 630 patches, and their products can be counted by hand."""
    rows, text = encoders.run(small, [70], [1], 1, profile=True)
    image, audio = rows
    assert image["n_tokens"] == 70 and audio["n_tokens"] == 25
    patches = 9 * 70
    matrices = 768 * 768 + 4 * 768 * 768 + 3 * 768 * 3072  # the patches' own, attention, feed-forward
    by_hand = 2 * patches * matrices + 4 * patches**2 * 768 + 2 * 70 * 768 * 1536
    assert image["n_ops"] == by_hand
    assert image["parity_cases"] == audio["parity_cases"] > 20 and "cases is green" in text
    assert "image of 70" in text and "linear 3072 x 768 Q8_0" in text


@pytest.mark.parametrize(
    ("words", "op"),
    [
        (("--image", "70"), "linear"),
        (("--image", "70"), "attention"),
        (("--image", "70"), "mean_pool"),
        (("--image", "70"), "embed"),
        (("--audio", "1"), "layer_norm"),
        (("--audio", "1"), "conv2d"),
        (("--audio", "1"), "causal_conv"),
        (("--audio", "1"), "relative_attention"),
    ],
)
def test_no_figure_when_a_kernel_is_wrong(small, capsys, monkeypatch, words, op):
    right = getattr(fastpath.cpu, op)

    def wrong(*args, **options):
        result = right(*args, **options)
        result.reshape(-1)[int(np.argmax(np.abs(result)))] *= np.float32(1.001)
        return result

    monkeypatch.setattr(fastpath.cpu, op, wrong)
    status = main(["bench", "--mmproj", str(small), "-r", "1", *words])
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert (status, out) == (2, "") and last.startswith(f"twinpath: parity: {op}") and "No figure" in last


def test_a_projector_that_does_not_exist():
    with pytest.raises(ValueError, match="expected SIZE:RECIPE such as E2B:F16"):
        projector.parse("12B:F16")
