"""Images: decoding by content, sizes, pixels as transformers has them, files that are not what they seem."""

import io
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps, features

from refimpl.frontend import image
from tests.media import files
from tests.oracle import goldens
from tests.tolerances import PIXEL_STEPS

ROOT = Path(__file__).parents[2]
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


def test_lines_of_pixels():
    """The longest shapes: as many soft tokens as the budget has, in one row or column."""
    for shape, canvas in (((1, 100_000), (48, 13440)), ((100_000, 1), (13440, 48))):
        data = encode(Image.fromarray(RNG.integers(0, 256, shape, dtype=np.uint8)))
        assert image.fit(image.load_image(data)).shape == (*canvas, 3)


def test_palette_with_transparency():
    """Half transparent entries are mixed with white, one by one: PNG and GIF, whole palettes and 1 bit."""
    palette = Image.new("P", (4, 1))
    palette.putpalette([200, 0, 0, 0, 100, 0, 0, 0, 50, 9, 9, 9])
    palette.putdata([0, 1, 2, 3])
    mixed = image.load_image(encode(palette, transparency=bytes([255, 0, 128, 51])))
    by_hand = [[200, 0, 0], [255, 255, 255], [127, 127, 152], [206, 206, 206]]
    assert np.abs(mixed[0].astype(int) - by_hand).max() <= 1
    assert image.load_image(encode(palette, "GIF", transparency=1))[0].tolist() == [
        [200, 0, 0], [255, 255, 255], [0, 0, 50], [9, 9, 9],
    ]  # fmt: skip
    bits = Image.fromarray(np.array([[False, True]]))
    assert image.load_image(encode(bits, transparency=0))[0].tolist() == [[255] * 3, [255] * 3]


def test_photographs_for_print():
    """CMYK and YCCK as JPEG hold inverted numbers, as TIFF plain ones."""
    flat = Image.new("CMYK", (16, 16), (255, 0, 0, 51))  # cyan, a fifth of black
    for kind, options in (("JPEG", {"quality": 100}), ("TIFF", {})):
        assert (
            np.abs(image.load_image(encode(flat, kind, **options))[8, 8].astype(int) - (0, 204, 204)).max()
            < 3
        )


@pytest.mark.parametrize("mode", ["I;16", "I;16L", "I;16B"])
def test_sixteen_bit_tiff(mode):
    ramp = np.arange(0, 65536, 257, dtype=np.uint16)
    stored = ramp.astype(">u2" if mode == "I;16B" else "<u2").tobytes()
    data = encode(Image.frombytes("I;16B" if mode == "I;16B" else "I;16", (256, 1), stored), "TIFF")
    assert np.array_equal(image.load_image(data)[0, :, 1], np.arange(256))


# --- HEIF and AVIF: what phones write ----------------------------------------------------------------------


@pytest.fixture(params=["AVIF", "HEIF"])
def modern(request):
    """modern(picture, **options) -> bytes of a file in one of the two formats, lossy but close."""
    if request.param == "HEIF":
        plugin = pytest.importorskip("pillow_heif", reason="pillow-heif is not installed: twinpath[heif]")
        plugin.register_heif_opener()
    elif not features.check("avif"):
        pytest.skip("this Pillow was built without AVIF")
    return lambda picture, **options: encode(picture, request.param, quality=98, **options)


def test_modern_formats(modern):
    smooth = files.picture("photo-small")
    got = image.load_image(modern(Image.fromarray(smooth)), name="photo.jpg")
    assert got.shape == smooth.shape and np.abs(got.astype(int) - smooth).mean() < 12  # of fine colored grain


def test_modern_formats_are_on_white(modern):
    clear = np.dstack([NOISE, np.zeros(NOISE.shape[:2], np.uint8)])
    assert (image.load_image(modern(Image.fromarray(clear))) == 255).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_modern_formats_are_upright(orientation, modern):
    """The turn is a property of the file there; decoders apply it, and it is not applied twice."""
    quarters = np.zeros((40, 60, 3), np.uint8)
    quarters[:20, :30], quarters[:20, 30:], quarters[20:, :30] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    picture = Image.fromarray(quarters)
    exif = picture.getexif()
    exif[0x112] = orientation
    want = np.asarray(ImageOps.exif_transpose(_with_exif(picture, exif))).astype(int)
    got = image.load_image(modern(picture, exif=exif.tobytes()))
    assert got.shape == want.shape
    for y in (0.25, 0.75):
        for x in (0.25, 0.75):
            at = int(y * want.shape[0]), int(x * want.shape[1])
            assert np.abs(got[at] - want[at]).max() < 30


def _with_exif(picture: Image.Image, exif: Image.Exif) -> Image.Image:
    """The same picture, read from a file that has the tag."""
    return Image.open(io.BytesIO(encode(picture, exif=exif)))


