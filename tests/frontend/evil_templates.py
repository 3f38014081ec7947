"""Templates that want to run for ever, fill the memory or leave the sandbox.

Run as a program, in a process with little memory, it prints what came of each: name -> [error, seconds of
processor time].
"""

# ruff: noqa: E501 -- one template, one line

import json
import resource
import sys
import time

DOUBLING = (
    "{%% set ns = namespace(s=%s) %%}{%% for i in range(60) %%}{%% set ns.s = %s %%}{%% endfor %%}{{ %s }}"
)
TEXT = "{% set s = 'x' * 4000000 %}"

EVIL = {
    # loops and recursion
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops over a filter": "{% for i in range(99999)|map('string') %}{% for j in range(99999)|map('string') %}{% endfor %}{% endfor %}",
    "recursive macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "binary recursion": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "recursive loop": "{% for i in range(3) recursive %}{{ loop(range(100)) }}{% endfor %}",
    "sorting": "{% for i in range(99999) %}{{ range(100000)|sort|length }}{% endfor %}",
    "slices": TEXT + "{% for i in range(99999) %}{% if s[1:] == s[:2] %}{% endif %}{% endfor %}",
    "searching": TEXT + "{% for i in range(99999) %}{% if s[1:] + 'y' in s %}{% endif %}{% endfor %}",
    # large values
    "repeated text": "{{ 'a' * 10**9 }}",
    "repeated list": "{{ [1] * 10**9 }}",
    "repeated twice": "{{ ('a' * 1000000) * 1000000 }}",
    "power": "{{ 9999999 ** 99999999 }}",
    "squares": DOUBLING % ("7", "ns.s * ns.s", "ns.s"),
    "doubling +": DOUBLING % ("'a'", "ns.s + ns.s", "ns.s|length"),
    "doubling ~": DOUBLING % ("'a'", "ns.s ~ ns.s", "ns.s|length"),
    "doubling join": DOUBLING % ("'a'", "[ns.s, ns.s]|join", "ns.s|length"),
    "shared lists": DOUBLING % ("[1]", "[ns.s, ns.s]", "ns.s"),
    "shared tuples": DOUBLING % ("(1,)", "(ns.s, ns.s)", "{ns.s: 1}"),
    "shared objects": DOUBLING % ("{}", "{'a': ns.s, 'b': ns.s}", "ns.s|tojson"),
    "dict()": DOUBLING % ("{}", "dict(a=ns.s, b=ns.s)", "ns.s|string"),
    "a namespace in itself": "{% set a = namespace(x=1) %}{% set a.x = a %}{{ a }}",
    "many variables": "".join(f"{{% set a{k} = 'x' * 16000000 %}}" for k in range(1000)),
    "center": "{{ 'a'|center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format from an argument": "{{ '{:{}}'.format(1, 1000000000) }}",
    "% format": "{{ '%1000000000d' % 1 }}",
    "% format from an argument": "{{ '%*d' % (1000000000, 1) }}",
    "replace": TEXT + "{{ s.replace('x', s) }}",
    "replace filter": TEXT + "{{ s|replace('', s) }}",
    "join": TEXT + "{{ range(100000)|join(s) }}",
    "join method": TEXT + "{{ s.join(s) }}",
    "indent": "{{ ('a\n' * 1000000)|indent(100000) }}",
    "tojson indent": "{{ [[[[1]]]]|tojson(indent=1000000000) }}",
    "slice filter": "{{ [1]|slice(10**9)|list }}",
    "text in a macro's loop": "{% macro m() %}{% for i in range(99999) %}"
    + "x" * 50_000
    + "{% endfor %}{% endmacro %}{{ m()|length }}",
    "text in a block": "{% set q %}{% for i in range(99999) %}"
    + "x" * 50_000
    + "{% endfor %}{% endset %}{{ q|length }}",
    "output": "{% for i in range(99999) %}" + "x" * 50_000 + "{% endfor %}",
    "round": "{{ 5|round(-1000000000) }}",
    "round up": "{{ 1.5|round(1000000000, 'ceil') }}",
    "sum of lists": "{{ ([[1]] * 100000)|sum(start=[]) }}",
    "letters": TEXT + "{{ s|list|length }}{{ s|sort|length }}",
    "split": "{{ ('abc' * 5000000).split('a')|length }}",
    "split at spaces": "{{ ('ab ' * 5000000).split()|length }}",
    "words": "{{ ('ab ' * 5000000)|title|length }}",
    "wide time format": "{{ strftime_now('%99999999Y') }}",
    "time format": "{{ strftime_now('%Y' * 1000) }}",
    # ways out
    "class": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ namespace.__init__.__globals__ }}",
    "subclasses": "{{ messages.__class__.__base__.__subclasses__() }}",
    "attr": "{{ (''|attr('__class__')).mro() }}",
    "format string": "{{ '{0.__class__.__mro__}'.format('').x() }}",
    "format by attr": "{{ ('{0.__class__.__mro__}'|attr('format'))('') }}",
    "map attr": "{{ ['']|map(attribute='__class__')|map(attribute='__mro__')|first|first }}{{ raise_exception('no way') }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "changing an argument": "{{ messages.append(1) }}",
    # no templates
    "syntax": "{% if %}",
    "unknown filter": "{{ 1|nope }}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "long": "{{ " + "1+" * 20_000 + "1 }}",
    "huge": "x" * (1 << 19),
}


def main() -> None:
    from refimpl.frontend.template_sandbox import BoundedEnvironment

    limit = 1 << 30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    environment = BoundedEnvironment()
    outcomes = {}
    for name, source in EVIL.items():
        began = time.thread_time()
        try:
            text = environment.render(source, {"messages": [{"role": "user", "content": "Hi"}]}, seconds=0.3)
            error = f"rendered {text[:80]!r}"
        except ValueError as refusal:
            error = str(refusal)
        outcomes[name] = [error, time.thread_time() - began]
    json.dump(outcomes, sys.stdout)


if __name__ == "__main__":
    main()
