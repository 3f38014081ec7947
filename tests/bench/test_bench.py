"""`bench`: rows, what they count, profiles, and the refusal to print figures of kernels that are wrong.

Nothing here looks at a speed: only at what was run and counted.
"""

import inspect
import json
import re

import numpy as np
import pytest

import fastpath.cpu
from fastpath.backend import ops_for
from fastpath.bench import parity, profile, rates
from fastpath.bench.measure import Runner, Workload, workloads
from fastpath.bench.traffic import Watched, totals
from fastpath.cli.__main__ import main
from fastpath.cpu import threads
from fastpath.lanes import Lanes
from fastpath.load import load_model
from fastpath.model import block, text
from tests import tiny

MIXED = {"*_exps.weight": "Q4_K", "*ffn_down*": "Q6_K", "*attn_v*": "Q5_K", "*embd*": "Q6_K", "*": "Q4_K"}
LLAMA_BENCH_FIELDS = {
    "cpu_info", "backends", "model_filename", "model_type", "model_size", "model_n_params", "n_batch",
    "n_threads", "type_k", "type_v", "repack", "n_prompt", "n_gen", "n_depth", "test_time", "avg_ns",
    "stddev_ns", "avg_ts", "stddev_ts", "samples_ns", "samples_ts",
}  # fmt: skip


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    return {
        family: tiny.make(folder / f"{family}.gguf", family, size="block256", formats=MIXED)
        for family in ("e2b", "26b")
    }


@pytest.fixture
def bench(capsys):
    """bench(words...) -> (status, stdout, stderr)"""

    def run(*words):
        capsys.readouterr()
        status = main(["bench", *map(str, words)])
        return status, *capsys.readouterr()

    return run


def engine_of(path, *, packed=True, **options):
    model = load_model(path)
    return Lanes(model.packed() if packed else model, ops_for("cpu"), context_len=256, **options)


# -- rows


def test_json_has_a_row_for_each_test_with_the_fields_of_llama_bench(bench, paths):
    status, out, _ = bench(
        "-m", paths["e2b"], "-p", "5,12", "-n", 3, "-d", "0,20", "--batch", "1,2", "-r", 2, "--json"
    )
    rows = json.loads(out)
    assert status == 0
    assert [(r["n_prompt"], r["n_gen"], r["n_depth"], r["n_seqs"]) for r in rows] == [
        (5, 0, 0, 1), (12, 0, 0, 1), (0, 3, 0, 1), (0, 3, 0, 2),
        (5, 0, 20, 1), (12, 0, 20, 1), (0, 3, 20, 1), (0, 3, 20, 2),
    ]  # fmt: skip
    for r in rows:
        assert r.keys() >= LLAMA_BENCH_FIELDS
        assert len(r["samples_ns"]) == len(r["samples_ts"]) == 2
        n_tokens = (r["n_prompt"] or r["n_gen"]) * r["n_seqs"]
        assert r["samples_ts"] == [1e9 * n_tokens / ns for ns in r["samples_ns"]]
        assert r["avg_ts"] == pytest.approx(np.mean(r["samples_ts"]))
        assert r["stddev_ts"] == pytest.approx(np.std(r["samples_ts"], ddof=1))
        assert r["weight_bytes"] > 0 and r["kv_bytes"] > 0 and r["read_percent"] > 0 and r["peak_percent"] > 0
        assert r["load_s"] > 0 and r["peak_bytes"] >= (r["private_bytes"] or 0) and r["parity_cases"] > 10


def test_table_is_for_people(bench, paths):
    status, out, _ = bench("-m", paths["26b"], "-p", 4, "-n", 2, "-r", 1, "--threads", 1)
    assert status == 0
    assert "on 1 thread\n" in out and "packed, cache f16, f16" in out and "is green" in out
    lines = [line for line in out.splitlines() if line.startswith("|")]
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["pp4", "tg2"]
    assert len({len(line) for line in lines}) == 1


def test_no_repack_and_kv_types(bench, paths):
    status, out, _ = bench(
        "-m",
        paths["e2b"],
        "-p",
        0,
        "-n",
        2,
        "-r",
        1,
        "--no-repack",
        "--no-replay",
        "--kv-type",
        "f32,bf16",
        "--json",
    )
    (row,) = json.loads(out)
    assert status == 0 and not row["repack"] and (row["type_k"], row["type_v"]) == ("f32", "bf16")


