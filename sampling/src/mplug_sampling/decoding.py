"""Sampling from a model, token by token: with a cache, many prompts at once; without one, one prompt at a time.

B prompts of a batch, b of them on this rank, S positions of a call, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from mplug import Model, Run, UsageError
from mplug.commands import Instead, run_units
from mplug_nn.cache import CacheSize
from mplug_ops import all_gather
from mplug_sampling.sampler import Sampler, cached_modules
from mplug_sampling.sampling import Sampling, choose, draws
from mplug_sampling.stages import Choose, DividedModel, Finish, RunUnits, divided, run_last
from mplug_sampling.streams import EncoderTexts, Media, Seen, units_of
from mplug_sampling.token_steps import Replays, last_logits
from mplug_sampling.transfers import OnTheWay

Take = Callable[[int, int], bool]
"""(number of a prompt, its next token) -> whether its text ends here."""


class Alone:
    """The ranks that sample together, if there is only this one."""

    shard, shards, multiple, padded = 0, 1, 1, True
    divided: DividedModel | None = None
    divided_text: DividedModel | None = None
    device: torch.device | None = None
    """Where the model computes; None: where its parameters are."""

    def last_logits(
        self, model: Model, entries: Mapping[str, Tensor], instead: Instead, last: Tensor | None = None
    ) -> Tensor:
        """The logits [b, V / R] of the last position of texts in static caches; `instead` has units' functions.

        `last` [b]: the place of each text's last position, if padding follows it.
        """
        return last_logits(model, entries, instead, last)

    def sampling(self) -> AbstractContextManager[None]:
        """In the block, the model can sample (`Together`)."""
        return nullcontext()

    def finish(self, compute: Callable[[], object]) -> None:
        """All texts of these ranks have ended; other ranks may need calls of the model, by `compute` (`Together`)."""

    def next_tokens(self, model: Model, entries: Mapping[str, Tensor], run: RunUnits, choose: Choose) -> Tensor:
        """The next token [b] of each of this rank's samples; `run` runs inference units on the entries."""
        tokens = entries["tokens"]
        result = torch.empty(len(tokens), dtype=torch.int64, device=tokens.device)
        return self.run_units(model, entries, run, lambda logits: choose(logits[:, -1]), result)

    def run_units(
        self, model: Model, entries: Mapping[str, Tensor], run: RunUnits, finish: Finish, result: Tensor
    ) -> Tensor:
        """What `finish` makes of this rank's logits [b, S, V / R], in a tensor like `result`.

        `run` runs inference units on the entries.
        """
        units = units_of(model.plan, entries)
        divided = self.divided if units == model.plan.inference else self.divided_text
        if divided is not None:
            return divided.run(entries, run, finish, result)
        return finish(run(units, entries)["logits"])

    def whole_vocabulary(self, logits: Tensor) -> Tensor:
        """This rank's logits [b, V / R] -> [b, V]."""
        return logits

    def tokens_of_all(self, tokens: Tensor) -> Tensor:
        """The tokens [b] of this rank's prompts -> those [B] of all prompts of the batch."""
        return tokens


class Ranks(Alone):
    """The ranks of a layout.

    Ranks that divide the batch compute different prompts (`shard` of `shards`). Those inside a model share its prompts;
    they need a `multiple` of positions in each call, if they divide the positions among themselves. If the model is
    divided into stages, `divided` runs it, and `divided_text` runs it without streams.
    """

    def __init__(self, run: Run, sampler: Sampler) -> None:
        mesh = run.mesh
        self.shard, self.shards = mesh.batch_shard(run.rank)
        self.multiple = sampler.multiple(run)
        self.padded = sampler.padded
        self.of_batch = run.group(*(axis.name for axis in mesh.views["dense"] if "batch" in axis.entries))
        self.vocab_size, splitting = _split_vocabulary(sampler.model)
        self.of_vocabulary = run.group(splitting) if splitting else None
        plan = sampler.model.plan
        text = plan.without_streams(plan.inference)
        self.divided = divided(sampler.model, plan.inference)
        self.divided_text = self.divided if text == plan.inference else divided(sampler.model, text)

    def whole_vocabulary(self, logits: Tensor) -> Tensor:
        """This rank's logits [b, V / R] -> [b, V]; the last ranks' rows of a padded vocabulary are removed."""
        if self.vocab_size is None or logits.shape[-1] >= self.vocab_size:
            return logits
        return all_gather(logits.contiguous(), self.of_vocabulary, 1)[:, : self.vocab_size]

    def tokens_of_all(self, tokens: Tensor) -> Tensor:
        """The tokens [b] of this rank's prompts -> those [B] of all prompts of the batch."""
        return all_gather(tokens, self.of_batch, 0) if self.shards > 1 else tokens


ALONE = Alone()


def refuse_undivided(sampler: Sampler, ranks: Alone) -> None:
    """Raise UsageError if ranks must divide the positions of a sample, and it cannot have padding."""
    if sampler.uncached and ranks.multiple > 1:
        raise UsageError(
            f"the model samples without a cache, because {sampler.uncached}, so its samples have any length, and the "
            f"layout divides the positions of a sample among {ranks.multiple} ranks; use a layout that does not"
        )


