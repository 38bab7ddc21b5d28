"""Chat templates: which text they give, what of it is an answer, and which of them cannot tell."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2")

from mplug import UsageError
from mplug_tokenization.templates import Template, read_template

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Ho"},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "Because."},
]
INST = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% elif message['role'] == 'assistant' %} {{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant, not ' + message['role']) }}{% endif %}"
    "{% endfor %}"
)
FORGETFUL = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% if message['role'] == 'assistant' and not loop.last %}...{% else %}{{ message['content'] }}{% endif %};"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def answers(template: Template, messages: list[dict[str, Any]], tools: Any = None) -> list[str]:
    rendered = template.render(messages, tools)
    return [rendered.text[begin:end] for begin, end in rendered.answers]


def test_chatml_renders_its_published_example() -> None:
    template = read_template("chatml", {})
    assert template.render(TALK).text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nBecause.<|im_end|>\n"
    )
    assert answers(template, TALK) == ["Ho<|im_end|>", "Because.<|im_end|>"]


def test_llama3_renders_its_published_example() -> None:
    template = read_template("llama3", {})
    assert template.render(TALK[:3]).text == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHo<|eot_id|>"
    )
    assert answers(template, TALK) == ["Ho<|eot_id|>", "Because.<|eot_id|>"]


def test_messages_after_the_last_answer_are_omitted() -> None:
    template = read_template("chatml", {})
    assert template.render(TALK[:4]) == template.render(TALK[:3])
    assert template.render(TALK[:2]).answers == ()


def test_answers_are_found_in_a_template_without_headers_of_answers(tmp_path: Path) -> None:
    path = tmp_path / "chat_template.jinja"
    path.write_text(INST)
    template = read_template(str(path), {"eos_token": "</s>"})
    assert template.render(TALK[1:]).text == "[INST] Hi [/INST] Ho</s>[INST] Why? [/INST] Because.</s>"
    assert answers(template, TALK[1:]) == [" Ho</s>", " Because.</s>"]
    assert template.special == ("</s>",)


@pytest.mark.parametrize(
    ("source", "content", "answer"),
    [
        ("{{ m.content }}<end>\n", "Ho", "Ho<end>"),  # the space after the mark is never generated
        ("{{ m.content }}\n", "Ho", "Ho\n"),  # here the space is the mark
        ("{{ m.content }}", "Ho\n", "Ho\n"),
        ("{{ m.content | trim }}<end>", "Ho \n", "Ho<end>"),
        ("{{ m.content }}<end>\n", "", "<end>"),
        ("{% generation %}{{ m.content }}<end>{% endgeneration %}\n\n", "Ho", "Ho<end>"),
    ],
)
def test_an_answer_includes_its_end_mark(source: str, content: str, answer: str) -> None:
    template = Template("own", "{% for m in messages %}" + source + "{% endfor %}")
    assert answers(template, [{"role": "assistant", "content": content}]) == [answer]


def test_a_template_receives_tools_and_calls_and_can_write_json() -> None:
    source = (
        "{{ tools | tojson }}{% for m in messages %}{% if add_generation_prompt or not loop.last %}{% endif %}"
        "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% continue %}{% endif %}{{ m.content }}{% endfor %}"
    )
    asked = {"role": "user", "content": "é?"}
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": "é<"}]}
    assert answers(Template("own", source), [asked, called], [{"name": "f"}]) == ['[{"name": "é<"}]']


def test_a_configuration_of_a_tokenizer_holds_template_and_special_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer_config.json"
    held = {
        "chat_template": [{"name": "rag", "template": "no"}, {"name": "default", "template": INST}],
        "eos_token": {"content": "</s>", "special": True},
        "bos_token": None,
        "added_tokens_decoder": {"3": {"content": "<pad>", "special": True}, "9": {"content": "x", "special": False}},
    }
    path.write_text(json.dumps(held))
    template = read_template(str(path), {})
    assert answers(template, TALK[1:3]) == [" Ho</s>"]
    assert set(template.special) == {"<pad>", "</s>"}
    assert answers(read_template(str(path), {"eos_token": "<e>"}), TALK[1:3]) == [" Ho<e>"]


# Refusals.


def test_a_template_that_rewrites_earlier_answers_is_refused() -> None:
    template = Template("forgetful", FORGETFUL)
    assert answers(template, TALK[:3]) == ["Ho;"]
    with pytest.raises(ValueError, match="'forgetful' changes earlier text when messages are added"):
        template.render(TALK)


def test_a_template_whose_generation_header_does_not_begin_the_answer_is_refused() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    with pytest.raises(
        ValueError, match="first 2 messages with an answer's header is not a prefix of the text with message 3"
    ):
        Template("own", source).render(TALK)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (INST, "only user and assistant, not system"),
        ("{{ messages[9].content.parts }}", "has no element 9|no attribute"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ strftime_now('%d') }}", "'strftime_now' is undefined"),
        ("{{ messages[0].content.split('') }}", "empty separator"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "recursion"),
    ],
)
def test_the_error_of_a_template_has_the_templates_own_words(source: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"data.template 'own' fails for this conversation: .*({said})"):
        Template("own", source).render(TALK)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("bad.jinja", "one\n{% for %}", r"bad\.jinja', line 2, is not valid Jinja"),
        ("bad.json", "{", r"bad\.json' is not valid JSON"),
        ("none.json", "{}", r"none\.json' has no 'chat_template'"),
        (
            "odd.json",
            '{"chat_template": "x", "added_tokens_decoder": {"1": 2}}',
            r"odd\.json' is damaged: .*; download",
        ),
    ],
)
def test_the_error_names_a_file_that_is_no_template(tmp_path: Path, name: str, content: str, said: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UsageError, match=said):
        read_template(str(path), {})


def test_the_template_of_a_published_folder_is_read_from_either_file(tmp_path: Path) -> None:
    own = {"eos_token": "</s>", "chat_template": "{% for m in messages %}{{ m.content }}|{% endfor %}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    found = read_template(str(tmp_path), {})
    assert found.text([{"role": "user", "content": "a"}]) == "a|"
    assert "</s>" in found.special
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    assert read_template(str(tmp_path), {}).text([{"role": "user", "content": "a"}]) == "a</s>"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"and no folder with chat_template\.jinja or tokenizer_config\.json"):
        read_template(str(tmp_path), {})


PARTS = (
    "{% for message in messages %}{{ message['role'] }}:{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] if part['type'] == 'text' else '<image>' }}"
    "{% endfor %}{% endif %};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_a_template_may_support_content_in_parts() -> None:
    template = Template("parts", PARTS)
    assert template.takes_parts
    content = [{"type": "image"}, {"type": "text", "text": "What?"}]
    answer = [{"type": "text", "text": "That. "}]
    talk = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    assert template.render(talk).text == "user:<image>What?;assistant:That. ;"
    assert answers(template, talk) == ["That. ;"]
    unmarked = Template("unmarked", PARTS.replace("{% endif %};{% endfor %}", "{% endif %}{% endfor %}"))
    assert answers(unmarked, talk) == ["That. "]  # white space at the end of a content belongs to the answer


@pytest.mark.parametrize("source", [INST, FORGETFUL, "{{ messages | tojson }}", "{{ messages[0].content + 'x' }}"])
def test_other_templates_need_text(source: str) -> None:
    assert not Template("text", source, {"eos_token": "</s>"}).takes_parts
    assert not read_template("chatml", {}).takes_parts
    assert not read_template("llama3", {}).takes_parts
