"""Projector files of three makes, and those that are wrong."""

import json
import os
import struct
from dataclasses import replace

import numpy as np
import pytest

import quant
from quant.safetensors import open_safetensors
from refimpl.config import Config
from refimpl.media_tensors import is_projector, load_media
from tests import tiny
from tests.media import tiny_mmproj
from tests.media.conftest import all_inputs, soft_tokens
from tests.tolerances import ORACLE_F32_ABS


@pytest.fixture
def make(tmp_path):
    return lambda family="e2b", **options: tiny_mmproj.make(tmp_path / "mm.gguf", family, **options)


def same(one, other) -> None:
    for name in all_inputs(one):
        assert np.array_equal(soft_tokens(one, name), soft_tokens(other, name)), name


@pytest.mark.parametrize("family", ["e2b", "e4b"])
def test_names_of_ollama(family, make, media):
    same(media(family), load_media(make(family, ollama=True)))


def test_file_of_ollama_with_the_model_in_it(tmp_path, media):
    """One file holds the text model and its encoders, with keys under the model's own name."""
    text = quant.open_gguf(tiny.make(tmp_path / "text.gguf", "e2b"))
    encoders = quant.open_gguf(tiny_mmproj.make(tmp_path / "mm.gguf", "e2b", ollama=True))
    renamed = {
        k.replace("clip.", "gemma4.", 1): v
        for k, v in encoders.metadata.items()
        if k.startswith("clip.") and "projector_type" not in k
    }
    both = quant.write_gguf(
        tmp_path / "both.gguf", dict(text.metadata) | renamed, dict(text.tensors) | dict(encoders.tensors)
    )[0]
    same(media("e2b"), load_media(both))


@pytest.mark.parametrize("family", tiny_mmproj.ENCODERS)
def test_sizes_from_the_weights_alone(family, make, media):
    """Without keys the shapes say all; the unified model's zeros are no sizes."""
    keys = {k: None for k in tiny_mmproj.metadata(family) if k.startswith("clip.")}
    bare = load_media(make(family, keys=keys))
    assert bare.audio is None or bare.audio[0] == media(family).audio[0]
    assert replace(bare.vision[0], eps=media(family).vision[0].eps) == media(family).vision[0]
    for name in all_inputs(bare):
        error = np.abs(soft_tokens(bare, name) - soft_tokens(media(family), name)).max()
        assert error < ORACLE_F32_ABS  # a key's epsilon is the float32 next to 1e-6


@pytest.mark.parametrize("fmt, limit", [("F16", 0.05), ("BF16", 0.2)])
@pytest.mark.parametrize("family", tiny_mmproj.ENCODERS)
def test_half_precision_weights(family, fmt, limit, make, media):
    half = load_media(make(family, formats={"*": fmt}))
    for name in all_inputs(half):
        error = np.abs(soft_tokens(half, name) - soft_tokens(media(family), name)).max()
        assert 0 < error < limit


def test_quantised_weights_run(make, media):
    quantised = load_media(make("12b", formats={"*patch_embd*": "Q8_0"}))
    got, want = (soft_tokens(m, "odd", np.float64) for m in (quantised, media("12b")))
    assert 0 < np.abs(got - want).max() < 0.2
    integers = soft_tokens(quantised, "odd", activations="int8")
    assert 0 < np.abs(integers - got).max() < 0.2


# --- checkpoints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["model.", "model.encoder.", ""])
@pytest.mark.parametrize("family", ["e2b", "26b"])
def test_checkpoint(family, prefix, tmp_path, media):
    tensors = tiny_mmproj.checkpoint_tensors(family, prefix)
    tensors[f"{prefix}language_model.embed_tokens.weight"] = np.ones((3, 4), np.float32)
    path = tiny_mmproj.make_checkpoint(tmp_path / "model-00001-of-00002.safetensors", tensors)
    loaded = load_media(path)
    assert loaded.audio is None
    for name in tiny_mmproj.CANVASES:
        error = np.abs(soft_tokens(loaded, name) - soft_tokens(media(family), name)).max()
        assert error < ORACLE_F32_ABS  # eps is 1e-6 here and its nearest float32 in a GGUF


