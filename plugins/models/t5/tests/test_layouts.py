"""Layouts that T5 refuses. `tests/test_pairs.py` compares those that it computes with one process."""

from typing import Any

import pytest
from t5_models import SPANS

from mplug import UsageError
from mplug.commands import build_model
from mplug_testing.harness import tiny_run

SHAPE = {
    "model.name": "t5",
    "model.num_layers": 2,
    "model.num_decoder_layers": 3,
    "model.hidden_size": 32,
    "model.num_attention_heads": 4,
    "model.head_dim": 8,
    "model.ffn_hidden_size": 48,
    "model.vocab_size": 209,
    "model.bias_ranges": 8,
    "model.bias_reach": 10,
    "model.encoder_length": 23,
}
V1_1 = {**SHAPE, **SPANS}


@pytest.mark.parametrize(
    "layout", [{"parallel.layout": "cp2"}, {"parallel.layout": "pp2cp2", "parallel.pp.split": [3, 9]}]
)
def test_attention_by_parts_is_refused_before_launch(layout: dict[str, Any]) -> None:
    """Of the pipeline, the first stage has the encoder alone, which computes whole rows."""
    with pytest.raises(UsageError, match=r"does not support relative bias; set parallel\.cp\.method=ulysses"):
        build_model(tiny_run({**V1_1, **layout}))
