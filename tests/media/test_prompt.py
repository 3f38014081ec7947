"""Placeholders become soft tokens; a file becomes an answer."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from refimpl.batch import PAD
from refimpl.frontend.media_prompt import MediaPart, expand, locate
from refimpl.generate import generate, load
from refimpl.media import encode, prompt
from refimpl.media_tensors import load_media
from tests import tiny
from tests.media import files, tiny_mmproj
from tests.media.test_audio import tone

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(tiny.make(tmp_path_factory.mktemp("tiny") / "e2b.gguf", "e2b"))


def render(model, content, parts):
    messages = [{"role": "user", "content": content}]
    return model.template.render_ids(model.tokenizer, messages, media=parts)


TEXT = {"type": "text", "text": "the model"}
IMAGE, AUDIO, VIDEO = ({"type": kind} for kind in ("image", "audio", "video"))


def test_layouts(model):
    """What the published processor writes, as text."""
    parts = [
        MediaPart("image", (2,)),
        MediaPart("audio", (3,)),
        MediaPart("video", (1, 1, 1), (0.0, 3.9, 62.0)),
    ]
    ids = render(model, [IMAGE, TEXT, AUDIO, VIDEO], parts)
    assert "".join(map(model.tokenizer.piece, ids)).replace("▁", " ") == (
        "<bos><|turn>user\n<|image><|image|><|image|><image|>the model"
        "<|audio><|audio|><|audio|><|audio|><audio|>"
        "00:00 <|image><|video|><image|> 00:03 <|image><|video|><image|> 01:02 <|image><|video|><image|>"
        "<turn|>\n<|turn>model\n"
    )
    plain, starts = locate(ids, model.tokenizer, parts)
    pieces = [model.tokenizer.piece(i) for i in ids]
    want = [pieces.index("<|image|>"), pieces.index("<|audio|>")]
    assert starts == [*want, *(i for i, piece in enumerate(pieces) if piece == "<|video|>")]
    changed = [i for i, (a, b) in enumerate(zip(ids, plain)) if a != b]
    assert len(changed) == 8 and all(plain[i] == PAD for i in changed)


def test_text_of_users_is_no_placeholder(model):
    """A user who writes <|image|> writes text, whatever else the message has."""
    parts = [MediaPart("image", (4,))]
    sly = {"type": "text", "text": "a <|image|> b <|video|> c <|image>"}
    ids = render(model, [sly, IMAGE], parts)
    image = model.tokenizer.id_of("<|image|>")
    assert ids.count(image) == 4
    _, starts = locate(ids, model.tokenizer, parts)
    assert ids[starts[0] - 1] == model.tokenizer.id_of("<|image>")


@pytest.mark.parametrize(
    "content, parts",
    [([IMAGE, TEXT], [MediaPart("image", (1,))] * 2), ([IMAGE], [MediaPart("audio", (1,))]),
     ([IMAGE, AUDIO], [MediaPart("audio", (1,)), MediaPart("image", (1,))]),
     ([TEXT], [MediaPart("image", (1,))])],
)  # fmt: skip
def test_files_and_parts_must_match(model, content, parts):
    with pytest.raises(ValueError, match="expected the same in the same order"):
        render(model, content, parts)


def test_expand_leaves_other_text_alone():
    assert expand("a <|image> b", []) == "a <|image> b"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    here = tmp_path_factory.mktemp("media")
    tiny.make(here / "model.gguf", "e2b")
    # as many positions as real canvases have patches
    tensors = tiny_mmproj.tensors_of("e2b")
    wide = np.resize(tensors["v.position_embd.weight"], (2, 80, 36))
    tiny_mmproj.make(here / "mmproj.gguf", "e2b", replace={"v.position_embd.weight": wide})
    tiny_mmproj.make(here / "other.gguf", "12b")
    (here / "photo.png").write_bytes(files.png(files.picture("photo-small")))
    (here / "talk.wav").write_bytes(files.wav(tone(8000, 0.5).astype(np.float32), 8000))
    return here


def test_files_become_prompts(folder, model):
    media = load_media(folder / "mmproj.gguf")
    picture = encode(media, "image", folder / "photo.png", budget=70)
    sound = encode(media, "audio", folder / "talk.wav")
    assert picture.part.counts == (63,) and sound.part.counts == (13,)
    ids, soft = prompt(model, "", [picture, sound])
    assert [(len(s.rows), s.vision) for s in soft] == [(63, True), (13, False)]
    assert all(ids[i] == PAD for s in soft for i in range(s.start, s.stop))
    assert len(list(generate(model, ids, max_tokens=3, soft=soft))) <= 3


def refimpl(*arguments):
    command = [sys.executable, "-m", "refimpl", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)


def test_command_line(folder):
    model, image = folder / "model.gguf", folder / "photo.png"
    done = refimpl(
        model, "--mmproj", folder / "mmproj.gguf", "--image", image, "--image-tokens", 70, "--max-tokens", 2
    )
    assert done.returncode == 0 and done.stderr == ""
    for arguments, message in (
        ((model, "--image", image), "expected --mmproj FILE"),
        ((model, "--image", image, "--mmproj", folder / "other.gguf"), r"80 wide, expected 48"),
        ((model, "--image", image, "--mmproj", model), "Are the two files swapped?"),
        ((model, "--image", folder / "talk.wav", "--mmproj", folder / "mmproj.gguf"), "expected an image"),
        (
            (model, "--image", image, "--mmproj", folder / "mmproj.gguf", "--image-tokens", 71),
            "71, expected one",
        ),
    ):
        failed = refimpl(*arguments)
        assert failed.returncode == 2 and message in failed.stderr and failed.stderr.count("\n") == 1


def test_text_loads_no_media_library():
    """Who asks in words waits for no decoder."""
    code = (
        "import sys; import refimpl.generate, refimpl.frontend.chat_template, refimpl.media;"
        "print([m for m in ('imageio', 'PIL', 'av', 'scipy', 'pillow_heif') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
