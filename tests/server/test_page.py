"""The page at / in headless Chromium: needs `pip install playwright` and Debian's package chromium."""

import json
import shutil
import time

import httpx
import pytest

from tests.media import files
from tests.server.test_openai import ANSWER, TOOLS

CHROMIUM = shutil.which("chromium")


def test_the_page_needs_nothing_from_outside(client):
    answer = client.get("/")
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    for word in ('src="', "@import", 'rel="stylesheet"', "innerHTML", "eval("):
        assert word not in answer.text, word


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def page(browser, served):
    context = browser.new_context(viewport={"width": 1000, "height": 700})
    made = context.new_page()
    faults = []
    made.on("pageerror", lambda error: faults.append(str(error)))
    made.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
    made.goto(served.url)
    until(made, "document.getElementById('model').textContent.includes('demo')")
    yield made
    assert not faults, faults
    context.close()


def settle(page, **settings):
    page.evaluate("given => { Object.assign(settings, given); kept.write('settings', settings); }", settings)


def until(page, truth):
    """Playwright's own waiting evaluates strings in the page, which its policy forbids."""
    deadline = time.monotonic() + 20
    while not page.evaluate(truth):
        assert time.monotonic() < deadline, f"never: {truth}"
        time.sleep(0.02)


def ask_more(page, script):
    """What `script` makes of a request's body is sent in its place."""
    page.evaluate(
        f"""() => {{ const send = window.fetch; window.fetch = (url, given) => {{
            if (given?.body) given.body = JSON.stringify(({script})(JSON.parse(given.body)));
            return send(url, given); }}; }}"""
    )


def done(page):
    until(page, "document.getElementById('send').textContent === 'Send'")


def test_a_chat_is_kept_edited_and_tried_again(page):
    settle(page, temperature="0")
    page.keyboard.type("What is Twinpath?")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.turn.assistant .bar span')?.textContent.includes('/s')")
    assert page.inner_text(".turn.assistant .body").strip() == ANSWER
    page.reload()
    assert page.inner_text(".turn.assistant .body").strip() == ANSWER
    page.click(".turn.assistant button:has-text('Retry')")
    done(page)
    assert page.inner_text(".turn.assistant .body").strip() == ANSWER
    page.click(".turn.user button:has-text('Edit')")
    page.fill(".turn textarea", "Who are you?")
    page.keyboard.press("Enter")
    done(page)
    assert page.inner_text(".turn.user .body") == "Who are you?"
    page.keyboard.press("Control+Shift+O")
    assert page.locator(".turn").count() == 0 and page.locator("#list li").count() == 2


def test_an_answer_is_stopped(page, served):
    ask_more(page, "body => ({ ...body, min_tokens: 4000 })")
    settle(page, temperature="0")
    page.keyboard.type("What is Twinpath?")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.turn.assistant .body')?.textContent.length > 20")
    page.keyboard.press("Escape")
    done(page)
    assert served.settled(2.0)
    assert "stopped" in page.inner_text(".turn.assistant .bar")


def test_thoughts_are_folded(page):
    settle(page, temperature="0", thinking_budget="30")
    page.check("#think")
    page.click("#text")
    page.keyboard.type("What is Twinpath?")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.turn.assistant .bar span')?.textContent.includes('/s')")
    assert page.locator("details.thought").count() == 1
    assert not page.evaluate("document.querySelector('details.thought').open")


def test_a_tool_is_called_and_answered_by_hand(page):
    settle(page, temperature="0", tools=json.dumps(TOOLS))
    ask_more(
        page,
        """body => ({ ...body, parallel_tool_calls: false,
            tool_choice: body.messages.some((m) => m.role === "tool") ? "none" : "required" })""",
    )
    page.keyboard.type("Weather?")
    page.keyboard.press("Enter")
    page.wait_for_selector(".call textarea")
    assert "get_weather" in page.inner_text(".call")
    page.fill(".call textarea", "20 degrees")
    page.click("text=Give the result")
    page.wait_for_selector(".turn.tool")
    done(page)
    assert page.locator(".turn.assistant").count() == 2


def test_markdown_is_nodes_and_never_html(page):
    text = (
        "# T\n\nA **b** `c<d>` *e* [f](https://g.h/) <img src=x onerror=alert(1)> "
        "[x](javascript:alert(1))\n\n"
        "- one\n  - two\n- three\n\n1. x\n2. y\n\n| a | b |\n|---|:-:|\n| 1 | `2` |\n\n> q\n\n"
        "```py\nprint('<b>')\n```\n\n---\nlast"
    )
    html = page.evaluate(
        "text => { const box = make('div', {}, markdown(text)); return box.innerHTML; }",
        text,
    )
    pieces = ["<h1>T</h1>", "<strong>b</strong>", "<code>c&lt;d&gt;</code>", "<em>e</em>", "<td>1</td>"]
    pieces += ['<a href="https://g.h/"', "&lt;img", "<li>two</li>", "<blockquote>", "<hr>", "<ol"]
    for piece in pieces:
        assert piece in html, (piece, html)
    assert "<img" not in html and 'href="javascript' not in html and "print('&lt;b&gt;')" in html


def test_any_markdown_ends(page):
    """Whatever a model writes, on its way to being whole: each beginning of a text is drawn as well."""
    text = "a\n- \n1. x\n   - y\n\n\n  * z\n|a|\n|-|\n```\n``` \n~~~py\n~~~\n> > q\n#\n# \n***\n_*_**`a`` b`"
    shown = page.evaluate("""text => { for (let k = 0; k <= text.length; k++) markdown(text.slice(0, k));
        return markdown(text).textContent.length; }""", text)  # fmt: skip
    assert shown > 0


def test_a_picture_is_attached_by_pasting(page):
    name = next(iter(files.PICTURES))
    data = list(files.png(files.picture(name)))
    page.evaluate("""data => { const files = new DataTransfer();
        files.items.add(new File([new Uint8Array(data)], 'x.png', { type: 'image/png' }));
        document.dispatchEvent(new ClipboardEvent('paste', { clipboardData: files, bubbles: true })); }""",
        data)  # fmt: skip
    page.wait_for_selector("#attached img")
    assert page.evaluate("document.querySelector('#attached img').naturalWidth") > 0
    page.click("#attached button")
    assert page.locator("#attached img").count() == 0


def test_faults_of_the_server_are_shown(browser, demo):
    from tests.server.serving import serving

    with serving(demo, api_key="k") as served:
        page = browser.new_page()
        page.goto(served.url)
        until(page, "document.getElementById('model').textContent.includes('API key')")
        page.click("#settings")
        page.fill("[name=key]", "k")
        page.click("dialog button.main")
        until(page, "document.getElementById('model').textContent.includes('demo')")
        page.close()
        assert httpx.get(served.url).status_code == 200
