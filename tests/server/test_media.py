"""Images, sounds and videos over HTTP: each API answers what the command line answers of the same file."""

import base64
import http.server
import io
import re
import socket
import threading
import time
from contextlib import suppress

import httpx
import numpy as np
import pytest

from fastpath.cli.__main__ import main
from fastpath.load import load_model
from fastpath.media import Encoders
from fastpath.server.fetch import Fetcher, public_address
from refimpl.frontend.dialects import Media
from refimpl.media_tensors import load_media
from tests import tiny
from tests.media import files, tiny_mmproj
from tests.server.serving import serving

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
N = 12  # tokens of an answer
QUESTION = "What is this?"
LONG = base64.b64encode(files.wav(files.sound("long"))).decode()
PUBLIC = "media.example"  # the only name that this file's resolver knows


def mp3(wave):
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp3") as out:
        stream = out.add_stream("mp3", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray(wave[None].astype(np.float32), "fltp", "mono")
        frame.sample_rate = 16000
        fit = av.AudioResampler(stream.format.name, "mono", 16000, frame_size=stream.codec_context.frame_size)
        for piece in [*fit.resample(frame), *fit.resample(None)]:
            out.mux(stream.encode(piece))
        out.mux(stream.encode())
    return file.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model that never ends an answer, its encoders beside it, and media."""
    from tests.media.test_video import movie

    here = tmp_path_factory.mktemp("http-media")
    tiny.make(here / "model.gguf", "e2b", keys={"tokenizer.ggml.suppress_tokens": [1, 9, 16]})
    name = "v.position_embd.weight"
    table = tiny_mmproj.tensors_of("e2b")[name]
    tiny_mmproj.make(here / "mm.gguf", "e2b", replace={name: np.resize(table, (2, 80, table.shape[2]))})
    (here / "photo.png").write_bytes(files.png(files.picture("photo-small")))
    (here / "noise.png").write_bytes(files.png(files.picture("noise")))
    (here / "checks.png").write_bytes(files.png(files.picture("checks")))
    (here / "talk.wav").write_bytes(files.wav(files.sound("chirp")))
    (here / "talk.mp3").write_bytes(mp3(files.sound("voice")))
    (here / "clip.mp4").write_bytes(movie(25))
    return here


@pytest.fixture(scope="module")
def said(folder):
    """said(kind, file) -> what the command line answers, in a run of its own"""
    known = {}

    def run(*media):
        if media not in known:
            words = [part for kind, file in media for part in (f"--{kind}", str(folder / file))]
            out = io.StringIO()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("sys.stdout", out)
                status = main(
                    ["--model", str(folder / "model.gguf"), "--mmproj", str(folder / "mm.gguf"), *words,
                     "--image-tokens=70", f"--max-tokens={N}", f"--prompt={QUESTION}"]
                )  # fmt: skip
            assert status == 0
            known[media] = out.getvalue().removesuffix("\n")
        return known[media]

    return run


class _Host(http.server.BaseHTTPRequestHandler):
    """Files of a folder, and places that are not what they seem."""

    folder = None

    def do_GET(self):
        name = self.path.lstrip("/")
        if name.startswith("to/"):
            self.send_response(302)
            self.send_header("Location", name.removeprefix("to/"))
            self.end_headers()
        elif name == "slow":
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):  # nobody waits for it
                for _ in range(100):
                    self.wfile.write(b"x")
                    time.sleep(0.02)
        elif name == "slow-head":
            with suppress(OSError):
                for byte in b"HTTP/1.1 200 OK\r\nX-Long: " + 100 * b"x":
                    self.wfile.write(bytes([byte]))
                    time.sleep(0.02)
        elif name == "short":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"x" * 100)
        elif (self.folder / name).is_file():
            data = (self.folder / name).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        else:
            self.send_error(404)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def host(folder):
    """Its port. It listens here, so the true resolver refuses it: `known` vouches for one name."""
    handler = type("Handler", (_Host,), {"folder": folder})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()


def known(name, port):
    return "127.0.0.1" if name == PUBLIC else public_address(name, port)


@pytest.fixture(scope="module")
def seeing(folder, host):
    model, media = load_model(folder / "model.gguf"), load_media(folder / "mm.gguf")
    media.check(model.config, model.path)
    options = {"media": media, "n_seqs": 2, "image_budget": 70, "fetch": Fetcher(known)}
    with serving(model, **options) as served, httpx.Client(base_url=served.url, timeout=60) as made:
        yield made


def base64_of(folder, file):
    return base64.b64encode((folder / file).read_bytes()).decode()


def chat(seeing, *parts, path=CHAT, **more):
    content = [*parts, {"type": "text", "text": QUESTION}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": N, "temperature": 0, **more}
    return seeing.post(path, json=body)


def text_of(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def image(folder, file, url=None):
    url = url or f"data:image/png;base64,{base64_of(folder, file)}"
    return {"type": "image_url", "image_url": {"url": url}}


def sound(folder, file):
    given = {"data": base64_of(folder, file), "format": file.split(".")[1]}
    return {"type": "input_audio", "input_audio": given}


class TestOpenAI:
    def test_an_image(self, seeing, folder, said):
        photo, noise = (said(("image", file)) for file in ("photo.png", "noise.png"))
        assert text_of(chat(seeing, image(folder, "photo.png"))) == photo
        assert text_of(chat(seeing, image(folder, "noise.png"))) == noise != photo

    @pytest.mark.parametrize("file", ["talk.wav", "talk.mp3"])
    def test_a_sound(self, seeing, folder, said, file):
        assert text_of(chat(seeing, sound(folder, file))) == said(("audio", file))

    def test_a_video(self, seeing, folder, said):
        url = f"data:video/mp4;base64,{base64_of(folder, 'clip.mp4')}"
        part = {"type": "video_url", "video_url": {"url": url}}
        assert text_of(chat(seeing, part)) == said(("video", "clip.mp4"))

    def test_several_in_their_order(self, seeing, folder, said):
        parts = image(folder, "noise.png"), sound(folder, "talk.wav"), image(folder, "photo.png")
        wanted = said(("image", "noise.png"), ("audio", "talk.wav"), ("image", "photo.png"))
        assert text_of(chat(seeing, *parts)) == wanted

    def test_an_image_that_lies_elsewhere(self, seeing, folder, said, host):
        wanted = said(("image", "photo.png"))
        for path in ("photo.png", f"to/http://{PUBLIC}:{host}/photo.png", "to//photo.png"):
            url = f"http://{PUBLIC}:{host}/{path}"
            assert text_of(chat(seeing, image(folder, None, url))) == wanted

    def test_another_picture_is_not_taken_for_one_in_the_cache(self, seeing, folder):
        first = chat(seeing, image(folder, "photo.png")).json()["usage"]
        again = chat(seeing, image(folder, "photo.png")).json()["usage"]
        other = chat(seeing, image(folder, "checks.png")).json()["usage"]
        n = first["prompt_tokens"]
        assert again["prompt_tokens_details"]["cached_tokens"] == n - 1
        assert other["prompt_tokens_details"]["cached_tokens"] < 10

    def test_responses(self, seeing, folder, said):
        url = f"data:image/png;base64,{base64_of(folder, 'photo.png')}"
        parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": QUESTION}]
        body = {"input": [{"role": "user", "content": parts}], "max_output_tokens": N, "temperature": 0}
        [item] = seeing.post(RESPONSES, json=body).json()["output"]
        assert item["content"][0]["text"] == said(("image", "photo.png"))


@pytest.fixture(scope="module")
def sharp(folder):
    """The same with as many positions as the largest images have patches, and the usual 280 soft tokens."""
    name = "v.position_embd.weight"
    table = tiny_mmproj.tensors_of("e2b")[name]
    large = np.resize(table, (2, 400, table.shape[2]))
    media = load_media(tiny_mmproj.make(folder / "sharp.gguf", "e2b", replace={name: large}))
    model = load_model(tiny.make(folder / "long.gguf", "e2b", keys={"gemma4.context_length": 1500}))
    with serving(model, media=media) as served, httpx.Client(base_url=served.url, timeout=60) as made:
        yield made


@pytest.mark.parametrize(
    ("detail", "more", "n"),
    [
        ("low", {}, 63),
        ("auto", {}, 266),
        (None, {"image_tokens": 140}, 130),
        ("low", {"image_tokens": 140}, 63),
    ],
)
def test_how_closely_an_image_is_looked_at(sharp, folder, detail, more, n):
    """Counts of a picture of 4:3, from the published processor (table T3 of the project's notes)."""
    part = image(folder, "photo.png")
    part["image_url"] |= {"detail": detail} if detail else {}
    words = chat(sharp, max_tokens=1).json()["usage"]["prompt_tokens"]
    seen = chat(sharp, part, max_tokens=1, **more).json()["usage"]["prompt_tokens"]
    assert seen - words == n + 2, "soft tokens and a marker on either side"


@pytest.mark.parametrize("stream", [False, True])
def test_a_sound_that_is_cut_is_spoken_of(sharp, stream):
    part = {"type": "input_audio", "input_audio": {"data": LONG, "format": "wav"}}
    answer = chat(sharp, part, max_tokens=1, stream=stream)
    note = answer.headers["x-note"]
    assert note.startswith("messages[0].content[0].input_audio.data: ") and "30 s" in note, note
    assert "x-note" not in chat(sharp, max_tokens=1, stream=stream).headers


@pytest.mark.parametrize("kind", ["base64", "url"])
def test_anthropic_blocks(seeing, folder, said, host, kind):
    data = {"media_type": "image/png", "data": base64_of(folder, "photo.png")}
    source = data if kind == "base64" else {"url": f"http://{PUBLIC}:{host}/photo.png"}
    answer = chat(seeing, {"type": "image", "source": {"type": kind, **source}}, path=MESSAGES)
    made = answer.json()
    assert made["content"][0]["text"] == said(("image", "photo.png")), answer.text
    parts = [{"type": "image", "source": {"type": "base64", **data}}, {"type": "text", "text": QUESTION}]
    asked = {"messages": [{"role": "user", "content": parts}]}
    n = made["usage"]["input_tokens"] + made["usage"]["cache_read_input_tokens"]
    assert seeing.post(f"{MESSAGES}/count_tokens", json=asked).json() == {"input_tokens": n}


def test_ollama_images(seeing, folder, said):
    images, options = [base64_of(folder, "photo.png")], {"temperature": 0, "num_predict": N}
    body = {"messages": [{"role": "user", "content": QUESTION, "images": images}]}
    made = seeing.post("/api/chat", json={**body, "options": options, "stream": False}).json()
    assert made["message"]["content"] == said(("image", "photo.png"))
    body = {"prompt": QUESTION, "images": images}
    made = seeing.post("/api/generate", json={**body, "options": options, "stream": False}).json()
    assert made["response"] == said(("image", "photo.png"))
    assert set(seeing.post("/api/show", json={"model": "demo"}).json()["capabilities"]) >= {"vision", "audio"}


BAD = [  # a part, the field behind messages[1].content[1]
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "image_url.url"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}, "image_url.url"),
    ({"type": "image_url", "image_url": {"url": "data:image/png"}}, "image_url.url"),
    ({"type": "image_url", "image_url": {"url": "?"}}, "image_url.url"),
    ({"type": "image_url", "image_url": {}}, "image_url.data"),
    ({"type": "image_url"}, "image_url"),
    ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "image_url.url"),
    ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}, "image_url.url"),
    ({"type": "image_url", "image_url": {"url": "http://localhost/x.png"}}, "image_url.url"),
    ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "input_audio.data"),
    ({"type": "input_audio", "input_audio": {"format": "wav"}}, "input_audio.data"),
    ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, "video_url.url"),
    ({"type": "hologram"}, ""),
]


