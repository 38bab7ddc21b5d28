"""mplug checkpoint upcycle."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from mplug.cli.options import Finite, RunName, StoredPath, config_options, overrides
from mplug.errors import UsageError, counted, listed
from mplug_checkpoint.conversion import progress, saved_run, train_from

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from mplug.config.binding import RunConfig
    from mplug.config.sources import Settings
    from mplug.registry.entry_points import Registry
    from mplug.run.run import Run

OF_EXPERTS = re.compile("moe|expert|capacity|aux_loss|z_loss|feed_forward_types")
"""Fields of the section 'model' that a dense model has without an effect; the mixture does not take them from it."""


@click.command()
@click.argument("folder", type=StoredPath(exists=True, file_okay=False))
@config_options
@click.option("--name", type=RunName(), required=True, help="Name of the new run, which has one checkpoint.")
@click.option(
    "--noise",
    type=Finite(0, 1),
    default=0.0,
    show_default=True,
    help="Normal noise on the experts' weights: its standard deviation, as a multiple of that of the dense weight.",
)
def upcycle(folder: Path, name: str, noise: float, **options: Any) -> None:
    """Make a mixture of experts from a dense model: the beginning of a run.

    FOLDER is the folder of a run, of one of its checkpoints, or of a published model. It may be the address of a store,
    s3://BUCKET/FOLDER. The mixture has the settings of the dense model; say which family it is, and describe its
    experts. Each expert is a copy of the MLP in its place. If model.moe_ffn_hidden_size is 1/G of the MLP's width, G
    experts make one copy. The routers have initial values.

    If the gates of a token are normalised, the mixture computes the same logits as the dense model. The command says if
    it does not. Shared experts are not made. Other settings, such as --data or --steps, are those that config.yaml of
    the new run gives to the next one.

    \b
    mplug checkpoint upcycle llama-1b --name experts --model mixtral --set model.num_experts=8
    mplug train runs/experts/config.yaml --pretrained runs/experts --name more ...
    """
    from mplug.model.build import build_model
    from mplug.run.folder import new_directory
    from mplug.run.prepare import prepare
    from mplug_checkpoint.new_run import contents, refuse_unusable_name, write_import
    from mplug_checkpoint.states import States
    from mplug_checkpoint.upcycling import DenseWeights, Upcycled
    from mplug_pretrained.foreign_match import match

    source = _source(folder)
    config = _of_mixture(source.run.config, folder, overrides(**{**options, "parallel": ""}))
    run = prepare(config)
    run.directory = new_directory(config, name)
    refuse_unusable_name(run.directory)
    model = build_model(run)
    with DenseWeights(source.run, source.path, source.is_published) as dense:
        made = Upcycled(model, dense, noise, config.trainer.seed)
        states = States(reason="it has no optimizer states")
        total = sum(one.num_bytes for one in contents(run, model, states))
        with progress(f"upcycling '{source.path}'", total) as advance:
            write_import(run, model, match(model, made), states, "upcycled", advance)
    number = counted(len(made.parts), "mixture")
    click.echo(f"run '{run.directory}' has {number} of experts in the place of MLPs of '{source.path}'")
    reasons = list(made.differences())
    same = f"differ from those of the dense model, because {listed(reasons)}" if reasons else "are the dense model's"
    click.echo(f"its logits {same}; start a run with its settings and weights: {train_from(run)}")


@dataclass(frozen=True)
class Source:
    """A dense model: the run that describes it, and the folder of its weights."""

    run: "Run"
    path: Path
    is_published: bool


def _source(folder: Path) -> Source:
    """The dense model of a folder. UsageError if it has none."""
    from mplug.config.defaults import default_settings
    from mplug.config.sources import from_mapping
    from mplug.registry.entry_points import Registry
    from mplug.registry.resolve import resolve
    from mplug.run.prepare import prepare
    from mplug_pretrained.formats import is_public
    from mplug_saving.names import MANIFEST
    from mplug_saving.newest_valid import choose
    from mplug_saving.verified import Verified

    if is_public(folder):
        named = {"checkpoint": {"pretrained": str(folder)}, "trainer": {"device": "cpu"}}
        config = resolve(Registry(), default_settings(), from_mapping(named, "FOLDER"))
        return Source(prepare(config), folder, True)
    if (folder / MANIFEST).exists():
        return Source(saved_run(folder.resolve().parent.parent), folder, False)
    if not (folder / "config.yaml").is_file():
        raise UsageError(
            f"'{folder}' is not the folder of a run or of a checkpoint, and no installed format reads it; use a folder "
            f"of one of these"
        )
    from mplug_saving.folder import at_step

    run = saved_run(folder)
    return Source(run, choose(run, at_step(folder / "checkpoints", None), Verified()).path, False)


def _of_mixture(dense: "RunConfig", folder: Path, given: "Settings") -> "RunConfig":
    """The config of the mixture: the user's settings over what its family has in common with the dense model."""
    from mplug.config.defaults import default_settings
    from mplug.config.sources import from_mapping, merge
    from mplug.registry.entry_points import Registry
    from mplug.registry.resolve import resolve

    if ("model", "preset") in given:
        raise UsageError(f"--preset: the dense model '{folder}' decides the sizes of the mixture; remove the preset")
    registry, found = Registry(), dense.resolved()["model"]
    word = given[("model", "name")].value if ("model", "name") in given else found["name"]
    known = _fields_of(registry, str(word))
    taken = {
        field: value
        for field, value in found.items()
        if field in known and not OF_EXPERTS.search(field) and not (value is None and _needs_value(known[field]))
    }
    return resolve(
        registry, default_settings(), merge(from_mapping({"model": {**taken, "name": word}}, str(folder)), given)
    )


def _fields_of(registry: "Registry", word: str) -> "dict[str, FieldInfo]":
    """The fields of a family's Config."""
    return dict(registry.load(registry.find("models", word)).Config.model_fields)


def _needs_value(field: "FieldInfo") -> bool:
    """Whether null is no value of the field. The dense family then decides a width that this one must be given."""
    return type(None) not in get_args(field.annotation)
