"""Chat templates: they turn messages into text, and this file finds the answers in that text.

A template is written in Jinja, as in Hugging Face's tokenizers. Its variables are `messages`, `add_generation_prompt`,
`tools` and the texts of special tokens (`bos_token` ...). It runs in Jinja's sandbox without access to files or the
clock, so a conversation always gives the same text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mplug import UsageError, local_path

WITHOUT_CONTENT = (
    "{% if message['content'] is none %}"
    "{{ raise_exception('it does not support a message without content, such as tool calls') }}"
    "{% endif %}"
)
NAMED = {
    "chatml": (
        "{% for message in messages %}"
        + WITHOUT_CONTENT
        + "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama3": (
        "<|begin_of_text|>"
        "{% for message in messages %}"
        + WITHOUT_CONTENT
        + "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
}
"""Value of `data.template` -> built-in template."""
SPECIAL_TOKENS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}
"""Built-in template -> the special tokens that it writes."""
FAILURES = (
    TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError, MemoryError
)  # fmt: skip
"""Exceptions of a template that does not support a conversation, or that is itself wrong."""
JINJA, TOKENIZER = "chat_template.jinja", "tokenizer_config.json"
"""The files of a published checkpoint with its chat template."""
ANSWERS = "assistant"
"""The role whose messages are answers."""

Message = Mapping[str, Any]


class _Generation(Extension):
    """The tag `{% generation %} ... {% endgeneration %}`, with which some templates mark answers, as plain text."""

    tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the tags. `Template.render` finds answers by prefixes, which works for every template."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _json(value: Any, indent: int | None = None, **named: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **named)


@dataclass(frozen=True)
class Rendered:
    """The text of a conversation, and its answers as (begin, end) in characters."""

    text: str
    answers: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Template:
    """A chat template with its Jinja source, its name for errors, and the texts of its special tokens."""

    name: str
    source: str
    variables: Mapping[str, str] = field(default_factory=dict)
    special: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _json
        environment.globals["raise_exception"] = _raise
        try:
            compiled = environment.from_string(self.source)
        except TemplateSyntaxError as error:
            raise UsageError(
                f"data.template '{self.name}', line {error.lineno}, is not valid Jinja: {error.message}; correct it"
            ) from None
        object.__setattr__(self, "_compiled", compiled)

    @cached_property
    def takes_parts(self) -> bool:
        """Whether it supports content as a list of parts `{"type": "text", "text": ...}`; other templates need text."""
        probe = "A question?"
        try:
            written = self.text([{"role": "user", "content": [{"type": "text", "text": probe}]}])
        except ValueError:
            return False
        return probe in written and "'type'" not in written and '"type"' not in written

    def text(self, messages: Sequence[Message], tools: Any = None, prompt: bool = False) -> str:
        """The text of messages; with `prompt`, also an answer's header. Raises ValueError if the template fails."""
        try:
            rendered: str = self._compiled.render(  # type: ignore[attr-defined]
                messages=messages, tools=tools, add_generation_prompt=prompt, **self.variables
            )
        except FAILURES as error:
            reason = f"{error}" or type(error).__name__
            raise ValueError(
                f"data.template '{self.name}' fails for this conversation: {reason}; correct the conversation, or use "
                f"another template"
            ) from None
        return rendered

    def render(self, messages: Sequence[Message], tools: Any = None) -> Rendered:
        """The text of the conversation up to its last answer, with the places of the answers.

        An answer is the text that its message adds to the preceding messages and the answer's header: its content and
        its end mark. White space after the end mark does not belong to it, because generation stops at the mark. This
        requires that the text of the first messages is a prefix of the text of more messages. Raises ValueError for any
        other template.
        """
        answers = [number for number, message in enumerate(messages) if message["role"] == ANSWERS]
        spans, before = [], ""
        for number in answers:
            prompt = self.text(messages[:number], tools, prompt=True)
            after = self.text(messages[: number + 1], tools)
            first = f"the text of the first {number} messages"
            for shorter, longer, change in (
                (before, prompt, f"{first} is not a prefix of this text with an answer's header"),
                (
                    prompt,
                    after,
                    f"{first} with an answer's header is not a prefix of the text with message {number + 1}",
                ),
            ):
                if not longer.startswith(shorter):
                    raise ValueError(
                        f"data.template '{self.name}' changes earlier text when messages are added ({change}), so the "
                        f"answers cannot be located; use a template that only appends text, or write a conversation "
                        f"for each answer"
                    )
            spans.append((len(prompt), len(prompt) + _answer_length(after[len(prompt) :], messages[number])))
            before = after
        return Rendered(before, tuple(spans))


