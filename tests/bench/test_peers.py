"""`make bench-peers` with programs that say what they are told to: resuming, medians, floors, the page."""

import json

import pytest

from fastpath.bench import peers, peers_rows

SPEEDS = {"llama.cpp": [10.0, 30.0, 20.0], "ours": [31.0, 100.0, 45.0]}


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """Results and page in a folder, a llama-bench that exists, runs that are recorded."""
    monkeypatch.setattr(peers, "RESULTS", tmp_path / "performance.json")
    monkeypatch.setattr(peers, "PAGE", tmp_path / "performance.md")
    (tmp_path / "performance.md").write_text("before\n" + peers.BEGIN + "old\n" + peers.END + "after\n")
    for name in ("llama-bench", "llama-completion"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    for name in ("e2b-q4_0.gguf", "e2b-q8_0.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    runs = []

    def run(command, prefix):
        who = "llama.cpp" if "llama" in command[0] else "ours"
        runs.append((who, command, prefix))
        n = max(0, sum(w == who for w, _, _ in runs) - (2 if who == "ours" else 1))  # ours warms up
        speed = SPEEDS[who][min(n, 2)]
        row = {"n_prompt": 512, "n_gen": 0, "avg_ts": speed}
        rows = [row, row | {"n_prompt": 0, "n_gen": 64, "avg_ts": speed / 2}]
        details = dict.fromkeys(("read_gb_s", "plain_read_gb_s", "tops", "peak_tops"), 1.0)
        details |= {"read_percent": 91.0, "peak_percent": 40.0, "backends": "CPU, vnni", "cpu_info": "a CPU"}
        details |= {"load_s": 1.0, "private_bytes": 5}
        for r in rows:
            r |= {"build_commit": "abc"} if who == "llama.cpp" else details | {"n_seqs": 1}
        return "noise\n" + json.dumps(rows), {
            "seconds": 4.0 if who == "llama.cpp" else 5.0,
            "peak_bytes": 2e9,
        }

    monkeypatch.setattr(peers, "_run", run)

    def bench_peers(*words):
        runs.clear()
        status = peers.main(
            ["--llama-bench", str(tmp_path / "llama-bench"), "--models", str(tmp_path), *words]
        )
        return status, runs.copy(), (tmp_path / "performance.md").read_text()

    return bench_peers


def cells(page, what):
    return [c.strip() for line in page.splitlines() if what in line for c in line.split("|")[1:-1]]


def test_pairs_are_run_in_turn_and_medians_are_written(stage):
    status, runs, page = stage("--rows", "e2b-q4_0", "--threads", "2", "--prefix", "nice -n 0")
    assert status == 0
    assert [who for who, _, _ in runs] == ["ours"] + ["llama.cpp", "ours"] * 3  # the first compiles
    assert all(
        prefix == ["nice", "-n", "0"] and "e2b-q4_0.gguf" in " ".join(command) for _, command, prefix in runs
    )
    assert (
        page.startswith("before\n" + peers.BEGIN)
        and page.endswith(peers.END + "after\n")
        and "old" not in page
    )
    assert cells(page, "prefill 512") == [
        "E2B Q4_0", "prefill 512, tokens/s", "20.00", "45.00", "2.25", "2.5", "missed", "91", "40",
    ]  # fmt: skip
    assert cells(page, "decode 64")[4:7] == ["2.25", "1.35", ""]
    assert "llama-bench -m e2b-q4_0.gguf -t 2 -r 1 -o json -p 512 -n 64" in page
    assert "python -m fastpath.cli bench -m e2b-q4_0.gguf --threads 2 -r 1 --json -p 512 -n 64" in page
    assert "ours: CPU, vnni, commit" in page and "build abc" in page and "Medians of 3 runs" in page
    assert "2 threads" in page and str(peers.RESULTS.parent) not in page


def test_what_is_there_is_not_measured_again(stage):
    stage("--rows", "e2b-q4_0", "--rounds", "1")
    _, runs, _ = stage("--rows", "e2b-q4_0", "--rounds", "2")
    assert [who for who, _, _ in runs] == ["ours", "llama.cpp", "ours"]
    _, runs, _ = stage("--rows", "e2b-q4_0", "--rounds", "2")
    assert runs == []
    _, runs, page = stage("--rows", "e2b-q8_0", "--rounds", "1")
    assert len(runs) == 3 and "E2B Q4_0" in page and "E2B Q8_0" in page
    _, runs, _ = stage("--rows", "e2b-q4_0", "--rounds", "1", "--again")
    assert len(runs) == 3


def test_no_file_is_written_for_rows_that_have_results(stage, tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(
        peers.synthetic, "write", lambda model, path: written.append(model) or path.write_bytes(b"GGUF")
    )
    (tmp_path / "e2b-q4_0.gguf").unlink()
    for words in (("--rounds", "1"), ("--rounds", "1"), ("--rounds", "2")):
        stage("--rows", "e2b-q4_0", *words)
        assert not (tmp_path / "e2b-q4_0.gguf").exists()
    stage("--rows", "e2b-q4_0-rows")  # its program is not there
    assert written == ["E2B:Q4_0"] * 2


def test_costs_are_better_when_smaller(stage):
    _, _, page = stage("--rows", "e2b-q4_0-start", "--rounds", "1")
    assert cells(page, "from process start")[2:7] == ["4.00", "5.00", "0.80", "1", "missed"]
    assert cells(page, "peak memory")[2:7] == ["2.00", "2.00", "1.00", "1", ""]


def test_a_program_that_is_not_there_is_said(stage):
    status, runs, page = stage("--rows", "e2b-q4_0-rows")
    assert (status, runs) == (0, []) and "llama-batched-bench is not beside llama-bench" in page


def test_page_from_results_alone(stage):
    stage("--rows", "e2b-q4_0", "--rounds", "1")
    _, runs, page = stage("--only-write")
    assert runs == [] and "E2B Q4_0" in page


def _results(percents, **others):
    """Of one row: (prefill, decode) percent of a plain read in each pair."""
    pairs = [
        {
            "commit": f"c{i}",
            "llama.cpp": {"pp512": 10.0, "tg64": 4.0, "build": f"b{i // 2}"},
            "ours": {
                "pp512": 30.0, "tg64": 9.0, "backends": f"CPU, set {i // 2}",
                "details": {
                    "pp512": {"read_percent": prefill, "peak_percent": 50.0 + i},
                    "tg64": {"read_percent": decode, "peak_percent": 5.0},
                },
            },
        }
        for i, (prefill, decode) in enumerate(percents)
    ]  # fmt: skip
    row = {"pairs": pairs, "commands": {"llama.cpp": "a", "ours": "b"}}
    machine = {"date": "today", "cpu": "a CPU", "n_cpus": 2, "memory_gb": 8.0, "threads": 2}
    return {"rows": {"e2b-q4_k_m": row}, "machine": machine | {"python": "3", "numba": "0"}}


@pytest.mark.parametrize(
    ("percents", "prefill", "decode"),
    [
        ([(4.0, 91.0), (6.0, 93.0), (5.0, 92.0)], "5", "92"),
        ([(14.0, 150.0), (5.0, 90.0), (7.0, 87.0)], "6", "88"),  # nobody reads faster than a plain read
        ([(4.0, 102.0), (4.0, 90.0), (4.0, 88.0)], "4", "90"),
        ([(4.0, 84.0), (4.0, 83.0), (4.0, 89.0)], "4", "84 (below 85)"),
        ([(4.0, 103.0)], "", ""),
    ],
)
def test_percentages_of_pairs_whose_plain_read_was_disturbed_do_not_count(percents, prefill, decode):
    page = peers.page(_results(percents))
    assert cells(page, "prefill 512")[7] == prefill and cells(page, "decode 64")[7] == decode
    assert cells(page, "prefill 512")[8] == f"{50 + (len(percents) - 1) / 2:.0f}"


def test_the_page_names_every_commit_and_kernel_set():
    page = peers.page(_results([(4.0, 91.0)] * 3))
    assert "ours: CPU, set 0 and CPU, set 1, commit c0 and c1 and c2," in page
    assert "build b0 and b1." in page


@pytest.mark.parametrize(
    ("words", "variables", "says"),
    [
        (("--rows", "e2b"), {}, "--rows: e2b: not a row; there are e2b-q4_0"),
        (("--llama-bench", "/nowhere"), {}, "got '/nowhere', expected a program"),
        (("--llama-bench", "/"), {}, "got '/', expected a program"),
        ((), {"ROUNDS": "abc"}, "--rounds: 'abc' is not a whole number from 1"),
        ((), {"THREADS": "0"}, "--threads: '0' is not a whole number from 1 to 256"),
        ((), {"PREFIX": "nice '"}, '--prefix: "nice \'" is not a command'),
        (("--models", __file__), {}, "is a file, expected a folder"),
    ],
)
def test_wrong_words_are_one_line(stage, words, variables, says, capsys, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        stage(*words)
    err = capsys.readouterr().err
    assert end.value.code == 2 and says in err and err.count("\n") == 1


GOOD = {"n_prompt": 512, "n_gen": 0, "avg_ts": 9.0, "build_commit": "abc"}


@pytest.mark.parametrize(
    ("out", "says"),
    [
        ("", "cannot be read"),
        ("no JSON at all", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[1, 2]", "cannot be read"),
        ('[{"n_prompt": 512}]', "cannot be read"),
        ("[]", "got None for pp512, expected a number above 0"),
        (json.dumps([GOOD]), "got None for tg64"),
        (json.dumps([GOOD | {"avg_ts": 0}]), "got 0 for pp512"),
        (json.dumps([GOOD | {"avg_ts": "9"}]), "got '9' for pp512"),
        (json.dumps([GOOD | {"avg_ts": float("nan")}]), "got nan for pp512"),
    ],
)
def test_output_of_nonsense_is_one_line_and_not_kept(stage, monkeypatch, out, says):
    monkeypatch.setattr(peers, "_run", lambda command, prefix: (out, {"seconds": 1.0, "peak_bytes": 1e9}))
    with pytest.raises(SystemExit) as end:
        stage("--rows", "e2b-q4_0")
    message = end.value.code
    assert message.startswith("bench-peers: ") and says in message and "\n" not in message
    assert not peers.RESULTS.exists()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"rows": {"e2b-q4_0": {"pairs": [1]}}}'])
def test_results_that_are_none_are_one_line(stage, content):
    peers.RESULTS.write_text(content)
    with pytest.raises(SystemExit, match=r"^bench-peers: \S+: not the results of earlier runs .*anew$"):
        stage("--only-write")
    assert peers.RESULTS.read_text() == content


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (FileNotFoundError(2, "No such file or directory", "taskset"), "taskset: No such file or directory"),
        (ValueError("x.gguf: got 1 GB free"), "x.gguf: got 1 GB free"),
    ],
)
def test_faults_of_the_system_are_one_line(stage, monkeypatch, error, says):
    def run(command, prefix):
        raise error

    monkeypatch.setattr(peers, "_run", run)
    with pytest.raises(SystemExit, match="^bench-peers: " + says):
        stage("--rows", "e2b-q4_0")


def test_batched_rows_are_read():
    lines = [
        "noise",
        '{"pp": 16, "tg": 64, "pl": 4, "speed_tg": 31.5}',
        '{"tg": 64, "pl": 8, "speed_tg": 40.0}',
    ]
    out = "\n".join(lines)
    assert peers_rows._batched(out, {}) == {"tg64x4": 31.5, "tg64x8": 40.0}


def test_time_and_memory_of_a_command(tmp_path):
    out, usage = peers._run(["/bin/sh", "-c", "sleep 0.05; echo said"], [])
    assert out == "said\n" and usage["seconds"] >= 0.05 and usage["peak_bytes"] > 1e5
    with pytest.raises(SystemExit, match="status 3: broken"):
        peers._run(["/bin/sh", "-c", "echo broken >&2; exit 3"], [])


def test_names_of_rows_and_figures_are_unique():
    assert len({row.name for row in peers.ROWS}) == len(peers.ROWS)
    for row in peers.ROWS:
        assert len({figure.name for figure in row.figures}) == len(row.figures) > 0
