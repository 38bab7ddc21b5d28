"""Qwen-VL keeps the contract of models on text, and its presets have the published sizes."""

from typing import Any

import pytest
import torch
from decoder_suites import FurtherDecoderSuite
from mplug_qwen_vl import QwenVL
from mplug_qwen_vl.build import build
from pydantic import ValidationError
from tiny_models import DECODER

ALTERNATING = {"model.head_dim": 8, "model.rope_division": "alternating", "model.rope_sections": [2, 1, 1]}
PLAIN = {"rope_division": None, "rope_sections": []}


@pytest.mark.wide("families", tests=["test_a_layout_gives_the_run_of_one_process"])
class TestQwenVLOfText(FurtherDecoderSuite):
    """Without a tower: the decoder alone, which data without images can train."""

    plugin = "qwen-vl"
    settings = {**DECODER, **ALTERNATING}
    layouts = ("tp2",)
    own_beside = dict.fromkeys(("head_dim", "rope_fraction"), PLAIN)
    without_effect = {
        "rope_division": "all coordinates of text are equal",
        "rope_sections": "all coordinates of text are equal",
        "vision": "a tower needs images; test_beside_library.py tests it",
    }

    def reference(self, weights: Any, batch: Any, config: Any) -> Any:
        pytest.skip("a decoder without a tower has no published form; test_beside_library.py compares the whole model")


SIZES = {
    "2.5-3b": 3_754_622_976,
    "2.5-7b": 8_292_166_656,
    "3-2b": 2_127_532_032,
    "3-4b": 4_437_815_808,
    "3-8b": 8_767_123_696,
    "3-32b": 33_357_390_064,
    "3-30b-a3b": 31_070_754_032,
    "3-235b-a22b": 235_670_022_896,
}
"""Parameters of the released weights."""


def parameters(preset: str) -> dict[str, int]:
    with torch.device("meta"):
        model = build(QwenVL.Config(**QwenVL.presets[preset]["model"]), has_images=True)
    return {name: parameter.numel() for name, parameter in model.parameters().items()}


@pytest.mark.parametrize(("preset", "published"), SIZES.items())
def test_a_preset_has_its_published_parameters(preset: str, published: int) -> None:
    assert set(SIZES) == set(QwenVL.presets) - {"tiny", "2.5-72b"}
    assert sum(parameters(preset).values()) == published


def test_the_largest_of_the_second_generation_has_about_73_billion_parameters() -> None:
    assert sum(parameters("2.5-72b").values()) / 1e9 == pytest.approx(73.4, abs=0.05)


TINY = QwenVL.presets["tiny"]["model"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rope_division": None}, "rope_sections has no effect without rope_division"),
        ({"rope_division": "axial", "rope_sections": ()}, "needs rope_division, and three numbers as rope_sections"),
        ({"num_layers": 1}, "deepstack_blocks has 2 entries, one for each of the first decoder blocks"),
        ({"num_mtp_layers": 1}, "num_mtp_layers=1 cannot be used with a tower"),
        ({"rope_sections": (6, 5, 6)}, "needs sections that sum to 16 pairs"),
        ({"vision": {"deepstack_blocks": [2, 1]}}, "deepstack_blocks=[2, 1] must be ascending numbers of blocks below"),
        ({"vision": {"num_attention_heads": 32}}, "must divide hidden_size=64 into widths that 4 divides"),
        ({"vision": {"full_attention_blocks": [1]}}, "full_attention_blocks has no effect without window_size"),
        ({"vision": {"window_size": 15}}, "window_size=15 pixels are less than a merged square of 16"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], sentence: str) -> None:
    vision = {**TINY["vision"], **change.get("vision", {})}
    with pytest.raises(ValidationError) as refused:
        QwenVL.Config(**{**TINY, **change, "vision": vision})
    assert sentence in str(refused.value)