def test_modern_formats_damaged(modern):
    whole = modern(Image.fromarray(NOISE))
    for n in (20, len(whole) // 2, len(whole) - 20):
        with pytest.raises(ValueError, match=r"a\.heic: damaged or incomplete") as caught:
            image.load_image(whole[:n], name="a.heic")
        assert "\n" not in str(caught.value)


def test_formats_without_a_decoder(monkeypatch):
    """One line says what is missing and how to get it, whatever is installed here."""
    heads = {
        "HEIF": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
        "AVIF": b"\0\0\0\x18ftypmif1\0\0\0\0avifmiaf",
    }
    assert [image.format_of(head) for head in heads.values()] == list(heads)
    monkeypatch.setattr(image, "find_spec", lambda name: None)
    monkeypatch.setattr(features, "check", lambda name: False)
    for kind, says in (
        ("HEIF", "p.heic: a HEIF image, expected the package pillow-heif. Install it: "
                 "pip install twinpath[heif]"),
        ("AVIF", "p.heic: an AVIF image, expected a Pillow that was built with AVIF. Install one: "
                 "pip install --upgrade --force-reinstall pillow"),
    ):  # fmt: skip
        with pytest.raises(ValueError) as caught:
            image.load_image(heads[kind] + bytes(50), name="p.heic")
        assert str(caught.value) == says


# --- what is no image ------------------------------------------------------------------------------------

GIF_OF_NOTHING = b"\x80\0\0" + bytes(6) + b"," + bytes(4) + b"\x01\0\x01\0\0\x02\x02\x4c\x01\0;"


def bmp_header(width: int, height: int) -> bytes:
    return (
        b"BM"
        + struct.pack("<IHHI", 54, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, *[0] * 6)
    )


def tiff_header(width: int, height: int) -> bytes:
    tags = ((256, width), (257, height), (258, 8), (259, 1), (262, 1), (273, 200), (278, height), (279, 100))
    listed = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + listed + bytes(200)


def text_bomb() -> bytes:
    """A small PNG with a comment of 100 MB."""
    whole, comment = encode(Image.fromarray(NOISE)), b"zTXta\0\0" + zlib.compress(bytes(100 << 20))
    chunk = struct.pack(">I", len(comment) - 4) + comment + struct.pack(">I", zlib.crc32(comment))
    return whole[:33] + chunk + whole[33:]


def test_bombs_take_little_memory():
    """In a process that may have 300 MB more than it needs for a small picture."""
    pytest.importorskip("resource")
    code = (
        "import resource; from refimpl.frontend.image import load_image;"
        "from tests.media import test_image as t;"
        "load_image(t.encode(t.Image.fromarray(t.NOISE)));"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize();"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20),) * 2);\n"
        "for name, (data, message) in t.BAD.items():\n"
        "    try: load_image(data); print(name, 'was read')\n"
        "    except ValueError as fault: assert 'fits the memory' not in str(fault), name\n"
    )
    if not Path("/proc/self/statm").exists():
        pytest.skip("this system does not say how much memory a process has")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0 and done.stdout == "", done.stdout + done.stderr


@pytest.mark.parametrize("step", ["imopen", "_read"])
def test_no_memory_is_no_damage(monkeypatch, step):
    def refuse(*args, **options):
        error = MemoryError()
        raise error if step == "_read" else OSError("cannot handle it") from error

    monkeypatch.setattr("imageio.v3.imopen" if step == "imopen" else "refimpl.frontend.image._read", refuse)
    with pytest.raises(ValueError, match="too large to decode, expected an image that fits the memory"):
        image.load_image(encode(Image.fromarray(NOISE)))


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
    "head": (JPEG[:10], "damaged or incomplete"),
    "signature": (b"\x89PNG\r\n\x1a\n", "damaged or incomplete"),
    "svg": (b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>', "text, expected an image"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "text, expected an image"),
    "bm": (b"BMW is a maker of cars, BM is how bitmaps begin", "text, expected an image"),
    "icon": (encode(Image.fromarray(NOISE), "ICO"), "bytes of no known format"),
    "gif-bomb": (
        b"GIF89a" + struct.pack("<HH", 65535, 65535) + GIF_OF_NOTHING,
        "4294836225 pixels, expected",
    ),
    "bmp-bomb": (bmp_header(100_000, 100_000), "10000000000 pixels, expected at most"),
    "bmp-promise": (bmp_header(7000, 7000), "damaged or incomplete"),
    "tiff-bomb": (tiff_header(100_000, 100_000), "10000000000 pixels, expected at most"),
    "text-bomb": (text_bomb(), "damaged or incomplete"),
    "noise": (bytes(RNG.integers(0, 256, 5000, dtype=np.uint8)), "expected an image"),
    "no-pixels": (header_only(0, 5), "damaged or incomplete"),
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


def test_a_part_of_pillow_that_is_not_loaded_is_no_damage(monkeypatch):
    """What imageio says where memory does not suffice to load it."""
    import imageio.v3

    def refuse(*given, **options):
        raise ImportError("The `pillow` plugin is not installed.")

    monkeypatch.setattr(imageio.v3, "imopen", refuse)
    with pytest.raises(ValueError, match="fits the memory"):
        image.load_image(files.png(files.picture("dot")))
