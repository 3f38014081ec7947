"""The device check finds every op right on executor one, and a wrong one wrong."""

import json

import pytest

from fastpath.bench import device as checks
from fastpath.cli.__main__ import main
from fastpath.cuda import device, elementwise
from tests.gpu_on_cpu import devices, launching

ONCE = devices.executor_one((launching.LOCKSTEP,))
SOME = ("add", "rope", "route", "mean_pool", "rms_norm")


def _few(monkeypatch):
    """A case of some ops: the rest is tested elsewhere, and takes a minute to compile."""
    every = checks.cases
    monkeypatch.setattr(checks, "cases", lambda rng: (case for case in every(rng) if case[0] in SOME))


def test_all_agree(monkeypatch, tmp_path, capsys):
    _few(monkeypatch)
    with device.use(ONCE):
        assert main(["device-check", "--out", str(tmp_path / "r.json")]) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert "5 of 5 cases agree" in capsys.readouterr().out
    assert {result["op"] for result in found["ops"]} == set(SOME) and "executor" in found["device"]


def test_a_wrong_op_is_named(monkeypatch, capsys):
    _few(monkeypatch)
    monkeypatch.setattr(elementwise, "ADD", elementwise.SCALE)  # takes other arguments: the launch fails
    with device.use(ONCE):
        assert main(["device-check"]) == 1
    said = capsys.readouterr()
    assert "add : error" in said.err and "4 of 5" in said.out


@pytest.mark.slow
def test_every_case():
    with device.use(ONCE):
        assert [result for result in checks.check() if not result["ok"]] == []
