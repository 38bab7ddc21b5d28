"""Computing a list of texts in lanes: a lane whose text has ended takes the next one at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mplug_sampling.continuous import Lanes
from mplug_sampling.sampling import Sampling
from mplug_sampling.scheduling import Schedule

LogProbability = Callable[[], float]
Take = Callable[[int, int, LogProbability], bool]
"""(number of a text, its next token, the function of its log-probability) -> whether the text ends here."""


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


class _Scores:
    """The log-probabilities of the newest tokens, computed when the first one is asked for."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes, self.values = lanes, list[float]()

    def at(self, index: int) -> float:
        self.values = self.values or self.lanes.log_probabilities().tolist()
        return self.values[index]


def fill_lanes(lanes: Lanes, texts: Sequence[LaneText], take: Take) -> None:
    """Compute all texts, each until `take` returns True. All ranks of a layout make the same calls.

    Afterwards all lanes are free, and the modules of the model have no cache.
    """
    numbers = Schedule[int](lanes.num_lanes, lambda number: texts[number].tokens, range(len(texts)))

    def taken(lane: int, token: int, scores: _Scores, index: int) -> None:
        number = numbers.running[lane]
        texts[number].taken.append(token)
        if take(number, token, lambda: scores.at(index)):
            lanes.end(lane)
            numbers.end(lane)

    try:
        while numbers.waiting or numbers.running:
            while begun := numbers.begin(lanes.room()):
                for lane, number in begun:
                    text = texts[number]
                    token = lanes.begin(lane, text.tokens, text.key, text.sampling, len(text.taken))
                    taken(lane, token, _Scores(lanes), 0)
            if numbers.running:
                tokens, scores = lanes.step(), _Scores(lanes)
                numbers.put_back(lanes.put_back)
                for lane in list(numbers.running):
                    taken(lane, tokens[lane], scores, lane)
    finally:
        lanes.release()
