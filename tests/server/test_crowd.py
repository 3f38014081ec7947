"""Many at once, and many one after the other."""

import asyncio
import gc
import json
import os
import socket
import time
from pathlib import Path

import anthropic
import httpx
import ollama
import openai
import pytest

from fastpath.backend import ops_for
from fastpath.engine import Engine, Finished
from fastpath.generate import generate
from refimpl.frontend.sampling import SamplingParams
from tests.server.serving import serving
from tests.server.test_openai import ANSWER, QUESTION

CHAT = "/v1/chat/completions"
N_STREAMS = 64
N_SOAK = 10_000
MAX_GROWTH = 8 << 20  # bytes of the second half of the soak; what is kept (answers' ids) is bounded before


def asked(k):
    return {
        "messages": [{"role": "user", "content": f"Number {k}?"}],
        "temperature": 1.2,
        "top_k": 50,
        "top_p": 0.9,
        "seed": k,
        "max_tokens": 12 + k % 13,
    }


def alone(demo, engine, k):
    """What number k is answered by an engine that has nothing else to do; every third is greedy."""
    body = asked(k)
    ids = demo.template.render_ids(demo.tokenizer, body["messages"])
    params = SamplingParams(temperature=1.2, seed=k, top_p=0.9, top_k=50) if k % 3 else SamplingParams()
    return demo.tokenizer.decode(list(generate(engine, ids, params, body["max_tokens"])), skip_special=True)


def test_64_streams_at_once_are_those_of_the_engine_alone(demo):
    """Of three clients: Anthropic's API has no seed."""

    async def by_anthropic(client, body):
        given = {key: body[key] for key in ("messages", "max_tokens")}
        async with client.messages.stream(model="demo", extra_body={"temperature": 0}, **given) as stream:
            return "".join([text async for text in stream.text_stream])

    async def by_openai(client, body):
        more = {"extra_body": {"top_k": body["top_k"]}}
        given = {key: value for key, value in body.items() if key != "top_k"}
        stream = await client.chat.completions.create(model="demo", stream=True, **given, **more)
        return "".join([part.choices[0].delta.content or "" async for part in stream])

    async def by_ollama(client, body):
        options = {key: body[key] for key in ("temperature", "top_k", "top_p", "seed")}
        options["num_predict"] = body["max_tokens"]
        stream = await client.chat(model="demo", messages=body["messages"], options=options, stream=True)
        return "".join([part.message.content or "" async for part in stream])

    async def everybody(url):
        clients = (
            (by_anthropic, anthropic.AsyncAnthropic(base_url=url, api_key="-", max_retries=0)),
            (by_openai, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)),
            (by_ollama, ollama.AsyncClient(url)),
        )
        ways = [clients[k % 3] for k in range(N_STREAMS)]
        return await asyncio.gather(*(ask(client, asked(k)) for k, (ask, client) in enumerate(ways)))

    with serving(demo, n_seqs=8) as served:
        found = asyncio.run(everybody(served.url))
        assert served.settled()
        served.engine.check_integrity()
    engine = Engine(demo, ops_for("cpu"))
    for k, text in enumerate(found):
        assert text.strip() == alone(demo, engine, k).strip(), k


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_costs_one_step_at_most(demo, monkeypatch, stream):
    """Counted from where the server notices: tokens that the answer still gets."""
    n_then, ends = [], []
    with serving(demo, n_seqs=2) as served:
        engine, worker = served.engine, served.service.exchange.worker
        abort, tell = engine.abort, worker._tell

        def aborted(id):
            n_then.append(engine.usage(id).generated)
            return abort(id)

        def told(event):
            ends.extend([event] if isinstance(event, Finished) else [])
            return tell(event)

        monkeypatch.setattr(engine, "abort", aborted)
        monkeypatch.setattr(worker, "_tell", told)
        body = {"messages": QUESTION, "min_tokens": 3000, "max_tokens": 3000, "stream": stream}
        with socket.create_connection(("127.0.0.1", int(served.url.rsplit(":", 1)[1]))) as client:
            data = json.dumps(body).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
            client.sendall(head.encode() + data)
            while not worker.running() or not worker.running()[0][2].generated:
                time.sleep(0.001)
        assert served.settled(5)
        worker.call(lambda: None).result(5)  # the last step has been told
    [end], [n] = ends, n_then
    assert end.reason == "abort" and n <= end.usage.generated <= n + 1 and n < 2000


def test_a_client_that_does_not_read_slows_nobody(demo):
    """Its answer is made all the same, and waits in memory until it reads."""
    slow = {"messages": QUESTION, "stream": True, "min_tokens": 3000, "max_tokens": 3000, "temperature": 0}
    with serving(demo, n_seqs=2) as served, httpx.Client(base_url=served.url, timeout=60) as client:
        with client.stream("POST", CHAT, json={**slow, "logprobs": True, "top_logprobs": 20}) as answer:
            lines = answer.iter_lines()
            next(lines)  # and no more
            quick = client.post(CHAT, json={"messages": QUESTION, "temperature": 0}).json()
            assert quick["choices"][0]["message"]["content"] == ANSWER
            assert served.settled(40.0), "the answer waits for its reader"
            rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]" and len(rest) > 1000


def memory():
    """Bytes of this process that are in memory and its own."""
    gc.collect()
    shared, resident = (int(Path("/proc/self/statm").read_text().split()[k]) for k in (2, 1))
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_memory_and_pages_stay_flat(demo):
    """Requests with shared beginnings, cancelled ones and faulty ones among them."""

    async def one(client, k):
        body = {**asked(k % 97), "max_tokens": 1 + k % 4, "stream": k % 2 == 0}
        if k % 50 == 0:
            body["temperature"] = -1
        if k % 41 == 0:
            body |= {"max_tokens": 500, "min_tokens": 500}
            try:
                await client.post(CHAT, json=body, timeout=0.02)
            except httpx.TimeoutException:
                return
        else:
            assert (await client.post(CHAT, json=body)).status_code in (200, 400)

    async def many(url, numbers):
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            waiting = iter(numbers)

            async def some():
                for k in waiting:
                    await one(client, k)

            await asyncio.gather(*(some() for _ in range(8)))

    with serving(demo, n_seqs=4) as served:
        asyncio.run(many(served.url, range(N_SOAK // 2)))
        before = memory()
        asyncio.run(many(served.url, range(N_SOAK // 2, N_SOAK)))
        assert served.settled()
        served.engine.check_integrity()
        time.sleep(0.1)
        growth = memory() - before
        assert growth <= MAX_GROWTH, f"{growth} bytes more"
        served.engine.forget_prefixes()
        for kind, pool in served.engine.lanes.cache.pools.items():
            assert pool.n_free == pool.n, kind