@pytest.mark.parametrize("words", [
    ("-p", "0", "-n", "0"), ("-p", "x"), ("-p", "-1"), ("-n", "2,,3"), ("--batch", "0"), ("--kv-type", "f8"),
    ("-p", "9999999"), ("--synthetic", "E9B:Q4_0"), ("--vocab", "x.gguf"),
])  # fmt: skip
def test_wrong_words_are_one_line(bench, paths, words):
    status, out, err = bench("-m", paths["e2b"], "-r", 1, *words)
    assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith("twinpath: ")


@pytest.mark.parametrize(
    ("words", "n_batch"),
    [
        (("-p", 512, "-n", 0), 1024), (("-p", 1, "-n", 0, "-d", 511), 1024),
        (("-p", 0, "-n", 1, "-d", 511, "-b", 200), 200), (("-p", 0, "-n", 2), 1024),
    ],
)  # fmt: skip
def test_up_to_the_context_and_not_beyond(bench, paths, words, n_batch):
    """Made for 512 positions. The chunk is the one asked for, also where a prompt is shorter."""
    assert load_model(paths["e2b"]).config.context_len == 512
    status, out, err = bench("-m", paths["e2b"], "-r", 1, "--json", *words)
    assert status == 0, err
    assert [row["n_batch"] for row in json.loads(out)] == [n_batch]
    status, out, err = bench("-m", paths["e2b"], "-r", 1, *words, "-d", 512)
    assert (status, out, err.count("\n")) == (2, "", 1) and "was made for 512" in err


def test_sequences_that_do_not_fit_into_memory(bench, paths):
    status, out, err = bench("-m", paths["e2b"], "-p", 0, "-n", 4, "-r", 1, "--batch", 1000000)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "1000000 sequences of 4 positions need" in err and "GB are free. Ask for fewer: --batch" in err


# -- what is counted


