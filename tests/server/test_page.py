"""The page at / in headless Chromium: `make test-page` installs what drives it; Debian's package is chromium.

Most tests talk to the demo checkpoint; those of what is drawn, and when, to a server of the page's own making
(`FAKE`), whose answers come as a test says.
"""

import base64
import json
import shutil
import time

import httpx
import pytest

from tests.media import files
from tests.server.serving import serving
from tests.server.test_openai import ANSWER, TOOLS

CHROMIUM = shutil.which("chromium")

# Requests get what lies in `fakes`, if something does: {status, json, headers}, {gone: true}, or {deltas},
# whose items are pieces of an answer, {hold: true} (until `release()` is called), {cut: true}; and {reason}.
FAKE = """
window.fakes = []; window.bodies = []; window.release = () => {};
const sent = window.fetch;
window.fetch = (url, given) => {
  if (given?.body) bodies.push(JSON.parse(given.body));
  const fake = String(url).includes("chat/completions") ? fakes.shift() : undefined;
  if (!fake) return sent(url, given);
  if (fake.gone) return Promise.reject(new TypeError("Failed to fetch"));
  if (fake.status) return Promise.resolve(new Response(JSON.stringify(fake.json), fake));
  const frame = (value) => new TextEncoder().encode("data: " + JSON.stringify(value) + "\\n\\n");
  const start = async (out) => {
    given.signal.addEventListener("abort", () => out.error(new DOMException("", "AbortError")));
    for (const delta of fake.deltas) {
      if (delta.hold) await new Promise((done) => (window.release = done));
      else if (delta.cut) return out.error(new TypeError("network error"));
      else out.enqueue(frame({ choices: [{ index: 0, delta, finish_reason: null }] }));
      await new Promise((done) => setTimeout(done));
      if (given.signal.aborted) return;
    }
    out.enqueue(frame({ choices: [{ index: 0, delta: {}, finish_reason: fake.reason ?? "stop" }] }));
    const usage = { prompt_tokens: 9, completion_tokens: 7, prompt_tokens_details: { cached_tokens: 5 } };
    const timings = { predicted_per_second: 31.4, first_token_ms: 84 };
    out.enqueue(frame({ choices: [], usage, timings }));
    out.close();
  };
  return Promise.resolve(new Response(new ReadableStream({ start })));
};
"""


def test_the_page_needs_nothing_from_outside(client):
    answer = client.get("/")
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    for word in ('src="', "@import", 'rel="stylesheet"', "innerHTML", "insertAdjacent", "eval("):
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
        made.add_init_script(FAKE)
        made.goto(url)
        until(made, "document.getElementById('model').textContent.includes('demo')")
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


def settle(page, **settings):
    page.evaluate("given => { Object.assign(settings, given); kept.write('settings', settings); }", settings)


def until(page, truth):
    """Playwright's own waiting evaluates strings in the page, which its policy forbids."""
    deadline = time.monotonic() + 60
    while not page.evaluate(truth):
        assert time.monotonic() < deadline, f"never: {truth}"
        time.sleep(0.02)


def ask(page, text, **fake):
    """Types a message and sends it; with an answer of the page's own making, if one is given."""
    if fake:
        page.evaluate("fake => fakes.push(fake)", fake)
    page.fill("#text", text)
    page.press("#text", "Enter")


def done(page):
    until(page, "running.size === 0")


def last_body(page):
    return page.evaluate("bodies.at(-1)")


def ask_more(page, script):
    """What `script` makes of a request's body is sent in its place."""
    page.evaluate(
        f"""() => {{ const send = window.fetch; window.fetch = (url, given) => {{
            if (given?.body) given.body = JSON.stringify(({script})(JSON.parse(given.body)));
            return send(url, given); }}; }}"""
    )


# -- conversations -----------------------------------------------------------------------------------------


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


# -- what is drawn -----------------------------------------------------------------------------------------

TEXT = """# T

A **b** `c<d>` *e* ***x*** \\*y\\* [f](https://g.h/) <img src=x onerror=alert(1)> [x](javascript:alert(1)) \
[y](data:text/html,1) <script>alert(1)</script>

- one
  - two

    ```sh
    # a
    ls | cat
    ```
- three

1. x

   more
2. y

| a | b |
|---|:-:|
| 1<br>2 | `2` |

> q
> - r

```py
print('<b>')  # no

def f(): return 1
```

---
last *line*
here"""


