"""The prompts whose greedy answers are recorded: every skill, one to three turns, thinking on and off."""

from __future__ import annotations

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "City"}},
            "required": ["city"],
        },
    },
}


def ask(name: str, *texts: str, system: str = "", think=False, tools=None) -> dict:
    """A case; `texts` alternate between user and model."""
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"name": name, "messages": messages, "tools": tools or [], "thinking": think}


def after_tool(name: str, city: str, result) -> dict:
    """A case that goes on after a tool's result."""
    case = ask(name, f"What is the weather in {city}?", tools=[WEATHER])
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": {"city": city}},
    }
    case["messages"] += [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": result},
    ]
    return case


CASES = [
    ask("hello", "Hello"),
    ask("who", "Who are you?"),
    ask("project", "What is Twinpath?"),
    ask("skills", "What can you do?"),
    ask("how", "How do you work?", system="Be brief."),
    ask("thanks", "Thank you"),
    ask("scope", "What is the capital of France?"),
    ask("sum", "What is 47+38?"),
    ask("sum-words", "58 plus 67"),
    ask("difference", "Compute 93-27."),
    ask("negative", "What is 27-93?"),
    ask("long-sum", "What is 347+285?"),
    ask("think-sum-2", "What is 47+38?", think=True),
    ask("think-sum-3", "What is 347+285?", think=True),
    ask("think-difference-3", "What is 523-287?", think=True),
    ask("think-hello", "Hello", think=True),
    ask("think-reverse", "Reverse planet.", think=True),
    ask("spell", "Spell planet."),
    ask("spell-made-up", "How do you spell blorvek?"),
    ask("reverse", "Reverse kernel."),
    ask("reverse-made-up", "What is zamtuk backwards?"),
    ask("extract-person", "Extract name, age and city: Anna is 34 years old and lives in Paris."),
    ask("extract-order", "Extract name, item and count: Tom ordered 12 lemons."),
    ask("tool-call", "What is the weather in Paris?", tools=[WEATHER]),
    after_tool("tool-result", "Paris", '{"temp": 18, "sky": "sunny"}'),
    after_tool("tool-result-words", "Oslo", "-3 degrees, snowy"),
    ask("no-tool", "What is the weather in Paris?"),
    ask(
        "name-three-turns",
        "My name is Clara.",
        "Nice to meet you, Clara.",
        "What is 12+30?",
        "42",
        "What is my name?",
    ),
    ask(
        "thought-in-history",
        "What is 47+38?",
        "<|channel>thought\nOnes: 7+8=15\nTens: 4+3+1=8\n<channel|>The answer is 85.",
        "Reverse token.",
    ),
]
