"""What is written is read back the same: by our reader and by the gguf package's; and the other way round."""

import gguf as theirs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quant
from quant import gguf, gguf_write
from quant.gguf_values import SCALAR_KINDS
from tests.quant import handmade

METADATA = {
    "general.architecture": "gemma4",
    "t.empty": "",
    "t.script": "Größe ▁the 日本",
    "t.bool": True,
    "t.int": 7,
    "t.negative": -7,
    "t.big": 1 << 40,
    "t.huge": (1 << 64) - 1,
    "t.float": 0.25,
    "t.u64": gguf.U64(5),
    "t.i8": gguf.I8(-3),
    "t.f64": gguf.F64(0.1),
    "t.numpy": np.float64(0.1),
    "t.u16": np.uint16(9),
    "a.str": ["", "a", "Größe"],
    "a.bool": [True, False],
    "a.int": [1, -2, 3],
    "a.long": [1, 1 << 40],
    "a.float": [1, 2.5],
    "a.u8": np.arange(5, dtype=np.uint8),
    "a.f64": np.array([0.1, 0.2]),
    "a.none": np.empty(0, np.int32),
}
KINDS = {
    "general.architecture": "str",
    "t.empty": "str",
    "t.script": "str",
    "t.bool": "bool",
    "t.int": "u32",
    "t.negative": "i32",
    "t.big": "i64",
    "t.huge": "u64",
    "t.float": "f32",
    "t.u64": "u64",
    "t.i8": "i8",
    "t.f64": "f64",
    "t.numpy": "f64",
    "t.u16": "u16",
    "a.str": "str[]",
    "a.bool": "bool[]",
    "a.int": "i32[]",
    "a.long": "i64[]",
    "a.float": "f32[]",
    "a.u8": "u8[]",
    "a.f64": "f64[]",
    "a.none": "i32[]",
}


def some_tensors(seed: int = 0) -> list[quant.QTensor]:
    rng = np.random.default_rng(seed)
    shapes = {
        "F32": (7,),
        "BF16": (3, 5),
        "Q4_0": (4, 64),
        "Q6_K": (2, 3, 256),
        "Q8_0": (2, 2, 2, 32),
        "F16": (1, 1),
    }
    return [quant.QTensor.from_array(rng.standard_normal(s), f, f"blk.0.{f}") for f, s in shapes.items()]


def plain(value):
    if isinstance(value, (np.ndarray, gguf.StringArray)):
        return value.tolist()
    return value


def assert_same_tensors(found: dict[str, quant.QTensor], expected: list[quant.QTensor]) -> None:
    assert list(found) == [t.name for t in expected]
    for t in expected:
        assert (found[t.name].format, found[t.name].shape, found[t.name].name) == (t.format, t.shape, t.name)
        np.testing.assert_array_equal(found[t.name].data, t.data)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [32, 8, 128])
def test_round_trip(tmp_path, version, alignment):
    tensors = some_tensors()
    path = tmp_path / "m.gguf"
    assert quant.write_gguf(path, METADATA, tensors, version=version, alignment=alignment) == [path]
    with quant.open_gguf(path) as model:
        assert (model.version, model.alignment, model.nbytes) == (version, alignment, path.stat().st_size)
        kinds = {key: model.metadata.kind(key) for key in model.metadata}
        values = {key: plain(value) for key, value in model.metadata.items()}
        assert kinds.pop("general.alignment", "u32") == "u32"
        assert values.pop("general.alignment", 32) == alignment
        assert kinds == KINDS
        assert values == {key: plain(value) for key, value in METADATA.items()}
        assert_same_tensors(model.tensors, tensors)
        begin = model.tensors["blk.0.F32"].data.__array_interface__["data"][0]
        for t in model.tensors.values():
            assert (
                t.data.__array_interface__["data"][0] - begin
            ) % alignment == 0 and not t.data.flags.owndata


def test_python_values_come_back_as_python_values(tmp_path):
    quant.write_gguf(tmp_path / "m.gguf", METADATA, [])
    model = quant.open_gguf(tmp_path / "m.gguf")
    assert {type(v) for v in model.metadata.values()} == {str, bool, int, float, np.ndarray, gguf.StringArray}
    assert model.metadata["t.bool"] is True and type(model.metadata["t.u64"]) is int
    assert model.tensors == {}


