"""The hooks of observers. The host calls them on every rank, sorted by name. They read a run and never change it."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from mplug.registry.specification import all_plugins, at_most_one

if TYPE_CHECKING:
    from pathlib import Path

    from mplug.contracts.micro_batch import RankBatch
    from mplug.contracts.optimizer import Optimizer, Piece
    from mplug.contracts.stepper import Record
    from mplug.model.model import Model
    from mplug.run.run import Run


@all_plugins
def activity_began(run: "Run") -> None:
    """The main thread begins `run.activity`: it builds the model, runs a step, evaluates or saves (`mplug.Activity`).

    Called a few times in a step, also before `run_started` and after an error. Return within microseconds.
    """


@all_plugins
def training_built(run: "Run", model: "Model", pieces: "list[Piece]", optimizer: "Optimizer") -> None:
    """Everything that trains has its memory; a checkpoint may be loaded afterwards.

    An observer may keep the objects, read them between two steps, and wrap the method of a unit with which the model
    runs it (`Unit.method`). It must not change a value.
    """


@all_plugins
def training_released(run: "Run") -> None:
    """The run gets another layout: drop all objects of `training_built`, so that their memory is free.

    `training_built` follows, with those of the new layout; after a failure, with those of the old one.
    """


@all_plugins
def run_started(run: "Run") -> None:
    """Everything is built and, if the run resumes, loaded. The first step follows.

    Raise UsageError to refuse the run: the server that the user has named does not accept it, for example. It ends the
    run on every rank.
    """


@all_plugins
def step_started(run: "Run") -> None:
    """The step numbered `run.step` begins; the first is 1."""


@all_plugins
def micro_batch_began(run: "Run", number: int, count: int) -> None:
    """This rank takes its micro batch `number` of the step, from 0 on, out of `count`; 0 if the number is unknown.

    Under a pipeline, its forward pass begins; backward passes of others follow. On a GPU, the CPU is ahead of the
    device. A step that is replayed as a CUDA graph has no such moments. Return within microseconds.
    """


@all_plugins
def step_figures(run: "Run", record: "Record") -> "Mapping[str, float] | None":
    """Further figures for the record of a step, by name, or None.

    Called on every rank before `step_finished`; `record` is this rank's. The plugin may communicate. metrics.jsonl
    holds the figures of rank 0. On a GPU, the host calls this while the next step runs.
    """


@at_most_one
def explain_nonfinite(run: "Run", step: int, batches: "list[RankBatch]", rerun: "Callable[[], None]") -> "str | None":
    """Explain a step whose loss or gradient norm is not finite, in a sentence that the run's error then contains.

    Called on every rank when such a step ends the run (`trainer.nonfinite` is 'stop'), before the error is raised. No
    weight has changed since the step. `batches` are the micro batches that this rank read in the step, and `rerun` runs
    the passes of the step again, with the same collectives; gradients are those of the rerun afterwards. If one rank
    communicates or calls `rerun`, all ranks must. The answer of rank 0 is used.

    A run whose steps are replayed as CUDA graphs, or whose gradients an engine keeps (`Sharding.engine`), is refused.
    """


@all_plugins
def step_finished(run: "Run", record: "Record") -> None:
    """The step numbered `record["step"]` is over. `record` is the step's line of metrics.jsonl.

    On a GPU the host calls this while the next step runs, so `run.step` is one ahead. Before it saves a checkpoint, the
    host reports every step that the checkpoint contains.
    """


@all_plugins
def checkpoint_saved(run: "Run", path: "Path") -> None:
    """A complete checkpoint is visible at `path`; without a shared folder, this machine's part with the manifest."""


@all_plugins
def run_failed(run: "Run", error: BaseException) -> None:
    """The run ends with `error`. Not called for a UsageError."""


@all_plugins
def run_finished(run: "Run") -> None:
    """Training has ended without an error: after the last step, or because a signal or the time limit stopped it."""
