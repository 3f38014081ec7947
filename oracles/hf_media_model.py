"""Oracle: a whole Gemma 4 of Hugging Face transformers, text model and encoders, on prompts with media.

    python -m oracles.hf_media_model FOLDER --out trace.npz

FOLDER holds model.gguf, mmproj.gguf, the media, and cases.json: {"ids": {"image": id, ..}, "cases": {name:
{"tokens": ids with placeholders, "media": file stems in order}}}.  Pictures are canvases, unless a case has
a "budget": then transformers' processor resizes them.  Arrays are named `case/l_out-0`.

Classes, injection and masks are transformers' own.  One thing is given to the unified class (12B): the masks
that Gemma4Model makes, where this version of it still has older ones.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

from oracles.needs import need

need("torch", "transformers", "gguf", "PIL")

import numpy as np
import PIL.Image
import torch
import transformers
from transformers.models.gemma4 import image_processing_pil_gemma4 as images
from transformers.models.gemma4 import modeling_gemma4 as modeling
from transformers.models.gemma4_unified import modeling_gemma4_unified as unified

from oracles import hf_media, hf_transformers, protocol


def build(folder: Path, ids: dict[str, int], dtype: torch.dtype) -> torch.nn.Module:
    keys, weights = hf_transformers.read_gguf(folder / "model.gguf")
    media_keys, media_weights = hf_media.read(folder / "mmproj.gguf")
    text = hf_transformers.config_of(keys, weights)
    is_unified = hf_media.is_unified(media_keys)
    text.use_bidirectional_attention = None if text.hidden_size_per_layer_input else "vision"
    parts = {
        "vision_config": hf_media.vision_config(media_keys, media_weights),
        "audio_config": hf_media.audio_config(media_keys, media_weights),
        "image_token_id": ids["image"],
        "audio_token_id": ids["audio"],
        "video_token_id": ids["video"],
        "tie_word_embeddings": text.tie_word_embeddings,
    }
    if is_unified:
        plain = {k: v for k, v in text.to_dict().items() if hasattr(unified.Gemma4UnifiedTextConfig, k)}
        plain.pop("model_type", None)
        given = {"global_head_dim": keys["gemma4.attention.key_length"]}
        kv = keys["gemma4.attention.head_count_kv"]
        sliding = keys["gemma4.attention.sliding_window_pattern"]
        if isinstance(kv, list):
            given["num_global_key_value_heads"] = kv[sliding.index(False)]
        text_config = unified.Gemma4UnifiedTextConfig(**plain, **given)
        text_config._attn_implementation = "eager"
        model = unified.Gemma4UnifiedForConditionalGeneration(
            transformers.Gemma4UnifiedConfig(text_config=text_config, attn_implementation="eager", **parts)
        )
    else:
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        config = transformers.Gemma4Config(text_config=text, **eager, **parts)
        model = modeling.Gemma4ForConditionalGeneration(config)
    model = model.to(dtype).eval()
    fill_text(model, weights, text)
    fill_media(model, media_weights, is_unified)
    return model


def fill_text(model: torch.nn.Module, weights: dict[str, np.ndarray], config) -> None:
    slots = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    with torch.no_grad():
        for name, values in weights.items():
            slot = hf_transformers.slot_of(name)
            if slot is None or hf_transformers.unused_kv(slot, config):
                continue
            slot = slot.replace("model.", "model.language_model.", 1)
            assert tuple(slots[slot].shape) == values.shape, (name, slot)
            slots[slot].copy_(torch.from_numpy(values.copy()))


def fill_media(model: torch.nn.Module, weights: dict[str, np.ndarray], is_unified: bool) -> None:
    slots = dict(model.model.named_parameters()) | dict(model.model.named_buffers())
    with torch.no_grad():
        for name, values in weights.items():
            slot = hf_media.slot_of(name, is_unified).replace("vision_embedder.", "embed_vision.")
            slot = slot if slot in slots else slot.replace(".weight", ".linear.weight")
            value = hf_media.value_of(name, values, tuple(slots[slot].shape), is_unified)
            slots[slot].copy_(value)


def resized(picture: PIL.Image.Image, budget: int) -> np.ndarray:
    """u8[h, w, 3]: what the image processor makes of a picture, put together again from its patches."""
    result = images.Gemma4ImageProcessorPil(max_soft_tokens=budget)(picture, return_tensors="np")
    places = result["image_position_ids"][0]
    is_real = (places != -1).all(axis=-1)
    columns, rows = places[is_real].max(axis=0) + 1
    patches = result["pixel_values"][0][is_real].reshape(rows, columns, 16, 16, 3)
    canvas = patches.transpose(0, 2, 1, 3, 4).reshape(rows * 16, columns * 16, 3)
    return np.rint(255 * canvas).astype(np.uint8)


def inputs_of(folder: Path, case: dict, ids: dict[str, int], is_unified: bool, dtype: torch.dtype) -> dict:
    """What the processors would give: patches padded to one length, mel frames with a mask, token types."""
    tokens = torch.tensor([case["tokens"]])
    kinds = [(tokens == ids[kind]) * number for kind, number in (("image", 1), ("video", 2), ("audio", 3))]
    out = {"input_ids": tokens, "mm_token_type_ids": sum(kinds)}
    order = [token for token in case["tokens"] if token in ids.values()]
    canvases: dict[str, list] = {"image": [], "video": []}
    at = 0
    for stem in case["media"]:
        path = folder / f"{stem}.png"
        if path.exists():
            kind = "image" if order[at] == ids["image"] else "video"
            picture = PIL.Image.open(path)
            canvas = resized(picture, case["budget"]) if "budget" in case else np.asarray(picture)
            patches, places = hf_media.cut(canvas)
            patches, places = torch.from_numpy(patches)[None].to(dtype), torch.from_numpy(places)[None]
            if is_unified:
                patches, places = hf_media.merge_patches(patches, places)
            canvases[kind].append((patches[0], places[0]))
            at += len(patches[0]) // (1 if is_unified else 9)
        else:
            samples = hf_media.read_wav(folder / f"{stem}.wav")
            if is_unified:
                frames = np.pad(samples, (0, -len(samples) % 640)).reshape(1, -1, 640)
            else:
                frames = hf_media.mel_of(samples)[None]
            out["input_features"] = torch.from_numpy(frames).to(dtype)
            out["input_features_mask"] = torch.ones(1, frames.shape[1], dtype=torch.bool)
            at += frames.shape[1] if is_unified else -(-frames.shape[1] // 4)
    for kind, names in (
        ("image", ("pixel_values", "image_position_ids")),
        ("video", ("pixel_values_videos", "video_position_ids")),
    ):
        if canvases[kind]:
            most = max(len(patches) for patches, _ in canvases[kind])
            pad = torch.nn.functional.pad
            out[names[0]] = torch.stack([pad(p, (0, 0, 0, most - len(p))) for p, _ in canvases[kind]])
            out[names[1]] = torch.stack(
                [pad(p, (0, 0, 0, most - len(p)), value=-1) for _, p in canvases[kind]]
            )
    if canvases["video"]:
        out["num_frames_per_video"] = torch.tensor([len(canvases["video"])])
    return out


def masks(model: torch.nn.Module, inputs: dict, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Global layers causal; sliding ones: within the window, causal or in the same block."""
    n = inputs["input_ids"].shape[1]
    return modeling.create_masks_for_vision_model(
        config=model.config.get_text_config(),
        inputs_embeds=torch.zeros(1, n, 1, dtype=dtype),
        attention_mask=None,
        cache=None,
        position_ids=torch.arange(n)[None],
        block_sequence_ids=modeling.get_block_sequence_ids_for_mask(
            inputs["mm_token_type_ids"], torch.device("cpu")
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--rows", type=int, default=0, help="rows to keep of each array, evenly spread (all)")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    table = json.loads((args.folder / "cases.json").read_text())
    arrays: dict[str, np.ndarray] = {}
    with hf_transformers.float32_means(dtype), torch.no_grad():
        model = build(args.folder, table["ids"], dtype)
        is_unified = isinstance(model, unified.Gemma4UnifiedForConditionalGeneration)
        layers = model.model.language_model.layers
        found: dict[str, np.ndarray] = {}
        for i in (0, len(layers) - 1):
            layers[i].register_forward_hook(
                lambda m, a, out, i=i: found.update({f"l_out-{i}": _array(out)}) or None
            )
        for name, case in table["cases"].items():
            inputs = inputs_of(args.folder, case, table["ids"], is_unified, dtype)
            if is_unified:
                inputs["attention_mask"] = masks(model, inputs, dtype)
            found["result_output"] = model(**inputs, use_cache=False).logits[0].numpy()
            for key, array in found.items():
                rows = hf_media.spread(len(array), args.rows if key != "result_output" else args.rows // 2)
                arrays[f"{name}/{key}"] = array[rows]
    meta = {
        "oracle": "hf_media_model",
        "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "command": protocol.command_line(),
        "sha256": [
            hashlib.sha256((args.folder / name).read_bytes()).hexdigest()
            for name in ("model.gguf", "mmproj.gguf")
        ],
        "cases": {name: case["tokens"] for name, case in table["cases"].items()},
        "dtype": args.dtype,
        "rows": args.rows,
        "numpy": np.__version__,
    }
    arrays[protocol.META] = np.array(json.dumps(meta))
    np.savez_compressed(args.out, **arrays)
    print(f"{args.out}: {len(arrays) - 1} arrays, {args.out.stat().st_size / 1e3:.0f} kB")


def _array(out) -> np.ndarray:
    return (out if isinstance(out, torch.Tensor) else out[0]).detach()[0].numpy()


if __name__ == "__main__":
    main()
