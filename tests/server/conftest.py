"""One server over the demo checkpoint for all tests of this folder."""

import pytest

from fastpath.load import DEMO, load_model
from tests.server.serving import serving

for name in ("fastapi", "uvicorn", "openai", "anthropic", "ollama"):
    pytest.importorskip(name, reason=f"{name} is not installed: pip install 'twinpath[test-server]'")


@pytest.fixture(scope="session")
def demo():
    return load_model(DEMO)


@pytest.fixture(scope="session")
def served(demo):
    with serving(demo) as server:
        yield server


@pytest.fixture(scope="session")
def client(served):
    """HTTP without any API's client."""
    import httpx

    with httpx.Client(base_url=served.url, timeout=60) as made:
        yield made


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 0, "maximum": 30},
    },
    "required": ["city", "days"],
}
ENDS = {"1": -100, "9": -100, "16": -100}  # logit_bias: the demo's answers then go on until their limit
