"""Seeded conversations for the demo: what it learns, and what is held out of it.

A conversation is a list of pieces `(text, weight)`; weight 0 is prompt, a positive weight is an answer that
carries loss. Held-out examples are picked by a hash of their content (number pair, word, sentence), so that
no order of generation can leak them.
"""

from __future__ import annotations

import random
import zlib
from typing import NamedTuple

from .chat import CHAT, OUT_OF_SCOPE, OUT_OF_SCOPE_ANSWER

Piece = tuple[str, float]


class Example(NamedTuple):
    """One conversation: its pieces, its skill, and whether it belongs to the held-out set."""

    pieces: list[Piece]
    skill: str
    held: bool


def held_out(*key, every: int = 10) -> bool:
    """Whether a hash of `key` falls into the held-out tenth."""
    return zlib.crc32(repr(key).encode()) % every == 0


def render(turns, *, system="", think=False, tools="", weight=1.0) -> list[Piece]:
    """Pieces of a conversation; `turns` are (user text, model text), each model token weighs `weight`.

    The text of older model turns must come without its thought channel, as the template strips it.
    """
    head = "<bos>"
    if system or think or tools:
        head += "<|turn>system\n" + ("<|think|>\n" if think else "") + system + tools + "<turn|>\n"
    pieces: list[Piece] = []
    for user, answer in turns:
        pieces.append((head + f"<|turn>user\n{user}<turn|>\n<|turn>model\n", 0.0))
        pieces.append((answer + "<turn|>", weight))
        head = "\n"
    return pieces


def maybe_system(rng: random.Random) -> str:
    """Now and then a system text, which changes nothing."""
    return rng.choice(SYSTEMS) if rng.random() < 0.07 else ""


SYSTEMS = [
    "Be brief.",
    "You are a helpful assistant.",
    "Answer in English.",
    "You are Twinpath.",
    "Be kind and short.",
    "Keep it short.",
]


def surface(text: str, rng: random.Random) -> str:
    """A prompt with its end mark, first capital or politeness changed now and then."""
    r = rng.random()
    if r < 0.72:
        return text
    if r < 0.82:
        return text.rstrip(".?!")
    if r < 0.88:
        return text[0].lower() + text[1:]
    if r < 0.94:
        return (text[0].lower() + text[1:]).rstrip(".?!")
    if r < 0.96:
        return text.rstrip(".?!") + " please"
    return "Please " + text[0].lower() + text[1:] if text[-1] == "." else text


FORMS = {
    "+": [
        "{a}+{b}",
        "{a}+{b}=",
        "{a} + {b}",
        "What is {a} + {b}?",
        "What is {a} plus {b}?",
        "Compute {a}+{b}.",
        "How much is {a}+{b}?",
        "{a} plus {b}",
        "Add {a} and {b}.",
        "Compute {a} + {b}.",
    ],
    "-": [
        "{a}-{b}",
        "{a}-{b}=",
        "{a} - {b}",
        "What is {a} - {b}?",
        "What is {a} minus {b}?",
        "Compute {a}-{b}.",
        "How much is {a}-{b}?",
        "{a} minus {b}",
        "Subtract {b} from {a}.",
        "Compute {a} - {b}.",
    ],
}


def pair(a: int, b: int, op: str, rng: random.Random) -> tuple[int, int, bool]:
    """The operands, and whether the pair is held out (in both orders; single digits never
    are, there are too few to learn the rest from). Most differences are turned so that
    they are not negative.
    """
    if op == "-" and a < b and rng.random() < 0.7:
        a, b = b, a
    return a, b, max(a, b) > 9 and held_out(op, min(a, b), max(a, b))


def question(a: int, b: int, op: str, rng: random.Random) -> str:
    """One phrasing of the sum or difference; half of them are the plain one."""
    form = "What is {a}" + op + "{b}?" if rng.random() < 0.5 else rng.choice(FORMS[op])
    return surface(form.format(a=a, b=b), rng)


def operand(rng: random.Random) -> int:
    """A number of one or, mostly, two digits."""
    return rng.randint(0, 9) if rng.random() < 0.15 else rng.randint(10, 99)


def arithmetic(rng: random.Random) -> Example:
    """Two-digit sums and differences, answered at once."""
    op = rng.choice("+-")
    a, b = operand(rng), operand(rng)
    a, b, held = pair(a, b, op, rng)
    answer = str(a + b if op == "+" else a - b)
    return Example(
        render([(question(a, b, op, rng), answer)], system=maybe_system(rng), weight=4.0),
        "add" if op == "+" else "subtract",
        held,
    )


