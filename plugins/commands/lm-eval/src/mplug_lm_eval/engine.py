"""The model of a run as a service: rank 0 asks for scores and texts, and all ranks compute them together."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from mplug_sampling import Replays, Sampling, Text, refuse_undivided, replays_for, sample, sample_key, score
from mplug_sampling.decoding import Ranks

if TYPE_CHECKING:
    from mplug import Run
    from mplug_lm_eval.tokens import Tokens
    from mplug_sampling import Sampler, Score

T = TypeVar("T")


@dataclass(frozen=True)
class Scores:
    """A request for the scores of the last `numbers` tokens of texts."""

    texts: Sequence[Sequence[int]]
    numbers: Sequence[int]


@dataclass(frozen=True)
class Texts:
    """A request for the tokens that follow prompts: up to `num_tokens` each, until an end token or a stop word."""

    prompts: Sequence[Sequence[int]]
    num_tokens: int
    sampling: Sampling
    stops: tuple[str, ...]


class Engine:
    """Computes requests on all ranks of a run. Rank 0 calls `scores`, `texts` and at last `finish`; others `follow`."""

    def __init__(self, run: "Run", sampler: "Sampler", tokens: "Tokens", length: int, batch_size: int) -> None:
        self.run, self.sampler, self.tokens, self.length, self.batch_size = run, sampler, tokens, length, batch_size
        self.ranks = Ranks(run, sampler)
        refuse_undivided(sampler, self.ranks)
        self.replays: Replays = replays_for(run, sampler)[0]
        self._is_computing = False

    def scores(self, request: Scores) -> "list[Score]":
        """The scores of a request, on rank 0."""
        with self._computing():
            return self._scores(self._shared(request))

    def texts(self, request: Texts) -> list[list[int]]:
        """The tokens that follow each prompt of a request, on rank 0."""
        with self._computing():
            return self._texts(self._shared(request))

    def finish(self) -> None:
        """Let the other ranks leave `follow`, unless they still compute a request that has failed here."""
        if not self._is_computing:
            self._shared(None)

    def follow(self) -> None:
        """Compute what rank 0 asks for, until it has finished."""
        request: Scores | Texts | None = None
        while (request := self._shared(request)) is not None:
            if isinstance(request, Scores):
                self._scores(request)
            else:
                self._texts(request)
            request = None

    @contextmanager
    def _computing(self) -> Iterator[None]:
        self._is_computing = True
        yield
        self._is_computing = False  # not after an exception

    def _shared(self, request: T) -> T:
        """The request of rank 0, on every rank."""
        found: T = self.run.gathered(request)[0]
        return found

    def _scores(self, request: Scores) -> "list[Score]":
        return score(self.sampler, request.texts, request.numbers, self.batch_size, self.ranks)

    def _texts(self, request: Texts) -> list[list[int]]:
        order = sorted(range(len(request.prompts)), key=lambda one: -len(request.prompts[one]))
        found: dict[int, list[int]] = {}
        for begin in range(0, len(order), self.batch_size):
            batch = order[begin : begin + self.batch_size]
            found |= zip(batch, self._of_batch([request.prompts[one] for one in batch], request), strict=True)
        return [found[one] for one in range(len(order))]

    def _of_batch(self, prompts: Sequence[Sequence[int]], request: Texts) -> list[list[int]]:
        texts = [Text(self.tokens, prompt, self.tokens.ends, request.stops) for prompt in prompts]
        found: list[list[int]] = [[] for _ in prompts]

        def take(number: int, token: int) -> bool:
            found[number].append(token)
            return texts[number].take(token)

        keys = [sample_key(request.sampling.seed, number) for number in range(len(prompts))]
        sample(
            *(self.sampler, prompts, keys, request.num_tokens, self.length, request.sampling, take),
            *(self.ranks, self.replays),
        )
        return found
