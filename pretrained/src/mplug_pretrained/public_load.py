"""Load the weights of a folder of a format into the model of a run: each rank reads the boxes that it holds."""

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from mplug.config.host_sections import Pretrained
from mplug.contracts.optimizer import Piece
from mplug.errors import RunError, UsageError
from mplug.gradients.region import region
from mplug.layout.placement import Placement
from mplug.model.model import Model
from mplug.model.pieces import Held, held_values, write_weights
from mplug.run.run import Run
from mplug_pretrained.adapter_files import fill_adapters
from mplug_pretrained.copies import refuse_other_copies
from mplug_pretrained.foreign_match import needed_of
from mplug_pretrained.formats import format_of
from mplug_pretrained.part_folders import WHOLE, PartFolders, begun_anew, part_of
from mplug_pretrained.published import FolderWeights, PublishedFolder
from mplug_pretrained.transfer import fill_ours
from mplug_pretrained.wanted import FIELD, Wanted, wanted_of
from mplug_saving.rank_exchanges import from_rank, raise_alike

KEPT = "published"
"""The folder of a run with what a format needs beside the weights for an export, in a folder of the format's name."""


@dataclass(frozen=True)
class LoadedFolder:
    """A published checkpoint, of the format `name`, whose weights a run has loaded; no `weights`: several, of parts."""

    path: Path | PartFolders
    name: str
    weights: FolderWeights | None

    def lines(self, use: str = "") -> list[str]:
        """Nothing to print: no checkpoint was skipped."""
        return []

    def keep(self, directory: Path) -> None:
        """Keep in the folder of the run what an export needs beside the weights: nothing, if they are of parts."""
        if self.weights is not None:
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


Opened = Sequence[tuple[str, PublishedFolder]]
"""Folders with the parts of the model that they are for; the part WHOLE is the model itself."""


@dataclass(frozen=True)
class _Read:
    """A folder's weights for a model or a part of it, with a label for errors."""

    label: str
    weights: FolderWeights
    wanted: Wanted


def _checked(folders: Opened, model: Model, section: Pretrained | None) -> list[_Read]:
    made = []
    for part, folder in folders:
        own = part_of(model, part) if part else model
        label = f"{FIELD}{f'.parts.{part}' if part else ''} '{folder.path}'"
        made.append((label, folder.weights(own), needed_of(own).keys()))
    present = [name for _, weights, _ in made for name in weights.present]
    needed = {*needed_of(model), *(name for _, _, names in made for name in names)}
    wanted = wanted_of(section, model.plan, sorted(needed), present)
    found = [_Read(label, weights, replace(wanted, names=wanted.names & names)) for label, weights, names in made]
    for one in found:
        one.weights.refuse_other_model(one.label, one.wanted)
    return found


def _open_all(path: Path | PartFolders) -> list[tuple[str, str, PublishedFolder]]:
    """(part, name of the format, folder) of each folder."""
    paths = path.paths if isinstance(path, PartFolders) else {WHOLE: path}
    return [(part, *open_published(one)) for part, one in paths.items()]


def refuse_other_model(path: Path | PartFolders, model: Model, section: Pretrained | None) -> None:
    """Raise UsageError unless a folder fits the whole model, or each folder its part. Reads headers only.

    The values of tensors that must be equal are compared while they are read (`load_public`).
    """
    _checked([(part, folder) for part, _, folder in _open_all(path)], model, section)


def left_out(path: PartFolders, model: Model, section: Pretrained | None) -> list[str]:
    """The modules and parameters that keep initial values if parts of the model begin with folders."""
    checked = _checked([(part, folder) for part, _, folder in _open_all(path)], model, section)
    return begun_anew(model, [name for one in checked for name in one.weights.links if name in one.wanted.names])


def load_public(run: Run, model: Model, pieces: Iterable[Piece], path: Path | PartFolders) -> LoadedFolder:
    """Load published checkpoints into a new run. Collective: rank 0 reads the headers for all ranks.

    No rank holds more than its own parts and one box of a public tensor.
    """
    pieces = list(pieces)
    name, weights = _load(run, model, held_values(model, pieces), path)
    write_weights(pieces)
    model.weights_written()
    return LoadedFolder(path, name, weights)


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


def _load(run: Run, model: Model, held: Iterable[Held], path: Path | PartFolders) -> tuple[str, FolderWeights | None]:
    """(the name of the format, its weights) of the folder of a whole model; None if folders have parts of it."""
    opened, error = None, None
    if run.rank == 0:
        try:
            opened = _open_all(path)
        except (UsageError, RunError) as raised:
            error = raised
    raise_alike(run, error)
    opened = from_rank(run, 0, opened)
    assert opened is not None
    read: list[_Read] = []
    try:
        read = _fill([(part, folder) for part, _, folder in opened], run, model, held)
    except (UsageError, RunError) as raised:
        error = raised
    raise_alike(run, error)
    whole = not isinstance(path, PartFolders) or WHOLE in path.paths
    return opened[0][1], read[0].weights if whole else None


def fill_from(folder: PublishedFolder, run: Run, model: Model, held: Iterable[Held]) -> FolderWeights:
    """Fill the values and states of this rank from the folder of a whole model. The ranks do not communicate."""
    return _fill([("", folder)], run, model, held)[0].weights


def _fill(folders: Opened, run: Run, model: Model, held: Iterable[Held]) -> list[_Read]:
    found = _checked(folders, model, run.config.checkpoint.pretrained)
    states = [(name, state, model.buffer_placements[name]) for name, state in model.states().items()]
    values: list[tuple[str, Tensor, Placement]] = [(one.name, one.values, one.placement) for one in held]
    for one in found:
        with one.weights as weights:
            for name, tensor, placement in [*values, *states]:
                links = weights.links.get(name, ()) if name in one.wanted.names else ()
                copies = weights.copies(name, one.wanted)
                for box in placement.boxes(run.rank) if links else ():
                    fill_ours(links, box.start, region(tensor, box), weights.read)
                    refuse_other_copies(one.label, weights, name, copies, box)
    return found
