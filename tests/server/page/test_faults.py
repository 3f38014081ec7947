"""What the page says when something goes wrong."""

import httpx
import pytest

from tests.server.page.browsing import ask, done, last_body, until
from tests.server.serving import serving


def test_faults_of_the_server_are_shown(browser, demo):
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


REFUSALS = [
    ({"gone": True}, "The server does not answer."),
    (
        {"status": 429, "json": {"error": {"message": "busy"}}, "headers": {"Retry-After": "3"}},
        "Retry in 3 s.",
    ),
    ({"status": 401, "json": {"error": {"message": "no"}}}, "wants an API key"),
    ({"status": 500, "json": None}, "status 500"),
    ({"deltas": [{"content": "half an"}, {"cut": True}]}, "broke off"),
]


@pytest.mark.parametrize("fake, told", REFUSALS, ids=[told for _, told in REFUSALS])
def test_a_fault_is_told_and_tried_again(page, fake, told):
    ask(page, "Go", **fake)
    page.wait_for_selector(".error[role=alert]")
    assert told in page.inner_text(".error")
    done(page)
    page.evaluate("fakes.push({ deltas: [{ content: 'fine' }] })")
    page.click("button:has-text('Retry')")
    until(page, "document.querySelector('.turn.assistant .body')?.textContent === 'fine'")
    done(page)
    assert page.locator(".error").count() == 0 and len(last_body(page)["messages"]) == 1


def test_too_long_a_conversation_is_told_with_its_numbers(browser, served):
    page = browser.new_page()  # the browser itself calls a 400 an error
    page.goto(served.url)
    page.fill("#text", "abc " * 6000)
    page.press("#text", "Enter")
    page.wait_for_selector(".error")
    assert "context holds 4096" in page.inner_text(".error")
    page.close()
