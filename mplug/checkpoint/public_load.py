"""Load the weights of a folder of a format into the model of a run: each rank reads the boxes that it holds."""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mplug.checkpoint.adapter_files import fill_adapters
from mplug.checkpoint.copies import refuse_other_copies
from mplug.checkpoint.foreign_match import needed_of
from mplug.checkpoint.published import FolderWeights, PublishedFolder
from mplug.checkpoint.rank_exchanges import from_rank, raise_alike
from mplug.checkpoint.transfer import fill_ours
from mplug.checkpoint.wanted import FIELD, Wanted, wanted_of
from mplug.config.host_sections import Pretrained
from mplug.contracts import Piece
from mplug.errors import RunError, UsageError
from mplug.gradients.region import region
from mplug.layout.placement import Placement
from mplug.model.model import Model
from mplug.model.pieces import Held, held_values, write_weights
from mplug.registry.formats import format_of
from mplug.run.run import Run

KEPT = "published"
"""The folder of a run with what a format needs beside the weights for an export, in a folder of the format's name."""


@dataclass(frozen=True)
class Begun:
    """A published checkpoint, of the format `name`, whose weights a run has loaded."""

    path: Path
    name: str
    weights: FolderWeights

    def lines(self, use: str = "") -> list[str]:
        """Nothing to print: no checkpoint was skipped."""
        return []

    def keep(self, directory: Path) -> None:
        """Keep in the folder of the run what an export needs beside the weights."""
        self.weights.keep(directory / KEPT / self.name)


def carry_kept(source: Path, directory: Path) -> None:
    """Copy what another run has kept into the folder of a run that begins with its weights."""
    if source.is_dir():
        shutil.copytree(source, directory / KEPT, dirs_exist_ok=True)


def open_published(path: Path) -> tuple[str, PublishedFolder]:
    """(the name of its format, a folder that an installed format recognises)."""
    found = format_of(path)
    if found is None:
        raise UsageError(f"no installed format reads '{path}' any more; was it changed?")
    folder: PublishedFolder = found.format.open_published(path)
    return found.name, folder


def _checked(folder: PublishedFolder, model: Model, section: Pretrained | None) -> tuple[FolderWeights, Wanted]:
    weights = folder.weights(model)
    wanted = wanted_of(section, model.plan, sorted(needed_of(model)), weights.present)
    weights.refuse_other_model(f"{FIELD} '{folder.path}'", wanted)
    return weights, wanted


def refuse_other_model(path: Path, model: Model, section: Pretrained | None) -> None:
    """Raise UsageError unless a folder fits the whole model. Reads headers only.

    The values of tensors that must be equal are compared while they are read (`load_public`).
    """
    _checked(open_published(path)[1], model, section)


def load_public(run: Run, model: Model, pieces: Iterable[Piece], path: Path) -> Begun:
    """Load a published checkpoint into a new run. Collective: rank 0 reads the headers for all ranks.

    No rank holds more than its own parts and one box of a public tensor.
    """
    pieces = list(pieces)
    name, weights = _load(run, model, held_values(model, pieces), path)
    write_weights(pieces)
    model.weights_written()
    return Begun(path, name, weights)


def load_public_for_inference(run: Run, model: Model, path: Path) -> None:
    """Load a published checkpoint into a model that has memory, and neither gradients nor an optimizer. Collective.

    Adapters get the values of the folder that they name. UsageError if they name none.
    """
    held = weights_of(model)
    _load(run, model, held, path)
    if not fill_adapters(run, model, held) and model.attached:
        raise UsageError(
            f"the adapters of this run name no folder with trained ones, and '{path}' has the base model alone; name "
            f"the folder ('path' of the adapters), or leave the adapters out"
        )
    model.weights_written()


def weights_of(model: Model) -> list[Held]:
    """The values of all parameters of this rank, in a model without an optimizer."""
    return [Held(name, one.data, model.placements[name]) for name, one in model.parameters().items()]


def _load(run: Run, model: Model, held: Iterable[Held], path: Path) -> tuple[str, FolderWeights]:
    opened, error = None, None
    if run.rank == 0:
        try:
            opened = open_published(path)
        except (UsageError, RunError) as raised:
            error = raised
    raise_alike(run, error)
    opened = from_rank(run, 0, opened)
    assert opened is not None
    name, folder = opened
    weights: FolderWeights | None = None
    try:
        weights = fill_from(folder, run, model, held)
    except (UsageError, RunError) as raised:
        error = raised
    raise_alike(run, error)
    assert weights is not None
    return name, weights


def fill_from(folder: PublishedFolder, run: Run, model: Model, held: Iterable[Held]) -> FolderWeights:
    """Fill the values and states of this rank from a folder. The ranks do not communicate."""
    weights, wanted = _checked(folder, model, run.config.checkpoint.pretrained)
    states = [(name, state, model.buffer_placements[name]) for name, state in model.states().items()]
    values: list[tuple[str, Tensor, Placement]] = [(one.name, one.values, one.placement) for one in held]
    with weights:
        for name, tensor, placement in [*values, *states]:
            links = weights.links.get(name, ()) if name in wanted.names else ()
            copies = weights.copies(name, wanted)
            for box in placement.boxes(run.rank) if links else ():
                fill_ours(links, box.start, region(tensor, box), weights.read)
                refuse_other_copies(f"{FIELD} '{folder.path}'", weights, name, copies, box)
    return weights
