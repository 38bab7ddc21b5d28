"""Folders that the transformers library writes: what is read computes the same, and what is exported equals them."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Cli
from torch import Tensor

transformers = pytest.importorskip("transformers")

from beside_library import Seen, changed  # noqa: E402
from exported_folders import ONE_STEP as STEP  # noqa: E402
from exported_folders import assert_exported_as_it_was  # noqa: E402
from folder_claims import (  # noqa: E402
    assert_described_to_library,
    assert_logits_of_library,
    assert_needs_pictures,
    assert_text_alone_is_of_library,
    exported_by_settings,
)
from llava_models import CONFIGS, TILED, config_of, library_of, micro_batch, tiled_micro_batch  # noqa: E402
from mplug_llava.preparation import CLIP_MEAN, CLIP_STD  # noqa: E402
from published import edited, rewritten, run_of, save, tensors  # noqa: E402

from mplug.errors import UsageError  # noqa: E402

SETTINGS: dict[str, Any] = {"data.name": "mock", "data.media": 2, "data.media_sides": [8, 24], "trainer.seq_length": 60}
ONE_STEP = {**SETTINGS, **STEP}
ALL = {**CONFIGS, "tiled": TILED}
LIBRARY, RELEASED = "vision_tower.", "vision_tower.vision_model."


@pytest.fixture(scope="module", params=["llama", "qwen2", "tiled"])
def made(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """A kind, the folder of a model of it, and the model. Of one kind, the names are those of the released folders."""
    folder = tmp_path_factory.mktemp(request.param)
    library = save(library_of(ALL[request.param], torch.float32), folder)
    if request.param == "llama":
        rewritten(folder, as_released)
    return request.param, folder, library


def as_released(found: dict[str, Tensor]) -> None:
    """Names of a tower as releases of the library before 5 wrote them."""
    for name in [name for name in found if name.startswith(LIBRARY)]:
        found[RELEASED + name.removeprefix(LIBRARY)] = found.pop(name)


def seen_by(kind: str) -> Seen:
    """A micro batch with pictures, with videos too if the model has tiles."""
    config = config_of(ALL[kind])
    if kind == "tiled":
        return tiled_micro_batch(config, ([(1, 20, 9), (2, 6, 11)], [], [(1, 9, 30), (1, 5, 5)]), 120)
    return micro_batch(config, (2, 0, 1))


@pytest.mark.wide("families", quick=["tiled", "llama"])
def test_a_folder_gives_the_librarys_logits(made: tuple[str, Path, Any]) -> None:
    kind, folder, library = made
    assert_logits_of_library(folder, library, seen_by(kind), SETTINGS)


@pytest.mark.wide("families", quick=["llama"])
def test_a_run_of_a_folder_is_exported_as_that_folder(
    made: tuple[str, Path, Any], tmp_path: Path, cli_here: Cli
) -> None:
    """Also the tensors that nothing computes with: the last block of the tower, and the norm after it."""
    _, folder, _ = made
    assert_exported_as_it_was(folder, {**ONE_STEP, "model.vision.init_std": 0.3}, tmp_path, cli_here)


@pytest.mark.wide("families", quick=["tiled"])
def test_a_config_of_its_own_describes_the_model_to_the_library(
    made: tuple[str, Path, Any], tmp_path: Path, cli_here: Cli
) -> None:
    """The config is written by both families, not kept: the settings alone describe the model."""
    kind, folder, library = made
    exported = exported_by_settings(folder, ONE_STEP, tmp_path, cli_here)
    assert any(name.startswith(RELEASED) for name in tensors(exported))
    assert_described_to_library(exported, library, seen_by(kind))


@pytest.mark.wide("families", quick=["llama"])
def test_text_alone_is_sampled_as_the_library_computes_it(made: tuple[str, Path, Any]) -> None:
    assert_text_alone_is_of_library(*made[1:])


def test_settings_that_contradict_the_folder_are_refused_with_the_field_of_the_decoder(
    made: tuple[str, Path, Any],
) -> None:
    _, folder, _ = made
    with pytest.raises(UsageError, match=r"  model\.decoder\.num_layers \(.*\): 2, but the weights need 3$"):
        run_of(folder, {**SETTINGS, "model.decoder.num_layers": 2})
    with pytest.raises(UsageError, match=r"  model\.decoder\.name \(.*\): 'gpt', but the weights need '.*'$"):
        run_of(folder, {**SETTINGS, "model.decoder": {"name": "gpt", "vocab_size": 61}})
    with pytest.raises(UsageError, match="the weights need"):
        run_of(folder, {**SETTINGS, "model.vision.feature_layer": 1})
    assert run_of(folder, {**SETTINGS, "model.decoder.num_layers": 3}).config.model.decoder.config.num_layers == 3


def test_a_folder_is_refused_on_text_alone(made: tuple[str, Path, Any]) -> None:
    assert_needs_pictures(made[1])


PREPARATION = {
    "image_processor_type": "LlavaOnevisionImageProcessor",
    "size": {"height": TILED["vision_config"]["image_size"], "width": TILED["vision_config"]["image_size"]},
    "image_grid_pinpoints": TILED["image_grid_pinpoints"],
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.3, 0.2],
    "do_pad": True,
    "resample": 3,
    "rescale_factor": 1 / 255,
}


VIDEO = {**PREPARATION, "video_processor_type": "LlavaOnevisionVideoProcessor", "do_sample_frames": False}
OF_VIDEOS: list[tuple[str, str, dict[str, Any]]] = [
    ("video_preprocessor_config.json", "", {**VIDEO, "image_mean": [0.1, 0.2, 0.3]}),
    ("processor_config.json", "video_processor", {**VIDEO, "image_std": [0.1, 0.2, 0.3]}),
]
"""File, the field in it, and how videos are prepared; the library prefers the second."""


@pytest.mark.parametrize("made", ["tiled"], indirect=True)
def test_a_folders_preprocessor_config_says_how_pictures_become_tiles(
    made: tuple[str, Path, Any], tmp_path: Path, cli_here: Cli
) -> None:
    """Colours come from the file; a run of its own with other colours is exported all the same."""
    other = shutil.copytree(made[1], tmp_path / "prepared")
    for fields, sentence in (
        ({}, None),
        (
            {"image_grid_pinpoints": [[8, 8]]},
            r"preprocessor_config.json has \[\[8, 8\]\] for 'model.tiling.resolutions'",
        ),
        ({"size": {"height": 4, "width": 4}}, "preprocessor_config.json has 4 for 'model.vision.image_size'"),
        ({"size": {"shortest_edge": 8}}, "its field 'size' is .*, and the family reads equal 'height' and 'width'"),
        ({"do_center_crop": True}, "its field 'do_center_crop' is true, but the family supports"),
        ({"crop_pct": 0.9}, "its field 'crop_pct' is unknown to the family"),
    ):
        (other / "preprocessor_config.json").write_text(json.dumps({**PREPARATION, **fields}))
        if sentence is not None:
            with pytest.raises(UsageError, match=sentence):
                run_of(other, SETTINGS)
            continue
        for name, inside, own in OF_VIDEOS:
            (other / name).write_text(json.dumps({inside: own} if inside else own))
            tiling = run_of(other, SETTINGS).config.model.tiling
            assert (tiling.video_mean, tiling.video_std) == (tuple(own["image_mean"]), tuple(own["image_std"]))
        for wrong, reason in (({"fps": 2, "resample": 2}, "'resample' is 2"), ({"a": 1}, "'a' is unknown")):
            (other / name).write_text(json.dumps({inside: wrong}))
            with pytest.raises(UsageError, match=reason):
                run_of(other, SETTINGS)
        for name, _, _ in OF_VIDEOS:
            (other / name).unlink()
        vision = run_of(other, SETTINGS).config.model.vision
        assert (vision.pixel_mean, vision.pixel_std) == ((0.5, 0.4, 0.3), (0.5, 0.3, 0.2))
        exported_by_settings(other, ONE_STEP, tmp_path, cli_here)


REFUSED_TILES: dict[str, tuple[dict[str, Any], str]] = {
    "no number of tiles": (
        {"vision_aspect_ratio": "anyres"},
        "'vision_aspect_ratio' is 'anyres', but the family supports",
    ),
    "tiles of other sizes": ({"image_grid_pinpoints": [[8, 12]]}, "tiling: resolutions has [8, 12]"),
    "no pairs": ({"image_grid_pinpoints": [8]}, "'image_grid_pinpoints' is [8], but must be a list of heights and"),
    "a class row": (
        {"vision_config": CONFIGS["llama"]["vision_config"]},
        "'vision_feature_select_strategy' is 'full', which keeps the class row",
    ),
    "a lost patch": ({"vision_feature_select_strategy": "default"}, "drops the first patch of a 'vision_config'"),
    "a tower without sizes": ({"vision_config": {}}, "in its field 'vision_config', it lacks the field 'hidden_size'"),
    "equal tokens": ({"video_token_index": 55}, "tiling: video_token=55 must be another token than image_token"),
}


@pytest.mark.parametrize("case", REFUSED_TILES)
def test_tiles_that_cannot_be_honoured_are_refused_in_a_sentence(case: str) -> None:
    changes, sentence = REFUSED_TILES[case]
    with pytest.raises((ValueError, AssertionError), match=re.escape(sentence)) as refused:
        config_of(changed(TILED, changes))
    assert len(str(refused.value).splitlines()) == 1


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a field of the decoder": (
        {"text_config.query_pre_attn_scalar": 4},
        "in its field 'text_config', its field 'query_pre_attn_scalar' is unknown to the family",
    ),
    "a decoder that no family reads": (
        {"text_config.model_type": "gtp2"},
        "in its field 'text_config', its 'model_type' 'gtp2' must be read by one installed family",
    ),
    "a decoder that scales embeddings": (
        {"text_config": {"model_type": "gemma2"}},
        "scales embeddings or adds positions or dropout to them",
    ),
    "no mapping": ({"text_config": 3}, "its field 'text_config' is 3, but must be a mapping"),
    "another tower": (
        {"vision_config.model_type": "dinov2"},
        "in its field 'vision_config', its field 'model_type' is 'dinov2', but the family supports \"clip_vision",
    ),
    "a field of the tower": (
        {"vision_config.use_rope": True},
        "in its field 'vision_config', its field 'use_rope' is unknown to the family",
    ),
    "several layers": (
        {"vision_feature_layer": [-2, -5]},
        "'vision_feature_layer' is [-2, -5], but must be an integer",
    ),
    "another number of tokens": ({"image_seq_length": 15}, "'image_seq_length' is 15, but the family supports 16 only"),
    "one tied table": ({"tie_word_embeddings": True}, "'tie_word_embeddings' is true and that of 'text_config' is not"),
    "dropout": ({"vision_config.attention_dropout": 0.1}, "'attention_dropout' is 0.1, but the family supports 0.0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused_in_a_sentence_with_its_name(case: str) -> None:
    changes, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(sentence)) as refused:
        config_of(changed(CONFIGS["llama"], changes))
    assert len(str(refused.value).splitlines()) == 1


def test_a_folder_with_another_field_is_refused_by_name(made: tuple[str, Path, Any], tmp_path: Path) -> None:
    copied = shutil.copytree(made[1], tmp_path / "copied")
    edited(copied, mm_newline_position="grid")
    with pytest.raises(UsageError, match="its field 'mm_newline_position' is unknown to the family"):
        run_of(copied, SETTINGS)


SQUARES = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 12},
    "crop_size": {"height": 12, "width": 12},
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.3, 0.2],
    "rescale_factor": 1 / 255,
}
OF_SIGLIP = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 12, "width": 12}}


@pytest.mark.parametrize("made", ["llama"], indirect=True)
def test_a_folders_preprocessor_config_says_how_pictures_become_squares(
    made: tuple[str, Path, Any], tmp_path: Path
) -> None:
    other = shutil.copytree(made[1], tmp_path / "prepared")
    own, siglip, clip = ((0.5, 0.4, 0.3), (0.5, 0.3, 0.2)), ((0.5,) * 3,) * 2, (CLIP_MEAN, CLIP_STD)
    side = json.loads((other / "config.json").read_text())["vision_config"]["image_size"]
    text = json.dumps({"clip": SQUARES, "siglip": OF_SIGLIP}).replace("12", str(side))
    squares, stretched = json.loads(text).values()
    found: list[tuple[dict[str, Any], str, Any]] = [
        (squares, "crop", own),
        ({"size": side, "crop_size": side, "feature_extractor_type": "CLIPFeatureExtractor"}, "crop", clip),
        ({**squares, "size": {"height": side, "width": side}}, "stretch", own),
        (stretched, "stretch", siglip),
    ]
    for fields, fit, colours in found:
        (other / "preprocessor_config.json").write_text(json.dumps(fields))
        vision = run_of(other, SETTINGS).config.model.vision
        assert (vision.fit, (vision.pixel_mean, vision.pixel_std)) == (fit, colours)
    refused = [
        ({**squares, "crop_size": side + 1}, "supports a square whose side is that of 'size'"),
        ({**squares, "do_center_crop": False}, "'do_center_crop' is false, but its 'size' is"),
        ({**squares, "do_pad": True}, "its field 'do_pad' is true, but the family supports"),
        ({**squares, "size": {"longest_edge": side}}, "the family reads a 'shortest_edge', or equal"),
        ({**squares, "image_processor_type": "BitImageProcessor"}, "its field 'image_processor_type' is"),
        ({**squares, "size": side + 1, "crop_size": side + 1}, f"has {side + 1} for 'model.vision.image_size'"),
    ]
    for fields, sentence in refused:
        (other / "preprocessor_config.json").write_text(json.dumps(fields))
        with pytest.raises(UsageError, match=sentence):
            run_of(other, SETTINGS)