@pytest.mark.parametrize(("part", "field"), BAD)
def test_what_is_none_of_these_is_a_400_with_its_place(seeing, part, field):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, part]},
    ]
    answer = seeing.post(CHAT, json={"messages": messages})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] == "messages[1].content[1]" + (f".{field}" if field else ""), error


def test_a_cut_file_is_told_with_its_place(seeing, folder):
    for make, file in ((image, "photo.png"), (sound, "talk.mp3")):
        part = make(folder, file)
        [key] = part.keys() - {"type"}
        [name] = part[key].keys() - {"format"}
        part[key][name] = part[key][name][:60]
        error = chat(seeing, part).json()["error"]
        assert error["param"] == f"messages[0].content[0].{key}.{name}", error


def test_too_many_are_refused(seeing, folder):
    answer = chat(seeing, *[image(folder, "photo.png")] * 65)
    assert answer.status_code == 400 and "65 images" in answer.json()["error"]["message"]


def test_what_the_context_cannot_hold_is_not_decoded(seeing, folder, monkeypatch):
    opened = []
    real = Encoders.open
    monkeypatch.setattr(Encoders, "open", lambda *a, **o: opened.append(o["name"]) or real(*a, **o))
    answer = chat(seeing, *[image(folder, "photo.png")] * 60)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "context_length_exceeded"
    assert error["n_prompt_tokens"] >= error["n_ctx"] and len(opened) < 60


