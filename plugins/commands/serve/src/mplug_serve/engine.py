"""The thread that computes: it gives waiting texts free lanes, and their clients each new token.

All ranks of a layout compute the same. Rank 0 decides, and sends its commands to the others before each step.
"""

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Literal, NamedTuple

from mplug import UsageError
from mplug_sampling.scheduling import Schedule
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
    """Compute a prompt in a lane; its last `num_taken` tokens are those of an answer that was put back."""

    lane: int
    prompt: tuple[int, ...]
    key: int
    sampling: "Sampling"
    num_taken: int


class End(NamedTuple):
    """Free a lane."""

    lane: int


class Load(NamedTuple):
    """Load the weights of a folder; no text runs."""

    folder: str


Command = Begin | End | Load | Literal["step", "stop"]
Loading = Callable[[str], None]
"""Loads the weights of a folder, on every rank; UsageError, on every rank, if it is refused and nothing has changed."""
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
    taken: list[int] = field(default_factory=list, init=False)
    """The tokens of the text so far, and at last the one that ends it."""
    is_scored: bool = False
    """Whether `log_probabilities` receives those of the tokens."""
    log_probabilities: list[float] = field(default_factory=list, init=False)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Those of the prompt and of the text so far."""
        return (*self.prompt, *self.taken)

    def take(self, token: int, log_probability: float | None) -> bool:
        """Add the next token and send what is certain; returns whether the text has ended."""
        self.taken.append(token)
        if log_probability is not None:
            self.log_probabilities.append(log_probability)
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

    def __init__(self, lanes: "Lanes", queue: int, exchange: Exchange, load: Loading | None = None) -> None:
        self.lanes, self.queue, self.exchange, self.load_weights = lanes, queue, exchange, load
        self._loads: deque[tuple[str, Future[None]]] = deque()
        self.failure: BaseException | None = None
        self.num_answers = self.num_tokens = 0
        self._texts = Schedule[Answer](lanes.num_lanes, lambda answer: answer.tokens)
        self._left: list[int] = []
        """Lanes whose texts have ended since the last round; the ranks free them with the next one."""
        self._changed = threading.Condition()
        self._is_stopped = False

    @property
    def load(self) -> dict[str, int]:
        """Numbers for GET /health."""
        return {
            "running": len(self._texts.running),
            "waiting": len(self._texts.waiting),
            "answers": self.num_answers,
            "tokens": self.num_tokens,
            "put_back": self.lanes.num_put_back,
        }

    def submit(self, answers: Sequence[Answer]) -> None:
        """Let the answers of a request wait for lanes, all or none; Refused if the queue has no room."""
        with self._changed:
            if self._is_stopped or self.failure is not None:
                raise Refused(503, "the server is stopping")
            if len(self._texts.waiting) + len(answers) > self.queue + len(self._texts.free):
                raise Refused(503, BUSY)
            self._texts.waiting.extend(answers)
            self._changed.notify()

    def load_folder(self, folder: str) -> "Future[None]":
        """Load the weights of a folder when the texts that run have ended; those that wait begin afterwards."""
        with self._changed:
            if self._is_stopped or self.failure is not None:
                raise Refused(503, "the server is stopping")
            found: Future[None] = Future()
            self._loads.append((folder, found))
            self._changed.notify()
        return found

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
            if not (self._is_stopped or self._texts.waiting or self._texts.running or self._loads):
                self._changed.wait(HEARTBEAT)
            if self._is_stopped:
                self.exchange(["stop"])
                return False
            self._end_overdue()
            ended, left, self._left = [End(lane) for lane in self._left], self._left, []
            taken = self._texts.begin(self.lanes.room(left), self._may_begin)
            begun = [Begin(lane, one.tokens, one.key, one.sampling, len(one.taken)) for lane, one in taken]
            loading = None if self._texts.running else next(self._wanted_loads(), None)
        if loading is not None:
            self._load(ended, *loading)
            return True
        step: list[Command] = ["step"] if self._texts.running else []
        self.lanes.put_back = []
        scored = {lane for lane, answer in self._texts.running.items() if answer.is_scored}
        for one in computed(self.lanes, self.exchange([*ended, *begun, *step]), scored):
            if one.lane in self._texts.running and one.lane not in self.lanes.put_back:
                self._take(one)
        with self._changed:
            self._texts.put_back(lane for lane in self.lanes.put_back if lane in self._texts.running)
        return True

    def _may_begin(self, answer: Answer) -> bool:
        """While new weights wait, only texts that were put back begin again: they end with the weights they had."""
        return not self._loads or bool(answer.taken)

    def _wanted_loads(self) -> "Iterator[tuple[str, Future[None]]]":
        """Take the folders to load, without those whose clients have gone."""
        while self._loads:
            folder, done = self._loads.popleft()
            if done.set_running_or_notify_cancel():
                yield folder, done

    def _load(self, ended: Sequence[Command], folder: str, done: "Future[None]") -> None:
        """Load a folder, on all ranks. One that is refused changes no weight; a failure ends the engine."""
        assert self.load_weights is not None
        try:
            computed(self.lanes, self.exchange([*ended, Load(folder)]), load=self.load_weights)
        except UsageError as error:
            done.set_exception(Refused(400, str(error)))
        except BaseException:
            done.set_exception(Refused(503, "the server stops, because the weights could not be loaded whole"))
            raise
        else:
            done.set_result(None)

    def _end_overdue(self) -> None:
        """End the texts whose clients have gone, or whose time is over."""
        now = time.monotonic()
        for lane, answer in list(self._texts.running.items()):
            if answer.is_cancelled or now > answer.deadline:
                answer.finish()
                self._release(lane)
        for answer in [one for one in self._texts.waiting if one.is_cancelled or now > one.deadline]:
            self._texts.waiting.remove(answer)
            if answer.taken:
                answer.finish()
            else:
                answer.send(Event("", "refused", Refused(503, LATE)))

    def _take(self, new: "New") -> None:
        self.num_tokens += 1
        if self._texts.running[new.lane].take(new.token, new.log_probability):
            self.num_answers += 1
            self._release(new.lane)

    def _release(self, lane: int) -> None:
        self._texts.end(lane)
        self._left.append(lane)

    def _end_all(self) -> None:
        with self._changed:
            stopped = Refused(503, "the server stopped before the answer had ended")
            for answer in (*self._texts.running.values(), *self._texts.waiting):
                answer.send(Event("", "refused", stopped))
            self._texts.running.clear()
            self._texts.waiting.clear()
            for _, done in self._wanted_loads():
                done.set_exception(stopped)


class New(NamedTuple):
    """The next token of the text in a lane, and its log-probability if it is wanted."""

    token: int
    lane: int
    log_probability: float | None


def computed(
    lanes: "Lanes", commands: Sequence[Command], scored: Collection[int] = (), load: Loading | None = None
) -> list[New]:
    """Do the commands of a round; returns the new tokens in order, with log-probabilities in `scored` lanes."""
    from mplug_sampling.lane_draws import Start

    found: list[New] = []

    def take(lanes_of_tokens: Sequence[int], tokens: Sequence[int], scores: Sequence[float]) -> None:
        for lane, token, score in zip(lanes_of_tokens, tokens, scores, strict=True):
            found.append(New(token, lane, score if lane in scored else None))

    for kind, group in groupby(commands, type):
        if kind is Begin:
            starts = [Start(*one) for one in group if isinstance(one, Begin)]
            take([one.lane for one in starts], *lanes.begin_all(starts).read())
            continue
        for command in group:
            if isinstance(command, End):
                lanes.end(command.lane)
            elif isinstance(command, Load):
                assert load is not None
                load(command.folder)
                lanes.model.weights_settled()
                lanes.forget_prompt()
            elif command == "step":
                take(range(lanes.num_lanes), *lanes.launch().read())
    return found


def follow(lanes: "Lanes", exchange: Exchange, load: Loading | None = None) -> None:
    """Compute what rank 0 commands, on another rank, until it stops."""
    while "stop" not in (commands := exchange([])):
        with suppress(UsageError):  # the folder of a request is refused on all ranks, and rank 0 answers
            computed(lanes, commands, load=load)


def random_seed() -> int:
    """The seed of a request that names none."""
    return secrets.randbits(62)
