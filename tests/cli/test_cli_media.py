"""Images, sounds and videos on the command line: order, questions, notes, traces, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import quant
import refimpl.ops
from fastpath.lanes import Lanes
from fastpath.load import load_model
from refimpl.frontend.image import load_image
from refimpl.media import encode, prompt
from refimpl.media_tensors import load_media
from tests import tiny
from tests.media import files, tiny_mmproj
from tests.tolerances import CHUNKS_FLOAT32

ROOT = Path(__file__).parents[2]


def encoders(path, family):
    """Tiny encoders with as many positions as canvases of 70 soft tokens have patches."""
    name = "v.position_embd.weight"
    table = tiny_mmproj.tensors_of(family)[name]
    return tiny_mmproj.make(path, family, replace={name: np.resize(table, (2, 80, table.shape[2]))})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two models (one of each mask) in folders of their own, media beside; e2b/ has its projector in it."""
    here = tmp_path_factory.mktemp("cli-media")
    ends = {"tokenizer.ggml.suppress_tokens": [1, 9, 16]}
    for family in ("e2b", "26b"):
        (here / family).mkdir()
        tiny.make(here / family / "model.gguf", family, keys=ends)
    encoders(here / "e2b" / "tiny-mmproj-F32.gguf", "e2b")
    encoders(here / "mm-26b.gguf", "26b")
    encoders(here / "mm-12b.gguf", "12b")
    (here / "photo.png").write_bytes(files.png(files.picture("photo-small")))
    (here / "dot.png").write_bytes(files.png(files.picture("dot")))
    (here / "talk.wav").write_bytes(files.wav(files.sound("chirp")))
    (here / "long.wav").write_bytes(files.wav(files.sound("long")))
    (here / "text.png").write_text("this is no picture\n")
    (here / "empty.png").write_bytes(b"")
    return here


@pytest.fixture(autouse=True)
def _fast_enough(monkeypatch):
    """A busy machine does not speak of what it encodes."""
    monkeypatch.setattr("fastpath.cli.media.SILENT_S", 1e6)


@pytest.fixture
def small(folder):
    """Options of the small model; its projector is found beside it."""
    return ("--model", folder / "e2b" / "model.gguf", "--backend", "ref", "--image-tokens", 70)


@pytest.fixture
def large(folder):
    model = ("--model", folder / "26b" / "model.gguf", "--mmproj", folder / "mm-26b.gguf")
    return (*model, "--backend", "ref", "--image-tokens", 70)


def logits_of(folder, family, mmproj, media, text):
    """What the reference's encoders and the engine make of media in this order."""
    model, projector = load_model(folder / family / "model.gguf"), load_media(folder / mmproj)
    encoded = [encode(projector, kind, folder / name, budget=70, activations="int8") for kind, name in media]
    ids, soft = prompt(model, text, encoded)
    return Lanes(model, refimpl.ops, largest_image=70).extend([(0, ids)], "all", soft={0: soft})


