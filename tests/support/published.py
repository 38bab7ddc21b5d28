"""Published checkpoints of tiny random models, made by the transformers library, and models of ours that read them."""

import copy
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from library_models import TABLES
from mplug_huggingface_format.opened import open_folder
from mplug_huggingface_format.weights import PublicWeights
from safetensors.torch import load_file, save_file
from torch import Tensor

from mplug.config.binding import RunConfig
from mplug.config.defaults import default_settings
from mplug.config.sources import Settings, from_mapping, merge
from mplug.layout.placement import Box
from mplug.model.build import allocate_parts, build_model
from mplug.model.model import Model
from mplug.registry.resolve import resolve
from mplug.run.prepare import prepare
from mplug.run.run import Run
from mplug_pretrained.public_load import fill_from, weights_of
from mplug_pretrained.weights import refuse_another_model
from mplug_testing.harness import installed_plugins

VOCAB = 300


def model_of(**fields: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**copy.deepcopy(fields)))


FAMILIES: dict[str, Callable[..., Any]] = {
    family: partial(model_of, **fields) for family, fields in TABLES["published"]["families"].items()
}
"""By name of the test case, a tiny model of the transformers library."""


def save(model: Any, folder: Path, num_shards: int = 3, dtype: torch.dtype = torch.float32) -> Any:
    """Give a model random weights, of which none is an initial value, and save it in this number of files."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            offset = 1.0 if bool((parameter == 1).all()) else 0.0  # norms, except those whose weights begin as 0
            scale = 1.0 if ".wpe." in name else 0.2
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + offset)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.linspace(-0.2, 0.2, len(buffer)).roll(3))
    model = model.to(dtype).eval()
    total = sum(parameter.nbytes for parameter in model.parameters())
    for divisor in (num_shards, num_shards - 0.5, num_shards - 0.25, num_shards - 0.75):  # shards are filled greedily
        for file in folder.glob("*"):
            file.unlink()
        model.save_pretrained(folder, max_shard_size=int(total / divisor) + 1)
        if len(list(folder.glob("*.safetensors"))) == num_shards:
            return model
    raise AssertionError([file.name for file in folder.glob("*")])


def resolved(settings: Mapping[str, Any]) -> RunConfig:
    overrides: Settings = {}
    for name, value in settings.items():
        overrides = merge(overrides, from_mapping(value, "the test", tuple(name.split("."))))
    return resolve(installed_plugins(), default_settings(), overrides)


def run_of(folder: Path, settings: Mapping[str, Any] | None = None) -> Run:
    fixed = {"trainer.device": "cpu", "kernels.default": None, "trainer.seq_length": 32}
    return prepare(resolved({**fixed, "checkpoint.pretrained.path": str(folder), **(settings or {})}))


def loaded(folder: Path, layout: str = "", rank: int = 0, **settings: Any) -> tuple[Run, Model]:
    """The model of one rank of a layout, without other processes, with the weights of a folder."""
    named = {name.replace("__", "."): value for name, value in settings.items()}
    run = run_of(folder, {"parallel.layout": layout, "trainer.global_batch_size": 8, **named})
    run.rank = rank
    model = build_model(run)
    allocate_parts(run, model)
    fill_from(open_folder(folder), run, model, weights_of(model))
    model.module.eval()
    return run, model


def logits(model: Model, tokens: Tensor) -> Tensor:
    zeros = torch.zeros(len(tokens), dtype=torch.int64)
    batch = {"tokens": tokens, "positions": torch.arange(tokens.shape[1])[None], "sample_ids": zeros, "keys": zeros}
    with torch.no_grad():
        return model.logits(batch)


def require_fitting(folder: Path) -> None:
    """What the command checks before it starts a run."""
    run = run_of(folder)
    refuse_another_model(folder, build_model(run), run.config.checkpoint.pretrained)


class Made(dict[str, tuple[Path, Any]]):
    """By family, a folder with three files and the model of the transformers library that wrote it."""

    def __init__(self, parent: Path) -> None:
        super().__init__()
        self.parent = parent

    def __missing__(self, family: str) -> tuple[Path, Any]:
        folder = self.parent / family.replace(", ", "-").replace(" ", "-")
        folder.mkdir()
        self[family] = folder, save(FAMILIES[family](), folder)
        return self[family]


def tensors(folder: Path) -> dict[str, tuple[str, Tensor]]:
    """Every tensor of a folder with its file."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: (file.name, tensor) for file in files for name, tensor in load_file(file).items()}


def edited(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """The folder with one file, after a change of its tensors."""
    found = {name: tensor for name, (_, tensor) in tensors(folder).items()}
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink(missing_ok=True)
    change(found)
    save_file(found, folder / "model.safetensors")


def at(whole: Tensor, box: Box) -> Tensor:
    return whole[tuple(slice(s, s + n) for s, n in zip(box.start, box.shape, strict=True))]


class Reads:
    """Counts the bytes that are read from files, by wrapping the only method that reads values."""

    def __init__(self, monkeypatch: Any) -> None:
        self.total, self.largest = 0, 0
        original = PublicWeights._slice

        def counted(weights: PublicWeights, name: str, start: Any, shape: Any) -> Tensor:
            found = original(weights, name, start, shape)
            self.total, self.largest = self.total + found.nbytes, max(self.largest, found.nbytes)
            return found

        monkeypatch.setattr(PublicWeights, "_slice", counted)