def test_checkpoint_in_bfloat16(tmp_path, media):
    path = tmp_path / "any.name"
    loaded = load_media(tiny_mmproj.make_checkpoint(path, tiny_mmproj.checkpoint_tensors("26b"), kind="BF16"))
    error = np.abs(soft_tokens(loaded, "odd") - soft_tokens(media("26b"), "odd")).max()
    assert 0 < error < 0.3


def config_json(folder, **vision) -> None:
    (folder / "config.json").write_text(json.dumps({"vision_config": vision}))


def test_config_beside_a_checkpoint(tmp_path):
    """Used when it fits; otherwise defaults and one warning, also when there is none."""
    path = tiny_mmproj.make_checkpoint(tmp_path / "m.safetensors", tiny_mmproj.checkpoint_tensors("26b"))
    none = load_media(path)
    assert len(none.notes) == 1 and "there is none" in none.notes[0]
    config_json(tmp_path, hidden_size=48, pooling_kernel_size=3, rms_norm_eps=0.5)
    fits = load_media(path)
    assert fits.notes == () and fits.vision[0].eps == 0.5
    config_json(tmp_path, hidden_size=768, pooling_kernel_size=3, rms_norm_eps=0.5)
    other = load_media(path)
    assert "width 768, this one has 48" in other.notes[0] and other.vision[0].eps == 1e-6
    (tmp_path / "config.json").write_text("{")
    assert len(load_media(path).notes) == 1
    config_json(tmp_path, hidden_size=48, pooling_kernel_size=5)
    with pytest.raises(ValueError, match="soft tokens of 80 x 80 pixels"):
        load_media(path)


def test_another_shard(tmp_path):
    path = tiny_mmproj.make_checkpoint(tmp_path / "m.safetensors", {"model.norm.weight": np.ones(4)})
    with pytest.raises(ValueError, match="expected a shard that holds the vision tower"):
        load_media(path)


def test_damaged_checkpoints(tmp_path):
    """Whatever bytes: one line, no crash, no memory."""
    whole = tiny_mmproj.make_checkpoint(tmp_path / "m.safetensors", tiny_mmproj.checkpoint_tensors("31b"))
    data, rng = bytearray(whole.read_bytes()), np.random.default_rng(2)
    bad = tmp_path / "bad.safetensors"
    n = struct.unpack("<Q", data[:8])[0]
    for _ in range(150):
        broken = bytearray(data)
        for at in rng.integers(0, 8 + n, 3):
            broken[at] = rng.integers(0, 256)
        bad.write_bytes(broken[: rng.integers(0, len(broken))] if rng.random() < 0.5 else broken)
        try:
            load_media(bad)
        except ValueError as fault:
            assert "\n" not in str(fault) and len(str(fault)) < 700
    for head in (b"", b"\xff" * 8, struct.pack("<Q", 1 << 40) + b"{}", struct.pack("<Q", 2) + b"[]"):
        bad.write_bytes(head)
        with pytest.raises(ValueError, match=r"bad\.safetensors"):
            load_media(bad)
    sizes = {"a": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4]}}
    text = json.dumps(sizes).encode()
    bad.write_bytes(struct.pack("<Q", len(text)) + text + b"1234")
    with pytest.raises(ValueError, match="4 bytes, expected"):
        open_safetensors(bad)


# --- what does not fit -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny_mmproj.ENCODERS)
def test_projector_and_model(family, tmp_path, media):
    def config(name):
        return Config.from_gguf(quant.open_gguf(tiny.make(tmp_path / f"{name}.gguf", name)))

    media(family).check(config(family), "m.gguf")
    other = "e4b" if tiny.FAMILIES[family].D == 48 else "e2b"
    with pytest.raises(ValueError) as caught:
        media(family).check(config(other), tmp_path / f"{other}.gguf")
    text = str(caught.value)
    assert f"mmproj-{family}.gguf" in text and f"{other}.gguf" in text and "\n" not in text
    assert str(tiny.FAMILIES[family].D) in text and str(tiny.FAMILIES[other].D) in text


