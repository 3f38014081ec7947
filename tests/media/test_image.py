"""Images: decoding by content, sizes, pixels as transformers has them, files that are not what they seem."""

import io
import struct
import time
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from refimpl.frontend import image
from tests.media import files
from tests.oracle import goldens
from tests.tolerances import PIXEL_STEPS

RNG = np.random.default_rng(5)
NOISE = RNG.integers(0, 256, (20, 30, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def golden():
    return goldens.read("media/image-processor").arrays


def encode(picture: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def header_only(width: int, height: int) -> bytes:
    """A PNG that promises many pixels and holds none."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize("name", files.PICTURES)
def test_canvas_equals_transformers(name, golden):
    pixels = image.load_image(files.png(files.picture(name)))
    assert np.array_equal(pixels, files.picture(name))
    budgets = [
        key.split("/")[2] for key in golden if key.startswith(f"image/{name}/") and key.endswith("size")
    ]
    assert len(budgets) >= 2
    for budget in budgets:
        key = f"image/{name}/{budget}"
        canvas = image.fit(pixels, int(budget))
        assert canvas.shape[:2] == tuple(golden[f"{key}/size"])
        assert image.count_image_tokens(*pixels.shape[:2], int(budget)) == golden[f"{key}/tokens"]
        flat = canvas.reshape(-1, 3).astype(int)
        kept = golden[f"{key}/pixels"].astype(int)
        at = np.unique(np.linspace(0, len(flat) - 1, len(kept)).astype(int))
        assert np.abs(flat[at] - kept).max() <= PIXEL_STEPS
        assert np.abs(flat.sum(axis=0) - golden[f"{key}/sum"]).max() <= PIXEL_STEPS * len(flat)


def test_sizes_equal_transformers(golden):
    for height, width, budget, *size in golden["sizes"].tolist():
        assert image.canvas_size(height, width, budget) == tuple(size)


# width x height: (canvas and tokens for 70, 280, 1120), as measured on transformers (known-faults T3)
TABLE = {
    (1, 1): ("384x384 64", "768x768 256", "1584x1584 1089"),
    (640, 480): ("432x336 63", "912x672 266", "1824x1344 1064"),
    (4032, 3024): ("432x336 63", "912x672 266", "1824x1344 1064"),
    (100, 75): ("432x336 63", "912x672 266", "1824x1344 1064"),
    (1920, 1080): ("528x288 66", "1056x576 264", "2112x1200 1100"),
    (1080, 1920): ("288x528 66", "576x1056 264", "1200x2112 1100"),
    (1200, 1000): ("432x336 63", "864x720 270", "1728x1440 1080"),
    (1000, 10): ("3360x48 70", "8016x48 167", "16032x144 1002"),
    (10, 1000): ("48x3360 70", "48x8016 167", "144x16032 1002"),
    (20000, 1): ("3360x48 70", "13440x48 280", "53760x48 1120"),
    (5000, 16): ("3360x48 70", "13440x48 280", "28368x48 591"),
    (281, 1): ("3360x48 70", "13440x48 280", "26880x48 560"),
    (280, 1): ("3360x48 70", "13440x48 280", "26880x96 1120"),
}


@pytest.mark.parametrize("size", TABLE)
def test_table_of_sizes(size):
    width, height = size
    for budget, want in zip((70, 280, 1120), TABLE[size]):
        h, w = image.canvas_size(height, width, budget)
        assert f"{w}x{h} {image.count_image_tokens(height, width, budget)}" == want


def test_budgets_only_grow():
    for height, width in [(480, 640), (1, 1), (3, 1000), (1000, 10), (7, 7000)]:
        counts = [image.count_image_tokens(height, width, budget) for budget in image.BUDGETS]
        assert counts == sorted(counts)
        assert all(n <= budget for n, budget in zip(counts, image.BUDGETS))


@pytest.mark.parametrize("budget", [0, 1, 300, 281, True, None])
def test_other_budgets_are_refused(budget):
    with pytest.raises(ValueError, match="expected one of 70, 140, 280, 560, 1120"):
        image.canvas_size(10, 10, budget)


# --- decoding ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "WEBP", "GIF", "JPEG"])
def test_formats_by_content(kind):
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 98, "subsampling": 0}}.get(kind, {})
    smooth = files.picture("photo-small")
    got = image.load_image(encode(Image.fromarray(smooth), kind, **options), name="wrong.txt")
    assert got.shape == smooth.shape
    assert np.abs(got.astype(int) - smooth).mean() < {"GIF": 20, "JPEG": 3}.get(kind, 1e-9)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_first_frame_of_an_animation(kind):
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:])
    assert image.load_image(data)[4, 4].tolist() == pytest.approx([255, 0, 0], abs=2)


def test_transparency_is_on_white():
    for mode in ("RGBA", "LA"):
        values = RNG.integers(0, 256, (9, 7, len(mode)), dtype=np.uint8)
        values[..., -1] = 0
        assert (image.load_image(encode(Image.fromarray(values))) == 255).all()
    half = np.full((2, 2, 4), (0, 100, 200, 128), np.uint8)
    assert image.load_image(encode(Image.fromarray(half)))[0, 0].tolist() == [127, 177, 227]
    palette = Image.fromarray(NOISE).quantize(4)
    data = encode(palette, transparency=bytes([0, 0, 0, 0]))
    assert (image.load_image(data) == 255).all()
    grey = encode(Image.new("L", (3, 3), 17), transparency=17)
    assert (image.load_image(grey) == 255).all()


def test_sixteen_bits_keep_all_levels():
    ramp = (np.arange(256, dtype=np.uint16) * 257)[None].repeat(3, axis=0)
    got = image.load_image(encode(Image.fromarray(ramp)))
    assert np.array_equal(got[0, :, 0], np.arange(256))
    big_endian = encode(Image.frombytes("I;16B", (256, 3), ramp.astype(">u2").tobytes()), "TIFF")
    assert np.array_equal(image.load_image(big_endian), got)
    wide = encode(Image.fromarray(ramp.astype(np.int32)), "TIFF")
    assert np.array_equal(image.load_image(wide), got)


@pytest.mark.parametrize(
    "mode, kind", [("1", "PNG"), ("L", "PNG"), ("P", "PNG"), ("P", "GIF"), ("CMYK", "TIFF"), ("F", "TIFF"),
                   ("PA", "TIFF"), ("I", "TIFF")]
)  # fmt: skip
def test_modes(mode, kind):
    source = Image.fromarray(NOISE)
    picture = source.convert("P").convert("PA") if mode == "PA" else source.convert(mode)
    got = image.load_image(encode(picture, kind))
    want = np.asarray(picture.convert("L" if mode in "IF" else "RGB"))
    assert np.abs(got[..., 0].astype(int) - (want if want.ndim == 2 else want[..., 0])).max() <= 1


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(0, 10))
def test_upright(orientation, kind):
    picture = Image.fromarray(files.picture("photo-small")[:40])
    exif = picture.getexif()
    exif[0x112] = orientation
    data = encode(picture, kind, exif=exif)
    assert np.array_equal(
        image.load_image(data), np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    )


@pytest.mark.parametrize("shape", [(1, 1000), (3, 1000), (1, 1), (3, 3), (1000, 3)])
def test_axes_are_not_guessed(shape):
    pixels = RNG.integers(0, 256, (*shape, 3), dtype=np.uint8)
    assert np.array_equal(image.load_image(encode(Image.fromarray(pixels))), pixels)


def test_five_colors_stay_apart():
    for color in ((255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0)):
        canvas = image.fit(image.load_image(encode(Image.new("RGB", (64, 64), color))))
        assert canvas.shape == (768, 768, 3) and (canvas == color).all()


# --- what is no image ------------------------------------------------------------------------------------

JPEG = encode(Image.fromarray(files.picture("photo")), "JPEG")
BAD = {
    "empty": (b"", "empty"),
    "text": (b"hello, I am a text", "text, expected an image"),
    "page": (b"<!DOCTYPE html><html>not found</html>", "a web page"),
    "bomb": (header_only(100_000, 100_000), "10000000000 pixels, expected at most"),
    "large": (header_only(12_000, 12_000), "12000 x 12000 pixels, expected at most"),
    "promise": (header_only(3000, 3000), "damaged or incomplete"),
    "cut": (JPEG[: len(JPEG) // 2], "damaged or incomplete"),
    "cut-png": (encode(Image.fromarray(NOISE))[:400], "damaged or incomplete"),
    "head": (JPEG[:10], "expected an image"),
    "noise": (bytes(RNG.integers(0, 256, 5000, dtype=np.uint8)), "expected an image"),
    "no-pixels": (header_only(0, 5), "expected an image"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name):
    data, message = BAD[name]
    before = time.perf_counter()
    with pytest.raises(ValueError, match=message) as caught:
        image.load_image(data, name="holiday.png")
    assert time.perf_counter() - before < 2
    assert str(caught.value).startswith("holiday.png: ") and "\n" not in str(caught.value)


def test_random_damage_is_one_line_or_an_image():
    """Whatever a decoder makes of broken bytes, it is no other exception."""
    rng = np.random.default_rng(9)
    for kind in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"):
        whole = np.frombuffer(encode(Image.fromarray(NOISE), kind), np.uint8)
        for _ in range(25):
            broken = whole.copy()
            broken[rng.integers(0, len(broken), rng.integers(1, 12))] = rng.integers(0, 256)
            try:
                assert (
                    image.load_image(broken[: rng.integers(8, len(broken) + 1)].tobytes()).dtype == np.uint8
                )
            except ValueError as fault:
                assert "\n" not in str(fault)


def test_paths(tmp_path):
    file = tmp_path / "Grün 1.txt"
    file.write_bytes(encode(Image.fromarray(NOISE)))
    assert np.array_equal(image.load_image(str(file)), NOISE)
    with pytest.raises(ValueError, match="no such file"):
        image.load_image(tmp_path / "none.png")
    with pytest.raises(ValueError, match="a folder"):
        image.load_image(tmp_path)
