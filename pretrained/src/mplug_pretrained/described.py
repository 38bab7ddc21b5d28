"""What a folder of another software says about its model, as a format (kind `formats`) reads it. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from mplug.config.binding import RunConfig
from mplug.errors import UsageError


@dataclass(frozen=True)
class PublicSettings:
    """The section 'model' that a folder describes.

    `fixed` are the settings that the weights need: a user may not set other values. `free` are choices of training,
    such as dropout: the user's settings override them. `altering` are choices that a user may override too, but that
    change what the trained model computes: its description must then state them, or it cannot be published any more.
    `longest` is the length of the
    longest sequence that the model was made for; None if the folder does not say.
    """

    fixed: Mapping[str, Any]
    free: Mapping[str, Any] = field(default_factory=dict)
    altering: Mapping[str, Any] = field(default_factory=dict)
    longest: int | None = None

    @property
    def choices(self) -> Mapping[str, Any]:
        """What the user's settings override."""
        return {**self.altering, **self.free}


@dataclass(frozen=True)
class DescribedModel:
    """Which model a folder has. `path` is the file that says so, for messages.

    `architectures` are names that families claim (the entry-point group 'mplug.architectures'), the most specific
    first. A format whose folders name the family itself returns this name as `family` instead.
    """

    path: Path
    architectures: tuple[str, ...] = ()
    family: str | None = None


class DescribesModels:
    """The part of a format that a config needs. `Format` adds the part that reads and writes weights."""

    class Config(BaseModel):
        """A format has no settings of its own."""

        model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, config: Config) -> None:
        self.config = config

    def recognises(self, folder: Path) -> bool:
        """Whether a folder is of this format.

        The host asks about folders with one of the files that the distribution names in the entry-point group
        'mplug.format_files' (`"model.json" = "NAME"`, where NAME is the format's own entry point).
        """
        del folder
        return True

    def describe(self, folder: Path) -> DescribedModel:
        """Which model a folder has. UsageError if its description is damaged."""
        raise UsageError(f"'{folder}' does not describe its model; use 'mplug checkpoint import'")

    def settings(self, folder: Path, family: type[Any]) -> PublicSettings | None:
        """The section 'model' of a folder's model, for a family (its plugin class).

        None if the family has nothing to do with this format. ValueError, with one sentence, for a description that
        the family does not support.
        """
        del folder, family
        return None

    def parts_of(self, family: type[Any]) -> tuple[str, ...]:
        """The parts of a family's models that have folders of their own in this format (`Plan.parts`).

        Each is the name of a section of its Config. Families that the family contains (`mplug.Family`) need no mention:
        the host asks for the `settings` of their folders.
        """
        del family
        return ()

    def part_settings(self, folder: Path, family: type[Any], part: str) -> PublicSettings:
        """The settings of a part's section, by the folder of a model that has this part. ValueError as in `settings`.

        The host calls it for the names that `parts_of` returns.
        """
        raise NotImplementedError(f"{type(self).__name__} names '{part}' and does not read '{folder}' for {family}")

    def end_tokens(self, folder: Path) -> frozenset[int]:
        """The tokens that end a text, by the folder; empty if it does not say."""
        del folder
        return frozenset()

    def form_of(self, config: RunConfig) -> str | None:
        """The name of what an export of this run's model writes; None if this format has no form for its family.

        UsageError, with the reason, if the format has a form for the family, and none for this model.
        """
        del config
        return None
