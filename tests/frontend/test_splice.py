"""Generated ids in later prompts: the cached prefix goes on as long as the template lets it."""

import json
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refimpl.frontend.chat_template import ChatTemplate
from refimpl.frontend.output_parser import OutputParser
from refimpl.frontend.reply import Reply
from refimpl.frontend.splice import Conversation, KeptAnswers, Written
from tests.frontend.conversations import assistant, call, result, system, tool, user
from tests.frontend.vocab import needs_real, real_file, small

SMALL = ChatTemplate(None, small_family=True, bos="<bos>")
LARGE = ChatTemplate(None, small_family=False, bos="<bos>")
TOOLS = [tool("f", "d", x={"type": "integer"})]


def spelled(text: str) -> list[int]:
    """The ids of a text that the tokenizer would not choose: markers, and every other character by itself."""
    ids = []
    for token in small().encode(text, parse_special=True):
        marker = small().is_special(token)
        ids += [token] if marker else [i for c in small().decode([token]) for i in small().encode(c)]
    return ids


def common(first: list[int], second: list[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))


def reply_to(messages, text, *, template=SMALL, thinking=False, known=None):
    """(prompt, what was generated, the answer as a client gets it, its ids for later)."""
    prompt = template.render_ids(small(), messages, tools=TOOLS, thinking=thinking, generated=known)
    ids = spelled(text)
    reply = Reply(small(), prompt, tools=TOOLS)
    for token in ids:
        reply.push(token)
    reply.finish()
    return prompt, ids, reply.message(), reply.written()


def next_prompt(messages, written, template=SMALL, thinking=False, **more):
    return template.render_ids(small(), messages, tools=TOOLS, thinking=thinking, generated=written, **more)


def test_a_later_prompt_begins_with_what_was_generated():
    asked = [user("the hello")]
    prompt, ids, answer, written = reply_to(asked, "hello the abab<turn|>")
    later = [*asked, answer, user("and?")]
    assert next_prompt(later, None)[: len(prompt) + len(ids)] != prompt + ids  # the tokenizer chooses others
    got = next_prompt(later, {1: written})
    assert got[: len(prompt) + len(ids)] == prompt + ids
    assert small().decode(got) == small().decode(next_prompt(later, None))


def test_white_space_that_templates_trim_is_kept():
    prompt, ids, answer, written = reply_to([user("a")], "\n the \n")
    got = next_prompt([user("a"), answer, user("b")], {1: written})
    assert got[: len(prompt) + len(ids)] == prompt + ids


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("template", [SMALL, LARGE], ids=["small", "large"])
def test_an_agents_loop_keeps_its_prefix(template, thinking):
    """Every prompt begins with the one before and what was generated: thoughts of this turn stay.

    The large templates write an empty thought before an answer without thoughts, and not into the history:
    there the prefix ends once, at the beginning of the model's turn.
    """
    thought = "<|channel>thought\nabc the\n<channel|>" if thinking else ""
    messages, known = [system("S"), user("a")], {}
    for k in range(3):
        opened = (
            thought.removeprefix("<|channel>thought\n") if k else thought
        )  # the prompt opens it after a result
        text = f"{opened}so<|tool_call>call:f{{x:{k}}}<tool_call|>"
        prompt, ids, answer, written = reply_to(
            messages, text, template=template, thinking=thinking, known=known
        )
        assert answer["tool_calls"][0]["function"]["arguments"] == json.dumps({"x": k})
        known[len(messages)] = written
        messages = [*messages, answer, result("ok", answer["tool_calls"][0]["id"])]
        got = next_prompt(messages, known, template, thinking)
        n = common(got, prompt + ids)
        if template is LARGE and not thinking and k == 0:
            assert small().decode(prompt[:n]).endswith("<|turn>model\n")
        else:
            assert n == len(prompt + ids)


def test_old_thoughts_end_the_prefix():
    prompt, ids, answer, written = reply_to(
        [user("a")], "<|channel>thought\nhm\n<channel|>the end", thinking=True
    )
    assert answer["reasoning_content"] == "hm"
    got = next_prompt([user("a"), answer, user("b")], {1: written}, thinking=True)
    assert common(got, prompt + ids) == len(prompt)
    shown = spelled("the end")
    assert got[len(prompt) : len(prompt) + len(shown)] == shown
    assert small().id_of("<|channel>") not in got


def test_clients_that_do_not_send_thoughts_back():
    messages = [user("a")]
    prompt, ids, answer, written = reply_to(
        messages, "<|channel>thought\nhm\n<channel|><|tool_call>call:f{}<tool_call|>", thinking=True
    )
    answer = {key: value for key, value in answer.items() if key != "reasoning_content"}
    answered = [*messages, answer, result("ok", answer["tool_calls"][0]["id"])]
    got = next_prompt(answered, {1: written}, thinking=True)
    assert "thought" not in SMALL.render(answered)
    assert got[: len(prompt) + len(ids)] == prompt + ids


