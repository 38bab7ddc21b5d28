"""The suite for formats: readers and writers of folders of other software.

    from mplug_testing import FormatSuite

    class TestFolio(FormatSuite):
        plugin = "folio"

Its tests export a tiny run and read the folder again, or read the folder that the author names.
"""

from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import SkipTest

from mplug.errors import UsageError
from mplug_pretrained.format import Format
from mplug_pretrained.formats import Found, format_of, load_format
from mplug_testing.harness import installed_plugins, tiny_config
from mplug_testing.suite import Fault, PluginSuite, require, smoke

if TYPE_CHECKING:
    from mplug.model.model import Model

ADAPTED = "it writes adapters alone: test it with the plugin that makes them"


class FormatSuite(PluginSuite):
    """The requirements for a format: what it writes, it reads as the same values, box by box.

    `settings` are those of the run that is exported, or of the model in `folder`.
    """

    kind = "formats"
    folder: ClassVar[str | None] = None
    """A folder of the format, which the suite reads; None: what the format writes of a tiny run."""
    writes_models: ClassVar[bool] = True
    """Whether the format exports whole models, if it exports anything. False for a format of adapters alone."""

    @classmethod
    def naming(cls) -> dict[str, Any]:
        """Empty: no setting names a format."""
        return {}

    @classmethod
    def fields(cls) -> dict[str, Any]:
        """Empty: a format has no config section."""
        return {}

    # A format has no config section, so these tests of the base class do not apply.
    test_its_config_survives_being_saved_and_read_again = None  # type: ignore[assignment]
    test_an_unknown_field_is_an_error_that_names_it = None  # type: ignore[assignment]
    test_every_field_of_its_config_has_an_effect = None  # type: ignore[assignment]

    @smoke
    def test_it_is_a_format(self) -> None:
        """A subclass of `mplug_pretrained.Format` that has an own method for at least one command."""
        found = _found(self)
        own = [name for name in ("open", "open_published", "export", "open_adapters") if _has(found, name)]
        require(isinstance(found.format, Format), f"{found.entry.label} is no subclass of mplug_pretrained.Format")
        require(own, f"{found.entry.label} overrides no method that opens or exports, so it does nothing")

    @smoke
    def test_an_empty_folder_is_refused_in_a_sentence(self) -> None:
        """By every method that opens one: `mplug.UsageError`, and no other exception."""
        found = _found(self)
        with TemporaryDirectory(prefix="mplug-format-") as folder:
            for name in ("open", "open_published", "describe"):
                if not _has(found, name):
                    continue
                try:
                    getattr(found.format, name)(Path(folder))
                except UsageError:
                    continue
                except Exception as error:
                    raise Fault(
                        f"'{name}' of an empty folder raises {type(error).__name__}: {error}; raise mplug.UsageError"
                    ) from error
                raise Fault(f"'{name}' accepts an empty folder; raise mplug.UsageError")

    def test_a_run_that_begins_with_an_export_has_the_exported_weights(self) -> None:
        """`mplug train --pretrained` recognises the folder, and every value is the same. SkipTest without an export."""
        import torch

        from mplug.checkpoint.states import load_for_inference
        from mplug.model.build import allocate_parts, build_model
        from mplug.run.prepare import prepare
        from mplug_pretrained.public_load import load_public_for_inference

        found = _found(self)
        if not _has(found, "export") or not _has(found, "describe"):
            raise SkipTest("it does not write folders with which a run can begin")
        with self._folder(found) as (folder, checkpoint):
            recognised = format_of(folder)
            require(
                recognised is not None,
                "no installed format recognises its export; name a file of it in the group 'mplug.format_files'",
            )
            assert recognised is not None
            require(recognised.entry == found.entry, f"{recognised.entry.label} recognises its export")
            require(bool(found.format.form_of(self.config())), "`form_of` has no name for a model that `export` writes")
            run = prepare(tiny_config({**self.tiny(), "checkpoint.pretrained": str(folder)}))
            model = build_model(run)
            allocate_parts(run, model)
            load_public_for_inference(run, model, folder)
            assert checkpoint is not None
            saved = load_for_inference(prepare(self.config()), checkpoint)
            for name, value in saved.parameters().items():
                same = torch.equal(model.parameters()[name], value)
                require(same, f"'{name}' has other values in the run than in the exported checkpoint")

    def test_boxes_are_parts_of_their_tensors(self) -> None:
        """A rank reads boxes. Each must have the values that the whole tensor has there."""
        import torch

        found = _found(self)
        with self._folder(found) as (folder, _):
            for name, read, shape in _tensors(self, found, folder):
                whole: torch.Tensor = read((0,) * len(shape), shape)
                require(tuple(whole.shape) == tuple(shape), f"'{name}' is read with shape {tuple(whole.shape)}")
                for dim, size in enumerate(shape):
                    low, length = size // 3, size - size // 3 - size // 4
                    start = tuple(low if other == dim else 0 for other in range(len(shape)))
                    box = (*shape[:dim], length, *shape[dim + 1 :])
                    same = torch.equal(read(start, box), whole.narrow(dim, low, length))
                    require(same, f"the box at {start} of shape {box} of '{name}' is no part of the whole tensor")

    @contextmanager
    def _folder(self, found: Found) -> "Iterator[tuple[Path, Path | None]]":
        """(the folder to read, the checkpoint of which it is the export)."""
        if self.folder is not None:
            yield Path(self.folder), None
            return
        if not self.writes_models:
            raise SkipTest(ADAPTED)
        if not _has(found, "export"):
            raise Fault("the suite has nothing to read; set `folder` to a folder of the format")
        with TemporaryDirectory(prefix="mplug-format-") as directory, chdir(directory):
            yield _exported(self, found)


def _exported(suite: FormatSuite, found: Found) -> tuple[Path, Path]:
    """The export of a tiny run in the working directory, and the run's checkpoint."""
    from click.testing import CliRunner

    from mplug.cli import main
    from mplug_testing.runs import trained

    witness = trained(suite.config(trainer__steps=1), Path("runs") / "exported")
    word = f"{found.entry.distribution}/{found.entry.name}"
    words = ["checkpoint", "export", "--to", word, "folder", "--name", "exported"]
    done = CliRunner().invoke(main, words)
    require(done.exit_code == 0, f"the export of a tiny run ends with status {done.exit_code}: {done.output}")
    return Path("folder").absolute(), witness.saved[-1].absolute()


def _tensors(suite: FormatSuite, found: Found, folder: Path) -> "Iterator[tuple[str, Any, tuple[int, ...]]]":
    """(name, a function that reads a box, shape) of the tensors of a folder."""
    from functools import partial

    from mplug.model.build import build_model
    from mplug.run.prepare import prepare

    if _has(found, "open"):
        opened = found.format.open(folder)
        for name, one in opened.tensors.items():
            yield name, partial(opened.read, name), tuple(one.shape)
        return
    model: Model = build_model(prepare(suite.config()))
    with found.format.open_published(folder).weights(model) as weights:
        shapes = {
            link.public(index): link.theirs.shape
            for one in weights.links.values()
            for link in one
            for index in link.fanned
        }
        for name, shape in shapes.items():
            yield name, partial(weights.read, name), tuple(shape)


def _found(suite: FormatSuite) -> Found:
    try:
        return load_format(installed_plugins(), suite.entry())
    except UsageError as error:
        raise Fault(str(error)) from None


def _has(found: Found, name: str) -> bool:
    """Whether a format has an own method."""
    return getattr(type(found.format), name) is not getattr(Format, name)
