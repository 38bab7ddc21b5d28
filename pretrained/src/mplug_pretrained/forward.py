"""The start of commands that run a saved model forward: its weights, its batches, and the processes of the layout."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mplug.config.sources import Settings, merge, read_assignments
from mplug.contracts.optimizer import AVERAGE
from mplug.distributed.world import World
from mplug.errors import UsageError
from mplug.layout.mesh import Mesh
from mplug.registry.entry_points import Registry
from mplug.registry.resolve import resolve
from mplug.run.launching import Stopped, launch
from mplug.run.run import Run
from mplug.training.job import settle
from mplug_pretrained.folder_settings import longest_sequence
from mplug_pretrained.formats import is_public
from mplug_saving.folder import at_step, read_manifest
from mplug_saving.newest_valid import choose
from mplug_saving.verified import Verified

if TYPE_CHECKING:
    from mplug.model.model import Model


@dataclass(frozen=True)
class SavedModel:
    """The weights that a command runs: a checkpoint of a run, or a published folder. Plain data that can be pickled.

    Files in `verified` are not read again to compare their checksums.
    """

    path: Path
    is_published: bool = False
    verified: Verified | None = None

    @staticmethod
    def of_run(run: Run, directory: Path, step: int | None) -> "tuple[SavedModel, list[str]]":
        """(a checkpoint of a run's folder, lines for the user about newer ones that are not valid).

        It is that of a step, or the newest valid one, whose files this process then reads once.
        """
        path = at_step(directory / "checkpoints", step)
        if step is not None:
            return SavedModel(path), []
        verified = Verified()
        choice = choose(replace(run, mesh=Mesh.of([], 1)), path, verified)
        return SavedModel(choice.path, verified=verified), choice.lines("reading")

    @staticmethod
    def published(folder: Path) -> "SavedModel":
        """A published folder; UsageError if no installed format reads it."""
        if not is_public(folder):
            if not folder.exists():
                raise UsageError(
                    f"--pretrained '{folder}' does not exist; mplug downloads nothing: use a folder on this machine"
                )
            is_run = (folder / "config.yaml").is_file()
            remedy = f"it is a run: use --name {folder.name}" if is_run else "use the folder of a published checkpoint"
            raise UsageError(f"--pretrained '{folder}': no installed format reads it; {remedy}")
        return SavedModel(folder, is_published=True)

    def uses_averages(self, run: Run) -> bool:
        """Whether `load` reads averages of the weights: the checkpoint has some, and `trainer.eval_averages` is on."""
        if self.is_published or not run.config.trainer.eval_averages:
            return False
        return any(name.endswith(f"/{AVERAGE}") for name in read_manifest(self.path)["tensors"])

    def build(self, run: Run) -> "Model":
        """The model on the meta device; UsageError if the folder is that of another model. No rank communicates."""
        from mplug.model.build import build_model
        from mplug_pretrained.public_load import refuse_other_model  # imports torch

        model = build_model(run)
        if self.is_published:
            refuse_other_model(self.path, model, run.config.checkpoint.pretrained)
        return model

    def load(self, run: Run, allocate: "Callable[[Run, Model], None]") -> "Model":
        """The model with its weights. `allocate` gives it memory (`load_for_inference`). Collective."""
        from mplug_pretrained.inference import load_for_inference
        from mplug_pretrained.public_load import load_public_for_inference  # imports torch

        if not self.is_published:
            return load_for_inference(run, self.path, self.verified, allocate)
        model = self.build(run)
        allocate(run, model)
        load_public_for_inference(run, model, self.path)
        return model


def folder_length(folder: Path, base: Settings, overrides: Settings, most: int, unknown: int | None = None) -> Settings:
    """`overrides` with a length of sequences that the model of a published folder supports, and the layout divides.

    It is what the model supports (`unknown` tokens, or `most`, if its family does not know), but at most `most`. A
    length in `overrides` stands.
    """
    if ("trainer", "seq_length") in overrides:
        return overrides
    config = resolve(
        Registry.of_process(), base, merge(read_assignments(["trainer.seq_length=1"], "the command"), overrides)
    )
    degrees = prod(config.parallel.degrees.values())
    length = min(most, longest_sequence(config, folder) or unknown or most)
    own = read_assignments([f"trainer.seq_length={max(length // degrees, 1) * degrees}"], "the command")
    return merge(overrides, own)


def settle_forward(
    base: Settings, overrides: Settings, world: World | None, batch_size: int | None = None
) -> tuple[Run, Settings]:
    """The prepared run of a command that runs forward, and the overrides that produce it.

    `batch_size` is the number of samples of a micro batch; None: that of the run. The global batch size becomes one
    that every number of data-parallel ranks divides.
    """
    config = resolve(Registry.of_process(), base, overrides)
    trainer, ranks = config.trainer, prod(config.parallel.degrees.values()) * (world.size if world else 1)
    size = batch_size or trainer.micro_batch_size or trainer.global_batch_size
    own = [
        f"trainer.micro_batch_size={size}",
        f"trainer.global_batch_size={size * ranks}",
        "schedule.batch_rampup.start=null",
    ]
    return settle(base, merge(overrides, read_assignments(own, "the command")), world)


def run_forward(run: Run, world: World | None, work: Callable[..., Any], *arguments: Any) -> Any:
    """Call `work(*arguments)` in this process, or in processes of the layout that are started here; returns its result.

    Of several processes, the result is that of rank 0. Processes that another launcher has started (`world`) each call
    it themselves, and have their own results. `work` is a function at the top level of its module; it must accept one
    more argument, which `launch` passes. Arguments and result can be pickled.
    """
    if world is not None or run.mesh.world_size == 1:
        return work(*arguments)
    try:
        return launch(run.mesh.world_size, work, *arguments)
    except Stopped as stop:
        raise SystemExit(128 + stop.signal) from None