def _answer_length(added: str, message: Message) -> int:
    """The length of the answer with its end mark in the text that a message adds."""
    marked, content = added.rstrip(), message.get("content")
    if isinstance(content, list) and content:
        content = content[-1].get("text")
    ends_in_content = isinstance(content, str) and marked.endswith(content.rstrip()) and bool(content.strip())
    return len(added) if ends_in_content else len(marked)


def read_template(named: str, variables: Mapping[str, str]) -> Template:
    """The template of `data.template`: a name, a Jinja file, or a JSON file with a `chat_template`."""
    if named in NAMED:
        return Template(named, NAMED[named], variables, SPECIAL_TOKENS[named])
    path = local_path(named)
    if path.is_dir() and has_template(path):
        return _of_folder(path, named, variables)
    if not path.is_file():
        raise UsageError(
            f"data.template '{named}' is neither a built-in template ({', '.join(NAMED)}) nor a file, "
            f"and no folder with {JINJA} or {TOKENIZER}; use one of these names, or the path of a Jinja file"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read data.template '{named}': {error}; use a readable text file in UTF-8") from None
    if path.suffix != ".json":
        return Template(named, text, variables, _tokens_of(variables))
    return _of_json(text, named, variables)


def has_template(folder: Path) -> bool:
    """Whether a folder of a published checkpoint has a chat template."""
    if (folder / JINJA).is_file():
        return True
    try:
        return "chat_template" in json.loads((folder / TOKENIZER).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, TypeError):  # reading the template reports a damaged file
        return False


def _of_folder(folder: Path, named: str, variables: Mapping[str, str]) -> Template:
    """The template of a folder: that of chat_template.jinja, else that of tokenizer_config.json, with its tokens."""
    try:
        config = json.loads((folder / TOKENIZER).read_text(encoding="utf-8")) if (folder / TOKENIZER).exists() else {}
        if (folder / JINJA).is_file():
            config["chat_template"] = (folder / JINJA).read_text(encoding="utf-8")
    except (OSError, ValueError, RecursionError, TypeError) as error:
        raise UsageError(f"cannot read data.template '{named}': {error}; download the folder again") from None
    return _of_json(json.dumps(config), named, variables)


def _tokens_of(variables: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(text for name, text in variables.items() if name.endswith("_token") and text)


def _of_json(text: str, named: str, variables: Mapping[str, str]) -> Template:
    """The template of a tokenizer's configuration, with the special tokens of that file."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"data.template '{named}' is not valid JSON: {error}; download it again") from None
    source = data.get("chat_template") if isinstance(data, dict) else None
    if isinstance(source, list):
        templates = [entry for entry in source if isinstance(entry, dict)]
        source = next((entry.get("template") for entry in templates if entry.get("name") == "default"), None)
    if not isinstance(source, str):
        raise UsageError(f"data.template '{named}' has no 'chat_template'; use a file that has one")
    tokens = {name: _content(value) for name, value in data.items() if name.endswith("_token")}
    all_variables = {**{name: content for name, content in tokens.items() if content}, **variables}
    decoder = data.get("added_tokens_decoder", {})
    if not isinstance(decoder, dict) or not all(isinstance(token, dict) for token in decoder.values()):
        raise UsageError(
            f"data.template '{named}' is damaged: its 'added_tokens_decoder' contains no tokens; download it again"
        )
    added = [_content(token) for token in decoder.values() if token.get("special")]
    special = dict.fromkeys([*(content for content in added if content), *_tokens_of(all_variables)])
    return Template(named, source, all_variables, tuple(special))


def _content(token: Any) -> str:
    """The text of a token that the file stores as a string or as a mapping; else the empty string."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""
