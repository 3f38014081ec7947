"""Synthetic models: the published layout, a vocabulary that works, and files that run."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastpath.bench import sizes, synthetic, vocabulary
from fastpath.bench.sizes import Size
from fastpath.load import load_model
from quant import open_gguf
from refimpl.config import Config
from refimpl.tensors import load_weights
from tests import tiny

MAKE_SYNTH = Path(__file__).parents[3] / "shared" / "tools" / "make_synth.py"
SPECS = [
    f"{size}:{recipe}{pure}" for size in sizes.SIZES for recipe in sizes.RECIPES for pure in ("", "-pure")
]
SPECS = [spec for spec in SPECS if not spec.endswith("BF16-pure")]  # a word for the same as BF16
# As small as a published vocabulary lets a model be; every row length is one that its recipe must handle.
SMALL = Size("SMALL", 5, 5, D=256, N=2, K_swa=1, K=1, F=288, window=32, context=512, k_is_v=True,
             E=4, A=2, F_expert=96)  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("synthetic") / "small.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sizes.SIZES, "SMALL", SMALL)
        done = []
        synthetic.write("SMALL:Q4_K_M", path, progress=lambda *so_far: done.append(so_far))
    assert done[-1][0] == done[-1][1] and [d for d, _ in done] == sorted(d for d, _ in done)
    return path


@pytest.mark.skipif(not MAKE_SYNTH.exists(), reason=f"the tool to compare with is not there: {MAKE_SYNTH}")
@pytest.mark.parametrize("spec", SPECS)
def test_tensors_are_those_of_the_tool(spec):
    """Same names, shapes and types, in the same order."""
    theirs = {"__file__": str(MAKE_SYNTH)}
    exec(MAKE_SYNTH.read_text().rsplit("main()", 1)[0], theirs)
    size, recipe = spec.split(":")
    c = theirs["json"].loads((MAKE_SYNTH.parent.parent / "spec/hyperparameters.json").read_text())[size][
        "text"
    ]
    planned = list(theirs["tensors"](c))
    count = {"v": 0, "down": 0, "nv": sum(kind == "v" for _, _, kind in planned)}
    want = [(n, s, theirs["qtype"](c, recipe, n, s, kind, count).name) for n, s, kind in planned]
    s, recipe = sizes.parse(spec)
    assert [(p[0], p[1], sizes.type_of(s, recipe, p)) for p in sizes.tensors(s)] == want


@pytest.mark.parametrize("name", sizes.SIZES)
def test_geometry_is_the_published_one(name):
    """tests/tiny.py reads it from tests/data/hyperparameters.json."""
    published, s = tiny.real_shape(name), sizes.SIZES[name]
    assert {n: shape for n, shape, _ in sizes.tensors(s)} == {
        n: shape for n, shape, _ in tiny.tensor_plan(published)
    }
    keys = tiny.metadata(published, with_vocabulary=False)
    mine = sizes.metadata(s, "Q4_0")
    assert {k: mine[k] for k in keys if k != "general.name"} == {
        k: v for k, v in keys.items() if k != "general.name"
    }


def test_vocabulary_is_of_the_published_size_and_complete():
    keys = vocabulary.tokenizer_metadata()
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    assert len(tokens) == len(set(tokens)) == len(types) == sizes.VOCAB
    known = set(tokens)
    for merge in keys["tokenizer.ggml.merges"]:
        left, right = merge.split(" ")
        assert {left, right, left + right} <= known, merge
    assert 450_000 < len(keys["tokenizer.ggml.merges"]) < 530_000  # the real one has 514,906


def test_file_is_a_model_without_repairs(small):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sizes.SIZES, "SMALL", SMALL)
        plan = [(p, sizes.type_of(SMALL, "Q4_K_M", p)) for p in sizes.tensors(SMALL)]
    file = open_gguf(small)
    assert [(t.name, t.shape, t.format.name) for t in file.tensors.values()] == [
        (n, s, f) for (n, s, _), f in plan
    ]
    config = Config.from_gguf(file)
    assert config.repairs == () and load_weights(file, config).unused == ()
    assert config.layers[0].moe.n_experts == SMALL.E and config.vocab_size == sizes.VOCAB


def test_weights_are_finite_of_their_size_and_differ(small):
    file = open_gguf(small)
    for name in ("blk.0.attn_q.weight", "blk.1.ffn_down.weight", "token_embd.weight"):
        tensor = file.tensors[name]
        rows = tensor.rows(np.arange(0, tensor.n_rows, max(1, tensor.n_rows // 50)))
        assert np.isfinite(rows).all() and len(np.unique(rows, axis=0)) > 0.8 * len(rows)
        assert 0.7 < rows.std() * tensor.row_len**0.5 < 1.4


def test_tokenizer_reads_text_and_markers(small):
    model = load_model(small)
    ids = model.tokenizer.encode("hello world\n 42", add_bos=True)
    assert ids[0] == 2 and model.tokenizer.decode(ids[1:]) == "hello world\n 42"
    assert len(ids) < 12  # words were joined
    turn = model.template.render_ids(model.tokenizer, [{"role": "user", "content": "hi"}])
    assert turn[:2] == [2, 105] and 106 in turn


def test_same_arguments_same_bytes(small, tmp_path, monkeypatch):
    monkeypatch.setitem(sizes.SIZES, "SMALL", SMALL)
    again = tmp_path / "again.gguf"
    synthetic.write("SMALL:Q4_K_M", again)
    assert again.read_bytes() == small.read_bytes()


def test_existing_file_is_taken(small, monkeypatch):
    monkeypatch.setitem(sizes.SIZES, "SMALL", SMALL)
    monkeypatch.setattr(synthetic, "write", None)
    assert synthetic.ensure("SMALL:Q4_K_M", small) == small


def test_another_file_is_refused(small, tmp_path, monkeypatch):
    """Figures of another model would stand under this one's name."""
    monkeypatch.setitem(sizes.SIZES, "SMALL", SMALL)
    monkeypatch.setitem(sizes.SIZES, "OTHER", replace(SMALL, name="OTHER", window=64))
    monkeypatch.setattr(synthetic, "write", None)
    named = tmp_path / "named.gguf"  # as the other size is named, with this one's tensors
    bytes_ = small.read_bytes()
    named.write_bytes(bytes_.replace(b"gemma-4 SMALL", b"gemma-4 OTHER"))
    for spec, path, says in (
        ("SMALL:Q4_0", small, "general.name is 'synthetic gemma-4 SMALL Q4_K_M', expected"),
        ("OTHER:Q4_K_M", small, "general.name is"),
        ("OTHER:Q4_K_M", named, "sliding_window is 32, expected 64 of OTHER"),
        ("SMALL:Q4_K_M", tiny.make(tmp_path / "tiny.gguf", "e2b"), "general.name is"),
    ):
        with pytest.raises(ValueError, match=says) as error:
            synthetic.ensure(spec, path)
        assert str(path) in str(error.value) and "--model" in str(error.value)
        assert "\n" not in str(error.value)
    (tmp_path / "page.gguf").write_text("<html>")
    with pytest.raises(ValueError, match="page"):
        synthetic.ensure("SMALL:Q4_K_M", tmp_path / "page.gguf")


