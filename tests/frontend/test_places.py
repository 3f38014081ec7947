"""Faults name the field that the client wrote, whatever its messages became on the way."""

import pytest

from fastpath.load import DEMO, load_model
from refimpl.frontend.chat_template import ChatTemplate
from refimpl.frontend.dialects import anthropic_messages, media_of, ollama_generated, responses_messages

PNG = "iVBORw0KGgo="


@pytest.fixture(scope="module")
def tokenizer():
    return load_model(DEMO).tokenizer


def user(content):
    return {"role": "user", "content": content}


@pytest.mark.parametrize("n", [1, 2, 3, 8, 17])
def test_the_first_message_that_a_template_refuses_is_named(tokenizer, n):
    source = (
        "{{ bos_token }}{% for m in messages %}"
        "{% if 'x' in m.content %}{{ raise_exception('no x here') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    template = ChatTemplate(source, small_family=True, bos="<bos>")
    for k in range(n):
        messages = [user("x" if j in (k, n - 1) else "a") for j in range(n)]
        with pytest.raises(ValueError, match=rf"^messages\[{k}\]: .*no x here"):
            template.render_ids(tokenizer, messages)
    placed = anthropic_messages([user([{"type": "text", "text": "x"}])], "S")
    with pytest.raises(ValueError, match=r"^messages\[0\]: .*no x here"):
        template.render_ids(tokenizer, placed)
    with pytest.raises(ValueError, match=r"^system: .*no x here"):
        template.render_ids(tokenizer, anthropic_messages([user("a")], "x"))


def test_a_picture_that_a_tool_gave_to_a_template_without_a_place_for_it(tokenizer):
    template = ChatTemplate(
        "{{ messages[0].tool_responses }}{{ messages[1].tool_responses }}", small_family=True, bos="<bos>"
    )
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    image = {"type": "image", "source": {"type": "base64", "data": PNG}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [image]}
    told = [{"role": "assistant", "content": [use]}, user([result])]
    with pytest.raises(ValueError, match=r"^messages\[2\]\.content\[0\]: a tool's result with an image"):
        template.render_ids(tokenizer, anthropic_messages([user("Hi"), *told], "S"))


def test_media_lie_where_the_client_put_them():
    image = {"type": "image", "source": {"type": "base64", "data": PNG}}
    linked = {"type": "image", "source": {"type": "url", "url": "https://a.b/c"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "t"}, image]}
    asked = anthropic_messages([user("a"), user([result, {"type": "text", "text": "b"}, linked])], "S")
    assert [item.where for item in media_of(asked)] == [
        "messages[1].content[0].content[1].source.data",
        "messages[1].content[2].source.url",
    ]
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": f"data:;base64,{PNG}"}]
    [found] = media_of(responses_messages([user("a"), user(parts)], "S"))
    assert found.where == "input[1].content[1].image_url" and found.data is not None
    assert [item.where for item in media_of(ollama_generated("a", "S", [PNG, PNG]))] == [
        "images[0]",
        "images[1]",
    ]
