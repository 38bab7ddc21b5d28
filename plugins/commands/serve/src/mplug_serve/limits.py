"""What a client may ask of the server."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of requests. Times are in seconds; `grace` is that of answers when the server stops."""

    context: int
    lanes: int
    queue: int
    max_tokens: int
    max_body: int
    seconds: float
    grace: float
