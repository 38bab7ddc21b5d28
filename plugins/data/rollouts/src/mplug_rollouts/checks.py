"""What settings of rollouts do not go together with others of the run. Imports no torch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mplug import UsageError
from mplug_rollouts.config import RolloutsConfig

if TYPE_CHECKING:
    from mplug import Run, RunConfig


def refuse_settings(own: RolloutsConfig, config: "RunConfig") -> None:
    """Raise UsageError for samples without room for a completion, and for settings that the run cannot have."""
    trainer = config.trainer
    if own.per_sample * (own.max_tokens + 1) > trainer.seq_length:
        raise UsageError(
            f"data.per_sample={own.per_sample} completions of data.max_tokens={own.max_tokens} tokens after a prompt "
            f"do not fit into trainer.seq_length={trainer.seq_length}; set trainer.seq_length to the tokens of the "
            f"longest prompt and completion, times data.per_sample"
        )
    longest = trainer.seq_length // own.per_sample + 1
    if own.cache_tokens is not None and own.cache_tokens < longest:
        raise UsageError(
            f"data.cache_tokens={own.cache_tokens} has no room for one prompt with its completion; set it to {longest} "
            f"or more (trainer.seq_length / data.per_sample + 1)"
        )
    if own.scores == "trainer" and not serves_whole_steps(own, config):
        raise UsageError(
            "data.scores=trainer scores a rollout in the micro batches of its steps, and a rollout of this run does "
            "not serve whole steps of one size (data.prompts_per_rollout, data.repeats, schedule.batch_rampup); change "
            "one of them, or set data.scores=sampler"
        )
    if own.completions != "given" and config.parallel.read_once:
        raise UsageError(
            f"parallel.read_once=true lets one rank read for several, and all of them take part when completions are "
            f"{own.completions}; set parallel.read_once=false"
        )


def refuse_steps_within_prompts(own: RolloutsConfig, config: "RunConfig") -> None:
    """Raise UsageError for steps that end within the completions of a prompt."""
    trainer, rampup = config.trainer, config.schedule.batch_rampup
    sizes = [trainer.global_batch_size]
    if rampup.start is not None:
        sizes += range(rampup.start, trainer.global_batch_size, rampup.increment)
    of_prompt = own.num_generations * own.repeats
    of_step = next((size * own.per_sample for size in sizes if size * own.per_sample % of_prompt), 0)
    if own.prompts_per_rollout is None and of_step:
        raise UsageError(
            f"a step takes {of_step} completions (trainer.global_batch_size, or a batch of schedule.batch_rampup, "
            f"times data.per_sample), which is no multiple of data.num_generations={own.num_generations}"
            f"{f' times data.repeats={own.repeats}' if own.repeats > 1 else ''}; change one of them, or set "
            f"data.prompts_per_rollout"
        )


def serves_whole_steps(own: RolloutsConfig, config: "RunConfig") -> bool:
    """Whether each rollout has the completions of one or several steps of one size."""
    trainer = config.trainer
    if own.prompts_per_rollout is None:  # those of a step, as `refuse_steps_within_prompts` requires
        return True
    of_rollout = own.prompts_per_rollout * own.num_generations * own.repeats
    is_whole = of_rollout % (trainer.global_batch_size * own.per_sample) == 0
    return is_whole and config.schedule.batch_rampup.start is None


def scores_by_trainer(own: RolloutsConfig, run: "Run") -> bool:
    """Whether sampled completions get the log-probabilities of the trainer's forward pass.

    Raises UsageError if they shall, and a step would compute others: inductor makes other kernels of a pass that keeps
    nothing for backward.
    """
    is_equal = run.compiler != "inductor"
    if own.scores == "trainer" and not is_equal:
        raise UsageError(
            "data.scores=trainer: inductor compiles passes with and without gradients to different kernels, whose "
            "log-probabilities differ; set trainer.compile=never, or data.scores=sampler"
        )
    wants = own.scores == "auto" and run.config.trainer.deterministic and serves_whole_steps(own, run.config)
    return is_equal and (wants or own.scores == "trainer")


def refuse_gather(own: RolloutsConfig, run: "Run", *, stores_parts: bool) -> None:
    """Raise UsageError for `gather` if there is nothing to gather."""
    if own.gather == "units" and not stores_parts:
        raise UsageError(
            f"data.gather=units gathers the weights that ranks store in parts, and every rank of the layout "
            f"'{run.config.parallel.layout}' has whole weights; remove it, or use a layout with fsdp"
        )


def refuse_graphs(reasons: Sequence[str]) -> None:
    """Raise UsageError if there are reasons against CUDA graphs."""
    if reasons:
        raise UsageError(f"data.graphs=true: {'; '.join(reasons)}; set data.graphs=false")
