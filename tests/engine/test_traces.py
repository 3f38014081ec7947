"""Traces: recorded, kept, compared; what `diff` calls the first name over its budget."""

from math import erf
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import refimpl.ops
from fastpath import error_budget
from fastpath.lanes import Lanes
from fastpath.trace import TraceFile, column_for, compare, load_trace, record, save_trace
from tests import tiny


def trace_of(model, ids, **options):
    return record(Lanes(model, refimpl.ops, **({"activations": "float"} | options)), ids)


def test_a_trace_has_a_row_for_every_token_and_every_name_a_budget(tiny_model):
    for family in tiny.FAMILIES:
        model, ids = tiny_model(family), tiny.prompt(family)[:9]
        arrays = trace_of(model, ids)
        assert {name.rpartition("-")[0] or name for name in arrays} <= error_budget.TABLE.keys()
        for name, array in arrays.items():
            assert array.dtype == np.float32 and len(array) == len(ids), name
        assert arrays["result_output"].shape == (9, model.config.vocab_size)
        assert list(arrays) == sorted(arrays, key=error_budget.order_of), (
            "the report's order is that of computation"
        )


def test_chunks_are_joined(tiny_model):
    model, ids = tiny_model("e2b"), tiny.prompt("e2b")
    whole, cut = trace_of(model, ids), trace_of(model, ids, chunk=7)
    assert list(whole) == list(cut)
    assert not any(d.is_over for d in compare(TraceFile(whole), TraceFile(cut), "float"))


def test_a_file_gives_back_what_was_put_in(tmp_path):
    trace = TraceFile({"Qcur-0": np.ones((2, 3, 4), np.float32)}, {"backend": "ref", "tokens": [1, 2]})
    save_trace(tmp_path / "no_suffix", trace)
    again = load_trace(tmp_path / "no_suffix")
    assert again.meta == trace.meta and list(again.arrays) == ["Qcur-0"]
    assert again.arrays["Qcur-0"].tobytes() == trace.arrays["Qcur-0"].tobytes()


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 broken"])
def test_other_files_are_no_traces(tmp_path, content):
    path = tmp_path / "x.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a trace"):
        load_trace(path)


def test_pickles_are_not_opened(tmp_path):
    np.savez(tmp_path / "x.npz", evil=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="not a trace"):
        load_trace(tmp_path / "x.npz")


def test_a_single_array_is_no_trace(tmp_path):
    np.save(tmp_path / "x.npy", np.ones(3))
    with pytest.raises(ValueError, match="one array"):
        load_trace(tmp_path / "x.npy")


def with_one_plus_weight(x, weight, eps):
    return refimpl.ops.rms_norm(x, weight if weight is None else 1 + weight, eps)


def pairs_side_by_side(x, cos, sin):
    """RoPE of pairs (2i, 2i + 1) in place of (i, i + H/2)."""
    turned = refimpl.ops.rope(np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1), cos, sin)
    out = np.empty_like(x)
    out[..., ::2], out[..., 1::2] = np.split(turned, 2, axis=-1)
    return out


def window_of_one_more(q, k_pages, v_pages, table, seq_ids, positions, window, ends):
    wider = None if window is None else window + 1
    return refimpl.ops.attention(q, k_pages, v_pages, table, seq_ids, positions, wider, ends)


def scaled_scores(q, *rest):
    return refimpl.ops.attention(q * q.dtype.type(q.shape[-1] ** -0.5), *rest)


def exact_gelu(gate, up):
    return (
        np.array([0.5 * g * (1 + erf(g / 2**0.5)) for g in gate.ravel()], gate.dtype).reshape(gate.shape) * up
    )


def not_renormalised(router_logits, n_active, expert_scale):
    probs = np.exp(router_logits) / np.exp(router_logits).sum(-1, keepdims=True)
    ids, _ = refimpl.ops.route(router_logits, n_active, expert_scale)
    return ids, np.take_along_axis(probs, ids, -1) * expert_scale[ids]


FAULTS = [
    ("12b", "rms_norm", with_one_plus_weight, "attn_norm-0"),
    ("12b", "rope", pairs_side_by_side, "Qcur_pos-0"),
    ("12b", "attention", window_of_one_more, "kqv_out-0"),
    ("12b", "attention", scaled_scores, "kqv_out-0"),
    ("12b", "geglu", exact_gelu, "ffn_geglu-0"),
    ("12b", "softcap", lambda x, cap: x, "result_output"),
    ("26b", "route", not_renormalised, "ffn_moe_weights_scaled-0"),
    ("e2b", "scale", lambda x, factor: x, "per_layer_proj"),
]


@pytest.mark.parametrize(("family", "op", "broken", "first"), FAULTS)
def test_the_first_wrong_op_is_found(tiny_model, family, op, broken, first):
    """What a person who ports Gemma 4 does: break one op, look at the first name that is over."""
    model, ids = tiny_model(family), tiny.prompt(family)[:16]
    table = SimpleNamespace(
        **{name: getattr(refimpl.ops, name) for name in refimpl.ops.__all__} | {op: broken}
    )
    right, wrong = trace_of(model, ids), record(Lanes(model, table, activations="float"), ids)
    over = [d.name for d in compare(TraceFile(right), TraceFile(wrong), "float") if d.is_over]
    assert over[0] == first


def pair(name, a, b):
    return TraceFile({name: np.asarray(a, np.float32)}), TraceFile({name: np.asarray(b, np.float32)})