def _split_vocabulary(model: Model) -> tuple[int | None, str]:
    """(V, the mesh axis that splits the vocabulary); None and an empty name if none does."""
    for placement in model.placements.values():
        for segment in (segment for dim in placement.dims for segment in dim):
            if segment.axis == "vocab" and placement.splits.get("vocab"):
                return segment.count, placement.splits["vocab"]
    return None, ""


@torch.no_grad()
def sample(
    sampler: Sampler,
    prompts: Sequence[Sequence[int]],
    keys: Sequence[int],
    num_tokens: int,
    context: int,
    sampling: Sampling,
    take: Take,
    ranks: Alone = ALONE,
    replays: Replays | None = None,
    media: Media | EncoderTexts | None = None,
) -> None:
    """Sample up to `num_tokens` tokens after each prompt, each token from a window of the last `context` tokens.

    `keys` are those of the prompts' random numbers (`sample_key`). `take` receives the tokens in order and is called on
    all ranks, which must get the same answers. While no sample is longer than `context`, a cache holds the earlier
    positions; afterwards, and for a model without a cache, all positions of the window are computed for every token.
    Batches with the same `replays` share the recording of a step, if it makes recordings. Prompts of a batch with
    `media` must have room for all their tokens in the context: a window would cut media. If the model has an encoder,
    `media` are the texts of the encoder, and each prompt is the decoder's first token.
    """
    if media is not None and max(map(len, prompts)) + num_tokens > context:
        raise ValueError(f"texts with media or an encoder cannot be longer than the context of {context} tokens")
    model = sampler.model
    model.module.eval()
    if not sampler.uncached:
        _Batch(sampler, prompts, keys, context, ranks, replays or Replays(), media).sample(num_tokens, sampling, take)
        return
    for number, (prompt, key) in enumerate(zip(prompts, keys, strict=True)):
        seen = None
        if media is not None:
            seen = media.seen([prompt], [number], len(prompt), num_tokens, 0, _device(model))
        _one_by_one(model, list(prompt), key, num_tokens, context, sampling, partial(take, number), ranks, seen)


def _one_by_one(
    model: Model,
    tokens: list[int],
    key: int,
    num_tokens: int,
    context: int,
    sampling: Sampling,
    take: Callable[[int], bool],
    ranks: Alone,
    seen: Seen | None,
) -> None:
    """Sample after one prompt by full recomputation; all ranks that divide the batch compute the same prompt."""
    device, run = _device(model), partial(run_units, model.module)
    of_prompt = torch.tensor([key], device=device)
    for index in range(num_tokens):
        window = torch.tensor([tokens[-context:]], device=device)
        positions = torch.arange(window.shape[1], device=device)[None]
        chosen = partial(_chosen, ranks, sampling, draws(of_prompt, torch.tensor(index, device=device)))
        entries = _entries(window, positions) | ({} if seen is None else seen.entries(0, window.shape[1]))
        tokens.append(int(ranks.next_tokens(model, entries, run, chosen)))
        if take(tokens[-1]):
            return


def _chosen(ranks: Alone, sampling: Sampling, numbers: Tensor, logits: Tensor) -> Tensor:
    """The tokens [b] that random numbers [b] choose from this rank's logits [b, V / R]."""
    return choose(ranks.whole_vocabulary(logits), sampling, numbers)


def _device(model: Model) -> torch.device:
    return next(iter(model.parameters().values())).device


def _entries(tokens: Tensor, positions: Tensor) -> dict[str, Tensor]:
    zeros = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
    return {"tokens": tokens, "positions": positions, "sample_ids": zeros, "keys": zeros}