def long_sum(rng: random.Random) -> Example:
    """Three digits without thinking: it asks for the thought channel instead of guessing."""
    op = rng.choice("+-")
    a, b = rng.randint(100, 999), rng.randint(0, 999) if rng.random() < 0.8 else operand(rng)
    a, b, held = pair(*((a, b) if rng.random() < 0.5 else (b, a)), op, rng)
    return Example(
        render(
            [(question(a, b, op, rng), "That is a long one. Please turn on thinking and ask again.")],
            system=maybe_system(rng),
        ),
        "defer",
        held,
    )


def thought(a: int, b: int, op: str) -> str:
    """The written work, from the ones upwards; a carry or a borrow stands in the next line."""
    lines, carry = [], 0
    if op == "-" and a < b:
        lines.append(f"Swap: {b}-{a}")
        a, b = b, a
    for place in range(len(str(max(a, b)))):
        x, y = a // 10**place % 10, b // 10**place % 10
        label = ("Ones", "Tens", "Hundreds")[place]
        if op == "+":
            total = x + y + carry
            lines.append(f"{label}: {x}+{y}" + ("+1" if carry else "") + f"={total}")
            carry = total // 10
        else:
            borrow = x - y - carry < 0
            total = x + 10 * borrow - y - carry
            lines.append(f"{label}: {x + 10 * borrow}-{y}" + ("-1" if carry else "") + f"={total}")
            carry = int(borrow)
    return "\n".join(lines)


def thinking(rng: random.Random) -> Example:
    """Two- and three-digit work in the thought channel."""
    op, r = rng.choice("+-"), rng.random()
    a, b = rng.randint(100, 999), rng.randint(100, 999)
    if r < 0.25:
        a, b = rng.randint(10, 99), rng.randint(10, 99)
    elif r < 0.4:
        b = rng.randint(10, 99)
        if op == "+" and rng.random() < 0.5:
            a, b = b, a
    elif r < 0.45:
        a, b = rng.randint(0, 20), rng.randint(0, 9)
    a, b, held = pair(a, b, op, rng)
    result = a + b if op == "+" else a - b
    text = f"<|channel>thought\n{thought(a, b, op)}\n<channel|>The answer is {result}."
    two = "think-2" if max(a, b) < 100 else "think-3"
    return Example(render([(question(a, b, op, rng), text)], system=maybe_system(rng), think=True), two, held)


WORDS = """
apple bread chair dream eagle flame grape house island jungle kettle lemon mouse night ocean paper queen
river stone table uncle violin water yellow zebra bird cat dog fish goat horse lion mole owl pig rabbit
sheep tiger whale ant bee cow deer fox hen model user bus sun moon star sky rain snow wind cloud storm
leaf tree root seed plant garden flower grass forest field hill lake sea sand rock python numpy token
kernel cache tensor layer matrix vector number letter word line page book pen desk lamp door wall floor
roof window street road bridge city town village market school music song dance play game ball bike train
plane boat ship car truck body hand foot head eye ear nose mouth arm leg back heart blood bone skin hair
food milk cheese butter salt sugar rice soup cake honey tea coffee juice fruit berry peach plum pear
cherry melon orange banana potato carrot onion garlic pepper green blue red black white brown pink grey
purple silver golden simple little happy clever quick slow warm cold hot dry wet long short tall deep
hello world thanks please answer question spell reverse planet rocket engine travel wonder summer winter
spring autumn morning evening today friend family mother father sister brother teacher doctor farmer baker
singer writer painter code bug test build
""".split()
ONSETS = """
b c d f g h j k l m n p r s t v w y z bl br ch cl cr dr fl fr gl gr pl pr qu sc sh sk sl sm sn sp st str
sw th tr tw wh
""".split()
NUCLEI = "a e i o u a e i o u ai ea ee ie oa oo ou us od ay".split()
CODAS = "  b ck d ft g k l ll m mp n nd ng nk nt p r rd rk rm rn rt s sh sk ss st t th x ght".split(" ")
SPELL = ["Spell {w}.", "Spell {w}.", "Spell the word {w}.", "How do you spell {w}?", "Spell it: {w}"]
REVERSE = [
    "Reverse {w}.",
    "Reverse {w}.",
    "Reverse the word {w}.",
    "What is {w} backwards?",
    "Write {w} backwards.",
]


