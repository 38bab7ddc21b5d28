"""Start a run with the weights of another run's checkpoint, or of a published one (`checkpoint.pretrained`)."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from mplug.config.sources import source_of
from mplug.contracts.optimizer import Piece
from mplug.errors import UsageError, counted
from mplug.registry.stores import local_path
from mplug.run.run import Run
from mplug_pretrained.formats import is_public
from mplug_pretrained.part_folders import WHOLE, PartFolders
from mplug_pretrained.wanted import FIELD, Wanted, wanted_of
from mplug_saving.folder import complete, read_manifest
from mplug_saving.index import refuse_larger, shapes_of, weights_in
from mplug_saving.names import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mplug.config.host_sections import Pretrained
    from mplug.model.model import Model
    from mplug_pretrained.public_load import LoadedFolder
    from mplug_saving.newest_valid import AgreedCheckpoint


def pretrained_of(run: Run) -> Path | PartFolders | None:
    """The checkpoint with which a new run begins, by manifests alone: the newest valid one if the config names a run.

    None if `checkpoint.pretrained` is null. Raises UsageError if there is no such checkpoint.
    """
    path = newest_pretrained(run)
    if path is None or isinstance(path, PartFolders) or not _is_of_named_run(run, path):
        return path
    from mplug_saving.newest_valid import newest_readable  # imports pydantic

    return newest_readable(path.parent).path


def newest_pretrained(run: Run) -> Path | PartFolders | None:
    """The checkpoint that `checkpoint.pretrained` names by its folder or the folder of its run; None if it is null.

    It may be the folder of a published checkpoint. If the path is the folder of a run, the answer is its newest
    complete checkpoint, which may be damaged. Raises UsageError if there is no such checkpoint.
    """
    section = run.config.checkpoint.pretrained
    if section is None:
        return None
    parts = {part: local_path(path) for part, path in section.parts.items()}
    if section.path is None:
        return PartFolders(parts)
    folder = local_path(section.path)
    if parts:
        if not is_public(folder):
            raise UsageError(
                f"{FIELD}.parts is beside '{section.path}', which no installed format reads; use a published folder "
                f"for both (a run of mplug is exported to one by 'mplug checkpoint export')"
            )
        return PartFolders({WHOLE: folder, **parts})
    if is_public(folder):
        return folder
    if os.path.lexists(folder / MANIFEST):
        return folder.resolve() if folder.is_symlink() else folder  # the user may name a link
    paths = complete(folder / "checkpoints")
    if not paths:
        source = source_of(run.config.settings, ("checkpoint", "pretrained"))
        if not folder.exists():
            raise UsageError(
                f"{FIELD} ({source}): '{section.path}' does not exist; mplug downloads nothing: use a "
                f"folder on this machine, of a published checkpoint, a run or a checkpoint"
            )
        raise UsageError(
            f"{FIELD} ({source}): '{section.path}' is not a checkpoint or the folder of a run with one, and no "
            f"installed format reads it; use a folder of one of these"
        )
    return paths[-1]


def _is_of_named_run(run: Run, path: Path) -> bool:
    """Whether the config names the run of a checkpoint, and not the checkpoint itself."""
    given = run.config.checkpoint.pretrained
    return given is not None and given.path is not None and path.parent == local_path(given.path) / "checkpoints"


def _remedy(path: Path) -> str:
    """How to train the model of a checkpoint: the config of its run, if the run's folder has one."""
    config = path.parent.parent / "config.yaml"
    if not config.is_file():
        return "use a checkpoint of this model"
    return f"use the settings of its own model (mplug train {config} ...)"