def test_metadata_of_a_file_is_copied_with_its_types(tmp_path):
    (tmp_path / "a.gguf").write_bytes(handmade.small_file())
    first = quant.open_gguf(tmp_path / "a.gguf")
    quant.write_gguf(tmp_path / "b.gguf", first.metadata, first.tensors)
    second = quant.open_gguf(tmp_path / "b.gguf")
    kinds = [{key: model.metadata.kind(key) for key in model.metadata} for model in (first, second)]
    assert kinds[0] == kinds[1] and len({*kinds[0].values()}) == 2 * len(SCALAR_KINDS) + 2
    assert (tmp_path / "b.gguf").read_bytes() == handmade.small_file() + bytes(26)


def test_a_mapping_names_the_tensors(tmp_path):
    tensor = quant.QTensor.from_array(np.ones((2, 32)), "Q8_0")
    quant.write_gguf(tmp_path / "m.gguf", {}, {"x": tensor, "y": tensor})
    assert list(quant.open_gguf(tmp_path / "m.gguf").tensors) == ["x", "y"]


def test_sliced_tensors_are_written(tmp_path):
    x = np.random.default_rng(2).standard_normal((3, 6, 64)).astype(np.float32)
    whole = quant.QTensor.from_array(x, "Q8_0", "w")
    quant.write_gguf(tmp_path / "m.gguf", {}, [whole.take_rows(1, 4)])
    back = quant.open_gguf(tmp_path / "m.gguf").tensors["w"]
    np.testing.assert_array_equal(back.dequantize(), whole.dequantize()[:, 1:4])


def test_the_gguf_package_reads_what_we_write(tmp_path):
    tensors = some_tensors(1)
    quant.write_gguf(tmp_path / "m.gguf", METADATA | {"general.alignment": 64}, tensors, alignment=64)
    reader = theirs.GGUFReader(tmp_path / "m.gguf")
    for key, value in METADATA.items():
        contents = reader.fields[key].contents()
        if key == "a.none":
            assert contents in ([], None)
        elif key != "t.float":
            assert contents == plain(value), key
    assert reader.alignment == 64
    for t, r in zip(tensors, reader.tensors, strict=True):
        assert (r.name, r.tensor_type, tuple(r.shape[::-1])) == (t.name, t.format.ggml_id, t.shape)
        assert r.data.tobytes() == t.data.tobytes()


def test_we_read_what_the_gguf_package_writes(tmp_path):
    writer = theirs.GGUFWriter(tmp_path / "m.gguf", "gemma4")
    adders = "uint8 int8 uint16 int16 uint32 int32 uint64 int64 float32 float64 bool string".split()
    for i, kind in enumerate(adders):
        getattr(writer, f"add_{kind}")(f"k.{kind}", "x" if kind == "string" else i)
    writer.add_array("a.str", ["a", "▁b", ""])
    writer.add_array("a.int", [1, -2])
    writer.add_array("a.float", [0.5, 1.5])
    writer.add_array("a.bool", [True, False])
    writer.add_custom_alignment(64)
    rng = np.random.default_rng(3)
    expected = {}
    for name in ("F32", "F16", "BF16", "Q4_0", "Q8_0", "TQ2_0", "MXFP4"):
        x = rng.standard_normal((3, 256)).astype(np.float32)
        kind = theirs.GGMLQuantizationType[name]
        data = theirs.quants.quantize(x, kind)
        writer.add_tensor(name, data, raw_dtype=None if name in ("F32", "F16") else kind)
        expected[name] = theirs.quants.dequantize(data, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = quant.open_gguf(tmp_path / "m.gguf")
    assert model.alignment == 64 and model.metadata["general.architecture"] == "gemma4"
    assert [model.metadata[f"k.{kind}"] for kind in adders] == [*range(10), True, "x"]
    assert [plain(model.metadata[f"a.{k}"]) for k in ("str", "int", "float", "bool")] == [
        ["a", "▁b", ""],
        [1, -2],
        [0.5, 1.5],
        [True, False],
    ]
    for name, values in expected.items():
        assert model.tensors[name].format.name == name
        np.testing.assert_array_equal(model.tensors[name].dequantize(), values)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SCALARS = st.one_of(
    TEXT, st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(width=32, allow_nan=False)
)
LISTS = st.one_of(
    st.lists(TEXT, min_size=1, max_size=5),
    st.lists(st.booleans(), min_size=1, max_size=5),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5),
)