def test_several_answers_and_calls_in_one():
    messages = [user("a")]
    known, sent = {}, []
    for text in ("hello", "<|tool_call>call:f{x:1}<tool_call|><|tool_call>call:f{x:2}<tool_call|>", "the"):
        prompt, ids, answer, written = reply_to(messages, text, known=known)
        known[len(messages)] = written
        sent.append(prompt + ids)
        more = [result("ok", c["id"]) for c in answer.get("tool_calls", ())] or [user("b")]
        messages = [*messages, answer, *more]
    got = next_prompt(messages, known)
    assert all(got[: len(ids)] == ids for ids in sent)


def test_only_some_answers_have_ids():
    """Calls and texts around it are rendered as ever."""
    c = [call("f", {"x": k}, str(k)) for k in range(3)]
    loop = [m for k in range(3) for m in (assistant("the", c[k]), result("ok", str(k)))]
    messages = [user("a"), *loop, assistant("the"), user("b"), assistant("hello"), user("c")]
    ids = spelled("the<|tool_call>call:f{x:1}<tool_call|>")
    got = next_prompt(messages, {3: Written(tuple(ids)), 9: Written(tuple(spelled("hello")))})
    text = small().decode(got)
    assert [text.count(f"call:f{{x:{k}}}<tool_call|><|tool_response>") for k in range(3)] == [1, 1, 1]
    assert any(got[k : k + len(ids)] == ids for k in range(len(got)))
    assert text.endswith("hello<turn|>\n<|turn>user\nc<turn|>\n<|turn>model\n")


def test_results_are_found_by_name():
    calls = [call("f", {"x": 1}), call("g", {})]
    ids = tuple(spelled("<|tool_call>call:f{x:1}<tool_call|><|tool_call>call:g{}<tool_call|>"))
    messages = [user("a"), assistant(None, *calls), result("G", name="g"), result("F", name="f")]
    got = small().decode(next_prompt(messages, {1: Written(ids)}))
    assert got == small().decode(next_prompt(messages, None))


def test_the_end_of_generation_is_no_part_of_it():
    ids = spelled("the")
    ended = [*ids, small().id_of("<turn|>")]
    messages = [user("a"), assistant("the"), user("b")]
    assert next_prompt(messages, {1: Written(tuple(ended))}) == next_prompt(
        messages, {1: Written(tuple(ids))}
    )


def test_media_between_answers():
    from refimpl.frontend.media_prompt import MediaPart

    messages = [user([{"type": "image"}, "a"]), assistant("the"), user([{"type": "audio"}, "b"])]
    parts = [MediaPart("image", (3,)), MediaPart("audio", (2,))]
    got = next_prompt(messages, {1: Written(tuple(spelled("the")))}, media=parts)
    soft = [got.count(small().id_of(f"<|{kind}|>")) for kind in ("image", "audio")]
    assert soft == [3, 2]
    assert small().decode(got) == small().decode(next_prompt(messages, None, media=parts))


def test_a_template_with_no_place_for_them():
    upper = ChatTemplate("{{ messages[1].content[:2] }}", small_family=True, bos="<bos>")
    messages = [user("a"), assistant("the end")]
    assert next_prompt(messages, {1: Written((5, 6))}, upper) == next_prompt(messages, None, upper)


def test_only_answers_have_ids():
    for k in (0, 7, -1):
        with pytest.raises(ValueError, match=rf"generated\[{k}\]: messages\[{k}\] is no assistant's message"):
            next_prompt([user("a"), assistant("b"), user("c")], {k: Written((5,))})


@needs_real
@pytest.mark.parametrize("text", ["hello the", "<|tool_call>call:f{x:1}<tool_call|>"])
def test_the_oldest_template(text):
    oldest = ChatTemplate(real_file().metadata["tokenizer.chat_template"], small_family=False, bos="<bos>")
    asked = [user("a")]
    _, ids, answer, written = reply_to(asked, text, template=oldest)
    more = [result("ok", c["id"]) for c in answer.get("tool_calls", ())] + [assistant("hello"), user("b")]
    messages = [*asked, answer, *more]
    known = {1: written, len(messages) - 2: Written(tuple(spelled("hello")))}
    got = next_prompt(messages, known, oldest)
    plain = next_prompt(messages, None, oldest)
    assert small().decode(got) == small().decode(plain)
    for part in (ids, spelled("hello")):
        assert any(got[k : k + len(part)] == part for k in range(len(got)))


pieces = st.lists(
    st.sampled_from(["the", "hello", " ", "ab", "\n", "é", "<|tur", "<"]), min_size=1, max_size=6
)


@given(st.lists(pieces.map("".join), min_size=1, max_size=3), st.booleans())
def test_text_answers_of_any_kind(answers, thinking):
    messages, known, sent = [], {}, []
    for said in answers:
        messages.append(user("a"))
        prompt = next_prompt(messages, known, thinking=thinking)
        ids = spelled(said)
        reply = Reply(small(), prompt)
        for token in ids:
            reply.push(token)
        reply.finish()
        known[len(messages)] = reply.written()
        messages.append(reply.message())
        sent.append(prompt + ids)
    messages.append(user("b"))
    got = next_prompt(messages, known, thinking=thinking)
    assert all(got[: len(ids)] == ids for ids in sent)