def html(page, script, text=TEXT):
    return page.evaluate(f"text => {{ const box = make('div'); {script}; return box.innerHTML; }}", text)


def test_markdown_is_nodes_and_never_html(page):
    made = html(page, "box.append(markdown(text))")
    pieces = ["<h1>T</h1>", "<strong>b</strong>", "<code>c&lt;d&gt;</code>", "<em>e</em>", ">1<br>2</td>"]
    pieces += ['<a href="https://g.h/"', "&lt;img", "<li>two<div", "<blockquote>", "<hr>", "<ol", "*y*"]
    pieces += [
        "<strong><em>x</em></strong>",
        "<li>y</li>",
        "&lt;script&gt;",
        "center;",
        "<i># a</i>",
        "ls | cat",
    ]
    pieces += [
        "<u>'&lt;b&gt;'</u>",
        "<i># no</i>",
        "<b>def</b>",
        "last <em>line</em>\nhere</p>",
        "<li>r</li>",
    ]
    for piece in pieces:
        assert piece in made, (piece, made)
    assert made.count("href=") == 1 and "<img" not in made and "<script" not in made and "onerror=" in made
    assert made.count("<ol") == 1 and made.count("<ul") == 3 and "<li><p>x</p><p>more</p></li>" in made, made


def test_an_answer_drawn_as_it_grows_looks_as_one_drawn_at_once(page):
    for step in (1, 3, 50):
        grown = html(page, f"""const turn = {{ role: "assistant", content: "" }}; talk.turns.push(turn);
            const view = new View(turn, 0);
            for (let k = 0; k < text.length; k += {step}) {{
                turn.content = text.slice(0, k + {step}); view.draw(); }}
            talk.turns.pop(); box.append(...view.body.childNodes)""")  # fmt: skip
        assert grown == html(page, "box.append(markdown(text))"), step


def test_any_markdown_ends(page):
    """Whatever a model writes, on its way to being whole: each beginning of a text is drawn as well."""
    text = "a\n- \n1. x\n   - y\n\n\n  * z\n|a|\n|-|\n```\n``` \n~~~py\n~~~\n> > q\n#\n# \n***\n_*_**`a`` b`"
    shown = page.evaluate("""text => { for (let k = 0; k <= text.length; k++) markdown(text.slice(0, k));
        return markdown(text).textContent.length; }""", text)  # fmt: skip
    assert shown > 0
    hard = [
        "> " * 5000,
        "- " * 5000,
        "*" * 5000,
        "**a " * 2000,
        "`" * 5000,
        "` `` " * 1000,
        "[" * 5000,
        "_a" * 5000,
    ]
    hard += [
        "|" * 5000 + "\n" + "|-" * 2500,
        "\n".join(" " * k + "- a" for k in range(300)),
        "-" * 5000 + "a",
        "~~a" * 2000,
    ]
    for text in hard:
        took = page.evaluate(
            "text => { const t = performance.now(); markdown(text); return performance.now() - t; }", text
        )
        assert took < 2000, (text[:20], took)  # milliseconds; each is under 100 on an idle machine


def test_who_has_scrolled_up_stays_there(page):
    lines = [{"content": f"line {k}\n\n"} for k in range(60)]
    ask(page, "Go", deltas=[*lines, {"hold": True}, *lines, {"hold": True}, *lines])
    until(page, "document.querySelector('.turn.assistant .body')?.textContent.includes('line 59')")
    assert page.evaluate("isAtEnd()") and page.is_hidden("#down")
    page.evaluate("release()")
    until(page, "document.querySelectorAll('.turn.assistant p').length === 120")
    assert page.evaluate("isAtEnd()")
    page.evaluate("$('log').scrollTop = 300")
    page.wait_for_selector("#down", state="visible")
    page.evaluate("release()")
    done(page)
    assert page.locator(".turn.assistant p").count() == 180
    assert page.evaluate("$('log').scrollTop") == 300
    page.click("#down")
    assert page.evaluate("isAtEnd()") and page.is_hidden("#down")


