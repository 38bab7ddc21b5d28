"""Requests in the form of OpenAI: what a client may ask, with a sentence for everything else."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError

MOST_CHOICES = 64
UNSUPPORTED: Mapping[str, Any] = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "function_call": None,
    "functions": None,
    "logit_bias": None,
    "logprobs": None,
    "presence_penalty": 0,
    "response_format": {"type": "text"},
    "suffix": None,
    "tool_choice": "none",
    "tools": None,
    "top_logprobs": None,
}
"""Fields that the server does not support, and the value with which they ask for nothing."""
IGNORED = frozenset({"metadata", "parallel_tool_calls", "service_tier", "store", "user"})
"""Fields that do not change an answer."""


T = TypeVar("T", bound="Asked")


class Refused(Exception):
    """A request that has no answer: its status, and a sentence for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


class Asked(BaseModel):
    """What completions and chats have in common."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    temperature: float = Field(1.0, ge=0, le=100, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: int = Field(0, ge=0, le=2**31)
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]], BeforeValidator(lambda x: [x] if isinstance(x, str) else x)
    ] = Field(default_factory=list, max_length=16)
    stream: bool = False
    stream_options: StreamOptions | None = None


def _text_or_tokens(value: Any) -> str | list[int]:
    """A prompt; a text may be given by the numbers of its tokens."""
    is_list = isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)
    if not value or not (isinstance(value, str) or is_list):
        raise PydanticCustomError("prompt", "input should be a text, or a list with the numbers of its tokens")
    found: str | list[int] = value
    return found


class Completion(Asked):
    """POST /v1/completions. `prompt` is a text, or the numbers of its tokens.

    `logprobs` 0: the log-probability of each token. `return_token_ids`: the numbers of the tokens, as in vLLM.
    """

    prompt: Annotated[str | list[int], PlainValidator(_text_or_tokens)]
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0)
    return_token_ids: bool = False


class Message(BaseModel):
    """A message of a conversation: a text, or parts that are texts."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: str = Field(min_length=1)
    content: str | list["TextPart"]
    name: str | None = None


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str


class Chat(Asked):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    def plain(self) -> list[dict[str, str]]:
        """The messages with contents that are texts."""
        return [
            {
                "role": one.role,
                "content": one.content if isinstance(one.content, str) else "".join(part.text for part in one.content),
            }
            for one in self.messages
        ]


def parsed(kind: type[T], value: Any) -> T:
    """The request; Refused if it is none."""
    if not isinstance(value, dict):
        raise Refused(400, "the body must be a JSON object")
    given = {name: one for name, one in value.items() if one is not None and name not in IGNORED}
    for name in [name for name in given if name in UNSUPPORTED and name not in kind.model_fields]:
        if given.pop(name) not in (UNSUPPORTED[name], [], {}, False):
            raise Refused(400, f"'{name}' is not supported; leave it out")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise Refused(400, "; ".join(_sentence(one, kind) for one in error.errors())) from None


def _sentence(error: Any, kind: type[BaseModel]) -> str:
    """One error of pydantic for the client."""
    place = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"'{place}' is no field of this request; leave it out (fields: {', '.join(sorted(kind.model_fields))})"
    return f"'{place}': {error['msg'][0].lower()}{error['msg'][1:]}"
