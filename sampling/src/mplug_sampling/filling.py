"""Computing a list of texts in lanes: a lane whose text has ended takes the next one at once.

If the number of tokens that a text may have is known, the device is one step ahead: it computes the next tokens while
the CPU looks at the last ones. A text that ends earlier then has one more token, which nobody reads.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mplug_sampling.continuous import Lanes
from mplug_sampling.lane_draws import Start
from mplug_sampling.sampling import Sampling
from mplug_sampling.scheduling import Schedule
from mplug_sampling.transfers import OnTheWay

Take = Callable[[int, int, float], bool]
"""(number of a text, its next token, the token's log-probability) -> whether the text ends here."""


@dataclass
class LaneText:
    """A prompt, the key of its random numbers (`sample_key`), and the tokens that follow it so far."""

    prompt: Sequence[int]
    key: int
    sampling: Sampling
    taken: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Those of the prompt and of the text."""
        return [*self.prompt, *self.taken]


def fill_lanes(lanes: Lanes, texts: Sequence[LaneText], take: Take, most: int | None = None) -> None:
    """Compute all texts, each until `take` returns True. All ranks of a layout make the same calls.

    `most`: `take` returns True at this token of a text or before; None: that is not known. Afterwards all lanes are
    free, and the modules of the model have no cache.
    """
    try:
        _Filling(lanes, texts, take, most).run()
    finally:
        lanes.release()


class _Filling:
    """The texts that wait, those in lanes, and the tokens that the CPU has not seen yet."""

    def __init__(self, lanes: Lanes, texts: Sequence[LaneText], take: Take, most: int | None) -> None:
        self.lanes, self.texts, self.take, self.most = lanes, texts, take, most
        self.numbers = Schedule[int](lanes.num_lanes, lambda number: texts[number].tokens, range(len(texts)))
        self.ahead = 0 if most is None or lanes.cache_tokens is not None else 1  # pages are given to texts that go on
        self.lane_of: dict[int, int] = {}
        """The lane of each text that runs."""
        self.computed: dict[int, int] = {}
        """How many tokens of each text the device has been told to compute."""
        self.ended: set[int] = set()
        self.unseen: deque[tuple[OnTheWay, list[tuple[int, int]]]] = deque()
        """Tokens on their way to the CPU, with pairs (their place, number of their text)."""

    def run(self) -> None:
        """Compute until all texts have ended."""
        while self.numbers.waiting or self.numbers.running or self.unseen:
            while begun := self.numbers.begin(self.lanes.room()):
                self._begin(begun)
            if self.numbers.running:
                self._step()
            self._look(self.ahead if self.numbers.running else 0)

    def _begin(self, begun: Sequence[tuple[int, int]]) -> None:
        """Let texts begin in their lanes."""
        starts = []
        for lane, number in begun:
            text = self.texts[number]
            starts.append(Start(lane, text.tokens, text.key, text.sampling, len(text.taken)))
            self.lane_of[number], self.computed[number] = lane, len(text.taken)
        self._expect(self.lanes.begin_all(starts), [(place, number) for place, (_, number) in enumerate(begun)])
        if not self.ahead:
            self._look(0)

    def _step(self) -> None:
        """Compute the next token of each text that runs."""
        tokens = self.lanes.launch()
        for lane in self.lanes.put_back:
            del self.lane_of[self.numbers.running[lane]]
        self.numbers.put_back(self.lanes.put_back)
        self._expect(tokens, list(self.numbers.running.items()))

    def _expect(self, tokens: OnTheWay, texts: list[tuple[int, int]]) -> None:
        """Tokens are on their way. Texts that certainly end with them leave their lanes at once."""
        self.unseen.append((tokens, texts))
        for _, number in texts:
            self.computed[number] += 1
            if self.computed[number] == self.most:
                self._leave(number)

    def _look(self, left: int) -> None:
        """Take the tokens on their way, up to the last `left` of them."""
        while len(self.unseen) > left:
            on_the_way, texts = self.unseen.popleft()
            tokens, scores = on_the_way.read()
            for place, number in texts:
                if number in self.ended:
                    continue
                self.texts[number].taken.append(tokens[place])
                if self.take(number, tokens[place], scores[place]):
                    self.ended.add(number)
                    self._leave(number)

    def _leave(self, number: int) -> None:
        lane = self.lane_of.pop(number, None)
        if lane is not None:
            self.lanes.end(lane)
            self.numbers.end(lane)
