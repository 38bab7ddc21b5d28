"""Where completions come from: the model that trains samples them, or lines of files have them."""

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from mplug import UsageError
from mplug.tensors.random import key_of
from mplug_rollouts.config import RolloutsConfig
from mplug_rollouts.groups import Item, advantages, deviation_of, is_flat, mean_of
from mplug_rollouts.lines import Prompt
from mplug_rollouts.rewards import Functions, Group, Rewarded
from mplug_sampling import part_of_samples, prompt_shard

if TYPE_CHECKING:
    from mplug import Run
    from mplug_sampling import Completion
    from mplug_tokenization.vocabulary import Vocabulary

FILE = "rollouts.jsonl"
log = logging.getLogger("mplug.rollouts")
Complete = Callable[[Sequence[Sequence[int]], Sequence[int], bool], "list[Completion]"]
"""(the tokens of prompts, the keys of their random numbers, whether to take the likeliest tokens) -> completions."""


@dataclass(frozen=True)
class Encoded:
    """A prompt and its tokens."""

    prompt: Prompt
    tokens: tuple[int, ...]


def forget_after(path: Path, step: int) -> None:
    """Cut a file of rollouts before the first one of a later step, or before a line that a killed run has not ended."""
    if not path.exists():
        return
    with path.open("r+b") as lines:
        end = 0
        for line in lines:
            if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                break
            end += len(line)
        lines.truncate(end)


def fingerprint_of(prompts: Sequence[Encoded], *more: object) -> str:
    """A hash of prompts with their columns and completions, and of settings."""
    found = blake2b(repr(more).encode(), digest_size=16)
    for one in prompts:
        found.update(json.dumps([one.tokens, one.prompt.columns], sort_keys=True).encode())
        found.update(repr(one.prompt.completions).encode())
    return found.hexdigest()


