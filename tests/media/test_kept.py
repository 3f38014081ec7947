"""Encoder results are kept: by content and budget, bounded, least recently used ones go first."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import refimpl.ops
from fastpath.media import Encoders, Kept
from refimpl.frontend.media_input import MediaInput, Sampling
from refimpl.frontend.media_prompt import MediaPart
from refimpl.media_tensors import load_media
from tests.media import files, tiny_mmproj

PHOTO, DOT = files.png(files.picture("photo-small")), files.png(files.picture("dot"))
TALK = files.wav(files.sound("chirp"))


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    name = "v.position_embd.weight"
    wide = np.resize(tiny_mmproj.tensors_of("e2b")[name], (2, 160, 36))
    path = tmp_path_factory.mktemp("mm") / "mmproj.gguf"
    return load_media(tiny_mmproj.make(path, "e2b", replace={name: wide}))


class Counting(Encoders):
    """Notes what is encoded."""

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self.ran = []

    def run(self, kind, piece, trace=None):
        self.ran.append((kind, piece.shape))
        return super().run(kind, piece, trace)


def encode(encoders, kind, data, **options):
    return encoders.encode(encoders.open(kind, data, **({"budget": 70} | options)))


def test_the_same_content_is_encoded_once(media):
    """Whatever its name, alone or in a list; another budget or another kind is another thing."""
    encoders = Counting(media, refimpl.ops)
    first = encode(encoders, "image", PHOTO, name="a.png")
    again = encode(encoders, "image", PHOTO, name="b.dat")
    assert again.rows[0].tobytes() == first.rows[0].tobytes() and again.part == first.part
    encode(encoders, "image", DOT)
    encode(encoders, "image", PHOTO)
    assert len(encoders.ran) == 2
    assert encode(encoders, "image", PHOTO, budget=140).part.counts != first.part.counts
    encode(encoders, "audio", TALK)
    encode(encoders, "audio", TALK, budget=280)  # which a sound has no use for
    assert len(encoders.ran) == 4 and encoders.kept.hits == 3


def test_another_choice_of_frames_is_another_thing(media):
    pytest.importorskip("av")
    from tests.media.test_video import movie

    encoders, data = Counting(media, refimpl.ops), movie(25, codec="mpeg4")
    for sampling, n in ((Sampling(), 3), (Sampling(fps=2), 5), (Sampling(max_frames=1), 1), (Sampling(), 3)):
        encoded = encode(encoders, "video", data, sampling=sampling)
        assert len(encoded.rows) == len(encoded.part.counts) == n
    assert len(encoders.ran) == 9 and encoders.kept.hits == 1
    opened = encoders.open("video", data, sampling=Sampling(rule="uniform"))
    assert len(opened.input.pieces) == 25


def test_opened_twice_before_it_is_encoded(media):
    encoders = Counting(media, refimpl.ops)
    opened = [encoders.open("image", PHOTO, budget=70) for _ in range(2)]
    rows = [encoders.encode(each).rows[0] for each in opened]
    assert len(encoders.ran) == 1 and rows[0] is rows[1]


def test_what_is_known_is_not_even_decoded(media, monkeypatch):
    encoders = Encoders(media, refimpl.ops)
    want = encode(encoders, "image", PHOTO)

    def never(*given, **options):
        raise AssertionError("decoded")

    monkeypatch.setattr("fastpath.media.open_input", never)
    opened = encoders.open("image", PHOTO, budget=70)
    assert opened.input.part == want.part and encoders.encode(opened).rows is want.rows


def test_notes_name_the_file_that_was_given(media):
    encoders = Encoders(media, refimpl.ops)
    long = files.wav(files.sound("long"))
    for name in ("first.wav", "second.wav"):
        (note,) = encoders.open("audio", long, name=name).input.notes
        assert note.startswith(f"{name}: ")
        encoders.kept.put(
            encoders.open("audio", long, name=name).key,
            encoders.open("audio", long, name=name).input,
            (np.zeros((750, 48), np.float32),),
        )


def test_nobody_can_change_what_is_kept(media):
    rows = encode(Encoders(media, refimpl.ops), "image", PHOTO).rows[0]
    with pytest.raises(ValueError, match="read-only"):
        rows[0, 0] = 1


def test_a_trace_sees_every_value(media):
    """Though the result is known."""
    encoders, seen = Encoders(media, refimpl.ops), []
    opened = encoders.open("image", PHOTO, budget=70)
    encoders.encode(opened)
    encoders.encode(opened, trace=lambda name, array: seen.append(name))
    assert seen[0] == "v.patch_embd" and seen[-1] == "v.projected"


def test_nan_in_an_encoder_is_said(media, tmp_path):
    name = "mm.input_projection.weight"
    bad = tiny_mmproj.tensors_of("e2b")[name].copy()
    bad[3, 4] = np.nan
    broken = load_media(tiny_mmproj.make(tmp_path / "bad.gguf", "e2b", replace={name: bad}))
    encoders = Encoders(broken, refimpl.ops)
    with pytest.raises(ValueError, match=r"bad\.gguf: NaN or infinity in the soft tokens of d\.png"):
        encoders.run_checked("image", tiny_mmproj.canvas("square"), "d.png")


# -- the bound ----------------------------------------------------------------------------------------


def entry(n):
    rows = (np.zeros((n, 4), np.float32),)
    return MediaInput("x", MediaPart("image", (n,)), ()), rows


def key(name):
    return "image", name.encode(), 70.0


def test_the_least_recently_used_goes_first():
    kept = Kept(16 * 10)
    for name in "abc":
        kept.put(key(name), *entry(3))
    assert kept.get(key("a")) is not None
    kept.put(key("d"), *entry(3))
    assert [kept.get(key(name)) is not None for name in "abcd"] == [True, False, True, True]
    assert kept.nbytes == 3 * 3 * 16 and len(kept) == 3


def test_bytes_are_bounded_and_counted():
    rng, kept = np.random.default_rng(1), Kept(16 * 50)
    for _ in range(500):
        kept.put(key(str(rng.integers(0, 30))), *entry(int(rng.integers(1, 60))))
        assert kept.nbytes <= kept.max_bytes
        assert kept.nbytes == sum(rows[0].nbytes for _, rows in kept._entries.values())
    kept.put(key("huge"), *entry(51))
    assert len(kept) == 0 and kept.nbytes == 0


def test_threads():
    kept = Kept(16 * 40)

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(300):
            name = key(str(rng.integers(0, 20)))
            if kept.get(name) is None:
                kept.put(name, *entry(int(rng.integers(1, 9))))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert kept.nbytes == sum(rows[0].nbytes for _, rows in kept._entries.values()) <= kept.max_bytes
    assert kept.hits + kept.misses == 1200