def test_what_lies_elsewhere_is_bounded_as_a_whole(seeing, folder, host, monkeypatch):
    size = (folder / "photo.png").stat().st_size
    monkeypatch.setattr("fastpath.talk.exchange.MAX_FETCHED", 2 * size)
    there = f"http://{PUBLIC}:{host}/photo.png"
    assert chat(seeing, *[image(folder, None, there)] * 2).status_code == 200
    error = chat(seeing, *[image(folder, None, there)] * 3).json()["error"]
    assert error["param"] == "messages[0].content[2].image_url.url"


def test_without_the_flag_nothing_is_fetched(folder, host):
    model, media = load_model(folder / "model.gguf"), load_media(folder / "mm.gguf")
    with serving(model, media=media) as served, httpx.Client(base_url=served.url, timeout=60) as client:
        error = chat(client, image(folder, None, f"http://{PUBLIC}:{host}/photo.png")).json()["error"]
        assert error["param"] == "messages[0].content[0].image_url.url" and "URL" in error["message"]


# -- fetching --------------------------------------------------------------------------------------


def fetched(url, **options):
    return Fetcher(known, **options)(Media("image", "here", url=url))


def refused(url, **options):
    with pytest.raises(ValueError, match=r"^here: ") as caught:
        fetched(url, **options)
    return str(caught.value)


