"""The steps of sampling with static caches: each computes one token of every text, with tensors that stay in place.

All values that change from token to token are on the device. So the CPU may start a step before it has read the token
of the previous one, and a CUDA graph can replay a step.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mplug import Model, Run, RunError, UsageError
from mplug.commands import AS_THEY_ARE, Instead
from mplug_faults import cause_of, failed_part
from mplug_graphs import CudaGraph, Recording, use_own_stream
from mplug_nn.cache import CacheSize
from mplug_nn.mixers.states import StaticStateCache
from mplug_nn.static_cache import Clock
from mplug_nn.turning import shared_rotations
from mplug_sampling.fast_steps import obstacles
from mplug_sampling.sampler import Sampler, cached_modules
from mplug_sampling.sampling import Sampling, choose, draws
from mplug_sampling.stages import run_last
from mplug_sampling.streams import Later, units_of

OFF = "sample with --graphs never"
WARMUP = 2
"""Eager steps before a step is recorded. Meanwhile kernels compile, and libraries allocate."""
MULTIPLE = 64
"""The number of rows of a cache is a multiple of it, unless a window has fewer. Masks of such lengths are aligned."""
FIRST = 1024
"""Most rows for tokens that are not sampled yet. Beyond them, a cache doubles, and the step is recorded again."""

Make = Callable[[], Recording]


class TokenSteps:
    """The steps of one batch of `num_samples` texts on this rank, with room for `capacity` positions of each.

    `whole` takes this rank's logits to those of the whole vocabulary. `replays` records the step if it can.
    """

    def __init__(
        self,
        model: Model,
        num_samples: int,
        capacity: int,
        sampling: Sampling,
        whole: Callable[[Tensor], Tensor],
        replays: "Replays",
    ) -> None:
        self.model, self.sampling, self.whole, self.replays = model, sampling, whole, replays
        self.capacity, self.num_positions = capacity, 0
        device = next(iter(model.parameters().values())).device
        self.clock = Clock(num_samples, device)
        make_state = partial(StaticStateCache, clock=self.clock)
        size = CacheSize(capacity, make=self.clock.cache, make_state=make_state)
        self.modules = list(cached_modules(model))
        self.caches = [module.new_cache(size) for module in self.modules]
        self.keys = torch.zeros(num_samples, dtype=torch.int64, device=device)
        self.tokens = torch.zeros_like(self.keys)
        """[b]: the newest token of each text."""
        self.index = torch.zeros((), dtype=torch.int64, device=device)
        self.zeros = torch.zeros_like(self.keys)
        self.later: Later | None = None
        self._num_eager = 0
        self._recording: Recording | None = None

    def begin(
        self,
        prompts: Mapping[str, Tensor],
        lengths: Tensor,
        padding: Tensor | None,
        keys: Tensor,
        later: Later | None = None,
    ) -> Tensor:
        """The first tokens [b] after prompts of `lengths` [b], whose entries have `padding` [b] in front.

        `later` are further entries of the tokens that follow.
        """
        if later is not None or self.later is not None:
            self._recording = None  # it reads those of the batch before
        self.later = later
        for module, cache in zip(self.modules, self.caches, strict=True):
            module.cache = cache
        self.clock.start(lengths, padding)
        self.keys.copy_(keys)
        self.index.zero_()
        self.num_positions = prompts["tokens"].shape[1]
        self._draw(last_logits(self.model, prompts))
        return self.tokens

    def advance(self, most: int) -> Tensor:
        """The next tokens [b]; the texts will have at most `most` positions. The CPU does not wait for the device."""
        self.num_positions += 1
        if self.num_positions > self.capacity:
            self._grow(min(2 * self.capacity, rounded(most)))
        if self.replays.make is None or self._num_eager < WARMUP:
            self._num_eager += 1
            self._step()
            return self.tokens
        if self._recording is None:
            self._recording = self.replays.record(self.replays.make(), self._step)
        self._recording.replay()
        return self.tokens

    def _step(self) -> None:
        """The work of a step. It reads no value of the CPU that differs between steps."""
        self.clock.tick()
        entries = {"tokens": self.tokens[:, None], "positions": self.clock.positions[:, None]}
        with shared_rotations():
            given = {**entries, "sample_ids": self.zeros, "keys": self.zeros}
            given |= {} if self.later is None else self.later.entries(self.index - 1)
            logits = last_logits(self.model, given, self.replays.compiled)
        self._draw(logits)

    def _draw(self, logits: Tensor) -> None:
        self.tokens.copy_(choose(self.whole(logits), self.sampling, draws(self.keys, self.index)))
        self.index.add_(1)

    def _grow(self, capacity: int) -> None:
        self.capacity, self._recording = capacity, None
        self.clock.forget()
        for cache in self.caches:
            cache.grow(capacity)


class Replays:
    """Token steps of one model that batches of about equal size share, so that their steps are recorded once.

    `make` makes a recording; None: all steps run eagerly, and no batch shares its caches. The weights of the model do
    not change meanwhile. `describe` puts an exception on one line. `compiled` are units as compiled functions.
    """

    def __init__(
        self,
        make: Make | None = None,
        describe: Callable[[Exception], str] = cause_of,
        compiled: Instead = AS_THEY_ARE,
    ) -> None:
        self.make, self.describe, self.compiled = make, describe, compiled
        self.num_recorded = 0
        self._steps: TokenSteps | None = None
        self._of: tuple[Any, ...] = ()

    def steps(
        self, model: Model, num_samples: int, now: int, most: int, sampling: Sampling, whole: Callable[[Tensor], Tensor]
    ) -> TokenSteps:
        """The steps of texts that have `now` positions, and will have at most `most`."""
        of, capacity = (num_samples, sampling), min(rounded(most), rounded(now + FIRST))
        if self.make is None:
            return TokenSteps(model, num_samples, capacity, sampling, whole, self)
        fits = self._steps is not None and self._of == of and capacity <= self._steps.capacity <= 2 * capacity
        if self._steps is None or not fits:
            self._steps, self._of = TokenSteps(model, num_samples, capacity, sampling, whole, self), of
        self._steps.whole = whole
        return self._steps

    def record(self, recording: Recording, step: Callable[[], None]) -> Recording:
        """The recording, of a step; RunError if the step cannot be recorded."""
        try:
            recording.record(step)
        except (UsageError, RunError):
            raise
        except Exception as error:
            raise RunError(
                f"the step of a token cannot be recorded as a CUDA graph: {self.describe(error)}; {OFF}"
            ) from error
        self.num_recorded += 1
        return recording


def replays_for(run: Run, sampler: Sampler, compiled: Instead = AS_THEY_ARE) -> tuple[Replays, list[str]]:
    """(the replays of a run that samples, the reasons why none is recorded).

    The list is empty if the run records steps, or if it has switched graphs off. Call it before the first sample:
    the work on a GPU then moves to a stream that can be recorded.
    """
    if not sampler.graphs:
        return Replays(compiled=compiled), []
    reasons = obstacles(run, sampler)
    if reasons:
        return Replays(compiled=compiled), reasons
    use_own_stream()
    return Replays(partial(CudaGraph, None, OFF), partial(failed_part, run.hooks), compiled), []


def rounded(positions: int) -> int:
    """The number of positions, rounded up to a multiple of `MULTIPLE`."""
    return -(-positions // MULTIPLE) * MULTIPLE


def last_logits(
    model: Model, entries: Mapping[str, Tensor], compiled: Instead = AS_THEY_ARE, last: Tensor | None = None
) -> Tensor:
    """The logits [b, V / R] of the last position of a micro batch; `last` as in `run_last`."""
    return run_last(model, units_of(model.plan, entries), entries, compiled, last)["logits"][:, -1]
