"""Every file and folder that a document names exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "oracles/README.md"]
NAMED = re.compile(r"`((?:quant|refimpl|fastpath|tests|oracles|docs)/[\w./-]*?)`")
PLACEHOLDERS = ("X.py", "<")


def _ours(document):
    for name in NAMED.findall(document.read_text()):
        name = name.split(":")[0].rstrip("/")
        if not any(placeholder in name for placeholder in PLACEHOLDERS):
            yield name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_files_exist(document):
    missing = [
        name for name in _ours(document) if not list(ROOT.glob(name)) and not list(ROOT.glob(name + ".*"))
    ]
    assert not missing, f"{document.name} names {missing}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_path_of_a_machine(document):
    assert not re.search(r"(?<![\w.])/(work|tmp|root|opt|home)/\w", document.read_text())
