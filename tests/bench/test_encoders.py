"""`bench --image` and `--audio`: synthetic projectors that load, and rows with what was counted."""

import pytest

from fastpath.bench import encoders, projector
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
    assert "image of 70" in text and "linear 3072 x 768 Q8_0" in text


def test_a_projector_that_does_not_exist():
    with pytest.raises(ValueError, match="expected SIZE:RECIPE such as E2B:F16"):
        projector.parse("12B:F16")
