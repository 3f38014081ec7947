"""Downloads from a Hub on loopback, and everything that can go wrong on the way."""

import os
import re
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from fastpath.hub import fetch
from fastpath.hub.name import HubName
from fastpath.load import DEMO

DATA = np.random.default_rng(6).bytes(300_001)
NAME = HubName("owner/repo", "model.gguf")
BLOCK = 50_000


@pytest.fixture
def small_blocks(hub, monkeypatch):
    """The library writes what came in blocks of this size, and does not wait before it asks again."""
    from huggingface_hub import constants, file_download

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", BLOCK)
    monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)  # the module `time`: ours too


@pytest.fixture
def said():
    return []


@pytest.fixture
def get(hub, said):
    return lambda name=NAME, **options: fetch.fetch(name, say=said.append, **options)


def incomplete(tmp_path):
    return list((tmp_path / "cache").rglob("*.incomplete"))


def fault(call, *args, **options):
    with pytest.raises(ValueError) as caught:
        call(*args, **options)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 500, text
    return text


class TestDownloads:
    def test_into_the_hubs_own_cache(self, hub, get, tmp_path):
        hub.add(NAME.repo, NAME.file, DATA)
        path = get()
        assert path.read_bytes() == DATA
        assert path == tmp_path / "cache/models--owner--repo/snapshots" / ("a" * 40) / "model.gguf"
        from huggingface_hub import try_to_load_from_cache

        assert Path(try_to_load_from_cache(NAME.repo, NAME.file)) == path  # by the library's own rules
        assert not incomplete(tmp_path)

    def test_what_is_there_asks_nobody(self, hub, get):
        hub.add(NAME.repo, NAME.file, DATA)
        path = get()
        hub.asked.clear()
        assert get() == path and fetch.local_path("hf:owner/repo") == path
        assert hub.asked == []

    def test_a_cut_connection_goes_on_where_it_was(self, hub, get, said, small_blocks):
        hub.add(NAME.repo, NAME.file, DATA)
        hub.cut[NAME.file] = [2 * BLOCK + 7, 0, BLOCK]
        assert get().read_bytes() == DATA
        ranges = hub.gets(NAME.file)
        assert ranges[:3] == ["", f"bytes={2 * BLOCK}-", f"bytes={2 * BLOCK}-"] and len(ranges) == 4
        assert all("\n" not in line for line in said)

    def test_the_next_run_goes_on_too(self, hub, get, said, small_blocks, monkeypatch, tmp_path):
        hub.add(NAME.repo, NAME.file, DATA)
        write = fetch.Progress.write

        def interrupted(self, data):
            if self.done >= 3 * BLOCK:
                raise KeyboardInterrupt
            return write(self, data)

        monkeypatch.setattr(fetch.Progress, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            get()
        monkeypatch.setattr(fetch.Progress, "write", write)
        assert [path.stat().st_size for path in incomplete(tmp_path)] == [3 * BLOCK]
        assert get().read_bytes() == DATA
        assert hub.gets(NAME.file) == ["", f"bytes={3 * BLOCK}-"]
        assert any("going on behind 0.15 MB" in line for line in said)

    def test_large_files_lie_elsewhere(self, hub, get, small_blocks, monkeypatch):
        """Ranges go there, tokens do not."""
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        hub.add(NAME.repo, NAME.file, DATA)
        hub.redirects, hub.cut[NAME.file] = True, [2 * BLOCK]
        assert get().read_bytes() == DATA
        there = [wanted for _, path, wanted in hub.asked if path.startswith("/elsewhere")]
        assert there == ["", f"bytes={2 * BLOCK}-"]
        told = {path.split("/")[1]: token for path, token in hub.tokens}
        assert told == {"owner": "Bearer hf_secret", "elsewhere": ""} | {
            key: token for key, token in told.items() if key == "api"
        }

    def test_a_connection_that_keeps_breaking(self, hub, get, small_blocks, tmp_path):
        hub.add(NAME.repo, NAME.file, DATA)
        hub.cut[NAME.file] = [BLOCK] + 60 * [0]
        text = fault(get)
        assert str(NAME) in text and "run this again" in text
        assert [path.stat().st_size for path in incomplete(tmp_path)] == [BLOCK]

    def test_a_server_that_begins_at_the_beginning(self, hub, get, small_blocks):
        hub.add(NAME.repo, NAME.file, DATA)
        hub.cut[NAME.file], hub.no_range = [2 * BLOCK], {NAME.file}
        assert get().read_bytes() == DATA

    def test_all_bytes_there_but_unchecked(self, hub, get, tmp_path):
        hub.add(NAME.repo, NAME.file, DATA)
        blob = get().resolve()
        blob.rename(f"{blob}.incomplete")
        assert get(refresh=True).read_bytes() == DATA
        assert len(hub.gets(NAME.file)) == 1

    def test_more_bytes_than_the_file_has(self, hub, get, tmp_path):
        hub.add(NAME.repo, NAME.file, DATA)
        blob = get().resolve()
        Path(f"{blob}.incomplete").write_bytes(DATA + b"x")
        blob.unlink()
        assert get(refresh=True).read_bytes() == DATA

    def test_a_wrong_hash_is_thrown_away(self, hub, get, tmp_path):
        hub.add(NAME.repo, NAME.file, DATA)
        hub.etags[NAME.file] = "0" * 64
        text = fault(get)
        assert "expected 000000000000" in text and "thrown away" in text and str(NAME) in text
        assert not incomplete(tmp_path) and fetch.cached(NAME) is None
        del hub.etags[NAME.file]
        assert get().read_bytes() == DATA

    def test_bytes_that_changed_between_two_runs(self, hub, get, tmp_path):
        hub.add(NAME.repo, NAME.file, DATA)
        blob = get().resolve()
        blob.unlink()
        Path(f"{blob}.incomplete").write_bytes(b"z" * 1000)  # another beginning
        assert "thrown away" in fault(get, refresh=True)
        assert get(refresh=True).read_bytes() == DATA

    def test_the_hash_of_git(self, hub, get):
        """blob <length> NUL <bytes>: `printf 'hello\\n' | git hash-object --stdin`."""
        hub.add(NAME.repo, NAME.file, b"hello\n")
        hub.etags[NAME.file] = "ce013625030ba8dba906f756967f9e9ca394464a"
        assert get().read_bytes() == b"hello\n"

    def test_no_hash_at_all(self, hub, get):
        hub.add(NAME.repo, NAME.file, DATA)
        for etag in ("W-17", "../../../../elsewhere"):  # nor is it the name of a file
            hub.etags[NAME.file] = etag
            assert f"'{etag}' is no hash" in fault(get)
        assert all(method == "HEAD" for method, *_ in hub.asked), "it was fetched all the same"

    def test_models_in_parts(self, hub, get):
        for k in (1, 2, 3):
            hub.add(NAME.repo, f"Q8/m-0000{k}-of-00003.gguf", DATA[k:])
        path = get(HubName(NAME.repo, "Q8/m-00001-of-00003.gguf"))
        assert path.name == "m-00001-of-00003.gguf"
        assert sorted(p.name for p in path.parent.iterdir()) == [
            f"m-0000{k}-of-00003.gguf" for k in (1, 2, 3)
        ]
        assert fetch.local_path("hf:owner/repo") == path

    def test_progress_in_lines_without_a_terminal(self, hub, get, said, small_blocks):
        hub.add(NAME.repo, NAME.file, DATA)
        get()
        assert [line.split(" of ")[0] for line in said[1:]] == ["25 %", "50 %", "75 %", "100 %"]


class TestFaults:
    def test_gated(self, hub, get):
        hub.add(NAME.repo, NAME.file, DATA)
        for status in (401, 403):
            hub.repos[NAME.repo].gated = status
            text = fault(get)
            assert f"gated ({status})" in text and f"{hub.url}/owner/repo" in text and "HF_TOKEN" in text

    def test_no_such_repository(self, hub, get):
        assert "no such repository" in fault(get)

    def test_no_such_file_lists_what_is_there(self, hub, get):
        hub.add(NAME.repo, "other-Q4_0.gguf", DATA)
        text = fault(get)
        assert "no such file" in text and "other-Q4_0.gguf" in text

    def test_no_such_revision(self, hub, get):
        hub.add(NAME.repo, NAME.file, DATA)
        assert "no revision 'v2'" in fault(get, HubName(NAME.repo, NAME.file, "v2"))

    def test_a_commit(self, hub, get):
        hub.add(NAME.repo, NAME.file, DATA)
        assert get(HubName(NAME.repo, NAME.file, "a" * 40)).read_bytes() == DATA

    def test_a_hub_in_trouble(self, hub, get, small_blocks):
        hub.status = 503
        assert "answered 503" in fault(get)

    def test_no_network(self, hub, get, small_blocks):
        hub.close()
        text = fault(get)
        assert "does not answer" in text and "Check the connection" in text

    def test_no_network_but_a_file(self, hub, get, said, small_blocks):
        hub.add(NAME.repo, NAME.file, DATA)
        path = get()
        hub.close()
        assert get() == path and get(refresh=True) == path
        assert "does not answer" in said[-1]

    def test_offline_is_wanted(self, hub, get, monkeypatch):
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert "HF_HUB_OFFLINE is set" in fault(get)

    def test_a_full_disk(self, hub, get, monkeypatch):
        hub.add(NAME.repo, NAME.file, DATA)
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(fetch.shutil, "disk_usage", lambda path: usage(1, 1, 400_000_000))
        assert "got 0.40 GB free" in fault(get) and hub.gets(NAME.file) == []

    def test_a_server_that_is_no_hub(self, hub, get, monkeypatch):
        hub.add(NAME.repo, NAME.file, DATA)
        hub.repos[NAME.repo].commit = ""
        assert "HF_ENDPOINT" in fault(get)

    def test_without_the_library(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        assert "pip install 'twinpath[hub]'" in fault(fetch.local_path, "hf:owner/repo")


class TestWhichFile:
    def test_the_only_one(self, hub):
        for file in ("README.md", "m-Q8_0.gguf", "mmproj-m-f16.gguf", "mtp-m.gguf"):
            hub.add(NAME.repo, file, file.encode())
        got = {
            kind: fetch.local_path("hf:owner/repo", kind).name for kind in ("model", "projector", "drafter")
        }
        assert got == {"model": "m-Q8_0.gguf", "projector": "mmproj-m-f16.gguf", "drafter": "mtp-m.gguf"}

    def test_several_are_listed(self, hub):
        for file in ("m-Q8_0.gguf", "m-Q4_0.gguf", "mmproj-m-f16.gguf"):
            hub.add(NAME.repo, file, file.encode())
        text = fault(fetch.local_path, "hf:owner/repo")
        assert "2 files that may be the model" in text and "m-Q4_0.gguf, m-Q8_0.gguf." in text

    def test_none(self, hub):
        hub.add(NAME.repo, "config.json", b"{}")
        assert "no file that is a projector" in fault(fetch.local_path, "hf:owner/repo", "projector")

    def test_a_repository_of_the_list_is_known(self, hub):
        repo = "ggml-org/gemma-4-E4B-it-GGUF"
        for quant in ("Q8_0", "Q4_0"):
            hub.add(repo, f"gemma-4-E4B-it-{quant}.gguf", DATA)
        assert fetch.local_path(f"hf:{repo}").name == "gemma-4-E4B-it-Q8_0.gguf"


def test_environment_of_a_real_process(tmp_path):
    """A model of the Hub answers; the same command again, with the Hub gone, too."""
    pytest.importorskip("huggingface_hub")
    from tests.hub.fake import FakeHub

    with FakeHub() as hub:
        hub.add("owner/demo", "demo.gguf", DEMO.read_bytes())
        environment = {
            **os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "c"),
            "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1,localhost",
        }  # fmt: skip
        words = [sys.executable, "-m", "fastpath.cli", "inspect", "hf:owner/demo"]

        def run():
            return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)

        first = run()
        assert first.returncode == 0, first.stderr
        assert re.search(r"fetching hf:owner/demo/demo.gguf: \d+\.\d+ MB from 127", first.stderr)
    again = run()
    assert (again.returncode, again.stdout, again.stderr) == (0, first.stdout, "")
