"""What runs a training step, its results, and how a model that is divided into stages runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from mplug.contracts.micro_batch import MicroBatch, RankBatch

if TYPE_CHECKING:
    from torch import Tensor

    from mplug.layout.stages import Stages

Record = dict[str, Any]
"""A line of metrics.jsonl.

Always: step, loss, grad_norm, lr, tokens, targets_per_s, step_s, tokens_per_s, tflops, mfu, memory_gib, data_wait_s,
skipped. `tokens` are the targets of the run so far, and `targets_per_s` those of this step per second. `tokens_per_s`
and `tflops` count all positions of the samples, also those without a target (prompts, the unfilled rest of a sample).
`step_s` is the duration of the step in seconds, without evaluations and saves. In fp16: loss_scale, and overflows (the
number of steps lost to overflow so far). Statistics by name, if the model has some. Figures that the stepper adds:
`bubble` of a pipeline. If a plugin may ask for exact passes (`build_step_check`): repeated_steps, the number of steps
so far whose passes were computed again. If the model has streams, for the axis of each ('patches'):
`patches_per_s`, and `patches_imbalance`, the rows of the rank that computes the most of them over the mean of ranks.
If the loader states the lengths of documents (`MapLoader.documents`) and ranks read different samples:
`work_imbalance`, the FLOPs of the samples of the rank with the most of them, over the mean of ranks.
If ranks divide samples by their documents (`mplug.DocumentMap`), for the mesh axis ('cp'): `cp_imbalance`, the work of
the rank with the most over the mean of ranks, and `cp_imbalance_undivided`, the same if all samples were divided as one
document is. They are those of the samples of rank 0.
val_loss, if the run was evaluated after the step. Figures that plugins add by the hook `step_figures`.
"""


@dataclass
class StepResult:
    """The results of a step, on the device: reading one makes the CPU wait for the device."""

    loss: "Tensor"
    grad_norm: "Tensor"
    tokens: "Tensor"
    skipped: "Tensor"
    stop: "Tensor"
    """Greater than 0 if any rank has been asked to stop: all ranks then stop after the same step."""
    statistics: "Mapping[str, Tensor]" = field(default_factory=dict)
    """The statistics of the model's modules by buffer name, summed over all ranks and micro batches."""
    failed: "Tensor | None" = None
    """Greater than 0 if `trainer.nonfinite` decides what happens next. None: it decides after every skipped step."""
    figures: "Mapping[str, Tensor]" = field(default_factory=dict)
    """Further scalars for metrics.jsonl, by name."""
    rows: "Mapping[str, Tensor]" = field(default_factory=dict)
    """The sums over the step of `RankBatch.rows` [2], by the entry with the lengths."""
    measured: "Callable[[], Mapping[str, float]] | None" = None
    """Returns further figures by name; called on the CPU after the device has completed the step."""


class Relay(Protocol):
    """Runs the chunks of a model that is divided into stages forward, on all ranks of a pipeline together."""

    def __call__(
        self,
        entries: MicroBatch,
        compute: "Callable[[int, Mapping[str, Tensor]], Mapping[str, Tensor]]",
        result: "Tensor",
    ) -> "Tensor":
        """Run this rank's chunks, and return the result of the last chunk on every rank.

        `compute(chunk, values)` runs a chunk on the entries and the activations that enter it, and returns by name the
        activations that leave it. The last chunk returns one tensor instead, of the dtype and shape of `result`; the
        relay may receive it in `result`.
        """


@dataclass(frozen=True)
class Pipeline:
    """A model that is divided into stages, and how its ranks run: the answer of the hook `build_pipeline`.

    `stages` is pure data: the host keeps the units of this rank's chunks. `stepper(default)` returns the stepper that
    runs the chunks, around the host's default stepper (`DefaultStepper`); in a run that does not train, around an
    `Evaluator`, and only its method `evaluate` is called. `relay(crossing)` returns what runs the
    chunks forward to sample, between steps or in a run that does not train, on all ranks together. `crossing` names the
    activations that enter each chunk, which are those of the plan's inference units: they may differ from those of
    training. None: the strategy cannot run its stages forward, and what would do so is refused.
    """

    stages: "Stages"
    stepper: "Callable[[Any], Stepper]"
    relay: "Callable[[Sequence[tuple[str, ...]]], Relay] | None"


class Stepper(Protocol):
    """Owns the training step: it turns micro batches into gradients, and gradients into an update."""

    def forward_backward(self, micro_batches: Iterable[RankBatch], step: int) -> None:
        """Sum the gradients of a step's micro batches into the sinks; sum losses and token counts as well."""

    def update(self, lr: float, weight_decay: float) -> StepResult:
        """Finish gradients, clip them, check that they are finite, and let the optimizer update its pieces."""

    def evaluate(self, micro_batches: Iterable[RankBatch]) -> "Tensor":
        """The mean loss over all tokens of the micro batches, without gradients or dropout.

        The stepper must take each micro batch only when it computes it next, and the same number on every rank. If the
        run is asked to stop, the host ends the sequence early, on all ranks after the same micro batch, and ignores the
        result.
        """


class ForwardStepper(Stepper, Protocol):
    """A stepper that also returns what forward passes compute: the host's own, and those of pipelines."""

    def outputs(self, micro_batches: Iterable[RankBatch]) -> "list[Mapping[str, Tensor]]":
        """The activations that the last unit returns for each micro batch, without gradients or dropout.

        Of a divided model, ranks without the last unit return an empty list. Called if the plan recalls entries
        (`Plan.recalled`), which no strategy with a stepper of its own in `build_stepper` supports, and by commands.
        """
