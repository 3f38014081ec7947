"""The page at / in headless Chromium: `make test-page` installs what drives it; Debian's package is chromium.

Most tests talk to the demo checkpoint; those of what is drawn, and when, to a server of the page's own making
(`FAKE`), whose answers come as a test says.
"""

import pytest

from tests.server.page import browsing
from tests.server.serving import serving


@pytest.fixture(scope="package")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if browsing.CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=browsing.CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def opened(browser):
    """opened(url, ...) -> a page of a fresh browser; no fault and no refusal of its policy may come."""
    contexts, faults = [], []

    def open(url, **options):
        context = browser.new_context(**{"viewport": {"width": 1000, "height": 700}, **options})
        context.set_default_timeout(60_000)
        contexts.append(context)
        made = context.new_page()
        made.on("pageerror", lambda error: faults.append(str(error)))
        made.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
        made.add_init_script(browsing.FAKE)
        made.goto(url)
        browsing.until(made, "document.getElementById('model').textContent.includes('demo')")
        return made

    yield open
    for context in contexts:
        context.close()
    assert not faults, faults


@pytest.fixture
def page(opened, served):
    return opened(served.url)


@pytest.fixture(scope="module")
def seeing(demo, tmp_path_factory):
    """The demo with encoders of random weights: what it says of a picture is noise, which is enough here."""
    from refimpl.media_tensors import load_media
    from tests.docs.test_readme import random_encoders

    media = load_media(random_encoders(tmp_path_factory.mktemp("page") / "mmproj.gguf"))
    with serving(demo, media=media, image_budget=70, max_tokens=4) as served:
        yield served
