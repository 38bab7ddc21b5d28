"""What the host asks about the weights and adapters of a run (`mplug.training.beginnings.Beginnings`)."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mplug.config.sources import Settings
from mplug.errors import UsageError, some_names
from mplug.registry.entry_points import Registry
from mplug_pretrained.fine_tuning import fine_tuning_line, with_fine_tuning
from mplug_pretrained.folder_settings import with_public_settings
from mplug_pretrained.formats import format_named, format_of, is_public
from mplug_pretrained.part_settings import with_part_settings

if TYPE_CHECKING:
    from mplug.config.binding import RunConfig
    from mplug.contracts.optimizer import Piece
    from mplug.model.model import Model
    from mplug.run.run import Run
    from mplug.training.beginnings import Loaded
    from mplug_pretrained.part_folders import PartFolders


class Beginnings:
    """The class of the entry-point group 'mplug.beginnings'."""

    def settings(self, registry: Registry, base: Settings, overrides: Settings) -> tuple[Settings, Settings]:
        """The defaults of fine-tuning, and what published folders describe.

        A published folder of a whole model decides the section 'model'; folders of parts decide the sections of these.
        """
        base = with_fine_tuning(registry, base, overrides)
        base, overrides = with_public_settings(registry, base, overrides)
        return base, with_part_settings(registry, base, overrides)

    def about_config(self, config: "RunConfig") -> list[str]:
        """The defaults of fine-tuning that the run has."""
        return list(filter(None, [fine_tuning_line(config)]))

    def is_published(self, folder: Path) -> bool:
        """Whether an installed format recognises a folder."""
        return is_public(folder)

    def source(self, run: "Run") -> str:
        """The folders, in quotes."""
        from mplug_pretrained.weights import pretrained_of

        return words_of(pretrained_of(run)) or ""

    def check(self, run: "Run", model: "Model", is_new: bool, is_reader: bool) -> tuple[str | None, list[str]]:
        """Compare headers and manifests with the model; say what differs, and what an export will refuse."""
        from mplug_pretrained.adapter_files import refuse_other_adapters, unpublished
        from mplug_pretrained.weights import pretrained_of, refuse_another_model

        pretrained = pretrained_of(run) if is_reader and is_new else None
        if pretrained is not None:
            refuse_another_model(pretrained, model, run.config.checkpoint.pretrained)
        if is_new:
            refuse_other_adapters(model)
        lines = [] if pretrained is None else about_weights(run, model, pretrained)
        if model.adapters is not None and (lost := unpublished(model)):
            lines.append(f"'mplug checkpoint export --to {model.adapters.format}' will refuse this run: {lost}")
        return words_of(pretrained), lines

    def load(self, run: "Run", model: "Model", pieces: "list[Piece]") -> "Loaded":
        """Load the weights, then the adapters."""
        from mplug.training.beginnings import Loaded
        from mplug_pretrained.adapter_files import load_adapters
        from mplug_pretrained.weights import keep_original, load_weights, newest_pretrained

        path, loaded = newest_pretrained(run), Loaded()
        if path is not None:
            weights = load_weights(run, model, pieces, path)
            lines = weights.lines("beginning with the weights of")
            loaded = Loaded(str(weights.path), tuple(lines), partial(keep_original, run, weights))
        load_adapters(run, model, pieces)
        return loaded


def words_of(pretrained: "Path | PartFolders | None") -> str | None:
    """The folders for a message."""
    return f"'{pretrained}'" if isinstance(pretrained, Path) else None if pretrained is None else str(pretrained)


def about_weights(run: "Run", model: "Model", pretrained: "Path | PartFolders") -> list[str]:
    """Lines about the settings of the model that differ from those of the run whose weights the run begins with.

    A run that begins with a published model also states if it cannot be published again. UsageError if the run would
    load adapters that compute something else in it.
    """
    from mplug_pretrained.other_settings import other_model_settings, refuse_other_adapters
    from mplug_pretrained.public_load import KEPT, left_out
    from mplug_pretrained.weights import has_adapters
    from mplug_saving.folder import read_manifest

    if not isinstance(pretrained, Path):
        anew = left_out(pretrained, model, run.config.checkpoint.pretrained)
        names = {found.name for path in pretrained.paths.values() if (found := format_of(path)) is not None}
        about = [line for name in sorted(names) for line in about_export(run, name)]
        return [*([f"{some_names(anew)} have initial values, because no folder has them"] if anew else []), *about]
    found = format_of(pretrained)
    if found is not None:
        return about_export(run, found.name)
    manifest = read_manifest(pretrained)
    if has_adapters(pretrained, model, run.config.checkpoint.pretrained):
        refuse_other_adapters(pretrained, manifest, run.config)
    other = other_model_settings(manifest, run.config)
    kept = pretrained.parent.parent / KEPT
    formats = sorted(path.name for path in kept.iterdir()) if kept.is_dir() else []
    return [
        *(f"the run of the weights had other settings: {line}" for line in other),
        *(line for name in formats for line in about_export(run, name)),
    ]


def about_export(run: "Run", name: str) -> list[str]:
    """A line that says why the run's model cannot be exported in a format; none if it can."""
    try:
        format_named(name).ask("form_of", run.config)
    except UsageError as reason:
        return [f"'mplug checkpoint export --to {name}' will refuse this run: {reason}"]
    return []