def test_the_figures_by_hand():
    """a = (3, 4), b = (3, 4.5): max 0.5; RMS of the difference sqrt(0.125), of a sqrt(12.5): 0.1."""
    (d,) = compare(*pair("attn_out-0", [[3, 4]], [[3, 4.5]]), "float")
    assert d.max_abs == 0.5 and d.normalised == pytest.approx(0.1) and d.is_over


def test_the_worst_row_by_hand():
    """Rows of error 0, 0, 0 and (0, 1): RMS sqrt(0.5); of a sqrt(12.5): 0.2. Over all rows half of that."""
    (d,) = compare(*pair("attn_out-0", [[3, 4]] * 4, [[3, 4]] * 3 + [[3, 5]]), "different")
    assert (d.row, d.row_error, d.normalised) == (3, pytest.approx(0.2), pytest.approx(0.1))


@pytest.mark.parametrize("column", ["float", "int8", "different"])
def test_one_wrong_row_of_many_is_found(column):
    """Row 5 of 151 times 1.5 is a mean error of 4 %: within the budget of the last columns."""
    right = np.random.default_rng(5).standard_normal((151, 2, 16))
    wrong = right.copy()
    wrong[5] *= 1.5
    (d,) = compare(*pair("Kcur_pos-2", right, wrong), column)
    assert d.row == 5 and d.is_row_over and d.is_over
    assert column == "float" or d.normalised < d.limit


def test_the_row_limit_is_a_multiple_of_the_names():
    for name, budget in error_budget.TABLE.items():
        limit, row = (
            of(f"{name}-3", "float", 9) for of in (error_budget.limit_of, error_budget.row_limit_of)
        )
        assert row == budget.row * limit and budget.row > 1
    assert error_budget.row_limit_of("mystery-3", "float", 9) is None


def test_heads_may_be_joined_or_apart():
    (d,) = compare(*pair("Qcur-0", np.ones((2, 3, 4)), np.ones((2, 12))), "float")
    assert d.max_abs == 0 and not d.is_over


@pytest.mark.parametrize(("a", "b"), [(np.ones((2, 3)), np.ones((3, 2))), (np.ones((2, 3)), np.ones((2, 4)))])
def test_other_shapes_are_over(a, b):
    (d,) = compare(*pair("Qcur-0", a, b), "float")
    assert d.is_over and "shapes differ" in d.note


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_not_a_number_is_over(bad):
    (d,) = compare(*pair("Qcur-0", [[1, 1]], [[1, bad]]), "different")
    assert d.is_over


def test_zeros_are_compared_too():
    assert not compare(*pair("Qcur-0", [[0, 0]], [[0, 0]]), "float")[0].is_over
    assert compare(*pair("Qcur-0", [[0, 0]], [[0, 1e-9]]), "different")[0].is_over


def test_an_unknown_name_is_shown_and_not_judged():
    (d,) = compare(*pair("kq_soft_max-0", [[1]], [[2]]), "float")
    assert d.limit is None and not d.is_over


def test_the_first_in_the_order_of_computation_comes_first():
    names = [
        "result_output",
        "l_out-10",
        "l_out-2",
        "Qcur-2",
        "Kcur_pos-2",
        "attn_norm-2",
        "mystery-2",
        "inp_scaled",
    ]
    trace = TraceFile({name: np.ones((1, 1), np.float32) for name in names})
    expected = "inp_scaled attn_norm-2 Qcur-2 Kcur_pos-2 l_out-2 mystery-2 l_out-10 result_output"
    assert [d.name for d in compare(trace, trace, "float")] == expected.split()


def test_limits_grow_with_depth():
    table, limit_of = error_budget.TABLE, error_budget.limit_of
    assert limit_of("l_out-3", "int8", 9) == pytest.approx(
        2 * table["l_out"].limits[error_budget.COLUMNS.index("int8")]
    )
    assert limit_of("result_output", "int8", 9) == pytest.approx(
        3 * table["result_output"].limits[error_budget.COLUMNS.index("int8")]
    )
    assert limit_of("inp_scaled", "float", 9) == table["inp_scaled"].limits[0]


def test_the_column_follows_what_both_traces_say():
    def said(kind, kv_type=None):
        return TraceFile({}, {"activations": kind, "kv_type": kv_type} if kind else {})

    assert column_for(said("int8"), said("int8")) == "int8"
    assert column_for(said("float"), said("float")) == "float"
    assert column_for(said("float", "f32"), said("float")) == "float"
    assert column_for(said("float", "f16"), said("float", "f16")) == "half"
    assert column_for(said("float", "f16"), said("float", "f32")) == "half"
    assert column_for(said("float", ["bf16", "f16"]), said("float", ["bf16", "f16"])) == "half"
    assert column_for(said("float", "bf16"), said("float", "f32")) == "different"
    assert column_for(said("int8", "f16"), said("int8", "f16")) == "int8"
    assert column_for(said("int8", "f16"), said("int8", "f32")) == "different"
    assert column_for(said("int8"), said("float")) == "different"
    assert column_for(said("float"), said(None)) == "different"
    assert column_for(said(["int8"]), said({"of": "another engine"})) == "different"


def test_the_printed_table_has_every_name():
    lines = error_budget.markdown().splitlines()
    assert len(lines) == 2 + len(error_budget.TABLE) and all(line.count("|") == 8 for line in lines)


def test_the_page_on_numerics_shows_this_table():
    page = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text(encoding="utf-8")
    assert error_budget.markdown() in page, "paste anew what `twinpath diff --budget` prints"
