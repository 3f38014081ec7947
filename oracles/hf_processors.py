"""Oracle: the image and audio processors of Hugging Face transformers, on a folder of files.

    python -m oracles.hf_processors FOLDER --kind image --out golden/media/image-processor.npz
    python -m oracles.hf_processors FOLDER --kind audio --out golden/media/audio-processor.npz

For every FOLDER/*.png: the canvas for some budgets, a sample of its pixels; for every *.wav: the log-mel
energies (all frames, or some of a long sound) and the numbers of soft tokens.  Also the sizes and numbers of
tokens that transformers computes for many sizes of images and sounds.
The processor with Pillow is run: torchvision's resizes with the same filter and rounds otherwise.
"""

from __future__ import annotations

import argparse
import json
import types
from pathlib import Path

from oracles.needs import need

need("torch", "transformers", "PIL")

import numpy as np
import PIL
import PIL.Image
import transformers
from transformers.models.gemma4 import feature_extraction_gemma4 as sounds
from transformers.models.gemma4 import image_processing_pil_gemma4 as images
from transformers.models.gemma4 import processing_gemma4 as processing
from transformers.models.gemma4_unified import feature_extraction_gemma4_unified as unified

from oracles import protocol

SAMPLE = 700  # pixels that are kept of a canvas
MEL_FRAMES = 18  # frames that are kept of a sound; of the float32 run every sixth of them


def spread(n: int, k: int) -> np.ndarray:
    return np.unique(np.linspace(0, n - 1, min(n, k)).astype(int))


def image_arrays(path: Path) -> dict[str, np.ndarray]:
    picture = PIL.Image.open(path)
    budgets = (70, 280, 1120) if max(picture.size) <= 1000 else (70, 280)
    out = {}
    for budget in budgets:
        processor = images.Gemma4ImageProcessorPil(max_soft_tokens=budget)
        result = processor(picture, return_tensors="np")
        places = result["image_position_ids"][0]
        real = (places != -1).all(axis=-1)
        patches = result["pixel_values"][0][real]
        columns, rows = places[real].max(axis=0) + 1
        canvas = patches.reshape(rows, columns, 16, 16, 3).transpose(0, 2, 1, 3, 4)
        canvas = canvas.reshape(rows * 16 * columns * 16, 3)
        key = f"image/{path.stem}/{budget}"
        at = spread(len(canvas), SAMPLE)
        out[f"{key}/size"] = np.array([rows * 16, columns * 16])
        out[f"{key}/pixels"] = np.rint(255 * canvas[at]).astype(np.uint8)
        out[f"{key}/sum"] = np.rint(255.0 * canvas.astype(np.float64)).sum(axis=0)
        out[f"{key}/tokens"] = np.array(int(result["num_soft_tokens_per_image"][0]))
    return out


def read_wav(path: Path) -> np.ndarray:
    data = path.read_bytes()
    return np.frombuffer(data[data.index(b"data") + 8 :], "<f4")


def sound_arrays(path: Path) -> dict[str, np.ndarray]:
    samples = read_wav(path)
    extractor = sounds.Gemma4AudioFeatureExtractor()
    result = extractor([samples], return_tensors="np")  # one array alone is padded along the wrong axis
    mel = result["input_features"][0][result["input_features_mask"][0]]
    # the same in float64: `pad` casts to float32, and the transform stays there
    wide = samples[:480_000].astype(np.float64)
    exact, _ = extractor._extract_spectrogram(wide, np.ones(len(wide), int))
    at = spread(len(mel), MEL_FRAMES)
    frames = unified.Gemma4UnifiedAudioFeatureExtractor()(samples[:480_000], return_tensors="np")
    key = f"sound/{path.stem}"
    return {
        f"{key}/frames": np.array(len(mel)),
        f"{key}/mel": mel[at[::6]],
        f"{key}/mel-f64": exact[at].astype(np.float32),
        f"{key}/tokens": np.array(int(result["input_features_mask"][0][::2][::2].sum())),
        f"{key}/waveform-tokens": np.array(len(frames["input_features"][0])),
        f"{key}/waveform-last": frames["input_features"][0][-1],
    }


def sizes() -> dict[str, np.ndarray]:
    """Rows: height, width, budget, height and width of the canvas."""
    rng = np.random.default_rng(1)
    sides = np.unique(np.concatenate([np.arange(1, 9), (2 ** rng.uniform(3, 13, 24)).astype(int)]))
    rows = [
        (h, w, budget, *images.get_aspect_ratio_preserving_size(h, w, 16, budget * 9, 3))
        for h in sides.tolist()
        for w in sides.tolist()
        for budget in (70, 140, 280, 560, 1120)
    ]
    return {"sizes": np.array(rows, np.int32)}


def counts() -> dict[str, np.ndarray]:
    """Rows: samples, soft tokens."""
    lengths = [*range(0, 2000, 7), 160, 161, 800, 801, 16000, 16001, 319840, 479520, 479521, 480000, 900000]
    me = types.SimpleNamespace(feature_extractor=sounds.Gemma4AudioFeatureExtractor(), audio_seq_length=750)
    count = processing.Gemma4Processor._compute_audio_num_tokens
    return {"counts": np.array([(n, count(me, np.zeros(n), 16000)) for n in lengths], np.int32)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=["image", "audio"], required=True)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    arrays = sizes() if args.kind == "image" else counts()
    for path in sorted(args.folder.glob("*.png" if args.kind == "image" else "*.wav")):
        arrays |= image_arrays(path) if args.kind == "image" else sound_arrays(path)
    arrays[protocol.META] = np.array(
        json.dumps(
            {
                "oracle": "hf_processors",
                "version": f"transformers {transformers.__version__}, Pillow {PIL.__version__}",
                "command": protocol.command_line(),
                "numpy": np.__version__,
            }
        )
    )
    np.savez_compressed(args.out, **arrays)
    print(f"{args.out}: {len(arrays) - 1} arrays, {args.out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