class TestAnswers:
    def test_the_order_is_the_one_given(self, twinpath, folder, small, tmp_path):
        for words, media in (
            (("--image", "photo.png", "--audio", "talk.wav", "--image", "dot.png"),
             [("image", "photo.png"), ("audio", "talk.wav"), ("image", "dot.png")]),
            (("--audio", "talk.wav", "--image", "dot.png", "photo.png"),
             [("audio", "talk.wav"), ("image", "dot.png"), ("image", "photo.png")]),
        ):  # fmt: skip
            words = [word if word.startswith("--") else folder / word for word in words]
            out = tmp_path / "l.npy"
            assert twinpath("logits", *small, *words, "--prompt", "the user", "--out", out).status == 0
            expected = logits_of(folder, "e2b", "e2b/tiny-mmproj-F32.gguf", media, "the user")
            np.testing.assert_array_equal(np.load(out), expected)

    def test_a_question_when_there_is_none(self, twinpath, folder, large, tmp_path):
        image = ("--image", folder / "photo.png")
        twinpath("logits", *large, *image, "--out", tmp_path / "a.npy")
        twinpath("logits", *large, *image, "--prompt", "Describe this image.", "--out", tmp_path / "b.npy")
        assert np.load(tmp_path / "a.npy").tobytes() == np.load(tmp_path / "b.npy").tobytes()
        outcome = twinpath(*large, *image, "--max-tokens", 2)
        assert outcome.status == 0 and outcome.out and outcome.err == ""

    def test_a_chunk_smaller_than_the_image(self, twinpath, folder, large, tmp_path):
        words = ("logits", *large, "--image", folder / "photo.png", "--prompt", "the")
        twinpath(*words, "--out", tmp_path / "a.npy")
        assert twinpath(*words, "--chunk", 20, "--out", tmp_path / "b.npy").status == 0
        difference = np.abs(np.load(tmp_path / "a.npy") - np.load(tmp_path / "b.npy"))
        assert difference.max() < CHUNKS_FLOAT32

    def test_in_the_places_of_a_raw_prompt_and_of_ids(self, twinpath, folder, small, tmp_path):
        image = ("--image", folder / "photo.png")
        raw = ("--raw", "--prompt", "the <|image|>user")
        assert twinpath("logits", *small, *image, *raw, "--out", tmp_path / "a.npy").status == 0
        model = load_model(folder / "e2b" / "model.gguf")
        ids = model.tokenizer.encode(
            "the <|image>" + "<|image|>" * 63 + "<image|>user", add_bos=True, parse_special=True
        )
        tokens = ("--tokens", ",".join(map(str, ids)))
        assert twinpath("logits", *small, *image, *tokens, "--out", tmp_path / "b.npy").status == 0
        assert np.load(tmp_path / "a.npy").tobytes() == np.load(tmp_path / "b.npy").tobytes()

    def test_a_file_that_holds_both(self, twinpath, folder, tmp_path):
        """As Ollama's: no --mmproj, and no word of tensors that nobody reads."""
        text = quant.open_gguf(folder / "e2b" / "model.gguf")
        both = quant.open_gguf(folder / "e2b" / "tiny-mmproj-F32.gguf")
        keys = {k.replace("clip.", "gemma4.", 1): v for k, v in both.metadata.items() if k[:5] == "clip."}
        tensors = dict(text.tensors) | dict(both.tensors)
        path = quant.write_gguf(tmp_path / "both.gguf", dict(text.metadata) | keys, tensors)[0]
        words = ("--backend", "ref", "--image-tokens", 70, "--image", folder / "photo.png", "--max-tokens", 3)
        apart, joined = (twinpath("--model", m, *words) for m in (folder / "e2b" / "model.gguf", path))
        assert joined == (0, apart.out, "") and "tiny-mmproj" in apart.err

    def test_statistics_and_notes(self, twinpath, folder, small):
        outcome = twinpath(
            *small, "--image", folder / "photo.png", "--audio", folder / "long.wav", "--context", 512,
            "--max-tokens", 1, "--stats",
        )  # fmt: skip
        assert outcome.status == 2  # 750 soft tokens are more than this model's context
        outcome = twinpath(
            *small,
            "--image",
            folder / "photo.png",
            "--audio",
            folder / "talk.wav",
            "--max-tokens",
            1,
            "--stats",
        )
        notes = [line for line in outcome.err.splitlines() if line.startswith("note: ")]
        assert len(notes) == 1 and "tiny-mmproj-F32.gguf: the encoders" in notes[0]
        lines = [line.split("media    ")[1] for line in outcome.err.splitlines() if line[:5] == "media"]
        assert "photo.png: 63 soft tokens, decoded in" in lines[0] and "encoded in" in lines[0]
        assert "talk.wav: 3 soft tokens" in lines[1]

    def test_what_takes_long_is_said(self, twinpath, folder, large, monkeypatch):
        monkeypatch.setattr("fastpath.cli.media.SILENT_S", 0.001)
        outcome = twinpath(*large, "--image", folder / "photo.png", "--max-tokens", 1)
        assert outcome.err.endswith("photo.png: 63 soft tokens\n") and outcome.err.startswith("encoding ")

    def test_a_sound_that_is_cut_is_said(self, fault, twinpath, folder, small, tmp_path):
        """Once there is an answer: a fault is one line, whatever there was to note before."""
        line = fault(*small, "--audio", folder / "long.wav", "--max-tokens", 1)
        assert "the context holds 512. Cut the sound: the model was made for no more" in line
        roomy = tiny.make(tmp_path / "model.gguf", "e2b", keys={"gemma4.context_length": 1024})
        mmproj = ("--mmproj", folder / "e2b" / "tiny-mmproj-F32.gguf", "--audio", folder / "long.wav")
        outcome = twinpath("--model", roomy, "--backend", "ref", *mmproj, "--max-tokens", 1)
        assert "the model hears 30 s at most" in outcome.err and outcome.status == 0

    def test_a_name_that_a_terminal_would_obey(self, twinpath, folder, small, tmp_path):
        """In notes, statistics and faults each line is one line, and none has control characters."""
        path = tmp_path / "a\nb\x1b[31m.wav"
        path.write_bytes((folder / "talk.wav").read_bytes())
        for words, shown in (
            ((*small, "--audio", path, "--max-tokens", 1, "--stats"), r"a\nb\x1b[31m.wav: 3 soft tokens"),
            (("see", path, "--out", f"{path}.png"), r"a\nb\x1b[31m.wav.png: PNG"),
            (("inspect", path), r"a b\x1b[31m.wav"),
        ):
            outcome = twinpath(*words)
            said = outcome.out.splitlines()[-1] if words[0] == "see" else outcome.err
            assert shown in said and all(c.isprintable() for c in said.replace("\n", "")), said

    def test_video(self, twinpath, large, tmp_path):
        pytest.importorskip("av")
        from tests.media.test_video import movie

        (tmp_path / "movie.mp4").write_bytes(movie(45))
        words = (*large, "--video", tmp_path / "movie.mp4", "--max-tokens", 1, "--stats")
        one, half = twinpath(*words), twinpath(*words, "--fps", 0.5)
        assert one.status == half.status == 0
        counts = [int(said.err.split("movie.mp4: ")[1].split()[0]) for said in (one, half)]
        assert counts == [5, 3]

    def test_which_frames_of_a_video(self, twinpath, folder, small, tmp_path):
        pytest.importorskip("av")
        from tests.media.test_video import movie

        (tmp_path / "movie.mp4").write_bytes(movie(45))
        for options, n, note in (
            (("--max-frames", 2), 2, "more than 2 frames"),
            (("--frames", "uniform"), 32, ""),
            (("--frames", "uniform", "--max-frames", 2), 2, ""),
        ):
            seen = twinpath("see", tmp_path / "movie.mp4", *options, "--out", tmp_path / "seen.png")
            assert seen.status == 0
            width = min(n, 6) * 432  # six frames in a row
            assert load_image(tmp_path / "seen.png").shape == (-(-n // 6) * 336, width, 3)
            said = twinpath(*small, "--video", tmp_path / "movie.mp4", *options, "--max-tokens", 1, "--stats")
            assert note in said.err
            if n == 32:  # 2016 soft tokens are more than this model's context
                assert (
                    said.status == 2 and "the context holds 512. Use fewer --max-frames than 32" in said.err
                )
            else:
                assert f"movie.mp4: {n} frames, {63 * n} soft tokens" in said.err


class TestTraces:
    def test_encoders_are_in_it(self, twinpath, folder, small, tmp_path):
        media = ("--image", folder / "photo.png", folder / "dot.png", "--audio", folder / "talk.wav")
        words = ("trace", *small, *media, "--prompt", "the", "--activations", "float", "--kv-type", "f32")
        assert twinpath(*words, "--out", tmp_path / "ref.npz").status == 0
        assert twinpath(*words, "--backend", "cpu", "--out", tmp_path / "cpu.npz").status == 0
        with np.load(tmp_path / "ref.npz") as trace:
            meta = json.loads(str(trace["__meta__"]))
            n_soft = [item["soft_tokens"] for item in meta["media"]]
            assert n_soft == [63, 64, 3] and meta["mmproj"] == "tiny-mmproj-F32.gguf"
            assert len(trace["v.projected"]) == 127 and len(trace["v.l_out-1"]) == 9 * 127
            assert len(trace["a.projected"]) == 3 and {"a.mel", "a.conv-1", "a.l_out-1"} <= set(trace.files)
            rows = trace["inp_scaled"]
            start = next(i for i, row in enumerate(rows) if np.array_equal(row, trace["v.projected"][0]))
            assert np.array_equal(rows[start : start + 63], trace["v.projected"][:63])
        outcome = twinpath("diff", tmp_path / "ref.npz", tmp_path / "cpu.npz")
        assert outcome.status == 0 and "budget column: float" in outcome.out
        assert "no budget" not in outcome.out and "v.kqv_out-1" in outcome.out

    def test_a_wrong_encoder_op_is_named(self, twinpath, folder, large, tmp_path):
        words = ("trace", *large, "--image", folder / "photo.png", "--prompt", "the")
        twinpath(*words, "--out", tmp_path / "a.npz")
        arrays = dict(np.load(tmp_path / "a.npz", allow_pickle=False))
        for name in ("v.ffn_geglu-1", "v.pooled", "inp_scaled", "l_out-0"):
            arrays[name] = arrays[name] * 1.5
        np.savez(tmp_path / "b.npz", **arrays)
        outcome = twinpath("diff", tmp_path / "a.npz", tmp_path / "b.npz")
        assert outcome.status == 1 and "is v.ffn_geglu-1, worst at" in outcome.out


class TestInspect:
    def test_a_projector(self, twinpath, folder):
        for words in (("inspect", folder / "mm-26b.gguf"), ("inspect", "--model", folder / "mm-26b.gguf")):
            out = twinpath(*words).out
            assert "gemma4v, 3 layers, width 48, 2 heads of 24, FFN 56, to width 48" in out
            assert "standardised" in out and "it hears nothing" in out
        out = twinpath("inspect", folder / "mm-12b.gguf").out
        assert "gemma4uv, one projection to width 80" in out and "gemma4ua, one projection" in out

    def test_a_model_and_its_projector(self, twinpath, fault, folder):
        model = folder / "e2b" / "model.gguf"
        out = twinpath("inspect", model, "--mmproj", folder / "e2b" / "tiny-mmproj-F32.gguf").out
        assert "architecture gemma4" in out and "clipped matrices" in out and "gemma4a, 2 layers" in out
        assert "80 wide, expected 48" in fault("inspect", model, "--mmproj", folder / "mm-12b.gguf")

    def test_a_shard(self, twinpath, tmp_path):
        path = tiny_mmproj.make_checkpoint(
            tmp_path / "model.safetensors", tiny_mmproj.checkpoint_tensors("26b")
        )
        out = twinpath("inspect", path).out
        assert "gemma4v, 3 layers" in out and "config.json beside it was not used" in out


class TestSee:
    def test_files_of_each_kind(self, twinpath, folder, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        outcome = twinpath("see", folder / "photo.png", "--image-tokens", 70)
        assert outcome == (0, "photo-seen.png: PNG, 432 x 336 pixels\n", "")
        assert load_image(tmp_path / "photo-seen.png").shape == (336, 432, 3)
        assert twinpath("see", folder / "talk.wav", "--out", tmp_path / "t.png").status == 0
        assert load_image(tmp_path / "t.png").shape == (272, 3 * 24, 3)

    def test_what_is_refused(self, fault, folder, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert "text, expected an image, a sound or a video" in fault("see", folder / "text.png")
        assert "no such file" in fault("see", folder / "none.png")
        if Path("/dev/full").exists():
            assert "/dev/full: No space left" in fault("see", folder / "photo.png", "--out", "/dev/full")
        assert "is the file itself" in fault("see", folder / "photo.png", "--out", folder / "photo.png")
        assert list(tmp_path.iterdir()) == []


class TestFaults:
    @pytest.fixture(autouse=True)
    def _nothing_runs(self, monkeypatch):
        """All of this is said before an encoder or the model runs."""

        def never(*given, **options):
            raise AssertionError("something ran")

        monkeypatch.setattr(Lanes, "forward", never)
        monkeypatch.setattr("fastpath.media.encode_image", never)
        monkeypatch.setattr("fastpath.media.encode_audio", never)

    def test_no_projector(self, fault, folder):
        line = fault("--model", folder / "26b" / "model.gguf", "--image", folder / "photo.png")
        assert "26b/model.gguf: images, sounds and videos need the model's encoders" in line
        assert "--mmproj FILE" in line and "none lies beside it" in line

    def test_two_beside_the_model(self, fault, folder, tmp_path):
        for name in ("model.gguf", "mmproj-a.gguf", "mmproj-b.gguf"):
            (tmp_path / name).write_bytes((folder / "26b" / "model.gguf").read_bytes())
        line = fault("--model", tmp_path / "model.gguf", "--image", folder / "photo.png")
        assert "2 lie beside it" in line

    @pytest.mark.parametrize("media", [(), ("--image", "photo.png")])
    def test_a_projector_of_another_model(self, fault, folder, media):
        """Also where no media ask for it."""
        words = [folder / word if "." in word else word for word in media]
        line = fault("--model", folder / "26b" / "model.gguf", "--mmproj", folder / "mm-12b.gguf",
                     "--prompt", "hi", *words)  # fmt: skip
        assert "mm-12b.gguf: soft tokens of images are 80 wide, expected 48" in line
        assert "26b/model.gguf" in line

    def test_swapped_files(self, fault, folder):
        model, projector = folder / "26b" / "model.gguf", folder / "mm-26b.gguf"
        image = ("--image", folder / "photo.png")
        assert "Are the two files swapped?" in fault("--model", model, "--mmproj", model, *image)
        line = fault("--model", projector, "--mmproj", model, *image)
        assert "mm-26b.gguf" in line and "'clip'" in line

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (("--audio", "talk.wav"), "mm-26b.gguf: no encoder of sounds in it"),
            (("--image", "text.png"), "text.png: text, expected an image"),
            (("--image", "empty.png"), "empty.png: empty (0 bytes)"),
            (("--image", "none.png"), "none.png: no such file, expected an image"),
            (("--image", "talk.wav"), "talk.wav: "),
            (("--video", "text.png"), "text.png: text, expected a video"),
            (("--image", "photo.png", "--image-tokens", "71"), "--image-tokens"),
            (("--image", "photo.png", "--fps", "0"), "'0' is not a number above 0"),
            (("--video", "text.png", "--max-frames", "0"), "--max-frames"),
            (("--video", "text.png", "--frames", "best"), "--frames"),
            (("--image",), "--image"),
            (("--image", ""), "the name of the file is empty, expected an image"),
            (("--image", "photo.png", "--raw", "--prompt", "no place"), "Write <|image|> where the file"),
            (("--raw", "--prompt", "a <|image|> b"), "the raw prompt has <|image|>, given: no file"),
            (("--image", "photo.png", "--raw", "--prompt", "<|audio|>"), "has <|audio|>, given: --image"),
            (("--image", "photo.png", "--context", "60"), "the context holds 60. Shorten the text, or"),
            (
                ("--image", "photo.png", "photo.png", "--context", "60"),
                "the context holds 60. Give fewer files",
            ),
            (
                ("--image", "photo.png", "--image-tokens", "140", "--context", "60"),
                "fewer --image-tokens than 140",
            ),
            (("--video", "photo.png", "--frames", "uniform", "--fps", "9"), "--fps 9 with --frames uniform"),
            (("--video", "photo.png"), "photo.png: an image (PNG), expected a video"),
        ],
    )
    def test_media(self, fault, folder, large, words, says):
        words = [folder / word if word.endswith(("png", "wav")) else word for word in words]
        assert says in fault(*large, *words)

    def test_an_empty_projector_name(self, fault, large):
        assert "projector's name is empty" in fault(*large, "--mmproj", "", "--prompt", "hi")

    def test_ids_without_room_for_the_image(self, fault, folder, large, tmp_path):
        line = fault("logits", *large, "--image", folder / "photo.png", "--tokens", "2,5,6",
                     "--out", tmp_path / "x")  # fmt: skip
        assert "63 soft tokens of an image expected" in line and not (tmp_path / "x").exists()


def test_words_load_no_media_library(folder):
    """Who asks in words waits for no decoder."""
    code = (
        "import sys; from fastpath.cli.__main__ import main;"
        f"main(['--model', {str(folder / 'e2b' / 'model.gguf')!r}, '--backend', 'ref', '--prompt', 'hi',"
        "'--max-tokens', '1']);"
        "print([m for m in ('imageio', 'PIL', 'av', 'scipy', 'pillow_heif') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
