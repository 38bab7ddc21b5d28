"""Continuous batching: a batch whose texts begin and end at any step.

The batch has a constant number of lanes. A lane computes one text: its prompt is computed apart from other texts, with
those of other lanes that begin at the same time, and its rows move into the caches of the batch; from then on each step
computes the next token of all lanes. So a new text does not wait until the others have ended, and the shapes of a step
never change.

Caches have rows for the longest text in each lane, or pages that the lanes share (`paging`). When no page is free, the
text that began last loses its lane (`Lanes.put_back`), and begins again later with the tokens that it has.

B lanes, S positions of a prompt, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mplug import UsageError
from mplug.commands import AS_THEY_ARE, Instead
from mplug_graphs import Recording
from mplug_nn.cache import CacheSize
from mplug_nn.mixers.states import StaticStateCache
from mplug_nn.static_cache import Clock, StaticCache
from mplug_nn.turning import shared_rotations
from mplug_sampling.decoding import ALONE, Alone
from mplug_sampling.lane_draws import LaneDraws, Start
from mplug_sampling.paging import PAGE_SIZE, Paging, Room
from mplug_sampling.sampler import Sampler, cached_modules
from mplug_sampling.sampling import Sampling
from mplug_sampling.token_steps import WARMUP, Replays, rounded
from mplug_sampling.transfers import OnTheWay, sent

TOGETHER = 16384
"""Rows of the caches of prompts that are computed together, which are needed beside those of the lanes."""


class Lanes:
    """A batch of `num_lanes` texts of up to `context` positions each. All ranks of a layout make the same calls.

    Random numbers are those of `sample`: a text has the same tokens, except for rounding, in any lane and at any time.
    `replays` records the step of a token if it can. A prompt that begins several times in a row is computed once.
    `cache_tokens`: all lanes share pages of `page_size` rows, with at least this many rows together. None: each lane
    has rows for a text of `context` positions.
    """

    def __init__(
        self,
        sampler: Sampler,
        num_lanes: int,
        context: int,
        ranks: Alone = ALONE,
        replays: Replays | None = None,
        cache_tokens: int | None = None,
        page_size: int = PAGE_SIZE,
    ) -> None:
        """Raises UsageError for a model or a layout whose texts cannot begin at different steps, and too few rows."""
        refuse_unsteady(sampler, ranks)
        sampler.model.module.eval()
        self.sampler, self._own_units = sampler, sampler.own_units()
        self.model, self.context, self.ranks, self.replays = sampler.model, context, ranks, replays or Replays()
        self.num_lanes, self.num_put_back = num_lanes, 0
        self.vocab_size = 0
        """The tokens that have logits; 0 before the first prompt."""
        self.device = ranks.device or next(iter(self.model.parameters().values())).device
        self._stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        self.modules = list(cached_modules(self.model))
        self._paging: Paging | None = None
        if cache_tokens is None:
            self._clock = Clock(num_lanes, self.device)
        else:
            self._paging = Paging(num_lanes, context, rounded(context), cache_tokens, page_size, self.device)
            self._clock = self._paging.clock
        self._caches = self._made(self._clock)
        self._first_clock = Clock(1, self.device)
        self._first_caches = self._made(self._first_clock)
        if self._paging is not None:
            self._first_caches = self._paging.take(self._caches, self._first_caches)
        has_rows = all(type(cache) is StaticCache for cache in self._caches)
        self._together = max(1, TOGETHER // rounded(context)) if has_rows else 1
        """Most prompts that are computed together. States at the end of a prompt, and pages, need each one alone."""
        self.put_back: list[int] = []
        """Lanes whose texts the last `step` has put back, because no page was free: they have no token, and no lane."""
        self._newest_positions: dict[int, int] = {}
        """The position of the newest row of each text, in the order in which they began."""
        self._draws = LaneDraws(num_lanes, self.device)
        self._tokens = torch.zeros(num_lanes, dtype=torch.int64, device=self.device)
        self._is_active = torch.zeros_like(self._tokens)
        self._logits: Tensor | None = None
        self._scores: Tensor | None = None
        self._of_prompt: tuple[tuple[int, ...], Tensor] | None = None
        """The prompt in the first caches, and its logits."""
        self._num_eager: dict[int, int] = {}
        self._recordings: dict[int, Recording] = {}
        """The recordings of a step, by the number of pages that attention receives of each text (0: no pages)."""

    def begin(self, lane: int, prompt: Sequence[int], key: int, sampling: Sampling, index: int = 0) -> int:
        """Compute a prompt in a lane; returns the next token of its text. `key` is that of `sample_key`.

        The last `index` tokens of `prompt` are the first ones of the text, which was put back. The lanes have `room`.
        """
        token: int = self.begin_all([Start(lane, prompt, key, sampling, index)]).read()[0][0]
        return token

    @torch.no_grad()
    def begin_all(self, starts: Sequence[Start]) -> OnTheWay:
        """Compute prompts in lanes, for which there is `room`: the next tokens [n], and their log-probabilities [n].

        Equal prompts are computed once, and different ones together where the caches can take them (`TOGETHER`).
        """
        for one in starts:
            if not 0 < len(one.prompt) <= self.context:
                raise ValueError(
                    f"a prompt of {len(one.prompt)} tokens does not fit into the context of {self.context} tokens"
                )
        limit = starts[0].sampling.vocab_size
        if not self._newest_positions and limit != self._draws.limit:
            self._draws.limit = limit
            self._recordings.clear()
        logits = self._logits_of(starts)
        for one in starts:
            self._newest_positions[one.lane] = len(one.prompt) - 1
        lanes = sent([one.lane for one in starts], torch.int64, self.device)
        self._clock.positions[lanes] = sent([len(one.prompt) - 1 for one in starts], torch.int64, self.device)
        self._is_active[lanes] = 1
        tokens, scores = self._draws.begin(starts, lanes, logits)
        self._tokens[lanes] = tokens
        return OnTheWay(tokens, scores)

    def step(self) -> list[int]:
        """The next token of each lane; those of lanes without a text, and of lanes in `put_back`, mean nothing."""
        found: list[int] = self.launch().read()[0]
        return found

    @torch.no_grad()
    def launch(self) -> OnTheWay:
        """The next token of each lane as in `step` [B], and its log-probability [B]. The CPU waits for nothing.

        Log-probabilities are those of the whole model at the temperature of each text (1 of a text that takes the
        likeliest tokens), whatever other tokens `top_k`, `top_p` and `vocab_size` exclude.
        """
        self._make_room()
        rows = 1 + max(self._newest_positions.values(), default=0)
        seen = 0 if self._paging is None else self._paging.see(rows)
        if seen not in self._recordings:
            if self.replays.make is None or self._num_eager.get(seen, 0) < WARMUP:
                self._num_eager[seen] = self._num_eager.get(seen, 0) + 1
                for cache in self._caches:
                    if isinstance(cache, StaticCache):
                        cache.keys()  # a step computes them before its units, which may be compiled
                self._advance()
            else:
                self._recordings[seen] = self.replays.record(self.replays.make(), self._advance)
        if seen in self._recordings:
            self._recordings[seen].replay()
        assert self._logits is not None
        assert self._scores is not None
        self._draws.finish(self._logits, self._tokens, self._scores)
        return OnTheWay(self._tokens, self._scores)

    def forget_prompt(self) -> None:
        """Compute the next prompt, also if it is the one before: the weights may have changed."""
        self._of_prompt = None
        for cache in self._first_caches:
            cache.constants = ()

    def room(self, ended: Iterable[int] = ()) -> Room:
        """Answers which prompts may begin now, once some lanes have ended."""
        if self._paging is None:
            return Room()
        return self._paging.room(ended, () if self._of_prompt is None else self._of_prompt[0])

    def end(self, lane: int) -> None:
        """The text of a lane has ended; its lane is free."""
        self._draws.samplings[lane], self._is_active[lane] = None, 0
        self._newest_positions.pop(lane, None)
        if self._paging is not None:
            self._paging.end(lane)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """In the block, the model can sample. Collective."""
        with self.sampler.sampling(), self.ranks.sampling():
            yield

    @torch.no_grad()
    def allocate(self) -> int:
        """Allocate the caches before the first text, by a prompt of one token; returns their bytes on this rank."""
        self.model.weights_settled()
        self.begin(0, [0], 0, Sampling(0.0))
        self.release()
        return sum(cache.num_bytes for cache in (*self._caches, *self._first_caches))

    def in_this_thread(self) -> AbstractContextManager[object]:
        """In the block, another thread than the one that made the lanes computes, on the stream of that one.

        A thread begins on the default stream, which cannot be recorded.
        """
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    @torch.no_grad()
    def compute_nothing(self) -> None:
        """One call of the model whose result nobody reads, for other ranks that exchange something in it."""
        clock = Clock(1, self.device)
        clock.start(torch.ones(1, dtype=torch.int64, device=self.device), None)
        zeros = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        self._computed({"tokens": zeros, "positions": zeros}, self._made(clock))
        self.release()

    def release(self) -> None:
        """No text is computed for now: all lanes are free, and the modules of the model have no cache."""
        for lane in list(self._newest_positions):
            self.end(lane)
        for module in self.modules:
            module.cache = None

    @property
    def cache_tokens(self) -> int | None:
        """The rows of all pages; None: each lane has its own rows."""
        return None if self._paging is None else self._paging.num_tokens

    def _make_room(self) -> None:
        """Give each text a row for its next position; the youngest ones lose their lanes if there are too few pages."""
        self.put_back = []
        for lane in list(self._newest_positions):
            while self._paging is not None and lane in self._newest_positions:
                if self._paging.write(lane, self._newest_positions[lane] + 1):
                    break
                youngest = next(reversed(self._newest_positions))
                self.end(youngest)
                self.put_back.append(youngest)
                self.num_put_back += 1
        for lane in self._newest_positions:
            self._newest_positions[lane] += 1
        if self._paging is not None:
            self._paging.settle()

    def _logits_of(self, starts: Sequence[Start]) -> Tensor:
        """The logits [n, V] behind prompts, whose rows are then in the caches of their lanes."""
        prompts = list(dict.fromkeys(tuple(one.prompt) for one in starts))
        if len(prompts) > 1 and self._together > 1:
            return self._logits_together(starts, prompts)
        found = []
        for one in starts:
            found.append(self._logits_alone(one.lane, tuple(one.prompt)))
            for own, first in zip(self._caches, self._first_caches, strict=True):
                own.replace_sample(one.lane, first)
        return torch.cat(found)

    def _logits_alone(self, lane: int, prompt: tuple[int, ...]) -> Tensor:
        """The logits [1, V] behind a prompt, whose rows are in the first caches, or in pages of the lane."""
        is_new = self._of_prompt is None or self._of_prompt[0] != prompt
        if self._paging is not None:
            is_new = self._paging.begin(lane, len(prompt), is_new=is_new)
        if self._of_prompt is None or is_new:
            self._first_clock.start(sent([len(prompt)], torch.int64, self.device), None)
            positions = torch.arange(len(prompt), device=self.device)[None]
            entries = {"tokens": sent([prompt], torch.int64, self.device), "positions": positions}
            logits = self.ranks.whole_vocabulary(self._computed(entries, self._first_caches))
            self._of_prompt, self.vocab_size = (prompt, logits), logits.shape[-1]
        return self._of_prompt[1]

    def _logits_together(self, starts: Sequence[Start], prompts: Sequence[tuple[int, ...]]) -> Tensor:
        """The logits [n, V] behind different prompts, which are computed together, some at a time."""
        places = {prompt: number for number, prompt in enumerate(prompts)}
        found: list[Tensor] = []
        for begin in range(0, len(prompts), self._together):
            some = prompts[begin : begin + self._together]
            computed, caches = self._computed_together(some)
            found.append(computed)
            own = [one for one in starts if begin <= places[tuple(one.prompt)] < begin + len(some)]
            lanes = sent([one.lane for one in own], torch.int64, self.device)
            sources = sent([places[tuple(one.prompt)] - begin for one in own], torch.int64, self.device)
            for cache, of_prompts in zip(self._caches, caches, strict=True):
                cache.replace_samples(lanes, of_prompts, sources)
        logits = torch.cat(found)
        self.vocab_size = logits.shape[-1]
        return logits[sent([places[tuple(one.prompt)] for one in starts], torch.int64, self.device)]

    def _computed_together(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, list[Any]]:
        """(the logits [b, V] behind prompts, their caches). Padding follows the prompts, and no position sees it."""
        longest, clock = max(map(len, prompts)), Clock(len(prompts), self.device)
        lengths = sent([*map(len, prompts)], torch.int64, self.device)
        clock.start(lengths, None)
        tokens = sent([[*one, *[0] * (longest - len(one))] for one in prompts], torch.int64, self.device)
        caches, positions = self._made(clock), torch.arange(longest, device=self.device)[None]
        entries = {"tokens": tokens, "positions": positions}
        logits = self._computed(entries, caches, lengths - 1)
        return self.ranks.whole_vocabulary(logits), caches

    def _made(self, clock: Clock) -> list[Any]:
        """The empty caches of all modules, of the texts of a clock."""
        size = CacheSize(rounded(self.context), make=clock.cache, make_state=partial(StaticStateCache, clock=clock))
        return [module.new_cache(size) for module in self.modules]

    def _computed(self, entries: dict[str, Tensor], caches: list[Any], last: Tensor | None = None) -> Tensor:
        """The logits [b, V / R] of the last position of some texts, or of the positions `last` [b]."""
        for module, cache in zip(self.modules, caches, strict=True):
            module.cache = cache
        zeros = torch.zeros_like(entries["tokens"][:, 0])
        with shared_rotations():
            given = {**entries, "sample_ids": zeros, "keys": zeros}
            return self.ranks.last_logits(self.model, given, self._instead(caches), last)

    def _instead(self, caches: list[Any]) -> Instead:
        """Compiled units compute steps; each length of a prompt would be compiled anew."""
        return {**self._own_units, **(self.replays.compiled if caches is self._caches else AS_THEY_ARE)}

    def _advance(self) -> None:
        """The logits of the next position of each lane, and a token. No value of the CPU that it reads ever differs."""
        self._clock.positions.mul_(self._is_active)  # lanes without a text stay at the first positions
        self._clock.tick()
        entries = {"tokens": self._tokens[:, None], "positions": self._clock.positions[:, None]}
        logits = self.ranks.whole_vocabulary(self._computed(entries, self._caches))
        tokens, scores = self._draws.advance(logits)
        if self._logits is None or self._scores is None:
            self._logits, self._scores = torch.empty_like(logits), torch.empty_like(scores)
        self._logits.copy_(logits)
        self._tokens.copy_(tokens)
        self._scores.copy_(scores)


def refuse_unsteady(sampler: Sampler, ranks: Alone) -> None:
    """Raise UsageError if texts cannot begin at different steps of a batch."""
    if sampler.eager_because:
        raise UsageError(
            f"texts cannot begin at different steps, because {sampler.eager_because}; use a kernel with static keys "
            f"and a layout that divides neither layers nor positions"
        )
    if ranks.shards > 1:
        raise UsageError(
            f"the layout divides the texts among {ranks.shards} groups of ranks, and a batch with lanes is one; use a "
            f"layout that divides the model alone"
        )
    if sampler.model.plan.answering is not None:
        raise UsageError("a model with an encoder has another text for each answer; sample from a decoder")
