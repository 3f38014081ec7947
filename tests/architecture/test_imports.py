"""The arrows between packages, read from the sources.

quant -> numpy     refimpl -> quant     fastpath -> quant and the nouns of refimpl     oracles -> none of ours
"""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = {"quant", "refimpl", "fastpath", "oracles", "tests"}
MAY_USE = {
    "quant": {"quant"},
    "refimpl": {"refimpl", "quant"},
    "fastpath": {"fastpath", "quant", "refimpl"},
    "oracles": {"oracles"},
}
THIRD_PARTY = {
    "quant": {"numpy"},
    "refimpl": {
        "numpy",
        "tokenizers",
        "jinja2",
        "imageio",
        "PIL",
        "av",
        "llguidance",
    },  # all but NumPy in frontend only
    # cuda.core comes with numba-cuda
    "fastpath": {"numpy", "numba", "llvmlite", "cuda", "huggingface_hub", "prompt_toolkit", "rich"},
}
NOUNS = (
    "refimpl.config",
    "refimpl.tensors",
    "refimpl.media_tensors",
    "refimpl.batch",
    "refimpl.kv_types",
    "refimpl.frontend",
)
FRONTEND_ONLY = {"tokenizers", "jinja2", "imageio", "PIL", "av", "llguidance"}
SERVER_ONLY = {"fastapi", "starlette", "pydantic", "uvicorn", "prometheus_client"}
VERBS_ALLOWED = {"fastpath/backend.py": "refimpl.ops"}  # `--backend ref`
NEVER = {"torch", "transformers", "gguf", "llama_cpp"}  # oracles are no part of what runs


def _sources(package):
    return sorted(path for path in (ROOT / package).rglob("*.py"))


def _imports(path):
    """Full names of the modules that a file imports, at any depth; importlib calls with a literal count."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = path.relative_to(ROOT).parts[0] if node.level else node.module
            yield from (f"{start}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.startswith("refimpl.ops")
        ):
            yield node.value


@pytest.mark.parametrize("package", MAY_USE)
def test_arrows_between_packages(package):
    for path in _sources(package):
        for name in _imports(path):
            top = name.split(".")[0]
            assert top not in OURS or top in MAY_USE[package], f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("package", THIRD_PARTY)
def test_third_parties(package):
    for path in _sources(package):
        where = str(path.relative_to(ROOT))
        for name in _imports(path):
            top = name.split(".")[0]
            if top in OURS or top == "__future__" or top in sys.stdlib_module_names:
                continue
            assert top not in NEVER, f"{where} imports {name}"
            if top in SERVER_ONLY:
                assert where.startswith("fastpath/server/"), f"{where} imports {name}; only the server may"
                continue
            assert top in THIRD_PARTY[package], f"{where} imports {name}"
            if top in FRONTEND_ONLY:
                assert where.startswith("refimpl/frontend/"), f"{where} imports {name}; only the frontend may"


def test_fastpath_uses_the_nouns_of_refimpl_only():
    """Sharing a verb would compare a function with itself."""
    for path in _sources("fastpath"):
        where = str(path.relative_to(ROOT))
        for name in _imports(path):
            if name.split(".")[0] != "refimpl" or name.startswith(VERBS_ALLOWED.get(where, "none")):
                continue
            noun = any(name == n or name.startswith(n + ".") for n in NOUNS)
            assert noun, f"{where} imports {name}; from refimpl it may use {', '.join(NOUNS)}"
