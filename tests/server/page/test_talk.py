"""Conversations of the page: kept, edited, stopped, with tools."""

import json

from tests.server.page.browsing import FAKE, ask, ask_more, done, last_body, settle, until
from tests.server.test_openai import ANSWER, TOOLS


def test_a_chat_is_kept_edited_and_tried_again(page):
    settle(page, temperature="0")
    page.keyboard.type("What is Twinpath?")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.turn.assistant .bar span')?.textContent.includes('/s')")
    assert page.inner_text(".turn.assistant .body").strip() == ANSWER
    assert "of 12 prompt tokens cached" in page.inner_text(".turn.assistant .bar")
    done(page)
    page.reload()
    page.wait_for_selector(".turn.assistant")
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
    page.click("#list li:last-child button[aria-label^=Delete]")
    assert page.locator("#list li").count() == 1
    page.click("#hint button:has-text('Undo')")
    assert page.inner_text(".turn.user .body") == "Who are you?"


def test_conversations_are_answered_at_the_same_time(page):
    ask(page, "One", deltas=[{"content": "a"}, {"hold": True}, {"content": "b"}])
    until(page, "document.querySelector('.turn.assistant .body')?.textContent === 'a'")
    page.click("#new")
    ask(page, "Two", deltas=[{"content": "c"}])
    until(page, "document.querySelector('.turn.assistant .bar span')?.textContent.includes('/s')")
    assert page.locator("#list li.running").count() == 1
    page.evaluate("release()")
    done(page)
    page.click("#list button:has-text('One')")
    assert page.inner_text(".turn.assistant .body") == "ab" and page.is_visible("text=Retry")
    page.reload()
    page.wait_for_selector("#list button:has-text('One')")
    assert page.locator("#list li").count() == 2


def test_two_windows_keep_both_their_conversations(page, served):
    other = page.context.new_page()
    other.add_init_script(FAKE)
    other.goto(served.url)
    for window, text in ((page, "One"), (other, "Two")):
        ask(window, text, deltas=[{"content": "x"}])
        done(window)
    page.reload()
    page.wait_for_selector("#list button:has-text('One')")
    assert page.locator("#list li").count() == 2


def test_an_answer_is_stopped(page, served):
    ask_more(page, "body => ({ ...body, min_tokens: 4000 })")
    settle(page, temperature="0")
    page.keyboard.type("What is Twinpath?")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.turn.assistant .body')?.textContent.length > 20")
    assert page.inner_text("#send") == "Stop"
    page.keyboard.press("Escape")
    done(page)
    assert served.settled(2.0)
    assert "stopped" in page.inner_text(".turn.assistant .bar") and page.inner_text("#send") == "Send"


def test_an_answer_cut_off_goes_on(page):
    settle(page, temperature="0", max_tokens="6")
    ask(page, "What is Twinpath?")
    until(page, "document.querySelector('.turn.assistant .bar')?.textContent.includes('limit')")
    begun = page.inner_text(".turn.assistant .body")
    assert ANSWER.startswith(begun)
    page.click("text=Go on")
    until(page, "document.querySelector('.turn.assistant .bar')?.textContent.includes('/s')")
    assert last_body(page)["continue_final_message"] and page.locator(".turn.assistant").count() == 1
    assert last_body(page)["messages"][-1] == {"role": "assistant", "content": begun}
    assert len(page.inner_text(".turn.assistant .body")) > len(begun)


def test_thoughts_are_folded(page):
    settle(page, temperature="0", thinking_budget="30")
    page.check("#think")
    ask(page, "What is Twinpath?")
    until(page, "document.querySelector('.turn.assistant .bar span')?.textContent.includes('/s')")
    assert page.locator("details.thought").count() == 1
    assert not page.evaluate("document.querySelector('details.thought').open")
    page.click("summary")
    assert page.inner_text("details.thought div")


def test_settings_go_with_a_request(page):
    page.click("#settings")
    given = {"system": "Be brief.", "temperature": "0.5", "top_k": "7", "seed": "3", "max_tokens": "9"}
    for name, value in given.items():
        page.fill(f"[name={name}]", value)
    page.fill("[name=tools]", "[{]")
    page.click("dialog button.main")
    assert page.evaluate("$('options').open && !$('options').querySelector('[name=tools]').validity.valid")
    page.fill("[name=tools]", "")
    page.click("dialog button.main")
    ask(page, "Hi", deltas=[{"content": "x"}])
    done(page)
    body = last_body(page)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."} and "tools" not in body
    assert {name: body[name] for name in list(given)[1:]} == {
        "temperature": 0.5, "top_k": 7, "seed": 3, "max_tokens": 9,
    }  # fmt: skip


def test_a_tool_is_called_and_answered_by_hand(page):
    settle(page, temperature="0", tools=json.dumps(TOOLS), max_tokens="80")
    ask_more(
        page,
        """body => ({ ...body, parallel_tool_calls: false,
            tool_choice: body.messages.some((m) => m.role === "tool") ? "none" : "required" })""",
    )
    ask(page, "Weather?")
    page.wait_for_selector(".call textarea")
    assert "get_weather" in page.inner_text(".call")
    done(page)
    page.keyboard.type("20 degrees")  # the focus is there
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn.tool")
    done(page)
    assert page.locator(".turn.assistant").count() == 2
    *_, call, result = last_body(page)["messages"]
    assert result["content"] == "20 degrees" and result["tool_call_id"] == call["tool_calls"][0]["id"]


def test_two_calls_and_calls_that_nobody_answers(page):
    calls = [{"index": k, "id": f"c{k}", "type": "function", "function": {"name": f"f{k}", "arguments": "{}"}}
             for k in range(2)]  # fmt: skip
    ask(page, "Go", deltas=[{"tool_calls": calls}], reason="tool_calls")
    done(page)
    page.evaluate("fakes.push({ deltas: [{ content: 'both' }] })")
    for k in (1, 0):
        page.fill(f"[aria-label='Result of f{k}']", str(k))
        page.press(f"[aria-label='Result of f{k}']", "Enter")
    until(page, "document.querySelectorAll('.turn.assistant .body')[1]?.textContent === 'both'")
    assert [m.get("tool_call_id") for m in last_body(page)["messages"]] == [None, None, "c1", "c0"]
    done(page)
    ask(page, "Go", deltas=[{"tool_calls": calls}], reason="tool_calls")
    done(page)
    ask(page, "Never mind", deltas=[{"content": "x"}])
    done(page)
    assert [m["content"] for m in last_body(page)["messages"]][-2:] == ["Go", "Never mind"]


def test_what_is_exported_can_be_loaded_in_the_terminal(page, tmp_path):
    from fastpath.cli.chat.conversation import Conversation

    settle(page, system="Be brief.")
    ask(page, "What is 1+1?", deltas=[{"reasoning_content": "hm"}, {"content": "2"}])
    done(page)
    with page.expect_download() as download:
        page.click("#export")
    assert download.value.suggested_filename == "What-is-1-1.json"
    download.value.save_as(tmp_path / "c.json")
    talk = Conversation.load(str(tmp_path / "c.json"))
    assert talk.system == "Be brief." and [m["content"] for m in talk.messages] == ["What is 1+1?", "2"]
