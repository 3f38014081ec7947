"""Many at once, and many one after the other."""

import asyncio
import gc
import os
import time
from pathlib import Path

import httpx
import pytest

from fastpath.backend import ops_for
from fastpath.engine import Engine
from fastpath.generate import generate
from refimpl.frontend.sampling import SamplingParams
from tests.server.serving import serving
from tests.server.test_openai import ANSWER, QUESTION

CHAT = "/v1/chat/completions"
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
    body = asked(k)
    ids = demo.template.render_ids(demo.tokenizer, body["messages"])
    params = SamplingParams(temperature=1.2, seed=k, top_p=0.9, top_k=50)
    return demo.tokenizer.decode(list(generate(engine, ids, params, body["max_tokens"])), skip_special=True)


@pytest.mark.slow
def test_64_answers_at_once_are_those_of_the_engine_alone(demo):
    async def everybody(url):
        async with httpx.AsyncClient(base_url=url, timeout=100, limits=httpx.Limits()) as client:
            return await asyncio.gather(*(client.post(CHAT, json=asked(k)) for k in range(64)))

    with serving(demo, n_seqs=8) as served:
        found = asyncio.run(everybody(served.url))
        served.engine.check_integrity()
    engine = Engine(demo, ops_for("cpu"))
    for k, answer in enumerate(found):
        text = answer.json()["choices"][0]["message"]["content"]
        assert text.strip() == alone(demo, engine, k).strip(), k


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
