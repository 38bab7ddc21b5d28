"""What some steps need beside losses and gradients, and what the host asks of the package that has it.

`NoReduction`, `NoStatistics` and `NoTokenScale` are for runs that need none; the package derives its own from them.
"""

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from mplug.contracts.micro_batch import RankBatch
from mplug.contracts.optimizer import Piece
from mplug.contracts.stepper import Stepper
from mplug.layout.placement import Placement
from mplug.model.model import Model
from mplug.model.products import slot_updates
from mplug.model.seeds import Seeds
from mplug.registry.provided import needed
from mplug.run.run import Run
from mplug.tensors.host_buffers import host_buffers


class NoReduction:
    """Finishes the gradients of a run of one process: none is partial.

    `sums` are exchanges, with the gradients of this rank that each sums.
    """

    def __init__(self) -> None:
        self.sums: list[tuple[Any, list[Tensor]]] = []

    def finish(self) -> None:
        """Sum the gradients that are still partial, and wait for the sums."""


class NoStatistics:
    """The statistics of a model whose modules count nothing in a step.

    `totals` are the whole statistics of the step by the names of the buffers, after `finish`.
    """

    totals: Mapping[str, Tensor] = {}

    def begin_step(self) -> None:
        """Set this rank's sums to zero, and its maxima to their initial values."""

    def finish(self, num_targets: Tensor, num_tokens: Tensor) -> dict[str, Tensor]:
        """Replace this rank's buffers by the values over all ranks; returns the statistics as reported."""
        return {}

    def tell(self, skip: Tensor) -> None:
        """Update states from the step's statistics. With `skip` = 1, the states must stay as they are."""


class NoTokenScale:
    """The factor of losses that are means over tokens, in a model without such losses.

    `is_missing` says that losses of this step need the factor, and that it is not known yet. `loss_scale` [] is the
    factor by which the model's loss is multiplied before backward, or None for 1.
    """

    is_missing = False

    def __init__(self, loss_scale: Tensor | None) -> None:
        self.loss_scale = loss_scale

    def begin_step(self) -> None:
        """Forget the last step's factor."""

    def read(self, micro_batches: Iterable[RankBatch]) -> Iterable[RankBatch]:
        """The step's micro batches; if a loss needs the factor, all of them are read here, and it is set. Collective.

        The CPU does not wait for the device.
        """
        return micro_batches

    def count(self, batches: list[RankBatch]) -> None:
        """Write the counts of a step's micro batches to the device, if a loss needs the factor."""

    def set(self) -> None:
        """Set the factor, if a loss needs it, from the counts of the ranks that train one model.

        Collective; a CUDA graph can replay it.
        """


class ScalesLosses(Protocol):
    """The dynamic loss scale of a run, on the device; equal on every rank."""

    scale: Tensor
    overflows: Tensor
    """The number of steps that have overflowed so far."""

    def gradient_of(self, loss: Tensor) -> Tensor:
        """The gradient with which backward starts: the scale, in the loss's precision."""

    def failed(self, overflow: Tensor) -> Tensor:
        """Whether gradients overflow although the scale is at its minimum."""

    def update(self, overflow: Tensor, halted: Tensor) -> None:
        """Adapt the scale after a step. `overflow` [] and `halted` [] are booleans; `halted` freezes all values."""

    def state_dict(self) -> dict[str, Any]:
        """The state, for checkpoints."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with a saved state."""


class Steps(Protocol):
    """The methods of the class in the entry-point group 'mplug.steps'."""

    def reduction(
        self, run: Run, placements: Mapping[str, Placement], reduced_over: Collection[str], pieces: list[Piece]
    ) -> NoReduction:
        """What sums, by placement, the gradients that no strategy has summed (`reduced_over`). For several ranks."""

    def deterministic(self) -> AbstractContextManager[None]:
        """A block in which torch gives the same bits for the same computation (`trainer.deterministic`)."""

    def seeds(self, run: Run, model: Model, drawing: str) -> Seeds:
        """What seeds torch's generators; `drawing` is the label of a plugin that draws from them, or ''."""

    def statistics(self, run: Run, model: Model) -> NoStatistics:
        """The statistics of a model with some. Collective."""

    def token_scale(self, run: Run, module: nn.Module, loss_scale: Tensor | None) -> NoTokenScale:
        """The factor of losses that are means over tokens, which a module of some rank has."""

    def loss_scale(self, run: Run, module: nn.Module) -> ScalesLosses:
        """The loss scale of a run whose precision scales losses."""

    def repeating(self, run: Run, model: Model, stepper: Stepper) -> Stepper:
        """The stepper that runs passes again which were not exact (`build_step_check`)."""

    def rerunning(self, run: Run, model: Model, stepper: Stepper) -> Stepper:
        """The stepper that can run the passes of the last steps again (`explain_nonfinite`).

        Its methods `batches(step)` and `rerun(step)` return micro batches and run the passes.
        """


def _needed(what: str) -> Steps:
    found: Steps = needed("steps", what, "mplug-steps")
    return found


def reduction_of(run: Run, model: Model, pieces: list[Piece]) -> NoReduction:
    """What finishes the gradients of a step."""
    if run.groups is None:
        return NoReduction()
    found = _needed("a run of several processes (--parallel)")
    return found.reduction(run, model.placements, model.sinks.reduced_over, pieces)


def statistics_of(run: Run, model: Model) -> NoStatistics:
    """The statistics of a model. Collective."""
    counts = any(one.is_statistic for one in model.plan.buffers.values())
    learns = any(hasattr(part, "step_ended") for part in model.module.modules())
    if not any(run.gathered(counts or learns or bool(slot_updates(model)))):
        return NoStatistics()
    return _needed("statistics of the model's modules").statistics(run, model)


def token_scale_of(run: Run, module: nn.Module, loss_scale: Tensor | None) -> NoTokenScale:
    """The factor of losses that are means over tokens. Collective: stages without such losses take part in counts."""
    if not any(run.gathered(bool(host_buffers(module, "token scale")))):
        return NoTokenScale(loss_scale)
    return _needed("losses that are means over tokens").token_scale(run, module, loss_scale)


def loss_scale_of(run: Run, module: nn.Module) -> ScalesLosses | None:
    """The loss scale of a run; None if its precision does not scale the loss."""
    if run.precision.loss_scaling != "dynamic":
        return None
    return _needed(f"trainer.precision={run.config.trainer.precision}, which scales losses").loss_scale(run, module)


def repeating(run: Run, model: Model, stepper: Stepper) -> Stepper:
    """The stepper with the checks of the hook `build_step_check`, if a plugin may have some."""
    owners = run.hooks.implementers("build_step_check")
    return _needed(f"the checks of {owners[0]}").repeating(run, model, stepper) if owners else stepper


def rerunning(run: Run, model: Model, stepper: Stepper) -> Stepper:
    """The stepper with `rerun`, if a plugin explains steps that are not finite."""
    owners = run.hooks.implementers("explain_nonfinite")
    return _needed(owners[0]).rerunning(run, model, stepper) if owners else stepper