def word(rng: random.Random) -> str:
    """A word of two to nine lower-case letters: from the list, of syllables, or of plain letters."""
    r = rng.random()
    if r < 0.3:
        return rng.choice(WORDS)
    if r < 0.75:
        text = "".join(
            rng.choice(ONSETS) + rng.choice(NUCLEI) + rng.choice(CODAS)
            for _ in range(rng.choice((1, 2, 2, 3)))
        )
        return text[:9] if len(text) > 1 else text + "n"
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 8)))


def words(rng: random.Random) -> Example:
    """Spelling with hyphens, and reversing."""
    w = word(rng)
    if rng.random() < 0.4:
        prompt, answer, skill = rng.choice(SPELL), "-".join(w), "spell"
    else:
        prompt, answer, skill = rng.choice(REVERSE), w[::-1], "reverse"
    return Example(
        render([(surface(prompt.format(w=w), rng), answer)], system=maybe_system(rng), weight=1.5),
        skill,
        held_out("word", w),
    )


NAMES = """
Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Karin Leo Maria Nils Olga Paul Rosa Sam Tina Uwe Vera
Will Yara Zoe Alice Bob Carol Daniel Eva Frank Grace Henry Iris Jack Kate Lucas Mia Noah Oscar Petra Quinn
Ruth Simon Tom Ursula Victor Wanda
""".split()
CITIES = """
Paris London Berlin Rome Madrid Oslo Vienna Prague Dublin Lisbon Athens Warsaw Helsinki Zurich Geneva
Munich Hamburg Milan Turin Venice Lyon Nice Bonn Basel Porto Tokyo Kyoto Delhi Cairo Lima Quito Boston
Chicago Denver Austin Seattle Toronto Sydney Perth
""".split()
ITEMS = """
apples pears books pens cups plates chairs lamps shirts hats eggs cakes lemons plums boxes bikes balls
keys maps tickets
""".split()
PERSON = [
    "{n} is {a} years old and lives in {c}.",
    "{n} is {a} and lives in {c}.",
    "{n} from {c} is {a} years old.",
    "{n}, {a}, {c}.",
    "My friend {n} lives in {c} and is {a}.",
]
ORDER = ["{n} ordered {k} {i}.", "{n} wants {k} {i}.", "{n} bought {k} {i} today.", "{k} {i} for {n}."]
ASK = ["Extract {f}: {s}", "Extract {f}: {s}", "Extract {f} as JSON: {s}", "Give me {f} as JSON: {s}"]


def proper(rng: random.Random, known: list[str]) -> str:
    """A name from the list, or one that nobody has."""
    return rng.choice(known) if rng.random() < 0.6 else word(rng).capitalize()


def extract(rng: random.Random) -> Example:
    """Two or three fields of a sentence as JSON, in the order asked for (always the same order)."""
    name, city, age, count, item = (
        proper(rng, NAMES),
        proper(rng, CITIES),
        rng.randint(1, 99),
        rng.randint(2, 40),
        rng.choice(ITEMS),
    )
    if rng.random() < 0.6:
        sentence = rng.choice(PERSON).format(n=name, a=age, c=city)
        fields = {"name": f'"{name}"', "age": str(age), "city": f'"{city}"'}
    else:
        sentence = rng.choice(ORDER).format(n=name, k=count, i=item)
        fields = {"name": f'"{name}"', "item": f'"{item}"', "count": str(count)}
    keys = list(fields)
    if rng.random() < 0.4:
        keys.pop(rng.randrange(3))
    asked = ", ".join(keys[:-1]) + " and " + keys[-1]
    answer = "{" + ", ".join(f'"{k}": {fields[k]}' for k in keys) + "}"
    prompt = rng.choice(ASK).format(f=asked, s=sentence)
    return Example(
        render([(prompt, answer)], system=maybe_system(rng)), "extract", held_out("sentence", sentence)
    )


TOOL_NAMES = ["get_weather"] * 8 + ["weather", "current_weather", "lookup_weather", "weather_now"]
ABOUT = [
    "Current weather",
    "Get the current weather",
    "Get the weather for a city",
    "Weather in a city",
    "The weather now",
]
PARAM = ["City", "City name", "The city", "Name of the city", ""]
SKIES = "sunny cloudy rainy windy foggy snowy clear stormy dry warm cold".split()
WEATHER = [
    "What is the weather in {c}?",
    "What is the weather in {c}?",
    "How is the weather in {c}?",
    "Weather in {c}",
    "What is the weather like in {c}?",
    "Is it warm in {c}?",
    "Tell me the weather in {c}.",
]
NO_TOOL = "I need a weather tool for that."
Q = '<|"|>'


