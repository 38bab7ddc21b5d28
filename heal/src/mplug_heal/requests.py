"""The two files by which a command asks a run for another layout, and the run answers. Imports no torch.

`relayout.json` in the folder of the run is the request. Rank 0 of the run removes it when it begins to act, so a run
that dies meanwhile does not try again when it is restarted. `relayout-answer.json` is the answer to the last request.
"""

import json
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from mplug.errors import UsageError
from mplug.system.files import write_whole
from mplug_saving.process import Process

REQUEST, ANSWER = "relayout.json", "relayout-answer.json"


@dataclass(frozen=True)
class Request:
    """A request for the layout `layout`, a word such as 'tp2dp4'. `number` is unique, `asker` the asking process."""

    layout: str
    number: str
    asker: Process = field(default_factory=Process.this)


@dataclass(frozen=True)
class Answer:
    """What became of a request. `sentence` is for the user, `step` the last step under the old layout."""

    number: str
    outcome: Literal["changed", "refused"]
    sentence: str
    step: int


def ask(directory: Path, layout: str) -> Request:
    """Ask the run in a folder for a layout. UsageError if it has another request that it has not begun to serve."""
    if is_asked(directory):
        raise UsageError(
            f"the run '{directory.name}' has a request for another layout already; wait until it has answered, or "
            f"remove '{directory / REQUEST}'"
        )
    request = Request(layout, uuid.uuid4().hex)
    write_whole(directory / REQUEST, json.dumps(asdict(request)) + "\n")
    return request


def is_asked(directory: Path) -> bool:
    """Whether a run has a request that it has not begun to serve."""
    return (directory / REQUEST).exists()


def take(directory: Path) -> Request | None:
    """Remove and return the request of a run; None if it was withdrawn. UsageError if the file is not a request.

    A request is also withdrawn if the process that has asked has been killed, as far as this one can know it.
    """
    found = _read(directory / REQUEST)
    withdraw(directory)
    match found:
        case None:
            return None
        case {"layout": str(layout), "number": str(number), "asker": {"place": str(), "pid": int(), "start": int()}}:
            asker = Process(**found["asker"])
            return None if asker.runs() is False else Request(layout, number, asker)
    raise UsageError(f"'{directory / REQUEST}' is not a request of 'mplug runs relayout'; the run has removed it")


def withdraw(directory: Path) -> None:
    """Remove the request of a run, if it has one."""
    (directory / REQUEST).unlink(missing_ok=True)


def give(directory: Path, answer: Answer) -> None:
    """Answer a request."""
    write_whole(directory / ANSWER, json.dumps(asdict(answer)) + "\n")


def answer_to(directory: Path, request: Request) -> Answer | None:
    """The answer to a request; None as long as there is none."""
    found = _read(directory / ANSWER)
    if isinstance(found, dict) and found.get("number") == request.number:
        return Answer(**found)
    return None


def _read(path: Path) -> Any:
    """The plain data in a file; None if there is no file, and the text of one that is not JSON."""
    text = None
    with suppress(FileNotFoundError):
        text = path.read_text(encoding="utf-8", errors="replace")
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return text