def refuse_another_model(path: Path | PartFolders, model: "Model", section: "Pretrained | None" = None) -> None:
    """Raise UsageError unless the checkpoint has the wanted parameters, by name and logical shape, and no others.

    `section` says what is wanted; None: all parameters. Folders of parts must have those of their part.
    """
    if isinstance(path, PartFolders) or is_public(path):
        from mplug_pretrained.public_load import refuse_other_model  # imports torch

        refuse_other_model(path, model, section)
        return
    saved = weights_in(shapes_of(read_manifest(path)))
    wanted = _wanted(section, model, saved)
    attached = tuple(f"{name}." for name in model.attached)  # adapters begin anew if the checkpoint has none
    missing = [
        name
        for name in model.placements
        if name in wanted.names and name not in saved and not (attached and name.startswith(attached))
    ]
    if missing:
        rest = f" and {counted(len(missing) - 1, 'other parameter')}" if len(missing) > 1 else ""
        raise UsageError(
            f"{FIELD} '{path}' has no parameter '{missing[0]}'{rest} of the model; {_remedy(path)}, or name "
            f"{'them' if rest else 'it'} in {FIELD}.except"
        )
    for name, placement in model.placements.items():
        if name in wanted.names and saved.get(name, placement.shape) != placement.shape:
            raise UsageError(
                f"{FIELD} '{path}' has '{name}' with shape {saved[name]}, but the model has "
                f"{placement.shape}; use the model config of the checkpoint"
            )
    refuse_larger(f"{FIELD} '{path}'", (name for name in saved if not wanted.allows(name)), model)


def has_adapters(path: Path, model: "Model", section: "Pretrained | None" = None) -> bool:
    """Whether a new run would load adapters from the checkpoint of another run."""
    if is_public(path) or not model.attached:
        return False
    saved = weights_in(shapes_of(read_manifest(path)))
    attached = tuple(f"{name}." for name in model.attached)
    return any(name in saved and name.startswith(attached) for name in _wanted(section, model, saved).names)


def load_weights(
    run: Run, model: "Model", pieces: list[Piece], path: Path | PartFolders
) -> "AgreedCheckpoint | LoadedFolder":
    """Load the weights and module states of a checkpoint, or of a published one, into the model of a new run.

    The states that kernels keep (`Offer.buffers`) start anew: the run that saved the checkpoint may have other kernels.
    If the config names the checkpoint's run and the checkpoint is not valid, load the newest valid one before it.
    """
    from mplug.model.pieces import held_values, write_weights
    from mplug_saving.boxes import State, buffer_boxes, held_boxes
    from mplug_saving.newest_valid import AgreedCheckpoint, choose
    from mplug_saving.opened import open_together
    from mplug_saving.saver import load
    from mplug_saving.verified import Verified

    if isinstance(path, PartFolders) or is_public(path):
        from mplug_pretrained.public_load import load_public

        return load_public(run, model, pieces, path)
    verified = Verified()
    if _is_of_named_run(run, path):
        choice = choose(run, path, verified)
    else:
        opened = open_together(run, path)
        choice = AgreedCheckpoint(path, opened.facts, opened=opened)
    index, averages = choice.opened.index, run.config.trainer.eval_averages
    state: State = {
        index.values_of(held.name, averages): held_boxes(held.placement, held.values, run.rank)
        for held in held_values(model, pieces)
    }
    fresh = {f"{one.full_name(name)}/buffer" for one in model.slot_buffers for name in one.declared}
    states = buffer_boxes(model, run.rank, held_boxes)
    state |= {name: boxed for name, boxed in states.items() if name not in fresh}
    shapes = index.shapes
    attached = tuple(f"{name}." for name in model.attached)
    if attached:
        state = {name: boxed for name, boxed in state.items() if not name.startswith(attached) or name in shapes}
    section = run.config.checkpoint.pretrained
    if section is not None and (section.only is not None or section.excluded):
        wanted = _wanted(section, model, weights_in(shapes))
        state = {name: boxed for name, boxed in state.items() if name.rpartition("/")[0] in wanted.names}
    load(run, choice.opened, state, verified)
    write_weights(pieces)
    model.weights_written()
    return choice


def _wanted(section: "Pretrained | None", model: "Model", saved: "Iterable[str]") -> Wanted:
    """What to load of the parameters and states of the model from a checkpoint with the parameters `saved`."""
    states = [name for name, one in model.buffer_placements.items() if not one.parameter.over]
    return wanted_of(section, model.plan, [*model.placements, *states], saved)


def keep_original(run: Run, loaded: "AgreedCheckpoint | LoadedFolder") -> None:
    """Rank 0 keeps in the run's folder what an export needs of the published checkpoint that the weights come from."""
    from mplug_pretrained.public_load import KEPT, LoadedFolder, carry_kept

    assert run.directory is not None
    if run.rank != 0:
        return
    if isinstance(loaded, LoadedFolder):
        loaded.keep(run.directory)
    else:
        carry_kept(loaded.path.parent.parent / KEPT, run.directory)
