"""/v1/completions with the openai client: several prompts, echoes, and how likely a prompt was."""

import numpy as np
import openai
import pytest

from fastpath.backend import ops_for
from fastpath.engine import Engine
from fastpath.generate import generate
from refimpl.batch import make_batch
from refimpl.cache import KVCache
from refimpl.frontend.sampling import SamplingParams, log_softmax
from refimpl.model.text import forward
from tests import tolerances
from tests.server.conftest import ENDS

TEXTS = ["Hi", "What is Twinpath?", "The sky 🫨 is blue, and so"]
NEAR = 6 * tolerances.LOG_PROBABILITY_RMS["int8"]  # of one number: the bound is one of many's RMS


@pytest.fixture(scope="module")
def complete(served):
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)

    def ask(prompt, extra=None, **options):
        given = {"temperature": 0, "max_tokens": 5, "logit_bias": ENDS, **options}
        return client.completions.create(model="demo", prompt=prompt, extra_body=extra, **given)

    ask.client = client
    return ask


@pytest.fixture(scope="module")
def alone(demo):
    """text -> (ids, text of the first five tokens that the engine alone answers)"""
    engine = Engine(demo, ops_for("cpu"))
    params = SamplingParams(bias={int(token): value for token, value in ENDS.items()})

    def answer(text):
        ids = demo.tokenizer.encode(text, add_bos=True)
        return ids, demo.tokenizer.decode(list(generate(engine, ids, params, max_tokens=5)))

    return answer


@pytest.fixture(scope="module")
def rows(demo):
    """f64[T, V]: log-probabilities by the definition in float64, after each of some ids."""

    def of(ids):
        cache = KVCache(demo.config, 1, len(ids), len(ids), np.float64)
        batch = make_batch([(0, 0, ids, "all")])
        return log_softmax(forward(demo.config, demo.weights, cache, batch, activations="float"))

    return of


def joined(stream):
    """Choices of a stream, put together as a client does it: text, tokens, log-probabilities, reason."""
    choices = {}
    for chunk in stream:
        for choice in chunk.choices:
            kept = choices.setdefault(choice.index, {"text": "", "lists": {}, "reason": None})
            kept["text"] += choice.text
            kept["reason"] = choice.finish_reason or kept["reason"]
            if choice.logprobs is not None:
                for key, value in choice.logprobs.model_dump().items():
                    kept["lists"].setdefault(key, []).extend(value)
    return choices


@pytest.mark.parametrize("form", ["texts", "ids", "one list of one", "one text"])
def test_several_prompts_have_choices_in_their_order(complete, alone, form):
    texts = TEXTS if form in ("texts", "ids") else TEXTS[:1]
    wanted = [alone(text) for text in texts]
    prompts = {
        "texts": texts,
        "ids": [ids for ids, _ in wanted],
        "one list of one": [texts[0]],
        "one text": texts[0],
    }[form]
    made = complete(prompts)
    assert [choice.index for choice in made.choices] == list(range(len(texts)))
    assert [choice.text for choice in made.choices] == [text for _, text in wanted]
    assert made.usage.prompt_tokens == sum(len(ids) for ids, _ in wanted)
    assert made.usage.completion_tokens == 5 * len(texts)
    found = joined(complete(prompts, stream=True))
    assert [found[k]["text"] for k in range(len(texts))] == [text for _, text in wanted]
    assert {each["reason"] for each in found.values()} == {"length"}


def test_several_answers_to_each_of_several_prompts(complete):
    options = {"temperature": 3, "seed": 4, "n": 3, "extra": {"top_k": 0, "top_p": 1}}
    made = complete(TEXTS[:2], **options)
    assert [choice.index for choice in made.choices] == list(range(6))
    assert len({choice.text for choice in made.choices}) == 6
    for p, text in enumerate(TEXTS[:2]):
        single = complete(text, **options)
        assert [c.text for c in single.choices] == [c.text for c in made.choices[3 * p : 3 * p + 3]]
    again = joined(complete(TEXTS[:2], **options, stream=True))
    assert [again[k]["text"] for k in range(6)] == [choice.text for choice in made.choices]