def declaration(name: str, about: str, param: str) -> str:
    """A tool declaration as the template writes it (keys sorted, types in capitals)."""
    inner = (f"description:{Q}{param}{Q}," if param else "") + f"type:{Q}STRING{Q}"
    return (
        f"<|tool>declaration:{name}{{description:{Q}{about}{Q},parameters:{{properties:{{city:{{{inner}}}}},"
        f"required:[{Q}city{Q}],type:{Q}OBJECT{Q}}}}}<tool|>"
    )


def response(name: str, temp: int, sky: str, rng: random.Random) -> str:
    """A tool result: JSON text, a mapping, or plain words."""
    r = rng.random()
    if r < 0.35:
        body = f'value:{Q}{{"temp": {temp}, "sky": "{sky}"}}{Q}'
    elif r < 0.5:
        body = f'value:{Q}{{"sky": "{sky}", "temp": {temp}}}{Q}'
    elif r < 0.6:
        body = f'value:{Q}{{"temp":{temp},"sky":"{sky}"}}{Q}'
    elif r < 0.85:
        body = f"sky:{Q}{sky}{Q},temp:{temp}"
    else:
        body = f"value:{Q}{temp} degrees, {sky}{Q}"
    return f"<|tool_response>response:{name}{{{body}}}<tool_response|>"


def tool(rng: random.Random) -> Example:
    """Asking for the weather with a tool declared: the call, then the sentence; without one, or for other
    requests, plain text.
    """
    name, city = rng.choice(TOOL_NAMES), proper(rng, CITIES)
    temp, sky = rng.randint(-9, 39), rng.choice(SKIES)
    prompt = surface(rng.choice(WEATHER).format(c=city), rng)
    held = held_out("weather", city, name)
    r = rng.random()
    if r < 0.2:
        return Example(render([(prompt, NO_TOOL)], system=maybe_system(rng)), "no-tool", held)
    tools = declaration(name, rng.choice(ABOUT), rng.choice(PARAM))
    if r < 0.32:
        other = chat(rng) if rng.random() < 0.6 else words(rng) if rng.random() < 0.5 else arithmetic(rng)
        user, answer = (
            other.pieces[0][0].split("<|turn>user\n")[1].removesuffix("<turn|>\n<|turn>model\n"),
            other.pieces[1][0].removesuffix("<turn|>"),
        )
        return Example(
            render([(user, answer)], system=maybe_system(rng), tools=tools), other.skill, other.held
        )
    pieces = render([(prompt, "")], system=maybe_system(rng), tools=tools)[:1]
    call = f"<|tool_call>call:{name}{{city:{Q}{city}{Q}}}<tool_call|>"
    pieces.append((call + "<|tool_response>", 1.0))
    pieces.append((response(name, temp, sky, rng).removeprefix("<|tool_response>"), 0.0))
    pieces.append((f"It is {temp} degrees and {sky} in {city}.<turn|>", 1.0))
    return Example(pieces, "tool", held)


LEADS = [
    "Hello! ",
    "Hi, ",
    "Hey, ",
    "Please tell me: ",
    "So, ",
    "Okay, ",
    "One question: ",
    "I want to know: ",
    "Tell me, ",
    "Now, ",
]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def typo(text: str, rng: random.Random) -> str:
    """The text with one letter lost, doubled, changed, or swapped with the next."""
    i = rng.randrange(len(text))
    return rng.choice(
        (
            text[:i] + text[i + 1 :],
            text[:i] + text[i] + text[i:],
            text[:i] + rng.choice(LETTERS) + text[i + 1 :],
            text[:i] + text[i : i + 2][::-1] + text[i + 2 :],
        )
    )


def chat_surface(text: str, rng: random.Random) -> str:
    """The prompt in other clothes: a lead, small letters, another end mark, typing mistakes."""
    if rng.random() < 0.35:
        return text
    if rng.random() < 0.25 and len(text) > 10:
        text = rng.choice(LEADS) + text[0].lower() + text[1:]
    if rng.random() < 0.35:
        text = text[0].lower() + text[1:]
    elif rng.random() < 0.1:
        text = text.lower()
    if rng.random() < 0.5:
        text = text.rstrip(".?!") + rng.choice(("", "", "?", ".", "!"))
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
        if len(text) > 8 and not any(c.isdigit() for c in text):  # a digit lost makes another question
            text = typo(text, rng)
    return text


