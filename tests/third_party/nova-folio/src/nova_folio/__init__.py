"""Folio: a model as a folder of plain arrays, one for each parameter, with a page that describes them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mplug import UsageError
from mplug_pretrained import DescribedModel, Format, PublicSettings
from nova_folio.page import PAGE, read_page

if TYPE_CHECKING:
    from mplug import Model, Run, RunConfig
    from mplug_pretrained import Export, ExportOptions, ForeignCheckpoint


class Folio(Format):
    """The tensors have the names of mplug's parameters, and the page names the family."""

    def describe(self, folder: Path) -> DescribedModel:
        """The family that the page names."""
        return DescribedModel(folder / PAGE, family=read_page(folder).family)

    def settings(self, folder: Path, family: type[Any]) -> PublicSettings:
        """The settings of the page, which are all needed."""
        settings = read_page(folder).settings
        if unknown := sorted(settings.keys() - family.Config.model_fields.keys()):
            raise ValueError(f"its setting '{unknown[0]}' is unknown to the family")
        return PublicSettings(settings)

    def form_of(self, config: "RunConfig") -> str:
        """Every model has this form."""
        return f"{PAGE} and an array for each parameter"

    def open(self, folder: Path) -> "ForeignCheckpoint":
        """The arrays of a folder."""
        from nova_folio.arrays import Arrays  # imports torch

        return Arrays(folder)

    def export(self, run: "Run", model: "Model", options: "ExportOptions") -> "Export":
        """An array for each parameter."""
        from nova_folio.arrays import ArraysOfRun  # imports torch

        if options.dtype not in (None, "float32"):
            raise UsageError("a folio has arrays of float32 only; leave --dtype out")
        return ArraysOfRun(run, model)
