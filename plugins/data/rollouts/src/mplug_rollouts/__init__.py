"""Completions with rewards: the model that trains samples them between steps, or files have them."""

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from mplug import ADVANTAGES, DOCUMENTS, SAMPLED, SEQUENCES, Loader, UsageError, hookimpl
from mplug_rollouts.checks import (
    refuse_gather,
    refuse_graphs,
    refuse_settings,
    refuse_steps_within_prompts,
    scores_by_trainer,
)
from mplug_rollouts.config import RolloutsConfig
from mplug_tokenization import ChatLoader, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from mplug import Model, Run, RunConfig
    from mplug.commands import Selection
    from mplug_rollouts.loader import Pack, RolloutLoader
    from mplug_rollouts.rescoring import Rescoring
    from mplug_rollouts.rewards import Functions
    from mplug_rollouts.served import ServedSampler
    from mplug_rollouts.sources import Encoded, SampledSource
    from mplug_sampling import Completion, Lanes, TrainedSampler

log = logging.getLogger("mplug.rollouts")
Split = Literal["train", "validation"]


class Rollouts(ChatLoader):
    """Completions of prompts with their advantages, for objectives that learn from rewards."""

    Config = RolloutsConfig
    layer = 1 << 30  # outside of adapters: what they add to the model takes part in sampling

    def __init__(self, config: RolloutsConfig) -> None:
        self.config = config
        self._sampler: TrainedSampler | None = None
        self._lanes: Lanes | None = None
        self._num_put_back = 0
        self._model: Model | None = None
        self._rescoring: Rescoring | None = None
        self._server: ServedSampler | None = None
        self._source: SampledSource | None = None
        self._loader: RolloutLoader | None = None
        self._functions: Functions | None = None
        self._is_built = False

    @hookimpl
    def configure(self, config: "RunConfig") -> None:
        """Refuse samples without room for a completion, and settings that the run cannot have."""
        own = self.config
        refuse_settings(own, config)
        if own.completions == "served" and own.server.weights == "checkpoints":
            from mplug_rollouts.served import refuse_unpublished

            refuse_unpublished(config, own.server.format)
        assert self.template
        assert self.tokenizer

    @hookimpl
    def check_data(self, config: "RunConfig") -> None:
        """Refuse unreadable files, files whose first line has no prompt, and functions that cannot be found."""
        from mplug_rollouts.lines import check_files

        check_files(self.config.path, "data.path", self._given)
        if self.config.validation_path is not None and config.trainer.eval_every:
            check_files(self.config.validation_path, "data.validation_path", self._given)
        if self.config.rewards:
            functions = self._new_functions()
            try:
                functions.check()
            finally:
                functions.close()

    @hookimpl
    def batch_entries(self) -> tuple[str, ...]:
        """The completion of each position, its advantage and, if they are known, the sampler's log-probabilities."""
        has_scores = self.config.completions != "given" or self.config.log_probabilities
        return (DOCUMENTS, SEQUENCES, ADVANTAGES, *((SAMPLED,) if has_scores else ()))

    @hookimpl
    def build_tokenizer(self) -> Tokenizer:
        """The tokenizer: it also encodes special tokens that a text spells out, and writes and ends conversations.

        That of prompts that are texts ends texts, and writes no conversation.
        """
        from mplug_rollouts.lines import first_content

        return self.vocabulary_for(first_content(self.config.path, self._given))

    @hookimpl
    def adapt_model(self, run: "Run", model: "Model") -> None:
        """Let the model that trains sample too."""
        if run.trains and self.config.completions == "sampled":
            from mplug_sampling import TrainedSampler

            self._sampler = TrainedSampler(graphs=self.config.graphs)
            self._sampler.gathers = self.config.gather
            self._sampler.adapt_model(run, model)
            if scores_by_trainer(self.config, run):
                from mplug_nn import return_log_probabilities

                return_log_probabilities(model, "data/rollouts")

    @hookimpl
    def offers_selected(self, run: "Run", model: "Model", selection: "Selection") -> None:
        """Refuse kernels and layouts with which the model cannot sample, and steps that end within a prompt."""
        if run.trains and self.config.completions != "given":
            refuse_steps_within_prompts(self.config, run.config)
        if run.trains and self._sampler is not None:
            from mplug_sampling import stores_parts

            refuse_gather(self.config, run, stores_parts=stores_parts(model))
            self._sampler.select(run, model, selection)
            if self.config.graphs:
                from mplug_sampling.fast_steps import layout_obstacles

                refuse_graphs(layout_obstacles(run, self._sampler))

    @hookimpl
    def training_built(self, model: "Model") -> None:
        """The model has its memory: completions may be sampled."""
        self._is_built, self._model = True, model

    @hookimpl
    def training_released(self) -> None:
        """Drop the caches and the model."""
        self._model = self._rescoring = None
        self._lanes, self._sampler, self._is_built, self._num_put_back = None, None, False, 0

    @hookimpl
    def build_loader(self, run: "Run", split: Split) -> Loader:
        """Read and encode the prompts of a split; completions are sampled when a step takes them."""
        from mplug_rollouts.encoding import given_items
        from mplug_rollouts.loader import HeldOutLoader, RolloutLoader
        from mplug_rollouts.sources import GivenSource, SampledSource

        own, trainer = self.config, run.config.trainer
        prompts, num_dropped = self._prompts(split, trainer.seq_length // own.per_sample - own.max_tokens + 1)
        common: dict[str, Any] = {
            "pack": self._pack(trainer.seq_length),
            "vocab_size": self.vocabulary.vocab_size,
            "per_sample": own.per_sample,
            "shard": run.mesh.batch_shard(run.rank),
            "micro_batch_size": run.micro_batch_size,
        }
        masks = own.mask_truncated
        if own.completions == "given":
            items = given_items(prompts, self.vocabulary, own)
            return RolloutLoader(GivenSource(prompts, items, trainer.seed), masks_truncated=masks, **common)
        if own.completions == "served" and self._server is None:
            from mplug_rollouts.served import ServedSampler

            self._server = ServedSampler(run, own.server)
        complete = partial(self._complete if own.completions == "sampled" else self._served, run, prompts)
        source = SampledSource(run, own, self.vocabulary, prompts, complete, self.functions, num_dropped)
        if split == "validation":
            return HeldOutLoader(source.held_out, num_prompts=len(prompts), **common)
        self._source = source
        rescores = own.completions == "sampled" and scores_by_trainer(self.config, run)
        rescoring = partial(self._made_rescoring, run) if rescores else None
        self._loader = RolloutLoader(source, masks_truncated=masks, rescoring=rescoring, **common)
        return self._loader

    @hookimpl
    def step_figures(self, record: "Mapping[str, Any]") -> "Mapping[str, float]":
        """Rewards, lengths and the duration of the rollout that a step has caused."""
        found = {} if self._source is None else self._source.figures.pop(record["step"], {})
        if found and self._server is not None:
            return {**found, "rollout_lag": float(record["step"] - 1 - self._server.step)}
        if not found or self._lanes is None or self.config.cache_tokens is None:
            return found
        before, self._num_put_back = self._num_put_back, self._lanes.num_put_back
        return {**found, "rollout_put_back": float(self._num_put_back - before)}

    @hookimpl
    def run_started(self, run: "Run") -> None:
        """Remove the saved completions of steps that the run will repeat."""
        from mplug_rollouts.sources import FILE, forget_after

        if self.config.save and run.rank == 0 and run.directory is not None:
            forget_after(run.directory / FILE, run.step)

    @hookimpl
    def checkpoint_saved(self, path: "Path") -> None:
        """The server may get the weights of the checkpoint."""
        if self._server is not None:
            self._server.saved(path)

    @hookimpl
    def run_finished(self, run: "Run") -> None:
        """Let the server get the last weights of a run that is done, and end the processes of functions."""
        try:
            if self._server is not None and run.step == run.config.trainer.steps:
                self._server.finish()
        finally:
            self._end()

    @hookimpl
    def run_failed(self) -> None:
        """End the processes of functions."""
        self._end()

    @property
    def functions(self) -> "Functions":
        """The functions of rewards."""
        if self._functions is None:
            self._functions = self._new_functions()
        return self._functions

    def _made_rescoring(self, run: "Run") -> "Rescoring":
        """What scores completions with the model, which has its memory. Collective."""
        from mplug_rollouts.rescoring import Rescoring
        from mplug_sampling import TrainerScores

        if self._rescoring is None:
            assert self._model is not None
            assert self._loader is not None
            scores = TrainerScores(run, self._model, self._loader)
            self._rescoring = Rescoring(run, scores.of, self.config.per_sample)
        return self._rescoring

    def _new_functions(self) -> "Functions":
        from mplug_rollouts.rewards import Functions

        own = self.config
        return Functions(own.rewards, own.reward_weights, own.reward_seconds, own.reward_processes)

    def _end(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._functions is not None:
            self._functions.close()
            self._functions = None

    @property
    def _given(self) -> str:
        """What lines must have, as `read_prompts` takes it."""
        if self.config.completions != "given":
            return ""
        return "scored" if self.config.log_probabilities else "plain"

    def _prompts(self, split: Split, length: int) -> "tuple[list[Encoded], int]":
        """The prompts of a split, and the number of those that are dropped."""
        from mplug_rollouts.encoding import Count, Encoder
        from mplug_rollouts.lines import of_split

        own, count = self.config, Count()
        found = of_split(split, own.path, own.validation_path, own.validation_percent, self._given)
        prompts = Encoder(self.vocabulary, length).of(found, count)
        level = logging.WARNING if count.dropped else logging.INFO
        log.log(level, "%s: %d of %d prompts (%s)", split, len(prompts), count.prompts, count)
        if not prompts:
            own_files = split == "validation" and own.validation_path
            where = f"data.validation_path '{own.validation_path}'" if own_files else f"data.path '{own.path}'"
            remedy = ", or data.validation_path, or trainer.eval_every=0" if split == "validation" else ""
            raise UsageError(
                f"{where}: no prompt of the {split} split can be used ({count.prompts} read; {count}; a prompt may "
                f"have {length} tokens); use other prompts, or set a larger trainer.seq_length{remedy}"
            )
        return prompts, count.dropped

    def _pack(self, length: int) -> "Pack":
        from mplug_rollouts.samples import batch_of

        filler = self.vocabulary.tokenizer.eod or 0
        has_scores = SAMPLED in self.batch_entries()
        return lambda samples, first: batch_of(
            samples, first, length, filler, masks_truncated=self.config.mask_truncated, has_scores=has_scores
        )

    def _complete(
        self,
        run: "Run",
        prompts: "Sequence[Encoded]",
        tokens: "Sequence[Sequence[int]]",
        keys: "Sequence[int]",
        is_greedy: bool,
    ) -> "list[Completion]":
        """Let the model complete prompts, given by their tokens."""
        from mplug_sampling import Sampling, complete

        if not self._is_built or self._sampler is None:
            raise UsageError(
                "data/rollouts samples completions while a model trains, and this command trains none; use other data"
            )
        own, size = self.config, self.vocabulary.vocab_size
        sampling = Sampling(own.temperature, top_k=1 if is_greedy else 0, vocab_size=size)
        ends = self._ends(prompts)
        return complete(self._made_lanes(run), tokens, keys, own.max_tokens, sampling, ends)

    def _served(
        self,
        run: "Run",
        prompts: "Sequence[Encoded]",
        tokens: "Sequence[Sequence[int]]",
        keys: "Sequence[int]",
        is_greedy: bool,
    ) -> "list[Completion]":
        """Let the server complete prompts, given by their tokens. Collective."""
        from mplug_rollouts.server import Want

        own = self.config
        temperature = 0.0 if is_greedy else own.temperature
        want = Want(own.max_tokens, temperature, self.vocabulary.vocab_size, self._ends(prompts))
        assert self._server is not None
        return self._server.complete(tokens, keys, want)

    def _made_lanes(self, run: "Run") -> "Lanes":
        """The lanes, whose caches stay from rollout to rollout. Collective."""
        from mplug.commands import AS_THEY_ARE
        from mplug_sampling import Lanes, Together, replays_for
        from mplug_sampling.fast_steps import compiled_step

        assert self._sampler is not None
        if self._lanes is None:
            is_compiled = self.config.graphs and not run.config.trainer.deterministic
            compiled = compiled_step(run, self._sampler)[0] if is_compiled else AS_THEY_ARE
            replays, reasons = replays_for(run, self._sampler, compiled)
            refuse_graphs(reasons)
            context = run.config.trainer.seq_length // self.config.per_sample + 1
            own = self.config
            ranks = Together(run, self._sampler, own.gather)
            self._lanes = Lanes(self._sampler, own.lanes, context, ranks, replays, own.cache_tokens)
            with self._lanes.sampling():
                gib = self._lanes.allocate() / 2**30
            log.info("caches of %d lanes of %d tokens: %.3g GiB on each rank", own.lanes, context, gib)
        return self._lanes

    def _ends(self, prompts: "Sequence[Encoded]") -> frozenset[int]:
        from mplug_rollouts.encoding import ends_of

        return ends_of(self.vocabulary, is_chat=not isinstance(prompts[0].prompt.content, str))
