"""Chat templates as Hugging Face renders them, in a sandbox."""

from __future__ import annotations

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from router.text.chat_template import ChatTemplate, ChatTemplateError

MESSAGES = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": 'Hi "you" 日本'},
    {"role": "assistant", "content": "  Hello.\n"},
    {"role": "user", "content": "Bye"},
]
TEMPLATES = {
    "blocks are trimmed": "{% for m in messages %}\n    {% if loop.first %}\n  A\n    {% endif %}\n"
    "{{ m.content }}\n{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }};{% endfor %}",
    "tojson": "{% for m in messages %}{{ m | tojson }}{{ m | tojson(indent=2) }}{% endfor %}",
    "methods": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{{ ns.n }}{{ m['content'].strip().split(' ')[0].upper() }}{% endfor %}",
    "generation mark": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "prompt": "{{ bos_token }}{{ messages[-1].content }}{% if add_generation_prompt %}>>{% endif %}{{ eos_token }}",
    "tools are none": "{% if tools is not none %}T{% endif %}{{ messages[0].role }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_rendering_equals_transformers(name: str, add_generation_prompt: bool) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    theirs = render_jinja_template(
        conversations=[MESSAGES],
        chat_template=TEMPLATES[name],
        add_generation_prompt=add_generation_prompt,
        bos_token=special["bos_token"],
        eos_token=special["eos_token"],
    )[0]

    ours = ChatTemplate(TEMPLATES[name], special_tokens=special).render(
        MESSAGES, add_generation_prompt=add_generation_prompt
    )

    assert ours == theirs[0]


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TRIMMING = CHATML.replace("m.content", "m.content | trim")
INST = "{% for m in messages %}{{ ' ' + m.content | trim + ' ' }}</s>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "content", "end"),
    [
        (CHATML, "one, two,", "\none, two,"),
        (CHATML, "<", "\n<"),
        (CHATML, "end", "\nend"),
        (CHATML, "im_end|>\n", "\nim_end|>\n"),
        (CHATML, "kept ", "\nkept "),
        (CHATML, "", "assistant\n"),
        (TRIMMING, " cut \n", "\ncut"),
        (TRIMMING, "\n", "assistant\n"),
        (INST, "cut ", "</s> cut"),
        ("{% for m in messages %}{{ m.content | upper }}.{% endfor %}", "abc", "BYE.ABC"),
    ],
)
def test_final_message_is_left_open_where_its_content_ends(template: str, content: str, end: str) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": content}]

    text = ChatTemplate(template, special_tokens={}).render_open(messages)

    whole = ChatTemplate(template, special_tokens={}).render(messages, add_generation_prompt=False)
    assert whole.startswith(text)
    assert text.endswith(end)


@pytest.mark.parametrize("content", ["one, two,", "kept ", "<", "end"])
def test_open_final_message_equals_transformers(content: str) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    theirs, _ = render_jinja_template(
        conversations=[messages], chat_template=CHATML, continue_final_message=True, add_generation_prompt=False
    )

    assert ChatTemplate(CHATML, special_tokens={}).render_open(messages) == theirs[0]


def test_final_message_that_the_template_leaves_out_cannot_be_left_open() -> None:
    template = ChatTemplate("{{ messages[0].content }}", special_tokens={})

    with pytest.raises(ChatTemplateError, match="not in the rendered chat"):
        template.render_open(MESSAGES)


def test_date_of_today_can_be_asked_for() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') | length }}", special_tokens={})

    assert template.render(MESSAGES) == "4"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no such role') }}",
        "{{ messages[0].missing.deeper }}",
        "{{ 1 / 0 }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(999999999) %}x{% endfor %}",
    ],
)
def test_failing_or_forbidden_template_is_a_clean_error(source: str) -> None:
    template = ChatTemplate(source, special_tokens={})

    with pytest.raises(ChatTemplateError) as caught:
        template.render(MESSAGES)

    assert caught.value.param == "messages"


def test_template_sees_extra_arguments() -> None:
    template = ChatTemplate("{% if enable_thinking %}think{% else %}talk{% endif %}", special_tokens={})

    assert template.render(MESSAGES) == "talk"
    assert template.render(MESSAGES, arguments={"enable_thinking": True}) == "think"
