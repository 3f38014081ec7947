"""Pictures, sounds and videos that a message of the page brings along."""

import base64

import pytest

from tests.media import files
from tests.server.page.browsing import ask, done, last_body, until


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
