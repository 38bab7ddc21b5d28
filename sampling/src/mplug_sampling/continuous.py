"""Continuous batching: a batch whose texts begin and end at any step.

The batch has a constant number of lanes. A lane computes one text: its prompt is computed alone, and its rows move into
the caches of the batch; from then on each step computes the next token of all lanes. So a new text does not wait until
the others have ended, and the shapes of a step never change.

Caches have rows for the longest text in each lane, or pages that the lanes share (`paging`). When no page is free, the
text that began last loses its lane (`Lanes.put_back`), and begins again later with the tokens that it has.

B lanes, S positions of a prompt, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mplug import UsageError
from mplug.commands import AS_THEY_ARE, Instead
from mplug_graphs import Recording
from mplug_nn.cache import CacheSize
from mplug_nn.mixers.states import StaticStateCache
from mplug_nn.static_cache import Clock
from mplug_nn.turning import shared_rotations
from mplug_sampling.decoding import ALONE, Alone
from mplug_sampling.paging import PAGE_SIZE, Paging, Room
from mplug_sampling.sampler import Sampler, cached_modules
from mplug_sampling.sampling import Sampling, choose, draws, log_probabilities
from mplug_sampling.token_steps import WARMUP, Replays, rounded


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
        self._own_units = sampler.own_units()
        self.model, self.context, self.ranks, self.replays = sampler.model, context, ranks, replays or Replays()
        self.num_lanes, self.num_put_back = num_lanes, 0
        self.vocab_size = 0
        """The tokens that have logits; 0 before the first prompt."""
        self.device = ranks.device or next(iter(self.model.parameters().values())).device
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
        self.put_back: list[int] = []
        """Lanes whose texts the last `step` has put back, because no page was free: they have no token, and no lane."""
        self._newest_positions: dict[int, int] = {}
        """The position of the newest row of each text, in the order in which they began."""
        self._tokens, self._keys, self._index, self._zeros = (
            torch.zeros(num_lanes, dtype=torch.int64, device=self.device) for _ in range(4)
        )
        self._samplings: list[Sampling | None] = [None] * num_lanes
        self._is_active = torch.zeros_like(self._tokens)
        self._logits: Tensor | None = None
        self._of_prompt: tuple[tuple[int, ...], Tensor] | None = None
        """The prompt in the first caches, and its logits."""
        self._newest: tuple[Tensor, Tensor, Sequence[Sampling | None]] | None = None
        self._num_eager = 0
        self._recording: Recording | None = None

    @torch.no_grad()
    def begin(self, lane: int, prompt: Sequence[int], key: int, sampling: Sampling, index: int = 0) -> int:
        """Compute a prompt in a lane; returns the next token of its text. `key` is that of `sample_key`.

        The last `index` tokens of `prompt` are the first ones of the text, which was put back. The lanes have `room`.
        """
        if not 0 < len(prompt) <= self.context:
            raise ValueError(f"a prompt of {len(prompt)} tokens does not fit into the context of {self.context} tokens")
        logits = self._logits_of(lane, tuple(prompt))
        for own, first in zip(self._caches, self._first_caches, strict=True):
            own.replace_sample(lane, first)
        self._clock.positions[lane] = self._newest_positions[lane] = len(prompt) - 1
        self._samplings[lane] = replace(sampling, seed=0)
        self._keys[lane], self._index[lane], self._is_active[lane] = key, index, 1
        of_lane = slice(lane, lane + 1)
        token = choose(logits, sampling, draws(self._keys[of_lane], self._index[of_lane]))
        self._index[lane] += 1
        self._tokens[lane : lane + 1] = token
        self._newest = logits, token, [sampling]
        return int(token)

    @torch.no_grad()
    def step(self) -> list[int]:
        """The next token of each lane; those of lanes without a text, and of lanes in `put_back`, mean nothing."""
        self._make_room()
        if self._recording is not None:
            self._recording.replay()
        elif self.replays.make is None or self._num_eager < WARMUP:
            self._num_eager += 1
            self._advance()
        else:
            self._recording = self.replays.record(self.replays.make(), self._advance)
            self._recording.replay()
        assert self._logits is not None
        logits = self.ranks.whole_vocabulary(self._logits)
        self._choose(logits)
        self._newest = logits, self._tokens, self._samplings
        found: list[int] = self._tokens.tolist()
        return found

    @torch.no_grad()
    def log_probabilities(self) -> Tensor:
        """Those of the tokens of the last `step` [B], or of the token of the last `begin` [1], in at least fp32.

        They are probabilities of the whole model at the temperature of each text (1 of a text that takes the likeliest
        tokens), whatever other tokens `top_k`, `top_p` and `vocab_size` exclude.
        """
        assert self._newest is not None, "no token has been computed"
        logits, tokens, samplings = self._newest
        temperatures = [1.0 if one is None or one.temperature == 0 else one.temperature for one in samplings]
        return log_probabilities(logits, tokens, temperatures)

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
        self._samplings[lane], self._is_active[lane] = None, 0
        self._newest_positions.pop(lane, None)
        if self._paging is not None:
            self._paging.end(lane)

    @torch.no_grad()
    def allocate(self) -> int:
        """Allocate the caches before the first text, by a prompt of one token; returns their bytes on this rank."""
        self.model.weights_settled()
        self.begin(0, [0], 0, Sampling(0.0))
        self.release()
        return sum(cache.num_bytes for cache in (*self._caches, *self._first_caches))

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

    def _logits_of(self, lane: int, prompt: tuple[int, ...]) -> Tensor:
        """The logits [1, V] behind a prompt, whose rows are in the first caches, or in pages of the lane."""
        is_new = self._of_prompt is None or self._of_prompt[0] != prompt
        if self._paging is not None:
            is_new = self._paging.begin(lane, len(prompt), is_new=is_new)
        if self._of_prompt is None or is_new:
            self._first_clock.start(torch.tensor([len(prompt)], device=self.device), None)
            positions = torch.arange(len(prompt), device=self.device)[None]
            entries = {"tokens": torch.tensor([prompt], device=self.device), "positions": positions}
            logits = self.ranks.whole_vocabulary(self._computed(entries, self._first_caches))
            self._of_prompt, self.vocab_size = (prompt, logits), logits.shape[-1]
        return self._of_prompt[1]

    def _made(self, clock: Clock) -> list[Any]:
        """The empty caches of all modules, of the texts of a clock."""
        size = CacheSize(rounded(self.context), make=clock.cache, make_state=partial(StaticStateCache, clock=clock))
        return [module.new_cache(size) for module in self.modules]

    def _computed(self, entries: dict[str, Tensor], caches: list[Any]) -> Tensor:
        """The logits [b, V / R] of the last position of some texts."""
        for module, cache in zip(self.modules, caches, strict=True):
            module.cache = cache
        zeros = torch.zeros_like(entries["tokens"][:, 0])
        with shared_rotations():
            given = {**entries, "sample_ids": zeros, "keys": zeros}
            return self.ranks.last_logits(self.model, given, self._instead(caches))

    def _instead(self, caches: list[Any]) -> Instead:
        """Compiled units compute steps; each length of a prompt would be compiled anew."""
        return {**self._own_units, **(self.replays.compiled if caches is self._caches else AS_THEY_ARE)}

    def _advance(self) -> None:
        """The logits of the next position of each lane. It reads no value of the CPU that differs between steps."""
        self._clock.positions.mul_(self._is_active)  # lanes without a text stay at the first positions
        self._clock.tick()
        entries = {"tokens": self._tokens[:, None], "positions": self._clock.positions[:, None]}
        logits = self._computed(entries, self._caches)
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        self._logits.copy_(logits)

    def _choose(self, logits: Tensor) -> None:
        """The tokens that the random numbers of the lanes choose from logits [B, V]; lanes differ in `Sampling`."""
        numbers = draws(self._keys, self._index)
        lanes: dict[Sampling, list[int]] = {}
        for lane, sampling in enumerate(self._samplings):
            if sampling is not None:
                lanes.setdefault(sampling, []).append(lane)
        for sampling, own in lanes.items():
            rows = torch.tensor(own, device=self.device)
            self._tokens[rows] = choose(logits[rows], sampling, numbers[rows])
        self._index.add_(1)


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
