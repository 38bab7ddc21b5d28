"""The thread that computes: it gives waiting texts free lanes, and their clients each new token.

All ranks of a layout compute the same. Rank 0 decides, and sends its commands to the others before each step.
"""

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from mplug_sampling.text import Text
from mplug_serve.requests import Refused

if TYPE_CHECKING:
    from mplug_sampling import Lanes, Sampling

HEARTBEAT = 10.0
"""Seconds after which an idle server sends the other ranks a sign of life, before a collective times out."""
BUSY, LATE = (
    "the server is busy; send the request again later",
    "the request took too long, and its answer had not begun",
)


class Begin(NamedTuple):
    """Compute a prompt in a lane."""

    lane: int
    prompt: tuple[int, ...]
    key: int
    sampling: "Sampling"


class End(NamedTuple):
    """Free a lane."""

    lane: int


Command = Begin | End | Literal["step", "stop"]
Exchange = Callable[[Sequence[Command]], Sequence[Command]]
"""The commands of rank 0 -> the same commands, on every rank."""


class Event(NamedTuple):
    """A part of an answer: its next characters, and why it has ended (empty: it goes on)."""

    text: str
    ended: str = ""
    refused: Refused | None = None


@dataclass(eq=False)
class Answer:
    """A text in progress. `send` receives its events, in the engine's thread."""

    prompt: tuple[int, ...]
    sampling: "Sampling"
    key: int
    num_tokens: int
    text: Text
    send: Callable[[Event], None]
    deadline: float
    is_cancelled: bool = field(default=False, init=False)
    """The client has gone; the engine frees the lane before its next step."""

    def take(self, token: int) -> bool:
        """Add the next token and send what is certain; returns whether the text has ended."""
        has_ended = self.text.take(token) or self.text.num_tokens >= self.num_tokens
        if has_ended:
            self.finish()
        elif part := self.text.shown():
            self.send(Event(part))
        return has_ended

    def finish(self) -> None:
        """Send the rest, and why the text ends here."""
        self.text.finish()
        self.send(Event(self.text.shown(is_last=True), self.text.ended))


class Engine:
    """The lanes of rank 0, with the texts in them and those that wait. `exchange` sends commands to the other ranks."""

    def __init__(self, lanes: "Lanes", num_lanes: int, queue: int, exchange: Exchange) -> None:
        self.lanes, self.num_lanes, self.queue, self.exchange = lanes, num_lanes, queue, exchange
        self.failure: BaseException | None = None
        self.num_answers = self.num_tokens = 0
        self._free = list(range(num_lanes))
        self._left: list[int] = []
        """Lanes whose texts have ended since the last round; the ranks free them with the next one."""
        self._running: dict[int, Answer] = {}
        self._waiting: deque[Answer] = deque()
        self._changed = threading.Condition()
        self._is_stopped = False

    @property
    def load(self) -> dict[str, int]:
        """Numbers for GET /health."""
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "answers": self.num_answers,
            "tokens": self.num_tokens,
        }

    def submit(self, answers: Sequence[Answer]) -> None:
        """Let the answers of a request wait for lanes, all or none; Refused if the queue has no room."""
        with self._changed:
            if self._is_stopped or self.failure is not None:
                raise Refused(503, "the server is stopping")
            if len(self._waiting) + len(answers) > self.queue + len(self._free):
                raise Refused(503, BUSY)
            self._waiting.extend(answers)
            self._changed.notify()

    def cancel(self, answers: Sequence[Answer]) -> None:
        """Nobody reads these answers any more."""
        with self._changed:
            for answer in answers:
                answer.is_cancelled = True
            self._changed.notify()

    def stop(self) -> None:
        """End the thread after its current step."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()

    def run(self) -> None:
        """Compute until `stop`: the thread's function. A failure ends all answers, and stays in `failure`."""
        try:
            while self._step():
                pass
        except BaseException as failure:
            self.failure = failure
            raise
        finally:
            self._end_all()

    def _step(self) -> bool:
        """One round: free lanes, fill them, compute a token of each; returns whether another one follows."""
        with self._changed:
            if not self._is_stopped and not self._waiting and not self._running:
                self._changed.wait(HEARTBEAT)
            if self._is_stopped:
                self.exchange(["stop"])
                return False
            self._end_overdue()
            ended, self._left = [End(lane) for lane in self._left], []
            begun = [self._begin(lane) for lane in self._lanes_to_fill()]
        step: list[Command] = ["step"] if self._running else []
        commands = [*ended, *begun, *step]
        for token, lane in computed(self.lanes, self.exchange(commands)):
            if lane in self._running:
                self._take(lane, token)
        return True

    def _end_overdue(self) -> None:
        """End the texts whose clients have gone, or whose time is over."""
        now = time.monotonic()
        for lane, answer in list(self._running.items()):
            if answer.is_cancelled or now > answer.deadline:
                answer.finish()
                self._release(lane)
        for answer in [one for one in self._waiting if one.is_cancelled or now > one.deadline]:
            self._waiting.remove(answer)
            answer.send(Event("", "refused", Refused(503, LATE)))

    def _lanes_to_fill(self) -> list[int]:
        return self._free[: len(self._waiting)]

    def _begin(self, lane: int) -> Begin:
        self._free.remove(lane)
        answer = self._waiting.popleft()
        self._running[lane] = answer
        return Begin(lane, answer.prompt, answer.key, answer.sampling)

    def _take(self, lane: int, token: int) -> None:
        self.num_tokens += 1
        if self._running[lane].take(token):
            self.num_answers += 1
            self._release(lane)

    def _release(self, lane: int) -> None:
        del self._running[lane]
        self._free.append(lane)
        self._left.append(lane)

    def _end_all(self) -> None:
        with self._changed:
            stopped = Refused(503, "the server stopped before the answer had ended")
            for answer in (*self._running.values(), *self._waiting):
                answer.send(Event("", "refused", stopped))
            self._running.clear()
            self._waiting.clear()


def computed(lanes: "Lanes", commands: Sequence[Command]) -> "list[tuple[int, int]]":
    """Do the commands of a round; returns the new tokens with their lanes, in order."""
    found: list[tuple[int, int]] = []
    for command in commands:
        if isinstance(command, Begin):
            found.append((lanes.begin(*command), command.lane))
        elif isinstance(command, End):
            lanes.end(command.lane)
        elif command == "step":
            found += [(token, lane) for lane, token in enumerate(lanes.step())]
    return found


def follow(lanes: "Lanes", exchange: Exchange) -> None:
    """Compute what rank 0 commands, on another rank, until it stops."""
    while "stop" not in (commands := exchange([])):
        computed(lanes, commands)


def random_seed() -> int:
    """The seed of a request that names none."""
    return secrets.randbits(62)