def test_private_addresses_are_not_asked():
    places = ("127.0.0.1:1", "localhost", "[::1]", "10.1.2.3", "169.254.169.254", "[::ffff:127.0.0.1]",
              "0.0.0.0", "[fe80::1]", "[fc00::1]", "192.168.1.1", "100.64.0.1", "2130706433", "127.1",
              "224.0.0.1", "[64:ff9b::10.0.0.1]", "[64:ff9b:1::1]", "[2002:7f00:1::]", "[::127.0.0.1]",
              "[fec0::1]", "[ff0e::1]")  # fmt: skip
    for place in places:
        assert "in a private place" in refused(f"http://{place}/x"), place
    assert "expected http" in refused("ftp://example.org/") and "expected http" in refused("http:///x")


def test_a_name_with_one_private_address_is_private(monkeypatch):
    entries = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 80)) for ip in ("8.8.8.8", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: entries)
    with pytest.raises(ValueError, match="private"):
        public_address("two.example", 80)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: entries[:1])
    assert public_address("one.example", 80) == "8.8.8.8"


def test_what_was_checked_is_what_is_asked(folder, host, monkeypatch):
    """A name that answers otherwise the second time is not asked a second time."""
    asked = []

    def resolve(name, port):
        asked.append(name)
        return "127.0.0.1"

    looked_up, real = [], socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **o: looked_up.append(a[0]) or real(*a, **o))
    found = Fetcher(resolve)(Media("image", "here", url=f"http://one.example:{host}/photo.png"))
    assert found == (folder / "photo.png").read_bytes() and asked == ["one.example"]
    assert set(looked_up) == {"127.0.0.1"}, "a number, which nobody can answer otherwise"


def test_redirects_are_checked_and_counted(folder, host):
    there = f"http://{PUBLIC}:{host}"
    assert fetched(f"{there}/to/{there}/photo.png") == (folder / "photo.png").read_bytes()
    assert "in a private place" in refused(f"{there}/to/http://127.0.0.1:{host}/photo.png")
    assert "expected http" in refused(f"{there}/to/file:///etc/passwd")
    assert "redirects" in refused(f"{there}/to/" + f"{there}/to/" * 4 + "x")


def test_what_is_missing_large_or_slow_is_given_up(host):
    there = f"http://{PUBLIC}:{host}"
    assert "404" in refused(f"{there}/none")
    assert "more than 100 bytes" in refused(f"{there}/photo.png", max_bytes=100)
    began = time.monotonic()
    for place in ("slow", "slow-head"):
        assert re.search(r"took more than 0\.2 s", refused(f"{there}/{place}", total_s=0.2))
    assert time.monotonic() - began < 1.5
    assert "900 bytes early" in refused(f"{there}/short")
    assert refused(f"http://{PUBLIC}:1/x")
