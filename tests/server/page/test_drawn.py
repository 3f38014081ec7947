"""What the page draws: markdown, code, where one has scrolled to; for keys, phones and weak eyes."""

import pytest

from tests.server.page.browsing import ask, done, last_body, until


def test_the_page_needs_nothing_from_outside(client):
    answer = client.get("/")
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    for word in ('src="', "@import", 'rel="stylesheet"', "innerHTML", "insertAdjacent", "eval("):
        assert word not in answer.text, word


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
