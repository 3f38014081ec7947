"""What tests of the page do in a browser, and what they put in the place of the server."""

import shutil
import time

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
