"""LLaVA keeps the contract of models, and its presets have the published sizes."""

from typing import Any

import pytest
import torch
from mplug_llava import Llava
from mplug_llava.build import build
from mplug_llava.config import LlavaConfig

from mplug.registry.bind_section import bind

SIZES = {"1.5-7b": 7.063, "1.5-13b": 13.351, "onevision-0.5b": 0.894, "onevision-7b": 8.030}
"""Parameters in billions."""


def config_of(preset: str, **more: Any) -> LlavaConfig:
    config, problems = bind(LlavaConfig, {**Llava.presets[preset]["model"], **more})
    assert not problems, problems
    return config  # type: ignore[no-any-return]


@pytest.mark.parametrize(("preset", "billions"), SIZES.items())
def test_a_preset_has_its_published_parameters(preset: str, billions: float) -> None:
    assert set(SIZES) == set(Llava.presets) - {"tiny"}
    config = config_of(preset)
    with torch.device("meta"):
        decoder = config.decoder.plugin(config.decoder.config).build_model()
        model = build(config, decoder, has_images=True)
    assert sum(one.numel() for one in model.parameters().values()) / 1e9 == pytest.approx(billions, abs=6e-4)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_attention_heads": 7}, "vision: num_attention_heads=7 does not divide hidden_size=64"),
        ({"patch_size": 33}, "vision: patch_size=33 is larger than image_size=32"),
        ({"feature_layer": 0}, "vision: feature_layer=0 must be between 1 and num_layers=3"),
        ({"feature_layer": -4}, "vision: feature_layer=-4 must be between 1 and num_layers=3"),
        ({"class_row": False, "features": "all"}, "vision: features='all' has no effect without class_row"),
        ({"patch_bias": True}, "vision: patch_bias cannot be used with class_row"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], sentence: str) -> None:
    tiny = Llava.presets["tiny"]["model"]
    _, problems = bind(LlavaConfig, {**tiny, "vision": {**tiny["vision"], **change}})
    assert [sentence in problem.sentence for problem in problems] == [True]