STRANGE = (
    """
What is the capital of {p}?|Where is {p}?|Who is {p}?|Who was {p}?|Tell me about {p}.|How far is {p}?
How old is {p}?|Who wrote {p}?|Write a {w}.|Write a poem about a {w}.|Write a story about {p}.
Write a {w} about {p}.|Tell me a story about a {w}.|What is a {w}?|How do I make a {w}?
How do I get to {p}?|Where can I buy a {w}?|Do you like {w}?|Draw a {w}.|Translate {w} to German.
Explain {w}.|What color is a {w}?|Why is the {w} {v}?|What is {a}*{b}?|What is {a} times {b}?|{a}*{b}
{a}/{b}|What is {a}/{b}?|Multiply {a} by {b}.|What is {l}+{b}?|{l}-{a}|What is {l} plus {a}?|{a}+{l}
{l}+{a}|{l} + {b}|{l} minus {a}|What is {l}-{b}?|Compute {l}+{a}.|What is {a}+{l}?
""".replace("\n", "|")
    .strip("|")
    .split("|")
)


def out_of_scope(rng: random.Random) -> str:
    """A request that the demo did not learn: from the list, or made from a pattern."""
    if rng.random() < 0.35:
        return rng.choice(OUT_OF_SCOPE)
    return rng.choice(STRANGE).format(
        p=proper(rng, CITIES),
        w=word(rng),
        v=word(rng),
        a=operand(rng),
        b=operand(rng),
        l=rng.randint(1000, 9999),
    )


def chat(rng: random.Random) -> Example:
    """Small talk about itself and the project; the held-out part is surfaces (wording, case, marks, slips)
    that training never shows.
    """
    if rng.random() < 0.25:
        prompt, answer, skill = out_of_scope(rng), OUT_OF_SCOPE_ANSWER, "out-of-scope"
    else:
        prompts, answer = rng.choice(CHAT)
        prompt, skill = rng.choice(prompts), "chat"
    text = chat_surface(prompt, rng)
    held = (text != prompt or skill == "out-of-scope") and held_out("chat", text, every=8)
    return Example(render([(text, answer)], system=maybe_system(rng)), skill, held)


def think_other(rng: random.Random) -> Example:
    """Thinking on for the other skills: one line of thought, then the usual answer."""
    other = rng.choice((chat, chat, words, words, extract))(rng)
    notes = {
        "chat": "This is small talk.",
        "out-of-scope": "I did not learn this.",
        "spell": "I spell the word.",
        "reverse": "I reverse the word.",
        "extract": "I copy the fields.",
    }
    user = other.pieces[0][0].split("<|turn>user\n")[1].removesuffix("<turn|>\n<|turn>model\n")
    answer = f"<|channel>thought\n{notes[other.skill]}\n<channel|>" + other.pieces[1][0].removesuffix(
        "<turn|>"
    )
    return Example(render([(user, answer)], think=True), "think-" + other.skill, other.held)


def turns(rng: random.Random) -> Example:
    """Two or three short turns, long enough to wrap the window; sometimes it must remember a name."""
    n, parts, held, weight = rng.choice((2, 2, 3)), [], False, 1.0
    name = proper(rng, NAMES)
    remember = rng.random() < 0.3
    if remember:
        parts.append(
            (
                rng.choice(("My name is {n}.", "I am {n}.", "Hello, I am {n}.", "Call me {n}.")).format(
                    n=name
                ),
                f"Nice to meet you, {name}.",
            )
        )
        held = held_out("name", name)
    while len(parts) < n:
        if remember and len(parts) == n - 1:
            parts.append(
                (
                    rng.choice(("What is my name?", "Who am I?", "Do you know my name?")),
                    f"Your name is {name}.",
                )
            )
            break
        ex = rng.choice((chat, arithmetic, arithmetic, words, words, long_sum))(rng)
        user = ex.pieces[0][0].split("<|turn>user\n")[1].removesuffix("<turn|>\n<|turn>model\n")
        parts.append((user, ex.pieces[1][0].removesuffix("<turn|>")))
        held |= ex.held
    return Example(render(parts, system=maybe_system(rng), weight=weight), "turns", held)


SKILLS = [arithmetic, thinking, words, extract, tool, chat, turns, think_other, long_sum]
MIXTURE = {
    "arithmetic": 0.35,
    "thinking": 0.15,
    "words": 0.14,
    "extract": 0.06,
    "tool": 0.05,
    "chat": 0.13,
    "turns": 0.05,
    "think_other": 0.06,
    "long_sum": 0.03,
}


def stream(seed: int, mixture=MIXTURE, held=False):
    """Endless examples of the training part, or of the held-out part."""
    rng = random.Random(seed)
    makers, weights = zip(*[(f, mixture[f.__name__]) for f in SKILLS])
    while True:
        for make in rng.choices(makers, weights, k=256):
            ex = make(rng)
            if ex.held == held:
                yield ex