class _Batch:
    """Prompts that are sampled together. Shorter ones begin with padding; a text that has ended is computed on.

    The prompts are repeated until the ranks that divide the batch get equally many.
    """

    def __init__(
        self,
        sampler: Sampler,
        prompts: Sequence[Sequence[int]],
        keys: Sequence[int],
        context: int,
        ranks: Alone,
        replays: Replays,
        media: Media | EncoderTexts | None,
    ) -> None:
        self.model, self.context, self.ranks, self.wanted = sampler.model, context, ranks, len(prompts)
        self.media = media
        self.is_static, self.replays, self.device = not sampler.growing, replays, _device(sampler.model)
        each = -(-len(prompts) // ranks.shards)
        self.texts = [list(prompts[number % len(prompts)]) for number in range(each * ranks.shards)]
        self.own = slice(ranks.shard * each, (ranks.shard + 1) * each)
        self.numbers = [number % len(prompts) for number in range(len(self.texts))][self.own]
        of_texts = [keys[number % len(keys)] for number in range(len(self.texts))]
        self.keys = torch.tensor(of_texts[self.own], device=self.device)
        self.modules = list(cached_modules(sampler.model))

    def sample(self, num_tokens: int, sampling: Sampling, take: Take) -> None:
        """Sample token by token, until every text has ended."""
        alive = set(range(self.wanted))
        try:
            for tokens in self._tokens(num_tokens, sampling):
                for number, token in enumerate(tokens):
                    self.texts[number].append(token)
                    if number in alive and take(number, token):
                        alive.discard(number)
                if not alive:
                    return
        finally:
            for module in self.modules:
                module.cache = None

    def _tokens(self, num_tokens: int, sampling: Sampling) -> Iterator[list[int]]:
        """The next tokens of all texts, again and again; the caller adds them to `texts`."""
        longest, first = max(map(len, self.texts)), 0
        if self.is_static and longest <= self.context:
            first = min(num_tokens, self.context - longest + 1)
            yield from self._with_static_caches(first, sampling)
        window = None
        for index in range(first, num_tokens):
            longest = max(map(len, self.texts))
            if window is None or longest > self.context:
                window, again = self._window(min(longest, self.context), num_tokens - index), 0
            else:
                again = self.ranks.multiple - 1
            numbers = draws(self.keys, torch.tensor(index, device=self.device))
            tokens = self._next_tokens(window, again, partial(_chosen, self.ranks, sampling, numbers))
            window.append(tokens)
            yield self.ranks.tokens_of_all(tokens).tolist()

    def _with_static_caches(self, num_tokens: int, sampling: Sampling) -> Iterator[list[int]]:
        """The first tokens of all texts. While the CPU reads a token, the device computes the next one."""
        longest = max(map(len, self.texts))
        texts, most = self.texts[self.own], longest + num_tokens - 1
        steps = self.replays.steps(self.model, len(texts), longest, most, sampling, self.ranks.whole_vocabulary)
        window, lengths = self._uncomputed(longest, longest), torch.tensor([*map(len, texts)], device=self.device)
        window.seen = self._seen(longest, num_tokens)
        later = None if window.seen is None else window.seen.later(longest)
        tokens = steps.begin(window.entries(0), lengths, window.padding, self.keys, later)
        found = OnTheWay(self.ranks.tokens_of_all(tokens))
        for _ in range(1, num_tokens):
            following = OnTheWay(self.ranks.tokens_of_all(steps.advance(most)))
            yield found.read()[0]
            found = following
        yield found.read()[0]

    def _window(self, longest: int, more: int) -> "_Window":
        """The last tokens of this rank's texts in a new cache, with room for `more` tokens if the context has it."""
        length = -(-longest // self.ranks.multiple) * self.ranks.multiple
        window = self._uncomputed(length, length + max(0, min(more, self.context - longest)))
        window.seen = self._seen(length, more)
        size = CacheSize(window.room, self.ranks.multiple - 1, window.padding, window.most_padding)
        for module in self.modules:
            module.cache = module.new_cache(size)
        return window

    def _seen(self, length: int, more: int) -> Seen | None:
        """The media of this rank's texts, which have `length` tokens with padding, and will have `more`."""
        if self.media is None:
            return None
        text = self.media.text_behind(self.texts)
        return self.media.seen(self.texts[self.own], self.numbers, length, more, text, self.device)

    def _uncomputed(self, length: int, room: int) -> "_Window":
        """The last tokens of this rank's texts, with padding up to `length`."""
        texts = [text[-self.context :] for text in self.texts[self.own]]
        padding = [length - len(text) for text in texts]
        if any(padding) and not self.ranks.padded:
            raise ValueError("the run was built for samples without padding")
        return _Window(texts, padding, room, self.device)

    def _next_tokens(self, window: "_Window", again: int, choose: Choose) -> Tensor:
        """The next token [b] of each text; the last `again` positions before the new ones come again."""
        for module in self.modules:
            module.cache.rewind(again)
        return self.ranks.next_tokens(self.model, window.entries(again), partial(run_last, self.model), choose)


class _Window:
    """The tokens of a rank's texts, with their padding in front, and the positions that the model has computed.

    `padding` [b] is None if no text has padding; `most_padding` is the maximum. `seen` are the media of the texts.
    """

    seen: Seen | None = None

    def __init__(self, texts: Sequence[Sequence[int]], padding: Sequence[int], room: int, device: torch.device) -> None:
        self.length, self.computed, self.room = len(texts[0]) + padding[0], 0, room
        self.padding = torch.tensor(padding, device=device) if any(padding) else None
        self.most_padding = max(padding)
        filled = torch.zeros(len(texts), room, dtype=torch.int64)
        for row, text, before in zip(filled, texts, padding, strict=True):
            row[before : self.length] = torch.tensor(text)
        self.tokens = filled.to(device)
        positions = torch.arange(room, device=device)[None]
        if self.padding is not None:
            positions = (positions - self.padding[:, None]).clamp(min=0)
        self.positions = positions

    def append(self, tokens: Tensor) -> None:
        """Add the next token [b] of each text, if there is room."""
        if self.length < self.tokens.shape[1]:
            self.tokens[:, self.length] = tokens
            self.length += 1

    def entries(self, again: int) -> dict[str, Tensor]:
        """The micro batch of the positions that are not computed yet, and of `again` before them."""
        begin, end = self.computed - again, self.length
        self.computed = end
        found = _entries(self.tokens[:, begin:end], self.positions[:, begin:end])
        return found if self.seen is None else {**found, **self.seen.entries(begin, end)}
