"""The tokenizer of a published model's folder: prompts with special tokens, and the chat template."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from mplug import UsageError

FAILURES = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
"""Exceptions of a template that is wrong, or that does not support a conversation."""


class Folder:
    """Encodes by the folder's tokenizer.json, whose post-processor adds special tokens to a prompt."""

    def __init__(self, folder: Path) -> None:
        self.folder, path = folder, folder / "tokenizer.json"
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises Exception itself
            reason = " ".join(str(error).split())
            raise UsageError(f"tokenizers/huggingface: cannot read '{path}': {reason}; download it again") from None
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.config = _read(folder / "tokenizer_config.json")
        self.begin, self.end = self._special("bos_token"), self._special("eos_token")

    def _special(self, name: str) -> tuple[int, str] | None:
        """(number, text) of a token that tokenizer_config.json names; UsageError if tokenizer.json lacks it."""
        text = _text(self.config.get(name))
        if not text:
            return None
        number: int | None = self.tokenizer.token_to_id(text)
        if number is None:
            raise UsageError(
                f"tokenizers/huggingface: the {name} '{text}' of '{self.folder}' is no token of its tokenizer.json; "
                f"download the folder again"
            )
        return number, text

    def encode(self, text: str) -> list[int]:
        """The tokens of a text alone."""
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    def encode_prompt(self, text: str) -> list[int]:
        """The tokens of a text, with those that the post-processor adds."""
        tokens: list[int] = self.tokenizer.encode(text).ids
        return tokens

    def encode_part(self, text: str) -> list[int]:
        """The tokens of a part of a text, without those that the post-processor adds."""
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of the text that the chat template makes, in which special tokens are spelt out."""
        tokens: list[int] = self.tokenizer.encode(self.chat(messages), add_special_tokens=False).ids
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of a conversation and of the header of the next answer."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _json
        environment.globals |= {"raise_exception": _raise, "strftime_now": datetime.now().strftime}
        texts = {name: _text(value) for name, value in self.config.items() if name.endswith("_token")}
        try:
            template = environment.from_string(self._template())
            return template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **{name: text for name, text in texts.items() if text},
            )
        except FAILURES as error:
            raise UsageError(
                f"tokenizers/huggingface: the chat template of '{self.folder}' fails for these messages: "
                f"{' '.join(str(error).split()) or type(error).__name__}; change the messages"
            ) from None

    def _template(self) -> str:
        """The text of the template: a file of its own, or a field of tokenizer_config.json."""
        file = self.folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        found = self.config.get("chat_template", _read(self.folder / "chat_template.json").get("chat_template"))
        if isinstance(found, list):
            named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
            found = named.get("default")
        if not isinstance(found, str):
            raise UsageError(
                f"tokenizers/huggingface: '{self.folder}' has no chat template; give a prompt that the model continues"
            )
        return found


class _Generation(Extension):
    """The tag `{% generation %} ... {% endgeneration %}`, with which some templates mark answers."""

    tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _json(value: Any, indent: int | None = None, **named: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **named)


def _text(token: Any) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _read(path: Path) -> dict[str, Any]:
    """The fields of a JSON file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"tokenizers/huggingface: cannot read '{path}': {error}; download it again") from None
    return fields if isinstance(fields, dict) else {}
