"""Real runs of a few steps in a folder, through the training loop, recorded by an observer."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mplug.registry.hooks import HOST
from mplug.registry.implementation import hookimpl
from mplug.run.prepare import prepare
from mplug_testing.harness import as_rank

if TYPE_CHECKING:
    from torch import Tensor

    from mplug.config.binding import RunConfig
    from mplug.contracts.stepper import Record
    from mplug.model.model import Model
    from mplug.run.run import Run


class PlannedFailure(Exception):
    """Ends a run that a suite lets fail."""


@dataclass
class Witness:
    """An observer that records a run, and ends it at step `fails_at`.

    `figures` are (loss, gradient norm) of every step, `saved` the checkpoints, `weights` this rank's weights at the
    end.
    """

    fails_at: int | None = None
    figures: dict[int, tuple[float, float]] = field(default_factory=dict)
    saved: list[Path] = field(default_factory=list)
    weights: "dict[str, Tensor]" = field(default_factory=dict)
    _model: Any = None

    @property
    def losses(self) -> list[float]:
        """The loss of every step."""
        return [loss for loss, _ in self.figures.values()]

    @hookimpl
    def wrap_model(self, model: "Model") -> None:
        """Keep the model for its weights; fail before the first step if `fails_at` is 0."""
        self._model = model
        if self.fails_at == 0:
            raise PlannedFailure("the run was to fail while it is built")

    @hookimpl
    def step_started(self, run: "Run") -> None:
        """Fail if this is step `fails_at`."""
        if run.step == self.fails_at:
            raise PlannedFailure(f"step {run.step} was to fail")

    @hookimpl
    def step_finished(self, record: "Record") -> None:
        """Keep the step's figures."""
        self.figures[record["step"]] = (record["loss"], record["grad_norm"])

    @hookimpl
    def checkpoint_saved(self, path: Path) -> None:
        """Keep the path."""
        self.saved.append(path)

    @hookimpl
    def run_finished(self) -> None:
        """Copy the weights, and release the model."""
        self.weights = {name: weight.detach().clone() for name, weight in self._model.parameters().items()}
        self._model = None


def trained(
    config: "RunConfig",
    directory: Path,
    *,
    resume_from: Path | None = None,
    allowed: tuple[str, ...] = (),
    fails_at: int | None = None,
) -> Witness:
    """Train to the config's last step, or until step `fails_at` (0: during the build).

    `allowed` are fields that may differ from those of the checkpoint to resume from. This process is a rank of torch's
    default process group, if that exists. The host also writes its metrics, as in a run that a user starts.
    """
    from contextlib import suppress

    from mplug.model.build import choose_device
    from mplug.training.loop import train
    from mplug.training.metrics_writer import MetricsFile

    witness = Witness(fails_at)
    run = as_rank(prepare(config, {f"{HOST}metrics": MetricsFile(), f"{HOST}witness": witness}, directory))
    run.device = choose_device(config)
    with suppress(PlannedFailure):
        train(run, resume_from, allowed=allowed)
    return witness
