"""Names, the list of published files, and which of them belong together."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from fastpath.hub import catalogue
from fastpath.hub.catalogue import CATALOGUE, HubName
from fastpath.media import load_projector
from tests import tiny
from tests.media import tiny_mmproj


@pytest.mark.parametrize(
    "text, expected",
    [
        ("hf:a/b", HubName("a/b")),
        ("hf:a-1/b.c_d", HubName("a-1/b.c_d")),
        ("hf:a/b/c.gguf", HubName("a/b", "c.gguf")),
        ("hf:a/b/MTP/c d.gguf@v1", HubName("a/b", "MTP/c d.gguf", "v1")),
        ("hf:a/b@refs/pr/3", HubName("a/b", "", "refs/pr/3")),
    ],
)
def test_names(text, expected):
    assert HubName.parse(text) == expected and str(expected) == text


@pytest.mark.parametrize(
    "text", ["hf:", "hf:a", "hf:a/b/", "hf:a/b//c", "hf:/a/b", "hf:a/b@", "hf:../b/c", "hf:a/b/../c"]
)
def test_no_names(text):
    with pytest.raises(ValueError, match="expected hf:OWNER/REPO"):
        HubName.parse(text)


def test_bytes_of_keys_and_values():
    """E4B: of the 24 layers that own keys every sixth is global (2 heads of 512), the others see 512
    positions (2 heads of 256); keys and values, 2 bytes each.  A ring has room for 511 positions before a
    call of 1024.
    """
    positions = 512 - 1 + 1024
    low = 4 * 8192 * 2 * 512 * 4 + 20 * positions * 2 * 256 * 4
    assert low <= catalogue.kv_bytes("E4B", 8192) <= low + 20 * 2 * 64 * 2 * 256 * 4  # and at most two pages
    assert catalogue.kv_bytes("31B", 1 << 40) == catalogue.kv_bytes("31B", 262144)


def test_needs_more_for_more_context():
    for entry in CATALOGUE:
        files = (entry.model.gb + entry.projectors[0].gb) * 1e9
        assert files < entry.bytes_needed(1024) < entry.bytes_needed(8192) < files + 5e9


def test_the_list_names_no_file_of_another_size():
    assert len({entry.id for entry in CATALOGUE}) == len(CATALOGUE)
    for entry in CATALOGUE:
        for piece in (entry.model, *entry.projectors, *entry.drafters):
            assert f"gemma-4-{entry.size}-it" in piece.repo
            assert catalogue.size_of(piece.name) == entry.size


class TestPairs:
    WRONG = "hf:ggml-org/gemma-4-26B-A4B-it-GGUF/mmproj-gemma-4-26B-A4B-it-Q8_0.gguf"
    RIGHT = "hf:ggml-org/gemma-4-E4B-it-GGUF/mmproj-gemma-4-E4B-it-Q8_0.gguf"

    @pytest.mark.parametrize("name", [WRONG, "hf:ggml-org/gemma-4-26B-A4B-it-GGUF"])
    def test_refused_before_it_is_fetched(self, name):
        model = SimpleNamespace(path=Path("m.gguf"), config=SimpleNamespace(model_dim=2560))
        with pytest.raises(ValueError, match=r"projector for 26B-A4B.*width 2560 of m\.gguf") as caught:
            load_projector(model, name)
        assert self.RIGHT in str(caught.value) and "\n" not in str(caught.value)

    def test_the_right_one_and_unknown_ones_pass(self):
        catalogue.check_pair(HubName.parse(self.RIGHT), "projector", 2560, "m.gguf")
        catalogue.check_pair(HubName("me/mine", "mmproj.gguf"), "projector", 77, "m.gguf")

    def test_a_drafter(self):
        name = HubName("unsloth/gemma-4-12B-it-qat-GGUF", "mtp-gemma-4-12B-it.gguf")
        with pytest.raises(ValueError, match=r"drafter for 12B.*AtomicChat/gemma-4-E4B-it-assistant-GGUF"):
            catalogue.check_pair(name, "drafter", 2560, "m.gguf")

    def test_a_wrong_file_of_this_machine(self, tmp_path, monkeypatch):
        from fastpath.load import load_model

        model = load_model(tiny.make(tmp_path / "e2b.gguf", "e2b"))
        wrong = next(f for f in tiny_mmproj.ENCODERS if tiny.FAMILIES[f].D != model.config.model_dim)
        path = tiny_mmproj.make(tmp_path / "wrong.gguf", wrong)
        sizes = {**catalogue.SIZES, "E4B": SimpleNamespace(D=model.config.model_dim)}
        monkeypatch.setattr(catalogue, "SIZES", sizes)
        with pytest.raises(
            ValueError, match=r"wrong\.gguf.*Use the projector of that model, such as hf:ggml-org"
        ) as error:
            load_projector(model, str(path))
        assert self.RIGHT in str(error.value)
        (tmp_path / "wrong.gguf").unlink()
        with pytest.raises(ValueError, match=r"none lies beside it.*--mmproj hf:ggml-org"):
            load_projector(model, None)
