"""Which texts wait for a lane, and which text runs in which lane. Imports no torch."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from mplug_sampling.paging import Room

T = TypeVar("T")


class Schedule(Generic[T]):
    """The texts of a batch with lanes. A free lane takes the next text, if there is room for its tokens.

    `tokens_of` returns the tokens of a text: those of its prompt, and those that it has already.
    """

    def __init__(self, num_lanes: int, tokens_of: Callable[[T], Sequence[int]], waiting: Iterable[T] = ()) -> None:
        self.tokens_of = tokens_of
        self.free, self.waiting, self.running = deque(range(num_lanes)), deque(waiting), dict[int, T]()

    def begin(self, room: "Room", may: Callable[[T], bool] | None = None) -> list[tuple[int, T]]:
        """Take the next texts that have a lane and room, up to one that may not begin yet; returns them with lanes."""
        begun = []
        while self.free and self.waiting:
            text = self.waiting[0]
            if not ((may is None or may(text)) and room.takes(self.tokens_of(text))):
                break
            lane = self.free.popleft()
            self.waiting.popleft()
            self.running[lane] = text
            begun.append((lane, text))
        return begun

    def end(self, lane: int) -> T:
        """The text of a lane has ended."""
        self.free.append(lane)
        return self.running.pop(lane)

    def put_back(self, lanes: Iterable[int]) -> None:
        """Let texts that have lost their lanes, the youngest first, begin again before all that wait."""
        for lane in lanes:
            self.waiting.appendleft(self.end(lane))
