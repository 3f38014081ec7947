"""Every part of the device check on executor one, with small sizes: what is wrong is found and named."""

import itertools
import json

import numpy as np
import pytest

from fastpath.bench import device as checks
from fastpath.bench import device_models, device_rates, device_report
from fastpath.cli.__main__ import main
from fastpath.cuda import device, elementwise
from tests.gpu_on_cpu import devices, launching

ONCE = devices.executor_one((launching.LOCKSTEP,))
SOME = ("add", "rope", "route", "mean_pool", "rms_norm")


@pytest.fixture
def small(monkeypatch):
    """A case of some ops, small ceilings, no models: those have tests of their own below."""
    every, ceilings, overhead = checks.cases, device_rates.ceilings, device_rates.launch_overhead
    monkeypatch.setattr(checks, "cases", lambda rng: (case for case in every(rng) if case[0] in SOME))
    monkeypatch.setattr(device_rates, "ceilings", lambda: ceilings(1 << 14, turns=2, blocks=1))
    monkeypatch.setattr(device_rates, "launch_overhead", lambda clock: overhead(clock, 3))
    monkeypatch.setattr(device_models, "SMALL", {})
    monkeypatch.setattr(device_models, "SPEEDS", ())


def test_all_agree(small, tmp_path, capsys):
    with device.use(ONCE):
        assert main(["device-check", "--out", str(tmp_path / "r.json")]) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    said = capsys.readouterr().out
    assert "5 of 5 cases agree" in said and "ceilings    copy" in said and "us in a graph" in said
    assert {result["op"] for result in found["ops"]} == set(SOME) and "executor" in found["device"]
    assert found["ok"] and not found["skipped"]
    assert set(found["ceilings"]) == {"copy", "dp4a", "mma_s8", "mma_bf16"}


def test_a_wrong_op_is_named(small, monkeypatch, capsys):
    monkeypatch.setattr(elementwise, "ADD", elementwise.SCALE)  # takes other arguments: the launch fails
    with device.use(ONCE):
        assert main(["device-check"]) == 1
    said = capsys.readouterr()
    assert "add : error" in said.err and "4 of 5" in said.out


def test_integer_products_have_no_room():
    """In the last bit of one number they differ; float32 sums may."""
    limits = {}
    for op, case, arguments in checks.cases(np.random.default_rng(0)):
        limits[op, case] = checks._limit(op, arguments)
    assert limits["linear", "Q4_K int8, 1 token"] == limits["expert_linear", "Q8_0 int8"] == 0
    assert limits["linear", "BF16 int8, 1 token"] == limits["linear", "Q4_K float, 1 token"] > 1e-6
    assert limits["top_k", "k = 64"] == limits["clip", ""] == 0 < limits["attention", "f16"] < 2e-5


def test_a_part_that_fails_is_a_result(small, monkeypatch, capsys):
    """A driver that refuses graphs, a compiler that refuses a kernel: everything else is still measured."""

    def broken():
        raise RuntimeError("no such instruction")

    def no_graphs(launches, is_early):
        raise RuntimeError("graphs are not for us")

    monkeypatch.setattr(device_rates, "ceilings", broken)
    monkeypatch.setattr(ONCE, "capture", no_graphs, raising=False)
    with device.use(ONCE):
        assert main(["device-check"]) == 1
    said = capsys.readouterr().out
    assert "fault       ceilings: RuntimeError: no such instruction" in said
    assert "no graph: RuntimeError: graphs are not for us" in said and "5 of 5" in said


def test_time_runs_out(small):
    """What there is no time for is named.  The clock goes on by a second whenever somebody looks."""
    budget = device_report.Budget(6.0, clock=itertools.count().__next__)
    with device.use(ONCE):
        found = device_report.run(budget)
    assert found["skipped"] and len(found["ops"]) + len(found["skipped"]) == len(SOME)
    assert f"skipped     {len(found['skipped'])}" in device_report.text(found)


def test_speed_and_kernels():
    """A small model with weights made on the device: a prompt, steps of one row and of two, their kernels."""
    name = "dense, k = v"
    model = device_models.small_model(device_models.SMALL[name], "Q8_0")
    clock = (0.5 * i for i in itertools.count()).__next__
    with device.use(ONCE):
        options = {"model": model, "n_prompt": 18, "depth": 20, "n_new": 2, "rows": (1,)}
        found = device_models.speed("small", clock, **options)
    assert found["prefill"]["tokens_per_s"] == 18 / 0.5
    assert found["decode of 1"] == {"tokens_per_s": 1 / 0.25, "ms": 250.0}
    kernels = found["kernels of 1"]
    assert all(row["seconds"] > 0 and row["predicted_s"] > 0 for row in kernels)
    n_bytes = sum(row["times"] * row["bytes"] for row in kernels)
    assert n_bytes > sum(w.nbytes for w in (model.weights.output, model.weights.layers[0].ffn_down))
    lines = "\n".join(device_report._speed_lines(found, 1e12))
    assert "small, decode of 1: 4.0 tokens/s" in lines and "% of copy" in lines


@pytest.mark.slow
@pytest.mark.parametrize("case", device_models.CASES)
@pytest.mark.parametrize("name", device_models.SMALL)
def test_model_parity(name, case):
    with device.use(ONCE):
        found = device_models.model_parity(name, *case, n_prompt=35, chunk=20, n_new=3)
    assert found["ok"], found


def test_another_model_differs(monkeypatch):
    """Parity is no formality: other weights on the device are noticed."""
    rows = iter([[[0.0, 1.0]], [[0.0, 1.0]], [[0.0, 1.0]], [[0.0, 2.5]]])

    class Fake:
        def __init__(self, *_args, **_options):
            self.chunk = 40

        def forward(self, _batch):
            return np.array(next(rows))

    monkeypatch.setattr(device_models, "Lanes", Fake)
    with device.use(ONCE):
        assert not device_models.model_parity("experts", "Q8_0", "int8", n_prompt=35, n_new=1)["ok"]


@pytest.mark.slow
def test_every_case():
    with device.use(ONCE):
        assert [result for result in checks.check() if not result["ok"]] == []
