"""Models in several files."""

import struct

import numpy as np
import pytest

import quant
from tests.quant import handmade as h


def tensors(n: int = 5) -> list[quant.QTensor]:
    rng = np.random.default_rng(0)
    return [quant.QTensor.from_array(rng.standard_normal((i + 1, 32)), "Q8_0", f"t{i}") for i in range(n)]


@pytest.mark.parametrize("n_parts", [2, 3, 5])
@pytest.mark.parametrize("alignment", [32, 64])
def test_any_part_opens_all(tmp_path, n_parts, alignment):
    metadata = {"general.architecture": "gemma4", "a": ["x", "y"]}
    paths = quant.write_gguf(tmp_path / "m.gguf", metadata, tensors(), n_parts=n_parts, alignment=alignment)
    assert [p.name for p in paths] == [f"m-{i + 1:05d}-of-{n_parts:05d}.gguf" for i in range(n_parts)]
    assert sorted(tmp_path.iterdir()) == paths
    for path in paths:
        model = quant.open_gguf(path)
        assert model.path == path and model.paths == tuple(paths)
        assert model.metadata["a"].tolist() == ["x", "y"]
        assert model.nbytes == sum(p.stat().st_size for p in paths)
        assert list(model.tensors) == [t.name for t in tensors()]
        for t in tensors():
            np.testing.assert_array_equal(model.tensors[t.name].data, t.data)


def test_a_missing_part_is_named(tmp_path):
    paths = quant.write_gguf(tmp_path / "m.gguf", {}, tensors(), n_parts=5)
    paths[2].unlink()
    with pytest.raises(ValueError, match=r"part missing in .*: m-00003-of-00005\.gguf\. Expected 5 parts"):
        quant.open_gguf(paths[0])
    for path in paths[1:2] + paths[3:]:
        path.unlink()
    with pytest.raises(ValueError, match=r"m-00002-of-00005\.gguf, .* and 1 more"):
        quant.open_gguf(paths[0])


def test_a_renamed_part_says_which_name_it_needs(tmp_path):
    paths = quant.write_gguf(tmp_path / "m.gguf", {}, tensors(), n_parts=2)
    for name in ("model.gguf", "m-00001-of-00003.gguf", "m-1-of-2.gguf"):
        renamed = paths[0].rename(tmp_path / name)
        with pytest.raises(
            ValueError, match=r"one of 2 parts, but the name does not end in -0000i-of-00002\.gguf"
        ):
            quant.open_gguf(renamed)
        renamed.rename(paths[0])


def test_swapped_parts_are_noticed(tmp_path):
    paths = quant.write_gguf(tmp_path / "m.gguf", {}, tensors(), n_parts=2)
    first, second = (p.read_bytes() for p in paths)
    paths[0].write_bytes(second)
    paths[1].write_bytes(first)
    with pytest.raises(ValueError, match=r"m-00001-of-00002\.gguf: key 'split\.no': got 1, expected 0"):
        quant.open_gguf(paths[0])


def test_parts_of_different_models_are_noticed(tmp_path):
    for folder, n in (("a", 5), ("b", 4)):
        (tmp_path / folder).mkdir()
        quant.write_gguf(tmp_path / folder / "m.gguf", {}, tensors(n), n_parts=2)
    name = "m-00002-of-00002.gguf"
    (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
    with pytest.raises(
        ValueError, match=r"'split\.tensors\.count': got \d tensors in 2 parts, expected 5|also in"
    ):
        quant.open_gguf(tmp_path / "a" / name)


def part_bytes(no: int, count: int, name: str, n_tensors: int = 2, kind: int = h.U16) -> bytes:
    pairs = [
        h.pair("split.no", kind, no),
        h.pair("split.count", kind, count),
        h.pair("split.tensors.count", h.I32, n_tensors),
    ]
    return h.file(pairs, [h.tensor(name, [4], 0, 0)], struct.pack("<4f", *range(4)))


def test_handmade_parts(tmp_path):
    first, second = tmp_path / "x-00001-of-00002.gguf", tmp_path / "x-00002-of-00002.gguf"
    first.write_bytes(part_bytes(0, 2, "a"))
    second.write_bytes(part_bytes(1, 2, "b"))
    assert list(quant.open_gguf(second).tensors) == ["a", "b"]
    second.write_bytes(part_bytes(1, 2, "a"))
    with pytest.raises(ValueError, match=r"x-00002-of-00002\.gguf: tensor 'a' is also in an earlier part"):
        quant.open_gguf(first)
    second.write_bytes(part_bytes(1, 3, "b"))
    with pytest.raises(ValueError, match=r"'split\.count': got 3, expected 2"):
        quant.open_gguf(first)
    second.write_bytes(h.file([], [h.tensor("b", [4], 0, 0)], bytes(16)))
    with pytest.raises(ValueError, match=r"x-00002-of-00002\.gguf: key 'split\.count': got None"):
        quant.open_gguf(first)
    second.write_bytes(part_bytes(1, 2, "b")[:-1])
    with pytest.raises(ValueError, match=r"x-00002-of-00002\.gguf: tensor 'b'"):
        quant.open_gguf(first)


def test_one_of_one_is_an_ordinary_file(tmp_path):
    path = tmp_path / "any name.gguf"
    path.write_bytes(part_bytes(0, 1, "a", n_tensors=1))
    assert list(quant.open_gguf(path).tensors) == ["a"]


@pytest.mark.parametrize("count, kind", [(0, h.U16), (1 << 31, h.U32), (2, h.F32)])
def test_impossible_counts(tmp_path, count, kind):
    path = tmp_path / "x-00001-of-00002.gguf"
    path.write_bytes(part_bytes(0, count, "a", kind=kind))
    with pytest.raises(ValueError, match=r"key 'split\.count': got .*, expected a whole number"):
        quant.open_gguf(path)