@settings(max_examples=60)
@given(
    metadata=st.dictionaries(TEXT.filter(bool), st.one_of(SCALARS, LISTS), max_size=6), n=st.integers(0, 4)
)
def test_any_metadata_round_trips(tmp_path_factory, metadata, n):
    metadata.pop("general.alignment", None)
    metadata = {key: value for key, value in metadata.items() if not key.startswith("split.")}
    path = tmp_path_factory.mktemp("rt") / "m.gguf"
    tensors = some_tensors(n)[:n]
    quant.write_gguf(path, metadata, tensors)
    model = quant.open_gguf(path)
    assert {key: plain(value) for key, value in model.metadata.items()} == metadata
    assert_same_tensors(model.tensors, tensors)


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({"": 1}, "metadata key ''; expected 1 .. 65535 bytes"),
        ({"a": None}, "key 'a': NoneType None has no GGUF type; expected str, bool"),
        ({"a": 1 << 64}, "key 'a': int 18446744073709551616 has no GGUF type"),
        ({"a": gguf.U8(256)}, "key 'a': 256 does not fit u8"),
        ({"a": []}, "key 'a': an empty list has no type"),
        ({"a": [1, "x"]}, "key 'a': a list of mixed types"),
        ({"a": [1, True]}, "key 'a': a list of bools and others"),
        ({"a": [[1]]}, "key 'a': a list of mixed types"),
        ({"a": np.zeros((2, 2))}, r"key 'a': array float64\[2, 2\]; expected one axis"),
        ({"a": np.zeros(2, np.float16)}, r"key 'a': array float16\[2\]"),
        ({"a": [1 << 63]}, "key 'a': a list with 9223372036854775808 does not fit i64"),
    ],
)
def test_metadata_that_cannot_be_written_is_named(tmp_path, metadata, message):
    with pytest.raises(ValueError, match=message):
        quant.write_gguf(tmp_path / "m.gguf", metadata, [])
    assert list(tmp_path.iterdir()) == []


def test_tensors_and_options_that_cannot_be_written_are_named(tmp_path):
    path = tmp_path / "m.gguf"
    one = quant.QTensor.from_array(np.ones(4), "F32", "w")
    unnamed = quant.QTensor.from_array(np.ones(4), "F32")
    for tensors, options, message in [
        ([one, one], {}, "two tensors named 'w'"),
        ([unnamed], {}, "tensor name '' of 0 bytes; expected 1 .. 63"),
        ({"x" * 64: one}, {}, "of 64 bytes"),
        ([quant.QTensor.from_array(np.ones((1, 1, 1, 1, 1)), "F32", "w")], {}, "expected 1 to 4 axes"),
        ([quant.QTensor.from_array(np.ones((0, 4)), "F32", "w")], {}, "none empty"),
        ([one], {"version": 1}, "version 1; this writer knows 2 and 3"),
        ([one], {"alignment": 48}, "alignment 48; expected a power of two"),
        ([one], {"n_parts": 2}, "2 parts for 1 tensors"),
    ]:
        with pytest.raises(ValueError, match=message):
            quant.write_gguf(path, {}, tensors, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    quant.write_gguf(path, {"v": 1}, some_tensors())
    old = path.read_bytes()

    def full(file, tensor):
        raise OSError("No space left on device")

    monkeypatch.setattr(gguf_write, "_write_data", full)
    with pytest.raises(OSError, match="No space"):
        quant.write_gguf(path, {"v": 2}, some_tensors())
    assert path.read_bytes() == old and list(tmp_path.iterdir()) == [path]
