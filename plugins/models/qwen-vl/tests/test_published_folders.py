"""Folders that the transformers library writes: what is read computes the same, and what is exported equals them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Cli
from torch import Tensor

transformers = pytest.importorskip("transformers")

from beside_library import seeing_library  # noqa: E402
from exported_folders import ONE_STEP as STEP  # noqa: E402
from exported_folders import assert_exported_as_it_was  # noqa: E402
from folder_claims import (  # noqa: E402
    assert_described_to_library,
    assert_logits_of_library,
    assert_needs_pictures,
    assert_text_alone_is_of_library,
    exported_by_settings,
)
from mplug_qwen_vl.stream import Grid  # noqa: E402
from published import edited, loaded, logits, rewritten, run_of, save  # noqa: E402
from seeing_models import CONFIGS, config_of, micro_batch, sample  # noqa: E402

from mplug.errors import UsageError  # noqa: E402
from mplug.training.loop import train  # noqa: E402

SETTINGS: dict[str, Any] = {"data.name": "mock", "data.media": 2, "data.media_sides": [8, 24], "trainer.seq_length": 60}
ONE_STEP = {**SETTINGS, **STEP}


@pytest.fixture(scope="module", params=CONFIGS)
def made(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    library = save(seeing_library(CONFIGS[request.param]), folder)
    if request.param == "3-moe":
        rewritten(folder, transpose_experts)
    preparation = {"patch_size": 2, "size": {"shortest_edge": 64, "longest_edge": 400}, "image_mean": [0.3, 0.4, 0.5]}
    (folder / "preprocessor_config.json").write_text(json.dumps(preparation))
    return request.param, folder, library


def test_the_folder_says_how_pictures_are_prepared_and_a_run_may_change_it(made: tuple[str, Path, Any]) -> None:
    vision = run_of(made[1], SETTINGS).config.model.vision
    assert (vision.min_pixels, vision.max_pixels, vision.pixel_mean) == (64, 400, (0.3, 0.4, 0.5))
    assert vision.pixel_std == (0.26862954, 0.26130258, 0.27577711), "the library's default"
    for name, value in (("max_pixels", 200), ("init_std", 0.1)):
        changed = run_of(made[1], {**SETTINGS, f"model.vision.{name}": value}).config.model.vision
        assert changed == vision.model_copy(update={name: value})
    with pytest.raises(UsageError, match="settings contradict"):
        run_of(made[1], {**SETTINGS, "model.vision.patch_size": 4})


def test_the_folder_says_how_videos_are_prepared(made: tuple[str, Path, Any]) -> None:
    assert run_of(made[1], SETTINGS).config.model.vision.video_bounds == (64, 400), "those of pictures, without a file"
    colours = {"image_mean": [0.3, 0.4, 0.5], "image_std": [0.26862954, 0.26130258, 0.27577711]}
    stated = {"patch_size": 2, **colours, "size": {"shortest_edge": 16, "longest_edge": 900}, "fps": 2}
    file = made[1] / "video_preprocessor_config.json"
    try:
        file.write_text(json.dumps(stated))
        vision = run_of(made[1], SETTINGS).config.model.vision
        assert (vision.video_bounds, vision.max_pixels) == ((16, 900), 400)
        for changes, sentence in (
            (
                {"image_mean": [0.3, 0.4, 0.6]},
                "its video_preprocessor_config.json has .* for 'model.vision.pixel_mean'",
            ),
            ({"cap_pixels_per_frame": True}, "its field 'cap_pixels_per_frame' is true"),
        ):
            file.write_text(json.dumps({**stated, **changes}))
            with pytest.raises(UsageError, match=sentence):
                run_of(made[1], SETTINGS)
    finally:
        file.unlink(missing_ok=True)


def transpose_experts(found: dict[str, Tensor]) -> None:
    """Experts as in the released folders. The library saves its own in its own order, and reads both."""
    found.update({name: x.mT.contiguous() for name, x in found.items() if ".mlp.experts." in name})


def images(kind: str) -> Any:
    parts = ((3, Grid(1, 6, 4), 2, Grid(1, 2, 10)), (2, Grid(2, 6, 4), 5), (4,))
    samples = [sample(part, 60, seed, frames_apart=kind != "2.5") for seed, part in enumerate(parts)]
    return micro_batch(samples, config_of(CONFIGS[kind]))


def test_a_folder_gives_the_librarys_logits(made: tuple[str, Path, Any]) -> None:
    kind, folder, library = made
    assert_logits_of_library(folder, library, images(kind), SETTINGS)


@pytest.mark.wide("families", quick=["3-moe"])
def test_a_run_of_a_folder_is_exported_as_that_folder(
    made: tuple[str, Path, Any], tmp_path: Path, cli_here: Cli
) -> None:
    _, folder, _ = made
    assert_exported_as_it_was(folder, {**ONE_STEP, "model.vision.init_std": 0.3}, tmp_path, cli_here)


@pytest.mark.wide("families", quick=["2.5"])
def test_a_config_of_its_own_describes_the_model_to_the_library(
    made: tuple[str, Path, Any], tmp_path: Path, cli_here: Cli
) -> None:
    """The config is written by the family, not kept: the settings alone describe the model."""
    kind, folder, library = made
    assert_described_to_library(exported_by_settings(folder, ONE_STEP, tmp_path, cli_here), library, images(kind))


@pytest.mark.wide("families", quick=["3-moe"])
def test_text_alone_is_sampled_as_the_library_computes_it(made: tuple[str, Path, Any]) -> None:
    assert_text_alone_is_of_library(*made[1:])


def test_a_folder_is_refused_on_text_alone(made: tuple[str, Path, Any]) -> None:
    assert_needs_pictures(made[1])


@pytest.mark.wide("families", quick=["3"])
def test_the_decoder_of_a_folder_is_tuned_on_text_without_its_tower(
    made: tuple[str, Path, Any], tmp_path: Path, cli_here: Cli
) -> None:
    _, folder, library = made
    run, model = loaded(folder, model__vision=None)
    assert run.config.model.vision is None
    tokens = torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = library(input_ids=tokens, use_cache=False).logits
    assert (logits(model, tokens) - expected).abs().max() < 1e-5 * expected.abs().max()
    run = run_of(folder, {**ONE_STEP, "model.vision": None, "data.media": 0})
    run.directory = tmp_path / "runs" / "text"
    train(run)
    result = cli_here("checkpoint", "export", "--to", "huggingface", "exported")
    assert result.returncode == 2
    assert "the field 'vision_config', and model.vision is null" in result.stderr


def test_the_flat_config_of_the_released_second_generation_is_read(tmp_path: Path) -> None:
    save(seeing_library(CONFIGS["2.5"]), tmp_path, num_shards=1)
    config = json.loads((tmp_path / "config.json").read_text())
    nested = run_of(tmp_path, SETTINGS).config.model
    text = config.pop("text_config")
    edited_text = {name: value for name, value in text.items() if name not in ("model_type", "dtype")}
    config["vision_config"] |= {"in_chans": 3, "spatial_patch_size": 14, "model_type": "qwen2_5_vl"}
    (tmp_path / "config.json").write_text(json.dumps({**edited_text, **config}))
    assert run_of(tmp_path, SETTINGS).config.model == nested
    (tmp_path / "config.json").write_text(json.dumps({**edited_text, **config, "text_config": text}))
    assert run_of(tmp_path, SETTINGS).config.model == nested
    edited(tmp_path, num_hidden_layers=3)
    with pytest.raises(
        UsageError, match="its field 'num_hidden_layers' is another one than in its field 'text_config'"
    ):
        run_of(tmp_path, SETTINGS)
