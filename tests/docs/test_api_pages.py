"""The Python of the API pages, run as it stands, against a server over the demo checkpoint."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("server", "openai", "anthropic", "ollama")
for name in ("fastapi", "uvicorn", "openai", "anthropic", "ollama"):
    pytest.importorskip(name, reason=f"{name} is not installed: pip install 'twinpath[test-server]'")


@pytest.fixture(scope="module")
def served():
    from fastpath.load import DEMO, load_model
    from tests.server.serving import serving

    with serving(load_model(DEMO)) as server:
        yield server


@pytest.mark.parametrize("page", PAGES)
def test_every_block_runs(page, served):
    text = (DOCS / f"{page}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert blocks
    known: dict = {}
    for block in blocks:
        exec(compile(block.replace("http://127.0.0.1:5000", served.url), f"{page}.md", "exec"), known)


def test_every_option_of_serve_that_is_named_exists():
    import argparse

    from fastpath.cli.serve import add_serve

    parser = argparse.ArgumentParser()
    add_serve(parser)
    for option in re.findall(r"--[a-z][a-z-]+", (DOCS / "server.md").read_text()):
        assert option in parser._option_string_actions, option
