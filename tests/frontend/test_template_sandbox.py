"""Templates from strangers: each evil one ends with one line, soon and in little memory; harmless ones mean
what Jinja means.
"""

# ruff: noqa: E501 -- one template, one line

import json
import subprocess
import sys
from functools import cache

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from refimpl.frontend.template_functions import NULL
from refimpl.frontend.template_sandbox import BoundedEnvironment
from tests.frontend.evil_templates import EVIL


@cache
def outcomes() -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "tests.frontend.evil_templates"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]  # no crash, and 1 GiB of address space was enough
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", EVIL)
def test_evil_templates_end_with_one_line(name):
    error, seconds = outcomes()[name]
    assert error.startswith("chat template: ")
    assert "\n" not in error
    assert seconds < 2  # with a budget of 0.3; the rest is the last operation, of bounded size


HARMLESS = [
    "{% for m in messages %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ m.role }}{% if not loop.last %},{% endif %}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ m['content'] }}{% else %}none{% endfor %}",
    "{% for k, v in {'b': 1, 'a': [1, 2]}|dictsort %}{{ k }}={{ v }};{% endfor %}",
    "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{% macro m(a, b='x') %}{{ a ~ b }}{{ caller() if caller else '' }}{% endmacro %}{{ m(1) }}{% call m(2) %}!{% endcall %}",
    "{% set ns = namespace(a=1) %}{% for i in [1, 2] %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}",
    "{{ messages[1:]|map(attribute='role')|join(', ') }} {{ messages|selectattr('role', 'equalto', 'user')|list|length }}",
    "{{ '%s-%02d' % ('a', 7) }} {{ '{:>5}|{}'.format('a', 3) }} {{ 2 ** 10 }} {{ 7 // 2 }} {{ 'ab' * 3 }} {{ [1] + [2] }}",
    "{{ x is defined }} {{ x|default('d') }} {{ none }} {{ true }} {{ 1.5 }} {{ undefined_thing }} {{ 'a' if false }}",
    "{{ ' a\n'|trim|upper }} {{ 'a,b'.split(',')[0] }} {{ 'abc'|replace('b', 'x') }} {{ 'a\nb'|indent(2) }}|{{ 'A'|lower|length }}",
    "{% set block %}in{{ 1 }}{% endset %}{{ block }}{% filter upper %}x{% endfilter %}{{ (1, 2)[1] }}{{ {'a': 1}['a'] }}",
    "{{ 'a' in ['a'] }} {{ 'a' in 'abc' }} {{ 1 < 2 <= 2 }} {{ [3, 1]|sort }} {{ [1, 2]|sum }} {{ 'x' is string }} {{ {} is mapping }}",
    "  {% if true %}\n  a\n  {% endif %}\n{#- c -#}\n  b",
]


@pytest.mark.parametrize("source", HARMLESS)
def test_harmless_templates_mean_what_jinja_means(source):
    messages = [{"role": r, "content": c} for r, c in (("system", "s"), ("user", "u"), ("assistant", "a"))]
    theirs = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    expected = theirs.from_string(source).render(messages=messages)
    assert BoundedEnvironment().render(source, {"messages": messages}, seconds=5) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ x|tojson }}", '{"b": "<é>\'", "a": [1, null, true]}'),
        ("{{ x|tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":[1,null,true],"b":"<é>\'"}'),
        ("{{ x|tojson(ensure_ascii=true) }}", '{"b": "<\\u00e9>\'", "a": [1, null, true]}'),
        ("{{ [1]|tojson(indent=2) }}", "[\n  1\n]"),
    ],
)
def test_tojson_is_plain_json(source, expected):
    value = {"b": "<é>'", "a": [1, NULL, True]}
    assert BoundedEnvironment().render(source, {"x": value}, seconds=5) == expected


def test_the_date():
    assert BoundedEnvironment().render("{{ strftime_now('%Y') }}", {}, seconds=5).isdigit()


def test_complaints_of_the_template():
    with pytest.raises(ValueError, match=r"^chat template: no$"):
        BoundedEnvironment().render("{{ raise_exception('no') }}", {}, seconds=5)
