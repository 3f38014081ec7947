"""`python -m fastpath.bench.serving`: what was run and how it is summed up. No speed is looked at."""

import pytest

from fastpath.bench import serving
from fastpath.bench.serving import Pair, main, table

for name in ("fastapi", "uvicorn"):
    pytest.importorskip(name, reason=f"{name} is not installed: pip install 'twinpath[server]'")


def cells(text):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]


def test_pairs_are_compared_before_their_median_is_taken():
    first = Pair([0.001, 0.002, 0.009], [0.003, 0.006, 0.010])  # 2, 4 and 1 ms more
    all_s = Pair([1.0, 2.0, 4.0], [1.25, 2.0, 8.0])  # 20 % fewer tokens/s, as many, half
    head, _, times, rates = cells(table(first, all_s, 2, 10))
    assert head == ["", "bare", "served", "difference", "least", "most"]
    assert times == ["first token, ms", "2.00", "6.00", "+2.00 ms", "+1.00 ms", "+4.00 ms"]
    assert rates == ["2 answers of 10, tokens/s", "10.0", "10.0", "-20.0 %", "-50.0 %", "+0.0 %"]


def test_both_are_run_in_turn(monkeypatch, capsys):
    """The client checks that each answer has all its tokens."""
    asked, served = [], []
    ask, many = serving._Server.ask, serving._Server.many
    monkeypatch.setattr(serving._Server, "ask", lambda self, *what: asked.append(what) or ask(self, *what))
    monkeypatch.setattr(serving._Server, "many", lambda self, *n: served.append(n) or many(self, *n))
    assert main(["--parallel", "3", "-n", "5", "-r", "1", "--firsts", "1"]) == 0
    assert asked == [("first",), ("many", 3, 5)] * 2 and served == [(3, 5)] * 2
    *_, times, rates = cells(capsys.readouterr().out)
    assert rates[0] == "3 answers of 5, tokens/s" and all(float(cell) > 0 for cell in times[1:3] + rates[1:3])


def test_a_file_that_is_no_model_is_one_line(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"nothing")
    with pytest.raises(SystemExit, match=r"^bench-serving: .*x\.gguf: .*") as caught:
        main(["--model", str(tmp_path / "x.gguf")])
    assert "\n" not in str(caught.value)