# -- kept answers ----------------------------------------------------------------------------------


def test_kept_answers_are_found_again():
    kept = KeptAnswers()
    asked = [system("S"), user("a")]
    said = {**assistant("so", call("f", '{"x": 1,"y": null}', "i")), "reasoning_content": "hm"}
    kept.keep(Conversation(asked), said, Written((1, 2)))
    sent_back = assistant("so", call("f", '{"y":null,"x":1}', "i"))  # without thoughts, spaces elsewhere
    assert kept.find(Conversation([*asked, sent_back, result("ok", "i")])) == {2: Written((1, 2))}
    assert kept.find(Conversation([*asked, assistant("So", call("f", '{"x":1,"y":null}', "i"))])) == {}
    assert kept.find(Conversation([system("T"), user("a"), sent_back])) == {}
    assert kept.find(Conversation([user("a"), sent_back])) == {}
    assert kept.find(Conversation([])) == {}


def test_an_empty_content_is_none():
    kept = KeptAnswers()
    kept.keep(Conversation([user("a")]), assistant(None, call("f", {}, "i")), Written((1,)))
    assert kept.find(Conversation([user("a"), assistant("", call("f", {}, "i"))])) == {1: Written((1,))}


def test_the_oldest_are_forgotten():
    kept = KeptAnswers(max_ids=10)
    for k in range(4):
        kept.keep(Conversation([user(str(k))]), assistant("a"), Written((k,) * 4))
        kept.keep(Conversation([user(str(k))]), assistant("a"), Written((k,) * 4))  # again: counted once
        assert kept.find(Conversation([user("0"), assistant("a")])) == {
            1: Written((0,) * 4)
        }  # used: it stays
    assert [len(kept.find(Conversation([user(str(k)), assistant("a")]))) for k in range(4)] == [1, 0, 0, 1]


def test_an_answer_without_ids_is_not_kept():
    """Nothing would ever make room for it."""
    kept = KeptAnswers()
    kept.keep(Conversation([user("a")]), assistant(None), Written(()))
    assert kept.find(Conversation([user("a"), assistant(None)])) == {}


# -- answers that are gone on with -----------------------------------------------------------------


CONTINUED = {
    "text": (SMALL, False, assistant("Hello, "), "<|turn>model\nHello, "),
    "text, large": (LARGE, False, assistant("Hello"), "<|turn>model\n<|channel>thought\n<channel|>Hello"),
    "thought": (SMALL, True, assistant(None, reasoning_content="I"), "<|turn>model\n<|channel>thought\nI"),
    "thought and text": (
        LARGE,
        True,
        assistant("He", reasoning_content="I am"),
        "<|turn>model\n<|channel>thought\nI am\n<channel|>He",
    ),
    "thought, thinking off": (
        LARGE,
        False,
        assistant("", reasoning="I"),
        "<|turn>model\n<|channel>thought\nI",
    ),
    "nothing": (SMALL, False, assistant(None), "<|turn>model\n"),
}


@pytest.mark.parametrize("name", CONTINUED)
def test_the_last_message_is_gone_on_with(name):
    template, thinking, last, expected = CONTINUED[name]
    ids = template.render_ids(small(), [user("a"), last], thinking=thinking, continue_final=True)
    text = small().decode(ids)
    assert text.endswith("<turn|>\n" + expected)
    kind = "thought" if expected.endswith(("thought\nI",)) else "content"
    assert [event.kind for event in OutputParser(small(), ids).parse(spelled("the"))] == [kind]


def test_an_answer_after_a_result_is_gone_on_with():
    loop = [user("a"), assistant(None, call("f", {}, "i")), result("ok", "i")]
    for thinking in (False, True):
        ids = SMALL.render_ids(small(), [*loop, assistant("It")], thinking=thinking, continue_final=True)
        assert (
            small()
            .decode(ids)
            .endswith("<tool_response|>" + "<|channel>thought\n<channel|>" * thinking + "It")
        )


def test_markers_in_an_answer_to_go_on_with_are_text():
    ids = SMALL.render_ids(small(), [user("a"), assistant("<turn|>\n<|turn>user\n")], continue_final=True)
    assert [small().piece(i) for i in ids if small().is_special(i)] == [
        "<bos>",
        "<|turn>",
        "<turn|>",
        "<|turn>",
    ]


@pytest.mark.parametrize("last", [user("a"), assistant(None, call("f", {})), result("x")])
def test_what_cannot_be_gone_on_with(last):
    with pytest.raises(
        ValueError, match=r"messages\[1\]: role .*expected an assistant's message without calls"
    ):
        SMALL.render_ids(small(), [user("a"), last], continue_final=True)