def test_a_file_with_other_tensors_is_refused(small, monkeypatch):
    monkeypatch.setitem(sizes.SIZES, "SMALL", SMALL)
    plain = sizes.type_of
    monkeypatch.setattr(
        sizes, "type_of", lambda *of: "Q8_0" if of[2][0] == "blk.1.attn_q.weight" else plain(*of)
    )
    with pytest.raises(ValueError, match=r"tensor blk.1.attn_q.weight is .*'Q4_K'\), expected .*'Q8_0'\)"):
        synthetic.ensure("SMALL:Q4_K_M", small)


def test_vocabulary_of_a_file(small, tmp_path, monkeypatch):
    monkeypatch.setitem(sizes.SIZES, "SMALL", SMALL)
    other = tmp_path / "other.gguf"
    synthetic.write("SMALL:Q4_0", other, vocab=small)
    assert load_model(other).tokenizer.encode("hello") == load_model(small).tokenizer.encode("hello")
    assert synthetic.ensure("SMALL:Q4_0", other, vocab=small) == other
    tiny_file = tiny.make(tmp_path / "tiny.gguf", "e2b")
    with pytest.raises(ValueError, match="expected 262144"):
        synthetic.write("SMALL:Q4_0", tmp_path / "no.gguf", vocab=tiny_file)


def test_full_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "SPARE_BYTES", 1 << 60)
    with pytest.raises(ValueError, match="Make room"):
        synthetic.write("E2B:Q4_0", tmp_path / "no.gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("spec", ["E2B", "E3B:Q4_0", "E2B:Q3_K", "", "E2B:Q4_0:x"])
def test_unknown_models_are_refused(spec):
    with pytest.raises(ValueError, match="expected SIZE:RECIPE such as E2B:Q4_0"):
        sizes.parse(spec)