def test_what_is_copied(page):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ask(page, "Go", deltas=[{"content": "See **this**:\n```py\nx = 1\n```"}])
    done(page)
    for name, text in (("Copy code", "x = 1"), ("Copy", "See **this**:\n```py\nx = 1\n```")):
        page.click(f".turn.assistant [aria-label='{name}']")
        until(
            page,
            f"document.querySelector(\".turn.assistant [aria-label='{name}']\").textContent === 'Copied'",
        )
        assert page.evaluate("navigator.clipboard.readText()") == text


def test_keys_are_enough(page):
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.evaluate("fakes.push({ deltas: [{ content: 'x' }] })")
    page.keyboard.press("Enter")
    done(page)
    assert last_body(page)["messages"][0]["content"] == "one\ntwo"
    assert page.evaluate("document.activeElement.id") == "text"
    seen = []
    page.focus("#new")
    for k in range(12):
        if k:
            page.keyboard.press("Tab")
        seen.append(page.evaluate("""() => { const at = document.activeElement, style = getComputedStyle(at);
            return [at.ariaLabel || at.textContent.trim() || at.labels?.[0]?.textContent.trim() || "",
                style.outlineStyle !== "none" || at.id === "text"]; }"""))  # fmt: skip
    names = [name.replace("\n", " ") for name, _ in seen]
    order = ["New conversation", "one two", "Delete one two", "Think", "Export", "Light or dark", "Settings"]
    assert names == [*order, "Edit", "Copy", "Copy", "Retry", "Message"]
    assert all(name for name, _ in seen) and all(is_seen for _, is_seen in seen), seen


