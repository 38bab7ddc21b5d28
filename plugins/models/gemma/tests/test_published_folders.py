"""Folders of Gemma 3 with images: what is read computes the same, and what is exported equals them.

The tensors have their names in released folders, which the library reads, and keeps if it writes such a model again.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli
from torch import Tensor

transformers = pytest.importorskip("transformers")

from beside_library import Seen, seeing_library  # noqa: E402
from exported_folders import ONE_STEP as STEP  # noqa: E402
from exported_folders import assert_exported_as_it_was  # noqa: E402
from folder_claims import (  # noqa: E402
    assert_described_to_library,
    assert_logits_of_library,
    assert_needs_pictures,
    assert_text_alone_is_of_library,
    exported_by_settings,
)
from mplug_gemma.vision import PanAndScan  # noqa: E402
from published import rewritten, run_of, save  # noqa: E402
from seeing_gemma import CONFIG, config_of, micro_batch, sample  # noqa: E402

from mplug.errors import UsageError  # noqa: E402

SETTINGS: dict[str, Any] = {"data.name": "mock", "data.media": 2, "data.media_sides": [8, 24], "trainer.seq_length": 44}
SETTINGS["model.vision.blank_line_token"] = 10
ONE_STEP = {**SETTINGS, **STEP}


def released(found: dict[str, Tensor]) -> None:
    """The names of released folders. The library writes others for a model of its own, and reads both."""
    inner = "vision_tower.vision_model."
    for name in [name for name in found if name.startswith("vision_tower.")]:
        found[name.replace("vision_tower.", inner, 1)] = found.pop(name)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("gemma3")
    library = save(seeing_library(CONFIG), folder)
    shutil.copytree(folder, folder / "of_the_library")
    rewritten(folder, released)
    return folder, library


def images() -> Seen:
    parts: tuple[tuple[int | str, ...], ...] = ((3, "image", 2, "image"), ("image", 3), (4,))
    return micro_batch([sample(one, 44, seed, 9) for seed, one in enumerate(parts)], config_of(CONFIG))


@pytest.mark.parametrize("names", ["", "of_the_library"])
def test_a_folder_gives_the_librarys_logits(made: tuple[Path, Any], names: str) -> None:
    folder, library = made
    assert_logits_of_library(folder / names, library, images(), SETTINGS)


def test_a_run_of_a_folder_is_exported_as_that_folder(made: tuple[Path, Any], tmp_path: Path, cli_here: Cli) -> None:
    folder, _ = made
    assert_exported_as_it_was(folder, {**ONE_STEP, "model.vision.init_std": 0.3}, tmp_path, cli_here)


@pytest.mark.wide("families")
def test_a_config_of_its_own_describes_the_model_to_the_library(
    made: tuple[Path, Any], tmp_path: Path, cli_here: Cli
) -> None:
    """The config is written by the family, not kept: the settings alone describe the model."""
    folder, library = made
    assert_described_to_library(exported_by_settings(folder, ONE_STEP, tmp_path, cli_here), library, images())


def test_text_alone_is_sampled_as_the_library_computes_it(made: tuple[Path, Any]) -> None:
    """The tower and the groups of positions are left out."""
    model = assert_text_alone_is_of_library(*made)
    assert not any("position groups" in filled.site.needs for filled in model.slots)


def test_a_folders_preprocessor_config_says_how_pictures_are_cropped(made: tuple[Path, Any], tmp_path: Path) -> None:
    other, size = shutil.copytree(made[0], tmp_path / "prepared"), CONFIG["vision_config"]["image_size"]
    given = {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": size, "width": size},
        "image_mean": [0.5, 0.4, 0.3],
        "image_seq_length": CONFIG["mm_tokens_per_image"],
        "do_convert_rgb": None,
        "do_pan_and_scan": None,
        "pan_and_scan_max_num_crops": None,
    }
    crops = {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 3, "pan_and_scan_min_ratio_to_activate": 1.5}
    for fields, expected in (
        ({}, None),
        (crops, PanAndScan(max_crops=3, min_ratio=1.5)),
        ({**crops, "do_pan_and_scan": False}, None),
    ):
        (other / "preprocessor_config.json").write_text(json.dumps({**given, **fields}))
        vision = run_of(other, SETTINGS).config.model.vision
        assert (vision.pixel_mean, vision.pan_and_scan) == ((0.5, 0.4, 0.3), expected)
    for fields, sentence in (
        ({"size": {"height": 4, "width": 4}}, "preprocessor_config.json has 4 for 'model.vision.image_size'"),
        ({"image_seq_length": 4}, "preprocessor_config.json has 4 for 'model.vision.tokens_per_image'"),
        ({"do_pan_and_scan": 1}, "its field 'do_pan_and_scan' is 1, but the family supports"),
        ({"resample": 3}, "its field 'resample' is 3, but the family supports 2 only"),
        ({"pan_and_scan": 1}, "its field 'pan_and_scan' is unknown to the family"),
    ):
        (other / "preprocessor_config.json").write_text(json.dumps({**given, **fields}))
        with pytest.raises(UsageError, match=sentence):
            run_of(other, SETTINGS)


def test_a_folder_is_refused_on_text_alone(made: tuple[Path, Any]) -> None:
    assert_needs_pictures(made[0])