def test_swapped_files(tmp_path):
    text = tiny.make(tmp_path / "model.gguf", "e2b")
    with pytest.raises(ValueError, match=r"model\.gguf: a gemma4 model of text.*swapped"):
        load_media(text)
    with pytest.raises(ValueError, match="image and audio part"):
        Config.from_gguf(quant.open_gguf(tiny_mmproj.make(tmp_path / "mm.gguf", "e2b")))


def test_no_ear(media):
    with pytest.raises(ValueError, match="no encoder of sounds"):
        media("26b").need_audio()


ONE = np.ones(1, np.float32)
BAD = {
    "another projector": ({"keys": {"clip.vision.projector_type": "gemma3"}}, "'gemma3'.*expected 'gemma4v'"),
    "lying projector": ({"keys": {"clip.vision.projector_type": "gemma4uv"}}, "expected 'gemma4v', by"),
    "another architecture": ({"keys": {"general.architecture": "llama"}}, "got 'llama', expected 'clip'"),
    "no layers": ({"drop": ("v.blk.*",), "keys": {"clip.vision.block_count": None}}, "block_count"),
    "lost tensor": ({"drop": ("v.blk.1.ffn_up.weight",)}, r"v\.blk\.1\.ffn_up\.weight is missing"),
    "lost bound": ({"drop": ("*blk.1.attn_q.input_max",)}, r"attn_q\.input_max is missing, expected beside"),
    "wrong width": ({"keys": {"clip.vision.embedding_length": 40}}, r"v\.patch_embd\.weight: shape"),
    "wrong heads": ({"keys": {"clip.vision.attention.head_count": 5}}, r"attn_q\.weight: shape"),
    "wrong projection": ({"keys": {"clip.vision.projection_dim": 49}}, r"input_projection\.weight: shape"),
    "wrong layers": ({"keys": {"clip.audio.block_count": 3}}, r"a\.blk\.2\.ffn_norm\.weight is missing"),
    "key is text": ({"keys": {"clip.vision.block_count": "many"}}, "block_count"),
    "nan": ({"replace": {"v.blk.0.attn_q.input_min": ONE * np.nan}}, "expected lower bounds"),
    "upside down": ({"replace": {"a.blk.0.attn_q.output_min": ONE * 9}}, "expected lower bounds"),
    "scaled layers": ({"replace": {"v.blk.0.out_scale.weight": ONE}}, "nothing would apply it"),
    "biases": ({"replace": {"a.blk.0.attn_q.bias": np.ones(32, np.float32)}}, "nothing would apply it"),
    "nothing": ({"drop": ("v.*", "a.*", "mm.*")}, "no encoder in it"),
    "pool": ({"keys": {"clip.vision.projector.scale_factor": 4}}, "soft tokens of 64 x 64 pixels"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name, make):
    options, message = BAD[name]
    with pytest.raises(ValueError, match=message) as caught:
        load_media(make("e2b", **options))
    assert "\n" not in str(caught.value) and "mm.gguf" in str(caught.value)


def test_no_file(tmp_path):
    with pytest.raises(OSError, match=r"none\.gguf"):
        load_media(tmp_path / "none.gguf")
    with pytest.raises(ValueError, match=r"none\.safetensors"):
        load_media(tmp_path / "none.safetensors")


@pytest.mark.parametrize("name", ["mmproj.gguf", "model.safetensors"])
def test_nobody_waits_for_the_writer_of_a_pipe(tmp_path, name):
    os.mkfifo(tmp_path / name)
    assert not is_projector(tmp_path / name)
    with pytest.raises(ValueError, match="is a pipe or a device"):
        load_media(tmp_path / name)
