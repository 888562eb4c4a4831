"""Templates with a caller's values: whatever these are, memory and time stay bounded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import count

import pytest

from router.text.chat_template import ChatTemplate, ChatTemplateError, ReservedArgumentError
from router.text.template_bounds import BoundedEnvironment, Budget, TemplateLimitError

PEAK = """
import json, resource, sys
from router.text.chat_template import ChatTemplate, ChatTemplateError

resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
source, num_messages, size, number = json.loads(sys.argv[1])
messages = [{"role": "user", "content": "a b\\n"} for _ in range(num_messages)]
template = ChatTemplate(source, special_tokens={"bos_token": "<s>"})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    said = str(len(template.render(messages, arguments={"hint": "x" * size, "number": number})))
except ChatTemplateError as error:
    said = str(error)
print(json.dumps([said, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024]))
"""
"""Renders in a process of its own, which may have 1 GiB at most, and tells by how many MiB it grew."""

LOOP = "{% for m in messages %}BODY{% endfor %}"
TOO_LONG = "would have more than 8388608 characters"
ATTACKS = {
    "a text for each message": "{{ hint }}",
    "a growing text": "{% set ns.text = ns.text ~ hint %}",
    "a growing sum": "{% set ns.text = ns.text + hint %}",
    "a growing list": "{% set ns.items = ns.items + [hint + m.role] %}",
    "a block that is set": "{% set part %}{{ hint }}{{ hint }}{% endset %}{% set ns.items = ns.items + [part] %}",
    "a macro": "{% set ns.items = ns.items + [twice(hint)] %}",
    "a filter that replaces": "{{ m.content | replace(' ', hint) }}",
    "a method that replaces": "{{ m.content.replace(' ', hint) }}",
    "a filter that joins": "{{ 'abcdefgh' | list | join(hint) }}",
    "a method that joins": "{{ hint.join(['a', 'b', 'c', 'd']) }}",
    "a filter that indents": "{{ m.content | indent(number) }}",
    "a filter that centers": "{{ m.content | center(number) }}",
    "a method that pads": "{{ m.content.ljust(number) }}",
    "a product": "{{ m.role * number }}",
    "a product of a list": "{% set ns.items = [m] * number %}",
    "a format": "{{ ('%0' ~ number ~ 'd') % 1 }}",
    "a method that formats to a width": "{{ '{:{}}'.format(1, number) }}",
    "a method that formats with a map": "{{ '{a:{b}}'.format_map({'a': 1, 'b': number}) }}",
    "texts that a method formats": "{% set ns.items = ns.items + ['{}{}'.format(hint, m.role)] %}",
    "an escaped text that is formatted": "{{ ('{:{}}' | escape).format(1, number) }}",
    "a power": "{{ 10 ** number }}",
    "a text split into items": "{% set ns.items = ns.items + (hint ~ m.content).replace('x', ' x').split(' ') %}",
    "a text in upper case": "{% set ns.items = ns.items + [hint.upper()] %}",
}
BEFORE = "{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns = namespace(text='', items=[]) %}"


@pytest.mark.parametrize("name", ATTACKS)
def test_a_megabyte_does_not_become_gigabytes(name: str) -> None:
    source = BEFORE + LOOP.replace("BODY", ATTACKS[name])
    done = subprocess.run(
        [sys.executable, "-c", PEAK, json.dumps([source, 4000, 500_000, 400_000_000])],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )

    said, grown_mib = json.loads(done.stdout)
    assert TOO_LONG in said
    assert grown_mib < 300


def test_json_is_not_indented_without_bound() -> None:
    template = ChatTemplate("{{ messages | tojson(indent=number) }}", special_tokens={})

    with pytest.raises(ChatTemplateError, match="indents JSON by more than 16"):
        template.render([{"role": "user"}], arguments={"number": 10**9})


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in messages %}{% for b in messages %}{% if a == b %}{% endif %}{% endfor %}{% endfor %}",
        "{% for a in range(number) %}{% for b in range(number) %}{% endfor %}{% endfor %}",
        "{% for a in messages %}{% for b in messages %}{% set x = b.role %}{% endfor %}{% endfor %}",
        "{% for a in hint %}{% for b in hint %}{% endfor %}{% endfor %}",
        "{% for a in messages %}{{ messages | map(attribute='role') | list | length }}{% endfor %}",
    ],
)
def test_steps_are_bounded(source: str) -> None:
    template = ChatTemplate(source, special_tokens={})
    messages = [{"role": "user"}] * 4000

    with pytest.raises(ChatTemplateError, match="takes more than 2000000 steps"):
        template.render(messages, arguments={"number": 100_000, "hint": "x" * 100_000})


def test_range_is_bounded() -> None:
    with pytest.raises(ChatTemplateError, match="more than 100000 numbers"):
        ChatTemplate("{% for a in range(number) %}{% endfor %}", special_tokens={}).render(
            [{"role": "user"}], arguments={"number": 100_001}
        )


def test_time_is_bounded_where_steps_are_slow() -> None:
    seconds: Iterator[int] = count()
    environment = BoundedEnvironment()
    template = environment.from_string("{% for a in range(9999) %}{% endfor %}")
    budget = Budget(max_characters=100, max_cpu_s=3.0, clock=lambda: float(next(seconds)))

    with environment.spending(budget), pytest.raises(TemplateLimitError, match="takes more than 3 s"):
        template.render()


def test_long_conversations_are_rendered() -> None:
    """With as many messages and as much text as a body may have."""
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    source = (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m.content | trim }}{{ eos_token }}\n{% endfor %}"
    )
    messages = [{"role": "user", "content": "x" * 350} for _ in range(20_000)]

    text = ChatTemplate(source, special_tokens=special).render(messages)

    assert text == "<s>" + ("[user] " + "x" * 350 + "</s>\n") * 20_000


@pytest.mark.parametrize(
    "name",
    [
        *("bos_token", "eos_token", "pad_token", "image_token", "messages", "tools", "documents", "range", "namespace"),
        *("add_generation_prompt", "raise_exception", "strftime_now", "chat_template", "loop", "caller"),
    ],
)
def test_names_that_the_model_gives_are_reserved(name: str) -> None:
    template = ChatTemplate("{{ eos_token }}", special_tokens={"eos_token": "</s>", "image_token": "<i>"})

    with pytest.raises(ReservedArgumentError, match=f"must not contain {name}:") as caught:
        template.render([], arguments={name: "x" * 10})

    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'a' ~ 1 ~ none }}", "a1None"),
        ("{{ 'a' + 'b' * 3 }}", "abbb"),
        ("{{ 7 % 4 }} {{ '%s-%05d' % ('a', 7) }} {{ 2 ** 5 }}", "3 a-00007 32"),
        ("{{ [1, 2] + [3] }} {{ 1.5 * 2 }} {{ 'x' * 0 }}", "[1, 2, 3] 3.0 "),
        (
            "{% for a in [1, 2, 3] %}{{ loop.index }}/{{ loop.length }}{{ '' if loop.last else ',' }}{% endfor %}",
            "1/3,2/3,3/3",
        ),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{% for a in nothing %}{% else %}none{% endfor %}", "none"),
        ("{% for a in [1, 2, 3] if a != 2 recursive %}{{ a }}{% endfor %}", "13"),
        ("{{ 'a,b'.split(',') | join('+') }} {{ ' x '.strip() }} {{ '-'.join(['a', 'b']) }}", "a+b x a-b"),
        ("{{ {'a': [1]} | tojson(indent=1) }}", '{\n "a": [\n  1\n ]\n}'),
        ("{{ '{:>4}|{a!r}|{b[0].c}'.format(1, a='x', b=[{'c': 2}]) }}", "   1|'x'|2"),
        ("{{ '{a}-{a:{b}}'.format_map({'a': 7, 'b': '03'}) }} {{ ('{}' | escape).format('<') }}", "7-007 &lt;"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x }}{{ 'b' | indent(2, true) }}", "a1  b"),
    ],
)
def test_what_is_counted_means_the_same(source: str, expected: str) -> None:
    assert ChatTemplate(source, special_tokens={}).render([]) == expected


def test_filters_that_want_the_context_get_it() -> None:
    template = ChatTemplate("{{ items | sort(attribute='a') | map(attribute='a') | join(',') }}", special_tokens={})

    assert template.render([], arguments={"items": [{"a": 2}, {"a": 1}]}) == "1,2"


def test_items_that_come_one_by_one_are_joined_for_what_they_are() -> None:
    template = ChatTemplate(
        LOOP.replace("BODY", "{{ messages | map(attribute='role') | join(hint) }}"), special_tokens={}
    )

    assert len(template.render([{"role": "a"}] * 40, arguments={"hint": "-" * 1000})) == 40 * (40 + 39 * 1000)
