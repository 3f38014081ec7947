"""huggingface_hub, pointed at a fake hub and an empty cache."""

import pytest

from tests.hub.fake import FakeHub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub", reason="the extra `hub` is not installed")
    from huggingface_hub import constants, file_download, utils

    with FakeHub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.split("/{repo_id}")[0]
        changed = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(template, hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", changed)
        if hasattr(file_download, "HUGGINGFACE_CO_URL_TEMPLATE"):
            monkeypatch.setattr(file_download, "HUGGINGFACE_CO_URL_TEMPLATE", changed)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        utils.reset_sessions() if hasattr(utils, "reset_sessions") else None  # they remember to be offline
        yield hub