def test_everything_has_a_name(page):
    ask(page, "Go", deltas=[{"reasoning_content": "hm"}, {"content": "x"}])
    done(page)
    page.click("#settings")
    nameless = page.evaluate("""() => [...document.querySelectorAll("button, input, textarea, nav, dialog")]
        .filter((at) => !(at.ariaLabel || at.textContent.trim() || at.labels?.length || at.hidden
            || at.getAttribute("aria-labelledby"))).map((at) => at.outerHTML)""")  # fmt: skip
    assert not nameless


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_what_is_behind_them(opened, served, scheme):
    """Contrast of at least 4.5 to 1, as WCAG 2 asks for."""
    page = opened(served.url, color_scheme=scheme)
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    pairs = [(word, back) for back in ("back", "panel", "user") for word in ("text", "dim")]
    pairs += [(word, "code") for word in ("text", "word", "quoted", "number", "comment", "dim")]
    pairs += [("bad", "bad-back"), ("accent", "back"), ("on-accent", "accent")]
    colour = "name => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim()"

    def luminance(name):
        hexes = page.evaluate(colour, name)[1:]
        parts = [int(hexes[k : k + 2], 16) / 255 for k in (0, 2, 4)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for pair in pairs:
        low, high = sorted(map(luminance, pair))
        assert (high + 0.05) / (low + 0.05) >= 4.5, pair
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") != scheme


def test_a_phone_is_wide_enough(opened, served):
    page = opened(served.url, viewport={"width": 360, "height": 640}, is_mobile=True, has_touch=True)
    wide = (
        "word " * 5
        + "x" * 300
        + "\n\n```py\n"
        + "y = 1; " * 60
        + "\n```\n\n|a|b|\n|-|-|\n|"
        + "z" * 99
        + "|1|"
    )
    ask(page, "q" * 200, deltas=[{"content": wide}])
    done(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("$('log').scrollWidth <= $('log').clientWidth")
    page.click("#menu")
    page.click("#new")
    assert page.is_hidden("#side") and page.is_visible("#empty")
    page.click("#settings")
    assert page.evaluate("$('options').getBoundingClientRect().right") <= 360


# -- attachments -------------------------------------------------------------------------------------------


def dropped(page, event, name, kind, data):
    """A file, dropped or pasted."""
    page.evaluate(
        """([event, name, type, data]) => { const held = new DataTransfer();
        held.items.add(new File([new Uint8Array(data)], name, { type }));
        const given = { clipboardData: held, dataTransfer: held, bubbles: true, cancelable: true };
        const made = event === "paste" ? new ClipboardEvent(event, given) : new DragEvent(event, given);
        document.querySelector("main").dispatchEvent(made); }""",
        [event, name, kind, list(data)],
    )


def test_a_picture_and_a_sound_are_attached_kept_and_edited(opened, seeing, tmp_path):
    page = opened(seeing.url)
    png, wav = files.png(files.picture("photo-small")), files.wav(files.sound("chirp"))
    (tmp_path / "button.png").write_bytes(png)
    page.set_input_files("#file", [tmp_path / "button.png"])
    page.wait_for_selector("#attached img[alt='button.png']")
    dropped(page, "paste", "paste.png", "image/png", png)
    page.wait_for_selector("#attached img[alt='paste.png']")
    dropped(page, "dragover", "drop.wav", "", b"")
    assert page.evaluate("document.body.classList.contains('drop')")
    dropped(page, "drop", "drop.wav", "audio/x-wav", wav)
    page.wait_for_selector("#attached audio[title='drop.wav']")
    assert not page.evaluate("document.body.classList.contains('drop')")
    until(page, "document.querySelector('#attached audio').readyState > 0")
    page.click("[aria-label='Remove paste.png']")
    assert page.locator("#attached figure").count() == 2
    ask(page, "What?")
    until(page, "document.querySelector('.turn.assistant .bar span')?.textContent.includes('/s')")
    [message] = last_body(page)["messages"]
    picture, sound, text = message["content"]
    assert base64.b64decode(picture["image_url"]["url"].split(",")[1]) == png and "name" not in picture
    assert base64.b64decode(sound["input_audio"]["data"]) == wav and sound["input_audio"]["format"] == "wav"
    assert text["text"] == "What?"
    done(page)
    page.reload()
    page.wait_for_selector(".turn.user img")
    assert page.evaluate("document.querySelector('.turn.user img').naturalWidth") == 100
    page.click(".turn.user button:has-text('Edit')")
    page.fill(".turn textarea", "Why?")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.turn.assistant .bar span')?.textContent.includes('/s')")
    assert [part["type"] for part in last_body(page)["messages"][0]["content"]] == [
        "image_url", "input_audio", "text",
    ]  # fmt: skip
    done(page)


def test_a_video_is_attached(opened, seeing):
    pytest.importorskip("av", reason="the extra `media` is not installed")
    from tests.media.test_video import movie

    page = opened(seeing.url)
    dropped(page, "drop", "clip.webm", "video/webm", movie(20, container="webm", codec="libvpx"))
    page.wait_for_selector("#attached video")
    until(page, "document.querySelector('#attached video').videoWidth === 64")
    ask(page, "What?")
    until(page, "document.querySelector('.turn.assistant .bar span')?.textContent.includes('/s')")
    done(page)


def test_what_cannot_be_attached_is_said(opened, seeing, served):
    page = opened(seeing.url)
    dropped(page, "drop", "a.txt", "text/plain", b"x")
    until(page, "$('hint').textContent === 'a.txt is no image, sound or video.'")
    dropped(page, "drop", "no.png", "image/png", b"")
    until(page, "$('hint').textContent.includes('no.png cannot be read')")
    dropped(page, "drop", "not.png", "image/png", b"not a picture")
    page.wait_for_selector("#attached .name:has-text('not.png')")
    page.on("console", lambda said: None)
    blind = opened(served.url)
    assert blind.is_disabled("#attach")
    dropped(blind, "drop", "a.png", "image/png", b"x")
    until(blind, "$('hint').textContent.includes('without its encoders')")


def test_text_beside_a_picture_is_pasted_as_text(opened, seeing):
    """Office programs put a picture of cells beside their text."""
    page = opened(seeing.url)
    page.evaluate("""() => { const held = new DataTransfer();
        held.items.add(new File([new Uint8Array(9)], "image.png", { type: "image/png" }));
        held.setData("text/plain", "1\\t2");
        const event = new ClipboardEvent("paste", { clipboardData: held, bubbles: true, cancelable: true });
        window.isFree = document.dispatchEvent(event); }""")  # fmt: skip
    assert page.evaluate("isFree") and page.locator("#attached figure").count() == 0


# -- faults ------------------------------------------------------------------------------------------------


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