class Order:
    """The prompts in another random order in every epoch."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def __getitem__(self, number: int) -> int:
        epoch, index = divmod(number, self.count)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(self.count)
        return int(self._order[index])


class GivenSource:
    """The completions of lines, in another random order of prompts in every epoch."""

    def __init__(self, prompts: Sequence[Encoded], items: Sequence[Sequence[Item]], seed: int) -> None:
        self.num_prompts = len(prompts)
        self.items, self.order = items, Order(len(prompts), seed)
        self.fingerprint = fingerprint_of(prompts)

    def next(self, first: int, samples: int) -> tuple[list[Item], int]:
        """The completions of the next prompt."""
        return [*self.items[self.order[first]]], 1


class SampledSource:
    """Completions of the model that trains, with the rewards of functions.

    Each group of ranks that computes the same whole samples completes a part of the prompts of a rollout, and its first
    rank calls the functions. Ranks that divide the positions of samples in training are in different groups. Then all
    ranks have all completions.
    """

    def __init__(
        self,
        run: "Run",
        config: RolloutsConfig,
        vocabulary: "Vocabulary",
        prompts: Sequence[Encoded],
        complete: Complete,
        functions: Functions,
        num_dropped: int = 0,
    ) -> None:
        self.run, self.config, self.vocabulary, self.prompts = run, config, vocabulary, prompts
        self.parts = [prompt_shard(run.mesh, rank)[0] for rank in range(run.mesh.world_size)]
        """The part of the prompts that each rank completes."""
        self.complete, self.functions, self.num_dropped = complete, functions, num_dropped
        self.seed, self.num_prompts = run.config.trainer.seed, len(prompts)
        self.order = Order(len(prompts), self.seed)
        self.fingerprint = fingerprint_of(prompts, config.num_generations, config.max_tokens, config.temperature)
        self.figures: dict[int, dict[str, float]] = {}
        """Those of rollouts by the step that caused them."""

    def next(self, first: int, samples: int) -> tuple[list[Item], int]:
        """A rollout: the completions of the next prompts with their advantages, as often as they are repeated."""
        own, began = self.config, time.perf_counter()
        per_prompt = own.num_generations * own.repeats
        number = own.prompts_per_rollout or -(-samples * own.per_sample // per_prompt)
        mine = _part_of(range(first, first + number), *prompt_shard(self.run.mesh, self.run.rank))
        chosen = [self.prompts[self.order[one]] for one in mine]
        keys = [key_of(self.seed, "rollout", one, copy) for one in mine for copy in range(own.num_generations)]
        texts = self.complete([one.tokens for one in chosen for _ in range(own.num_generations)], keys, False)
        grouped = [texts[begin : begin + own.num_generations] for begin in range(0, len(texts), own.num_generations)]
        rewarded, items = self._shared(chosen, grouped, range(max(self.parts) + 1))
        values = advantages([[one.reward for one in group] for group in items], own.scale)
        items = [
            [replace(one, advantage=value) for one, value in zip(group, of_group, strict=True)]
            for group, of_group in zip(items, values, strict=True)
        ]
        self._report(items, rewarded, time.perf_counter() - began)
        self._save([self.prompts[self.order[one]] for one in range(first, first + number)], items)
        return [one for group in items for one in group] * own.repeats, number

    def held_out(self, numbers: Sequence[int]) -> list[Item]:
        """The completions of the likeliest tokens of prompts; their advantages are their rewards.

        The ranks with the same samples, or with parts of them, give the same numbers.
        """
        index, count = part_of_samples(self.run.mesh, self.run.rank)
        first = self.parts[self.run.rank] - index
        chosen = [self.prompts[one] for one in _part_of(numbers, index, count)]
        texts = self.complete([one.tokens for one in chosen], [0] * len(chosen), True)
        _, items = self._shared(chosen, [[one] for one in texts], range(first, first + count))
        return [replace(one, advantage=mean_of([one.reward])) for (one,) in items]

    def _shared(
        self, prompts: Sequence[Encoded], texts: "Sequence[Sequence[Completion]]", parts: range
    ) -> tuple[list[Rewarded], list[list[Item]]]:
        """The rewards and completions of some parts of the prompts; those given are this rank's. Collective."""
        answer: Any = None
        if self.parts.index(self.parts[self.run.rank]) == self.run.rank:
            try:
                found = self.functions.of([self._group(*one) for one in zip(prompts, texts, strict=True)])
                rows = zip(prompts, texts, found, strict=True)
                answer = found, [[*map(_item, [one] * len(group), group, of.totals)] for one, group, of in rows]
            except UsageError as error:
                answer = error
        answers = self.run.gathered(answer)
        for error in answers:
            if isinstance(error, UsageError):
                raise error
        whole = [answers[self.parts.index(part)] for part in parts]
        return [one for found, _ in whole for one in found], [one for _, items in whole for one in items]

    def _group(self, one: Encoded, texts: "Sequence[Completion]") -> Group:
        """What functions receive; the token at the end is no part of the text."""
        plain = [self._text(text.tokens, truncated=text.truncated) for text in texts]
        content = one.prompt.content
        is_chat = not isinstance(content, str)
        given = [[{"role": "assistant", "content": text}] if is_chat else text for text in plain]
        return Group(one.prompt.where, content, given, one.prompt.columns)

    def _text(self, tokens: Sequence[int], *, truncated: bool) -> str:
        return self.vocabulary.decode(tokens if truncated else tokens[:-1])

    def _report(self, items: Sequence[Sequence[Item]], rewarded: Sequence[Rewarded], seconds: float) -> None:
        """Keep the figures of a rollout, with TRL's names where it has them, for the record of the step."""
        everything = [one for group in items for one in group]
        groups = [[one.reward for one in group] for group in items]
        num_tokens = sum(len(one.tokens) for one in everything)
        found = {
            "reward": mean_of(one.reward for one in everything),
            "reward_std": fmean(deviation_of(group) for group in groups),
            "frac_reward_zero_std": fmean(is_flat(group) for group in groups),
            "completions/mean_length": num_tokens / len(everything),
            "completions/clipped_ratio": fmean(one.truncated for one in everything),
            "rollout_s": seconds,
            "rollout_tokens_per_s": num_tokens / seconds,
        }
        for number, name in enumerate(self.config.rewards):
            values = [one for group in rewarded for one in group.of_functions[number]]
            found[f"rewards/{name}/mean"], found[f"rewards/{name}/std"] = mean_of(values), deviation_of(values)
        if self.num_dropped:
            found["prompts/dropped"] = float(self.num_dropped)
        if timeouts := sum(one.timeouts for one in rewarded):
            found["rewards/timeouts"] = float(timeouts)
            log.warning(
                "step %d: functions of data.rewards needed more than data.reward_seconds=%g for %d of %d prompts; "
                "their completions teach nothing",
                self.run.step,
                self.config.reward_seconds,
                sum(one.timeouts > 0 for one in rewarded),
                len(rewarded),
            )
        if all(math.isnan(one.reward) for one in everything):
            del found["reward"]
        self.figures[self.run.step] = found

    def _save(self, prompts: Sequence[Encoded], items: Sequence[Sequence[Item]]) -> None:
        """Add the rollout to the file of the run, in the form of given completions."""
        if not self.config.save or self.run.rank != 0 or self.run.directory is None:
            return
        with Path(self.run.directory, FILE).open("a") as lines:
            for one, group in zip(prompts, items, strict=True):
                completions = [
                    {
                        "text": self._text(item.tokens, truncated=item.truncated),
                        "tokens": item.tokens,
                        "log_probabilities": item.log_probabilities,
                        "reward": None if math.isnan(item.reward) else item.reward,
                        "truncated": item.truncated,
                    }
                    for item in group
                ]
                of_prompt = {"step": self.run.step, "prompt": one.prompt.content, "prompt_tokens": one.tokens}
                lines.write(json.dumps({**one.prompt.columns, **of_prompt, "completions": completions}) + "\n")


def _part_of(numbers: Sequence[int], index: int, count: int) -> Sequence[int]:
    """Part `index` of `count` about equal parts of numbers."""
    return numbers[len(numbers) * index // count : len(numbers) * (index + 1) // count]


def _item(one: Encoded, text: "Completion", reward: float) -> Item:
    return Item(one.tokens, tuple(text.tokens), tuple(text.log_probabilities), reward, truncated=text.truncated)
