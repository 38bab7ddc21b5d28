"""What a published folder must give: the library's logits, also for text alone, and a config that the library reads."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from beside_library import Seen
from mplug_huggingface_format.opened import open_folder
from published import loaded, run_of
from torch import Tensor

from mplug import Model, UsageError
from mplug.gradients.region import region
from mplug.model.build import allocate_parts, build_model
from mplug.training.loop import train
from mplug_pretrained.public_load import fill_from, weights_of


def narrow(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The entries with fp32 in the place of fp64."""
    return {name: x.float() if isinstance(x, Tensor) and x.dtype == torch.float64 else x for name, x in entries.items()}


def words_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as keyword arguments of `published.loaded`."""
    return {name.replace(".", "__"): value for name, value in settings.items()}


def assert_logits_of_library(folder: Path, library: Any, seen: Seen, settings: Mapping[str, Any]) -> None:
    _, model = loaded(folder, **words_of(settings))
    with torch.no_grad():
        expected = library(**narrow(seen.theirs)).logits
        found = model.logits(narrow(seen.ours))
    assert expected.abs().max() > 0.5
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def exported_by_settings(folder: Path, settings: dict[str, Any], tmp_path: Path, cli: Any) -> Path:
    """The export of a run of a folder whose config.json is not kept: the family writes it from the settings."""
    run = run_of(folder, settings)
    run.directory = tmp_path / "runs" / "scratch"
    train(run)
    shutil.rmtree(run.directory / "published")
    result = cli("checkpoint", "export", "--to", "huggingface", "exported")
    assert result.returncode == 0, result.stderr
    return tmp_path / "exported"


def assert_described_to_library(exported: Path, library: Any, seen: Seen) -> None:
    """The library reads from an export the model that it wrote into the folder."""
    from transformers import AutoModelForImageTextToText

    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    again = AutoModelForImageTextToText.from_pretrained(exported, **how)
    arguments = narrow(seen.theirs)
    with torch.no_grad():
        assert torch.equal(again(**arguments).logits, library(**arguments).logits)


def assert_text_alone_is_of_library(folder: Path, library: Any) -> Model:
    """A run that only runs forward needs no pictures: the tower is then left out."""
    run = run_of(folder)
    run.trains = False
    model = build_model(run)
    allocate_parts(run, model)
    fill_from(open_folder(folder), run, model, weights_of(model))
    model.module.eval()
    tokens = torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(3))
    zeros = torch.zeros(2, dtype=torch.int64)
    batch = {"tokens": tokens, "positions": torch.arange(24)[None], "sample_ids": zeros, "keys": zeros}
    with torch.no_grad():
        expected = library(input_ids=tokens, use_cache=False).logits
        assert (model.logits(batch) - expected).abs().max() < 1e-5 * expected.abs().max()
    return model


def assert_needs_pictures(folder: Path) -> None:
    """A run that trains on text alone is refused with a loader that has pictures."""
    with pytest.raises(UsageError, match=r"micro batches of data/text have no 'patches', .* \(--data mock"):
        loaded(folder)


def assert_each_rank_reads_its_boxes(folder: Path, model: Model, given: Mapping[str, Any]) -> None:
    """Under tp2pp2, the boxes of every rank are those of the whole model."""
    whole = model.parameters()
    for rank in range(4):
        _, part = loaded(folder, "tp2pp2", rank, **given)
        for name, parameter in part.parameters().items():
            for box in part.placements[name].boxes(rank):
                cut = tuple(slice(s, s + n) for s, n in zip(box.start, box.shape, strict=True))
                assert torch.equal(region(parameter.data, box), whole[name].data[cut]), (rank, name)
