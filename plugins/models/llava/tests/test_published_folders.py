"""Folders that the transformers library writes: what is read computes the same, and what is exported equals them."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from exported_folders import ONE_STEP as STEP  # noqa: E402
from exported_folders import assert_exported_as_it_was  # noqa: E402
from llava_models import CONFIGS, config_of, library_of, micro_batch  # noqa: E402
from mplug_huggingface_format.opened import open_folder  # noqa: E402
from published import edited, loaded, rewritten, run_of, save, tensors  # noqa: E402
from seeing_models import changed  # noqa: E402

from mplug.checkpoint.public_load import fill_from, weights_of  # noqa: E402
from mplug.errors import UsageError  # noqa: E402
from mplug.model.build import allocate_parts, build_model  # noqa: E402
from mplug.training.loop import train  # noqa: E402

Cli = Callable[..., CompletedProcess[str]]
SETTINGS: dict[str, Any] = {"data.name": "mock", "data.media": 2, "data.media_sides": [8, 24], "trainer.seq_length": 60}
ONE_STEP = {**SETTINGS, **STEP}
LIBRARY, RELEASED = "vision_tower.", "vision_tower.vision_model."


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def made(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """A kind, the folder of a model of it, and the model. Of one kind, the names are those of the released folders."""
    folder = tmp_path_factory.mktemp(request.param)
    library = save(library_of(CONFIGS[request.param], torch.float32), folder)
    if request.param == "llama":
        rewritten(folder, as_released)
    return request.param, folder, library


def as_released(found: dict[str, Tensor]) -> None:
    """Names of a tower as releases of the library before 5 wrote them."""
    for name in [name for name in found if name.startswith(LIBRARY)]:
        found[RELEASED + name.removeprefix(LIBRARY)] = found.pop(name)


def narrow(entries: dict[str, Any]) -> dict[str, Any]:
    return {name: x.float() if isinstance(x, Tensor) and x.dtype == torch.float64 else x for name, x in entries.items()}


def test_a_folder_gives_the_librarys_logits(made: tuple[str, Path, Any]) -> None:
    kind, folder, library = made
    _, model = loaded(folder, **{name.replace(".", "__"): value for name, value in SETTINGS.items()})
    seen = micro_batch(config_of(CONFIGS[kind]), (2, 0, 1))
    with torch.no_grad():
        expected = library(**narrow(seen.theirs)).logits
        found = model.logits(narrow(seen.ours))
    assert expected.abs().max() > 0.5
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_run_of_a_folder_is_exported_as_that_folder(
    made: tuple[str, Path, Any], tmp_path: Path, cli_here: Cli
) -> None:
    """Also the tensors that nothing computes with: the last block of the tower, and the norm after it."""
    _, folder, _ = made
    assert_exported_as_it_was(folder, ONE_STEP, tmp_path, cli_here)


def test_a_config_of_its_own_describes_the_model_to_the_library(
    made: tuple[str, Path, Any], tmp_path: Path, cli_here: Cli
) -> None:
    """The config is written by both families, not kept: the settings alone describe the model."""
    kind, folder, library = made
    run = run_of(folder, ONE_STEP)
    run.directory = tmp_path / "runs" / "scratch"
    train(run)
    shutil.rmtree(run.directory / "published")
    result = cli_here("checkpoint", "export", "--to", "huggingface", "exported")
    assert result.returncode == 0, result.stderr
    assert any(name.startswith(RELEASED) for name in tensors(tmp_path / "exported"))
    again = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "exported", dtype=torch.float32, attn_implementation="eager"
    )
    seen = narrow(micro_batch(config_of(CONFIGS[kind]), (2, 0, 1)).theirs)
    with torch.no_grad():
        assert torch.equal(again(**seen).logits, library(**seen).logits)


def test_text_alone_is_sampled_as_the_library_computes_it(made: tuple[str, Path, Any]) -> None:
    """A run that only runs forward needs no pictures: the tower is then left out."""
    _, folder, library = made
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


def test_settings_that_contradict_the_folder_are_refused_with_the_field_of_the_decoder(
    made: tuple[str, Path, Any],
) -> None:
    _, folder, _ = made
    with pytest.raises(UsageError, match=r"  model\.decoder\.num_layers \(.*\): 2, but the weights need 3$"):
        run_of(folder, {**SETTINGS, "model.decoder.num_layers": 2})
    with pytest.raises(UsageError, match=r"  model\.decoder\.name \(.*\): 'gpt', but the weights need '.*'$"):
        run_of(folder, {**SETTINGS, "model.decoder": {"name": "gpt", "vocab_size": 61}})
    with pytest.raises(UsageError, match="the weights need"):
        run_of(folder, {**SETTINGS, "model.vision.feature_layer": -1})
    assert run_of(folder, {**SETTINGS, "model.decoder.num_layers": 3}).config.model.decoder.config.num_layers == 3


def test_a_folder_is_refused_on_text_alone(made: tuple[str, Path, Any]) -> None:
    _, folder, _ = made
    with pytest.raises(UsageError, match=r"micro batches of data/text have no 'patches', .* \(--data mock"):
        loaded(folder)


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