@pytest.mark.parametrize("packed", [True, False])
def test_decode_reads_each_matrix_once_and_the_keys_in_sight(paths, packed):
    engine = engine_of(paths["e2b"], packed=packed, kv_type=("f16", "f32"))
    model, n_depth = engine.model, 30
    result = Runner(engine).run(Workload(n_gen=1, n_depth=n_depth), 1)
    w = model.weights
    used = [w.output, w.per_layer_model_proj]
    for layer, own in zip(model.config.layers, w.layers, strict=True):
        used += [own.attn_q, own.attn_output, own.ffn_gate, own.ffn_up, own.ffn_down, own.inp_gate, own.proj]
        used += [own.attn_k, own.attn_v] if layer.owns_kv else []
    rows = w.token_embd.row_bytes + w.per_layer_token_embd.row_bytes
    assert result.traffic.weight_bytes == sum(t.nbytes for t in used) + rows
    n_keys = [
        n_depth + 1 if layer.window is None else min(n_depth + 1, layer.window)
        for layer in model.config.layers
    ]
    per_key = [  # values lie in columns of 32 components
        layer.n_kv_heads * (2 * layer.head_dim + 4 * -(-layer.head_dim // 32) * 32)
        for layer in model.config.layers
    ]
    assert result.traffic.kv_bytes == sum(n * size for n, size in zip(n_keys, per_key, strict=True))


def test_integer_operations_of_a_prompt(paths):
    """12b-like: every layer on every token, one row for the head."""
    engine = engine_of(paths["26b"])
    T, c = 7, engine.model.config
    watched = engine.ops = Watched(engine.ops, engine.model)
    engine.prefill(list(range(5, 5 + T)))
    w, expected = engine.model.weights, 0
    for layer, own in zip(c.layers, w.layers, strict=True):
        matrices = [
            own.attn_q,
            own.attn_k,
            own.attn_v,
            own.attn_output,
            own.ffn_gate,
            own.ffn_up,
            own.ffn_down,
        ]
        expected += sum(2 * T * m.shape[0] * m.shape[1] for m in matrices if m is not None)
        stacks = [own.ffn_gate_exps, own.ffn_up_exps, own.ffn_down_exps]
        expected += sum(2 * T * layer.moe.n_active * m.shape[1] * m.shape[2] for m in stacks)
    expected += 2 * w.output.shape[0] * w.output.shape[1]
    assert totals(watched.calls).n_ops == expected


def test_experts_that_are_chosen_count_once(paths):
    engine = engine_of(paths["26b"])
    moe = engine.model.config.layers[0].moe
    watched = engine.ops = Watched(engine.ops, engine.model)
    engine.prefill([7, 7, 7, 7])
    stack = engine.model.weights.layers[0].ffn_down_exps
    of_stacks = [c for c in watched.calls if c.field == "ffn_down_exps"]
    one = stack.nbytes // moe.n_experts
    assert moe.n_active * one <= of_stacks[0].weight_bytes <= stack.nbytes
    assert of_stacks[0].weight_bytes % one == 0


def test_order_of_tests_is_that_of_llama_bench():
    found = workloads([8, 16], [4], [0, 64], [1, 2])
    assert [t.name for t in found] == [
        "pp8", "pp16", "tg4", "tg4 x2", "pp8 @ d64", "pp16 @ d64", "tg4 @ d64", "tg4 x2 @ d64",
    ]  # fmt: skip


def test_repetitions_start_at_the_depth(paths, monkeypatch):
    """Also where answers are longer than what a ring can go back."""
    engine = engine_of(paths["e2b"], chunk=4)
    starts, runner = [], Runner(engine)
    timed = runner._timed
    monkeypatch.setattr(runner, "_timed", lambda test: starts.append(engine.length()) or timed(test))
    runner.run(Workload(n_gen=9, n_depth=33), 3)
    assert starts == [33] * 3 and engine.length() == 0


@pytest.mark.parametrize("family", ["e2b", "26b"])
def test_profile_adds_up(paths, family):
    engine = engine_of(paths[family], replay=True)
    runner, limits = Runner(engine), profile.Limits(1e10, 1e12, 1e11)
    for test in (Workload(n_prompt=20), Workload(n_gen=2)):
        result = runner.run(test, 1)
        text = result.profiled.text(limits)
        lines = [
            [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"
        ]
        head, body, total = lines[0], lines[2:-1], lines[-1]
        assert ("replayed" in text) == (test.n_gen > 0)
        assert {"attention", "dense ffn", "head", "embed", "rms_norm"} <= {line[0] for line in body}
        assert {"local", "global"} <= {line[1] for line in body if line[0] == "attention"}
        assert ("experts" in {line[0] for line in body}) == (family == "26b")
        ms, mb = head.index("ms"), head.index("MB")
        assert sum(float(line[ms]) for line in body) == pytest.approx(float(total[ms]), rel=0.05, abs=0.02)
        assert sum(float(line[mb] or 0) for line in body) == pytest.approx(
            float(total[mb]), rel=0.05, abs=0.5
        )


# -- refusal


# the ops that the text model calls; those of encoders alone play no part in its rows
TEXT_OPS = sorted(set(re.findall(r"ops\.(\w+)", inspect.getsource(text) + inspect.getsource(block))))


@pytest.mark.parametrize("op", TEXT_OPS)
def test_no_figure_when_an_op_is_wrong(bench, paths, monkeypatch, op):
    """One value is off by a thousandth."""
    right = getattr(fastpath.cpu, op)

    def wrong(*args, **options):
        result = right(*args, **options)
        changed = {"write_kv": args[2:3], "set_rows": args[:1]}.get(op, (result,))
        for array in result if isinstance(result, tuple) else changed:
            largest = np.unravel_index(np.argmax(np.abs(array)), array.shape)  # a result may be a view
            array[largest] *= array.dtype.type(1.001) if array.dtype.kind == "f" else 0
        return result

    monkeypatch.setattr(fastpath.cpu, op, wrong)
    status, out, err = bench("-m", paths["26b"], "-p", 4, "-n", 2, "-r", 1)
    last = err.splitlines()[-1]
    assert (status, out) == (2, "") and last.startswith("twinpath: parity: ") and "No figure" in last
    assert op in last or op == "write_kv"


def test_no_figure_when_one_format_of_a_table_is_wrong(bench, paths, monkeypatch):
    right = fastpath.cpu.embed

    def wrong(table, ids, scale, **options):
        return right(table, ids, scale, **options) * np.float32(1 + 0.001 * (table.format.name == "Q6_K"))

    monkeypatch.setattr(fastpath.cpu, "embed", wrong)
    status, out, err = bench("-m", paths["e2b"], "-p", 4, "-n", 2, "-r", 1)
    assert (status, out) == (2, "") and "parity: embed, Q6_K" in err.splitlines()[-1]


def test_rates_of_kernels_on_as_many_threads_as_asked_for(bench, monkeypatch):
    from fastpath.bench import attention, kernels

    before, seen = threads.num_threads(), []
    for module, name in ((kernels, "kernel_rates"), (attention, "attention_rates")):
        monkeypatch.setattr(module, name, lambda: seen.append(threads.num_threads()) or [])
        monkeypatch.setattr(module, "check", lambda: None)
    try:
        assert bench("--kernels", "--threads", before + 1)[:2] == (0, "\n")
    finally:
        threads.set_num_threads(before)
    assert seen == [before + 1] * 2


@pytest.mark.parametrize("op", ["linear", "attention"])
def test_no_rate_of_kernels_when_one_is_wrong(bench, monkeypatch, op):
    from fastpath.bench import attention, kernels

    monkeypatch.setattr(kernels.check, "__defaults__", (("Q8_0", "Q5_K"), (512,)))  # few: some seconds less
    right, looked_at = getattr(fastpath.cpu, op), []

    def wrong(x, weight, *args, **options):
        result = right(x, weight, *args, **options)
        if op == "attention" or weight.format.name == "Q5_K":
            result[0, 0] *= np.float32(1.01)
        looked_at.append(weight.shape)
        return result

    monkeypatch.setattr(fastpath.cpu, op, wrong)
    for module, name in ((kernels, "kernel_rates"), (attention, "attention_rates")):
        monkeypatch.setattr(module, name, lambda: pytest.fail("a rate of wrong kernels"))
    status, out, err = bench("--kernels")
    last = err.splitlines()[-1]
    says = "linear, Q5_K, 512 columns" if op == "linear" else "attention, heads of 256, sliding"
    assert (status, out) == (2, "") and f"parity: {says}" in last and looked_at


def test_products_of_every_format_are_right():
    from fastpath.bench import kernels

    assert parity.check_products(fastpath.cpu, kernels.FORMAT_NAMES, [512]) == len(kernels.FORMAT_NAMES)


@pytest.mark.parametrize("T", parity.ROWS)
def test_no_figure_when_one_route_is_wrong(bench, paths, monkeypatch, T):
    """A product is right for all numbers of rows but one."""
    right = fastpath.cpu.linear

    def wrong(x, weight, activations, **options):
        out = right(x, weight, activations, **options)
        if len(x) == T:
            out[0, 0] = np.nextafter(out[0, 0], np.float32(9))
        return out

    monkeypatch.setattr(fastpath.cpu, "linear", wrong)
    status, out, err = bench("-m", paths["e2b"], "-p", 4, "-n", 2, "-r", 1)
    last = err.splitlines()[-1]
    assert (status, out) == (2, "") and (f"{T} rows" in last or f"than {T}" in last), last


def test_no_figure_when_replay_is_wrong(bench, paths, monkeypatch):
    from fastpath.replay import Replay

    right = Replay.run
    monkeypatch.setattr(Replay, "run", lambda self, *call: right(self, *call) + np.float32(1e-3))
    status, out, err = bench("-m", paths["e2b"], "-p", 0, "-n", 2, "-r", 1)
    assert (status, out) == (2, "") and "replayed step of 1 tokens" in err.splitlines()[-1]


@pytest.mark.parametrize("family", ["e2b", "26b"])
def test_parity_is_green_and_looks_at_every_format(paths, family):
    engine = engine_of(paths[family])
    looked_at = []
    for what, wrong in parity._cases(
        engine.model, engine.ops, ops_for("ref"), np.random.default_rng(0), engine.kv_type, "int8"
    ):
        looked_at.append(what)
        assert wrong() == "", what
    formats = {t.format.name for t in rates.product_weights(engine.model.weights)}
    assert formats == {
        what.split(", ")[1] for what in looked_at if what.startswith(("linear", "expert_linear"))
    }


# -- `--profile` of an answer


@pytest.mark.parametrize("backend", ["cpu", "ref"])
def test_an_answer_is_profiled_and_not_changed(capsys, tmp_path, backend):
    path = tiny.make(tmp_path / "tiny.gguf", "e2b", keys={"tokenizer.ggml.suppress_tokens": [1, 9, 16]})
    words = ["--model", str(path), "--prompt", "the user", "--raw", "--max-tokens", "3", "--backend", backend]
    assert main(words) == 0
    plain = capsys.readouterr().out
    assert main([*words, "--profile"]) == 0
    said = capsys.readouterr()
    assert said.out == plain
    assert "calls of several tokens, ops called from Python" in said.err
    assert ("one token, replayed" in said.err) == (backend == "cpu")
    assert "| attention " in said.err and "| all " in said.err