@pytest.mark.parametrize("given", ["text", "ids"])
def test_an_echo_has_the_definitions_log_probabilities(complete, demo, rows, given):
    text = TEXTS[2]
    ids = demo.tokenizer.encode(text, add_bos=True)
    prompt = text if given == "text" else ids
    made = complete(prompt, echo=True, logprobs=2, max_tokens=3)
    [choice] = made.choices
    found = choice.logprobs
    every = [*ids, *generate(Engine(demo, ops_for("cpu")), ids, max_tokens=3)]
    truth = rows(every)
    skip = int(given == "text")  # the BOS in front of a text is not the client's
    assert len(found.tokens) == len(every) - skip
    listed = list(zip(found.token_logprobs, found.top_logprobs, strict=True))
    if not skip:
        assert listed.pop(0) == (None, None)
    got = np.array([value for value, _ in listed])
    want = truth[np.arange(len(every) - 1), every[1:]]
    assert np.sqrt(np.mean((got - want) ** 2)) <= tolerances.LOG_PROBABILITY_RMS["int8"]
    for (value, top), row in zip(listed, truth, strict=False):
        assert value in top.values() and len(top) in (2, 3)
        assert max(top.values()) == pytest.approx(row.max(), abs=NEAR)
    assert choice.text.startswith(text if skip else f"<bos>{text}")
    pieces = "".join(w for w in found.tokens if not w.startswith("bytes:"))
    assert pieces.replace("<bos>", "") == choice.text.replace("🫨", "").replace("<bos>", "")


def test_offsets_are_those_of_the_text_also_in_a_stream(complete):
    whole = complete(TEXTS[2], echo=True, logprobs=0, max_tokens=3).choices[0]
    lists = whole.logprobs
    for word, start in zip(lists.tokens, lists.text_offset, strict=True):
        if not word.startswith("bytes:"):
            assert whole.text[start : start + len(word)] == word
    assert lists.tokens.count("bytes:\\xf0") == 1, "a character of four pieces"
    [streamed] = joined(complete(TEXTS[2], echo=True, logprobs=0, max_tokens=3, stream=True)).values()
    assert streamed["text"] == whole.text and streamed["lists"] == lists.model_dump()


def test_a_prompt_is_only_read(complete, demo, rows):
    """How evaluation harnesses ask: no answer, every token's log-probability, ids and not text."""
    prompts = [demo.tokenizer.encode(text, add_bos=True) for text in TEXTS]
    made = complete(prompts, echo=True, logprobs=1, max_tokens=0)
    assert made.usage.completion_tokens == 0
    for ids, choice in zip(prompts, made.choices, strict=True):
        values = choice.logprobs.token_logprobs
        assert len(values) == len(ids) and values[0] is None and choice.finish_reason == "length"
        want = rows(ids)[np.arange(len(ids) - 1), ids[1:]]
        assert sum(values[1:]) == pytest.approx(want.sum(), abs=NEAR * len(ids) ** 0.5)
    [first, *_] = joined(complete(prompts, echo=True, logprobs=1, max_tokens=0, stream=True)).values()
    assert first["lists"]["token_logprobs"] == made.choices[0].logprobs.token_logprobs


def test_prompt_logprobs_as_vllm_writes_them(complete, demo, rows):
    ids = demo.tokenizer.encode(TEXTS[1], add_bos=True)
    [choice] = complete(TEXTS[1], {"prompt_logprobs": 2}, max_tokens=1).choices
    check_read(choice.prompt_logprobs, ids, rows(ids), demo.tokenizer)
    messages = [{"role": "user", "content": TEXTS[1]}]
    made = complete.client.chat.completions.create(
        model="demo", messages=messages, max_tokens=1, n=2, extra_body={"prompt_logprobs": 2}
    )
    ids = demo.template.render_ids(demo.tokenizer, messages)
    check_read(made.prompt_logprobs, ids, rows(ids), demo.tokenizer)
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
        complete(TEXTS[1], {"prompt_logprobs": 0}, stream=True)


def check_read(found, ids, truth, tokenizer):
    assert found[0] is None and len(found) == len(ids)
    for each, token, row in zip(found[1:], ids[1:], truth, strict=False):
        own = each[str(token)]
        assert own["logprob"] == pytest.approx(row[token], abs=NEAR)
        assert own["decoded_token"] == tokenizer.token_bytes(token).decode("utf-8", "replace")
        others = sorted(each.values(), key=lambda one: one["rank"])
        assert len(others) in (2, 3) and [one["rank"] for one in others[:2]] == [1, 2]
        assert abs(own["rank"] - np.count_nonzero(row >= row[token])) <= 0.1 * len(row)


def test_a_list_of_prompts_begins_whole_or_not_at_all(served, complete):
    """One of them that is too long costs nothing of the others."""
    with pytest.raises(openai.BadRequestError, match=r"prompt\[1\]: the prompt has 4096 tokens"):
        complete([[5, 6], [5] * 4096, [7]])
    assert served.settled() and served.engine.n_waiting == 0
