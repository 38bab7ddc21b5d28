"""Every field of a config.json is honoured as the transformers library honours it, or refused by name."""

from typing import Any

import pytest

pytest.importorskip("transformers")

from form_claims import assert_refused, assert_rows_of_library
from mplug_t5 import T5
from mplug_t5.published import T5_FORM
from t5_models import TINY, config_of, distances
from transformers import T5Config

from mplug_nn import written_config
from mplug_nn.public_rows import ReadField


def without(*names: str, **fields: Any) -> dict[str, Any]:
    """The config.json of a tiny model with these fields, and without the named ones."""
    return {name: value for name, value in {**TINY, **fields}.items() if name not in names}


def library_config(given: dict[str, Any]) -> Any:
    return T5Config(**{name: value for name, value in given.items() if name != "model_type"})


def test_every_field_of_the_librarys_class_is_in_one_row_with_the_librarys_default() -> None:
    assert_rows_of_library(T5_FORM, T5Config)


@pytest.mark.parametrize(
    "given",
    [
        without("num_decoder_layers", "d_ff", "feed_forward_proj"),
        without("tie_word_embeddings", "layer_norm_epsilon", "relative_attention_max_distance"),
        without(feed_forward_proj="gated-silu", tie_word_embeddings=True),
        without(feed_forward_proj="gelu_new", dropout_rate=0.2, initializer_factor=0.5),
    ],
)
def test_what_the_library_makes_of_a_config_is_what_we_read(given: dict[str, Any]) -> None:
    """The library fills in what is absent and saves it; it saves how it scales the output beside a tie of its own."""
    own, again = config_of(given), config_of(library_config(given).to_dict())
    assert again.model_copy(update={"tie_embeddings": own.tie_embeddings}) == own
    assert library_config(given).scale_decoder_outputs is own.scales_output


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"is_encoder_decoder": False}, "'is_encoder_decoder' is false, but the family supports true only"),
        ({"is_decoder": True}, "'is_decoder' is true, but the family supports false only"),
        ({"feed_forward_proj": "gated-relu"}, "'feed_forward_proj' is 'gated-relu', but the family supports"),
        ({"num_layers": 0}, "'num_layers' is 0, but must be an integer"),
        ({"d_modle": 4}, "did you mean 'd_model'"),
        ({"layer_norm_epsilon": None}, "'layer_norm_epsilon' is null"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_a_sentence_with_its_name(fields: dict[str, Any], sentence: str) -> None:
    assert_refused(config_of, without(**fields), sentence)


OTHERS: dict[str, tuple[Any, ...]] = {
    "num_layers": (2,),
    "num_decoder_layers": (1, None),
    "hidden_size": (24,),
    "num_attention_heads": (2,),
    "head_dim": (4,),
    "ffn_hidden_size": (28,),
    "vocab_size": (62,),
    "activation": ("relu", "gelu", "gelu_tanh", "swiglu", "geglu"),
    "bias_ranges": (12,),
    "bias_reach": (33,),
    "norm_eps": (1e-2,),
    "tie_embeddings": (True,),
    "scale_output": (True, False),
    "dropout": (0.2,),
    "init_factor": (0.5,),
    "encoder_length": (7,),
    "start_token": (2,),
}
"""By setting, values of which at least one differs from that of the tiny model."""
WIDE = pytest.mark.wide("families")
QUICK = {("num_decoder_layers", 1), ("activation", "relu"), ("activation", "geglu"), ("scale_output", True)}
CASES = [
    pytest.param(name, value, id=f"{name} {value}", marks=() if (name, value) in QUICK else WIDE)
    for name, values in OTHERS.items()
    for value in values
]


def test_every_setting_has_another_value() -> None:
    assert {*OTHERS} == {*T5.Config.model_fields}


@pytest.mark.parametrize(("name", "value"), CASES)
def test_what_is_written_is_the_librarys_model_with_each_setting(name: str, value: Any) -> None:
    """Logits and gradients in fp64; what cannot be written is refused by its name."""
    base = config_of(TINY)
    config = T5.Config(**{**base.model_dump(), name: value})
    if (name, value) == ("activation", "geglu"):
        with pytest.raises(ValueError, match=r"cannot express .*activation"):
            written_config(T5, config)
        return
    fields = written_config(T5, config)
    rows = (row for row in T5_FORM.fields.values() if isinstance(row, ReadField) and row.training)
    kept = {one: getattr(config, one) for row in rows for one in row.settings}
    assert config_of(fields).model_copy(update=kept).computes_like(config)
    found = distances({**fields, "dropout_rate": 0.0})
    assert max(found.values()) < 1e-10, found


def test_every_preset_is_exported() -> None:
    for preset in T5.presets.values():
        config = T5.Config(**preset["model"])
        assert config_of(written_config(T5, config)).computes_like(config)
