"""The table of oracles.mtmd_speed: figures of programs that answer at once, and the page around its marks."""

import json
import re
import stat
import sys

import pytest

from oracles import mtmd_speed


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """(cli, encoders): a llama-mtmd-cli that says 900 and 300 ms, and a bench that says 600 and 300."""
    cli = tmp_path / "llama-mtmd-cli"
    cli.write_text(
        f"#!{sys.executable}\nimport sys\n"
        "assert open(sys.argv[sys.argv.index('--image') + 1], 'rb').read(4) == b'\\x89PNG'\n"
        "assert open(sys.argv[sys.argv.index('--audio') + 1], 'rb').read(4) == b'RIFF'\n"
        "print('image slice encoded in 900 ms', file=sys.stderr)\n"
        "print('audio slice encoded in 300 ms', file=sys.stderr)\n"
    )
    cli.chmod(cli.stat().st_mode | stat.S_IXUSR)
    common = {"cpu_info": "CPU X", "backends": "CPU, avx2", "n_threads": 3}
    rows = [
        common | {"test": "image of 280", "median_ns": 6e8},
        common | {"test": "audio of 10 s", "median_ns": 3e8},
    ]
    bench = tmp_path / "python"
    bench.write_text(f"#!{sys.executable}\nprint({json.dumps(rows)!r})\n")
    bench.chmod(bench.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(mtmd_speed.sys, "executable", str(bench))
    return cli, tmp_path / "a-mmproj.gguf"


def test_the_table_is_written_between_its_marks(programs, tmp_path, monkeypatch, capsys):
    cli, mmproj = programs
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{mtmd_speed.BEGIN}old\n{mtmd_speed.END}after\n")
    monkeypatch.setattr(mtmd_speed, "PAGE", page)
    words = [
        "x",
        "--cli",
        cli,
        "--model",
        "e2b.gguf",
        "--mmproj",
        mmproj,
        mmproj,
        "--threads",
        "3",
        "--pairs",
        "2",
    ]
    monkeypatch.setattr("sys.argv", [*map(str, words), "--write"])
    mtmd_speed.main()
    text = page.read_text()
    assert text.startswith(f"before\n{mtmd_speed.BEGIN}\n") and text.endswith(f"\n{mtmd_speed.END}after\n")
    rows = re.findall(r"^\| a-mmproj.*$", text, re.M)
    assert (
        rows[:2]
        == rows[2:]
        == [
            "| a-mmproj.gguf | image of 280 soft tokens | 600 | 900 | 1.50 | 1.50 .. 1.50 | yes |",
            "| a-mmproj.gguf | 10 s of sound | 300 | 300 | 1.00 | 1.00 .. 1.00 | no |",
        ]
    )
    assert "old" not in text and "CPU X; CPU, avx2; 3 threads; medians of 2 pairs" in text
    assert str(tmp_path) not in text  # names of files, not of folders
    assert capsys.readouterr().out.count("| a-mmproj") == 4


def test_the_page_has_the_marks():
    page = mtmd_speed.PAGE.read_text()
    assert page.index(mtmd_speed.BEGIN) < page.index(mtmd_speed.END)


def test_a_page_without_marks_is_left_alone(tmp_path):
    page = tmp_path / "p.md"
    page.write_text("nothing here")
    with pytest.raises(SystemExit, match="are not both there"):
        mtmd_speed.write(page, "x")
    assert page.read_text() == "nothing here"
