"""Image files: from bytes to the canvas that a vision encoder sees.

    load_image    a file of one of FORMATS -> u8[H, W, 3]: first frame, upright, on white
    canvas_size   how large it has to be for a budget of soft tokens
    fit           resized to that

A soft token is a square of 48 x 48 pixels.  An image is stretched, up as well as down, to the largest canvas
whose sides are multiples of 48 and whose area fits the budget; nothing is cropped or padded.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from importlib.util import find_spec
from typing import Any

import numpy as np

from refimpl.frontend.media_file import UNKNOWN, MediaFile, Source, describe, read_media

BUDGETS = (70, 140, 280, 560, 1120)  # soft tokens that an image may cost; the models were trained with these
DEFAULT_BUDGET = 280
TOKEN_PIXELS = 48  # side of the square that becomes one soft token: 3 x 3 patches of 16 x 16

MAX_PIXELS = 1 << 27  # 134 million, above what cameras deliver; to decode that many takes 1.8 GB for a moment
FORMATS = "PNG, JPEG, WebP, GIF, BMP, TIFF, AVIF or HEIF"
EXPECTED = f"an image ({FORMATS}, whatever its name)"

# How files of these formats begin.  Nothing else is given to Pillow: it would run a program on some (EPS).
SIGNATURES = {
    b"\x89PNG\r\n\x1a\n": "PNG", b"\xff\xd8\xff": "JPEG", b"GIF87a": "GIF", b"GIF89a": "GIF", b"BM": "BMP",
    b"II*\0": "TIFF", b"MM\0*": "TIFF", b"II+\0": "TIFF", b"MM\0+": "TIFF",
}  # fmt: skip
BRANDS = {b"avif": "AVIF", b"avis": "AVIF"} | dict.fromkeys(
    (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"), "HEIF"
)

# EXIF orientation: the transposition and the flips (of rows, of columns) that bring an image upright.
UPRIGHT = {
    2: (False, 1, -1), 3: (False, -1, -1), 4: (False, -1, 1), 5: (True, 1, 1),
    6: (True, 1, -1), 7: (True, -1, -1), 8: (True, -1, 1),
}  # fmt: skip
_WITH_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")


def check_budget(budget: int) -> int:
    if budget not in BUDGETS or isinstance(budget, bool):
        raise ValueError(
            f"image tokens: {budget!r}, expected one of {', '.join(map(str, BUDGETS))}. Choose one of them"
        )
    return budget


def canvas_size(height: int, width: int, budget: int = DEFAULT_BUDGET) -> tuple[int, int]:
    """Height and width of the canvas for an image of this size.

        f = sqrt(48^2 budget / (height * width));   each side = 48 * floor(f * side / 48)

    Notes:
        A side that rounds to 0 becomes one token, and the other one as many as the ratio of the sides says,
        within the budget.
    """
    check_budget(budget)
    if height < 1 or width < 1:
        raise ValueError(f"image: {width} x {height} pixels, expected at least 1 x 1. Send another image")
    factor = math.sqrt(budget * TOKEN_PIXELS**2 / (height * width))
    rows = math.floor(factor * height / TOKEN_PIXELS)
    columns = math.floor(factor * width / TOKEN_PIXELS)
    if rows == 0:
        rows, columns = 1, min(width // height, budget)
    elif columns == 0:
        rows, columns = min(height // width, budget), 1
    return rows * TOKEN_PIXELS, columns * TOKEN_PIXELS


def count_image_tokens(height: int, width: int, budget: int = DEFAULT_BUDGET) -> int:
    """Soft tokens of an image of this size."""
    rows, columns = canvas_size(height, width, budget)
    return rows * columns // TOKEN_PIXELS**2


def fit(pixels: np.ndarray, budget: int = DEFAULT_BUDGET) -> np.ndarray:
    """Stretch an image to its canvas, by bicubic interpolation that averages when it shrinks.

    Shapes:
        pixels  u8[H, W, 3]
    Returns:
        u8[h, w, 3], h and w multiples of 48

    Notes:
        Each pixel is rounded to 8 bits again, as in the processors that the models were trained behind.
    """
    from PIL import Image

    height, width = canvas_size(pixels.shape[0], pixels.shape[1], budget)
    if (height, width) == pixels.shape[:2]:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))


def load_image(source: Source, *, name: str | None = None) -> np.ndarray:
    """Decode an image by its content.

    Args:
        source: a path or the bytes of a file
        name: for messages, where the source is bytes
    Returns:
        u8[H, W, 3]: the first frame of an animation, turned upright by its EXIF tag; transparent parts are
        composited over white; 16-bit grey keeps its upper 8 bits
    Raises:
        ValueError: one line that names the file
    """
    file = read_media(source, "an image", name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, on large images and odd metadata
            return _decode(file)
    except MemoryError as error:
        raise file.fault("too large to decode", "an image that fits the memory", "Send it smaller") from error


def format_of(data: bytes) -> str | None:
    """The format, by the first bytes; None: not one of those that are read."""
    if data[4:8] == b"ftyp":  # the main brand; a general one may stand for any that is listed behind it
        size = min(max(16, int.from_bytes(data[:4], "big")), 256)
        listed = [data[at : at + 4] for at in range(16, size, 4)]
        return "AVIF" if b"avif" in listed else BRANDS.get(data[8:12])
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WebP"
    return next((name for start, name in SIGNATURES.items() if data.startswith(start)), None)


def _decode(file: MediaFile) -> np.ndarray:
    import imageio.v3 as imageio
    from PIL.Image import DecompressionBombError

    kind = format_of(file.data)
    if kind is None:
        raise file.fault(describe(file.data), EXPECTED, "Convert it, or send the image itself")
    try:
        opened = imageio.imopen(io.BytesIO(file.data), "r", plugin="pillow")
    except Exception as error:  # decoders raise anything on broken files
        if isinstance(error, ImportError):  # of a part of Pillow, which is there: imageio hides what it said
            raise MemoryError from error
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        if isinstance(error.__cause__, DecompressionBombError):
            number = re.search(r"\d+", str(error.__cause__))
            raise _too_large(file, number[0] if number else "too many") from error
        raise _unreadable(file, kind) from error
    with opened:
        try:
            height, width = opened.properties(index=0).shape[:2]
            if width * height > MAX_PIXELS:
                raise _too_large(file, f"{width} x {height}")
            pixels = _to_rgb(_read(opened, opened.metadata(index=0, exclude_applied=False)))
            # Asked for now: formats that turn the image themselves while decoding drop the tag then.
            orientation = opened.metadata(index=0, exclude_applied=False).get("Orientation")
        except ValueError as error:
            if str(error).startswith(f"{file.name}: "):
                raise
            raise _damaged(file, error) from error
        except MemoryError:
            raise
        except Exception as error:
            raise _damaged(file, error) from error
    if pixels.size == 0:
        raise file.fault("no pixels", "at least 1 x 1", "Send another image")
    return _upright(pixels, orientation)


def _read(opened: Any, metadata: dict[str, Any]) -> np.ndarray:
    """The first frame: with its alpha where it has one, as it is where it has more than 8 bits, else RGB."""
    mode = metadata["mode"]
    if mode in _WITH_ALPHA or ("transparency" in metadata and mode in ("1", "L", "P", "RGB")):
        return opened.read(index=0, mode="RGBA")
    if mode in ("I", "F") or mode.startswith("I;16"):
        return opened.read(index=0)
    return opened.read(index=0, mode="RGB")


def _to_rgb(image: np.ndarray) -> np.ndarray:
    """u8[H, W, 3] from RGB, RGBA or one channel of larger numbers."""
    if image.ndim == 2:
        if image.dtype.kind == "f":
            grey = np.nan_to_num(image, nan=0.0, posinf=255.0, neginf=0.0).clip(0, 255)
        else:  # 16-bit numbers; int32 may hold 8-bit ones too
            shift = 8 if image.dtype == np.uint16 or image.max(initial=0) > 255 else 0
            grey = image.clip(0, 65535).astype(np.uint16) >> shift
        return np.repeat(grey.astype(np.uint8)[:, :, None], 3, axis=2)
    if image.shape[2] == 3:
        return np.ascontiguousarray(image)
    color, alpha = image[:, :, :3].astype(np.uint16), image[:, :, 3:].astype(np.uint16)
    return ((color * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8)


def _upright(pixels: np.ndarray, orientation: Any) -> np.ndarray:
    if orientation not in UPRIGHT:
        return pixels
    transposed, rows, columns = UPRIGHT[orientation]
    pixels = pixels.transpose(1, 0, 2) if transposed else pixels
    return np.ascontiguousarray(pixels[::rows, ::columns])


def _unreadable(file: MediaFile, kind: str) -> ValueError:
    """Of a file that no decoder took: for two formats there may be none."""
    if kind == "HEIF" and find_spec("pillow_heif") is None:
        return file.fault("a HEIF image", "the package pillow-heif", "Install it: pip install twinpath[heif]")
    if kind == "AVIF" and not _reads_avif():
        advice = "Install one: pip install --upgrade --force-reinstall pillow"
        return file.fault("an AVIF image", "a Pillow that was built with AVIF", advice)
    if describe(file.data) != UNKNOWN:  # a text that begins with BM
        return file.fault(describe(file.data), EXPECTED, "Convert it, or send the image itself")
    return _damaged(file, f"not readable as {kind}")


def _reads_avif() -> bool:
    from PIL import features

    return bool(features.check("avif"))


def _damaged(file: MediaFile, error: Exception | str) -> ValueError:
    cause = " ".join(str(error).split())[:120] or type(error).__name__
    return file.fault(f"damaged or incomplete image ({cause})", "a whole one", "Save or send it again")


def _too_large(file: MediaFile, pixels: str) -> ValueError:
    return file.fault(f"{pixels} pixels", f"at most {MAX_PIXELS}", "Make the image smaller")
