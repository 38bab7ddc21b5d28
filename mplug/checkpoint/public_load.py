"""Load the weights of a published checkpoint into the model of a run: each rank reads the boxes that it holds."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mplug.checkpoint.copies import refuse_other_copies
from mplug.checkpoint.public_folder import PublicFolder, open_public
from mplug.checkpoint.public_weights import PublicWeights, conversion
from mplug.checkpoint.published import keep_published
from mplug.checkpoint.rank_exchanges import from_rank, raise_alike
from mplug.checkpoint.transfer import fill_ours
from mplug.checkpoint.wanted import FIELD, Wanted, wanted_of
from mplug.config.host_sections import Pretrained
from mplug.config.public import CONFIG
from mplug.contracts import Piece
from mplug.errors import RunError, UsageError
from mplug.gradients.region import region
from mplug.layout.placement import Placement
from mplug.model.model import Model
from mplug.model.pieces import Held, held_values, write_weights
from mplug.run.run import Run

ADAPTERS = "adapter_config.json"
"""The file of PEFT that says that a folder has adapters."""


@dataclass(frozen=True)
class Begun:
    """A published checkpoint whose weights a run has loaded."""

    path: Path
    weights: PublicWeights

    def lines(self, use: str = "") -> list[str]:
        """Nothing to print: no checkpoint was skipped."""
        return []

    def keep(self, directory: Path) -> None:
        """Keep in the folder of the run what an export needs beside the weights."""
        keep_published(self.path, self.weights.kept(), directory)


def _refuse_adapters(path: Path, model: Model) -> None:
    """Raise UsageError if a folder has adapters that the run would not apply."""
    own = model.adapters.path if model.adapters is not None else None
    if (path / ADAPTERS).exists() and (own is None or own.resolve() != path.resolve()):
        raise UsageError(
            f"{FIELD} '{path}' has '{ADAPTERS}' beside {CONFIG}: adapters, which would not be applied to the model; "
            f"move them to a folder of their own, and name it in the settings of the plugin that reads adapters"
        )


def _checked(folder: PublicFolder, model: Model, section: Pretrained | None) -> tuple[PublicWeights, Wanted]:
    made = conversion(model)
    weights = PublicWeights(folder, made)
    names = {*made.links, *made.absent}
    wanted = wanted_of(section, model.plan, sorted(names), weights.stored)
    weights.refuse_other_model(f"{FIELD} '{folder.path}'", wanted)
    return weights, wanted


def refuse_other_model(path: Path, model: Model, section: Pretrained | None) -> None:
    """Raise UsageError unless a folder fits the whole model. Reads headers only.

    The values of tensors that must be equal are compared while they are read (`load_public`).
    """
    _refuse_adapters(path, model)
    _checked(open_public(path), model, section)


def load_public(run: Run, model: Model, pieces: Iterable[Piece], path: Path) -> Begun:
    """Load a published checkpoint into a new run. Collective: rank 0 reads the headers for all ranks.

    No rank holds more than its own parts and one box of a public tensor.
    """
    pieces = list(pieces)
    weights = _load(run, model, held_values(model, pieces), path)
    write_weights(pieces)
    model.weights_written()
    return Begun(path, weights)


def load_public_for_inference(run: Run, model: Model, path: Path) -> None:
    """Load a published checkpoint into a model that has memory, and neither gradients nor an optimizer."""
    _load(run, model, weights_of(model), path)


def weights_of(model: Model) -> list[Held]:
    """The values of all parameters of this rank, in a model without an optimizer."""
    return [Held(name, one.data, model.placements[name]) for name, one in model.parameters().items()]


def _load(run: Run, model: Model, held: Iterable[Held], path: Path) -> PublicWeights:
    folder, error = None, None
    if run.rank == 0:
        try:
            folder = open_public(path)
        except (UsageError, RunError) as raised:
            error = raised
    raise_alike(run, error)
    folder = from_rank(run, 0, folder)
    assert folder is not None
    weights: PublicWeights | None = None
    try:
        weights = fill_from(folder, run, model, held)
    except (UsageError, RunError) as raised:
        error = raised
    raise_alike(run, error)
    assert weights is not None
    return weights


def fill_from(folder: PublicFolder, run: Run, model: Model, held: Iterable[Held]) -> PublicWeights:
    """Fill the values and states of this rank from a folder. The ranks do not communicate."""
    weights, wanted = _checked(folder, model, run.config.checkpoint.pretrained)
    states = [(name, state, model.buffer_placements[name]) for name, state in model.states().items()]
    values: list[tuple[str, Tensor, Placement]] = [(one.name, one.values, one.placement) for one in held]
    with weights:
        for name, tensor, placement in [*values, *states]:
            links = weights.conversion.links.get(name, ()) if name in wanted.names else ()
            copies = weights.copies(name, wanted)
            for box in placement.boxes(run.rank) if links else ():
                fill_ours(links, box.start, region(tensor, box), weights.read)
                refuse_other_copies(f"{FIELD} '{folder.path}'", weights, name, copies, box)
    return weights
